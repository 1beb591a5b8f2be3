"""Where jobs outlive the controller that runs them."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Final

from lmkv.controller.records import Ended, Event, Plan

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Collection, Iterable

KEPT_JOBS: Final = 1000
"""Ended jobs that are remembered, newest first."""
KEPT_SECONDS: Final = 86400.0
KEPT_CHUNKS: Final = 1 << 20
"""In all of them together: 32 bytes each, in memory and in the file."""


class Journal:
    """Events of jobs, by job. This one keeps them in memory only; all methods run on the controller's loop.

    Attributes:
        shared: other controllers write it, too, and may go on with this one's jobs.
    """

    shared = False

    def __init__(self) -> None:
        self._jobs: OrderedDict[str, list[Event]] = OrderedDict()
        self._keys: dict[str, str] = {}
        self._open: set[str] = set()
        self._locks: dict[bytes, asyncio.Lock] = {}

    async def open(self) -> dict[str, list[Event]]:
        """Jobs of an earlier life, oldest first, which are this controller's now.

        Raises:
            ConfigError: the journal cannot be used.
        """
        return {}

    async def find(self, key: str) -> str | None:
        """The job that has this idempotency key (`Plan.key`)."""
        return self._keys.get(key)

    async def begin(self, job: str, plan: Plan) -> str | None:
        """Write a new job down; or, if there is one with the same idempotency key, its id, and nothing is written.

        Raises:
            BackendError: it cannot be written.
        """
        if plan.key and (known := self._keys.get(plan.key)) is not None:
            return known
        if plan.key:
            self._keys[plan.key] = job
        try:
            await self.add(job, plan)
        except BaseException:
            self._keys.pop(plan.key, None)
            raise
        return None

    async def add(self, job: str, event: Event) -> None:
        """Write an event down. It outlives the process when this returns.

        Raises:
            BackendError: it cannot be written.
        """
        self._jobs.setdefault(job, []).append(event)
        (self._open.discard if isinstance(event, Ended) else self._open.add)(job)

    async def read(self, job: str) -> list[Event]:
        """Everything about a job; empty: it is unknown."""
        return list(self._jobs.get(job, ()))

    async def recent(self, count: int) -> list[str]:
        """Ids of the newest jobs, newest first."""
        return list(reversed(self._jobs))[:count]

    async def forget(self, job: str) -> None:
        """An old job is of no interest any more."""
        events = self._jobs.pop(job, [])
        for event in events:
            if isinstance(event, Plan):
                self._keys.pop(event.key, None)

    async def adopt(self, running: Collection[str]) -> dict[str, list[Event]]:
        """Jobs that are not over and that nobody runs; they are this controller's from now on.

        Args:
            running: those that it runs already.
        """
        return {job: list(self._jobs[job]) for job in self._open - set(running)}

    async def keep(self, jobs: Collection[str]) -> set[str]:
        """These jobs are still run here. Returns those that somebody asked another controller to cancel."""
        del jobs
        return set()

    async def mine(self, job: str) -> bool:
        """Whether the job is still this controller's: another one may have gone on with it while this one stood still.

        Raises:
            BackendError: that is not to be known.
        """
        del job
        return True

    async def ask_cancel(self, job: str) -> None:
        """Whoever runs the job is to cancel it."""

    @asynccontextmanager
    async def moving(self, namespaces: Iterable[bytes]) -> AsyncIterator[None]:
        """Only one job at a time moves chunks of a namespace away; another one might be bringing them back."""
        locks = [self._locks.setdefault(namespace, asyncio.Lock()) for namespace in sorted(namespaces)]
        taken: list[asyncio.Lock] = []
        try:
            for lock in locks:
                await lock.acquire()
                taken.append(lock)
            yield
        finally:
            for lock in reversed(taken):
                lock.release()

    async def close(self) -> None:
        """Stop. Idempotent."""
