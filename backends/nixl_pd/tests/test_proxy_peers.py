"""Admission at real peer ports."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from peer_rig import KEY, SPACE, eventually, peer
from storage_rig import FRAME, chain

from lmkv.peer.peers import Peers
from lmkv_backend_nixl_pd.proxy.admission import Admission, PeerPorts
from lmkv_backend_nixl_pd.proxy.client import Client
from lmkv_backend_nixl_pd.proxy.metrics import Metrics
from lmkv_backend_nixl_pd.proxy.pool import Engine, Pool

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from peer_rig import Peer

CHUNK = 4
"""Tokens."""


@asynccontextmanager
async def admission(*nodes: Peer, key: str = KEY, wait: float = 20.0) -> AsyncIterator[Admission]:
    """An admission that asks these nodes."""
    metrics = Metrics()
    engines = [
        Engine(
            f"http://e:{number}", node.address, Client("http://e", context=None, connect_seconds=1), "decode", metrics
        )
        for number, node in enumerate(nodes)
    ]
    peers = Peers.asking(key, node="proxy")
    made = Admission(PeerPorts(peers, 10.0), Pool(engines, "least-loaded"), wait=wait, most=8)
    try:
        yield made
        await made.settle(20)
    finally:
        await asyncio.to_thread(peers.close)


def test_room_is_set_aside_until_the_transfer_ends() -> None:
    async def main() -> None:
        async with peer("decode", key=KEY) as node, admission(node) as ours:
            placed = await ours.place("t1", 3 * CHUNK, SPACE.model)
            assert isinstance(placed, Engine)
            assert placed.name == node.address
            assert node.hall.incoming.admitted >= 3 * FRAME
            ours.finish(placed, "t1", "aborted")
            await eventually(node.at_rest)
            assert await ours.place("t2", 10_000 * CHUNK, SPACE.model) == "too-large"
            assert await ours.place("t3", CHUNK, "no-such-model") == "no-namespace"
            assert node.at_rest()

    asyncio.run(main())


def test_wrong_key_and_no_node_are_no_room() -> None:
    async def main() -> None:
        async with peer("decode", key=KEY) as node:
            async with admission(node, key="another key of sixteen characters") as ours:
                assert await ours.place("t1", CHUNK, SPACE.model) == "unreachable"
            await node.node.close()
            async with admission(node) as ours:
                assert await ours.place("t1", CHUNK, SPACE.model) == "unreachable"

    asyncio.run(main())


def test_a36_three_requests_larger_together_than_the_pool_all_get_room() -> None:
    async def main() -> None:
        async with peer("decode", key=KEY, ram=8 * FRAME, admission="100%") as node, admission(node) as ours:
            peak = 0

            async def request(name: str) -> None:
                nonlocal peak
                placed = await ours.place(name, 5 * CHUNK, SPACE.model)
                assert isinstance(placed, Engine), placed
                peak = max(peak, node.hall.incoming.admitted)
                await asyncio.sleep(0.05)  # the prefill
                ours.finish(placed, name, "aborted")

            await asyncio.gather(*(request(f"t{number}") for number in range(3)))
            assert 5 * FRAME <= peak <= 8 * FRAME
            await eventually(node.at_rest)

    asyncio.run(main())


def test_what_has_arrived_and_nobody_wants_is_held_no_longer() -> None:
    async def main() -> None:
        keys = chain(range(3 * CHUNK))
        async with peer("prefill", key=KEY) as there, peer("decode", key=KEY) as node, admission(node) as ours:
            assert there.client is not None
            made = there.client.frames(keys)
            there.client.store(made)
            placed = await ours.place("t1", 3 * CHUNK, SPACE.model)
            assert isinstance(placed, Engine)
            digests = [frame.digest for frame in made]
            there.node.outgoing.send("t1", node.address, SPACE.id, digests, 3 * CHUNK, final=True)
            assert (await node.node.incoming.wait("t1", 20)).state == "complete"
            assert not node.at_rest()
            ours.finish(placed, "t1", "aborted")  # the client has gone, or the decode engine said no
            await eventually(node.at_rest)

    asyncio.run(main())


def test_other_nodes_keep_no_place_in_their_queue() -> None:
    async def main() -> None:
        async with (
            peer("one", key=KEY, admission="100%") as one,
            peer("two", key=KEY, admission="100%") as two,
            admission(one, two) as ours,
        ):
            first = await ours.place("t1", 6 * CHUNK, SPACE.model)
            second = await ours.place("t2", 6 * CHUNK, SPACE.model)
            assert isinstance(first, Engine)
            assert isinstance(second, Engine)
            assert {first.name, second.name} == {one.address, two.address}
            waiting = asyncio.create_task(ours.place("t3", 6 * CHUNK, SPACE.model))
            await eventually(lambda: len(one.hall.incoming._queue) == len(two.hall.incoming._queue) == 1)
            ours.finish(second, "t2", "aborted")
            assert await waiting is second
            await ours.settle(20)
            assert not one.hall.incoming._queue
            assert not two.hall.incoming._queue

    asyncio.run(main())
