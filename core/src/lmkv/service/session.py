"""One client's conversation with the storage: every message that it may send, and what it holds.

`handle` answers at once where it can; what has to wait for a tier is returned as a coroutine for the host to await.
When the client has gone, `close` gives back everything that it held.
"""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

from lmkv.errors import ClosedError, ProtocolError
from lmkv.frame import frame_bytes
from lmkv.observe.clients import NOBODY, Clients
from lmkv.service import protocol as p
from lmkv.service.control import Control
from lmkv.service.counts import Counts
from lmkv.service.lookups import Lookups
from lmkv.service.protocol import MAX_FRAMES
from lmkv.service.transfers import Transfers
from lmkv.storage.driver import RUNNING
from lmkv.storage.filling import check_frames, covered, ended
from lmkv.storage.leases import Slot
from lmkv.types import MissReason

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from lmkv.memory import MemoryObject
    from lmkv.observe.clients import ClientMetrics
    from lmkv.peer.node import PeerNode
    from lmkv.storage.index import Entry
    from lmkv.storage.leases import Lease
    from lmkv.storage.manager import StorageManager


class Session:
    """What one client holds: leases, holds of frames that it copies, reservations of frames that it fills."""

    def __init__(
        self, manager: StorageManager, name: str, metrics: ClientMetrics | None = None, node: PeerNode | None = None
    ) -> None:
        self.name = name
        self.leases: set[int] = set()
        self.holds: dict[int, list[MemoryObject]] = {}
        self._acquired: dict[int, tuple[p.Acquire, list[int]]] = {}
        self.reservations: dict[int, list[Slot]] = {}
        self._namespaces: set[bytes] = set()
        self._manager = manager
        self._stack = manager.stack
        self._metrics = metrics or Clients(manager.metrics).open(NOBODY)
        self._closed = False
        manager.sessions.add(self)
        control = Control(manager)
        self._transfers = Transfers(node)
        self._lookups = lookups = Lookups(manager, self._metrics, self.leases)
        self._verbs: dict[type[p.Message], Callable[..., p.Message | Awaitable[p.Message] | None]] = {
            p.Register: self._register,
            p.Unregister: self._unregister,
            p.Lookup: lookups.lookup,
            p.Extend: lookups.extend,
            p.Trim: self._trim,
            p.Release: self._release,
            p.Acquire: self._acquire,
            p.Done: self._done,
            p.Reserve: self._reserve,
            p.Commit: self._commit,
            p.Abort: self._abort,
            p.Observe: Counts(self._metrics, manager.tiers),
            **control.verbs,
            **self._transfers.verbs,
        }

    def handle(self, message: p.Message) -> p.Message | Awaitable[p.Message] | None:
        """Do what `message` asks. The reply, an awaitable of it, or None for one-way messages.

        Raises:
            LmkvError: the request cannot be served; the host answers with `Refused`.
        """
        if self._closed:
            raise ClosedError("the session is closed")
        verb = self._verbs.get(type(message))
        if verb is None:
            raise ProtocolError(f"{type(message).__name__} is not a request")
        return verb(message)

    def close(self) -> None:
        """The client has gone: abort what it was filling, drop what it held. Idempotent."""
        if self._closed:
            return
        self._closed = self._lookups.closed = True
        for number in list(self.reservations):
            self._abort(p.Abort(number))
        for number in list(self.holds):
            self._done(p.Done(number))
        for number in list(self.leases):
            self._release(p.Release(number))
        self._transfers.close()
        for namespace in list(self._namespaces):
            self._unregister(p.Unregister(namespace))
        self._manager.sessions.discard(self)
        self._metrics.close()

    # --- look-up -----------------------------------------------------------------------------------------------------

    def _register(self, message: p.Register) -> p.Ok:
        namespace = self._manager.register(message.namespace_json)
        if namespace.id not in self._namespaces:
            self._namespaces.add(namespace.id)
            namespace.clients += 1
        return p.Ok()

    def _unregister(self, message: p.Unregister) -> None:
        if message.namespace in self._namespaces:
            self._namespaces.discard(message.namespace)
            self._manager.index.namespace(message.namespace).clients -= 1

    def _trim(self, message: p.Trim) -> None:
        lease = self._manager.holdings.get(message.lease)
        if lease is not None:
            for entry in lease.drop(0, min(message.skip, lease.chunks)):
                self._stack.settle(entry)

    def _release(self, message: p.Release) -> None:
        self.leases.discard(message.lease)
        self._manager.end_lease(message.lease)

    # --- retrieve ----------------------------------------------------------------------------------------------------

    def _acquire(self, message: p.Acquire) -> p.Loaded | Awaitable[p.Loaded]:
        count = message.count
        lease = self._manager.holdings.get(message.lease)
        if lease is None or message.first < 0 or not 0 <= count <= MAX_FRAMES:
            count = min(max(0, count), MAX_FRAMES)
            self._metrics.inc("lmkv_misses_total", count, reason=MissReason.EXPIRED.value)
            return _nothing(count)
        entries = lease.entries[message.first : message.first + count]
        if self._bring(message, entries):
            return self._acquire_later(message, lease, entries)
        return self._loaded(message, entries, {})

    def _bring(self, message: p.Acquire, entries: Sequence[Entry | None]) -> list[asyncio.Future[MissReason | None]]:
        """Have those loaded that are not in the pool; what to wait for."""
        if not self._stack.loads.bring(entries, message.shard, priority=RUNNING):
            return []
        return [
            part.loading
            for entry in entries
            if entry is not None and (part := entry.shards.get(message.shard)) is not None and part.loading is not None
        ]

    async def _acquire_later(self, message: p.Acquire, lease: Lease, entries: list[Entry | None]) -> p.Loaded:
        """When all is loaded or the patience at its end; at once when the lease ends: nobody wants it any more."""
        over = lease.over
        if over.done():  # before this has begun
            return _nothing(message.count)
        held = [entry for entry in entries if entry is not None]
        for entry in held:
            entry.hold()  # until the answer says where it lies
        try:
            loading = self._bring(message, entries)  # others may have taken the memory of some before they were held
            for future in loading:
                left = lease.left(time.monotonic())
                done, _ = await asyncio.wait((future, over), timeout=left, return_when=asyncio.FIRST_COMPLETED)
                if over.done():
                    return _nothing(message.count)
                if not done:
                    break
            ended = [future.result() if future.done() else MissReason.DEADLINE for future in loading]
            worst = next((reason for reason in ended if reason is not None), None)
            return self._loaded(message, entries, {} if worst is None else {message.shard: worst})
        finally:
            for entry in held:
                entry.let_go()
                self._stack.settle(entry)

    def _loaded(self, message: p.Acquire, entries: list[Entry | None], reasons: dict[int, MissReason]) -> p.Loaded:
        """Hold what is in the pool for this session."""
        objects: list[MemoryObject] = []
        came: list[int] = []
        offsets: list[int] = []
        lengths: list[int] = []
        whys: list[str] = []
        entries = [*entries, *[None] * (message.count - len(entries))]
        found = [None] * len(entries) if self._closed else self._stack.in_pool_all(entries, message.shard)
        for i, (entry, obj) in enumerate(zip(entries, found, strict=True)):
            if entry is None or obj is None:
                reason = reasons.get(message.shard, MissReason.EVICTED)
                self._metrics.inc("lmkv_misses_total", reason=reason.value)
                offsets.append(p.ABSENT)
                lengths.append(0)
                whys.append(reason.value)
                continue
            objects.append(obj)
            came.append(message.first + i)
            offsets.append(obj.offset)
            lengths.append(entry.pages * entry.namespace.page_bytes[message.shard])
            whys.append("")
        number = 0
        if objects:
            number = self._manager.holdings.number()
            self.holds[number] = objects
            self._acquired[number] = (message, came)
        return p.Loaded(number, tuple(offsets), tuple(lengths), tuple(whys))

    def _done(self, message: p.Done) -> None:
        for obj in self.holds.pop(message.hold, ()):
            obj.release("get")
        acquired = self._acquired.pop(message.hold, None)
        if acquired is not None and message.last:
            asked, came = acquired
            self._copied(asked, came)
        self._stack.room.more()

    def _copied(self, asked: p.Acquire, came: Sequence[int]) -> None:
        lease = self._manager.holdings.leases.get(asked.lease)
        for index in came:
            for entry in () if lease is None else lease.copied(index, asked.shard):
                self._stack.settle(entry)

    # --- store -------------------------------------------------------------------------------------------------------

    def _reserve(self, message: p.Reserve) -> p.Reserved:
        namespace = self._manager.index.registered(message.namespace)
        shard = message.shard
        if not 0 <= shard < namespace.shards:
            raise ProtocolError(f"shard {shard} of a namespace with {namespace.shards} shards")
        check_frames(namespace, message.frames)  # all of them before any gets memory
        page_bytes = namespace.page_bytes[shard]
        new: dict[bytes, p.NewFrame] = {}
        for frame in message.frames:
            if frame.digest not in new and not covered(namespace, shard, frame):
                new[frame.digest] = frame
        objects = self._stack.room.for_stores([frame_bytes(f.pages * page_bytes, f.pages - 1) for f in new.values()])
        number = self._manager.holdings.number()
        offsets: dict[bytes, int] = {}
        slots: list[Slot] = []
        for frame, obj in zip(new.values(), objects, strict=True):
            offsets[frame.digest] = p.REJECTED if obj is None else obj.offset
            if obj is not None:
                entry = namespace.add(frame.digest, frame.parent, frame.pages, frame.prefixes)
                entry.part(shard, obj.nbytes).filling = number
                slots.append(Slot(entry, shard, obj))
        if slots:
            self.reservations[number] = slots
        if len(slots) < len(new):
            self._metrics.inc("lmkv_dropped_stores_total", len(new) - len(slots), reason="no_room")
        self._without_memory(message, [f for f in message.frames if offsets.get(f.digest, p.PRESENT) < 0])
        return p.Reserved(
            number if slots else 0,
            tuple([offsets.pop(frame.digest, p.PRESENT) for frame in message.frames]),
            tuple([frame.pages * page_bytes for frame in message.frames]),
        )

    def _without_memory(self, message: p.Reserve, frames: Sequence[p.NewFrame]) -> None:
        """Others have these, or there was no room: this client does not store them."""
        tell = self._stack.on_unstored
        if tell is not None:
            for frame in frames:
                tell(message.namespace, message.shard, frame.digest, frame.prefixes)

    def _commit(self, message: p.Commit) -> None:
        slots = self.reservations.pop(message.reservation, [])
        failed = set(message.failed)
        self._fill_ended(slots, [slot for i, slot in enumerate(slots) if i not in failed and not slot.entry.doomed])

    def _abort(self, message: p.Abort) -> None:
        self._fill_ended(self.reservations.pop(message.reservation, []), [])

    def _fill_ended(self, slots: Sequence[Slot], filled: Sequence[Slot]) -> None:
        """A client has let go of the frames of a reservation; those that it has `filled` are stored."""
        ended(self._stack, slots, filled)
        if filled:
            self._count_stored(filled)
        if len(filled) < len(slots):
            self._metrics.inc("lmkv_dropped_stores_total", len(slots) - len(filled), reason="aborted")
        for slot in slots:
            slot.object.release("fill")
        self._stack.settle_all([slot.entry for slot in slots])

    def _count_stored(self, slots: Sequence[Slot]) -> None:
        namespace = slots[0].entry.namespace
        tokens = sum([slot.entry.pages for slot in slots]) * self._manager.chunk_tokens // namespace.chunk_pages
        self._metrics.inc("lmkv_rank_stored_tokens_total", tokens)
        if slots[0].shard == 0:
            self._metrics.inc("lmkv_stored_tokens_total", tokens)


def _nothing(count: int) -> p.Loaded:
    """So many frames that are not there, since their lease has ended."""
    return p.Loaded(0, (p.ABSENT,) * count, (0,) * count, (MissReason.EXPIRED.value,) * count)
