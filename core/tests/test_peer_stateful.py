"""Whatever peers, the engine and the clock do in whatever order: sums are right, and in the end nothing is held."""

from __future__ import annotations

import asyncio
import inspect
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from peer_rig import SPACE, Clock
from storage_rig import FRAME, Client, chain, storage

from lmkv.errors import LmkvError
from lmkv.frame import Trailer, seal
from lmkv.peer import messages as m
from lmkv.peer import reservations
from lmkv.peer.hall import Hall
from lmkv.peer.incoming import Incoming
from lmkv.peer.pace import Pace
from lmkv.peer.transport import Region, Transport
from lmkv.service import protocol as p
from lmkv.types import ChunkKey

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    from lmkv.peer.session import PeerSession

PROMPTS = [chain(range(100 * i, 100 * i + 12)) for i in range(3)]
CHUNKS = [(prompt, i) for prompt in PROMPTS for i in range(3)]
NAMES = ("", "t0", "t1")
chunk = st.sampled_from(CHUNKS)
some = st.lists(chunk, min_size=1, max_size=4, unique_by=lambda c: c[0].digests[c[1]])
which = st.integers(0, 3)


class Hardware(Transport):
    """Stands for RDMA: what it may touch is known to nobody."""

    name = "hardware"
    remote_memory = True

    def advertise(self) -> bytes:
        return b""

    def connect(self, reach: Any, blob: bytes) -> Any:
        raise NotImplementedError

    def close(self) -> None:
        pass


class Nodes(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.part, reservations.PART_FRAMES = reservations.PART_FRAMES, 1  # something may happen between any two
        self.loop = asyncio.new_event_loop()
        self.clock = Clock()
        self.cm = storage(ram=6 * FRAME, pool=10 * FRAME, clock=self.clock)
        self.manager = self.run(self.cm.__aenter__())
        self.run(self._start())
        self.leases: list[tuple[PeerSession, int]] = []
        self.reservations: list[tuple[PeerSession, m.Reserve, m.Reserved]] = []

    async def _start(self) -> None:
        self.client = Client(self.manager, SPACE)
        self.incoming = Incoming(self.manager, most=5 * FRAME, seconds=60.0, waiting=4)
        self.hall = Hall(self.manager, self.incoming, Pace(1.0), seconds=30.0)
        self.hall.transports = {"hardware": Hardware()}
        self.peers = [self.hall.open(f"n{i}", ["hardware"] if i else []) for i in range(2)]

    def run(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        return self.loop.run_until_complete(coroutine)

    def on_loop(self, work: Callable[[], Any]) -> Any:
        async def body() -> Any:
            found = work()
            return await found if inspect.isawaitable(found) else found

        return self.run(body())

    def ask(self, who: int, message: m.PeerMessage) -> Any:
        """The answer, or None where it was refused."""
        session = self.peers[who % 2]
        try:
            return self.on_loop(lambda: session.handle(message))
        except LmkvError:
            return None

    @rule(who=which, chunks=some, shard=st.just(0))
    def lease(self, who: int, chunks: list[Any], shard: int) -> None:
        digests = b"".join(keys.digests[i] for keys, i in chunks)
        leased = self.ask(who, m.Lease(SPACE.id, digests, (shard,), 30.0))
        if leased is not None and leased.lease:
            self.leases.append((self.peers[who % 2], leased.lease))

    @rule(at=which)
    def release(self, at: int) -> None:
        if self.leases:
            session, number = self.leases.pop(at % len(self.leases))
            if not session.closed:
                self.on_loop(lambda: session.handle(m.Release(number)))

    @rule(who=which, chunks=some, name=st.sampled_from(NAMES))
    def reserve(self, who: int, chunks: list[Any], name: str) -> None:
        heads = tuple(m.NewFrame(k.digests[i], k.parent(i), 2, k.prefixes(i)[0]) for k, i in chunks)
        asked = m.Reserve(name, SPACE.id, 0, heads)
        reserved = self.ask(who, asked)
        if reserved is not None and reserved.reservation:
            self.reservations.append((self.peers[who % 2], asked, reserved))

    @rule(who=which, chunks=some, name=st.sampled_from(NAMES), turns=st.integers(1, 3), what=st.integers(0, 3))
    def reserve_while_something_happens(self, who: int, chunks: list[Any], name: str, turns: int, what: int) -> None:
        heads = tuple(m.NewFrame(k.digests[i], k.parent(i), 2, k.prefixes(i)[0]) for k, i in chunks)
        session = self.peers[who % 2]

        async def body() -> Any:
            pending = asyncio.ensure_future(session.handle(m.Reserve(name, SPACE.id, 0, heads)))  # type: ignore[arg-type]
            for _ in range(turns):
                await asyncio.sleep(0)
            if what == 0:
                self.client.ask(p.Clear())
            elif what == 1:
                self.incoming.finish("t0", "aborted")
            elif what == 2:
                pending.cancel()
            else:
                self.client.store([p.NewFrame(h.digest, h.parent, h.pages, h.prefixes) for h in heads])
            try:
                return await pending
            except (LmkvError, asyncio.CancelledError):
                return None

        reserved = self.run(body())
        if reserved is not None and reserved.reservation:
            self.reservations.append((session, m.Reserve(name, SPACE.id, 0, heads), reserved))

    def _take(self, at: int) -> tuple[PeerSession, m.Reserve, m.Reserved] | None:
        return self.reservations.pop(at % len(self.reservations)) if self.reservations else None

    @rule(at=which, good=st.booleans(), failed=st.booleans())
    def commit(self, at: int, good: bool, failed: bool) -> None:
        if (taken := self._take(at)) is None or taken[0].closed:
            return
        session, asked, reserved = taken
        for head, offset, nbytes in zip(asked.frames, reserved.offsets, reserved.lengths, strict=True):
            if offset >= 0 and self.hall.grants._writes.allow(session.number, Region(offset, nbytes)):
                view = self.manager.pool.cut(offset, nbytes)
                raw = 2 * SPACE.page_bytes[0]
                view[:raw] = self.client.payload(head.digest, 0, raw).data
                key = ChunkKey(SPACE.id, 0, head.digest)
                seal(view, Trailer(key, head.parent, 2, (head.prefixes,), "identity", raw, raw))
                if not good:
                    view[7] ^= 1
        message = m.Commit(reserved.reservation, (0,) if failed else ())
        if reserved.reservation not in session.reservations:
            with pytest.raises(LmkvError, match="expired"):
                self.on_loop(lambda: session.handle(message))
            return
        done = self.on_loop(lambda: session.handle(message))
        assert all(bool(why) == (not good or (failed and i == 0)) or why == "cleared"
                   for i, why in enumerate(done.outcomes))  # fmt: skip

    @rule(at=which, done=st.booleans())
    def abort(self, at: int, done: bool) -> None:
        if (taken := self._take(at)) is not None and not taken[0].closed:
            self.on_loop(lambda: taken[0].handle(m.Abort(taken[2].reservation, done)))

    @rule(name=st.sampled_from(NAMES[1:]), tokens=st.integers(0, 24))
    def admit(self, name: str, tokens: int) -> None:
        self.ask(0, m.Admit(name, tokens, SPACE.id))

    @rule(name=st.sampled_from(NAMES[1:]), state=st.sampled_from(["complete", "failed", "aborted"]))
    def finish(self, name: str, state: str) -> None:
        self.ask(0, m.Finish(name, state, 4))

    @rule(name=st.sampled_from(NAMES[1:]))
    def let_go(self, name: str) -> None:
        self.on_loop(lambda: self.incoming.let_go(name))

    @rule(seconds=st.sampled_from([1.0, 29.0, 31.0, 61.0, 200.0]))
    def time_passes(self, seconds: float) -> None:
        self.clock.ahead += seconds
        self.on_loop(self.hall.tidy)

    @rule(chunks=some)
    def engine_stores(self, chunks: list[Any]) -> None:
        frames = [p.NewFrame(k.digests[i], k.parent(i), 2, k.prefixes(i)[0]) for k, i in chunks]
        self.on_loop(lambda: self.client.store(frames))

    @rule(number=st.integers(0, 2))
    def engine_loads(self, number: int) -> None:
        async def body() -> None:
            found = await self.client.look_up(PROMPTS[number])
            if found.lease:
                await self.client.load(found, PROMPTS[number])  # checks every byte
                self.client.ask(p.Release(found.lease))

        self.run(body())

    @rule()
    def engine_clears(self) -> None:
        self.on_loop(lambda: self.client.ask(p.Clear()))

    @rule(who=which)
    def peer_goes_and_comes(self, who: int) -> None:
        async def body() -> None:
            self.peers[who % 2].close()
            while self.hall._leaving:
                await asyncio.wait(self.hall._leaving)
            self.peers[who % 2] = self.hall.open("again", ["hardware"] if who % 2 else [])

        self.run(body())

    @invariant()
    def sums_are_right(self) -> None:
        slots = [slot for s in self.peers for slots in s.reservations.values() for slot in slots]
        stock = [o for t in self.incoming._transfers.values() for each in t.stock.values() for o in each]
        assert self.manager.stack.room.filling == sum(s.object.nbytes for s in slots) + sum(o.nbytes for o in stock)
        assert self.hall.lent == sum(o.nbytes for s in self.peers for held in s.holds.values() for o in held)
        open_ones = [t for t in self.incoming._transfers.values() if t.state == "open"]
        assert self.incoming.admitted == sum(t.nbytes for t in open_ones) <= 5 * FRAME
        assert self.manager.index.books.holds >= 0
        ram = self.manager.stack.ram
        assert ram is not None
        assert ram.used + self.manager.stack.room.filling <= 6 * FRAME

    def teardown(self) -> None:
        async def body() -> None:
            await self.hall.close()
            self.clock.ahead += 1000
            self.hall.tidy()
            self.hall.end()

        try:
            self.run(body())
            assert not self.manager.index.books.holds
            assert not self.manager.stack.room.filling
            assert not self.hall.lent
            assert not self.hall.quarantine.nbytes
            assert all(set(owners) == {"ram"} for _, _, owners in self.manager.pool.holders())
        finally:
            self.run(self.cm.__aexit__(None, None, None))
            self.loop.close()
            reservations.PART_FRAMES = self.part


TestNodes = Nodes.TestCase
TestNodes.settings = settings(
    max_examples=20, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)
