"""The ends of all frames in one file, so that a start-up scan need not open every frame.

Append-only, and nothing depends on it: a record counts only if the frame's file has the very size and inode that it
names, one that a crash cut short is skipped by its checksum, and what is not found here is read from the frame. It can
be deleted at any time. Two generations bound its size: a full one becomes the old one, and what that held is forgotten.
"""

from __future__ import annotations

import contextlib
import os
import struct
import threading
import zlib
from typing import TYPE_CHECKING, Final, NamedTuple

from lmkv.types import ChunkKey

if TYPE_CHECKING:
    from collections.abc import Iterable

TAIL: Final = 4096
"""Bytes of a frame's end that are kept."""
GENERATION_BYTES: Final = 256 << 20

_MAGIC: Final = b"lmkvtail"
_HEAD: Final = struct.Struct("<8sIH")  # magic, CRC-32 of identity and tail, bytes of tail
_IDENTITY: Final = struct.Struct("<16sI32sQQ")  # namespace, shard, digest, file's bytes and inode
_MARK: Final = _HEAD.size + _IDENTITY.size


def pack_identity(key: ChunkKey, nbytes: int, inode: int) -> bytes:
    """What tells one version of a frame's file from another, packed: a scan has 100 000 of them. A touch leaves it."""
    return _IDENTITY.pack(key[0], key[1], key[2], nbytes, inode)


def unpack_identity(identity: bytes) -> tuple[ChunkKey, int]:
    """The key and the file's length in bytes."""
    namespace, shard, digest, nbytes, _ = _IDENTITY.unpack(identity)
    return ChunkKey(namespace, shard, digest), nbytes


class Tail(NamedTuple):
    """The end of one frame."""

    identity: bytes
    """See `pack_identity`."""
    data: bytes
    """At most the last 4 KiB; leading zeros are not stored."""


class TrailerLog:
    """The files `trailers` and `trailers.old` of a tier's directory. Thread-safe; does what it can."""

    def __init__(self, root: str, limit: int = GENERATION_BYTES) -> None:
        self._path = f"{root}/trailers"
        self._temp = f"{root}/trailers.part"
        self._limit = limit
        self._lock = threading.Lock()
        self._fd = -1
        self._size = 0

    def append(self, tails: Iterable[Tail]) -> None:
        """Remember the ends of frames just published. A failure costs time at the next start, nothing else."""
        data = b"".join(_record(tail) for tail in tails)
        if not data:
            return
        with self._lock, contextlib.suppress(OSError):
            if self._fd < 0:
                self._fd = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
                self._size = os.fstat(self._fd).st_size
            if self._size + len(data) > self._limit:
                self._reopen()
                os.replace(self._path, f"{self._path}.old")
                self._fd = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
                self._size = 0
            self._size += os.write(self._fd, data)

    def read(self) -> tuple[dict[bytes, bytes], int]:
        """Identity → end of the frame without leading zeros; of two records the later. And how many there were."""
        found: dict[bytes, bytes] = {}
        records = 0
        for path in (f"{self._path}.old", self._path):
            try:
                with open(path, "rb") as file:
                    records += _parse(file.read(), found)
            except OSError:
                continue
        return found, records

    def rewrite(self, tails: Iterable[Tail]) -> None:
        """Replace both files by these records: drops what has gone."""
        with self._lock, contextlib.suppress(OSError):
            with open(self._temp, "wb") as file:
                file.writelines(_record(tail) for tail in tails)
            self._reopen()
            os.replace(self._temp, self._path)
            os.unlink(f"{self._path}.old")

    def clear_temp(self) -> None:
        """Remove what a `rewrite` that was cut short has left."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self._temp)

    def reopen(self) -> None:
        """The directory was replaced by another one: begin anew in that."""
        with self._lock:
            self._reopen()

    close = reopen

    def _reopen(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)


def _record(tail: Tail) -> bytes:
    data = tail.data[-TAIL:].lstrip(b"\0")
    body = tail.identity + data
    return _HEAD.pack(_MAGIC, zlib.crc32(body), len(data)) + body


def _parse(data: bytes, into: dict[bytes, bytes]) -> int:
    """Add the intact records of `data`, and count them."""
    records = 0
    at = data.find(_MAGIC)
    while 0 <= at <= len(data) - _MARK:
        magic, checksum, length = _HEAD.unpack_from(data, at)
        end = at + _MARK + length
        body = data[at + _HEAD.size : end]
        if magic == _MAGIC and checksum == zlib.crc32(body) and end <= len(data):
            into[body[: _IDENTITY.size]] = body[_IDENTITY.size :]
            records += 1
            at = end
        else:  # cut short by a crash: the next record begins somewhere behind
            at = data.find(_MAGIC, at + 1)
    return records
