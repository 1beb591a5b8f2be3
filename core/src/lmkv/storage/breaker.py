"""Circuit breaker: a tier that keeps failing is left alone, and tried again by one probe per interval."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable


class Breaker:
    """Counts consecutive failures of one direction (reads or writes) of a tier. Lives on the storage loop.

    Args:
        failures: consecutive failures that open it.
        probe: seconds between two probes while it is open.
    """

    __slots__ = ("_clock", "_failures", "_limit", "_next_probe", "_probe")

    def __init__(self, failures: int, probe: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._limit = failures
        self._probe = probe
        self._clock = clock
        self._failures = 0
        self._next_probe = 0.0

    @property
    def open(self) -> bool:
        """Whether calls are refused (but for the probes)."""
        return self._failures >= self._limit

    def allow(self) -> bool:
        """Whether a call may go out now; while open, True once per interval."""
        if self._failures < self._limit:
            return True
        now = self._clock()
        if now < self._next_probe:
            return False
        self._next_probe = now + self._probe
        return True

    def succeeded(self) -> None:
        """A call did its work, be it a hit or a miss."""
        self._failures = 0

    def failed(self) -> None:
        """A call raised, overran its deadline, or failed for every key."""
        self._failures += 1
        if self._failures == self._limit:
            self._next_probe = self._clock() + self._probe
