"""What a client says that it has counted, looked at before it is believed."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final

from lmkv.errors import ProtocolError
from lmkv.observe.families import BY_NAME, DROPS
from lmkv.types import MissReason

if TYPE_CHECKING:
    from collections.abc import Iterable

    from lmkv.observe.clients import ClientMetrics
    from lmkv.service.protocol import Observe

_REASONS: Final = frozenset(reason.value for reason in MissReason) | DROPS


class Counts:
    """Takes the `Observe` messages of one client. No name, label or value that a client makes up becomes a series."""

    def __init__(self, metrics: ClientMetrics, tiers: Iterable[str]) -> None:
        self._metrics = metrics
        self._values = {"tier": frozenset(tiers), "reason": _REASONS}

    def __call__(self, message: Observe) -> None:
        """Count all of it that can be.

        Raises:
            ProtocolError: something in it cannot be counted; the rest has been.
        """
        wrong = [name for name, value in message.counts.items() if not self._count(name, value)]
        if wrong:
            raise ProtocolError(f"{wrong[0][:200]!r} is no counter that a client may raise, or not by so much")

    def _count(self, name: str, value: float) -> bool:
        family, *rest = name.split("|")
        known = BY_NAME.get(family)
        labels = dict(label.split("=", 1) for label in rest if "=" in label)
        if known is None or not known.client or len(rest) != len(labels) or set(labels) != set(known.labels):
            return False
        if not all(text in self._values[label] for label, text in labels.items()):
            return False
        if not 0 <= value < math.inf:
            return False
        self._metrics.inc(family, value, **labels)
        return True
