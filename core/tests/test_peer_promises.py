"""A peer that says what is not so, or nothing at all: no word of his makes memory free, and none takes all of it."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest
from peer_rig import SPACE, Clock, drop, eventually, peer, sealed
from storage_rig import FRAME, chain
from wild_rig import Wild, WildChannel

from lmkv.errors import LmkvError
from lmkv.peer import line as lines
from lmkv.peer import messages as m
from lmkv.peer.connection import Connection
from lmkv.peer.line import Line
from lmkv.peer.transport import Region
from lmkv.peer.wire import open_data

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


def data_socket(connection: Connection, number: int) -> Line:
    """A data socket of a peer that does with it what it likes. Blocking."""
    until = time.monotonic() + 20
    line = Line(open_data(connection.reach, number, until))
    lines.take_ready(line, until)
    return line


def write(line: Line, region: Region, data: bytes) -> None:
    until = time.monotonic() + 20
    line.send([lines.request(lines.WRITE, [region]), data], until)
    if len(data) == region.nbytes:
        lines.take_reply(line, until)


@pytest.mark.parametrize("word", ["commit", "failed", "abort"])
async def test_the_peers_word_is_not_enough_where_a_thread_still_writes(word: str) -> None:
    """tcp: it says that it is done, and another of its sockets is in the middle of a write to the same memory.

    What came is verified and would be another frame a moment later; freed, it would be somebody else's memory.
    """
    keys = chain(range(4))
    async with peer("a") as a, peer("b") as b:
        a.store(keys)
        (frame,) = sealed(a, keys)
        data, size = bytes(frame.object.view), frame.object.nbytes
        drop([frame])
        link, until = a.link(b), time.monotonic() + 20
        head = m.NewFrame(frame.key.digest, frame.parent, frame.pages, frame.prefixes)
        reserved = await a.on(link.ask(m.Reserve("", SPACE.id, 0, (head,)), until))
        region = Region(reserved.offsets[0], size)
        connection = await a.on(link._connected(until))
        slow, quick = [await asyncio.to_thread(data_socket, connection, number) for number in (1, 2)]
        await asyncio.to_thread(write, slow, region, data[:100])
        (session,) = b.hall.sessions
        await eventually(lambda: b.hall.transports["tcp"].touches(session, region))
        await asyncio.to_thread(write, quick, region, data)
        if word == "abort":
            a.node.peers._loop.call_soon_threadsafe(connection.tell, m.Abort(reserved.reservation, True))
        else:
            failed = (0,) if word == "failed" else ()
            committed = await a.on(link.ask(m.Commit(reserved.reservation, failed), until))
            assert all(committed.outcomes)
        await eventually(lambda: b.hall.quarantine.nbytes == FRAME)
        assert not b.manager.stack.room.filling
        assert b.manager.index.entry(frame.key) is None
        await asyncio.to_thread(slow.send, [bytes(size - 100)], until)
        await eventually(b.at_rest)
        for line in (slow, quick):
            line.close()


async def test_a_late_word_frees_nothing_that_a_thread_still_writes() -> None:
    """The reservation has expired in the middle of a write, and then comes its commit."""
    clock, keys = Clock(), chain(range(4))
    async with peer("a") as a, peer("b", clock=clock) as b:
        link, until = a.link(b), time.monotonic() + 20
        head = m.NewFrame(keys.digests[0], b"", 2, keys.prefixes(0)[0])
        reserved = await a.on(link.ask(m.Reserve("", SPACE.id, 0, (head,)), until))
        region = Region(reserved.offsets[0], reserved.lengths[0])
        slow = await asyncio.to_thread(data_socket, await a.on(link._connected(until)), 1)
        await asyncio.to_thread(write, slow, region, bytes(100))
        (session,) = b.hall.sessions
        await eventually(lambda: b.hall.transports["tcp"].touches(session, region))
        clock.ahead = 31
        b.hall.tidy()
        with pytest.raises(LmkvError) as e:
            await a.on(link.ask(m.Commit(reserved.reservation), until))
        assert e.value.kind == "expired"
        assert b.hall.quarantine.nbytes == FRAME
        await asyncio.to_thread(slow.send, [bytes(region.nbytes - 100)], until)
        await eventually(b.at_rest)
        slow.close()


async def test_what_is_out_of_use_is_counted_and_has_a_bound() -> None:
    """A peer that never says that it is done cannot put more than its part of the pool out of use."""
    wild, keys = Wild(), chain(range(160))
    async with peer("a", **wild.too) as a, peer("b", **wild.too, ram=40 * FRAME, pool=48 * FRAME) as b:
        link, until = a.link(b), time.monotonic() + 20
        connection = await a.on(link._connected(until))
        for i in range(20):
            head = m.NewFrame(keys.digests[i], keys.parent(i), 2, keys.prefixes(i)[0])
            reserved = await a.on(link.ask(m.Reserve("", SPACE.id, 0, (head,)), until))
            if reserved.reservation:
                a.node.peers._loop.call_soon_threadsafe(connection.tell, m.Abort(reserved.reservation, False))
        await eventually(lambda: not b.manager.stack.room.filling)
        assert b.hall.quarantine.nbytes == 12 * FRAME
        b.store(keys)
        leased = await a.on(link.ask(m.Lease(SPACE.id, keys.digests[0], (0,), 10.0), until))
        assert leased.offsets == (m.ABSENT,)
        asked = m.Admit("t", 12, SPACE.id)
        b.node.incoming._most = 14 * FRAME
        assert isinstance(await a.on(link.ask(asked, until)), m.NoRoom)
        b.node.incoming._most = 15 * FRAME
        assert isinstance(await a.on(link.ask(asked, until)), m.Admitted)
        b.node.incoming.finish("t", "aborted")


async def test_leases_that_expire_at_once_do_not_add_up() -> None:
    wild, keys = Wild(), chain(range(80))
    async with peer("a", **wild.too) as a, peer("b", **wild.too, ram=20 * FRAME, pool=24 * FRAME) as b:
        b.store(keys)
        link, until = a.link(b), time.monotonic() + 20
        for digest in keys.digests:
            await a.on(link.ask(m.Lease(SPACE.id, digest, (0,), 0.0), until))
            b.hall.tidy()
        assert b.hall.quarantine.nbytes == 6 * FRAME


async def test_a_reader_that_takes_its_time_costs_the_others_nothing() -> None:
    """Its hardware reads, if it does: the node is not busy, and serves whoever asks next."""
    wild, clock, keys = Wild(), Clock(), chain(range(4))
    async with peer("a", **wild.too) as a, peer("b", **wild.too, clock=clock, share="10%") as b:
        b.store(keys)
        leased = await a.on(a.link(b).ask(m.Lease(SPACE.id, keys.digests[0], (0,), 30.0), time.monotonic() + 20))
        assert leased.lease
        clock.ahead = 31
        b.hall.tidy()
        assert b.hall.pace.rest == 0.0


async def test_nothing_moves_longer_than_it_was_promised(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who asks has all the time of the world; what he gets is his for less, counted from before he asked.

    The memory is somebody else's when the time is over there, and an answer may be late.
    """
    wild, keys, asked, ends = Wild(), chain(range(8)), [], []
    for name in ("read", "write"):
        original = getattr(WildChannel, name)

        def noted(channel: WildChannel, these: Any, those: Any, end: float, original: Any = original) -> None:
            ends.append(end)
            original(channel, these, those, end)

        monkeypatch.setattr(WildChannel, name, noted)
    ask = Connection.ask

    async def answered_late(self: Connection, request: m.Request, until: float) -> m.Reply:
        if isinstance(request, (m.Lease, m.Reserve)):
            asked.append(time.monotonic())
        reply = await ask(self, request, until)
        await asyncio.sleep(0.1)
        return reply

    monkeypatch.setattr(Connection, "ask", answered_late)
    async with peer("a", **wild.too) as a, peer("b", **wild.too) as b:
        a.store(keys)
        frames = sealed(a, keys)
        assert all(o.ok for o in await a.on(a.link(b).push(frames, time.monotonic() + 1000)))
        drop(frames)
        assert all(o.ok for o in (await a.pull(b, a.keys(keys), seconds=1000))[0])
        assert len(asked) == len(ends) == 2
        for begun, end in zip(asked, ends, strict=True):
            assert end <= begun + b.hall.seconds


async def test_an_answer_that_comes_as_its_asker_goes_is_given_back() -> None:
    """Else the memory would be out of use until the connection ends."""
    wild, keys = Wild(), chain(range(4))
    async with peer("a", **wild.too) as a, peer("b", **wild.too) as b:
        link, until = a.link(b), time.monotonic() + 20
        head = m.NewFrame(keys.digests[0], b"", 2, keys.prefixes(0)[0])

        async def ask_and_go() -> None:
            connection = await link._connected(until)
            asking = asyncio.ensure_future(connection.ask(m.Reserve("", SPACE.id, 0, (head,)), until))
            await asyncio.sleep(0)  # it has asked
            ((_, future),) = connection._pending.items()
            future.add_done_callback(lambda _: asking.cancel())
            with pytest.raises(asyncio.CancelledError):
                await asking
            assert isinstance(future.result(), m.Reserved)

        await a.on(ask_and_go())
        await eventually(b.at_rest)
