"""The trailers and last uses of all frames in a log, so that a start-up scan need neither open nor stat every frame.

Append-only, and nothing depends on it: a record counts only if the frame's file has the very inode that it names, one
that a crash cut short is skipped by its checksum, and what is not found here is read from the frame. It can be deleted
at any time. Two generations bound its size: a full one becomes the old one, and what that held is forgotten. Uses have
two of their own, so that those of a few busy frames never drive out trailers.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import struct
import threading
import time
import zlib
from typing import TYPE_CHECKING, Final

from lmkv.backend import trailer_bytes
from lmkv.types import ChunkKey, StoredFrame

if TYPE_CHECKING:
    from collections.abc import Iterable

TAIL: Final = 4096
"""Bytes at the end of a file that are kept (and first read) of what has no trailer at its end."""
GENERATION_BYTES: Final = 256 << 20
SHARE: Final = 128
"""A generation takes at most this part of the tier's capacity, both together twice that."""

USES: Final = 16
"""This part of the room is for uses."""
USE_SECONDS: Final = 60.0
"""Uses are written this often, so those of a frame at most this often."""

_MAGIC: Final = b"lmkvtrl2"
_HEAD: Final = struct.Struct("<8sII16sI32sQQd")
"""Magic, CRC-32 of all that follows it, length of trailer; namespace, shard, digest; file's bytes, inode, use."""
_SUMMED: Final = 12
"""What the checksum is of begins here."""
_USE: Final = 0
"""For the inode: no frame, a use of the one that has this key."""
_MOST: Final = 1 << 20
"""Bytes of a trailer; a record with more is damaged."""
_PIECE: Final = 1 << 20
_BATCH: Final = 256
"""Records that are written at once."""


def generation_bytes(capacity: int | None) -> int:
    """The most that each of the two files may take in a tier of `capacity` bytes (None: without one)."""
    return GENERATION_BYTES if capacity is None else min(GENERATION_BYTES, capacity // SHARE)


Tail = tuple[int, StoredFrame]
"""The inode of a frame's file, and what a scan gives of it; with the last 4 KiB of a file that ends with no trailer."""

Tails = dict[bytes, dict[str, Tail]]
"""By namespace and file name."""


def tail_of(key: ChunkKey, frame: memoryview, inode: int) -> Tail:
    """What is remembered of a frame just written."""
    length = trailer_bytes(frame)
    if not 0 < length <= min(len(frame), _MOST):
        length = TAIL
    return inode, StoredFrame(key, len(frame), bytes(frame[-length:]), time.time())


class TrailerLog:
    """The files `trailers*` of a tier's directory. Thread-safe; does what it can.

    Args:
        root: the directory.
        limit: bytes that each of the two generations may take.
    """

    def __init__(self, root: str, limit: int = GENERATION_BYTES) -> None:
        self._lock = threading.Lock()
        self._frames = _Generations(f"{root}/trailers", limit - limit // USES)
        self._uses = _Generations(f"{root}/trailers.uses", limit // USES)
        self._pending: dict[ChunkKey, float] = {}
        self._due = -USE_SECONDS

    def append(self, tails: Iterable[Tail]) -> None:
        """Remember the ends of frames just published. A failure costs time at the next start, nothing else."""
        with self._lock, contextlib.suppress(OSError):
            self._append(tails)

    def use(self, keys: Iterable[ChunkKey]) -> None:
        """Remember that these were used now; in the file by the next use after `USE_SECONDS`, or at the end."""
        with self._lock, contextlib.suppress(OSError):
            for key in keys:
                self._pending[key] = time.time()
            if self._pending and time.monotonic() >= self._due:
                self._due = time.monotonic() + USE_SECONDS
                self._write_uses()

    def read(self) -> tuple[Tails, int, int]:
        """What is remembered, of two records for a key the later; the number of records of frames, and of uses."""
        with self._lock, contextlib.suppress(OSError):
            if self._uses.is_open:
                self._write_uses()
        tails: Tails = {}
        return tails, _read(self._frames, tails), _read(self._uses, tails)

    def rewrite(self, tails: Iterable[Tail]) -> None:
        """Begin anew with these records: drops what has gone. Of more than there is room for the first are lost."""
        with self._lock, contextlib.suppress(OSError):
            self._frames.clear()
            self._uses.clear()
            self._append(tails)

    def reopen(self) -> None:
        """The directory was replaced by another one: begin anew in that."""
        with self._lock:
            self._pending.clear()
            self._frames.close()
            self._uses.close()

    def close(self) -> None:
        """Write down the last uses. What is not open already is not created: the directory may be another's."""
        with self._lock, contextlib.suppress(OSError):
            if self._uses.is_open:
                self._write_uses()
        self.reopen()

    def _append(self, tails: Iterable[Tail]) -> None:
        rest = iter(tails)
        while data := b"".join(_record(inode, *frame) for inode, frame in itertools.islice(rest, _BATCH)):
            self._frames.write(data)

    def _write_uses(self) -> None:
        pending, self._pending = self._pending, {}
        rest = iter(pending.items())
        while data := b"".join(_record(_USE, key, 0, b"", used) for key, used in itertools.islice(rest, _BATCH)):
            self._uses.write(data)


class _Generations:
    """A file that is appended to, and the one before it. The owner's lock guards it."""

    def __init__(self, path: str, limit: int) -> None:
        self.paths = (f"{path}.old", path)
        self._limit = limit
        self._fd = -1
        self._size = 0

    @property
    def is_open(self) -> bool:
        return self._fd >= 0

    def write(self, data: bytes) -> None:
        """Append whole records; more than a generation has room for are left out."""
        if len(data) > self._limit:
            return
        if self._fd < 0:
            self._open()
        if self._size + len(data) > self._limit:
            self.close()
            os.replace(*reversed(self.paths))
            self._open()
        self._size += os.write(self._fd, data)

    def clear(self) -> None:
        self.close()
        for path in self.paths:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)

    def close(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def _open(self) -> None:
        self._fd = os.open(self.paths[1], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        self._size = os.fstat(self._fd).st_size


def _record(inode: int, key: ChunkKey, nbytes: int, data: bytes, used: float) -> bytes:
    record = _HEAD.pack(_MAGIC, 0, len(data), *key, nbytes, inode, used) + data
    return _MAGIC + zlib.crc32(memoryview(record)[_SUMMED:]).to_bytes(4, "little") + record[_SUMMED:]


def _read(files: _Generations, into: Tails) -> int:
    """Take in what is in `files`; the number of records."""
    records = 0
    for path in files.paths:
        with contextlib.suppress(OSError), open(path, "rb", buffering=0) as file:
            rest = b""
            while piece := file.read(_PIECE):  # pieces that stay in the processor's caches
                data = rest + piece
                count, done = _parse(data, into)
                records, rest = records + count, data[done:]
            records += _parse(rest, into, at_end=True)[0]
    return records


def _parse(data: bytes, into: Tails, *, at_end: bool = False) -> tuple[int, int]:
    """Add the intact records of `data`; returns how many, and where one begins that may go on after `data`."""
    records = at = 0
    available, head, view = len(data), _HEAD.size, memoryview(data)
    unpack, crc32 = _HEAD.unpack_from, zlib.crc32
    last = b""
    names: dict[str, Tail] = {}
    while (begin := at + head) <= available:
        magic, checksum, length, namespace, shard, digest, nbytes, inode, used = unpack(data, at)
        if magic == _MAGIC and length <= _MOST:
            end = begin + length
            if end > available and not at_end:
                break
            if crc32(view[at + _SUMMED : end]) == checksum:
                if namespace != last:
                    last, names = namespace, into.setdefault(namespace, {})
                name = f"{digest.hex()}.{shard:x}" if shard else digest.hex() + ".0"
                if inode != _USE:
                    names[name] = inode, StoredFrame(ChunkKey(namespace, shard, digest), nbytes, data[begin:end], used)
                elif (known := names.get(name)) is not None and used > known[1].last_used:
                    names[name] = known[0], StoredFrame(known[1].key, known[1].nbytes, known[1].trailer, used)
                records += 1
                at = end
                continue
        # Cut short by a crash, or no record at all: the next one begins somewhere behind.
        following = data.find(_MAGIC, at + 1)
        at = following if following >= 0 else max(at + 1, available - len(_MAGIC) + 1)
    return records, at
