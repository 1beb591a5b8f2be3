"""The start-up scan: every frame of a directory with size, last use and trailer."""

from __future__ import annotations

import itertools
import operator
import os
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Final, TypeVar

from lmkv.backend import trailer_bytes
from lmkv.types import ChunkKey, StoredFrame
from lmkv_backend_disk.names import FRAMES, LEAF, NAMESPACE, frame_path, parse
from lmkv_backend_disk.trailers import TAIL, Tail, TrailerLog, pack_identity

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from concurrent.futures import Executor

THREADS: Final = 8
"""The system calls of a scan of cold folders overlap; of warm ones Python is the limit, and threads only hinder."""
PATIENCE: Final = 0.05
"""Seconds that a scan may wait before it uses the threads,"""
WAITING: Final = 4.0
"""and so many seconds for each of work."""
_Item = TypeVar("_Item")
_Result = TypeVar("_Result")

_Found = tuple[int, ChunkKey, int, bytes]
"""Last use (ns since the epoch), key, length of the file in bytes, packed identity."""


def leaves(root: str, namespace: bytes | None = None) -> Iterator[tuple[bytes, str]]:
    """All folders that frames lie in, each with its namespace."""
    frames = f"{root}/{FRAMES}"
    for name in os.listdir(frames) if namespace is None else [namespace.hex()]:
        if NAMESPACE.fullmatch(name):
            try:
                below = os.listdir(f"{frames}/{name}")
            except (FileNotFoundError, NotADirectoryError):
                continue
            for leaf in below:
                if LEAF.fullmatch(leaf):
                    yield bytes.fromhex(name), f"{frames}/{name}/{leaf}"


def scan(root: str, trailers: TrailerLog) -> Iterator[StoredFrame]:
    """Every frame, least recently used first. What is no frame of ours is left alone and not listed."""
    known, records = trailers.read()
    with ThreadPoolExecutor(THREADS) as pool:
        found = list(itertools.chain.from_iterable(_spread(pool, _list, leaves(root))))
        found.sort(key=operator.itemgetter(0))
        unknown = [each for each in found if each[3] not in known]
        read = _spread(pool, lambda each: _tail(root, each[1], each[2]), unknown)
        fresh = {each[3]: data for each, data in zip(unknown, read, strict=True) if data is not None}
    known.update(fresh)
    if records > 2 * len(found) + 64:
        trailers.rewrite(Tail(identity, known[identity]) for *_, identity in found if known.get(identity))
    else:
        trailers.append(Tail(identity, data) for identity, data in fresh.items() if data)
    for used, key, nbytes, identity in found:
        data = known.get(identity)
        if data is not None:  # else it has gone meanwhile
            yield StoredFrame(key, nbytes, data, used / 1e9)


def _spread(pool: Executor, work: Callable[[_Item], _Result], items: Iterable[_Item]) -> Iterator[_Result]:
    """The work of each item, in order: by this thread until it has mostly waited, by those of the pool from then on."""
    rest = iter(items)
    began, busy = time.perf_counter(), time.thread_time()
    for item in rest:
        yield work(item)
        if time.perf_counter() - began > PATIENCE + WAITING * (time.thread_time() - busy):
            break
    yield from pool.map(work, rest)


def _list(place: tuple[bytes, str]) -> list[_Found]:
    """The frames in a folder."""
    namespace, leaf = place
    found: list[_Found] = []
    try:
        folder = os.open(leaf, os.O_RDONLY | os.O_DIRECTORY)
    except (FileNotFoundError, NotADirectoryError):
        return found
    try:
        with os.scandir(folder) as entries:
            for entry in entries:
                key = parse(namespace, entry.name)
                if key is not None and entry.is_file(follow_symlinks=False):
                    try:
                        state = entry.stat(follow_symlinks=False)
                    except FileNotFoundError:
                        continue
                    nbytes = state.st_size
                    found.append((state.st_mtime_ns, key, nbytes, pack_identity(key, nbytes, state.st_ino)))
    finally:
        os.close(folder)
    return found


def _tail(root: str, key: ChunkKey, nbytes: int) -> bytes | None:
    """The end of a frame from its file; None if it has gone, empty if it cannot be read."""
    try:
        fd = os.open(frame_path(root, key), os.O_RDONLY)
    except FileNotFoundError:
        return None
    except OSError:
        return b""
    try:
        end = os.pread(fd, TAIL, max(0, nbytes - TAIL))
        length = trailer_bytes(end)
        if len(end) < length <= nbytes:
            end = os.pread(fd, length, nbytes - length)
        return end[-length:] if 0 < length <= len(end) else end
    except OSError:
        return b""
    finally:
        os.close(fd)
