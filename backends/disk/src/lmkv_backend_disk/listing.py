"""The start-up scan: every frame of a directory with size, last use and trailer."""

from __future__ import annotations

import operator
import os
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Final, TypeVar

from lmkv.backend import trailer_bytes
from lmkv.types import StoredFrame
from lmkv_backend_disk.names import FRAMES, LEAF, NAMESPACE, frame_path, parse
from lmkv_backend_disk.trailers import TAIL

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from concurrent.futures import Executor

    from lmkv.types import ChunkKey
    from lmkv_backend_disk.trailers import Tail, TrailerLog

THREADS: Final = 8
"""The system calls of a scan of cold folders overlap; of warm ones Python is the limit, and threads only hinder."""
PATIENCE: Final = 0.05
"""Seconds that a scan may wait before it uses the threads,"""
WAITING: Final = 4.0
"""and so many seconds for each of work."""
_Item = TypeVar("_Item")
_Result = TypeVar("_Result")

_Stray = tuple["ChunkKey", int, int, float]
"""A frame that is not in the log: key, inode and length of its file, last use."""


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
    known, records, uses = trailers.read()
    found: list[Tail] = []
    strays: list[_Stray] = []
    places = ((namespace, leaf, known.get(namespace, {})) for namespace, leaf in leaves(root))
    with ThreadPoolExecutor(THREADS) as pool:
        for listed, others in _spread(pool, _list, places):
            found += listed
            strays += others
        read = _spread(pool, lambda stray: _tail(root, stray[0], stray[2]), strays)
        fresh = [
            (inode, StoredFrame(key, nbytes, data, used))
            for (key, inode, nbytes, used), data in zip(strays, read, strict=True)
            if data is not None  # else it has gone meanwhile
        ]
    found += fresh
    found.sort(key=lambda tail: tail[1][3])
    if max(records, uses) > 2 * len(found) + 64:
        trailers.rewrite(tail for tail in found if tail[1].trailer)
    else:
        trailers.append(tail for tail in fresh if tail[1].trailer)
    yield from map(operator.itemgetter(1), found)


def _spread(pool: Executor, work: Callable[[_Item], _Result], items: Iterable[_Item]) -> Iterator[_Result]:
    """The work of each item, in order: by this thread until it has mostly waited, by those of the pool from then on."""
    rest = iter(items)
    began, busy = time.perf_counter(), time.thread_time()
    for item in rest:
        yield work(item)
        if time.perf_counter() - began > PATIENCE + WAITING * (time.thread_time() - busy):
            break
    yield from pool.map(work, rest)


def _list(place: tuple[bytes, str, dict[str, Tail]]) -> tuple[list[Tail], list[_Stray]]:
    """The frames in a folder of a namespace: those that are in its part of the log, and the others.

    The system gives name, kind and inode in bulk. What the log knows by these is taken as it stands there: a `stat` for
    each would cost as much as all the rest of the listing.
    """
    namespace, leaf, known = place
    found: list[Tail] = []
    strays: list[_Stray] = []
    try:
        folder = os.open(leaf, os.O_RDONLY | os.O_DIRECTORY)
    except (FileNotFoundError, NotADirectoryError):
        return found, strays
    try:
        with os.scandir(folder) as entries:
            for entry in entries:
                tail = known.get(entry.name)
                if not entry.is_file(follow_symlinks=False):
                    continue
                if tail is not None and tail[0] == entry.inode():
                    found.append(tail)
                elif (key := parse(namespace, entry.name)) is not None:
                    try:
                        state = entry.stat(follow_symlinks=False)
                    except FileNotFoundError:
                        continue
                    inode, nbytes, used = state.st_ino, state.st_size, state.st_mtime_ns / 1e9
                    if tail is not None and (tail[0], tail[1].nbytes) == (inode, nbytes):
                        # Some stacked file systems list other inodes than they stat.
                        found.append((inode, StoredFrame(key, nbytes, tail[1].trailer, used)))
                    else:
                        strays.append((key, inode, nbytes, used))
    finally:
        os.close(folder)
    return found, strays


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
