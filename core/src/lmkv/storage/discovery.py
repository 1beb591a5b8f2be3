"""Asks the shared stores, which nobody here keeps an index of, what they have of a prompt.

They match whole frames only: chunks, and tails under their own digests. All of it is asked in one `contains` of each
store. Tails are asked for only where a few keys more cost nothing (`Capabilities.batched_contains`), for they are up to
a chunk's pages, of which one at most is there.
"""

from __future__ import annotations

import asyncio
from itertools import repeat
from typing import TYPE_CHECKING

from lmkv.frame import frame_bytes
from lmkv.storage.driver import QUEUED
from lmkv.storage.index import Shard
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
    found = _enter_chunks(namespace, parent, chunks, bits)
    if len(found) < len(digests):
        return found
    shards, before = namespace.shards, digests[-1] if digests else parent
    for pages in range(len(prefixes), 0, -1):
        at = (pages - 1) * shards
        there = bits[len(chunks) + at : len(chunks) + at + shards]
        keys = tails[at : at + shards]
        entry = _enter(namespace, before, pages, b"".join(prefixes[: pages - 1]), keys, there, _sizes(namespace, pages))
        if entry is not None:
            return [*found, entry]
    return found


def _keys(namespace: NamespaceIndex, digests: Sequence[bytes]) -> list[ChunkKey]:
    """Of all shards of these, one frame after the other."""
    if namespace.shards == 1:
        return list(map(ChunkKey, repeat(namespace.id), repeat(0), digests))
    return [ChunkKey(namespace.id, shard, digest) for digest in digests for shard in range(namespace.shards)]


async def _ask(stack: Stack, chunks: list[ChunkKey], tails: list[ChunkKey]) -> list[int]:
    """For each of `chunks` and then of `tails`, bits of the tiers that say that they have it."""
    asked = [(tier, chunks + tails if tier.backend.capabilities.batched_contains else chunks) for tier in stores(stack)]
    asked = [(tier, keys) for tier, keys in asked if keys]
    asking = [tier.contains(keys, priority=QUEUED) for tier, keys in asked]
    answers = await asyncio.gather(*asking) if len(asking) > 1 else [await each for each in asking]
    bits = [0] * (len(chunks) + len(tails))
    for (tier, _), answer in zip(asked, answers, strict=True):
        for i, there in enumerate(answer):
            if there:
                bits[i] |= tier.bit
    return bits


def _enter_chunks(
    namespace: NamespaceIndex, parent: bytes, keys: Sequence[ChunkKey], bits: Sequence[int]
) -> list[Entry]:
    """The entries of the leading chunks that lie somewhere in all their shards, of which these are the keys."""
    pages, shards = namespace.chunk_pages, range(namespace.shards)
    sizes = _sizes(namespace, pages)
    find, add = namespace.entries.get, namespace.add
    found: list[Entry] = []
    of_each_chunk = [iter(keys)] * len(shards), [iter(bits)] * len(shards)
    for own, there in zip(*(zip(*each, strict=False) for each in of_each_chunk), strict=False):
        digest = own[0].digest
        if find(digest) is not None:
            entry = _enter(namespace, parent, pages, b"", own, there, sizes)
            if entry is None:
                break
        elif 0 in there:
            break
        else:  # as `_enter` does, quickly: of a long prompt the store has hundreds
            entry = add(digest, parent, pages, b"")
            parts = entry.shards
            for shard, key, tiers, nbytes in zip(shards, own, there, sizes, strict=True):
                parts[shard] = Shard(key, nbytes, tiers)
        found.append(entry)
        parent = digest
    return found


def _enter(  # noqa: PLR0917  what an entry is made of
    namespace: NamespaceIndex,
    parent: bytes,
    pages: int,
    prefixes: bytes,
    keys: Sequence[ChunkKey],
    bits: Sequence[int],
    sizes: Sequence[int],
) -> Entry | None:
    """The entry of a frame that lies, with what is here already, somewhere in all its shards; None if it does not."""
    digest = keys[0].digest
    entry = namespace.entries.get(digest)
    if entry is not None:
        here = {shard for shard, part in entry.shards.items() if part.present}
        if not any(bits) or not all(there or shard in here for shard, there in enumerate(bits)):
            return entry if entry.ready else None
    elif 0 in bits:
        return None
    else:
        entry = namespace.add(digest, parent, pages, prefixes)
    for key, there, nbytes in zip(keys, bits, sizes, strict=True):
        entry.part(key.shard, nbytes, key).tiers |= there
    return entry


def _sizes(namespace: NamespaceIndex, pages: int) -> list[int]:
    """Bytes of the frames, of each shard one, of so many pages."""
    return [frame_bytes(pages * page_bytes, pages - 1) for page_bytes in namespace.page_bytes]
