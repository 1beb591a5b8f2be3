"""Until when chunks may be dropped that a controller has said it will drop."""

from __future__ import annotations

import secrets
import time
from collections import OrderedDict
from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable

FENCE_SECONDS: Final = 30.0
MOST: Final = 4096
"""Fences that are remembered; the oldest go."""


class _Fence(NamedTuple):
    namespace: bytes
    digests: frozenset[bytes]
    until: float


class Fences:
    """Of one node. Lives on the storage loop."""

    def __init__(self) -> None:
        self._fences: OrderedDict[int, _Fence] = OrderedDict()

    def give(self, namespace: bytes, digests: Iterable[bytes]) -> int:
        """A number under which these may be dropped for `FENCE_SECONDS`."""
        number = secrets.randbits(62) + 1  # a start of the service after this one knows none of them
        self._fences[number] = _Fence(namespace, frozenset(digests), time.monotonic() + FENCE_SECONDS)
        if len(self._fences) > MOST:
            self._fences.popitem(last=False)
        return number

    def end(self, namespace: bytes, digests: Iterable[bytes]) -> None:
        """These come anew: nobody who does not know that may drop them."""
        coming = frozenset(digests)
        for number, fence in list(self._fences.items()):
            if fence.namespace == namespace and not coming.isdisjoint(fence.digests):
                del self._fences[number]

    def allow(self, number: int, namespace: bytes, digests: Iterable[bytes]) -> bool:
        """Whether these may be dropped now."""
        fence = self._fences.get(number)
        return (
            fence is not None
            and fence.namespace == namespace
            and time.monotonic() <= fence.until
            and fence.digests.issuperset(digests)
        )
