"""Chunks fetched from real peers, as a controller asks: verified, stored, pinned, or told why not."""

from __future__ import annotations

import asyncio
import threading
import time
from typing import Any

import pytest
from agent_rig import Controller, agent, agree, eventually, running
from peer_rig import SPACE, peer
from storage_rig import FRAME, PAGE_BYTES, Client, Shelf, chain, namespace

from lmkv.agent import messages as m
from lmkv.frame import frame_bytes

KEYS = chain(range(16))
BLOB = b"".join(KEYS.digests)
ABSENT = bytes(32)


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lmkv.agent.fetch.PAUSE_SECONDS", 0.01)
    monkeypatch.setattr("lmkv.agent.jobs.TELL_SECONDS", 0.02)


@pytest.mark.parametrize(("shards", "tier"), [(1, "ram"), (2, "shelf")])
def test_fetch_from_a_peer(shards: int, tier: str) -> None:
    space = namespace(shards)

    async def main() -> None:
        below = [(Shelf(), {"name": "shelf", "capacity": 100 * FRAME, "write": "demote"})]
        source = peer("a", ram=40 * FRAME, below=below, space=space)
        async with source as a, peer("b", ram=40 * FRAME, below=below, space=None) as b, running(Controller()) as c:
            tokens = chain(range(18))
            a.store(tokens, tail=True, shards=range(shards))
            tail = tokens.prefixes(4)[0]
            async with agent(b.manager, c.url, peers=b.node.peers):
                await eventually(lambda: c.synced)
                digests = b"".join(tokens.digests) + tail + ABSENT
                fetch = m.Fetch(a.address, space.id, digests, tier, 60.0, space.json())
                done = await c.do("f", fetch)
                assert (done.state, done.done, done.total) == (m.DONE, 5, 6), done
                assert done.failed == {ABSENT.hex(): "the peer does not have it"}
                assert done.counts["bytes"] == shards * (4 * FRAME + frame_bytes(PAGE_BYTES, 0))
                kept = b.manager.tier(tier)
                assert {key.digest for key in kept.index} == {*tokens.digests, tail}
                assert len(b.manager.pinned) == 5
                again = await c.do("g", fetch)
                assert (again.done, again.counts) == (5, {"bytes": 0, "present": 5})
                assert space.json() in c.jsons, "the node has a namespace more"
                await eventually(lambda: agree(c, b.manager))
                engine = Client(b.manager, space)
                for shard in range(shards):
                    assert await engine.load(await engine.look_up(tokens), tokens, shard=shard) == [True] * 5
                await eventually(lambda: not b.manager.pool.passing_bytes or tier == "ram")

    asyncio.run(main())


def test_fetch_brings_what_the_peer_has_below_ram_only() -> None:
    async def main() -> None:
        below = [(Shelf(), {"name": "shelf", "capacity": 100 * FRAME})]
        async with peer("a", below=below) as a, peer("b") as b, running(Controller()) as c:
            assert a.client is not None
            a.store(KEYS)
            await a.client.settled()
            for digest in KEYS.digests:
                entry = a.manager.index.namespaces[SPACE.id].entries[digest]
                entry.leaving |= 1
                a.manager.stack.settle(entry)
            assert not a.manager.tier("ram").index
            async with agent(b.manager, c.url, peers=b.node.peers):
                await eventually(lambda: c.synced)
                done = await c.do("f", m.Fetch(a.address, SPACE.id, BLOB, "ram"))
                assert (done.state, done.done) == (m.DONE, 4)

    asyncio.run(main())


def test_fetch_of_a_peer_that_is_not_there_fails_and_holds_nothing() -> None:
    async def main() -> None:
        async with peer("b") as b, running(Controller()) as c, agent(b.manager, c.url, peers=b.node.peers):
            await eventually(lambda: c.synced)
            begun = time.monotonic()
            done = await c.do("f", m.Fetch("127.0.0.1:1", SPACE.id, BLOB, "ram"))
            assert done.state == m.FAILED
            assert "127.0.0.1:1" in done.error
            assert time.monotonic() - begun < 20
            assert b.at_rest()

    asyncio.run(main())


def test_fetch_into_a_tier_without_room_says_so_and_holds_nothing() -> None:
    async def main() -> None:
        async with peer("a", ram=40 * FRAME) as a, peer("b", ram=4 * FRAME) as b, running(Controller()) as c:
            a.store(chain(range(32)))
            digests = b"".join(chain(range(32)).digests)
            async with agent(b.manager, c.url, peers=b.node.peers):
                await eventually(lambda: c.synced)
                done = await c.do("f", m.Fetch(a.address, SPACE.id, digests, "ram", 60.0))
                assert (done.state, done.done, len(done.failed)) == (m.DONE, 4, 4)
                assert len(b.manager.tier("ram").index) == 4
                await eventually(b.at_rest)

    asyncio.run(main())


def test_a_damaged_frame_is_not_committed() -> None:
    async def main() -> None:
        async with peer("a") as a, peer("b") as b, running(Controller()) as c:
            a.store(KEYS)
            async with agent(b.manager, c.url, peers=b.node.peers):
                await eventually(lambda: c.synced)
                assert (await c.do("warm", m.Fetch(a.address, SPACE.id, BLOB[:32], "ram"))).done == 1  # seals it
                await c.do("away", m.Drop(SPACE.id, BLOB[:32], "ram"))
                (obj,) = a.manager.tier("ram").borrow(a.keys(KEYS)[:1])
                assert obj is not None
                obj.view[100] ^= 1
                obj.release("get")
                done = await c.do("f", m.Fetch(a.address, SPACE.id, BLOB, "ram"))
                assert done.done == 3
                (why,) = done.failed.values()
                assert why.startswith("it came damaged: frame: checksum")
                assert {key.digest for key in b.manager.tier("ram").index} == set(KEYS.digests[1:])

    asyncio.run(main())


def test_a_node_stops_soon_while_a_fetch_hangs() -> None:
    async def main() -> None:
        connected = asyncio.Event()

        async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            connected.set()
            await reader.read()
            writer.close()

        server = await asyncio.start_server(silent, "127.0.0.1", 0)
        address = "{}:{}".format(*server.sockets[0].getsockname())
        async with peer("b") as b, running(Controller()) as c:
            async with agent(b.manager, c.url, peers=b.node.peers) as it:
                await eventually(lambda: c.synced)
                await c.send(m.Do("f", m.Fetch(address, SPACE.id, BLOB, "ram")))
                await connected.wait()
                begun = time.monotonic()
                await it.close()
                assert time.monotonic() - begun < 5
            await eventually(b.at_rest)
        server.close()

    asyncio.run(main())


def test_a_fetch_that_is_cut_off_keeps_its_memory_while_it_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """The service closes while a thread verifies what has come, and cuts tails to their length."""
    from lmkv.agent import fetch as module
    from lmkv.agent.jobs import Job

    going, go = threading.Event(), threading.Event()

    def verify(*arguments: Any) -> Any:
        going.set()
        assert go.wait(20)
        return checked(*arguments)

    checked = module._verify
    monkeypatch.setattr(module, "_verify", verify)

    async def main() -> None:
        async with peer("a") as a, peer("b", space=None) as b:
            tokens = chain(range(6))
            a.store(tokens, tail=True)
            digests = b"".join(tokens.digests) + tokens.prefixes(1)[0]
            command = m.Fetch(a.address, SPACE.id, digests, "ram", 60.0, SPACE.json())
            job = asyncio.ensure_future(module.Fetcher(b.manager, b.node.peers).run(Job("f", command), command))
            await eventually(going.is_set)
            job.cancel()
            await asyncio.wait([job], timeout=0.1)
            assert b.manager.pool.holders()
            go.set()
            await asyncio.wait([job])
            assert job.cancelled()
            assert b.at_rest()
            assert b.manager.pool.free_bytes == b.manager.pool.nbytes

    asyncio.run(main())
