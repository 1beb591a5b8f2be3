"""Asks the shared stores, which nobody here keeps an index of, what they have of a prompt.

They match whole frames only: chunks, and tails under their own digests. All of it is asked in one `contains` of each
store. Tails are asked for only where a few keys more cost nothing (`Capabilities.batched_contains`), for they are up to
a chunk's pages, of which one at most is there.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from lmkv.frame import frame_bytes
from lmkv.storage.driver import QUEUED
from lmkv.types import ChunkKey

if TYPE_CHECKING:
    from collections.abc import Sequence

    from lmkv.storage.index import Entry, NamespaceIndex
    from lmkv.storage.stack import Stack
    from lmkv.storage.tier import Tier


def stores(stack: Stack, *, tails: bool = False) -> list[Tier]:
    """The shared tiers that can be asked now; with `tails`, those that may be asked for tails."""
    return [
        tier
        for tier in stack.tiers
        if tier.shared and tier.readable and (tier.backend.capabilities.batched_contains or not tails)
    ]


async def discover(
    stack: Stack, namespace: NamespaceIndex, digests: Sequence[bytes], parent: bytes, prefixes: Sequence[bytes] = ()
) -> list[Entry]:
    """Enter into the index what the shared stores have, all shards: leading chunks, and the longest tail after them.

    Args:
        stack: whose shared tiers are asked.
        namespace: of the prompt.
        digests: of full chunks that the index does not have.
        parent: digest of the chunk before them, empty if there is none.
        prefixes: page prefixes (1 page, 2 pages, …) of what follows them.

    Returns the entries made or found, for the caller to settle once it has put what it wants under a lease.
    """
    chunks, tails = _keys(namespace, digests), _keys(namespace, prefixes)
    bits = await _ask(stack, chunks, tails)
    shards, before = namespace.shards, parent
    found: list[Entry] = []
    for at, digest in zip(range(0, len(chunks), shards), digests, strict=True):
        end = at + shards
        entry = _enter(namespace, before, namespace.chunk_pages, b"", chunks[at:end], bits[at:end])
        if entry is None:
            return found
        found.append(entry)
        before = digest
    for pages in range(len(prefixes), 0, -1):
        at = (pages - 1) * shards
        there = bits[len(chunks) + at : len(chunks) + at + shards]
        entry = _enter(namespace, before, pages, b"".join(prefixes[: pages - 1]), tails[at : at + shards], there)
        if entry is not None:
            return [*found, entry]
    return found


def _keys(namespace: NamespaceIndex, digests: Sequence[bytes]) -> list[ChunkKey]:
    """Of all shards of these, one frame after the other."""
    return [ChunkKey(namespace.id, shard, digest) for digest in digests for shard in range(namespace.shards)]


async def _ask(stack: Stack, chunks: list[ChunkKey], tails: list[ChunkKey]) -> list[int]:
    """For each of `chunks` and then of `tails`, bits of the tiers that say that they have it."""
    asked = [(tier, chunks + tails if tier.backend.capabilities.batched_contains else chunks) for tier in stores(stack)]
    asked = [(tier, keys) for tier, keys in asked if keys]
    answers = await asyncio.gather(*(tier.contains(keys, priority=QUEUED) for tier, keys in asked))
    bits = [0] * (len(chunks) + len(tails))
    for (tier, _), answer in zip(asked, answers, strict=True):
        for i, there in enumerate(answer):
            if there:
                bits[i] |= tier.bit
    return bits


def _enter(  # noqa: PLR0917  what an entry is made of
    namespace: NamespaceIndex, parent: bytes, pages: int, prefixes: bytes, keys: list[ChunkKey], bits: list[int]
) -> Entry | None:
    """The entry of a frame that lies, with what is here already, somewhere in all its shards; None if it does not."""
    digest = keys[0].digest
    entry = namespace.entries.get(digest)
    if entry is not None:
        here = {shard for shard, part in entry.shards.items() if part.present}
        if not any(bits) or not all(there or shard in here for shard, there in enumerate(bits)):
            return entry if entry.ready else None
    elif not all(bits):
        return None
    else:
        entry = namespace.add(digest, parent, pages, prefixes)
    for key, there, page_bytes in zip(keys, bits, namespace.page_bytes, strict=True):
        entry.part(key.shard, frame_bytes(pages * page_bytes, pages - 1), key).tiers |= there
    return entry
