"""Frames that somebody fills: whether they can be what they say, whether they are wanted, what becomes of them.

For clients, who fill them through the shared pool, and for other nodes, who write them. On the storage loop.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Final, Protocol

from lmkv.errors import ProtocolError
from lmkv.types import DIGEST_BYTES, MissReason

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Sequence

    from lmkv.storage.index import Entry, NamespaceIndex
    from lmkv.storage.leases import Slot
    from lmkv.storage.stack import Stack

_PARENT_BYTES: Final = frozenset({0, DIGEST_BYTES})


class NewFrame(Protocol):
    """A frame that is announced."""

    @property
    def digest(self) -> bytes:
        """Its name."""

    @property
    def parent(self) -> bytes:
        """Digest of the preceding chunk, empty for the first."""

    @property
    def pages(self) -> int:
        """Pages in it; fewer than a chunk's for a tail."""

    @property
    def prefixes(self) -> bytes:
        """Its page-prefix digests for 1 … pages-1 pages, one behind the other."""


def check_frames(namespace: NamespaceIndex, frames: Iterable[NewFrame]) -> None:
    """Whether each frame can be what it says; `ProtocolError` if not."""
    most, entries = namespace.chunk_pages, namespace.entries
    for frame in frames:
        pages, prefixes = frame.pages, len(frame.prefixes)
        if not 1 <= pages <= most or len(frame.digest) != DIGEST_BYTES:
            raise ProtocolError(f"a frame of {pages} pages in a namespace whose chunks have {most}")
        if prefixes != (pages - 1) * DIGEST_BYTES or len(frame.parent) not in _PARENT_BYTES:
            raise ProtocolError(f"a frame of {pages} pages comes with {prefixes} bytes of page prefixes")
        entry = entries.get(frame.digest)
        if entry is not None and entry.pages != pages:
            raise ProtocolError(f"a frame of {pages} pages under a digest that names {entry.pages}")


def covered(namespace: NamespaceIndex, shard: int, frame: NewFrame) -> Entry | None:
    """What makes the frame needless: its own entry, there or being filled, or for a tail a longer one that has it."""
    entry = namespace.entries.get(frame.digest)
    part = None if entry is None else entry.shards.get(shard)
    if part is not None and (part.present or part.filling):
        return entry
    if frame.pages >= namespace.chunk_pages:
        return None
    prefixes = [frame.prefixes[at : at + DIGEST_BYTES] for at in range(0, len(frame.prefixes), DIGEST_BYTES)]
    for longer in namespace.longer(prefixes, frame.digest):
        if (held := longer.shards.get(shard)) is not None and held.present:
            return longer
    return None


def ended(stack: Stack, slots: Sequence[Slot], filled: Collection[Slot]) -> None:
    """Those who filled `slots` have let go of them: what is `filled` is stored, the rest forgotten.

    The counts under ``fill`` stay the caller's to release, before he settles the entries.
    """
    for entry, shard, _ in slots:
        entry.shards[shard].filling = 0
    stack.room.filling -= sum([slot.object.nbytes for slot in slots])
    if filled:
        stack.store(list(filled))
        supersede(stack, filled)
    if len(filled) < len(slots):
        for slot in set(slots).difference(filled):
            stack.forget_if_gone(slot.entry, slot.shard, MissReason.NEVER_STORED)
            if stack.on_unstored is not None:
                stack.on_unstored(slot.entry.namespace.id, slot.shard, slot.entry.digest, slot.entry.packed)


def supersede(stack: Stack, slots: Iterable[Slot]) -> None:
    """Tails that a stored frame contains whole are of no more use."""
    for slot in slots:
        entry = slot.entry
        for tail in entry.namespace.shorter(entry):
            if entry.ready and not tail.holds and tail.pinned_until <= time.monotonic():
                stack.remove(tail)
