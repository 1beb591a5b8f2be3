"""Memory that another node may still touch is nobody's. With a transport that asks nobody before it writes."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from typing import Any

import pytest
from peer_rig import SPACE, Clock, drop, eventually, peer, sealed
from storage_rig import FRAME, chain
from wild_rig import Wild, WildTransport

from lmkv.errors import LmkvError
from lmkv.peer import messages as m
from lmkv.peer.channels import PAUSE, PAUSE_MAX
from lmkv.peer.transport import DeadlineError, Region, TransportError
from lmkv.types import OutcomeKind

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


async def test_the_best_transport_is_used_both_ways() -> None:
    wild, keys, others = Wild(), chain(range(8)), chain(range(100, 108))
    async with peer("a", **wild.too) as a, peer("b", **wild.too) as b, peer("c") as c:
        a.store(keys)
        b.store(others)
        assert all(o.ok for o in (await a.pull(b, b.keys(others)))[0])
        assert wild.moved == 2 * FRAME
        frames = sealed(a, keys)
        assert all(o.ok for o in await a.on(a.link(b).push(frames, time.monotonic() + 10)))
        assert wild.moved == 4 * FRAME
        assert all(o.ok for o in await a.on(a.link(c).push(frames, time.monotonic() + 10)))  # by tcp
        assert wild.moved == 4 * FRAME
        drop(frames)
        for node in (a, b, c):
            await eventually(node.at_rest)


async def test_a_stale_write_lands_where_nobody_is() -> None:
    """The reservation has expired, the writer does not know: what it writes to is in nobody's hands."""
    wild, clock, keys = Wild(), Clock(), chain(range(8))
    async with peer("a", **wild.too) as a, peer("b", **wild.too, clock=clock, ram=4 * FRAME) as b:
        a.store(keys)
        frames = sealed(a, keys)
        going, go = threading.Event(), threading.Event()

        def wait() -> None:
            going.set()
            assert go.wait(20)

        wild.on_move = wait
        pushing = asyncio.ensure_future(a.on(a.link(b).push(frames, time.monotonic() + 20)))
        await eventually(going.is_set)
        (slots,) = [s.reservations for s in b.hall.sessions.values()]
        places = [(slot.object.offset, slot.object.nbytes) for slots in slots.values() for slot in slots]
        clock.ahead = 31
        b.hall.tidy()
        assert b.hall.quarantine.nbytes == 2 * FRAME
        assert b.manager.metrics.value("lmkv_peer_quarantined_bytes") == 2 * FRAME
        # All that there is is given to others, and none of it is where the writer will write.
        taken = []
        while (obj := b.manager.pool.allocate(4096, "test")) is not None:
            obj.view[:] = b"\xaa" * 4096
            taken.append(obj)
        assert taken
        assert not any(at <= obj.offset < at + nbytes for obj in taken for at, nbytes in places)
        go.set()
        with pytest.raises(LmkvError) as e:
            await pushing
        assert e.value.kind == "expired"
        assert all(obj.view == b"\xaa" * 4096 for obj in taken)
        for obj in taken:
            obj.release("test")
        # Its late commit is the word that it is done.
        await eventually(b.at_rest)
        assert b.client is not None
        assert (await b.client.look_up(keys)).chunks == 0
        drop(frames)
        assert a.at_rest()


async def test_kept_until_the_connection_ends_and_the_writer_knows() -> None:
    wild, clock, keys = Wild(), Clock(), chain(range(4))
    async with peer("b", **wild.too, clock=clock) as b:
        async with peer("a", **wild.too) as a:
            head = m.NewFrame(keys.digests[0], b"", 2, keys.prefixes(0)[0])
            link = a.link(b)
            for _ in range(2):
                await a.on(link.ask(m.Reserve("", SPACE.id, 0, (head,)), time.monotonic() + 10))
            clock.ahead = 31
            b.hall.tidy()
            assert b.hall.quarantine.nbytes == FRAME
            b.hall.tidy()
            assert b.hall.quarantine.nbytes == FRAME
            reserved = await a.on(link.ask(m.Reserve("", SPACE.id, 0, (head,)), time.monotonic() + 10))
            assert reserved.reservation
        await eventually(lambda: not b.hall.sessions and len(wild.dropped) >= 1)
        # The first ones' time is over. The last one's writer may not know yet that the connection has ended.
        await eventually(lambda: b.hall.quarantine.nbytes == FRAME)
        clock.ahead = 61 + 2 + 1
        b.hall.tidy()
        assert b.at_rest()


async def test_a_write_that_was_too_late_may_still_land() -> None:
    wild, keys = Wild(), chain(range(8))

    def late() -> None:
        raise DeadlineError("not done in time")

    wild.on_move = late
    async with peer("b", **wild.too) as b:
        async with peer("a", **wild.too) as a:
            a.store(keys)
            frames = sealed(a, keys)
            outcomes = await a.on(a.link(b).push(frames, time.monotonic() + 0.5))
            drop(frames)
            assert [o.kind for o in outcomes] == [OutcomeKind.FAILED] * 2
            await eventually(lambda: b.hall.quarantine.nbytes == 2 * FRAME)
            assert not b.manager.stack.room.filling
            assert a.at_rest()
        b.hall.clock = lambda: time.monotonic() + 31
        await eventually(b.at_rest)


async def test_an_abort_says_whether_something_is_under_way() -> None:
    wild, keys = Wild(), chain(range(8))
    async with peer("a", **wild.too) as a, peer("b", **wild.too) as b:
        head = [m.NewFrame(keys.digests[i], keys.parent(i), 2, keys.prefixes(i)[0]) for i in range(2)]
        link = a.link(b)
        until = time.monotonic() + 20
        first = await a.on(link.ask(m.Reserve("", SPACE.id, 0, (head[0],)), until))
        second = await a.on(link.ask(m.Reserve("", SPACE.id, 0, (head[1],)), until))
        connection = await a.on(link._connected(until))
        for reserved, done in ((first, True), (second, False)):
            a.node.peers._loop.call_soon_threadsafe(connection.tell, m.Abort(reserved.reservation, done))
        await eventually(lambda: b.hall.quarantine.nbytes == FRAME)
        assert not b.manager.stack.room.filling
        a.node.peers._loop.call_soon_threadsafe(connection.tell, m.Abort(second.reservation, True))
        await eventually(b.at_rest)


async def test_a_lease_that_has_expired_is_kept_for_its_reader() -> None:
    wild, clock, keys = Wild(), Clock(), chain(range(4))
    async with peer("a", **wild.too) as a, peer("b", **wild.too, clock=clock) as b:
        b.store(keys)
        link, until = a.link(b), time.monotonic() + 20
        leased = await a.on(link.ask(m.Lease(SPACE.id, keys.digests[0], (0,), 30.0), until))
        entry = b.manager.index.entry(b.keys(keys)[0])
        assert entry is not None
        assert entry.holds == 1
        clock.ahead = 31
        b.hall.tidy()
        assert entry.holds == 0  # it may be evicted; its memory is not given to anybody
        b.manager.stack.remove(entry)
        assert b.hall.quarantine.nbytes == FRAME
        connection = await a.on(link._connected(until))
        a.node.peers._loop.call_soon_threadsafe(connection.tell, m.Release(leased.lease))
        await eventually(b.at_rest)


async def test_a_transport_that_fails_is_replaced_by_tcp_and_says_so_once(caplog: pytest.LogCaptureFixture) -> None:
    wild, keys = Wild(), chain(range(8))

    def fail() -> None:
        raise TransportError("the fabric is on fire")

    async with peer("a", **wild.too) as a, peer("b", **wild.too) as b:
        b.store(keys)
        assert all(o.ok for o in (await a.pull(b, b.keys(keys)))[0])
        assert wild.moved == 2 * FRAME
        wild.on_move = fail
        with caplog.at_level(logging.WARNING, "lmkv.peer"):
            for _ in range(3):
                assert all(o.ok for o in (await a.pull(b, b.keys(keys)))[0])
        assert [record.getMessage() for record in caplog.records if "on fire" in record.getMessage()] == [
            "peer b: transport wild failed, going on with another: the fabric is on fire"
        ]
        wild.on_move = lambda: None
        assert all(o.ok for o in (await a.pull(b, b.keys(keys)))[0])
        assert wild.moved == 2 * FRAME
        a.store(chain(range(100, 104)))
        frames = sealed(a, chain(range(100, 104)))
        assert all(o.ok for o in await a.on(a.link(b).push(frames, time.monotonic() + 10)))
        drop(frames)
        assert wild.moved == 2 * FRAME
        await eventually(b.at_rest)
        assert a.at_rest()


async def test_a_transport_that_has_failed_is_tried_again_after_longer_and_longer_pauses(
    caplog: pytest.LogCaptureFixture,
) -> None:
    wild, keys, connect, tried = Wild(), chain(range(8)), WildTransport.connect, threading.Event()
    blocked = threading.Event()

    def fail(*_: Any) -> Any:
        raise TransportError("the fabric is on fire")

    def fail_slowly(*_: Any) -> Any:
        tried.set()
        assert blocked.wait(20)
        return fail()

    async with peer("a", **wild.too) as a, peer("b", **wild.too) as b:
        b.store(keys)
        channels = a.link(b)._channels

        async def pulled(nbytes: int) -> None:
            before = wild.moved
            assert all(o.ok for o in (await a.pull(b, b.keys(keys)))[0])
            assert wild.moved - before == nbytes

        with caplog.at_level(logging.WARNING, "lmkv.peer"):
            wild.on_move = fail
            await pulled(0)
            assert channels.barred["wild"].pause == PAUSE
            WildTransport.connect = fail_slowly  # type: ignore[assignment,method-assign]
            try:
                await pulled(0)
                assert not tried.is_set()  # it is too early
                channels.barred["wild"].until = 0.0
                await pulled(0)  # does not wait for it
                await eventually(tried.is_set)
                await pulled(0)
                blocked.set()
                await eventually(lambda: channels.barred["wild"].pause == 2 * PAUSE)
                for _ in range(7):
                    channels.barred["wild"].until = 0.0
                    await pulled(0)
                    await eventually(lambda: channels.barred["wild"].until > 0.0)
                assert channels.barred["wild"].pause == PAUSE_MAX
            finally:
                WildTransport.connect = connect  # type: ignore[method-assign]
            wild.on_move = lambda: None
            channels.barred["wild"].until = 0.0
            await pulled(0)
            await eventually(lambda: channels.barred["wild"].up)
            await pulled(2 * FRAME)
            wild.on_move = fail
            await pulled(0)
            assert channels.barred["wild"].until > time.monotonic()
        said = [record.getMessage() for record in caplog.records if "on fire" in record.getMessage()]
        assert said == ["peer b: transport wild failed, going on with another: the fabric is on fire"]
        await eventually(b.at_rest)
        assert a.at_rest()


async def test_a_peer_that_has_gone_is_not_its_transports_fault(caplog: pytest.LogCaptureFixture) -> None:
    wild, keys = Wild(), chain(range(4))
    async with peer("a", **wild.too) as a:
        async with peer("b", **wild.too) as b:
            b.store(keys)
            assert all(o.ok for o in (await a.pull(b, b.keys(keys)))[0])
            going, go = threading.Event(), threading.Event()

            def fail() -> None:
                going.set()
                assert go.wait(20)
                raise TransportError("the other end has gone")

            wild.on_move = fail
            pulling = asyncio.ensure_future(a.pull(b, b.keys(keys)))
            await eventually(going.is_set)
        go.set()
        with pytest.raises(LmkvError):
            raise (await pulling)[0][0].error  # type: ignore[misc]
        assert a.link(b)._channels.barred == {}
        assert "going on with another" not in caplog.text
        assert a.at_rest()


async def test_an_exception_of_a_plugin_is_a_failed_transport() -> None:
    wild, keys = Wild(), chain(range(4))

    def fail() -> None:
        raise KeyError("a fault of a stranger")

    wild.on_move = fail
    async with peer("a", **wild.too) as a, peer("b", **wild.too) as b:
        b.store(keys)
        assert all(o.ok for o in (await a.pull(b, b.keys(keys)))[0])
        await eventually(b.at_rest)


async def test_a_copy_that_a_thread_has_begun_keeps_its_memory() -> None:
    """tcp: the grant is taken back in the middle of a write; the memory is free when the thread has left it."""
    clock, keys = Clock(), chain(range(4))
    async with peer("a") as a, peer("b", clock=clock) as b:
        a.store(keys)
        transport = b.hall.transports["tcp"]
        touched = True
        transport.touches = lambda session, region: touched  # type: ignore[method-assign]
        head = m.NewFrame(keys.digests[0], b"", 2, keys.prefixes(0)[0])
        reserved = await a.on(a.link(b).ask(m.Reserve("", SPACE.id, 0, (head,)), time.monotonic() + 10))
        (session,) = b.hall.sessions
        assert b.hall.grants.may_write(session, Region(reserved.offsets[0], FRAME))
        clock.ahead = 31
        b.hall.tidy()
        assert not b.hall.grants.may_write(session, Region(reserved.offsets[0], FRAME))
        assert b.hall.quarantine.nbytes == FRAME
        touched = False
        b.hall.tidy()
        assert b.at_rest()


async def test_a_channel_that_opens_slowly_costs_nobody_more_than_his_time() -> None:
    keys, go = chain(range(4)), threading.Event()
    async with peer("a") as a, peer("b") as b:
        b.store(keys)
        transport = a.hall.transports["tcp"]
        connect = transport.connect
        opened: list[int] = []

        def slow(*args: Any) -> Any:
            opened.append(1)
            assert go.wait(20)
            return connect(*args)

        transport.connect = slow  # type: ignore[method-assign]
        begun = time.monotonic()
        outcomes, _ = await a.pull(b, b.keys(keys), seconds=0.3)
        assert [o.kind for o in outcomes] == [OutcomeKind.FAILED]
        assert time.monotonic() - begun < 5
        waiting = asyncio.ensure_future(a.pull(b, b.keys(keys), seconds=20))
        await asyncio.sleep(0.05)
        go.set()
        assert all(o.ok for o in (await waiting)[0])
        assert opened == [1]
        await eventually(b.at_rest)
        assert a.at_rest()
