"""What one peer pushes here: memory for its frames, and what becomes of them.

Lives on the storage loop.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, NamedTuple

from lmkv.errors import BackendError, ConfigError, ProtocolError
from lmkv.peer import filling
from lmkv.peer import messages as m
from lmkv.storage.filling import check_frames

if TYPE_CHECKING:
    from collections.abc import Sequence

    from lmkv.peer.hall import Hall
    from lmkv.peer.session import PeerSession
    from lmkv.storage.leases import Slot

log = logging.getLogger("lmkv.peer")


class _Awaited(NamedTuple):
    slots: list[Slot]
    expires: float
    transfer: str


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

    def reserve(self, message: m.Reserve) -> m.Reserved:
        """See `Reserve`."""
        namespace = self._manager.index.registered(m.check_namespace(message.namespace))
        if not 0 <= message.shard < namespace.shards:
            raise ProtocolError(f"shard {message.shard} of a namespace with {namespace.shards} shards")
        if self._stack.ram is None:
            raise ConfigError("this node has no RAM tier: nothing can be pushed to it", kind="no-ram")
        if len(message.frames) > m.MAX_FRAMES:
            raise ProtocolError(f"a reservation of {len(message.frames)} frames; at most {m.MAX_FRAMES}")
        check_frames(namespace, message.frames)  # all of them before any gets memory
        memory = self._hall.incoming.memory(message.transfer, self._session)
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
        self.slots[number] = slots
        self._hall.grants.open(self._session.number, number, [(s.object.offset, s.object.nbytes) for s in slots])
        return m.Reserved(number, tuple(offsets), lengths, seconds)

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
