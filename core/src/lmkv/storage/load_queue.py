"""The loads that wait for one tier, in order of priority and of the prompt, and how many of them run.

Loads wait here and not in the tier's driver: what waits holds no memory, can still be put before others, and can be
given up when nobody wants it any more.
"""

from __future__ import annotations

import heapq
import itertools
import time
from typing import TYPE_CHECKING, Final, NamedTuple

from lmkv.storage.driver import RUNNING

if TYPE_CHECKING:
    from collections.abc import Iterator

    from lmkv.storage.index import Entry, Shard
    from lmkv.storage.tier import Tier

SPARE: Final = 1
"""Batches that run beyond the tier's threads: the next one is at hand when a thread has done its work."""

_orders = itertools.count()


class Wanted(NamedTuple):
    """One frame to be loaded."""

    entry: Entry
    shard: int

    @property
    def part(self) -> Shard | None:
        """Its record; None: the chunk has gone."""
        return self.entry.shards.get(self.shard)


class Batch:
    """Frames that one call brings from one tier.

    Attributes:
        priority: as in `lmkv.storage.driver`; that of the most urgent who waits for any of them.
        tried: bits of the tiers that were asked for these frames before.
        keep: somebody wants them who holds no lease.
        passing: nobody wants them but a copy to another tier.
        nbytes: of the frames, as far as is known.
        since: time (`time.monotonic`) from which on it has waited.
        begun: loop time at which its first tier was asked; 0 before. All deadlines are counted from then.
    """

    __slots__ = (
        "begun",
        "keep",
        "nbytes",
        "order",
        "passing",
        "priority",
        "running",
        "since",
        "tier",
        "tried",
        "wants",
    )

    def __init__(self, tier: Tier, priority: int, *, tried: int = 0, keep: bool = False, passing: bool = False) -> None:
        self.tier = tier
        self.priority = priority
        self.tried = tried
        self.keep = keep
        self.passing = passing
        self.wants: list[Wanted] = []
        self.nbytes = 0
        self.order = next(_orders)
        self.since = time.monotonic()
        self.running = False
        self.begun = 0.0

    @property
    def place(self) -> tuple[int, int]:
        """Whoever has the smaller one comes first."""
        return self.priority, self.order

    def rest(self, wants: list[Wanted], nbytes: int) -> Batch:
        """A batch of what could not be loaded with this one yet, in its place."""
        made = Batch(self.tier, self.priority, tried=self.tried, keep=self.keep, passing=self.passing)
        made.wants, made.nbytes, made.order, made.since = wants, nbytes, self.order, self.since
        if self.tried:  # its time began with the tier that could not give it; else it begins when it is its turn
            made.begun = self.begun
        return made


class LoadQueue:
    """Of one tier. Lives on the storage loop."""

    def __init__(self, threads: int) -> None:
        self._threads = threads
        self._slots = threads + SPARE
        self._heap: list[tuple[int, int, int, Batch]] = []
        self._waiting: set[Batch] = set()
        self._running: set[Batch] = set()
        self.hungry: set[Batch] = set()
        """Of those that run: waiting for memory."""

    def push(self, batch: Batch) -> None:
        """`batch` waits from now on."""
        self._waiting.add(batch)
        self._enter(batch)

    def urge(self, batch: Batch, priority: int) -> bool:
        """Somebody who cannot wait so long wants a frame of `batch`; whether nobody has been so urgent before."""
        if priority >= batch.priority:
            return False
        batch.priority = priority
        if batch in self._waiting:
            self._enter(batch)
        return True

    def next(self) -> Batch | None:
        """The batch that may begin now; None while enough of them run. It runs until `ended`.

        What a running request waits for has slots of its own, so that what has begun for others is not in its way. A
        batch whose place is before that of one that waits for memory begins beside it: it gets the memory first.
        """
        while self._heap:
            priority, _, _, batch = self._heap[0]
            if batch not in self._waiting or batch.priority != priority:
                heapq.heappop(self._heap)
                continue
            running = len(self._running)
            if priority == RUNNING:
                running = sum(1 for other in self._running if other.priority == RUNNING)
            if running >= self._slots and not any(other.place > batch.place for other in self.hungry):
                return None
            heapq.heappop(self._heap)
            self._waiting.discard(batch)
            self._running.add(batch)
            batch.running = True
            return batch
        return None

    def first(self, batch: Batch) -> bool:
        """Nothing of this tier that is before `batch` waits, for memory or to begin.

        Frames are let go of in the order in which they are copied. If later ones had all the memory, those before them,
        which are to be copied first, would never come.
        """
        while self._heap and (self._heap[0][3] not in self._waiting or self._heap[0][3].priority != self._heap[0][0]):
            heapq.heappop(self._heap)
        waiting = bool(self._heap) and self._heap[0][3].place < batch.place
        return not waiting and not any(other.place < batch.place for other in self.hungry)

    def ended(self, batch: Batch) -> None:
        """`batch` has left the tier."""
        self._running.discard(batch)
        if not self:
            batch.tier.cost("get").refit()  # now, and not in the next look-up

    def forget(self, batch: Batch) -> None:
        """`batch` need not be loaded."""
        self._waiting.discard(batch)

    def waiting(self) -> Iterator[Batch]:
        """All that wait, in no order."""
        return iter(list(self._waiting))

    def backlog(self) -> tuple[int, int]:
        """Calls and bytes that are before a load that is pushed now."""
        batches = [*self._waiting, *self._running]
        return len(batches), sum(batch.nbytes for batch in batches)

    def __bool__(self) -> bool:
        return bool(self._waiting or self._running)

    def _enter(self, batch: Batch) -> None:
        heapq.heappush(self._heap, (batch.priority, batch.order, next(_orders), batch))
