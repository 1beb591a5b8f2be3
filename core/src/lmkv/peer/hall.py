"""What all sessions of peers share: the storage, who may touch which memory, how fast, and the transports.

Lives on the storage loop.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Final, TypeVar

from lmkv.errors import BackendError
from lmkv.peer.grants import Grants
from lmkv.peer.quarantine import Quarantine
from lmkv.peer.session import PeerSession
from lmkv.peer.threads import to_the_end
from lmkv.peer.transport import Region, Transport

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from lmkv.memory import MemoryObject
    from lmkv.peer.incoming import Incoming
    from lmkv.peer.pace import Pace
    from lmkv.storage.manager import StorageManager

log = logging.getLogger("lmkv.peer")

CREW: Final = 2
"""Threads that seal and verify frames for peers."""
GRACE_SECONDS: Final = 2.0
"""A transfer that hardware, or the kernel, has begun within the time that was promised ends so soon after it."""
QUEUE: Final = 64
"""Leases that may wait for their turn; more are refused."""
Result = TypeVar("Result")


class Hall:
    """Of one node.

    Args:
        manager: stays the caller's.
        incoming: transfers to this node.
        pace: how fast others are served.
        seconds: after which a lease or a reservation ends by itself.

    Attributes:
        lent: bytes that sessions have leased.
        transports: by name; set by the node once it has made them, since they need `grants`.
        sessions: by number.
    """

    def __init__(self, manager: StorageManager, incoming: Incoming, pace: Pace, *, seconds: float) -> None:
        self.manager = manager
        self.metrics = manager.metrics
        self.clock = manager.clock
        self.incoming = incoming
        self.pace = pace
        self.seconds = seconds
        self.grants = Grants()
        self.quarantine = Quarantine(manager.metrics, self.touched)
        incoming.out_of_use = lambda: self.quarantine.nbytes
        self.lent = 0
        self.transports: dict[str, Transport] = {}
        self.sessions: dict[int, PeerSession] = {}
        self._crew = ThreadPoolExecutor(CREW, thread_name_prefix="lmkv-peer-check")
        self._queued = 0
        self._leaving: set[asyncio.Task[None]] = set()

    def open(self, peer: str, transports: Iterable[str]) -> PeerSession:
        """A session of a peer that has proved that it knows the key; `transports` are its own."""
        common = [self.transports[name] for name in transports if name in self.transports]
        number = secrets.randbits(62) + 1
        session = PeerSession(self, number, peer, touches=any(t.remote_memory for t in common))
        self.sessions[number] = session
        self._gauge()
        return session

    def left(self, session: PeerSession) -> None:
        """For `PeerSession`: it has closed."""
        del self.sessions[session.number]
        self.incoming.left(session)
        self._gauge()
        task = asyncio.get_running_loop().create_task(self._cut(session.number))
        self._leaving.add(task)
        task.add_done_callback(self._leaving.discard)

    async def _cut(self, number: int) -> None:
        """End what moves bytes for the session; then nothing of it touches memory."""
        for transport in self.transports.values():
            try:
                await self.in_thread(lambda transport=transport: transport.drop(number))  # type: ignore[misc]
            except Exception:  # a plugin's fault must not keep the memory for ever
                log.exception("transport %s did not drop session %d", transport.name, number)
        self.quarantine.gone(number, self.clock())
        self.manager.stack.room.more()

    def touched(self, session: int, obj: MemoryObject, *, said: bool = False) -> bool:
        """Whether bytes may still go to or from `obj` for that session, which has no grant of it any more.

        `said`: the peer has said that it does not touch it; what threads of ours do for it we know better.
        """
        found = self.sessions.get(session)
        remote = not said and (found is None or found.touches)
        region = Region(obj.offset, obj.nbytes)
        return any(
            transport.touches(session, region)
            for transport in self.transports.values()
            if remote or not transport.remote_memory
        )

    def give_back(
        self,
        session: PeerSession,
        number: int,
        objects: Sequence[MemoryObject],
        owner: str,
        until: float,
        *,
        done: bool,
    ) -> None:
        """Memory that a peer was granted until `until` and is no longer: to the pool, if nothing touches it.

        `done`: the peer says that it does not. What it has read whole a thread may be about to leave still.
        """
        read = done and owner == "get"
        if read or not any(self.touched(session.number, obj, said=done) for obj in objects):
            for obj in objects:
                obj.release(owner)
        else:
            until = until + GRACE_SECONDS if session.touches else 0.0
            self.quarantine.take(session.number, number, objects, owner, until=until, said=done)

    async def turn(self, seconds: float) -> None:
        """Wait until more may be served to others.

        Raises:
            BackendError: that is not within `seconds`, or too many wait (kind ``busy``).
        """
        if self._queued >= QUEUE:
            raise BackendError(f"{self._queued} others wait to be served", kind="busy")
        self._queued += 1
        until = self.clock() + seconds
        try:
            while (rest := self.pace.rest) > 0:
                if self.clock() + rest > until:
                    raise BackendError(f"serving others takes until {rest:.2f} s from now", kind="busy")
                await asyncio.sleep(rest)
        finally:
            self._queued -= 1

    async def in_thread(self, work: Callable[[], Result]) -> Result:
        """Run what reads or writes many bytes. Ends when the thread has: nobody gets its memory while it works."""
        return await to_the_end(self._crew, work)

    def count(self, way: str, nbytes: int) -> None:
        """Bytes of frames that have come from a peer (`in`) or were lent to one (`out`)."""
        self.metrics.inc("lmkv_peer_served_bytes_total", nbytes, way=way)

    def tidy(self) -> None:
        """End what has expired."""
        now = self.clock()
        for session in list(self.sessions.values()):
            session.expire(now)
        self.incoming.expire(now)
        self.quarantine.tidy(now)

    async def close(self) -> None:
        """End all sessions and what they had under way. Transports are closed after that, by who made them."""
        for session in list(self.sessions.values()):
            session.close()
        while self._leaving:
            await asyncio.wait(self._leaving)
        self.incoming.close()

    def end(self) -> None:
        """The transports are closed: nothing touches memory any more. Blocking, for a checksum at most."""
        self.quarantine.close()
        self._crew.shutdown(wait=True)

    def _gauge(self) -> None:
        self.metrics.set("lmkv_peer_sessions", len(self.sessions))
