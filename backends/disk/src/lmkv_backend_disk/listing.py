"""The start-up scan: every frame of a directory with size, last use and trailer."""

from __future__ import annotations

import itertools
import operator
import os
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Final

from lmkv.types import StoredFrame
from lmkv_backend_disk.names import FRAMES, LEAF, NAMESPACE, frame_path, parse
from lmkv_backend_disk.trailers import TAIL, Tail, TrailerLog, pack_identity, unpack_identity

if TYPE_CHECKING:
    from collections.abc import Iterator

THREADS: Final = 8
"""The system calls of a scan of cold folders overlap; of warm ones Python is the limit."""


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
        found = list(itertools.chain.from_iterable(pool.map(_list, leaves(root))))
        found.sort(key=operator.itemgetter(0))
        unknown = [identity for _, identity in found if identity not in known]
        read = pool.map(lambda identity: _tail(root, identity), unknown)
        fresh = {identity: data for identity, data in zip(unknown, read, strict=True) if data is not None}
    known.update(fresh)
    if records > 2 * len(found) + 64:
        trailers.rewrite(Tail(identity, known[identity]) for _, identity in found if identity in known)
    else:
        trailers.append(Tail(identity, data) for identity, data in fresh.items() if data)
    for used, identity in found:
        data = known.pop(identity, None)
        if data is not None:
            key, nbytes = unpack_identity(identity)
            yield StoredFrame(key, nbytes, data and data.rjust(min(TAIL, nbytes), b"\0"), used / 1e9)


def _list(place: tuple[bytes, str]) -> list[tuple[int, bytes]]:
    """Last use (ns since the epoch) and packed identity of each frame in a folder."""
    namespace, leaf = place
    found: list[tuple[int, bytes]] = []
    try:
        folder = os.open(leaf, os.O_RDONLY | os.O_DIRECTORY)
    except (FileNotFoundError, NotADirectoryError):
        return found
    try:
        for name in os.listdir(folder):
            key = parse(namespace, name)
            if key is not None:
                try:
                    state = os.stat(name, dir_fd=folder, follow_symlinks=False)
                except FileNotFoundError:
                    continue
                found.append((state.st_mtime_ns, pack_identity(key, state.st_size, state.st_ino)))
    finally:
        os.close(folder)
    return found


def _tail(root: str, identity: bytes) -> bytes | None:
    """The end of a frame from its file; None if it has gone, empty if it cannot be read."""
    key, nbytes = unpack_identity(identity)
    try:
        fd = os.open(frame_path(root, key), os.O_RDONLY)
    except FileNotFoundError:
        return None
    except OSError:
        return b""
    try:
        return os.pread(fd, TAIL, max(0, nbytes - TAIL))
    except OSError:
        return b""
    finally:
        os.close(fd)
