"""Where jobs outlive the controller that runs them."""

from __future__ import annotations

import asyncio
import fcntl
import logging
import os
from collections import OrderedDict
from contextlib import asynccontextmanager
from typing import IO, TYPE_CHECKING, Final

import msgspec

from lmkv.controller.records import Ended, Event, Plan, decode, encode
from lmkv.errors import BackendError, ConfigError, ProtocolError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Collection, Iterable
    from pathlib import Path

log = logging.getLogger("lmkv.controller")

KEPT_JOBS: Final = 1000
"""Ended jobs that are remembered, newest first."""
KEPT_SECONDS: Final = 86400.0
_ID: Final = 64


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


class FileJournal(Journal):
    """A file of JSON lines, ``[job, event]``. Each is on the disk before anybody acts on it.

    One controller at a time has the file (a lock that goes with the process). Rewritten at each start, without what is
    too old; a line that was being written when the process ended is left out.
    """

    def __init__(self, path: Path) -> None:
        super().__init__()
        self._path = path
        self._file: IO[bytes] | None = None
        self._writing = asyncio.Lock()

    async def open(self) -> dict[str, list[Event]]:
        """See `Journal.open`."""
        jobs = await asyncio.to_thread(self._recall)
        for job, events in jobs.items():
            self._jobs[job] = events
            if not isinstance(events[-1], Ended):
                self._open.add(job)
            if isinstance(events[0], Plan) and events[0].key:
                self._keys[events[0].key] = job
        return {job: list(events) for job, events in jobs.items()}

    async def add(self, job: str, event: Event) -> None:
        """See `Journal.add`."""
        line = msgspec.json.encode([job, msgspec.Raw(encode(event))]) + b"\n"
        async with self._writing:
            writing = asyncio.ensure_future(asyncio.to_thread(self._write, line))
            try:
                await asyncio.shield(writing)
            except asyncio.CancelledError:
                await asyncio.wait([writing])  # no second line may begin within this one
                raise
            except OSError as error:
                raise BackendError(f"journal {self._path}: cannot be written: {error.strerror}") from error
        await super().add(job, event)

    async def close(self) -> None:
        """See `Journal.close`."""
        async with self._writing:
            file, self._file = self._file, None
            if file is not None:
                file.close()

    def _write(self, line: bytes) -> None:
        file = self._file
        if file is None:
            raise OSError(0, "the journal is closed")
        at = file.tell()
        try:
            file.write(line)
            file.flush()
            os.fsync(file.fileno())
        except OSError:
            # A part of a line must not stand before the next one. Unbuffered: nothing else is left to be written.
            file.seek(at)
            file.truncate(at)
            raise

    def _recall(self) -> dict[str, list[Event]]:
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            file = self._path.open("ab+", buffering=0)
        except OSError as error:
            raise ConfigError(f"--journal {self._path}: cannot be opened: {error.strerror}") from error
        self._lock(file)
        file.seek(0)
        jobs = _young(_parse(file.read(), self._path))
        self._file = self._rewritten(file, jobs)
        return jobs

    def _lock(self, file: IO[bytes]) -> None:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            file.close()
            raise ConfigError(
                f"--journal {self._path}: another controller has it; each needs its own, or a directory in Redis",
                kind="in-use",
            ) from None

    def _rewritten(self, old: IO[bytes], jobs: dict[str, list[Event]]) -> IO[bytes]:
        """A new file in place of the old one, which is not touched until all of the new one is on the disk."""
        path = self._path.with_name(self._path.name + ".new")
        try:
            new = path.open("wb", buffering=0)
            new.write(b"".join(
                msgspec.json.encode([job, msgspec.Raw(encode(event))]) + b"\n"
                for job, events in jobs.items() for event in events
            ))  # fmt: skip
            os.fsync(new.fileno())
            self._lock(new)
            path.replace(self._path)
            folder = os.open(self._path.parent, os.O_RDONLY)
            try:
                os.fsync(folder)
            finally:
                os.close(folder)
        except OSError as error:
            raise ConfigError(f"--journal {self._path}: cannot be written: {error.strerror}") from error
        finally:
            old.close()
        return new


def _parse(content: bytes, path: Path) -> dict[str, list[Event]]:
    jobs: dict[str, list[Event]] = {}
    lines = content.split(b"\n")
    if lines.pop():
        log.warning("journal %s: the last line was not finished; it is left out", path)
    for number, line in enumerate(lines, 1):
        try:
            job, raw = msgspec.json.decode(line, type=tuple[str, msgspec.Raw])
            event = decode(bytes(raw))
        except (msgspec.MsgspecError, ProtocolError) as error:
            raise ConfigError(
                f"--journal {path}, line {number}: {error}; move the file away to start without its jobs"
            ) from error
        if isinstance(event, Plan) or job in jobs:
            jobs.setdefault(job[:_ID], []).append(event)
    return jobs


def _young(jobs: dict[str, list[Event]]) -> dict[str, list[Event]]:
    """Without the jobs that ended long ago, or before many others."""
    ends = {job: events[-1].at for job, events in jobs.items() if isinstance(events[-1], Ended)}
    newest = sorted(ends, key=lambda job: ends[job], reverse=True)
    limit = max(ends.values(), default=0.0) - KEPT_SECONDS
    gone = {*newest[KEPT_JOBS:], *(job for job in newest if ends[job] < limit)}
    return {job: events for job, events in jobs.items() if job not in gone}
