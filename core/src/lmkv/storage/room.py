"""Room in the pool: what stores, loads and copies may take of it, and what goes for them.

The pool holds the resident tier, frames being filled by clients or on their way down, and staging: what loads need on
their way up. A store may not eat into the staging reserve and never waits: it evicts or is rejected, and then it has
evicted nothing. A load may wait for memory until its deadline. A copy from one slow tier to another is a load that may
use half of the reserve, and pushes nothing out of the resident tier. A load that a running request waits for takes the
memory of frames that were loaded ahead for requests in the queue: they are loaded again when it is their turn.
"""

from __future__ import annotations

import asyncio
import time
from itertools import groupby
from typing import TYPE_CHECKING

from lmkv.frame import frame_bytes
from lmkv.types import AT_ONCE, AT_ONCE_SHARE, MissReason

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from lmkv.memory import MemoryObject
    from lmkv.storage.index import Entry, NamespaceIndex, Shard
    from lmkv.storage.stack import Stack
    from lmkv.types import ChunkKey


class Room:
    """Of one stack. Lives on the storage loop.

    Attributes:
        filling: bytes of frames that clients are filling.
        reserve: bytes of the pool that stores leave to loads.
    """

    def __init__(self, stack: Stack, reserve: int) -> None:
        self._stack = stack
        self._pool = stack.pool
        self.filling = 0
        self.reserve = reserve
        self._staged: dict[Shard, Entry] = {}
        self._more = asyncio.Event()

    def for_store(self, nbytes: int) -> MemoryObject | None:
        """Memory for a frame to be filled, under the word ``fill``; None when there is none. Never waits.

        It is the caller's to count it as `filling`.
        """
        return self._allocate(nbytes, "fill", self._short(nbytes), passing=False)

    def for_stores(self, sizes: Sequence[int]) -> list[MemoryObject | None]:
        """As `for_store` for each in turn, all of which is counted as `filling`."""
        objects: list[MemoryObject | None] = []
        fit = self._short(sum(sizes)) <= 0  # else each by itself, with what it evicts
        for nbytes, same in groupby(sizes):
            count = len(list(same))
            made = self._pool.allocate_all(nbytes, count, "fill") if fit else []
            self.filling += nbytes * len(made)
            objects += made
            for _ in range(count - len(made)):
                obj = self.for_store(nbytes)
                self.filling += nbytes if obj is not None else 0
                objects.append(obj)
        return objects

    def for_load(self, nbytes: int, *, urgent: bool = False, most: int | None = None) -> MemoryObject | None:
        """Memory for a load, under the word ``load``; None when there is none now. Never waits.

        `urgent`: a running request waits for it; what was loaded ahead for others gives way. `most`: no request needs
        it; nothing is evicted for it, and all such loads together take no more than so many bytes.
        """
        pool = self._pool
        if most is not None:
            if pool.passing_bytes and pool.passing_bytes + nbytes > most:
                return None
            return pool.allocate(nbytes, "load", passing=True)
        obj = self._allocate(nbytes, "load", nbytes - pool.free_bytes, passing=True)
        while obj is None and urgent and self._take_back():
            obj = pool.allocate(nbytes, "load", passing=True)
        return obj

    def fits(self, entries: Sequence[Entry], pinned: Iterable[Entry]) -> int:
        """How many of `entries`, which follow one another, can be brought into the pool beside what is `pinned` there.

        What others have been promised gives way to a request that runs, and its own lease lets go of what is copied: so
        where there is room for what it copies at once there is room for all. Else there is for what fits beside pins.
        """
        fixed = self.filling
        for entry in pinned:
            if entry not in entries and self.here(entry):
                fixed += _size(entry)
        room = self._pool.nbytes - fixed
        if room >= self._at_once(max(map(_largest, {entry.namespace for entry in entries}), default=0)):
            return len(entries)  # as it mostly is: without a look at each
        sizes = [_size(entry) for entry in entries]
        if room >= self._at_once(max(sizes, default=0)):
            return len(entries)
        for i, entry in enumerate(entries):
            room -= sizes[i]
            if room < 0 and not self.here(entry):
                return i
        return len(entries)

    def _at_once(self, largest: int) -> int:
        """Bytes in which a request can copy any number of chunks, of which the largest has so many bytes."""
        return min(AT_ONCE * largest, self._pool.nbytes // AT_ONCE_SHARE) + 2 * largest

    def here(self, entry: Entry) -> bool:
        """All shards of it are in the pool."""
        bit = 0 if self._stack.ram is None else self._stack.ram.bit
        return all(part.tiers & bit or part.staged is not None for part in entry.shards.values())

    async def wait(self, deadline: float, take: Callable[[], MemoryObject | None]) -> MemoryObject | None:
        """What `take` gives, which is asked each time that there is more room, until the loop's time `deadline`."""
        loop = asyncio.get_running_loop()
        while (obj := take()) is None:
            self._more.clear()
            left = deadline - loop.time()
            if left <= 0:
                return None
            try:
                await asyncio.wait_for(self._more.wait(), left)
            except asyncio.TimeoutError:
                return None
        return obj

    def more(self) -> None:
        """Somebody has let go of pool memory: loads that wait try again."""
        self._more.set()

    def stage(self, entry: Entry, part: Shard, obj: MemoryObject) -> None:
        """Keep a frame in the pool that no resident tier has, until `unstage`; takes an owner of its own."""
        if part.staged is None:
            obj.retain("staged")
            part.staged = obj
            self._staged[part] = entry

    def unstage(self, part: Shard) -> None:
        """Nobody may need the staged frame any more. Idempotent."""
        if part.staged is not None:
            part.staged.release("staged")
            part.staged = None
            del self._staged[part]

    def _short(self, nbytes: int) -> int:
        """Bytes that must go before `nbytes` more can be filled; 0 or less: there is room for them."""
        pool, ram = self._pool, self._stack.ram
        short = nbytes + max(0, self.reserve - pool.passing_bytes) - pool.free_bytes
        return short if ram is None else max(short, ram.shortfall(nbytes + self.filling))

    def _allocate(self, nbytes: int, owner: str, short: int, *, passing: bool) -> MemoryObject | None:
        """With `short` bytes evicted before, if that many are free to go."""
        stack, ram = self._stack, self._stack.ram
        if short > 0 and (ram is None or not stack.evict(ram, short)):
            return None
        obj = self._pool.allocate(nbytes, owner, passing=passing)
        while obj is None and ram is not None and stack.evict(ram, nbytes, whole=not passing):  # free, but in pieces
            obj = self._pool.allocate(nbytes, owner, passing=passing)
        return obj

    def _take_back(self) -> bool:
        """One chunk leaves the pool that was loaded ahead and can be loaded again: the one that is needed last."""
        ram = self._stack.ram
        for part, entry in reversed(self._staged.items()):
            if part.staged is not None and part.staged.count == 1 and self._again(entry):
                self.unstage(part)
                return True
        if ram is None:
            return False
        key = next(iter(ram.victims(1, self._lent)), None)
        lent = None if key is None else self._stack.index.entry(key)
        return lent is not None and self._stack.leave(lent, ram, MissReason.EVICTED) > 0

    def _again(self, entry: Entry) -> bool:
        """Nobody needs `entry` just now but leases, and it can be loaded again."""
        below = self._stack.own & ~self._stack.unreachable()
        return entry.holds == entry.leased > 0 and all(
            part.tiers & below and not part.writes for part in entry.shards.values()
        )

    def _lent(self, key: ChunkKey) -> bool:
        entry, ram = self._stack.index.entry(key), self._stack.ram
        if entry is None or ram is None or entry.pinned_until > time.monotonic() or not self._again(entry):
            return False
        obj = ram.borrow([key])[0]
        if obj is None:
            return False
        obj.release("get")
        return obj.count == 1  # the tier's: nobody copies from it


def _largest(namespace: NamespaceIndex) -> int:
    """Bytes of a full chunk: no entry has more."""
    pages = namespace.chunk_pages
    return sum([frame_bytes(pages * page_bytes, pages - 1) for page_bytes in namespace.page_bytes])


def _size(entry: Entry) -> int:
    return sum(part.nbytes for part in entry.shards.values())
