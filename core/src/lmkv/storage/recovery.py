"""What persistent tiers still hold, taken into the index at a start: quickly, because nothing is served before."""

from __future__ import annotations

import asyncio
import gc
import logging
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

from lmkv.errors import FrameError
from lmkv.frame import link, trailer_bytes
from lmkv.memory import MemoryObject

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from lmkv.storage.index import Index
    from lmkv.storage.tier import Tier
    from lmkv.types import ChunkKey, StoredFrame

log = logging.getLogger(__name__)

STEP: Final = 4_000
"""Frames taken into the index between two turns of the loop."""


async def recover(tier: Tier, index: Index) -> list[ChunkKey]:
    """Take all frames of `tier` that a scan lists into `index`, the tier's books and its policy, oldest first.

    Returns the keys of those whose trailers are damaged; nothing is done with them.

    Raises:
        BackendError: the tier cannot be scanned.
    """
    begin = time.monotonic()
    damaged: list[ChunkKey] = []
    with _no_collections():
        frames = await asyncio.to_thread(_scan, tier)
        scanned = time.monotonic()
        sizes: dict[ChunkKey, int] = {}
        parents: dict[ChunkKey, bytes | None] = {}
        for first in range(0, len(frames), STEP):
            damaged += _enter(tier.bit, index, frames[first : first + STEP], sizes, parents)
            await asyncio.sleep(0)
        tier.record_all(sizes, parents)
    if frames:
        log.info(
            "tier %s: %d frames, %d bytes, %d damaged ones; scanned in %.2f s, indexed in %.2f s",
            tier.name, len(sizes), tier.used, len(damaged), scanned - begin, time.monotonic() - scanned,
        )  # fmt: skip
    return damaged


def _scan(tier: Tier) -> list[StoredFrame]:
    """What is listed, with whole trailers: one that the backend gave only the end of is read with its frame. Blocks."""
    frames = list(tier.backend.scan())
    short = [i for i, stored in enumerate(frames) if trailer_bytes(stored.trailer) > len(stored.trailer)]
    if short:
        log.warning(
            "tier %s: its backend lists %d frames with less than their trailers (%d bytes of %d): these are read whole",
            tier.name, len(short), len(frames[short[0]].trailer), trailer_bytes(frames[short[0]].trailer),
        )  # fmt: skip
    for i in short:
        stored = frames[i]
        whole = MemoryObject.over(bytearray(stored.nbytes))
        if tier.backend.get([stored.key], [whole])[0].ok:
            frames[i] = stored._replace(trailer=bytes(whole.view[-trailer_bytes(stored.trailer) :]))
    return frames


def _enter(
    bit: int,
    index: Index,
    frames: Sequence[StoredFrame],
    sizes: dict[ChunkKey, int],
    parents: dict[ChunkKey, bytes | None],
) -> list[ChunkKey]:
    """Into the index with `frames`; into `sizes` and `parents` with what the tier has to know. Returns the damaged."""
    damaged = []
    identity = b""
    for stored in frames:
        key = stored.key
        try:
            parent, pages, prefixes, nbytes = link(stored)
        except FrameError:
            damaged.append(key)
            continue
        if key.namespace != identity:
            identity = key.namespace
            add = index.namespace(identity).add
        add(key.digest, parent, pages, prefixes).part(key.shard, nbytes, key).tiers |= bit
        sizes[key] = stored.nbytes
        parents[key] = parent or None
    return damaged


@contextmanager
def _no_collections() -> Iterator[None]:
    """No garbage collections: a million objects are made to stay, and each collection would look at all so far."""
    on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if on:
            gc.enable()
