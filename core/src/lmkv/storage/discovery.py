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
    answers = await _ask(stack, namespace, digests, prefixes)
    found: list[Entry] = []
    for i, digest in enumerate(digests):
        before = digests[i - 1] if i else parent
        entry = _enter(namespace, digest, before, namespace.chunk_pages, b"", answers)
        if entry is None:
            return found
        found.append(entry)
    before = digests[-1] if digests else parent
    for pages in range(len(prefixes), 0, -1):
        entry = _enter(namespace, prefixes[pages - 1], before, pages, b"".join(prefixes[: pages - 1]), answers)
        if entry is not None:
            return [*found, entry]
    return found


async def _ask(
    stack: Stack, namespace: NamespaceIndex, digests: Sequence[bytes], prefixes: Sequence[bytes]
) -> dict[ChunkKey, int]:
    """Bits of the tiers that say that they have a frame."""
    chunks = [ChunkKey(namespace.id, shard, digest) for digest in digests for shard in range(namespace.shards)]
    tails = [ChunkKey(namespace.id, shard, digest) for digest in prefixes for shard in range(namespace.shards)]
    asked = [(tier, chunks + tails if tier.backend.capabilities.batched_contains else chunks) for tier in stores(stack)]
    asked = [(tier, keys) for tier, keys in asked if keys]
    answers = await asyncio.gather(*(tier.contains(keys, priority=QUEUED) for tier, keys in asked))
    places: dict[ChunkKey, int] = {}
    for (tier, keys), answer in zip(asked, answers, strict=True):
        for key, there in zip(keys, answer, strict=True):
            if there:
                places[key] = places.get(key, 0) | tier.bit
    return places


def _enter(  # noqa: PLR0917  what an entry is made of
    namespace: NamespaceIndex, digest: bytes, parent: bytes, pages: int, prefixes: bytes, places: dict[ChunkKey, int]
) -> Entry | None:
    """The entry of a frame that lies, with what is here already, somewhere in all its shards; None if it does not."""
    bits = [places.get(ChunkKey(namespace.id, shard, digest), 0) for shard in range(namespace.shards)]
    known = namespace.entries.get(digest)
    here = set() if known is None else {shard for shard, part in known.shards.items() if part.present}
    if not any(bits) or not all(there or shard in here for shard, there in enumerate(bits)):
        return known if known is not None and known.ready else None
    entry = known or namespace.add(digest, parent, pages, prefixes)
    for shard, there in enumerate(bits):
        entry.part(shard, frame_bytes(pages * namespace.page_bytes[shard], pages - 1)).tiers |= there
    return entry
