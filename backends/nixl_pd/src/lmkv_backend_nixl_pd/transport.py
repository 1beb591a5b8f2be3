"""The transport over NIXL: a node's hardware, or the kernel, reads and writes a peer's pool by itself.

A node has two agents. One is for others: the pool is registered with it once, its metadata is what `advertise` says,
and it lives as long as the transport. The other one begins transfers to peers. A transfer that is late cannot be taken
back: the library says that it has released it, and the bytes arrive nevertheless. Nothing but the end of an agent ends
what it has begun, so then the second one is destroyed, and the next transfer begins with a new one.

NIXL also copies through ordinary TCP sockets. That is slower than the core's own transport over TCP, and the library
ends a process whose peer goes at a bad moment; so it is not used, see `Doorstep.check`.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import secrets
import struct
import threading
import time
from concurrent.futures import TimeoutError as FutureTimeoutError
from typing import TYPE_CHECKING, Final

from lmkv.peer.transport import (
    Channel,
    DeadlineError,
    Region,
    Transport,
    TransportError,
    check_regions,
    neighbours,
    unheeded,
)
from lmkv_backend_nixl_pd.agent import WORKERS, Agent, Starter, bindings, version_of
from lmkv_backend_nixl_pd.doorstep import DOOR_BYTES, SIGN_BYTES, Blob, Doorstep

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from concurrent.futures import Future

    from lmkv.memory import Pool
    from lmkv.peer.transport import Guard, Landed, Reach, TransportContext

BATCH_BYTES: Final = 64 << 20
"""A transfer has less than twice as many: where the kernel copies, it cannot be stopped before it is done."""
WARM_BYTES: Final = 4 << 20
"""The same for reads: what has landed is looked at while the processor's caches have it."""
PART_BYTES: Final = 4 << 20
"""What one thread begins at least, where a transfer is spread over all that begin some."""
BATCH_REGIONS: Final = 4096
SPINS: Final = 20
"""Times that a transfer is asked at once whether it is done, before the thread sleeps in between."""
SLEEPS: Final = (20e-6, 1e-3)
"""Seconds of the first sleep and of the longest; each is half as long again as the one before."""
NOTES_SECONDS: Final = 1.0
"""Between two notes to a peer, and between two looks at those of others. Not one with each transfer: on the way to its
peer it holds up the next one."""
CONNECT_SECONDS: Final = 5.0
_NOTE: Final = struct.Struct("<8sQQ")
_NOTE_MARK: Final = b"lmkvnote"

log = logging.getLogger(__name__)


class NixlTransport(Transport):
    """Registers the pool once; begins transfers in the threads that ask for them."""

    name = "nixl"
    remote_memory = True

    def __init__(self, pool: Pool, guard: Guard, context: TransportContext) -> None:
        """`guard` is not asked: nothing here could stop a peer."""
        del guard
        self.pool = pool
        self.address = pool.address
        self._mapping = pool.view  # as long as an agent lives, this memory must stay where it is
        self._library = bindings()
        self._served = context.served
        self._name = f"lmkv-{context.incarnation:016x}-{secrets.token_hex(8)}"  # nobody has ever had it
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()
        self._starters: list[Starter] = []
        self._channels: set[NixlChannel] = set()
        self._closed = threading.Event()
        self.door = door = Doorstep(version_of(self._library))
        memory = [(self.address, pool.nbytes), (door.address, DOOR_BYTES)]
        self._agent = Agent(self._library, self._name, memory)
        self._blob = Blob(
            version=door.version,
            machine=door.machine,
            devices=door.devices,
            process=os.getpid(),
            sign=door.sign,
            door=door.address,
            pool=self.address,
            nbytes=pool.nbytes,
            agent=self._name,
            metadata=self._agent.description,
        ).pack()
        self._reader = threading.Thread(target=self._read_notes, name="lmkv-nixl-notes", daemon=True)
        self._reader.start()

    def advertise(self) -> bytes:
        """Where the node is, where its pool and its doorstep lie, and the agent's metadata."""
        return self._blob

    def connect(self, reach: Reach, blob: bytes) -> NixlChannel:
        """As the contract says. The way is in `blob`; `reach` only says the session."""
        there = Blob.unpack(blob)
        self.door.check(there)
        if reach.tls is not None and there.machine != self.door.machine:
            raise TransportError("peer.tls is on, and nixl would carry the bytes to another machine unencrypted")
        starter = self._current()
        try:
            starter.join(there.agent, there.metadata)
        except TransportError:
            self._set_aside(starter)
            raise
        channel = NixlChannel(self, starter, there, reach.session)
        try:
            channel.knock(time.monotonic() + CONNECT_SECONDS)
        except BaseException:
            channel.close()
            raise
        with self._lock:
            self._channels.add(channel)
        return channel

    def forget(self, channel: NixlChannel) -> None:
        """It is closed."""
        with self._lock:
            self._channels.discard(channel)

    def retire(self, starter: Starter, why: str) -> None:
        """A transfer of that one has to end now: when this returns it touches no memory any more."""
        if not starter.agent.retired:
            log.warning("nixl: %s, and a transfer that goes on: all transfers of this node begin anew", why)
        starter.end()

    def close(self) -> None:
        """As the contract says."""
        self._closed.set()
        with self._lock:
            starters, self._starters = self._starters, []
        for starter in starters:
            starter.end()
        self._reader.join()
        self._agent.destroy()
        self._mapping = memoryview(b"")

    def _current(self) -> Starter:
        """The agent that begins transfers, made when it is first needed."""
        with self._lock:
            if self._closed.is_set():
                raise TransportError("the transport is closed")
            self._starters = [starter for starter in self._starters if not starter.agent.retired]
            if not self._starters or self._starters[-1].aside:
                name = f"{self._name}-{next(self._numbers)}"
                self._starters.append(Starter(self._library, name, (self.address, self.pool.nbytes)))
            return self._starters[-1]

    def _set_aside(self, starter: Starter) -> None:
        """Use it for no more peers: of one that it could not add it keeps something that stands in the way for ever."""
        with self._lock:
            starter.set_aside()

    def _read_notes(self) -> None:
        """Tells peers what was moved there, and counts what they have moved here.

        Some microseconds each time; the library would keep the notes for ever.
        """
        while not self._closed.wait(NOTES_SECONDS):
            with self._lock:
                channels = list(self._channels)
            for channel in channels:
                channel.tell()
            try:
                notes = self._agent.notes()
            except TransportError as e:
                log.debug("nixl: %s", e)
                continue
            for note in notes:
                if len(note) == _NOTE.size and note.startswith(_NOTE_MARK):
                    _, session, nbytes = _NOTE.unpack(note)
                    self._served(session, min(nbytes, self.pool.nbytes))


class NixlChannel(Channel):
    """One peer, as long as the agent that begins transfers lives."""

    def __init__(self, transport: NixlTransport, starter: Starter, there: Blob, session: int) -> None:
        """Takes over a count of that peer in `starter`."""
        self._transport = transport
        self._starter = starter
        self._there = there
        self._session = session
        self._lock = threading.Lock()
        self._moved = 0
        self._closed = False

    def knock(self, until: float) -> None:
        """Read the peer's doorstep, to see that this is the way to it."""
        address, view = self._starter.slot()
        post = self._submit("read", [(address, SIGN_BYTES)], [(self._there.door, SIGN_BYTES)])
        handle, done = self._begun(post, until)
        try:
            self._wait(handle, until, done=done)
        finally:
            with contextlib.suppress(TransportError):
                self._starter.agent.release(handle)
        if view != self._there.sign:
            raise TransportError("nixl reads somebody else's memory: not the process that was to be reached")

    def read(self, remote: Sequence[Region], local: Sequence[Region], until: float, landed: Landed = unheeded) -> None:
        """As the contract says."""
        filled = 0
        for nbytes in self._move("read", remote, local, until, WARM_BYTES):
            filled += nbytes
            landed(filled)

    def write(self, local: Sequence[Region], remote: Sequence[Region], until: float) -> None:
        """As the contract says."""
        for _ in self._move("write", remote, local, until, BATCH_BYTES):
            pass

    def close(self) -> None:
        """As the contract says."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        self.tell()
        self._transport.forget(self)
        self._starter.leave(self._there.agent)

    def _move(
        self, operation: str, remote: Sequence[Region], local: Sequence[Region], until: float, most: int
    ) -> Iterator[int]:
        """One transfer after the other, of about `most` bytes; the bytes of each that has been done."""
        check_regions(remote, local, self._transport.pool)
        if any(region.offset + region.nbytes > self._there.nbytes for region in remote):
            raise TransportError("regions that are not inside the peer's pool")
        for batch in _batches(neighbours(remote, local), most):
            if time.monotonic() >= until:
                raise DeadlineError("not done in time")
            self._carry(operation, batch, until)
            yield sum(region.nbytes for region, _ in batch)
        with self._lock:
            self._moved += sum(region.nbytes for region in local)

    def tell(self) -> None:
        """One note to the peer of what has been moved since the last one, for its figures. It may be lost."""
        with self._lock:
            nbytes, self._moved = self._moved, 0
        if nbytes:
            self._starter.agent.tell(self._there.agent, _NOTE.pack(_NOTE_MARK, self._session, nbytes))

    def _carry(self, operation: str, batch: Sequence[tuple[Region, Region]], until: float) -> None:
        """So many bytes at once; many by all threads. Returns or raises when nothing of it goes on."""
        total = sum(region.nbytes for region, _ in batch)
        posts = [
            self._submit(
                operation,
                [(self._transport.address + region.offset, region.nbytes) for _, region in part],
                [(self._there.pool + region.offset, region.nbytes) for region, _ in part],
            )
            for part in _batches(batch, max(PART_BYTES, -(-total // WORKERS)))
        ]
        error: BaseException | None = None
        for post in posts:
            try:
                self._finish(post, until)
            except BaseException as e:  # noqa: BLE001  raised below, when the others do not go on
                error = error or e
        if error is not None:
            raise error

    def _finish(self, post: Future[tuple[int, bool]], until: float) -> None:
        """Wait for one transfer."""
        handle, done = self._begun(post, until)
        try:
            self._wait(handle, until, done=done)
        except BaseException as e:
            self._abandon(handle, e)
            raise
        self._starter.agent.release(handle)

    def _submit(
        self, operation: str, here: Sequence[tuple[int, int]], there: Sequence[tuple[int, int]]
    ) -> Future[tuple[int, bool]]:
        try:
            return self._starter.crew.submit(self._post, operation, here, there)
        except RuntimeError as e:  # shut down
            raise TransportError("NIXL has been stopped here") from e

    @staticmethod
    def _begun(post: Future[tuple[int, bool]], until: float) -> tuple[int, bool]:
        try:
            return post.result(max(0.0, until - time.monotonic()))
        except FutureTimeoutError:
            if post.cancel():
                raise DeadlineError("other transfers took too long: not done in time") from None
            return post.result()  # the kernel copies: that has an end

    def _post(
        self, operation: str, here: Sequence[tuple[int, int]], there: Sequence[tuple[int, int]]
    ) -> tuple[int, bool]:
        if self._closed:
            raise TransportError("the channel is closed")
        return self._starter.agent.begin(operation, here, there, self._there.agent)

    def _wait(self, handle: int, until: float, *, done: bool) -> None:
        """Until it is done: at first without sleep, then with longer and longer ones."""
        pause, longest = SLEEPS
        asked = 0
        while not done:
            if self._closed:
                raise TransportError("the channel is closed")
            if time.monotonic() >= until:
                raise DeadlineError("the peer was too slow: not done in time")
            if asked >= SPINS:
                time.sleep(pause)
                pause = min(longest, pause * 1.5)
            asked += 1
            done = self._starter.agent.done(handle)

    def _abandon(self, handle: int, error: BaseException) -> None:
        """Make sure that a transfer that has not ended well touches no memory any more."""
        agent = self._starter.agent
        if agent.retired:
            agent.destroy()
            return
        if isinstance(error, TransportError) and not isinstance(error, DeadlineError) and not self._closed:
            try:
                agent.release(handle)  # it has ended by itself, with an error
            except TransportError:
                log.debug("nixl: a transfer that failed is not over", exc_info=True)
            else:
                return
        self._transport.retire(self._starter, str(error))


def _batches(pairs: Sequence[tuple[Region, Region]], most: int) -> Iterator[list[tuple[Region, Region]]]:
    """The pairs in lists that end with `most` bytes or `BATCH_REGIONS`, whole ones as long as they are no longer."""
    batch: list[tuple[Region, Region]] = []
    nbytes = 0
    for there, here in pairs:
        for at in range(0, here.nbytes, most):
            part = min(most, here.nbytes - at)
            batch.append((Region(there.offset + at, part), Region(here.offset + at, part)))
            nbytes += part
            if nbytes >= most or len(batch) == BATCH_REGIONS:
                yield batch
                batch, nbytes = [], 0
    if batch:
        yield batch
