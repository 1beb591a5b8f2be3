"""The start-up scan: every frame of a directory with size, last use and trailer."""

from __future__ import annotations

import itertools
import os
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Final, NamedTuple

from lmkv.types import StoredFrame
from lmkv_backend_disk.names import FRAMES, LEAF, NAMESPACE, frame_path, parse
from lmkv_backend_disk.trailers import TAIL, Identity, Tail, TrailerLog

if TYPE_CHECKING:
    from collections.abc import Iterator

THREADS: Final = 8
"""The system calls of a scan of cold folders overlap; of warm ones Python is the limit."""


class _Found(NamedTuple):
    used: int
    """Nanoseconds since the epoch."""
    identity: Identity


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
        found.sort()
        unknown = [entry.identity for entry in found if entry.identity not in known]
        read = pool.map(lambda identity: _tail(root, identity), unknown)
        fresh = {identity: data for identity, data in zip(unknown, read, strict=True) if data is not None}
    known.update(fresh)
    kept = [entry for entry in found if entry.identity in known]
    if records > 2 * len(kept) + 64:
        trailers.rewrite(Tail(entry.identity, known[entry.identity]) for entry in kept)
    else:
        trailers.append(Tail(identity, data) for identity, data in fresh.items() if data)
    for used, identity in kept:
        yield StoredFrame(identity.key, identity.nbytes, known.pop(identity), used / 1e9)


def _list(place: tuple[bytes, str]) -> list[_Found]:
    namespace, leaf = place
    found: list[_Found] = []
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
                found.append(_Found(state.st_mtime_ns, Identity(key, state.st_size, state.st_ino)))
    finally:
        os.close(folder)
    return found


def _tail(root: str, identity: Identity) -> bytes | None:
    """The end of a frame from its file; None if it has gone, empty if it cannot be read."""
    try:
        fd = os.open(frame_path(root, identity.key), os.O_RDONLY)
    except FileNotFoundError:
        return None
    except OSError:
        return b""
    try:
        return os.pread(fd, TAIL, max(0, identity.nbytes - TAIL))
    except OSError:
        return b""
    finally:
        os.close(fd)
