"""Nothing that goes wrong in lmkv may reach a thread of vLLM: it is counted, logged once per interval, and a miss."""

from __future__ import annotations

import functools
import logging
import threading
import time
from typing import TYPE_CHECKING, Any, Final, ParamSpec, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

P = ParamSpec("P")
T = TypeVar("T")

logger = logging.getLogger("lmkv.vllm")

INTERVAL: Final = 30.0
"""Seconds between two log lines about the same place."""


def join_logging() -> None:
    """Let what lmkv logs in this process go where vLLM's own log goes, in its form."""
    ours, theirs = logging.getLogger("lmkv"), logging.getLogger("vllm")
    if ours.handlers or not theirs.handlers:
        return
    for handler in theirs.handlers:
        ours.addHandler(handler)
    ours.setLevel(theirs.level)
    ours.propagate = False


class Incidents:
    """Errors caught at the seam, by place. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._last: dict[str, float] = {}
        self._silent: dict[str, int] = {}
        self.counts: dict[str, int] = {}

    def note(self, place: str, text: str, *, error: BaseException | None = None, level: int = logging.WARNING) -> None:
        """Count one incident at `place`; log it unless the last line about that place is younger than the interval."""
        now = time.monotonic()
        with self._lock:
            self.counts[place] = self.counts.get(place, 0) + 1
            if now - self._last.get(place, -INTERVAL) < INTERVAL:
                self._silent[place] = self._silent.get(place, 0) + 1
                return
            self._last[place] = now
            silent = self._silent.pop(place, 0)
        more = f" ({silent} more like this in between)" if silent else ""
        logger.log(level, "%s: %s%s", place, text, more, exc_info=error)


INCIDENTS: Final = Incidents()
"""Of this process."""


def guarded(default: Callable[[], Any]) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Make a method that vLLM calls safe: an exception in it is noted and `default()` is returned.

    `default` makes the answer that means *nothing cached, nothing to do*.
    """

    def wrap(call: Callable[P, T]) -> Callable[P, T]:
        @functools.wraps(call)
        def safe(*args: P.args, **kwargs: P.kwargs) -> T:
            try:
                return call(*args, **kwargs)
            except Exception as error:  # noqa: BLE001  whatever it is, the engine must not feel it
                INCIDENTS.note(call.__qualname__, f"{type(error).__name__}: {error}", error=error, level=logging.ERROR)
                nothing: T = default()
                return nothing

        return safe

    return wrap
