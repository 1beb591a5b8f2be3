"""Jobs in a file, for a controller that is alone."""

from __future__ import annotations

import asyncio
import logging
import os
from typing import TYPE_CHECKING, BinaryIO, Final

import msgspec

from lmkv.controller.journal import KEPT_CHUNKS, KEPT_JOBS, KEPT_SECONDS, Journal
from lmkv.controller.records import Ended, Event, Plan, decode, encode
from lmkv.errors import BackendError, ClosedError, ConfigError, ProtocolError
from lmkv.service.files import Lock

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

log = logging.getLogger("lmkv.controller")

REWRITE_BYTES: Final = 64 << 20
"""A file of this size is rewritten without what is forgotten; then again at twice what is left."""

_Jobs = dict[str, list[Event]]


class FileJournal(Journal):
    """A file of JSON lines, ``[job, event]``. Each is on the disk before anybody acts on it.

    One controller at a time has the file (a lock beside it, that goes with the process). Rewritten at each start and
    when it has grown, without what is too old; a line that was being written when the process ended is left out.
    """

    def __init__(self, path: Path) -> None:
        super().__init__()
        self._path = path
        self._lock = Lock(f"{path}.lock")
        self._file: BinaryIO | None = None
        self._writing = asyncio.Lock()
        self._rewrite_at = REWRITE_BYTES

    async def open(self) -> _Jobs:
        """See `Journal.open`."""
        try:
            jobs = await asyncio.to_thread(self._recall)
        except BaseException:
            self._lock.release()
            raise
        for job, events in jobs.items():
            self._jobs[job] = events
            if not isinstance(events[-1], Ended):
                self._open.add(job)
            if isinstance(events[0], Plan) and events[0].key:
                self._keys[events[0].key] = job
        return {job: list(events) for job, events in jobs.items()}

    async def add(self, job: str, event: Event) -> None:
        """See `Journal.add`."""
        async with self._writing:
            writing = asyncio.ensure_future(asyncio.to_thread(self._write, _line(job, event)))
            try:
                await asyncio.shield(writing)
            except asyncio.CancelledError:
                await asyncio.wait([writing])  # no second line may begin within this one
                raise
            except OSError as error:
                raise BackendError(f"journal {self._path}: cannot be written: {error.strerror}") from error
            await super().add(job, event)
            if self._file is not None and self._file.tell() > self._rewrite_at:
                await asyncio.to_thread(self._shrink, dict(self._jobs))

    async def close(self) -> None:
        """See `Journal.close`."""
        async with self._writing:
            file, self._file = self._file, None
            if file is not None:
                file.close()
        self._lock.release()

    def _write(self, line: bytes) -> None:
        file = self._file
        if file is None:
            raise ClosedError(f"journal {self._path}: is closed")
        at = file.tell()
        try:
            _put(file, line)
        except OSError:
            file.seek(at)  # a part of a line must not stand before the next one
            file.truncate(at)
            raise

    def _recall(self) -> _Jobs:
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            free = self._lock.acquire()
            content = self._path.read_bytes() if self._path.exists() else b""
        except OSError as error:
            raise ConfigError(f"--journal {self._path}: cannot be opened: {error.strerror}") from error
        if not free:
            raise ConfigError(
                f"--journal {self._path}: another controller has it; each needs its own, or a directory in Redis",
                kind="in-use",
            )
        jobs = _young(_parse(content, self._path))
        try:
            self._file = self._rewritten(jobs)
        except OSError as error:
            raise ConfigError(f"--journal {self._path}: cannot be written: {error.strerror}") from error
        return jobs

    def _shrink(self, jobs: _Jobs) -> None:
        old = self._file
        try:
            self._file = self._rewritten(jobs)
        except OSError as error:
            log.warning("journal %s: stays long: %s", self._path, error.strerror, extra={"key": "journal-shrink"})
        else:
            if old is not None:
                old.close()
        if self._file is not None:
            self._rewrite_at = max(REWRITE_BYTES, 2 * self._file.tell())

    def _rewritten(self, jobs: Mapping[str, list[Event]]) -> BinaryIO:
        """A new file in place of the old one, which is not touched until all of the new one is on the disk."""
        path = self._path.with_name(self._path.name + ".new")
        new: BinaryIO = path.open("wb", buffering=0)
        try:
            _put(new, b"".join(_line(job, event) for job, events in jobs.items() for event in events))
            path.replace(self._path)
            folder = os.open(self._path.parent, os.O_RDONLY)
            try:
                os.fsync(folder)
            finally:
                os.close(folder)
        except OSError:
            new.close()
            raise
        return new


def _line(job: str, event: Event) -> bytes:
    return msgspec.json.encode([job, msgspec.Raw(encode(event))]) + b"\n"


def _put(file: BinaryIO, content: bytes) -> None:
    """Write all of it and wait until it is on the disk."""
    left = memoryview(content)
    while left:
        left = left[file.write(left) :]  # a disk that becomes full takes a part first
    os.fsync(file.fileno())


def _parse(content: bytes, path: Path) -> _Jobs:
    jobs: _Jobs = {}
    lines = content.split(b"\n")
    if lines.pop():
        log.warning("journal %s: the last line was not finished; it is left out", path)
    for number, line in enumerate(lines, 1):
        try:
            job, raw = msgspec.json.decode(line, type=tuple[str, msgspec.Raw])
            event = decode(bytes(raw))
        except (msgspec.MsgspecError, UnicodeDecodeError, ProtocolError) as error:
            raise ConfigError(
                f"--journal {path}, line {number}: {error}; move the file away to start without its jobs"
            ) from error
        if isinstance(event, Plan) or job in jobs:
            jobs.setdefault(job, []).append(event)
    return jobs


def _young(jobs: _Jobs) -> _Jobs:
    """Without the jobs that ended long ago, or before many others."""
    ended = [(events[-1].at, job) for job, events in jobs.items() if isinstance(events[-1], Ended)]
    newest = max(ended, default=(0.0, ""))[0]
    chunks, gone = 0, set[str]()
    for place, (at, job) in enumerate(sorted(ended, reverse=True)):
        plan = jobs[job][0]
        chunks += plan.total if isinstance(plan, Plan) else 0
        if place >= KEPT_JOBS or chunks > KEPT_CHUNKS or at < newest - KEPT_SECONDS:
            gone.add(job)
    return {job: events for job, events in jobs.items() if job not in gone}
