"""What goes wrong between nodes: peers that are away, silent, slow, another one, or that lie. Everything over tcp."""

from __future__ import annotations

import asyncio
import secrets
import time
from typing import TYPE_CHECKING, Any

import pytest
from peer_rig import KEY, SPACE, Clock, Peer, drop, eventually, peer, sealed
from proxy_rig import FaultProxy
from server_rig import free_port
from storage_rig import FRAME, chain

from lmkv.errors import BackendError, ClosedError, FrameError, LmkvError
from lmkv.frame import verify
from lmkv.peer import messages as m
from lmkv.peer.transport import Region, TransportError
from lmkv.service import protocol as p
from lmkv.types import MissReason, OutcomeKind

if TYPE_CHECKING:
    from collections.abc import Iterator

    from lmkv.keys import KeyChain

pytestmark = pytest.mark.anyio
BIG = 8 << 20
"""Bytes of a page where bytes are to be under way for some time."""


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
def port() -> int:
    return free_port()


@pytest.fixture
def proxy(port: int) -> Iterator[FaultProxy]:
    with FaultProxy(port) as one:
        yield one


def space_of(page_bytes: int) -> Any:
    from storage_rig import namespace

    return namespace(page_bytes=page_bytes)


async def pulled(node: Peer, other: Peer | str, asked: list[Any], seconds: float) -> list[Any]:
    """Outcomes; every byte that counts as come is verified. Errors of the link count as failures."""
    try:
        outcomes, got = await node.pull(other, asked, seconds=seconds)
    except LmkvError as e:
        return [e] * len(asked)
    came = [key for key, outcome in zip(asked, outcomes, strict=True) if outcome.ok]
    for key, data in zip(came, got, strict=True):
        verify(memoryview(data), key)
    return outcomes


async def let_go(node: Peer, found: p.Found) -> None:
    assert node.client is not None
    node.client.ask(p.Release(found.lease))


async def test_a27_peer_down(port: int, proxy: FaultProxy) -> None:
    """Absent at the start, up, killed, up but silent, up again: each pull ends in its time, and what came is right."""
    keys = chain(range(8))
    async with peer("a") as a:

        async def phase(pulls: int, seconds: float = 0.3) -> int:
            good = 0
            for _ in range(pulls):
                begun = time.monotonic()
                outcomes = await pulled(a, proxy.address, a.keys(keys), seconds)
                assert time.monotonic() - begun < seconds + 2.0
                good += all(not isinstance(o, LmkvError) and o.ok for o in outcomes)
            return good

        assert await phase(5) == 0
        async with peer("b", listen=f"127.0.0.1:{port}") as b:
            b.store(keys)
            until = time.monotonic() + 20
            while not await phase(1, 5.0):
                assert time.monotonic() < until
            assert await phase(5, 5.0) == 5
            proxy.silence()
            assert await phase(3) == 0
            proxy.heal()
            until = time.monotonic() + 20
            while not await phase(1, 5.0):
                assert time.monotonic() < until
            await eventually(b.at_rest)
        assert await phase(3) == 0
        assert a.at_rest()


async def test_a27_a_call_waits_no_longer_than_its_time_for_a_connection(port: int, proxy: FaultProxy) -> None:
    proxy.silence()
    async with peer("a") as a, peer("b", listen=f"127.0.0.1:{port}"):
        begun = time.monotonic()
        with pytest.raises(ClosedError) as e:
            await a.on(a.link(proxy.address).has(SPACE.id, [b"d" * 32], begun + 0.2))
        assert e.value.kind == "deadline"
        assert time.monotonic() - begun < 4.0  # the handshake itself may take 5 s


async def test_a28_late_answer(port: int, proxy: FaultProxy) -> None:
    """What is answered too late is nobody's answer, and what it gave is given back."""
    first, second = chain(range(4)), chain(range(100, 108))
    async with peer("a") as a, peer("b", listen=f"127.0.0.1:{port}") as b:
        b.store(first)
        b.store(second)
        assert all(o.ok for o in await pulled(a, proxy.address, a.keys(first), 10.0))
        proxy.delay(0.6)
        link = a.link(proxy.address)
        late = asyncio.ensure_future(a.pull(proxy.address, a.keys(first), seconds=0.4))
        await asyncio.sleep(0.05)
        asked = [second.digests[1], b"x" * 32, second.digests[0]]
        has, _ = await a.on(link.has(SPACE.id, asked, time.monotonic() + 20))
        assert has == [True, False, True]
        with pytest.raises(ClosedError):
            await late
        proxy.delay(0)
        outcomes = await pulled(a, proxy.address, a.keys(second), 20.0)
        assert [o.kind for o in outcomes] == [OutcomeKind.OK] * 2
        await eventually(b.at_rest)


async def test_a28_what_a_late_answer_gave_is_given_back(port: int, proxy: FaultProxy) -> None:
    keys = chain(range(8))
    async with peer("a") as a, peer("b", listen=f"127.0.0.1:{port}") as b:
        b.store(chain(range(4)))
        link = a.link(proxy.address)
        await a.on(link.has(SPACE.id, keys.digests, time.monotonic() + 10))
        proxy.delay(0.3)
        head = m.NewFrame(keys.digests[1], keys.parent(1), 2, keys.prefixes(1)[0])
        for request in (m.Lease(SPACE.id, keys.digests[0], (0,), 30.0), m.Reserve("", SPACE.id, 0, (head,))):
            with pytest.raises(ClosedError):
                await a.on(link.ask(request, time.monotonic() + 0.1))
            await eventually(lambda: not b.at_rest())
        await eventually(b.at_rest, 15)  # long before 30 s are over
        assert b.manager.metrics.value("lmkv_peer_expired_total") == 0


async def test_a28_a_push_whose_bytes_were_cut_off_is_reported_failed(port: int, proxy: FaultProxy) -> None:
    space = space_of(BIG)
    keys = chain(range(4))
    async with (
        peer("a", ram=64 << 20, space=space) as a,
        peer("b", ram=64 << 20, space=space, listen=f"127.0.0.1:{port}") as b,
    ):
        a.store(keys)
        await a.on(a.link(proxy.address).agree(space.json(), time.monotonic() + 10))
        proxy.cut_after(4 << 20)
        frames = sealed(a, keys)
        try:
            outcomes = await a.on(a.link(proxy.address).push(frames, time.monotonic() + 20))
            assert not any(o.ok for o in outcomes)
        except ClosedError:
            pass
        finally:
            frames[0].object.release("get")
        assert b.client is not None
        await eventually(b.at_rest)
        assert (await b.client.look_up(keys)).chunks == 0
        assert a.at_rest()


async def test_a29_quick_restart(port: int) -> None:
    """The same address, another life: noticed, nothing old is promised, all works anew."""
    keys, others = chain(range(8)), chain(range(100, 104))
    seen: list[tuple[str, int]] = []
    async with peer("a") as a:
        a.node.peers.on_restart(lambda address, incarnation: seen.append((address, incarnation)))
        address = f"127.0.0.1:{port}"
        async with peer("b", listen=address) as b:
            b.store(keys)
            await a.on(a.link(b).agree(SPACE.json(), time.monotonic() + 10))
            assert all(o.ok for o in await pulled(a, address, a.keys(keys), 10.0))
            old = a.link(b).incarnation
        async with peer("b", listen=address) as b:
            b.store(others)
            until = time.monotonic() + 20
            while isinstance((await pulled(a, address, a.keys(keys), 5.0))[0], LmkvError):
                assert time.monotonic() < until
            assert [o.kind for o in await pulled(a, address, a.keys(keys), 10.0)] == [OutcomeKind.MISS] * 2
            assert all(o.ok for o in await pulled(a, address, a.keys(others), 10.0))
            assert seen == [(address, a.link(b).incarnation)]
            assert a.link(b).incarnation != old
            await a.on(a.link(b).agree(SPACE.json(), time.monotonic() + 10))


async def test_a30_entry_gone_behind_our_back() -> None:
    keys = chain(range(8))
    async with peer("a") as a, peer("b") as b:
        b.store(keys)
        until = time.monotonic() + 20
        assert (await a.on(a.link(b).has(SPACE.id, keys.digests, until)))[0] == [True, True]
        entry = b.manager.index.entry(b.keys(keys)[1])
        assert entry is not None
        b.manager.stack.remove(entry)
        for _ in range(2):
            outcomes = await pulled(a, b, a.keys(keys), 10.0)
            assert [o.kind for o in outcomes] == [OutcomeKind.OK, OutcomeKind.MISS]
        assert (await a.on(a.link(b).has(SPACE.id, keys.digests, until)))[0] == [True, False]
        b.store(keys)
        assert all(o.ok for o in await pulled(a, b, a.keys(keys), 10.0))
        await eventually(b.at_rest)


async def test_a30_one_of_two_shards_gone() -> None:
    from storage_rig import namespace

    space = namespace(shards=2)
    keys = chain(range(4))
    async with peer("a", space=space) as a, peer("b", space=space) as b:
        b.store(keys, shards=(0, 1))
        entry = b.manager.index.entry(b.keys(keys)[0])
        assert entry is not None
        assert b.manager.stack.ram is not None
        b.manager.stack.ram.delete([entry.key(1)])
        b.manager.stack.lost(entry, 1, b.manager.stack.ram, MissReason.EVICTED)
        asked = [*a.keys(keys, 0), *a.keys(keys, 1)]
        assert not any(o.ok for o in await pulled(a, b, asked, 10.0))
        assert (await a.on(a.link(b).has(space.id, keys.digests, time.monotonic() + 10)))[0] == [False]


async def test_a36_buffer_smaller_than_the_work() -> None:
    """A decode pool of four chunks, three prefills of three chunks each, piecewise: all finish, none waits for ever."""
    async with (
        peer("a", ram=16 * FRAME) as a,
        peer("b", ram=4 * FRAME, pool=6 * FRAME, admission="100%") as b,
    ):
        assert a.client is not None
        assert b.client is not None
        incoming, admitted = b.node.incoming, [0]
        incoming._gauge = lambda: admitted.append(incoming.admitted)  # type: ignore[method-assign]
        prompts = {f"t{i}": chain(range(100 * i, 100 * i + 12)) for i in range(3)}
        for name, keys in prompts.items():
            a.node.outgoing.send(name, b.address, SPACE.id, keys.digests, 12, final=True)
        done: set[str] = set()
        for step in range(3):
            for keys in prompts.values():
                a.client.store(a.client.frames(keys)[step : step + 1])
            await asyncio.sleep(0.05)
        until = time.monotonic() + 30
        while len(done) < 3:
            assert time.monotonic() < until
            for name, keys in prompts.items():
                if name not in done and b.node.incoming.state(name).state == "complete":
                    found = await b.client.look_up(keys)
                    b.node.incoming.let_go(name)
                    assert found.chunks == 3
                    assert await b.client.load(found, keys) == [True] * 3
                    await let_go(b, found)
                    done.add(name)
            await asyncio.sleep(0.01)
        assert max(admitted) == 3 * FRAME
        await eventually(lambda: all(a.node.outgoing.state(name).state == "complete" for name in prompts))
        await eventually(b.at_rest)
        await eventually(a.at_rest)


async def test_a36_a_request_that_never_fits_is_refused_with_the_numbers() -> None:
    async with peer("a") as a, peer("b", ram=4 * FRAME) as b:
        with pytest.raises(LmkvError, match=r"peer\.admission") as e:
            await a.on(a.link(b).ask(m.Admit("t", 4000, SPACE.id), time.monotonic() + 10))
        assert e.value.kind == "too-large"
        assert b.at_rest()


async def test_a36_who_came_first_is_served_first() -> None:
    """A large request that waits for room is not overtaken for ever by small ones."""
    async with peer("b", ram=4 * FRAME, admission="100%") as b:
        incoming = b.node.incoming
        assert isinstance(incoming.admit(m.Admit("small", 8, SPACE.id)), m.Admitted)
        large = incoming.admit(m.Admit("large", 16, SPACE.id))
        assert isinstance(large, m.NoRoom)
        assert (large.needed, large.free, large.ahead) == (4 * FRAME, 2 * FRAME, 0)
        later = incoming.admit(m.Admit("later", 4, SPACE.id))
        assert isinstance(later, m.NoRoom)
        assert later.ahead == 1
        incoming.finish("small", "complete")
        assert isinstance(incoming.admit(m.Admit("later", 4, SPACE.id)), m.NoRoom)
        assert isinstance(incoming.admit(m.Admit("large", 16, SPACE.id)), m.Admitted)
        assert incoming.admit(m.Admit("large", 16, SPACE.id)) == m.Admitted("large", 4 * FRAME, 60.0)
        incoming.finish("large", "aborted")
        assert isinstance(incoming.admit(m.Admit("later", 4, SPACE.id)), m.Admitted)
        incoming.finish("later", "failed")
        incoming.expire(time.monotonic() + 1000)
        assert b.at_rest()


async def test_a37_prefill_dies_half_way(port: int, proxy: FaultProxy) -> None:
    """Five of eight chunks are there, the sixth is being written, the connection goes: it has failed, at once."""
    space = space_of(1 << 20)
    keys = chain(range(32))
    async with (
        peer("a", ram=64 << 20, space=space) as a,
        peer("b", ram=64 << 20, space=space, listen=f"127.0.0.1:{port}") as b,
    ):
        assert a.client is not None
        assert b.client is not None
        made = a.client.frames(keys)
        a.node.outgoing.send("t", proxy.address, space.id, keys.digests, 32, final=True)
        a.client.store(made[:5])
        await eventually(lambda: b.node.incoming.state("t").frames == 5)
        proxy.throttle(1 << 20)
        a.client.store(made[5:])
        await eventually(lambda: bool(b.hall.manager.holds()["reservations"]))
        await asyncio.sleep(0.2)
        begun = time.monotonic()
        proxy.drop()
        state = await b.node.incoming.wait("t", 20)
        assert state.state == "failed"
        assert time.monotonic() - begun < 10
        assert b.node.incoming.admitted == 0
        found = await b.client.look_up(keys)
        assert found.chunks == 5
        assert await b.client.load(found, keys) == [True] * 5  # whole and verified: the rest is computed
        await let_go(b, found)
        b.node.incoming.let_go("t")
        await eventually(b.at_rest)
        await eventually(lambda: a.node.outgoing.state("t").state == "failed")
        await eventually(a.at_rest)


async def test_a38_leases_and_liveness() -> None:
    """A was asked for again, B was not: B is free although its peer lives, and reading it is refused."""
    clock = Clock()
    a_keys, b_keys = chain(range(4)), chain(range(100, 104))
    async with peer("a") as a, peer("b", clock=clock, seconds="30s") as b:
        b.store(a_keys)
        b.store(b_keys)
        link = a.link(b)

        async def lease(keys: KeyChain) -> m.Leased:
            reply = await a.on(link.ask(m.Lease(SPACE.id, keys.digests[0], (0,), 30.0), time.monotonic() + 10))
            assert isinstance(reply, m.Leased)
            return reply

        first, second = await lease(a_keys), await lease(b_keys)
        clock.ahead = 20
        again = await lease(a_keys)
        clock.ahead = 40
        b.hall.tidy()
        assert b.manager.metrics.value("lmkv_peer_expired_total", what="lease") == 2
        assert b.hall.lent == FRAME
        (session,) = b.hall.sessions
        may_read = b.hall.grants.may_read
        assert may_read(session, Region(again.offsets[0], FRAME))
        assert again.offsets == first.offsets
        assert not may_read(session, Region(second.offsets[0], FRAME))

        async def read(leased: m.Leased) -> None:
            connection = await link._connected(time.monotonic() + 10)
            (obj,) = a.memory(1)
            try:
                remote, local = [Region(leased.offsets[0], FRAME)], [Region(obj.offset, FRAME)]
                until = time.monotonic() + 10
                await link._channels.move(connection, lambda channel: channel.read(remote, local, until), until)
            finally:
                obj.release("test")

        await a.on(read(again))
        with pytest.raises(TransportError):
            await a.on(read(second))
        clock.ahead = 2 * 3600
        b.hall.tidy()
        assert len(b.hall.sessions) == 1  # silent for two hours, and still somebody
        assert all(o.ok for o in await pulled(a, b, a.keys(a_keys), 10.0))
        await eventually(b.at_rest)


async def test_a38_a_reservation_expires_and_a_late_commit_is_refused() -> None:
    clock = Clock()
    keys = chain(range(4))
    async with peer("a") as a, peer("b", clock=clock, seconds="30s") as b:
        head = m.NewFrame(keys.digests[0], b"", 2, keys.prefixes(0)[0])
        link = a.link(b)
        reserved = await a.on(link.ask(m.Reserve("", SPACE.id, 0, (head,)), time.monotonic() + 10))
        assert reserved.reservation
        clock.ahead = 31
        b.hall.tidy()
        with pytest.raises(BackendError) as e:
            await a.on(link.ask(m.Commit(reserved.reservation), time.monotonic() + 10))
        assert e.value.kind == "expired"
        assert b.at_rest()
        b.store(keys)  # nobody is filling it


async def test_garbage_instead_of_frames_is_never_taken(port: int, proxy: FaultProxy) -> None:
    keys = chain(range(16))
    async with peer("a") as a, peer("b", listen=f"127.0.0.1:{port}") as b:
        b.store(keys)
        assert all(o.ok for o in await pulled(a, proxy.address, a.keys(keys), 10.0))
        proxy.garbage()
        for _ in range(3):
            try:
                outcomes = await pulled(a, proxy.address, a.keys(keys), 2.0)
                assert not any(not isinstance(o, LmkvError) and o.ok for o in outcomes)
            except FrameError:
                pass  # it came, and the tier would have seen this
        proxy.heal()
        until = time.monotonic() + 20
        while not all(not isinstance(o, LmkvError) and o.ok for o in await pulled(a, proxy.address, a.keys(keys), 5.0)):
            assert time.monotonic() < until
        await eventually(b.at_rest)
        assert a.at_rest()


async def test_silence_in_the_middle_of_a_read(port: int, proxy: FaultProxy) -> None:
    space = space_of(BIG)
    keys = chain(range(4))
    async with (
        peer("a", ram=64 << 20, space=space) as a,
        peer("b", ram=64 << 20, space=space, listen=f"127.0.0.1:{port}", seconds="1s") as b,
    ):
        b.store(keys)
        link = a.link(proxy.address)
        await a.on(link.has(space.id, keys.digests, time.monotonic() + 10))
        proxy.throttle(4 << 20)
        (obj,) = a.memory(1, 2 * BIG + 4096)
        begun = time.monotonic()
        reading = asyncio.ensure_future(a.on(link.pull(a.keys(keys), [obj], begun + 1.5)))
        await eventually(lambda: proxy.bytes_down > 1 << 20)
        proxy.silence()
        outcomes = await reading
        assert time.monotonic() - begun < 6.0
        assert outcomes[0].kind is OutcomeKind.FAILED
        obj.release("test")
        await eventually(b.at_rest)  # the lease has ended by itself: nobody could be told
        assert a.at_rest()


async def test_a_frame_that_does_not_verify_is_not_committed() -> None:
    keys = chain(range(8))
    async with peer("a") as a, peer("b") as b:
        a.store(keys)
        frames = sealed(a, keys)
        frames[0].object.view[100] ^= 1
        outcomes = await a.on(a.link(b).push(frames, time.monotonic() + 10))
        assert [o.kind for o in outcomes] == [OutcomeKind.FAILED, OutcomeKind.OK]
        assert "checksum" in str(outcomes[0].error)
        wrong = frames[0]._replace(parent=b"p" * 32)
        frames[0].object.view[100] ^= 1
        (outcome,) = await a.on(a.link(b).push([wrong], time.monotonic() + 10))
        assert "parent" in str(outcome.error)
        (outcome,) = await a.on(a.link(b).push(frames[:1], time.monotonic() + 10))
        assert outcome.ok
        drop(frames)
        assert b.manager.metrics.value("lmkv_peer_errors_total", kind="frame") == 2
        assert b.client is not None
        found = await b.client.look_up(keys)
        assert await b.client.load(found, keys) == [True, True]
        await let_go(b, found)
        assert b.at_rest()
        assert a.at_rest()


async def test_the_same_transfer_twice() -> None:
    keys = chain(range(12))
    async with peer("a") as a, peer("c") as c, peer("b") as b:
        a.store(keys)
        c.store(keys)
        for node in (a, a, c):
            node.node.outgoing.send("t", b.address, SPACE.id, keys.digests, 12, final=True)
        await eventually(lambda: b.node.incoming.state("t").state == "complete")
        await eventually(lambda: a.node.outgoing.state("t").state != "open")
        await eventually(lambda: c.node.outgoing.state("t").state != "open")
        assert b.client is not None
        found = await b.client.look_up(keys)
        assert found.chunks == 3
        assert await b.client.load(found, keys) == [True] * 3
        await let_go(b, found)
        b.node.incoming.let_go("t")
        for node in (a, b, c):
            await eventually(node.at_rest)


async def test_aborted_by_the_prefill_side() -> None:
    keys = chain(range(12))
    async with peer("a") as a, peer("b") as b:
        a.store(chain(range(4)))
        a.node.outgoing.send("t", b.address, SPACE.id, keys.digests, 12, final=False)
        await eventually(lambda: b.node.incoming.state("t").frames == 1)
        a.node.outgoing.abort("t")
        a.node.outgoing.abort("t")
        assert (await b.node.incoming.wait("t", 20)).state == "aborted"
        assert a.node.outgoing.state("t").state == "aborted"
        await eventually(b.at_rest)
        await eventually(a.at_rest)
        assert a.node.outgoing._wanted == {}


async def test_aborted_by_the_decode_side() -> None:
    keys = chain(range(12))
    async with peer("a") as a, peer("b") as b:
        a.store(chain(range(4)))
        a.node.outgoing.send("t", b.address, SPACE.id, keys.digests, 12, final=False)
        await eventually(lambda: b.node.incoming.state("t").frames == 1)
        b.node.incoming.finish("t", "aborted")
        assert b.at_rest()
        a.store(keys)
        await eventually(lambda: a.node.outgoing.state("t").state == "failed")
        await eventually(a.at_rest)
        await eventually(b.at_rest)


async def test_a_transfer_of_which_nothing_is_heard_ends() -> None:
    clock = Clock()
    async with peer("a") as a, peer("b", clock=clock) as b:
        await a.on(a.link(b).ask(m.Admit("t", 12, SPACE.id), time.monotonic() + 10))
        assert b.node.incoming.admitted == 3 * FRAME
        clock.ahead = 61
        b.hall.tidy()
        assert b.node.incoming.state("t").state == "failed"
        assert b.at_rest()
        with pytest.raises(LmkvError, match="ended already"):
            await a.on(a.link(b).ask(m.Admit("t", 12, SPACE.id), time.monotonic() + 10))
        clock.ahead = 300
        b.hall.tidy()
        assert b.node.incoming.state("t").state == "unknown"


async def test_room_that_is_set_aside_is_not_taken_by_the_engine() -> None:
    async with peer("b", ram=4 * FRAME, pool=6 * FRAME, admission="100%") as b:
        assert b.client is not None
        b.store(chain(range(100, 116)))
        assert isinstance(b.node.incoming.admit(m.Admit("t", 12, SPACE.id)), m.Admitted)
        b.store(chain(range(200, 216)))
        assert b.manager.stack.ram is not None
        assert b.manager.stack.ram.used == FRAME
        b.node.incoming.finish("t", "aborted")
        b.store(chain(range(300, 316)))
        assert b.manager.stack.ram.used == 4 * FRAME
        assert b.at_rest()


async def test_admission_by_the_name_of_the_model() -> None:
    from lmkv.peer.peers import Peers

    async with peer("b", key=KEY) as b:
        proxy = Peers.asking(KEY, node="proxy")
        try:
            until = time.monotonic() + 10
            link = proxy.link(b.address)
            name = secrets.token_hex(16)
            assert isinstance(await proxy.attend(link.ask(m.Admit(name, 12, model="m"), until)), m.Admitted)
            with pytest.raises(LmkvError, match="models: 'm'") as e:
                await proxy.attend(link.ask(m.Admit("x", 12, model="other"), until))
            assert (e.value.kind, e.value.retryable) == ("no-namespace", True)
            await proxy.attend(link.ask(m.Finish(name, "aborted"), until))
            assert b.at_rest()
        finally:
            await asyncio.to_thread(proxy.close)


async def test_a_transfer_between_engines_that_do_not_fit_fails_with_both_sides_values(
    caplog: pytest.LogCaptureFixture,
) -> None:
    from storage_rig import namespace

    keys, other = chain(range(12)), namespace(page_bytes=4000)
    async with peer("a", space=other) as a, peer("b") as b:
        a.store(keys)
        a.node.outgoing.send("t", b.address, other.id, keys.digests, 12, final=True)
        await eventually(lambda: a.node.outgoing.state("t").state == "failed")
        assert "page_bytes of shard 0: 4000 there, 3000 here" in caplog.text
        await eventually(a.at_rest)
        assert b.at_rest()


async def test_what_will_not_be_stored_is_not_waited_for() -> None:
    """As soon as that is said of the last of it, the transfer ends with what there is."""
    keys = chain(range(12))
    async with peer("a") as a, peer("b") as b:
        a.store(chain(range(8)))
        a.node.outgoing.unstored(SPACE.id, 0, keys.digests[2])  # of an earlier request: that says nothing of the next
        a.node.outgoing.send("t", b.address, SPACE.id, keys.digests, 12, final=True)
        await eventually(lambda: b.node.incoming.state("t").frames == 2)
        a.node.outgoing.unstored(SPACE.id, 0, keys.digests[1])  # it is there
        assert a.node.outgoing.state("t").state == "open"
        a.node.outgoing.unstored(SPACE.id, 0, keys.digests[2])
        await eventually(lambda: b.node.incoming.state("t").state == "complete")
        assert b.node.incoming.state("t").tokens == 8
        assert a.node.outgoing._wanted == {}
        b.node.incoming.let_go("t")
        assert b.at_rest()


async def test_pushes_that_nobody_admitted_leave_room_for_the_engine() -> None:
    keys = chain(range(400, 480))
    async with peer("a") as a, peer("b", ram=20 * FRAME, pool=24 * FRAME) as b:
        heads = tuple(m.NewFrame(keys.digests[i], keys.parent(i), 2, keys.prefixes(i)[0]) for i in range(20))
        reserved = await a.on(a.link(b).ask(m.Reserve("", SPACE.id, 0, heads), time.monotonic() + 10))
        assert sum(offset >= 0 for offset in reserved.offsets) == 6
        assert reserved.offsets[6:] == (m.REJECTED,) * 14


async def test_a37_a_transfer_fails_with_the_connection_that_pushes_it() -> None:
    """Nobody is left who could say so; and the proxy's own connection, which only admitted it, may go."""
    from lmkv.peer.peers import Peers

    keys = chain(range(12))
    async with peer("b") as b:
        proxy = Peers.asking(node="proxy")
        until = time.monotonic() + 20
        link = proxy.link(b.address)
        assert isinstance(await proxy.attend(link.ask(m.Admit("t", 12, model="m"), until)), m.Admitted)
        await asyncio.to_thread(proxy.close)
        await eventually(lambda: not b.hall.sessions)
        async with peer("a") as a:
            head = m.NewFrame(keys.digests[0], b"", 2, keys.prefixes(0)[0])
            await a.on(a.link(b).ask(m.Reserve("t", SPACE.id, 0, (head,)), until))
            assert b.node.incoming.state("t").state == "open"
        assert (await b.node.incoming.wait("t", 20)).state == "failed"
        b.node.incoming.let_go("t")
        await eventually(b.at_rest)


@pytest.mark.parametrize("final", [False, True])
async def test_a_transfer_without_progress_ends_on_both_sides(*, final: bool) -> None:
    keys = chain(range(12))
    async with peer("a", transfer_seconds="600ms") as a, peer("b") as b:
        a.store(chain(range(4)))
        a.node.outgoing.send("t", b.address, SPACE.id, keys.digests, 12, final=final)
        await eventually(lambda: b.node.incoming.state("t").frames == 1)
        await eventually(lambda: a.node.outgoing.state("t").state == "failed")
        assert (await b.node.incoming.wait("t", 20)).state == "failed"
        b.node.incoming.let_go("t")
        await eventually(b.at_rest)
        await eventually(a.at_rest)


async def test_a_transfer_holds_no_more_than_was_admitted() -> None:
    """Of what is here already: the RAM tier would be the engine's no more."""
    keys = chain(range(32))
    async with peer("a") as a, peer("b") as b:
        b.store(keys)
        link, until = a.link(b), time.monotonic() + 20
        assert isinstance(await a.on(link.ask(m.Admit("t", 8, SPACE.id), until)), m.Admitted)
        heads = tuple(m.NewFrame(keys.digests[i], keys.parent(i), 2, keys.prefixes(i)[0]) for i in range(6))
        reserved = await a.on(link.ask(m.Reserve("t", SPACE.id, 0, heads), until))
        assert reserved.offsets == (m.PRESENT,) * 6
        assert b.manager.index.books.holds == 2
        await a.on(link.ask(m.Finish("t", "aborted"), until))
        assert b.at_rest()


async def test_transfers_of_nothing_are_not_remembered_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lmkv.peer.incoming.KEPT", 4)
    async with peer("b") as b:
        asked = [b.node.incoming.admit(m.Admit(f"t{i}", 0, SPACE.id)) for i in range(10)]
        assert [isinstance(each, m.Admitted) for each in asked] == [True] * 8 + [False] * 2
