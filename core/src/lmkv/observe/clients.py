"""Who counts: the labels that a client's series carry, and a bound on how many clients have series of their own."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from lmkv.observe.log import mask

if TYPE_CHECKING:
    from lmkv.observe.metrics import Metrics, Series

MOST: Final = 256
"""Clients that have series of their own at a time; above it, those that left first are added up under `OTHER`."""
VALUE_CHARACTERS: Final = 128
UNKNOWN: Final = "unknown"
OTHER: Final = "other"
_HEAD: Final = 40


def label_value(text: str) -> str:
    """`text` as the value of a label: short, printable, valid UTF-8, no password of a URL in it; never empty.

    Of what is too long the end counts more: it is where the names of models differ.
    """
    printable = "".join(c if c.isprintable() else "?" for c in mask(text))
    if len(printable) > VALUE_CHARACTERS:
        printable = f"{printable[:_HEAD]}…{printable[_HEAD + 1 - VALUE_CHARACTERS :]}"
    return printable or UNKNOWN


@dataclass(frozen=True, slots=True)
class Who:
    """What a client says of itself."""

    model: str = ""
    """Name under which the engine serves its model."""
    rank: str = ""
    """Number of the engine's rank, or `scheduler`."""
    instance: str = ""
    """Name of the engine, the same for all its ranks."""

    def labels(self) -> dict[str, str]:
        """As labels, whatever a client has sent."""
        values = (("model", self.model), ("rank", self.rank), ("instance", self.instance))
        return {name: label_value(value) for name, value in values}


NOBODY: Final = Who()


class Clients:
    """Gives clients their series. On one thread.

    A counter must not vanish while sums are made of it, and must not stay for ever either: engines are started anew
    under new names. So the series of clients that have gone stay until there are too many, and are then added to those
    of `OTHER`, oldest first.
    """

    def __init__(self, metrics: Metrics, most: int = MOST) -> None:
        self._metrics = metrics
        self._most = most
        self._connected: dict[Who, int] = {}
        self._gone: OrderedDict[Who, None] = OrderedDict()

    def open(self, who: Who) -> ClientMetrics:
        """The series of a client that has come; it closes them when it goes."""
        who = Who(**who.labels())
        if who not in self._connected and who not in self._gone:
            while len(self._connected) + len(self._gone) >= self._most and self._gone:
                self._fold(self._gone.popitem(last=False)[0])
            if len(self._connected) >= self._most:
                who = Who(OTHER, OTHER, OTHER)
        self._gone.pop(who, None)
        self._connected[who] = self._connected.get(who, 0) + 1
        return ClientMetrics(self._metrics, who, self)

    def closed(self, who: Who) -> None:
        """For `ClientMetrics`."""
        self._connected[who] -= 1
        if not self._connected[who]:
            del self._connected[who]
            self._gone[who] = None

    def _fold(self, who: Who) -> None:
        self._metrics.fold(who.labels(), Who(OTHER, OTHER, OTHER).labels())


class ClientMetrics:
    """The counters of one client: every count carries its model, rank and instance. On one thread."""

    def __init__(self, metrics: Metrics, who: Who, clients: Clients) -> None:
        self._metrics = metrics
        self._who = who
        self._clients = clients
        self._labels = who.labels()
        self._bound: dict[tuple[str, tuple[tuple[str, str], ...]], Series] = {}
        self._open = True

    def inc(self, name: str, value: float = 1, **labels: str) -> None:
        """Add `value`, which is not negative, to a counter. What comes after the client's end is not counted."""
        if not self._open:
            return
        key = (name, tuple(labels.items()))
        found = self._bound.get(key)
        if found is None:
            found = self._bound[key] = self._metrics.counter(name, **self._labels, **labels)
        if value < 0:
            raise ValueError(f"{name}: a counter cannot go down by {-value}")
        found.inc(value)

    def close(self) -> None:
        """The client has gone. Idempotent."""
        if self._open:
            self._open = False
            self._clients.closed(self._who)
