"""One peer's conversation with this node: what it may ask, and what it holds here.

Lives on the storage loop. Leases and reservations end when the peer says so, by expiry, and with the connection; what
memory the peer may still touch then goes into quarantine.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Final, NamedTuple

from lmkv.errors import ClosedError, ProtocolError
from lmkv.peer import messages as m
from lmkv.peer.compare import compare
from lmkv.peer.reservations import Reservations
from lmkv.storage.coding import complete
from lmkv.storage.driver import QUEUED

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from lmkv.frame import Trailer
    from lmkv.memory import MemoryObject
    from lmkv.peer.hall import Hall
    from lmkv.storage.index import Entry

log = logging.getLogger("lmkv.peer")

LENT_SHARE: Final = 4
"""What all peers together have leased is no more than such a part of the pool: the engine needs the rest."""

READ_BYTES: Final = 1 << 30
"""In a second: where hardware reads more slowly, or not at all, it is not this node that is busy."""


class _Lent(NamedTuple):
    entries: list[Entry]
    objects: list[MemoryObject]
    expires: float
    begun: float


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
        self.closed = False
        self._hall = hall
        self._manager = hall.manager
        self._stack = hall.manager.stack
        self.touches = touches
        self._lent: dict[int, _Lent] = {}
        self._pushed = Reservations(hall, self)
        self.reservations = self._pushed.slots
        """As `lmkv.storage.manager.Client`: what is being filled."""
        self._manager.sessions.add(self)
        self._verbs: dict[type[m.PeerMessage], Callable[..., m.Reply | Awaitable[m.Reply] | None]] = {
            m.Agree: self._agree,
            m.Has: self._has,
            m.Lease: self._lease,
            m.Release: self._release,
            m.Reserve: self._pushed.reserve,
            m.Commit: self._pushed.commit,
            m.Abort: self._pushed.abort,
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
        self._pushed.expire(now)

    def close(self) -> None:
        """The peer has gone: everything that it held ends. Idempotent."""
        if self.closed:
            return
        self.closed = True
        self._hall.grants.forget(self.number)
        for number in list(self._lent):
            self._end_lease(number, done=False)
        self._pushed.close()
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
        bare: list[tuple[MemoryObject, Trailer]] = []
        for (entry, shard), obj in zip(parts, objects, strict=True):
            if entry is not None and obj is not None and not obj.sealed:
                bare.append((obj, self._stack.trailer(entry, shard)))
        if not bare:
            return

        def work() -> None:
            for obj, trailer in bare:
                complete(obj, trailer)

        await self._hall.in_thread(work)

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
        hall.give_back(self, number, lent.objects, "get", lent.expires, done=done)
        for entry in lent.entries:
            entry.let_go()
        self._stack.settle_all(lent.entries)

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


def _release(objects: Sequence[MemoryObject | None]) -> None:
    for obj in objects:
        if obj is not None:
            obj.release("get")
