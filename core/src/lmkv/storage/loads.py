"""Loads: frames from the tiers below into the pool. Each frame is loaded once, whoever waits for it.

A load tries the tiers that have the frame from the fastest down; what one of them cannot give is asked of the next,
and a damaged or vanished frame is taken out of the books on the way. What arrives is verified (in the driver's
thread) before anybody is told.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final, NamedTuple

from lmkv.storage.coding import IDENTITY, stored_bound
from lmkv.types import MissReason

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from lmkv.memory import MemoryObject
    from lmkv.storage.index import Entry
    from lmkv.storage.stack import Stack
    from lmkv.storage.tier import GetResult, Tier

BATCH_BYTES: Final = 16 << 20
"""Bytes of frames that go into one call of a backend: small frames share a call's cost, large ones run in parallel."""
BATCH_FRAMES: Final = 32


class Wanted(NamedTuple):
    """One frame to be loaded."""

    entry: Entry
    shard: int


class Loads:
    """Starts loads and lets others wait for them. Lives on the storage loop."""

    def __init__(self, stack: Stack) -> None:
        self._stack = stack
        self._tasks: set[asyncio.Task[None]] = set()

    def start(self, wanted: Iterable[Wanted], *, priority: int) -> None:
        """Begin to load what is neither in the pool nor on its way; in the order given, in batches per tier.

        The caller keeps the entries held until the loads have ended, or accepts that what arrives may not be kept.
        """
        batches: dict[int, list[Wanted]] = {}
        sizes: dict[int, int] = {}
        for want in wanted:
            part = want.entry.shards.get(want.shard)
            if part is None or part.loading is not None or self._resident(want):
                continue
            tier = self._source(want, tried=0)
            part.loading = asyncio.get_running_loop().create_future()
            if tier is None:
                self._end(want, MissReason.EVICTED)
                continue
            batch = batches.setdefault(tier.number, [])
            sizes[tier.number] = sizes.get(tier.number, 0) + part.nbytes
            batch.append(want)
            if sizes[tier.number] >= BATCH_BYTES or len(batch) >= BATCH_FRAMES:
                self._spawn(tier, batches.pop(tier.number), priority)
                sizes[tier.number] = 0
        for number, batch in batches.items():
            self._spawn(self._stack.tiers[number], batch, priority)

    def bring(self, entries: Iterable[Entry | None], shard: int | None, *, priority: int) -> None:
        """Start the loads of what the pool has not, in order: of one shard, or (None) of all."""
        wanted: list[Wanted] = []
        ram = self._stack.ram
        bit = 0 if ram is None else ram.bit
        for entry in entries:
            if entry is None:
                continue
            for number, part in entry.shards.items():
                if not part.tiers & bit and part.staged is None and (shard is None or shard == number):
                    wanted.append(Wanted(entry, number))
        if wanted:
            self.start(wanted, priority=priority)

    async def load_one(self, entry: Entry, shard: int, *, priority: int) -> MissReason | None:
        """Have one frame in the pool; None when it is there, else why not."""
        self.start([Wanted(entry, shard)], priority=priority)
        part = entry.shards.get(shard)
        if part is None:
            return MissReason.EVICTED
        return None if part.loading is None else await asyncio.shield(part.loading)

    async def finished(self) -> None:
        """Wait until no load is under way (for tests and for close)."""
        while self._tasks:
            await asyncio.wait(self._tasks)

    def cancel(self) -> None:
        """Stop waiting for anything; used when the stack closes."""
        for task in self._tasks:
            task.cancel()

    def _spawn(self, tier: Tier, batch: Sequence[Wanted], priority: int) -> None:
        task = asyncio.get_running_loop().create_task(self._load(tier, batch, priority))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _resident(self, want: Wanted) -> bool:
        part = want.entry.shards[want.shard]
        ram = self._stack.ram
        return part.staged is not None or (ram is not None and bool(part.tiers & ram.bit))

    def _source(self, want: Wanted, tried: int) -> Tier | None:
        """The fastest tier that has the frame and was not asked yet (bits of `tried`)."""
        part = want.entry.shards.get(want.shard)
        places = 0 if part is None else part.tiers & ~tried
        return next((t for t in self._stack.tiers if places & t.bit), None)

    async def _load(self, tier: Tier, batch: Sequence[Wanted], priority: int, tried: int = 0) -> None:
        """Load from `tier`; what it could not give from the next tier that has it, and so on."""
        tried |= tier.bit
        try:
            following: dict[int, list[Wanted]] = {}
            for want, reason in await self._load_from(tier, batch, priority):
                source = self._source(want, tried)
                if source is None:
                    self._end(want, reason)
                else:
                    following.setdefault(source.number, []).append(want)
            for number, left in following.items():
                await self._load(self._stack.tiers[number], left, priority, tried)
        finally:
            for want in batch:
                self._end(want, MissReason.FAILED)  # only what an unexpected end has left open

    async def _load_from(self, tier: Tier, batch: Sequence[Wanted], priority: int) -> list[tuple[Wanted, MissReason]]:
        """One call of one tier. Ends what arrived; returns the rest, each with its reason."""
        deadline = asyncio.get_running_loop().time() + tier.settings.deadline
        missing: list[tuple[Wanted, MissReason]] = []
        ready: list[tuple[Wanted, MemoryObject]] = []
        try:
            for want in batch:
                obj = await self._stack.staging(self._stored_bytes(tier, want), deadline)
                if obj is None:
                    missing.append((want, MissReason.NO_ROOM))
                else:
                    ready.append((want, obj))
            if ready:
                keys = [want.entry.key(want.shard) for want, _ in ready]
                results = await tier.get(keys, [obj for _, obj in ready], priority=priority)
                for (want, obj), result in zip(list(ready), results, strict=True):
                    try:
                        reason = await self._take(tier, want, obj, result, priority, deadline)
                    finally:
                        del ready[0]
                        obj.release("load")
                        self._stack.roomier()  # decoding the next one needs memory beside what was loaded
                    if reason is not None:
                        missing.append((want, reason))
        finally:
            for _, obj in ready:
                obj.release("load")
            self._stack.roomier()
        return missing

    def _stored_bytes(self, tier: Tier, want: Wanted) -> int:
        """Of a frame in a shared store only the most is known that it can have."""
        stored = tier.index.get(want.entry.key(want.shard))
        return stored or stored_bound(want.entry.shards[want.shard].nbytes)

    async def _take(  # noqa: PLR0917  all that is known of one arrived frame
        self, tier: Tier, want: Wanted, obj: MemoryObject, result: GetResult, priority: int, deadline: float
    ) -> MissReason | None:
        """Put an arrived frame into its place, or say why it is none."""
        entry, shard = want
        part = entry.shards.get(shard)
        if part is None:
            return MissReason.EVICTED
        if result.reason is not None:
            self._mourn(tier, want, result.reason)
            return result.reason
        trailer = result.trailer
        if trailer is not None:
            entry.namespace.learn(entry, b"".join(trailer.prefixes))
        if trailer is None or trailer.codec == IDENTITY:
            part.sealed = True
            obj.shorten(result.outcome.nbytes)
            self._stack.place(entry, shard, obj, promote=tier.settings.read == "promote")
            self._end(want, None)
            return None
        target = await self._stack.staging(self._stack.frame_size(entry, shard), deadline)
        if target is None:
            return MissReason.NO_ROOM
        try:
            reason = await tier.decode(obj, trailer, target, priority=priority)
            if reason is not None:
                self._mourn(tier, want, reason)
                return reason
            part.sealed = True
            self._stack.place(entry, shard, target, promote=tier.settings.read == "promote")
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
            if key in tier.index:
                tier.unreadable.add(key)
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
        loading, part.loading = part.loading, None
        if not loading.done():
            loading.set_result(reason)
        if reason is not None:
            self._stack.forget_if_gone(want.entry, want.shard, reason)
        self._stack.settle(want.entry)
