"""One peer's conversation with this node: what it may ask, and what it holds here.

Lives on the storage loop. Leases and reservations end when the peer says so, by expiry, and with the connection; what
memory the peer may still touch then goes into quarantine.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Final, NamedTuple

from lmkv.errors import BackendError, ClosedError, ConfigError, ProtocolError
from lmkv.frame import seal
from lmkv.peer import filling
from lmkv.peer import messages as m
from lmkv.peer.compare import compare
from lmkv.storage.driver import QUEUED
from lmkv.storage.filling import check_frames

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from lmkv.frame import Trailer
    from lmkv.memory import MemoryObject
    from lmkv.peer.hall import Hall
    from lmkv.storage.index import Entry
    from lmkv.storage.leases import Slot

log = logging.getLogger("lmkv.peer")

LENT_SHARE: Final = 4
"""What all peers together have leased is no more than such a part of the pool: the engine needs the rest."""

GRACE_SECONDS: Final = 2.0
"""A transfer that hardware, or the kernel, has begun within the time that was promised ends so soon after it."""
READ_BYTES: Final = 1 << 30
"""In a second: where hardware reads more slowly, or not at all, it is not this node that is busy."""


class _Lent(NamedTuple):
    entries: list[Entry]
    objects: list[MemoryObject]
    expires: float
    begun: float


class _Awaited(NamedTuple):
    slots: list[Slot]
    expires: float
    transfer: str


class PeerSession:
    """What one connected peer asks and holds.

    Args:
        hall: what all sessions share.
        number: of the session; data sockets name it.
        peer: its name.
        touches: it has a transport that touches memory by itself.
    """

    def __init__(self, hall: Hall, number: int, peer: str, *, touches: bool) -> None:
        self.number = number
        self.peer = peer
        self.holds: dict[int, list[MemoryObject]] = {}
        """As `lmkv.storage.manager.Client`: what is leased."""
        self.reservations: dict[int, list[Slot]] = {}
        """As `lmkv.storage.manager.Client`: what is being filled."""
        self.closed = False
        self._hall = hall
        self._manager = hall.manager
        self._stack = hall.manager.stack
        self.touches = touches
        self._lent: dict[int, _Lent] = {}
        self._awaited: dict[int, _Awaited] = {}
        self._manager.sessions.add(self)
        self._verbs: dict[type[m.PeerMessage], Callable[..., m.Reply | Awaitable[m.Reply] | None]] = {
            m.Agree: self._agree,
            m.Has: self._has,
            m.Lease: self._lease,
            m.Release: self._release,
            m.Reserve: self._reserve,
            m.Commit: self._commit,
            m.Abort: self._abort,
            m.Admit: self._admit,
            m.Finish: self._finish,
            m.Await: self._await,
        }

    def handle(self, message: m.PeerMessage) -> m.Reply | Awaitable[m.Reply] | None:
        """Do what `message` asks: the reply, an awaitable of it, or None for one-way messages.

        Raises:
            LmkvError: the request cannot be served.
        """
        if self.closed:
            raise ClosedError("the session is closed")
        return self._verbs[type(message)](message)

    def expire(self, now: float) -> None:
        """End what has not been given back in time."""
        for number in [n for n, lent in self._lent.items() if lent.expires <= now]:
            self._end_lease(number, done=False)
            self._hall.metrics.inc("lmkv_peer_expired_total", what="lease")
        for number in [n for n, awaited in self._awaited.items() if awaited.expires <= now]:
            self._give_up(number, done=False)
            self._hall.metrics.inc("lmkv_peer_expired_total", what="reservation")

    def close(self) -> None:
        """The peer has gone: everything that it held ends. Idempotent."""
        if self.closed:
            return
        self.closed = True
        self._hall.grants.forget(self.number)
        for number in list(self._lent):
            self._end_lease(number, done=False)
        for number in list(self._awaited):
            self._give_up(number, done=False)
        self._manager.sessions.discard(self)
        self._hall.left(self)

    # --- namespaces --------------------------------------------------------------------------------------------------

    def _agree(self, message: m.Agree) -> m.PeerOk:
        compare(message.namespace_json, self._manager)
        return m.PeerOk()

    # --- pull --------------------------------------------------------------------------------------------------------

    def _has(self, message: m.Has) -> m.Holds:
        digests = m.split_digests(message.digests)
        bitmap = bytearray((len(digests) + 7) // 8)
        for i, entry in enumerate(self._entries(message.namespace, digests)):
            if entry is not None and (self._stack.room.here(entry) or (message.below and self._near(entry))):
                bitmap[i >> 3] |= 1 << (i & 7)
        return m.Holds(bytes(bitmap), self._hall.pace.rest)

    def _entries(self, identity: bytes, digests: Sequence[bytes]) -> list[Entry | None]:
        """The READY entry of each digest; of a namespace that is not known there are none."""
        known = self._manager.index.namespaces.get(m.check_namespace(identity))
        if known is None or not known.shards:
            return [None] * len(digests)
        found = [known.entries.get(digest) for digest in digests]
        return [entry if entry is not None and entry.ready else None for entry in found]

    def _near(self, entry: Entry) -> bool:
        """All shards can be had from tiers of this node."""
        here = self._stack.own & ~self._stack.unreachable()
        ram = 0 if self._stack.ram is None else self._stack.ram.bit
        return all(part.tiers & (here | ram) or part.staged is not None for part in entry.shards.values())

    async def _lease(self, message: m.Lease) -> m.Leased:
        digests = m.split_digests(message.digests)
        if not message.shards or len(message.shards) * len(digests) > m.MAX_FRAMES:
            raise ProtocolError(f"a lease of {len(digests)} chunks in {len(message.shards)} shards")
        wait = _within(message.wait, self._hall.seconds)
        until = self._hall.clock() + wait
        await self._hall.turn(wait)
        held = {entry: None for entry in self._entries(message.namespace, digests) if entry is not None}
        for entry in held:
            entry.hold()
        try:
            if message.bring:
                await self._bring([entry for entry in held if self._near(entry)], until)
            wanted = self._entries(message.namespace, digests)
            for new in wanted:  # some have come meanwhile; none may be another one when it is sealed
                if new is not None and new not in held:
                    new.hold()
                    held[new] = None
            objects = self._borrow(wanted, message.shards)
            try:
                await self._seal(wanted, message.shards, objects)
                if self.closed:
                    raise ClosedError("the session is closed")  # noqa: TRY301  one clean-up
            except BaseException:
                self._hall.lent -= _bytes(objects)
                _release(objects)
                raise
            return self._grant(message, wanted, objects)
        finally:
            for entry in held:
                entry.let_go()
            self._stack.settle_all(held)

    async def _bring(self, entries: Sequence[Entry], until: float) -> None:
        """Have those loaded that lie below RAM, as far as they come in time."""
        self._stack.loads.bring(entries, None, priority=QUEUED)
        loading = [part.loading for entry in entries for part in entry.shards.values() if part.loading is not None]
        if loading:
            await asyncio.wait(loading, timeout=max(0.0, until - self._hall.clock()))

    def _borrow(self, wanted: Sequence[Entry | None], shards: Sequence[int]) -> list[MemoryObject | None]:
        """The frames that lie in the pool, as many of the first as may be lent."""
        room = self._manager.pool.nbytes // LENT_SHARE - self._hall.lent - self._hall.quarantine.nbytes
        objects: list[MemoryObject | None] = []
        for entry in wanted:
            for shard in shards:
                obj = None if entry is None or room <= 0 else self._stack.in_pool(entry, shard)
                room -= 0 if obj is None else obj.nbytes
                objects.append(obj)
        self._hall.lent += _bytes(objects)
        return objects

    async def _seal(
        self, wanted: Sequence[Entry | None], shards: Sequence[int], objects: Sequence[MemoryObject | None]
    ) -> None:
        """Give those their trailers that have none yet, in a thread."""
        parts = [(entry, shard) for entry in wanted for shard in shards]
        bare: list[tuple[Entry, int, memoryview, Trailer]] = []
        for (entry, shard), obj in zip(parts, objects, strict=True):
            if entry is not None and obj is not None and not entry.shards[shard].sealed:
                bare.append((entry, shard, obj.view, self._stack.trailer(entry, shard)))
        if not bare:
            return

        def work() -> None:
            for _, _, view, trailer in bare:
                seal(view, trailer)

        await self._hall.in_thread(work)
        for entry, shard, _, _ in bare:
            if (part := entry.shards.get(shard)) is not None:
                part.sealed = True

    def _grant(
        self, message: m.Lease, wanted: Sequence[Entry | None], objects: Sequence[MemoryObject | None]
    ) -> m.Leased:
        seconds = _within(message.seconds, self._hall.seconds)
        offsets = tuple(m.ABSENT if obj is None else obj.offset for obj in objects)
        lengths = tuple(0 if obj is None else obj.nbytes for obj in objects)
        held = [obj for obj in objects if obj is not None]
        if not held:
            return m.Leased(0, offsets, lengths, seconds)
        number = self._manager.holdings.number()
        shards = len(message.shards)
        entries = [e for i, e in enumerate(wanted) if e is not None and any(objects[i * shards : (i + 1) * shards])]
        for entry in entries:
            entry.hold()
        now = self._hall.clock()
        self._lent[number] = _Lent(entries, held, now + seconds, now)
        self.holds[number] = held
        self._hall.grants.lend(self.number, number, [(obj.offset, obj.nbytes) for obj in held])
        return m.Leased(number, offsets, lengths, seconds)

    def _release(self, message: m.Release) -> None:
        if message.lease in self._lent:
            self._end_lease(message.lease, done=True)
        else:
            self._hall.quarantine.done(self.number, message.lease)

    def _end_lease(self, number: int, *, done: bool) -> None:
        lent = self._lent.pop(number)
        del self.holds[number]
        hall = self._hall
        nbytes = _bytes(lent.objects)
        hall.lent -= nbytes
        hall.count("out", nbytes)
        hall.grants.revoke(self.number, number)
        if self.touches:  # nobody has asked the pace while it was read
            hall.pace(nbytes, min(hall.clock() - lent.begun, nbytes / READ_BYTES))
        self._give_back(number, lent.objects, "get", lent.expires, done=done)
        for entry in lent.entries:
            entry.let_go()
        self._stack.settle_all(lent.entries)

    # --- push --------------------------------------------------------------------------------------------------------

    def _reserve(self, message: m.Reserve) -> m.Reserved:
        namespace = self._manager.index.registered(m.check_namespace(message.namespace))
        if not 0 <= message.shard < namespace.shards:
            raise ProtocolError(f"shard {message.shard} of a namespace with {namespace.shards} shards")
        if self._stack.ram is None:
            raise ConfigError("this node has no RAM tier: nothing can be pushed to it", kind="no-ram")
        if len(message.frames) > m.MAX_FRAMES:
            raise ProtocolError(f"a reservation of {len(message.frames)} frames; at most {m.MAX_FRAMES}")
        check_frames(namespace, message.frames)  # all of them before any gets memory
        memory = self._hall.incoming.memory(message.transfer, self)
        number = self._manager.holdings.number()
        slots: list[Slot] = []
        offsets: list[int] = []
        for frame in message.frames:
            slot = filling.begin(namespace, message.shard, number, frame, memory)
            if isinstance(slot, int):
                offsets.append(slot)
            else:
                offsets.append(slot.object.offset)
                slots.append(slot)
        lengths = tuple(filling.frame_size(namespace, message.shard, frame.pages) for frame in message.frames)
        if message.transfer:
            self._hall.incoming.hold(message.transfer, [namespace.entries.get(f.digest) for f in message.frames])
        seconds = self._hall.seconds
        if not slots:
            return m.Reserved(0, tuple(offsets), lengths, seconds)
        self._awaited[number] = _Awaited(slots, self._hall.clock() + seconds, message.transfer)
        self.reservations[number] = slots
        self._hall.grants.open(self.number, number, [(s.object.offset, s.object.nbytes) for s in slots])
        return m.Reserved(number, tuple(offsets), lengths, seconds)

    async def _commit(self, message: m.Commit) -> m.Committed:
        awaited = self._awaited.pop(message.reservation, None)
        if awaited is None:
            self._hall.quarantine.done(self.number, message.reservation)
            raise BackendError(f"there is no reservation {message.reservation}: it has expired", kind="expired")
        slots = awaited.slots
        self._hall.grants.revoke(self.number, message.reservation)
        failed = set(message.failed)
        # What a thread still writes would be another frame after it has been verified.
        whys = ["not written" if i in failed else self._written(slot) for i, slot in enumerate(slots)]
        came = [slot for slot, why in zip(slots, whys, strict=True) if not why]
        try:
            found = iter(await self._hall.in_thread(lambda: filling.inspect(came)))
            outcomes = [why or next(found) for why in whys]
        except BaseException:
            outcomes = ["not verified"] * len(slots)
            raise
        finally:
            self.reservations.pop(message.reservation, None)
            outcomes = self._ended(message.reservation, awaited, outcomes)
        pushed = [slot for slot, why in zip(slots, outcomes, strict=True) if not why]
        self._hall.count("in", sum(slot.object.nbytes for slot in pushed))
        self._hall.incoming.arrived(awaited.transfer, pushed)
        for why in filter(None, outcomes):
            log.warning("peer %s pushed a frame that was not taken: %s", self.peer, why, extra={"key": "peer-frame"})
            self._hall.metrics.inc("lmkv_peer_errors_total", kind="frame")
        return m.Committed(tuple(outcomes))

    def _written(self, slot: Slot) -> str:
        return "still being written" if self._hall.touched(self.number, slot.object, said=True) else m.COMMITTED

    def _ended(self, number: int, awaited: _Awaited, outcomes: Sequence[str]) -> list[str]:
        ended = filling.end(self._manager, awaited.slots, outcomes)
        failed = [slot.object for slot, why in zip(awaited.slots, ended, strict=True) if why]
        self._give_back(number, failed, "fill", awaited.expires, done=True)
        self._stack.room.more()
        return ended

    def _abort(self, message: m.Abort) -> None:
        if message.reservation in self._awaited:
            self._give_up(message.reservation, done=message.done)
        elif message.done:
            self._hall.quarantine.done(self.number, message.reservation)

    def _give_up(self, number: int, *, done: bool) -> None:
        """A reservation ends unfilled."""
        awaited = self._awaited.pop(number)
        del self.reservations[number]
        self._hall.grants.revoke(self.number, number)
        filling.end(self._manager, awaited.slots, ["given up"] * len(awaited.slots))
        self._give_back(number, [slot.object for slot in awaited.slots], "fill", awaited.expires, done=done)
        self._stack.room.more()

    def _give_back(self, number: int, objects: Sequence[MemoryObject], owner: str, until: float, *, done: bool) -> None:
        """Memory that the peer was granted and is no longer: to the pool, if nothing touches it.

        `done`: the peer says that it does not. What it has read whole a thread may be about to leave still.
        """
        hall = self._hall
        read = done and owner == "get"
        if read or not any(hall.touched(self.number, obj, said=done) for obj in objects):
            _release(objects, owner)
        else:
            until = until + GRACE_SECONDS if self.touches else 0.0
            hall.quarantine.take(self.number, number, objects, owner, until=until, said=done)

    # --- transfers ---------------------------------------------------------------------------------------------------

    def _admit(self, message: m.Admit) -> m.Admitted | m.NoRoom:
        return self._hall.incoming.admit(message)

    def _finish(self, message: m.Finish) -> m.PeerOk:
        self._hall.incoming.finish(m.check_transfer(message.transfer), message.state, message.tokens)
        return m.PeerOk()

    async def _await(self, message: m.Await) -> m.TransferState:
        return await self._hall.incoming.wait(m.check_transfer(message.transfer), message.seconds)


def _within(seconds: float, most: float) -> float:
    """`seconds` if they are a time of `most` at most; no number is none."""
    return seconds if 0.0 <= seconds <= most else most


def _bytes(objects: Sequence[MemoryObject | None]) -> int:
    return sum(obj.nbytes for obj in objects if obj is not None)


def _release(objects: Sequence[MemoryObject | None], owner: str = "get") -> None:
    for obj in objects:
        if obj is not None:
            obj.release(owner)
