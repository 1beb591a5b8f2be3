"""How much of its time and bandwidth a node gives to others, so that its own engine is not hurt."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable

BURST: Final = 0.25
"""Seconds of rest that may be owed before anybody has to rest: a short read goes at full speed."""


class Pace:
    """The `Throttle` of a node's transports, and the queue of those who want to be served. Thread-safe.

    Args:
        share: part of a processor's time that serving may take, more than 0 and at most 1.
        bandwidth: bytes per second; None: no limit.
        clock: seconds.
    """

    def __init__(self, share: float, bandwidth: int | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self._share = share
        self._bandwidth = bandwidth
        self._clock = clock
        self._lock = threading.Lock()
        self._free_at = clock()
        """When all that has been served would have been served at the pace that is allowed."""

    def __call__(self, nbytes: int, seconds: float) -> float:
        """So much was served; how many seconds to rest. See `lmkv.peer.transport.Throttle`."""
        cost = 0.0 if self._share >= 1.0 else seconds / self._share
        if self._bandwidth is not None:
            cost = max(cost, nbytes / self._bandwidth)
        with self._lock:
            now = self._clock()
            self._free_at = max(self._free_at, now - BURST) + cost
            return max(0.0, self._free_at - now)

    @property
    def rest(self) -> float:
        """Seconds until more may be served; 0: now."""
        return max(0.0, self._free_at - self._clock())

    @property
    def load(self) -> float:
        """How much of what is allowed others take now: 0 nothing, 1 all of it."""
        return min(1.0, max(0.0, 1.0 + (self._free_at - self._clock()) / BURST))
