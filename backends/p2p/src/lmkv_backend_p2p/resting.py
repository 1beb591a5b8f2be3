"""Peers that failed: left alone, and asked again in the background. Nobody who waits for frames pays for it."""

from __future__ import annotations

import logging
import math
import threading
import time
from typing import TYPE_CHECKING, Final

from lmkv.errors import LmkvError

if TYPE_CHECKING:
    from collections.abc import Callable
    from concurrent.futures import Future

log = logging.getLogger(__name__)

ASK_SECONDS: Final = 5.0
"""For the answer to the question in the background."""


class Resting:
    """Thread-safe.

    Args:
        seconds: for which a peer that failed is not asked at all.
        ask: begins to ask a peer something, for so many seconds at most.
    """

    def __init__(self, seconds: float, ask: Callable[[str, float], Future[object]]) -> None:
        self._seconds = seconds
        self._ask = ask
        self._until: dict[str, float] = {}
        self._lock = threading.Lock()

    def failed(self, address: str, why: object) -> None:
        """Leave it alone from now on."""
        with self._lock:
            begins = address not in self._until
            self._until[address] = time.monotonic() + self._seconds
        if begins:
            log.warning("peer %s: %s", address, why, extra={"key": ("p2p", address)})

    def recovered(self, address: str) -> None:
        """It has answered."""
        with self._lock:
            ended = self._until.pop(address, None) is not None
        if ended:
            log.info("peer %s answers again", address)

    def well(self, address: str) -> bool:
        """It may be asked. One that has rested is asked in the background first, and is well once it has answered."""
        with self._lock:
            until = self._until.get(address)
            if until is None or until > time.monotonic():
                return until is None
            self._until[address] = math.inf
        try:
            self._ask(address, ASK_SECONDS).add_done_callback(lambda future: self._answered(address, future))
        except LmkvError as e:
            self.failed(address, e)
        return False

    def _answered(self, address: str, future: Future[object]) -> None:
        if future.cancelled() or future.exception() is not None:
            self.failed(address, "still no answer")
        else:
            self.recovered(address)
