"""Two nodes: pull and push."""

from __future__ import annotations

import asyncio
import threading
import time
from typing import TYPE_CHECKING

import pytest
from peer_rig import SPACE, borrowed, drop, eventually, peer, sealed
from storage_rig import FRAME, Shelf, chain, namespace

from lmkv.errors import ClosedError, ConfigError, FrameError
from lmkv.frame import verify
from lmkv.peer import link, outgoing
from lmkv.peer.tcp import TcpChannel
from lmkv.peer.transport import unheeded
from lmkv.service import protocol
from lmkv.storage.coding import complete
from lmkv.types import OutcomeKind

if TYPE_CHECKING:
    from collections.abc import Sequence

    from lmkv.frame import Trailer
    from lmkv.memory import MemoryObject
    from lmkv.peer.transport import Landed, Region
    from lmkv.types import ChunkKey

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


async def test_pull() -> None:
    keys, others = chain(range(16)), chain(range(100, 108))
    async with peer("a") as a, peer("b", listen="127.0.0.2:0") as b:
        b.store(keys)
        asked = [*b.keys(keys), *b.keys(others)]
        outcomes, got = await a.pull(b, asked)
        assert [o.kind for o in outcomes] == [OutcomeKind.OK] * 4 + [OutcomeKind.MISS] * 2
        for key, data in zip(asked, got, strict=False):
            trailer = verify(memoryview(data), key)
            assert b.client is not None
            assert data[: trailer.raw_bytes] == b.client.payload(key.digest, 0, trailer.raw_bytes).tobytes()
        await eventually(b.at_rest)
        assert a.at_rest()
        assert a.link(b).node == "b"
        assert a.manager.metrics.value("lmkv_peer_bytes_total", op="pull", transport="tcp") == 4 * FRAME


async def test_each_memory_object_hears_what_has_landed_in_it(monkeypatch: pytest.MonkeyPatch) -> None:
    keys, plain = chain(range(8)), TcpChannel.read

    def read(
        self: TcpChannel, remote: Sequence[Region], local: Sequence[Region], until: float, landed: Landed = unheeded
    ) -> None:
        plain(self, remote, local, until)
        for nbytes in (100, FRAME, FRAME + 50, 2 * FRAME):
            landed(nbytes)

    monkeypatch.setattr(TcpChannel, "read", read)
    async with peer("a") as a, peer("b") as b:
        b.store(keys)
        into = a.memory(2)
        told: list[list[int]] = [[], []]
        for obj, heard in zip(into, told, strict=True):
            obj.on_landed = heard.append
        outcomes = await a.on(a.link(b).pull(b.keys(keys), into, time.monotonic() + 10))
        assert [outcome.nbytes for outcome in outcomes] == [FRAME, FRAME]
        assert told == [[100, FRAME], [0, 50, FRAME]]
        for obj in into:
            obj.release("test")


async def test_has() -> None:
    keys, shelf = chain(range(8)), Shelf()
    async with peer("a") as a, peer("b", ram=2 * FRAME, below=[(shelf, {"capacity": 64 * FRAME})]) as b:
        b.store(keys)
        assert b.client is not None
        await b.client.settled()
        b.store(chain(range(50, 54)))
        await b.client.settled()
        until = time.monotonic() + 10
        digests = [keys.digests[0], b"x" * 32, keys.digests[1]]
        has, wait = await a.on(a.link(b).has(SPACE.id, digests, until))
        below, _ = await a.on(a.link(b).has(SPACE.id, digests, until, below=True))
        assert below == [True, False, True]
        assert sum(has) == 1
        assert wait == 0.0
        assert (await a.on(a.link(b).has(b"n" * 16, digests, until)))[0] == [False] * 3
        outcomes, _ = await a.pull(b, b.keys(keys))
        assert [o.ok for o in outcomes] == [has[0], has[2]]
        outcomes, _ = await a.pull(b, b.keys(keys), bring=True)
        assert all(o.ok for o in outcomes)
        await eventually(b.at_rest)


async def test_push() -> None:
    keys = chain(range(16))
    async with peer("a") as a, peer("b") as b:
        a.store(keys)
        pushed = sealed(a, keys)
        outcomes = await a.on(a.link(b).push(pushed, time.monotonic() + 10))
        assert all(o.ok for o in outcomes)
        again = await a.on(a.link(b).push(pushed, time.monotonic() + 10))
        assert all(o.ok for o in again)
        drop(pushed)
        assert b.client is not None
        found = await b.client.look_up(keys)
        assert found.chunks == 4
        assert await b.client.load(found, keys) == [True] * 4
        b.client.ask(protocol.Release(found.lease))
        await eventually(b.at_rest)
        assert a.at_rest()
        assert b.manager.metrics.value("lmkv_peer_served_bytes_total", way="in") == 4 * FRAME


async def test_transfer_as_chunks_become_ready() -> None:
    keys = chain(range(19))  # four chunks and a tail of one page
    async with peer("a") as a, peer("b") as b:
        assert a.client is not None
        assert b.client is not None
        made = a.client.frames(keys, tail=True)
        a.client.store(made[:1])
        digests = [frame.digest for frame in made]
        a.node.outgoing.send("t1", b.address, SPACE.id, digests, 19, final=True)
        await eventually(lambda: b.node.incoming.state("t1").frames == 1)
        assert b.node.incoming.state("t1").state == "open"
        a.client.store(made[1:3])
        await eventually(lambda: b.node.incoming.state("t1").frames == 3)
        a.client.store(made[3:])
        state = await b.node.incoming.wait("t1", 10)
        assert (state.state, state.tokens, state.frames) == ("complete", 18, 5)
        await eventually(lambda: a.node.outgoing.state("t1").state == "complete")
        found = await b.client.look_up(keys)
        assert (found.chunks, found.pages) == (4, 1)
        assert await b.client.load(found, keys) == [True] * 5
        b.node.incoming.let_go("t1")
        b.client.ask(protocol.Release(found.lease))
        await eventually(b.at_rest)
        await eventually(a.at_rest)


@pytest.mark.parametrize("good", [True, False])
async def test_payloads_go_while_their_frames_are_sealed(good: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The trailer follows. Where it cannot be made, the transfer fails and nothing stays held."""
    keys, go = chain(range(8)), threading.Event()
    written: list[list[int]] = []
    write = TcpChannel.write

    def noting(self: TcpChannel, local: Sequence[Region], remote: Sequence[Region], until: float) -> None:
        write(self, local, remote, until)
        written.append([region.nbytes for region in local])

    def slow(obj: MemoryObject, trailer: Trailer) -> None:
        assert go.wait(10)
        if not good:
            raise FrameError("no trailer")
        complete(obj, trailer)

    monkeypatch.setattr(TcpChannel, "write", noting)
    monkeypatch.setattr(outgoing, "complete", slow)
    monkeypatch.setattr(link, "EARLY_BYTES", 1)
    async with peer("a") as a, peer("b") as b:
        a.store(keys)
        try:
            a.node.outgoing.send("t1", b.address, SPACE.id, keys.digests, 8, final=True)
            await eventually(lambda: bool(written))
            payload = 2 * SPACE.page_bytes[0]
            assert written == [[payload, payload]]
            assert not b.node.incoming.state("t1").frames
        finally:
            go.set()
        state = await b.node.incoming.wait("t1", 10)
        if good:
            assert (state.state, state.tokens, state.frames) == ("complete", 8, 2)
            assert written[1:] == [[FRAME - payload, FRAME - payload]]
        else:
            assert (state.state, state.frames) == ("failed", 0)
        await eventually(lambda: a.node.outgoing.state("t1").state == state.state)
        b.node.incoming.let_go("t1")
        await eventually(b.at_rest)
        await eventually(a.at_rest)
        frames = borrowed(a, keys)
        assert [frame.object.sealed for frame in frames] == [good, good]
        drop(frames)


@pytest.mark.parametrize("way", ["pull", "push"])
async def test_stored_again_while_its_first_copy_is_written_below(way: str) -> None:
    """The trailer that the tier below wrote is in the memory of then, not in that of now."""
    keys, shelf, go = chain(range(8)), Shelf(), threading.Event()
    begun: list[ChunkKey] = []

    def wait(put: Sequence[ChunkKey]) -> None:
        begun.extend(put)
        assert go.wait(10)

    shelf.on_put = wait
    async with peer("a", below=[(shelf, {"capacity": 8 * FRAME})]) as a, peer("b") as b:
        try:
            a.store(keys)
            await eventually(lambda: len(begun) == 2)
            assert a.client is not None
            a.client.ask(protocol.Clear(tier="ram"))
            a.store(keys)
        finally:
            go.set()
        await eventually(lambda: not any(tier.busy for tier in a.manager.stack.tiers))
        if way == "pull":
            _, got = await b.pull(a, a.keys(keys))
            assert [verify(memoryview(data), key).key for data, key in zip(got, a.keys(keys), strict=True)]
        else:
            a.node.outgoing.send("t1", b.address, SPACE.id, keys.digests, 8, final=True)
            await eventually(lambda: a.node.outgoing.state("t1").state != "open")
            assert a.node.outgoing.state("t1").state == "complete"
            b.node.incoming.let_go("t1")
        await eventually(a.at_rest)
        await eventually(b.at_rest)


async def test_engines_that_do_not_fit() -> None:
    other = namespace(shards=2, page_bytes=4000)
    async with peer("a", space=other) as a, peer("b") as b:
        with pytest.raises(ConfigError, match="world size") as e:
            await a.on(a.link(b).agree(other.json(), time.monotonic() + 10))
        assert e.value.kind == "namespace"
        assert "2 there, 1 here" in str(e.value)


async def test_a_channel_that_is_opened_while_the_node_closes_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    begun, go = threading.Event(), threading.Event()
    opened: list[TcpChannel] = []
    closed: list[TcpChannel] = []
    opens, closes = TcpChannel.open, TcpChannel.close

    def slow(self: TcpChannel, until: float) -> None:
        opens(self, until)
        opened.append(self)
        begun.set()
        assert go.wait(10)

    def noting(self: TcpChannel) -> None:
        closes(self)
        closed.append(self)

    monkeypatch.setattr(TcpChannel, "open", slow)
    monkeypatch.setattr(TcpChannel, "close", noting)
    keys = chain(range(8))
    async with peer("b") as b:
        b.store(keys)
        async with peer("a") as a:
            pull = asyncio.ensure_future(a.pull(b, a.keys(keys)))
            await asyncio.to_thread(begun.wait)
            threading.Timer(0.1, go.set).start()
        with pytest.raises(ClosedError):
            await pull
        assert len(opened) == 1
        await eventually(lambda: closed == opened)
        await eventually(b.at_rest)
