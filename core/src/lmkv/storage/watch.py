"""Finds out, in the background, when a tier that was left alone works again. No request ever pays for it.

While a breaker of the tier is open, its backend is asked once per interval, in a thread of the tier's driver: for its
health, and for a frame that nobody stored, which goes the way that loads go. A question that hangs takes up one thread,
and no other is asked until it has returned.
"""

from __future__ import annotations

import asyncio
import logging
import mmap
import os
from typing import TYPE_CHECKING, Final

from lmkv.errors import ClosedError
from lmkv.memory import MemoryObject
from lmkv.storage.breaker import Breaker, State
from lmkv.storage.driver import PROBE, Driver
from lmkv.types import ALIGNMENT, ChunkKey, Health, HealthState

if TYPE_CHECKING:
    from collections.abc import Callable

    from lmkv.backend import StorageBackendInterface

log = logging.getLogger(__name__)

_NOWHERE: Final = bytes(16)
"""A namespace that nothing is stored in."""


class Watch:
    """The breakers of one tier, and what closes them again. Lives on the storage loop.

    Args:
        tier: its name.
        interval: seconds between two questions.
        deadline: seconds after which an answer comes too late to be a good one.
        opened: called whenever a breaker opens.

    Attributes:
        reads: of loads and `contains`. After a good answer of the backend they go out again; the first result decides.
        writes: of stores; after a good answer, one store at a time goes out until one has succeeded.
        last_error: what the backend said last when it was asked, for people.
    """

    def __init__(
        self,
        tier: str,
        driver: Driver,
        backend: StorageBackendInterface,
        *,
        failures: int,
        interval: float,
        deadline: float,
        opened: Callable[[], None],
    ) -> None:
        self.reads = Breaker(failures)
        self.writes = Breaker(failures, background=True)
        self.reads.opened = self.writes.opened = self._opened
        self.last_error = ""
        self._tier = tier
        self._driver = driver
        self._backend = backend
        self._interval = interval
        self._deadline = deadline
        self._on_open = opened
        self._timer: asyncio.TimerHandle | None = None
        self._asking = False
        self._patience: asyncio.TimerHandle | None = None
        self._ended = False

    @property
    def open(self) -> bool:
        """Something is refused."""
        return self.reads.open or self.writes.open

    def hung(self) -> None:
        """Every thread of the driver hangs in the backend: nothing can be served."""
        self.reads.trip()
        self.writes.trip()

    def ask(self) -> None:
        """Ask the backend now, unless a question is under way. If it is down, both breakers open."""
        if self._asking or self._ended:
            return
        loop = asyncio.get_running_loop()

        def done(value: object, error: BaseException | None, seconds: float) -> None:
            try:
                loop.call_soon_threadsafe(self._answered, value, error, seconds)
            except RuntimeError:  # the loop has been closed: nobody is left to tell
                return

        try:
            self._driver.submit(lambda: look(self._backend), done=done, priority=PROBE)
        except ClosedError:
            return
        self._asking = True
        self._patience = loop.call_later(self._deadline, self._silent)

    def stop(self) -> None:
        """Ask no more."""
        self._ended = True
        for timer in (self._timer, self._patience):
            if timer is not None:
                timer.cancel()

    def _opened(self) -> None:
        log.warning("tier %s: left alone after failures, asked again every %g s", self._tier, self._interval,
                    extra={"key": ("open", self._tier)})  # fmt: skip
        self._later()
        self._on_open()

    def _later(self) -> None:
        if self._timer is None and not self._ended:
            self._timer = asyncio.get_running_loop().call_later(self._interval, self._due)

    def _due(self) -> None:
        self._timer = None
        if self.open:
            self.ask()
            self._later()

    def _silent(self) -> None:
        """The question has not been answered in time; it goes on hanging."""
        self.last_error = f"no answer within {self._deadline:g} s"
        self.hung()

    def _answered(self, value: object, error: BaseException | None, seconds: float) -> None:
        self._asking = False
        if self._patience is not None:
            self._patience.cancel()
        problem = ""
        if error is not None:
            problem = f"{type(error).__name__}: {error}"
        elif not isinstance(value, Health) or value.state is HealthState.DOWN:
            problem = value.detail if isinstance(value, Health) else "no health"
        elif seconds > self._deadline:
            problem = f"answered after {seconds:.1f} s"
        self.last_error = problem
        if problem:
            log.debug("tier %s: %s", self._tier, problem)
            self.hung()
            return
        was = self.open
        self.reads.retry()
        self.writes.retry()
        if was:
            log.info("tier %s: answers again", self._tier, extra={"key": ("answers", self._tier)})

    def health(self, error: str) -> Health:
        """What the breakers say; `error` is what went wrong last in a call."""
        what = f"; last: {self.last_error or error}" if self.last_error or error else ""
        if self.reads.open:
            return Health(HealthState.DOWN, f"off after failures{what}")
        if self.writes.open:
            return Health(HealthState.DEGRADED, f"takes no stores after failures{what}")
        if self.writes.state is State.TRIAL:
            return Health(HealthState.OK, f"answers again, stores are on trial{what}")
        return Health(HealthState.OK)


def look(backend: StorageBackendInterface) -> Health:
    """Ask a backend whether it can be used: its own word, then a read of what is not there. Blocks; may raise."""
    health = backend.health()
    if health.state is HealthState.DOWN:
        return health
    key = ChunkKey(_NOWHERE, 0, os.urandom(32))
    claims = backend.capabilities
    if claims.registered_memory or claims.device_memory:
        backend.contains([key])
        return health
    [outcome] = backend.get([key], [MemoryObject.over(memoryview(mmap.mmap(-1, ALIGNMENT)))])
    if outcome.error is not None:
        raise outcome.error
    return health
