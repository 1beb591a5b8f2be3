"""The trailers of all frames in one file, so that a start-up scan need not open every frame.

Append-only, and nothing depends on it: a record counts only if the frame's file has the very size and inode that it
names, one that a crash cut short is skipped by its checksum, and what is not found here is read from the frame. It can
be deleted at any time. Two generations bound its size: a full one becomes the old one, and what that held is forgotten.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import struct
import threading
import zlib
from typing import TYPE_CHECKING, Final, NamedTuple

from lmkv.backend import trailer_bytes

if TYPE_CHECKING:
    from collections.abc import Iterable

    from lmkv.types import ChunkKey

TAIL: Final = 4096
"""Bytes at the end of a file that are kept (and first read) of what has no trailer at its end."""
GENERATION_BYTES: Final = 256 << 20
SHARE: Final = 128
"""A generation takes at most this part of the tier's capacity, both together twice that."""

_MAGIC: Final = b"lmkvtrl1"
_HEAD: Final = struct.Struct("<8sII68s")  # magic, CRC-32 of identity and trailer, bytes of trailer, identity
_IDENTITY: Final = struct.Struct("<16sI32sQQ")  # namespace, shard, digest, file's bytes and inode
_MOST: Final = 1 << 20
"""Bytes of a trailer; a record with more is damaged."""
_PIECE: Final = 1 << 20
_BATCH: Final = 256
"""Records that are written at once."""


def generation_bytes(capacity: int | None) -> int:
    """The most that each of the two files may take in a tier of `capacity` bytes (None: without one)."""
    return GENERATION_BYTES if capacity is None else min(GENERATION_BYTES, capacity // SHARE)


def pack_identity(key: ChunkKey, nbytes: int, inode: int) -> bytes:
    """What tells one version of a frame's file from another, packed: a scan has 100 000 of them. A touch leaves it."""
    return _IDENTITY.pack(key[0], key[1], key[2], nbytes, inode)


class Tail(NamedTuple):
    """The end of one frame."""

    identity: bytes
    """See `pack_identity`."""
    data: bytes
    """Its trailer; the last 4 KiB of a file that ends with none."""


def tail_of(key: ChunkKey, frame: memoryview, inode: int) -> Tail:
    """What is remembered of a frame just written."""
    length = trailer_bytes(frame)
    if not 0 < length <= min(len(frame), _MOST):
        length = TAIL
    return Tail(pack_identity(key, len(frame), inode), bytes(frame[-length:]))


class TrailerLog:
    """The files `trailers` and `trailers.old` of a tier's directory. Thread-safe; does what it can.

    Args:
        root: the directory.
        limit: bytes that each of the two may take.
    """

    def __init__(self, root: str, limit: int = GENERATION_BYTES) -> None:
        self._path = f"{root}/trailers"
        self._limit = limit
        self._lock = threading.Lock()
        self._fd = -1
        self._size = 0

    def append(self, tails: Iterable[Tail]) -> None:
        """Remember the ends of frames just published. A failure costs time at the next start, nothing else."""
        with self._lock, contextlib.suppress(OSError):
            self._append(tails)

    def read(self) -> tuple[dict[bytes, bytes], int]:
        """Identity → end of the frame; of two records the later. And how many records there were."""
        found: dict[bytes, bytes] = {}
        records = 0
        for path in (f"{self._path}.old", self._path):
            with contextlib.suppress(OSError), open(path, "rb", buffering=0) as file:
                rest = b""
                while piece := file.read(_PIECE):  # pieces that stay in the processor's caches
                    data = rest + piece
                    count, done = _parse(data, found)
                    records, rest = records + count, data[done:]
                records += _parse(rest, found, at_end=True)[0]
        return found, records

    def rewrite(self, tails: Iterable[Tail]) -> None:
        """Begin anew with these records: drops what has gone. Of more than there is room for the first are lost."""
        with self._lock, contextlib.suppress(OSError):
            self._reopen()
            for path in (f"{self._path}.old", self._path):
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(path)
            self._append(tails)

    def reopen(self) -> None:
        """The directory was replaced by another one: begin anew in that."""
        with self._lock:
            self._reopen()

    close = reopen

    def _append(self, tails: Iterable[Tail]) -> None:
        rest = iter(tails)
        while data := b"".join(_record(tail) for tail in itertools.islice(rest, _BATCH)):
            if len(data) > self._limit:
                continue
            if self._fd < 0:
                self._open()
            if self._size + len(data) > self._limit:
                self._reopen()
                os.replace(self._path, f"{self._path}.old")
                self._open()
            self._size += os.write(self._fd, data)

    def _open(self) -> None:
        self._fd = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        self._size = os.fstat(self._fd).st_size

    def _reopen(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)


def _record(tail: Tail) -> bytes:
    identity, data = tail
    return _HEAD.pack(_MAGIC, zlib.crc32(data, zlib.crc32(identity)), len(data), identity) + data


def _parse(data: bytes, into: dict[bytes, bytes], *, at_end: bool = False) -> tuple[int, int]:
    """Add the intact records of `data`; returns how many, and where one begins that may go on after `data`."""
    records = at = 0
    available = len(data)
    unpack, crc32 = _HEAD.unpack_from, zlib.crc32
    while at + _HEAD.size <= available:
        magic, checksum, length, identity = unpack(data, at)
        if magic == _MAGIC and length <= _MOST:
            begin = at + _HEAD.size
            end = begin + length
            if end > available and not at_end:
                break
            trailer = data[begin:end]
            if crc32(trailer, crc32(identity)) == checksum:
                into[identity] = trailer
                records += 1
                at = end
                continue
        # Cut short by a crash, or no record at all: the next one begins somewhere behind.
        following = data.find(_MAGIC, at + 1)
        at = following if following >= 0 else max(at + 1, available - len(_MAGIC) + 1)
    return records, at
