"""Loads: frames from the tiers below into the pool. Each frame is loaded once, whoever waits for it.

A load tries the tiers that have the frame from the fastest down; what one of them cannot give is asked of the next,
and a damaged or vanished frame is taken out of the books on the way. What arrives is verified (in the driver's
thread) before anybody is told.

A tier is asked for as many batches at once as it has threads; the others wait in order (`lmkv.storage.load_queue`). A
load that nobody wants any more is given up if it waits still; one that has begun ends in the pool.
"""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Final

from lmkv.storage.coding import IDENTITY, stored_bound
from lmkv.storage.driver import QUEUED, RUNNING
from lmkv.storage.load_queue import Batch, LoadQueue, Wanted
from lmkv.types import MissReason

if TYPE_CHECKING:
    from collections.abc import Iterable

    from lmkv.frame import Trailer
    from lmkv.memory import MemoryObject
    from lmkv.storage.index import Entry, Shard
    from lmkv.storage.stack import Stack
    from lmkv.storage.tier import GetResult, Tier

BATCH_BYTES: Final = 16 << 20
"""Bytes of frames that go into one call of a backend: small frames share a call's cost, large ones run in parallel."""
BATCH_FRAMES: Final = 32


class Loads:
    """Starts loads and lets others wait for them. Lives on the storage loop."""

    def __init__(self, stack: Stack) -> None:
        self._stack = stack
        self._tasks: set[asyncio.Task[None]] = set()
        self._queues = {tier.number: LoadQueue(tier.settings.threads) for tier in stack.tiers if not tier.resident}
        self._batches: dict[Shard, Batch] = {}
        self._due: list[list[Entry | None]] = []

    def start(self, wanted: Iterable[Wanted], *, priority: int, keep: bool = False, passing: bool = False) -> None:
        """Begin to load what is neither in the pool nor on its way; in the order given, in batches per tier.

        What is on its way already gets the higher of both priorities. The caller keeps the entries held until the loads
        have ended; with `keep` they need not be held, and are loaded all the same, but may be gone soon. What is only
        `passing` on to another tier goes into no resident one, unless somebody else wants it there.
        """
        batches: dict[int, Batch] = {}
        for want in wanted:
            part = want.part
            if part is None or self._resident(want, part) or want.part is None:
                continue
            if part.loading is not None:
                self._join(part, priority, keep=keep, passing=passing)
                continue
            part.loading = asyncio.get_running_loop().create_future()
            tier = self.source(part)
            if tier is None:
                self._end(want, MissReason.EVICTED)
                continue
            batch = batches.get(tier.number)
            if batch is None:
                batch = batches[tier.number] = Batch(tier, priority, keep=keep, passing=passing)
            batch.wants.append(want)
            batch.nbytes += self.stored_bytes(tier, part)
            self._batches[part] = batch
            if full(batch.nbytes, len(batch.wants)):
                self._push(batches.pop(tier.number))
        for batch in batches.values():
            self._push(batch)

    def bring(self, entries: Iterable[Entry | None], shard: int | None, *, priority: int) -> bool:
        """Start the loads of what the pool has not, in order: of one shard, or (None) of all. Whether there is such."""
        wanted: list[Wanted] = []
        bit = 0 if (ram := self._stack.ram) is None else ram.bit
        for entry in entries:
            if entry is None:
                continue
            for number, part in entry.shards.items():
                if not part.tiers & bit and part.staged is None and (shard is None or shard == number):
                    wanted.append(Wanted(entry, number))
        if wanted:
            self.start(wanted, priority=priority)
        return bool(wanted)

    def bring_soon(self, entries: list[Entry | None]) -> None:
        """As `bring` of all shards of those in the list, once the answer to their look-up has gone out.

        What has left the list by then is not brought. Whoever asks for offers before finds the loads begun.
        """
        if not self._due:
            loop = asyncio.get_running_loop()
            loop.call_soon(loop.call_soon, self.bring_due)  # whoever awaits the look-up answers in between
        self._due.append(entries)

    def bring_due(self) -> None:
        """Start what was to be started soon."""
        due, self._due = self._due, []
        for entries in due:
            self.bring(entries, None, priority=QUEUED)

    async def load_one(self, entry: Entry, shard: int, *, priority: int, passing: bool = False) -> MissReason | None:
        """Have one frame in the pool; None when it is there, else why not. The caller holds the entry."""
        self.start([Wanted(entry, shard)], priority=priority, passing=passing)
        part = entry.shards.get(shard)
        if part is None:
            return MissReason.EVICTED
        return None if part.loading is None else await asyncio.shield(part.loading)

    def unwanted(self, entry: Entry) -> None:
        """Nobody holds `entry` any more: what of it waits to be loaded is given up."""
        for number, part in list(entry.shards.items()):
            batch = self._batches.get(part)
            if batch is None or batch.running or batch.keep:
                continue
            batch.wants = [want for want in batch.wants if want.part is not part]
            batch.nbytes -= self.stored_bytes(batch.tier, part)
            if not batch.wants:
                self._queues[batch.tier.number].forget(batch)
            self._stack.metrics.inc("lmkv_loads_cancelled_total", tier=batch.tier.name)
            self._end(Wanted(entry, number), MissReason.EXPIRED)

    def backlog(self, tier: Tier) -> tuple[int, int]:
        """Calls and bytes of `tier` that come before a load that is started now."""
        return self._queues[tier.number].backlog()

    async def finished(self) -> None:
        """Wait until no load is under way (for tests and for close)."""
        self.bring_due()
        while self._tasks:
            await asyncio.wait(self._tasks)

    def cancel(self) -> None:
        """Stop waiting for anything; used when the stack closes."""
        self._due.clear()
        for queue in self._queues.values():
            for batch in queue.waiting():
                queue.forget(batch)
                for want in batch.wants:
                    self._end(want, MissReason.FAILED)
        for task in self._tasks:
            task.cancel()

    def source(self, part: Shard, tried: int = 0) -> Tier | None:
        """The fastest tier that has the frame and was not asked yet (bits of `tried`); one that is off comes last."""
        places = part.tiers & ~tried
        first: Tier | None = None
        for tier in self._stack.tiers:
            if places & tier.bit:
                if tier.readable:
                    return tier
                first = first or tier
        return first

    @staticmethod
    def stored_bytes(tier: Tier, part: Shard) -> int:
        """Bytes of a frame in `tier`; of one in a shared store only the most is known that it can have."""
        known = tier.index
        return (known and known.get(part.key)) or stored_bound(part.nbytes)

    def _join(self, part: Shard, priority: int, *, keep: bool, passing: bool) -> None:
        """Somebody else wants a frame that is on its way."""
        batch = self._batches.get(part)
        if batch is not None:
            batch.keep |= keep
            batch.passing &= passing
            if self._queues[batch.tier.number].urge(batch, priority):
                self._stack.room.more()  # if it waits for memory: others have to give way to it now
            self._pump(batch.tier)

    def _push(self, batch: Batch) -> None:
        self._queues[batch.tier.number].push(batch)
        self._pump(batch.tier)

    def _pump(self, tier: Tier) -> None:
        """Let the tier have what it can take now."""
        while (batch := self._queues[tier.number].next()) is not None:
            task = asyncio.get_running_loop().create_task(self._load(batch))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    def _resident(self, want: Wanted, part: Shard) -> bool:
        """It is in the pool. Where the books say so wrongly they are put right."""
        ram = self._stack.ram
        if part.staged is not None:
            return True
        if ram is None or not part.tiers & ram.bit:
            return False
        if part.key in ram.index:
            return True
        self._stack.lost(want.entry, want.shard, ram, MissReason.EVICTED)
        return False

    async def _load(self, batch: Batch) -> None:
        """Load a batch from its tier; what that could not give waits for the next tier that has it."""
        tier, begun = batch.tier, time.monotonic()
        batch.begun = batch.begun or asyncio.get_running_loop().time()
        try:
            missing = await self._load_from(batch)
            self._pass_on(batch, missing)
            late = {reason for _, reason in missing} & {MissReason.DEADLINE, MissReason.NO_ROOM}
            if late:  # what has waited as long need not wait once more
                for other in self._queues[tier.number].waiting():
                    if other.since <= begun:
                        self._give_up(other, min(late, key=str))
        finally:
            for want in batch.wants:
                if want.part is not None and self._batches.get(want.part) is batch:
                    self._end(want, MissReason.FAILED)  # only what an unexpected end has left open
            self._queues[tier.number].ended(batch)
            self._pump(tier)

    def _pass_on(self, batch: Batch, missing: Iterable[tuple[Wanted, MissReason]]) -> None:
        """What a tier could not give is asked of the next that has it; what none has left, or has time for, ends."""
        tried = batch.tried | batch.tier.bit
        spent = asyncio.get_running_loop().time() - batch.begun if batch.begun else 0.0
        following: dict[int, Batch] = {}
        for want, reason in missing:
            part = want.part
            source = None if part is None else self.source(part, tried)
            if part is None or source is None or source.settings.deadline <= spent:
                self._end(want, reason)
                continue
            after = following.get(source.number)
            if after is None:
                after = following[source.number] = Batch(
                    source, batch.priority, tried=tried, keep=batch.keep, passing=batch.passing
                )
            after.begun = batch.begun
            after.wants.append(want)
            after.nbytes += self.stored_bytes(source, part)
            self._batches[part] = after
        for after in following.values():
            self._push(after)

    def _give_up(self, batch: Batch, reason: MissReason) -> None:
        """A batch waits no longer for its tier."""
        self._queues[batch.tier.number].forget(batch)
        self._pass_on(batch, [(want, reason) for want in batch.wants])

    async def _load_from(self, batch: Batch) -> list[tuple[Wanted, MissReason]]:
        """One call of one tier. Ends what arrived; returns the rest, each with its reason."""
        tier, priority = batch.tier, min(batch.priority, QUEUED)
        deadline = batch.begun + tier.settings.deadline  # for memory, the tier and decoding together
        missing: list[tuple[Wanted, MissReason]] = []
        ready: list[tuple[Wanted, MemoryObject]] = []
        try:
            await self._make_room(batch, ready, deadline)
            if not ready:
                return [(want, MissReason.NO_ROOM) for want in batch.wants]
            keys = [want.entry.key(want.shard) for want, _ in ready]
            results = await tier.get(keys, [obj for _, obj in ready], priority=priority, until=deadline)
            for (want, obj), result in zip(list(ready), results, strict=True):
                try:
                    reason = await self._take(batch, want, obj, result, deadline)
                finally:
                    del ready[0]
                    obj.release("load")
                    self._stack.room.more()  # decoding the next one needs memory beside what was loaded
                if reason is not None:
                    missing.append((want, reason))
        finally:
            for _, obj in ready:
                obj.release("load")
            self._stack.room.more()
        return missing

    async def _make_room(self, batch: Batch, ready: list[tuple[Wanted, MemoryObject]], deadline: float) -> None:
        """Memory for a batch. Waits for that of the first frame only; frames that find none now wait in its place.

        So nobody holds memory while waiting for more, and two batches can't keep each other waiting.
        """
        for i, want in enumerate(batch.wants):
            part = want.part
            nbytes = 0 if part is None else self.stored_bytes(batch.tier, part)
            if part is None:
                continue
            if ready:
                obj = self._take_room(batch, nbytes)
            else:
                obj = await self._first_room(batch, nbytes, deadline)
            if obj is None:
                if ready:
                    left = batch.wants[i:]
                    del batch.wants[i:]
                    rest = batch.rest(left, sum(self.stored_bytes(batch.tier, w.part) for w in left if w.part))
                    for other in left:
                        if other.part is not None:
                            self._batches[other.part] = rest
                    batch.nbytes -= rest.nbytes
                    self._push(rest)
                return
            ready.append((want, obj))

    async def _first_room(self, batch: Batch, nbytes: int, deadline: float) -> MemoryObject | None:
        """Memory for the first frame of a batch, after those whose place is before it have got theirs."""
        queue = self._queues[batch.tier.number]
        queue.hungry.add(batch)
        self._pump(batch.tier)
        try:
            return await self._stack.room.wait(
                deadline, lambda: self._take_room(batch, nbytes) if queue.first(batch) else None
            )
        finally:
            queue.hungry.discard(batch)
            self._stack.room.more()

    def _take_room(self, batch: Batch, nbytes: int, share: int = 2) -> MemoryObject | None:
        """Memory for a frame of `batch` if there is some; what only passes gets one `share`-th of the reserve."""
        room = self._stack.room
        most = room.reserve // share if batch.passing else None
        return room.for_load(nbytes, urgent=batch.priority == RUNNING, most=most)

    async def _take(
        self, batch: Batch, want: Wanted, obj: MemoryObject, result: GetResult, deadline: float
    ) -> MissReason | None:
        """Put an arrived frame into its place, or say why it is none."""
        tier, priority = batch.tier, min(batch.priority, QUEUED)
        entry, shard = want
        part = entry.shards.get(shard)
        if part is None:
            return MissReason.EVICTED
        trailer, reason = result.trailer, result.reason
        if trailer is not None and not _fits(entry, shard, trailer):
            tier.set_aside([entry.key(shard)])
            reason = MissReason.CORRUPT
        if reason is not None:
            self._mourn(tier, want, reason)
            return reason
        if trailer is not None:
            entry.namespace.learn(entry, b"".join(trailer.prefixes))
        if trailer is None or trailer.codec == IDENTITY:
            obj.sealed = True
            obj.shorten(result.outcome.nbytes)
            promote = tier.settings.read == "promote" and not batch.passing
            self._stack.place(entry, shard, obj, promote=promote)
            self._end(want, None)
            return None
        nbytes = self._stack.frame_size(entry, shard)
        target = await self._stack.room.wait(deadline, lambda: self._take_room(batch, nbytes, share=1))
        if target is None:
            return MissReason.NO_ROOM
        try:
            reason = await tier.decode(obj, trailer, target, priority=priority, until=deadline)
            if reason is not None:
                self._mourn(tier, want, reason)
                return reason
            promote = tier.settings.read == "promote" and not batch.passing
            self._stack.place(entry, shard, target, promote=promote)
        finally:
            target.release("load")
        self._end(want, None)
        return None

    def _mourn(self, tier: Tier, want: Wanted, reason: MissReason) -> None:
        """A frame that is damaged or has gone leaves the books; an ill tier's frames stay in them.

        One that cannot be read here is counted as long as it is there, but offered no more.
        """
        key = want.entry.key(want.shard)
        if reason is MissReason.UNREADABLE:
            tier.disown(key)
        elif reason in {MissReason.CORRUPT, MissReason.EVICTED}:
            tier.forget(key)
        else:
            return
        if reason is MissReason.CORRUPT:
            self._stack.metrics.inc("lmkv_corrupt_frames_total", tier=tier.name)
        self._stack.lost(want.entry, want.shard, tier, reason)

    def _end(self, want: Wanted, reason: MissReason | None) -> None:
        """Tell those who wait; idempotent."""
        part = want.entry.shards.get(want.shard)
        if part is None or part.loading is None:
            return
        self._batches.pop(part, None)
        loading, part.loading = part.loading, None
        if not loading.done():
            loading.set_result(reason)
        if reason is not None:
            self._stack.forget_if_gone(want.entry, want.shard, reason)
        self._stack.settle(want.entry)


def _fits(entry: Entry, shard: int, trailer: Trailer) -> bool:
    """Whether an intact frame is as large as its readers will take it for: others write to shared stores too."""
    sizes = entry.namespace.page_bytes
    known = shard < len(sizes)  # else nobody has registered the namespace, and nobody reads it
    return trailer.pages == entry.pages and (not known or trailer.raw_bytes == entry.pages * sizes[shard])


def full(nbytes: int, frames: int) -> bool:
    """Whether a batch takes no more."""
    return nbytes >= BATCH_BYTES or frames >= BATCH_FRAMES
