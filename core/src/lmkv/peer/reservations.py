"""What one peer pushes here: memory for its frames, and what becomes of them.

Lives on the storage loop.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Final, NamedTuple

from lmkv.errors import BackendError, ConfigError, ProtocolError
from lmkv.peer import filling
from lmkv.peer import messages as m
from lmkv.peer.frames import portions
from lmkv.storage.filling import check_frames, covered

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from lmkv.memory import MemoryObject
    from lmkv.peer.hall import Hall
    from lmkv.peer.session import PeerSession
    from lmkv.storage.index import Entry, NamespaceIndex
    from lmkv.storage.leases import Slot

log = logging.getLogger("lmkv.peer")

PART_FRAMES: Final = 64
"""For which memory is taken without a turn for others."""


class _Awaited(NamedTuple):
    slots: list[Slot]
    expires: float
    transfer: str


class _Batch:
    """Frames that are being reserved."""

    def __init__(self, namespace: NamespaceIndex, shard: int, number: int) -> None:
        self.namespace = namespace
        self.number = number
        self.offsets: list[int] = []
        self.slots: list[Slot] = []
        self._shard = shard
        self._kept: dict[Entry, None] = {}

    def keep(self, frames: Iterable[m.NewFrame]) -> None:
        """What is there of them stays until `let_go`: no frame of the batch gets its memory."""
        for frame in frames:
            self._keep(frame)

    def _keep(self, frame: m.NewFrame) -> bool:
        entry = covered(self.namespace, self._shard, frame)
        if entry is not None and entry not in self._kept:
            entry.hold()
            self._kept[entry] = None
        return entry is not None

    def take(self, frame: m.NewFrame, memory: Callable[[int], MemoryObject | None]) -> None:
        """Memory for one of them, if it is not there and there is room."""
        if self._keep(frame):
            self.offsets.append(m.PRESENT)
            return
        slot = filling.begin(self.namespace, self._shard, self.number, frame, memory)
        self.offsets.append(m.REJECTED if slot is None else slot.object.offset)
        if slot is not None:
            self.slots.append(slot)

    def let_go(self) -> list[Entry]:
        """What was kept; settling it is the caller's."""
        for entry in self._kept:
            entry.let_go()
        return list(self._kept)


class Reservations:
    """Of one session.

    Attributes:
        slots: by number of the reservation, also of those that are being verified.
    """

    def __init__(self, hall: Hall, session: PeerSession) -> None:
        self.slots: dict[int, list[Slot]] = {}
        self._hall = hall
        self._manager = hall.manager
        self._stack = hall.manager.stack
        self._session = session
        self._awaited: dict[int, _Awaited] = {}

    def expire(self, now: float) -> None:
        """Give up what has not been committed in time."""
        for number in [n for n, awaited in self._awaited.items() if awaited.expires <= now]:
            self._give_up(number, done=False)
            self._hall.metrics.inc("lmkv_peer_expired_total", what="reservation")

    def close(self) -> None:
        """The peer has gone."""
        for number in list(self._awaited):
            self._give_up(number, done=False)

    async def reserve(self, message: m.Reserve) -> m.Reserved:
        """See `Reserve`. Others have their turn between parts of a large one; it may end meanwhile, as it may later."""
        namespace = self._manager.index.registered(m.check_namespace(message.namespace))
        if not 0 <= message.shard < namespace.shards:
            raise ProtocolError(f"shard {message.shard} of a namespace with {namespace.shards} shards")
        if self._stack.ram is None:
            raise ConfigError("this node has no RAM tier: nothing can be pushed to it", kind="no-ram")
        if sum(len(frame.prefixes) for frame in message.frames) > m.MAX_PREFIXES:
            raise ProtocolError(f"more than {m.MAX_PREFIXES} bytes of page prefixes")
        check_frames(namespace, message.frames)  # all of them before any gets memory
        number, seconds = self._manager.holdings.number(), self._hall.seconds
        batch = _Batch(namespace, message.shard, number)
        self._awaited[number] = _Awaited(batch.slots, self._hall.clock() + seconds, message.transfer)
        self.slots[number] = batch.slots
        batch.keep(message.frames)
        try:
            for part in portions(message.frames, PART_FRAMES):
                if batch.offsets:
                    await asyncio.sleep(0)
                self._take(part, batch, message.transfer)
        except BaseException:
            if number in self._awaited:
                self._give_up(number, done=True)
            raise
        finally:
            self._stack.settle_all(batch.let_go())
        lengths = tuple(filling.frame_size(namespace, message.shard, frame.pages) for frame in message.frames)
        if not batch.slots:
            del self._awaited[number], self.slots[number]
            return m.Reserved(0, tuple(batch.offsets), lengths, seconds)
        ranges = [(slot.object.offset, slot.object.nbytes) for slot in batch.slots]
        self._hall.grants.open(self._session.number, number, ranges)
        return m.Reserved(number, tuple(batch.offsets), lengths, seconds)

    def _take(self, frames: Sequence[m.NewFrame], batch: _Batch, transfer: str) -> None:
        """Memory for some frames of a batch."""
        if batch.number not in self._awaited:
            raise BackendError("the reservation has ended before it was made", kind="expired")
        check_frames(batch.namespace, frames)  # others may have come since
        memory = self._hall.incoming.memory(transfer, self._session)
        for frame in frames:
            batch.take(frame, memory)
        if transfer:
            entries = [batch.namespace.entries.get(frame.digest) for frame in frames]
            self._hall.incoming.hold(transfer, entries)

    async def commit(self, message: m.Commit) -> m.Committed:
        """See `Commit`."""
        hall, session = self._hall, self._session
        awaited = self._awaited.pop(message.reservation, None)
        if awaited is None:
            hall.quarantine.done(session.number, message.reservation)
            raise BackendError(f"there is no reservation {message.reservation}: it has expired", kind="expired")
        slots = awaited.slots
        hall.grants.revoke(session.number, message.reservation)
        failed = set(message.failed)
        # What a thread still writes would be another frame after it has been verified.
        whys = ["not written" if i in failed else self._written(slot) for i, slot in enumerate(slots)]
        came = [slot for slot, why in zip(slots, whys, strict=True) if not why]
        try:
            found = iter(await hall.in_thread(lambda: filling.inspect(came)))
            outcomes = [why or next(found) for why in whys]
        except BaseException:
            outcomes = ["not verified"] * len(slots)
            raise
        finally:
            self.slots.pop(message.reservation, None)
            outcomes = self._ended(message.reservation, awaited, outcomes)
        pushed = [slot for slot, why in zip(slots, outcomes, strict=True) if not why]
        hall.count("in", sum(slot.object.nbytes for slot in pushed))
        hall.incoming.arrived(awaited.transfer, pushed)
        for why in filter(None, outcomes):
            log.warning("peer %s pushed a frame that was not taken: %s", session.peer, why, extra={"key": "peer-frame"})
            hall.metrics.inc("lmkv_peer_errors_total", kind="frame")
        return m.Committed(tuple(outcomes))

    def abort(self, message: m.Abort) -> None:
        """See `Abort`."""
        if message.reservation in self._awaited:
            self._give_up(message.reservation, done=message.done)
        elif message.done:
            self._hall.quarantine.done(self._session.number, message.reservation)

    def _written(self, slot: Slot) -> str:
        return "still being written" if self._hall.touched(self._session.number, slot.object, said=True) else ""

    def _ended(self, number: int, awaited: _Awaited, outcomes: Sequence[str]) -> list[str]:
        ended = filling.end(self._manager, awaited.slots, outcomes)
        failed = [slot.object for slot, why in zip(awaited.slots, ended, strict=True) if why]
        self._hall.give_back(self._session, number, failed, "fill", awaited.expires, done=True)
        self._stack.room.more()
        return ended

    def _give_up(self, number: int, *, done: bool) -> None:
        """A reservation ends unfilled."""
        awaited = self._awaited.pop(number)
        del self.slots[number]
        self._hall.grants.revoke(self._session.number, number)
        filling.end(self._manager, awaited.slots, ["given up"] * len(awaited.slots))
        objects = [slot.object for slot in awaited.slots]
        self._hall.give_back(self._session, number, objects, "fill", awaited.expires, done=done)
        self._stack.room.more()
