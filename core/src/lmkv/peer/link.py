"""One peer as seen from here: asks it, pulls from its pool, pushes into it.

A link connects when it is first used, and anew after a failure, a restart of the peer or a silence. Bytes move through
the best transport that both sides have, in threads; one that fails is left alone for a while.
"""

from __future__ import annotations

import asyncio
import logging
import time
from copy import copy
from typing import TYPE_CHECKING, Final, cast

from lmkv.errors import ClosedError, LmkvError, ProtocolError
from lmkv.peer import messages as m
from lmkv.peer.channels import Channels
from lmkv.peer.connection import Connection, open_connection
from lmkv.peer.frames import Frame, batches, portions
from lmkv.peer.landing import Landing
from lmkv.peer.transport import Region, TransportError
from lmkv.peer.wire import shown
from lmkv.types import FAILED, MISS, OK, REJECTED

if TYPE_CHECKING:
    from collections.abc import Sequence
    from concurrent.futures import Future

    from lmkv.memory import MemoryObject
    from lmkv.peer.peers import Means
    from lmkv.peer.transport import Channel
    from lmkv.types import ChunkKey, Outcome

__all__ = ["Frame", "PeerLink"]
log = logging.getLogger("lmkv.peer")

BACKOFF: Final = 0.2
"""Seconds after a failed connection in which none is tried; doubled with each failure."""
BACKOFF_MAX: Final = 5.0
EARLY_BYTES: Final = 1 << 20
"""Of payloads that go before their frames are sealed; fewer wait, for another call costs as much."""
AT_ONCE: Final = 2
"""Batches of one push that are under way at a time."""


class PeerLink:
    """One peer. Its coroutines run on the loop of `Peers` only: see `Peers.run` and `Peers.submit`.

    Every call ends by `until` (time of `time.monotonic`), with an answer or an error; what a call that was too late
    had got from the peer is given back. Errors of all calls:

        ClosedError: the peer is not reachable, has gone, or (kind ``deadline``) did not answer in time.
        ProtocolError: another version, another key, or no lmkv at all.
        LmkvError: what the peer refused with; kinds as there.

    Attributes:
        address: `host:port`.
        node: the peer's name; empty before the first connection.
        incarnation: of the peer; 0 before the first connection.
    """

    def __init__(self, host: str, port: int, address: str, means: Means) -> None:
        """For `Peers`."""
        self.address = address
        self.node = ""
        self.incarnation = 0
        self._host, self._port = host, port
        self._means = means
        self._connection: Connection | None = None
        self._connecting = asyncio.Lock()
        self._failures = 0
        self._not_before = 0.0
        self._last: LmkvError | None = None
        self._channels = Channels(address, means)

    # --- questions ---------------------------------------------------------------------------------------------------

    async def ask(self, request: m.Request, until: float) -> m.Reply:
        """Any request and its answer (never a `PeerRefused`, which is raised)."""
        return await (await self._connected(until)).ask(request, until)

    async def agree(self, namespace_json: str, until: float) -> None:
        """Check that both sides have the same namespace.

        Asked once a connection.

        Raises:
            ConfigError: they have not (kind ``namespace``; the message names each difference with both values), or no
                engine of that model is there yet (kind ``no-namespace``, retryable).
        """
        connection = await self._connected(until)
        if namespace_json not in connection.agreed:
            await connection.ask(m.Agree(namespace_json), until)
            connection.agreed.add(namespace_json)

    async def has(
        self, namespace: bytes, digests: Sequence[bytes], until: float, *, below: bool = False
    ) -> tuple[list[bool], float]:
        """Which chunks the peer has in its pool (`below`: or in slower tiers of its own), all shards of them.

        And how many seconds a pull would wait for its turn.
        """
        held: list[bool] = []
        wait = 0.0
        for part in portions(digests, m.MAX_DIGESTS):
            reply = await self._expect(m.Has(namespace, b"".join(part), below), m.Holds, until)
            holds = cast("m.Holds", reply)
            if len(holds.bitmap) != (len(part) + 7) // 8:
                text = f"peer {self.address}: a bitmap of {len(holds.bitmap)} bytes for {len(part)} chunks"
                raise ProtocolError(text)
            held += [bool(holds.bitmap[i >> 3] >> (i & 7) & 1) for i in range(len(part))]
            wait = max(0.0, holds.wait)
        return held, wait

    # --- pull --------------------------------------------------------------------------------------------------------

    async def pull(
        self, keys: Sequence[ChunkKey], into: Sequence[MemoryObject], until: float, *, bring: bool = False
    ) -> list[Outcome]:
        """Read frames into memory of the own pool.

        One outcome per key: `OK(nbytes)`, `MISS`, or `FAILED` where the memory is too small or the bytes did not come.
        They are *not* verified: the caller does that, as a tier does. Memory is not touched after the return.
        All keys are of one namespace. `bring`: also what the peer has in slower tiers only.
        """
        digests = list(dict.fromkeys(key.digest for key in keys))
        shards = len({key.shard for key in keys})
        outcomes: dict[int, Outcome] = {}
        for part in map(set, portions(digests, max(1, m.MAX_FRAMES // shards))):
            chosen = [i for i, key in enumerate(keys) if key.digest in part]
            came = await self._pull([keys[i] for i in chosen], [into[i] for i in chosen], until, bring=bring)
            outcomes.update(zip(chosen, came, strict=True))
        return [outcomes[i] for i in range(len(keys))]

    async def _pull(
        self, keys: Sequence[ChunkKey], into: Sequence[MemoryObject], until: float, *, bring: bool
    ) -> list[Outcome]:
        """What one lease gives."""
        digests = list(dict.fromkeys(key.digest for key in keys))
        shards = sorted({key.shard for key in keys})
        left = max(0.0, until - time.monotonic())
        lease = m.Lease(keys[0].namespace, b"".join(digests), tuple(shards), left, bring, left)
        connection = await self._connected(until)
        asked = time.monotonic()
        leased = await self._expect(lease, m.Leased, until, connection)
        assert isinstance(leased, m.Leased)
        try:
            frames = len(digests) * len(shards)
            if len(leased.offsets) != frames or len(leased.lengths) != frames:
                raise ProtocolError(f"peer {self.address}: {len(leased.offsets)} frames for {frames} that were asked")
            place = {(digest, shard): i * len(shards) + j for i, digest in enumerate(digests)
                     for j, shard in enumerate(shards)}  # fmt: skip
            found = [place[key.digest, key.shard] for key in keys]
            until = min(until, asked + leased.seconds)  # there it is counted from later on
            return await self._read([(leased.offsets[i], leased.lengths[i]) for i in found], into, connection, until)
        finally:
            if leased.lease:
                connection.tell(m.Release(leased.lease))

    async def _read(
        self, places: Sequence[tuple[int, int]], into: Sequence[MemoryObject], connection: Connection, until: float
    ) -> list[Outcome]:
        outcomes: list[Outcome] = [MISS] * len(places)
        remote: list[Region] = []
        local: list[Region] = []
        filling: list[MemoryObject] = []
        for i, ((offset, nbytes), obj) in enumerate(zip(places, into, strict=True)):
            if offset < 0 or nbytes <= 0:
                continue
            if nbytes > obj.nbytes:
                outcomes[i] = FAILED(ProtocolError(f"a frame of {nbytes} bytes; there is memory for {obj.nbytes}"))
                continue
            outcomes[i] = OK(nbytes)
            remote.append(Region(offset, nbytes))
            local.append(Region(obj.offset, nbytes))
            filling.append(obj)
        if not remote:
            return outcomes

        def read(channel: Channel) -> None:
            channel.read(remote, local, until, Landing(filling, [region.nbytes for region in local]))

        try:
            by = await self._channels.move(connection, read, until)
        except TransportError as e:
            self._count_error(e)
            return [FAILED(e) if outcome.ok else outcome for outcome in outcomes]
        self._means.count("pull", by, sum(region.nbytes for region in local))
        return outcomes

    # --- push --------------------------------------------------------------------------------------------------------

    async def push(self, frames: Sequence[Frame], until: float, *, transfer: str = "") -> list[Outcome]:
        """Write frames into the peer's pool, also those that are being sealed: their payloads go meanwhile.

        One outcome per frame: `OK(nbytes)` (also if the peer has it already), `REJECTED` (no room) or `FAILED`.
        """
        outcomes: dict[int, Outcome] = {}
        turns = asyncio.Semaphore(AT_ONCE)

        async def push(batch: list[int]) -> None:
            async with turns:
                pushed = await self._push([frames[i] for i in batch], until, transfer)
            outcomes.update(zip(batch, pushed, strict=True))

        ended = await asyncio.gather(*map(push, batches(frames)), return_exceptions=True)
        for error in ended:
            if error is not None:
                raise error
        return [outcomes[i] for i in range(len(frames))]

    async def _push(self, frames: Sequence[Frame], until: float, transfer: str) -> list[Outcome]:
        """Frames of one shard."""
        heads = tuple(m.NewFrame(f.key.digest, f.parent, f.pages, f.prefixes) for f in frames)
        connection = await self._connected(until)
        request = m.Reserve(transfer, frames[0].key.namespace, frames[0].key.shard, heads)
        began = time.monotonic()  # there it is counted from later on, however late the answer is
        reserved = await self._expect(request, m.Reserved, until, connection)
        assert isinstance(reserved, m.Reserved)
        until = min(until, began + reserved.seconds)  # nothing is written after it has expired
        done = True
        try:
            if len(reserved.offsets) != len(frames) or len(reserved.lengths) != len(frames):
                text = f"peer {self.address}: {len(reserved.offsets)} places for {len(frames)} frames"
                raise ProtocolError(text)  # noqa: TRY301  one clean-up
            outcomes = [
                OK(f.object.nbytes) if offset == m.PRESENT else REJECTED
                for f, offset in zip(frames, reserved.offsets, strict=True)
            ]
            wanted = [i for i, offset in enumerate(reserved.offsets) if offset >= 0]
            failed = [n for n, i in enumerate(wanted) if reserved.lengths[i] != frames[i].object.nbytes]
            going = [i for i in wanted if reserved.lengths[i] == frames[i].object.nbytes]
            if not going:
                self._give_up(connection, reserved, done=True)
                return [
                    FAILED(ProtocolError("another length is expected")) if i in wanted else outcome
                    for i, outcome in enumerate(outcomes)
                ]
            done = False
            by = await self._write([frames[i] for i in going], [reserved.offsets[i] for i in going], connection, until)
            done = True
            asked = m.Commit(reserved.reservation, tuple(failed))
            committed = await self._expect(asked, m.Committed, until, connection)
            assert isinstance(committed, m.Committed)
            if len(committed.outcomes) != len(wanted):
                text = f"peer {self.address}: {len(committed.outcomes)} outcomes for {len(wanted)} frames"
                raise ProtocolError(text)  # noqa: TRY301  one clean-up
            for i, why in zip(wanted, committed.outcomes, strict=True):
                frame = frames[i]
                outcomes[i] = (
                    FAILED(TransportError(f"peer {self.node}: {shown(why)}")) if why else OK(frame.object.nbytes)
                )
            self._means.count("push", by, sum(frames[i].object.nbytes for i in going))
        except TransportError as e:
            self._count_error(e)
            self._give_up(connection, reserved, done=done)
            return [FAILED(e)] * len(frames)
        except BaseException:
            self._give_up(connection, reserved, done=done)
            raise
        return outcomes

    async def _write(self, frames: Sequence[Frame], places: Sequence[int], connection: Connection, until: float) -> str:
        """Put whole frames into these places of the peer's pool; by which transport."""
        sealing = [frame.sealed for frame in frames if frame.sealed is not None]
        if sum(frame.payload for frame in frames if frame.sealed is not None) < EARLY_BYTES:
            await _all(sealing)
            sealing = []
        early, late = [], []
        for frame, place in zip(frames, places, strict=True):
            offset, nbytes = frame.object.offset, frame.object.nbytes
            final = frame.payload if frame.sealed is not None and sealing else nbytes
            early.append((Region(offset, final), Region(place, final)))
            if final < nbytes:
                late.append((Region(offset + final, nbytes - final), Region(place + final, nbytes - final)))
        by = await self._put(early, connection, until)
        if late:
            await _all(sealing)
            by = await self._put(late, connection, until)
        return by

    async def _put(self, pairs: Sequence[tuple[Region, Region]], connection: Connection, until: float) -> str:
        local, remote = [here for here, _ in pairs], [there for _, there in pairs]
        return await self._channels.move(connection, lambda channel: channel.write(local, remote, until), until)

    @staticmethod
    def _give_up(connection: Connection, reserved: m.Reserved, *, done: bool) -> None:
        if reserved.reservation:
            connection.tell(m.Abort(reserved.reservation, done))

    # --- connection --------------------------------------------------------------------------------------------------

    async def _expect(
        self, request: m.Request, kind: type[m.PeerMessage], until: float, connection: Connection | None = None
    ) -> m.Reply:
        connection = connection or await self._connected(until)
        reply = await connection.ask(request, until)
        if not isinstance(reply, kind):
            connection.close(f"a {type(reply).__name__} where a {kind.__name__} belongs")
            raise ProtocolError(f"peer {self.address}: a {type(reply).__name__} where a {kind.__name__} belongs")
        return reply

    async def _connected(self, until: float) -> Connection:
        """The connection, made anew if need be; who comes while it is being made waits for it, by `until`."""
        connection = self._connection
        if connection is not None and connection.alive:
            return connection
        if self._last is not None and time.monotonic() < self._not_before:
            raise copy(self._last)  # each who gets it adds his traceback
        attempt = asyncio.ensure_future(self._connect())
        self._means.attempts.add(attempt)
        attempt.add_done_callback(self._means.attempts.discard)
        attempt.add_done_callback(lambda task: task.cancelled() or task.exception())  # who asked may have gone
        done, _ = await asyncio.wait([attempt], timeout=max(0.0, until - time.monotonic()))
        if not done:
            raise ClosedError(f"peer {self.address} is not connected yet", kind="deadline")
        return attempt.result()

    async def _connect(self) -> Connection:
        async with self._connecting:
            if self._connection is not None and self._connection.alive:
                return self._connection
            if self._last is not None and time.monotonic() < self._not_before:
                raise copy(self._last)
            await self._forget_connection()
            means = self._means
            if means.closed:
                raise ClosedError("the links to peers are closed")
            blobs = {name: transport.advertise() for name, transport in means.transports.items()}
            try:
                connection = await open_connection(
                    self._host, self._port, means.me, blobs, purpose=means.purpose, tls=means.tls
                )
            except LmkvError as e:
                pause = min(BACKOFF_MAX, BACKOFF * 2**self._failures)
                self._failures += 1
                self._last, self._not_before = e, time.monotonic() + pause
                self._count_error(e)
                raise
            self._failures, self._last = 0, None
            self._connection = connection
            self._meet(connection)
            return connection

    def _meet(self, connection: Connection) -> None:
        """See whether it is the peer that we knew."""
        restarted = self.incarnation not in {0, connection.incarnation}
        if restarted:
            log.info("peer %s has restarted", connection.node)
            self._channels.barred.clear()
        self.node, self.incarnation = connection.node, connection.incarnation
        if restarted:
            self._means.restarted(self.address, connection.incarnation)

    async def _forget_connection(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close("the link is closed")
        await self._channels.forget()
        if connection is not None:
            await connection.closed()

    def _count_error(self, error: LmkvError) -> None:
        self._means.count_error(error)

    async def close(self) -> None:
        """End the connection; who waits gets an error. For `Peers`."""
        await self._forget_connection()


async def _all(sealing: Sequence[Future[None]]) -> None:
    """Wait for them, who go on whatever becomes of this; raises what one has raised."""
    for sealed in sealing:
        await asyncio.shield(asyncio.wrap_future(sealed))
