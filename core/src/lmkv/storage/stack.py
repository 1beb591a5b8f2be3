"""The ordered tiers of a node and the pool: makes room, keeps frames where they belong, copies them up and down.

Bytes reach a tier in three ways: a store (`write: through`), ahead of an eviction above it (`write: demote`), by an
operator's move. They come up by a load, which many may wait for and which is done once. All methods run on the
storage loop.

What memory they may take for that is in `lmkv.storage.room`.
"""

from __future__ import annotations

import asyncio
import logging
import time
from typing import TYPE_CHECKING

from lmkv.frame import Trailer, frame_bytes
from lmkv.storage.coding import IDENTITY, PutItem
from lmkv.storage.demotion import Demotion
from lmkv.storage.driver import STORE
from lmkv.storage.loads import Loads
from lmkv.storage.room import Room
from lmkv.types import DIGEST_BYTES, ChunkKey, MissReason

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from lmkv.memory import MemoryObject, Pool
    from lmkv.observe.metrics import Metrics
    from lmkv.storage.index import Entry, Index
    from lmkv.storage.leases import Slot
    from lmkv.storage.tier import Tier

log = logging.getLogger(__name__)


class Stack:
    """Tiers, pool and index as one.

    Args:
        tiers: fastest first; at most one resident tier, and it is the first.
        staging: bytes of the pool that stores leave to loads.

    Attributes:
        on_stored: called with frames that have been filled and stored just now.
        on_unstored: called with namespace, shard, digest and page prefixes of a frame that somebody was to store and
            did not: refused, given up, or all of it lies in a longer one.
    """

    def __init__(self, tiers: Sequence[Tier], pool: Pool, index: Index, metrics: Metrics, *, staging: int) -> None:
        self.tiers = tiers
        self.pool = pool
        self.index = index
        self.metrics = metrics
        self.ram: Tier | None = tiers[0] if tiers and tiers[0].resident else None
        self.room = Room(self, staging)
        self.own = sum(t.bit for t in tiers if not t.resident and not t.shared)
        self._here = sum(t.bit for t in tiers if not t.shared)
        self._through = [t for t in tiers if not t.resident and t.settings.write == "through"]
        self.demotion = Demotion(self, tiers)
        self.loads = Loads(self)
        self.on_stored: Callable[[Sequence[Slot]], None] | None = None
        self.on_unstored: Callable[[bytes, int, bytes, bytes], None] | None = None
        for tier in tiers:
            tier.on_late_put = self._late_put(tier)
            tier.on_room = self.room.more

    # --- eviction -----------------------------------------------------------------------------------------------------

    def evict(self, tier: Tier, nbytes: int, *, whole: bool = True) -> int:
        """Evict at least `nbytes` from `tier`; returns the number of frames evicted.

        When fewer than `nbytes` are free to go nothing goes; without `whole` those that are free do.
        """
        if nbytes <= 0:
            return 0
        victims = list(self.victims(tier, nbytes))
        if whole and sum(tier.index[key] for key in victims) < nbytes:
            return 0
        gone = 0
        for key in victims:
            if key not in tier.index:
                continue  # it left with another shard of its chunk
            entry = self.index.entry(key)
            if entry is None or key in tier.unreadable:
                tier.delete([key])
                gone += 1
            else:
                self._count_missed(entry, tier)
                gone += self.leave(entry, tier, MissReason.EVICTED)
        if gone:
            self.metrics.inc("lmkv_evictions_total", gone, tier=tier.name)
        return gone

    def _count_missed(self, entry: Entry, tier: Tier) -> None:
        """It is evicted before its copy to the tier below was made."""
        if self.demotion.below(tier) is None:
            return
        missed = sum(1 for part in entry.shards.values() if part.tiers == tier.bit)
        if missed:
            self.metrics.inc("lmkv_demotions_missed_total", missed, tier=tier.name)

    def victims(self, tier: Tier, nbytes: int, *, written: bool = False) -> Iterable[ChunkKey]:
        """Keys to evict from `tier` for `nbytes`, next first, found as they are taken; changes nothing.

        `written`: also frames of the pool that a copy downwards reads just now, which cannot go before it has ended.
        """
        now = time.monotonic()

        def free(key: ChunkKey) -> bool:
            entry = self.index.entry(key)
            if entry is None:
                return True
            if entry.holds or entry.pinned_until > now:
                return False
            return written or not (tier.resident and any(s.writes for s in entry.shards.values()))

        return tier.victims(nbytes, free)

    def leave(self, entry: Entry, tier: Tier, reason: MissReason) -> int:
        """All shards of `entry` leave `tier`: one without the others is of no use."""
        gone = [n for n, shard in entry.shards.items() if shard.tiers & tier.bit]
        tier.delete([entry.key(n) for n in gone])
        for n in gone:
            self.lost(entry, n, tier, reason)
        return len(gone)

    # --- places ------------------------------------------------------------------------------------------------------

    def lost(self, entry: Entry, shard: int, tier: Tier, reason: MissReason) -> None:
        """The frame no longer lies in `tier` (whose books say so already); a chunk that is nowhere leaves sight."""
        part = entry.shards.get(shard)
        if part is None:
            return
        part.tiers &= ~tier.bit
        self.forget_if_gone(entry, shard, reason)

    def forget_if_gone(self, entry: Entry, shard: int, reason: MissReason) -> None:
        """A shard that lies nowhere, and that nobody is bringing, leaves the index; without any shard the chunk does.

        What lies in shared stores only is not ours to index: it is forgotten unless a lease holds it.
        """
        part = entry.shards.get(shard)
        if part is None or part.staged is not None or part.filling or part.loading is not None or part.writes:
            return
        if part.tiers & self._here or (part.tiers and entry.holds):
            return
        del entry.shards[shard]
        if not entry.shards:
            entry.namespace.discard(entry, None if part.tiers else reason)

    def unreachable(self) -> int:
        """Bits of the tiers that refuse loads now: what lies in no other is as good as not there."""
        return sum(tier.bit for tier in self.tiers if not tier.readable)

    def trailer(self, entry: Entry, shard: int) -> Trailer:
        """The trailer of the identity-coded frame."""
        raw = entry.pages * entry.namespace.page_bytes[shard]
        return Trailer(
            key=entry.key(shard),
            parent=entry.parent,
            pages=entry.pages,
            prefixes=entry.prefixes,
            codec=IDENTITY,
            payload_bytes=raw,
            raw_bytes=raw,
        )

    def in_pool(self, entry: Entry, shard: int) -> MemoryObject | None:
        """The frame in the pool, retained for the caller under the word ``get``; None when it is not there."""
        part = entry.shards.get(shard)
        if part is None:
            return None
        if part.staged is not None:
            part.staged.retain("get")
            return part.staged
        if self.ram is not None and part.tiers & self.ram.bit:
            obj = self.ram.borrow([part.key])[0]
            if obj is None:  # a fault in the books: it must not be offered for ever
                log.error("tier %s: a frame that was promised is not there", self.ram.name, extra={"key": "promised"})
                self.ram.forget(entry.key(shard))
                self.lost(entry, shard, self.ram, MissReason.EVICTED)
            return obj
        return None

    def in_pool_all(self, entries: Sequence[Entry | None], shard: int) -> Sequence[MemoryObject | None]:
        """As `in_pool` for each; by one call of the resident tier if all of them lie there."""
        ram = self.ram
        if ram is not None:
            keys: list[ChunkKey] = []
            for entry in entries:
                part = None if entry is None else entry.shards.get(shard)
                if part is not None and part.staged is None and part.tiers & ram.bit:
                    keys.append(part.key)
            found = ram.borrow(keys) if len(keys) == len(entries) else [None]
            if None not in found:
                return found
            for obj in found:
                if obj is not None:
                    obj.release("get")
        return [None if entry is None else self.in_pool(entry, shard) for entry in entries]

    def place(self, entry: Entry, shard: int, obj: MemoryObject, *, promote: bool = True) -> None:
        """A whole frame is in the pool: into the resident tier if it fits, else kept as staged. Takes its own owner."""
        part = entry.shards[shard]
        ram = self.ram
        if promote and ram is not None and not entry.doomed:
            short = ram.shortfall(obj.nbytes)
            if short <= 0 or (self.evict(ram, short) and ram.shortfall(obj.nbytes) <= 0):
                ram.adopt([part.key], [obj], [entry.parent])
                self.pool.keep(obj)
                part.tiers |= ram.bit
                self.demotion.soon()
                return
        self.room.stage(entry, part, obj)

    def settle(self, entry: Entry) -> None:
        """Nobody may need the staged frames of `entry` any more: let go of those."""
        self.settle_all((entry,))

    def settle_all(self, entries: Iterable[Entry]) -> None:
        """As `settle` for each in turn."""
        for entry in entries:
            if not entry.holds and not self._at_rest(entry):
                self._settle(entry)
        self.room.more()

    def _at_rest(self, entry: Entry) -> bool:
        """All of it lies in tiers of this node, and nothing is to be done about it."""
        if entry.doomed or entry.leaving:
            return False
        for part in entry.shards.values():
            if not part.tiers & self._here or part.staged is not None or part.loading is not None:
                return False
        return True

    def _settle(self, entry: Entry) -> None:
        self.loads.unwanted(entry)
        for number, part in list(entry.shards.items()):
            if part.staged is not None and not part.writes and not part.filling:
                self.room.unstage(part)
            self.forget_if_gone(entry, number, MissReason.EVICTED)
        if entry.doomed:
            self._remove(entry)
        elif entry.leaving:
            leaving, entry.leaving = entry.leaving, 0
            for tier in self.tiers:
                if leaving & tier.bit:
                    self.leave(entry, tier, MissReason.EVICTED)

    def remove(self, entry: Entry, reason: MissReason | None = None) -> None:
        """Take a chunk away everywhere: out of sight now, its frames when nobody holds them."""
        entry.namespace.discard(entry, reason)
        entry.doomed = True
        self.settle(entry)

    def _remove(self, entry: Entry) -> None:
        anew = self.index.entry(entry.key(0))  # stored again while the old one was held: its frames stay
        theirs = {} if anew is None else {n: part.tiers for n, part in anew.shards.items()}
        for tier in self.tiers:
            gone = [n for n, part in entry.shards.items() if part.tiers & ~theirs.get(n, 0) & tier.bit]
            tier.delete([entry.key(n) for n in gone])
        for part in entry.shards.values():
            part.tiers = 0

    # --- down --------------------------------------------------------------------------------------------------------

    def store(self, slots: Sequence[Slot]) -> None:
        """A client has filled frames: make them visible and start their way into the tiers below."""
        together = self._place_all(slots)
        for entry, shard, obj in slots:
            if not together:
                self.place(entry, shard, obj)
            for tier in self._through:
                self.write(entry, shard, obj, tier, priority=STORE)
        if self.on_stored is not None:
            self.on_stored(slots)

    def _place_all(self, slots: Sequence[Slot]) -> bool:
        """Into the resident tier by one call, if nothing has to go for it."""
        ram = self.ram
        if ram is None or ram.shortfall(sum([slot.object.nbytes for slot in slots])) > 0:
            return False
        parts = [slot.entry.shards[slot.shard] for slot in slots]
        ram.adopt([p.key for p in parts], [slot.object for slot in slots], [slot.entry.parent for slot in slots])
        for part in parts:
            part.tiers |= ram.bit
        self.demotion.soon()
        return True

    def write(
        self,
        entry: Entry,
        shard: int,
        obj: MemoryObject,
        tier: Tier,
        *,
        priority: int,
        codec: str | None = None,
        replace: bool = False,
    ) -> asyncio.Future[bool] | None:
        """Copy a frame of the pool into `tier`. None when it makes no sense now; the future tells whether it is there.

        `replace`: the tier has the frame and is to get it anew, in another codec.
        """
        key = entry.key(shard)
        nbytes = tier.coder.bound(obj.nbytes, codec)
        if not tier.takes(key, nbytes, replace=replace):
            if key not in tier.index:
                self.metrics.inc("lmkv_tier_dropped_writes_total", tier=tier.name, reason="not_taken")
            return None
        if tier.refuses(obj.nbytes):  # before anything is evicted for it
            return None
        if not self._make_room(tier, nbytes):
            self.metrics.inc("lmkv_tier_dropped_writes_total", tier=tier.name, reason="no_room")
            return None
        part = entry.shards[shard]
        part.writes += 1
        done: asyncio.Future[bool] = asyncio.get_running_loop().create_future()

        def finished(outcomes: asyncio.Future[list[object]]) -> None:
            part.writes -= 1
            ok = bool(outcomes.result()[0].ok)  # type: ignore[attr-defined]
            if ok:
                self._arrived(entry, shard, tier)
            self.settle(entry)
            self.demotion.soon()
            if not done.done():
                done.set_result(ok)

        layouts = entry.namespace.layouts
        item = PutItem(key, obj, self.trailer(entry, shard), layouts[shard] if layouts else None)
        tier.put([item], priority=priority, codec=codec).add_done_callback(finished)  # type: ignore[arg-type]
        return done

    def _make_room(self, tier: Tier, nbytes: int) -> bool:
        self.evict(tier, tier.shortfall(nbytes))
        return tier.shortfall(nbytes) <= 0

    def _arrived(self, entry: Entry, shard: int, tier: Tier) -> None:
        part = entry.shards.get(shard)
        if entry.doomed or part is None:
            if not tier.shared or entry.doomed:
                tier.delete([entry.key(shard)])
            return
        part.tiers |= tier.bit

    def _late_put(self, tier: Tier) -> Callable[[ChunkKey], None]:
        def late(key: ChunkKey) -> None:
            entry = self.index.entry(key)
            if entry is None:
                if not tier.shared:
                    tier.delete([key])
            else:
                self._arrived(entry, key.shard, tier)

        return late

    async def copy(
        self, entry: Entry, shard: int, target: Tier, *, priority: int, codec: str | None = None, replace: bool = False
    ) -> bool:
        """Copy a frame from wherever it is into `target` (a resident target: load it). True when it is there."""
        entry.hold()
        try:
            obj = self.in_pool(entry, shard)
            if obj is None:
                await self.loads.load_one(entry, shard, priority=priority, passing=not target.resident)
                obj = self.in_pool(entry, shard)
            if obj is None or shard not in entry.shards:
                return False
            try:
                if target.resident:
                    if not entry.shards[shard].tiers & target.bit:
                        self.place(entry, shard, obj)
                    return bool(entry.shards[shard].tiers & target.bit)
                done = self.write(entry, shard, obj, target, priority=priority, codec=codec, replace=replace)
            finally:
                obj.release("get")
            return False if done is None else await done
        finally:
            entry.let_go()
            self.settle(entry)

    def frame_size(self, entry: Entry, shard: int) -> int:
        """Bytes of the identity-coded frame."""
        return frame_bytes(entry.pages * entry.namespace.page_bytes[shard], len(entry.packed) // DIGEST_BYTES)
