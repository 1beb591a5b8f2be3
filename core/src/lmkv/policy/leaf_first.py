"""Least recently used first, but never a chunk before its cached continuation.

A look-up finds leading chunks only: a chunk whose predecessor was evicted is dead weight. So only *leaves* are victims,
entries of which no continuation (an entry of the same namespace and shard whose parent they are) is cached here.

The leaves are in a heap by time of use, lazily: `touch` only stamps the entry, and an entry that comes up with an old
stamp is put back under its present one. Each entry is in the heap at most once. What is there and is no leaf any more,
or has gone, is dropped when it comes up; before such ghosts outnumber the leaves they are all swept out, so that no
single call has many of them to pass.

Digests of real prompts make no rings, but a peer may name any parent. A link that would close one is not made, so that
there is a leaf whenever anything is cached; nor is one whose check would take too long.
"""

from __future__ import annotations

from heapq import heapify, heappop, heappush, heapreplace
from itertools import count
from typing import TYPE_CHECKING, Final

from lmkv.types import ChunkKey

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

_SLACK: Final = 64
WALK: Final = 512
"""Entries before a chunk that are looked at, when it comes after its continuations, for a ring that it would close."""


class _Entry:
    """A chunk that is cached, or that is the parent of one that is."""

    __slots__ = ("cached", "continuations", "key", "parent", "queued", "used")

    def __init__(self, key: ChunkKey) -> None:
        self.key = key
        self.cached = False
        self.parent: _Entry | None = None
        self.continuations = 0
        """Cached entries whose parent it is."""
        self.queued = False
        self.used = 0


class LeafFirstLRU:
    """Evicts the least recently used leaf; `victims` may give a leaf and then the chunk before it.

    `add`, `remove`: amortised O(log n); `touch`: O(1); `victims`: O(log n) for each victim and for each leaf that it
    passes over because it is not free.
    """

    def __init__(self) -> None:
        self._clock = count(1)
        self._entries: dict[tuple[bytes, int, bytes], _Entry] = {}
        self._heap: list[tuple[int, _Entry]] = []
        self._leaves = 0

    def add(self, key: ChunkKey, parent: bytes | None) -> None:
        """`key` was stored; it becomes the most recently used. Entries come in any order, continuations first too."""
        entry = self._note(key, parent)
        if not entry.continuations:
            self._queue(entry)

    def add_all(self, parents: Mapping[ChunkKey, bytes | None]) -> None:
        """As `add` for each in turn, but only the leaves that remain are queued."""
        for entry in [self._note(key, parent) for key, parent in parents.items()]:
            if not entry.continuations:
                self._queue(entry)

    def touch(self, key: ChunkKey) -> None:
        """`key` was used. Unknown keys are ignored."""
        entry = self._entries.get(key)
        if entry is not None:
            entry.used = next(self._clock)

    def remove(self, key: ChunkKey) -> None:
        """`key` has gone. Unknown keys are ignored."""
        entry = self._entries.get(key)
        if entry is not None and entry.cached:
            entry.cached = False
            if not entry.continuations:
                self._leaves -= 1
                del self._entries[key]
            self._follow(entry, None)

    def victims(
        self, nbytes: int, size: Callable[[ChunkKey], int], free: Callable[[ChunkKey], bool]
    ) -> Iterator[ChunkKey]:
        """Keys to evict, in order, until `nbytes` are covered; each is looked for when it is taken."""
        seen: list[_Entry] = []
        # Chunks that become leaves when what is chosen has gone, and how many continuations of each are chosen.
        opened: list[tuple[int, _Entry]] = []
        gone: dict[_Entry, int] = {}
        try:
            while nbytes > 0:
                entry = self._next(opened, seen)
                if entry is None:
                    break
                if not free(entry.key):
                    continue
                yield entry.key
                nbytes -= size(entry.key)
                before = entry.parent
                if before is not None and before.cached:
                    gone[before] = gone.get(before, 0) + 1
                    if gone[before] == before.continuations:
                        heappush(opened, (before.used, before))
        finally:
            for entry in seen:
                self._queue(entry)

    def _next(self, opened: list[tuple[int, _Entry]], seen: list[_Entry]) -> _Entry | None:
        """Take the least recently used of `opened` and the leaves; leaves go to `seen`, to be put back."""
        heap = self._heap
        while heap:
            used, entry = heap[0]
            if entry.continuations or not entry.cached:
                heappop(heap)
                entry.queued = False
            elif used != entry.used:
                heapreplace(heap, (entry.used, entry))
            elif opened and opened[0][0] < used:
                break
            else:
                heappop(heap)
                entry.queued = False
                seen.append(entry)
                return entry
        return heappop(opened)[1] if opened else None

    def _note(self, key: ChunkKey, parent: bytes | None) -> _Entry:
        """`key` is cached, most recently used, the continuation of `parent`. If it is a leaf the caller queues it."""
        entries = self._entries
        entry = entries.get(key)
        if entry is None:
            entry = entries[key] = _Entry(key)
        if not entry.cached:
            entry.cached = True
            if not entry.continuations:
                self._leaves += 1
        entry.used = next(self._clock)
        namespace, shard, digest = key
        before: _Entry | None = None
        if parent and parent != digest:
            place = namespace, shard, parent  # found like its key, and quicker made
            before = entries.get(place)
            if before is None:
                before = entries[place] = _Entry(ChunkKey(*place))
        if before is not entry.parent:
            self._follow(entry, None if self._closes(entry, before) else before)
        return entry

    @staticmethod
    def _closes(entry: _Entry, before: _Entry | None) -> bool:
        """`before` continues `entry`, over however many (or too many to look at): it cannot be what precedes it."""
        if not entry.continuations:
            return False  # as whenever chunks come in order
        for _ in range(WALK):
            if before is None or before is entry:
                return before is entry
            before = before.parent
        return True

    def _queue(self, entry: _Entry) -> None:
        """Put a leaf into the heap, unless it is there."""
        if entry.queued:
            return
        entry.queued = True
        heappush(self._heap, (entry.used, entry))
        if len(self._heap) > 2 * self._leaves + _SLACK:
            kept = []
            for _, each in self._heap:
                if each.continuations or not each.cached:
                    each.queued = False
                else:
                    kept.append((each.used, each))
            heapify(kept)
            self._heap = kept

    def _follow(self, entry: _Entry, parent: _Entry | None) -> None:
        """`entry` is a continuation of `parent` and no longer of what it was one of, which may be a leaf now."""
        before, entry.parent = entry.parent, parent
        if parent is not None:
            if parent.cached and not parent.continuations:
                self._leaves -= 1
            parent.continuations += 1
        if before is not None:
            before.continuations -= 1
            if not before.continuations:
                if before.cached:
                    self._leaves += 1
                    self._queue(before)
                else:
                    del self._entries[before.key]
