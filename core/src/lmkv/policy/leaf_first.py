"""Least recently used first, but never a chunk before its cached continuation.

A look-up finds leading chunks only: a chunk whose predecessor was evicted is dead weight. So only *leaves* are victims,
entries of which no continuation (an entry of the same namespace and shard whose parent they are) is cached here.

The leaves are in a heap by time of use, lazily: `touch` only stamps the entry, and an entry that comes up with an old
stamp is put back under its present one. Each entry is in the heap at most once. What is there and is no leaf any more,
or has gone, is dropped when it comes up; before such ghosts outnumber the leaves they are all swept out, so that no
single call has many of them to pass.
"""

from __future__ import annotations

from heapq import heapify, heappop, heappush, heapreplace
from itertools import count
from typing import TYPE_CHECKING, Final

from lmkv.types import ChunkKey

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

_SLACK: Final = 64


class _Entry:
    __slots__ = ("alive", "key", "parent", "queued", "used")

    def __init__(self, key: ChunkKey, used: int) -> None:
        self.key = key
        self.parent: ChunkKey | None = None
        self.used = used
        self.queued = False
        self.alive = True


class LeafFirstLRU:
    """Evicts the least recently used leaf; `victims` may give a leaf and then the chunk before it.

    `add`, `remove`: amortised O(log n); `touch`: O(1); `victims`: O(log n) for each victim and for each leaf that it
    passes over because it is not free.
    """

    def __init__(self) -> None:
        self._clock = count()
        self._entries: dict[ChunkKey, _Entry] = {}
        self._continuations: dict[ChunkKey, int] = {}
        """Cached continuations of a chunk, whether or not it is cached itself; never 0."""
        self._heap: list[tuple[int, _Entry]] = []
        self._leaves = 0

    def add(self, key: ChunkKey, parent: bytes | None) -> None:
        """`key` was stored; it becomes the most recently used. Entries come in any order, continuations first too."""
        entry = self._note(key, parent)
        if key not in self._continuations:
            self._queue(entry)

    def add_all(self, parents: Mapping[ChunkKey, bytes | None]) -> None:
        """As `add` for each in turn, but only the leaves that remain are queued; much quicker into an empty policy."""
        entries, continuations = self._entries, self._continuations
        if entries:
            for entry in [self._note(key, parent) for key, parent in parents.items()]:
                if entry.key not in continuations:
                    self._queue(entry)
            return
        clock = self._clock
        for key, parent in parents.items():
            entry = entries[key] = _Entry(key, next(clock))
            namespace, shard, digest = key
            if parent and parent != digest:
                entry.parent = before = ChunkKey(namespace, shard, parent)
                continuations[before] = continuations.get(before, 0) + 1
        leaves = [entry for key, entry in entries.items() if key not in continuations]
        for entry in leaves:
            entry.queued = True
        self._leaves = len(leaves)
        self._heap = [(entry.used, entry) for entry in leaves]  # by time of use, so it is a heap

    def touch(self, key: ChunkKey) -> None:
        """`key` was used. Unknown keys are ignored."""
        entry = self._entries.get(key)
        if entry is not None:
            entry.used = next(self._clock)

    def remove(self, key: ChunkKey) -> None:
        """`key` has gone. Unknown keys are ignored."""
        entry = self._entries.pop(key, None)
        if entry is not None:
            entry.alive = False
            if key not in self._continuations:
                self._leaves -= 1
            self._part(entry)

    def victims(
        self, nbytes: int, size: Callable[[ChunkKey], int], free: Callable[[ChunkKey], bool]
    ) -> Iterator[ChunkKey]:
        """Keys to evict, in order, until `nbytes` are covered; each is looked for when it is taken."""
        seen: list[_Entry] = []
        # Chunks that become leaves when what is chosen has gone, and how many continuations of each are chosen.
        opened: list[tuple[int, _Entry]] = []
        gone: dict[ChunkKey, int] = {}
        try:
            while nbytes > 0:
                entry = self._next(opened, seen)
                if entry is None:
                    break
                if not free(entry.key):
                    continue
                yield entry.key
                nbytes -= size(entry.key)
                before = self._entries.get(entry.parent) if entry.parent is not None else None
                if before is not None:
                    gone[before.key] = gone.get(before.key, 0) + 1
                    if gone[before.key] == self._continuations[before.key]:
                        heappush(opened, (before.used, before))
        finally:
            for entry in seen:
                self._queue(entry)

    def _next(self, opened: list[tuple[int, _Entry]], seen: list[_Entry]) -> _Entry | None:
        """Take the least recently used of `opened` and the leaves; leaves go to `seen`, to be put back."""
        heap = self._heap
        while heap:
            used, entry = heap[0]
            if self._is_ghost(entry):
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

    def _is_ghost(self, entry: _Entry) -> bool:
        return not entry.alive or entry.key in self._continuations

    def _note(self, key: ChunkKey, parent: bytes | None) -> _Entry:
        """`key` is there, most recently used, the continuation of `parent`. If it is a leaf the caller queues it."""
        entry = self._entries.get(key)
        if entry is None:
            entry = self._entries[key] = _Entry(key, next(self._clock))
            if key not in self._continuations:
                self._leaves += 1
        else:
            entry.used = next(self._clock)
        namespace, shard, digest = key
        before = ChunkKey(namespace, shard, parent) if parent and parent != digest else None
        if before != entry.parent:
            self._part(entry)
            entry.parent = before
            self._join(before)
        return entry

    def _queue(self, entry: _Entry) -> None:
        """Put a leaf into the heap, unless it is there."""
        if entry.queued:
            return
        entry.queued = True
        heappush(self._heap, (entry.used, entry))
        if len(self._heap) > 2 * self._leaves + _SLACK:
            kept = []
            for _, each in self._heap:
                if self._is_ghost(each):
                    each.queued = False
                else:
                    kept.append((each.used, each))
            heapify(kept)
            self._heap = kept

    def _join(self, before: ChunkKey | None) -> None:
        """`before` has one more continuation, and is no leaf."""
        if before is None:
            return
        continuations = self._continuations.get(before, 0)
        self._continuations[before] = continuations + 1
        if not continuations and before in self._entries:
            self._leaves -= 1

    def _part(self, entry: _Entry) -> None:
        """`entry` is no continuation of its parent any more; the parent may be a leaf now."""
        before = entry.parent
        if before is None:
            return
        left = self._continuations[before] - 1
        if left:
            self._continuations[before] = left
            return
        del self._continuations[before]
        parent = self._entries.get(before)
        if parent is not None:
            self._leaves += 1
            self._queue(parent)
