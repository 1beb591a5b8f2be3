"""Room: what stores, loads and copies may take of the pool, and what goes for it."""

from __future__ import annotations

import asyncio
import threading
import time
from typing import TYPE_CHECKING, Any

import pytest
from storage_rig import FRAME, PAGE_BYTES, Client, Shelf, chain, namespace, storage

from lmkv.policy.leaf_first import LeafFirstLRU
from lmkv.service import protocol as p

if TYPE_CHECKING:
    from collections.abc import Coroutine, Mapping, Sequence

    from lmkv.backend import StorageBackendInterface
    from lmkv.keys import KeyChain
    from lmkv.types import ChunkKey, Outcome


def run(coroutine: Coroutine[Any, Any, None]) -> None:
    asyncio.run(coroutine)


def prompt(number: int) -> KeyChain:
    """One chunk, another one for each number."""
    return chain(range(number * 10, number * 10 + 4))


@pytest.mark.parametrize("ram", [None, 8 * FRAME])
def test_stores_leave_the_staging_reserve_to_loads(ram: int | None) -> None:
    async def body() -> None:
        shelf, gate = Shelf(), threading.Event()

        def slow(_: Sequence[ChunkKey]) -> None:
            gate.wait(10)

        shelf.on_put = slow
        below = [(shelf, {"capacity": 100 * FRAME, "deadline": 20.0})]
        async with storage(ram=ram, pool=8 * FRAME, staging=4 * FRAME, below=below) as manager:
            client = Client(manager, namespace())
            taken = sum(client.store(client.frames(prompt(i)))[0][0] >= 0 for i in range(12))
            try:
                assert taken == 4
                assert manager.pool.free_bytes >= 4 * FRAME
            finally:
                gate.set()
            await client.settled()
            assert not manager.pool.passing_bytes

    run(body())


def test_frames_that_are_filled_count_against_the_capacity() -> None:
    async def body() -> None:
        async with storage(ram=4 * FRAME, staging=2 * FRAME, pool=20 * FRAME) as manager:
            client = Client(manager, namespace())
            replies = [client.ask(p.Reserve(client.space.id, 0, tuple(client.frames(prompt(i))))) for i in range(8)]
            for reply in replies:
                if reply.reservation:
                    client.ask(p.Commit(reply.reservation))
            assert sum(reply.reservation > 0 for reply in replies) == 4
            assert manager.tier("ram").used <= 4 * FRAME

    run(body())


def test_a_store_that_is_rejected_evicts_nothing() -> None:
    async def body() -> None:
        async with storage(ram=6 * FRAME, staging=FRAME) as manager:
            client = Client(manager, namespace())
            large = Client(manager, namespace(model="large", page_bytes=PAGE_BYTES * 4))
            held = chain(range(16))
            client.store(client.frames(held))
            assert (await client.look_up(held)).chunks == 4
            client.store(client.frames(prompt(50)))
            client.store(client.frames(prompt(60)))
            assert large.store(large.frames(chain(range(4)))) == [(p.REJECTED,)]
            assert len(manager.tier("ram").index) == 6
            assert not manager.metrics.value("lmkv_evictions_total")

    run(body())


def test_evictions_are_counted_once_for_each_frame() -> None:
    async def body() -> None:
        async with storage(ram=4 * FRAME) as manager:
            client = Client(manager, namespace(2))
            for i in range(2):
                client.store(client.frames(prompt(i)), shards=(0, 1))
            ram = manager.tier("ram")
            assert manager.stack.evict(ram, 2 * FRAME) == 4 - len(ram.index) > 0
            assert manager.metrics.value("lmkv_evictions_total") == 4 - len(ram.index)

    run(body())


def test_only_evictions_can_miss_their_demotion() -> None:
    async def body() -> None:
        below = [(Shelf(), {"capacity": 40 * FRAME, "write": "demote"})]
        async with storage(ram=2 * FRAME, below=below) as manager:
            client = Client(manager, namespace())
            client.store(client.frames(chain(range(8))))
            client.ask(p.Clear(tier="ram"))
            assert not manager.metrics.value("lmkv_demotions_missed_total")
            for i in range(10, 14):  # at once: no time for copies
                client.store(client.frames(prompt(i)))
            assert manager.metrics.value("lmkv_demotions_missed_total") == 2

    run(body())


def test_copies_from_a_slow_tier_to_a_slower_one_leave_ram_alone() -> None:
    async def body() -> None:
        lowest = Shelf()
        below: list[tuple[StorageBackendInterface, dict[str, Any]]] = [
            (Shelf(), {"capacity": 10 * FRAME}),
            (lowest, {"capacity": 100 * FRAME, "write": "demote"}),
        ]
        async with storage(ram=4 * FRAME, staging=4 * FRAME, below=below) as manager:
            client = Client(manager, namespace())
            for i in range(9):
                client.store(client.frames(prompt(i)))
                await client.settled()
            for _ in range(20):
                await asyncio.sleep(0.02)
                await client.settled()
            assert lowest.frames, "what goes next from the tier above is copied"
            hot = {prompt(i).digests[0] for i in (5, 6, 7, 8)}
            assert {key.digest for key in manager.tier("ram").index} == hot
            copied = await client.wait(p.Move(client.space.id, prompt(4).digests[0], "shelf1", "shelf2", True))
            assert copied.count == 1
            assert {key.digest for key in manager.tier("ram").index} == hot
            await client.settled()
            assert not manager.pool.passing_bytes

    run(body())


def test_memory_of_a_call_that_returns_late_wakes_loads_that_wait() -> None:
    async def body() -> None:
        shelf, gate = Shelf(), threading.Event()
        below = [(shelf, {"capacity": 40 * FRAME, "deadline": 1.0, "threads": 4, "failures": 99})]
        async with storage(ram=None, pool=4 * FRAME, staging=2 * FRAME, below=below) as manager:
            client = Client(manager, namespace())
            for i in range(5):
                client.store(client.frames(prompt(i)))
                await client.settled()
            stuck = {prompt(i).digests[0] for i in range(3)}

            def get(keys: Sequence[ChunkKey]) -> Sequence[Outcome] | None:
                if keys[0].digest in stuck:
                    gate.wait(10)
                return None

            shelf.on_get = get
            # Of the four frames of memory three hang in calls, and one is held.
            holder = await client.look_up(prompt(3))
            held = await client.wait(p.Acquire(holder.lease, 0, 0, 1))
            for i in range(3):
                client.ask(p.Release((await client.look_up(prompt(i))).lease))
            await asyncio.sleep(1.2)
            found = await client.look_up(prompt(4))
            begin = time.monotonic()
            asyncio.get_running_loop().call_later(0.2, gate.set)
            loaded = await client.wait(p.Acquire(found.lease, 0, 0, 1))
            assert loaded.offsets[0] >= 0, f"{loaded.reasons} after {time.monotonic() - begin:.2f} s"
            client.ask(p.Done(loaded.hold))
            client.ask(p.Done(held.hold))

    run(body())


def test_a_promise_that_the_pool_cannot_keep_is_made_only_once() -> None:
    async def body() -> None:
        shelf = Shelf()
        async with storage(below=[(shelf, {"capacity": 40 * FRAME})]) as manager:
            client = Client(manager, namespace())
            here, below = chain(range(4)), prompt(7)
            client.store(client.frames(here))
            await client.settled()
            client.ask(p.Clear(tier="shelf1"))
            client.store(client.frames(below))
            await client.settled()
            ram = manager.tier("ram")
            ram.backend.clear()  # a fault: the books still say that both are there
            lost = await client.look_up(here)
            assert await client.load(lost, here) == [False]
            assert (await client.look_up(here)).chunks == 0
            for _ in range(2):
                found = await client.look_up(below)
                arrived = await client.load(found, below)
            assert arrived == [True], "the tier below has it"

    run(body())


async def on_the_shelf(client: Client, keys: KeyChain) -> None:
    """Store chunk by chunk, so that all of it gets to the tiers below, however small the pool is."""
    for frame in client.frames(keys):
        client.store([frame])
        await client.settled()


async def copied(client: Client, found: p.Found, run: int) -> list[bool]:
    """Acquire `run` chunks after the other, as an engine does that will not ask for them again."""
    arrived: list[bool] = []
    for first in range(0, found.chunks, run):
        loaded = await client.wait(p.Acquire(found.lease, 0, first, min(run, found.chunks - first)))
        arrived += [offset >= 0 for offset in loaded.offsets]
        if loaded.hold:
            client.ask(p.Done(loaded.hold, last=True))
    return arrived


@pytest.mark.parametrize("ram", [None, 4 * FRAME])
def test_a_prompt_larger_than_the_pool_arrives_whole(ram: int | None) -> None:
    async def body() -> None:
        below = [(Shelf(), {"capacity": 100 * FRAME, "deadline": 1.0})]
        async with storage(ram=ram, staging=2 * FRAME, pool=6 * FRAME, below=below) as manager:
            client = Client(manager, namespace())
            keys = chain(range(4 * 24))
            await on_the_shelf(client, keys)
            for wait in (0.0, 1.3):  # what finds no room while the request waits is loaded when it runs
                found = await client.look_up(keys)
                assert found.chunks == 24
                await asyncio.sleep(wait)
                assert await copied(client, found, 2) == [True] * 24
                client.ask(p.Release(found.lease))
                await client.settled()
            assert not manager.pool.passing_bytes
            assert manager.index.books.nbytes == 0

    run(body())


@pytest.mark.parametrize("queued_for", [0.0, 0.1])
@pytest.mark.parametrize("ram", [None, 4 * FRAME])
def test_what_is_loaded_ahead_gives_way_to_a_request_that_runs(ram: int | None, queued_for: float) -> None:
    """Also when its load has been waiting for memory since the request was in the queue itself."""

    async def body() -> None:
        below = [(Shelf(), {"capacity": 100 * FRAME, "deadline": 1.0})]
        async with storage(ram=ram, staging=2 * FRAME, pool=6 * FRAME, below=below) as manager:
            client = Client(manager, namespace())
            first, queued = chain(range(4 * 6)), chain(range(1000, 1000 + 4 * 8))
            await on_the_shelf(client, first)
            await on_the_shelf(client, queued)
            waiting = await client.look_up(queued)
            await asyncio.sleep(1.3)
            assert manager.pool.free_bytes < FRAME, "loaded ahead as far as there is room"
            running = await client.look_up(first)
            await asyncio.sleep(queued_for)
            assert await copied(client, running, 2) == [True] * 6
            assert await copied(client, waiting, 2) == [True] * 8, "the promise holds"
            client.ask(p.Release(waiting.lease))
            client.ask(p.Release(running.lease))
            await client.settled()
            assert manager.holds()["entries"] == 0

    run(body())


def test_what_pins_leave_no_room_for_is_not_offered() -> None:
    async def body() -> None:
        below = [(Shelf(), {"capacity": 100 * FRAME, "deadline": 5.0})]
        async with storage(ram=6 * FRAME, staging=FRAME, pool=6 * FRAME, below=below) as manager:
            client = Client(manager, namespace())
            keys, pinned = chain(range(4 * 8)), chain(range(1000, 1000 + 4 * 5))
            await on_the_shelf(client, keys)
            client.store(client.frames(pinned))
            await client.settled()
            client.ask(p.Prefetch(client.space.id, b"".join(pinned.digests)))
            await client.settled()
            client.ask(p.Pin(client.space.id, b"".join(pinned.digests)))
            there = len([key for key in manager.tier("ram").index if key.digest in pinned.digests])
            found = await client.look_up(keys)
            assert there >= 4
            assert found.chunks == 6 - there
            assert manager.metrics.value("lmkv_misses_total", reason="no_room") == 8 - found.chunks
            assert all(await client.load(found, keys))

    run(body())


def test_one_deadline_for_memory_tiers_and_decoding() -> None:
    async def body() -> None:
        slow, other = Shelf(), Shelf()
        gate = threading.Event()

        def hang(_: Sequence[ChunkKey]) -> None:
            gate.wait(10)

        below = [(shelf, {"capacity": 40 * FRAME, "deadline": 1.0, "failures": 99}) for shelf in (slow, other)]
        async with storage(ram=None, pool=4 * FRAME, below=below) as manager:
            client = Client(manager, namespace())
            keys = prompt(1)
            await on_the_shelf(client, keys)
            slow.on_get = other.on_get = hang
            found = await client.look_up(keys)
            begin = time.monotonic()
            assert await client.load(found, keys) == [False]
            assert time.monotonic() - begin < 1.9, "not one deadline for each tier"
            gate.set()
            client.ask(p.Release(found.lease))

    run(body())


def test_a_load_that_had_to_wait_for_memory_is_no_sign_of_illness() -> None:
    async def body() -> None:
        shelf = Shelf()
        below = [(shelf, {"capacity": 40 * FRAME, "deadline": 2.0, "failures": 1})]
        async with storage(ram=None, pool=2 * FRAME, staging=FRAME, below=below) as manager:
            client = Client(manager, namespace())
            holder, late = chain(range(8)), prompt(9)
            await on_the_shelf(client, holder)
            await on_the_shelf(client, late)
            held = await client.look_up(holder)
            loaded = await client.wait(p.Acquire(held.lease, 0, 0, 2))

            def slowly(_: Sequence[ChunkKey]) -> None:
                time.sleep(0.5)

            shelf.on_get = slowly
            found = await client.look_up(late)
            asyncio.get_running_loop().call_later(1.7, client.ask, p.Done(loaded.hold))
            asyncio.get_running_loop().call_later(1.7, client.ask, p.Release(held.lease))
            assert await client.load(found, late) == [False], "its own time was over"
            await client.settled()
            assert manager.tier("shelf0").readable

    run(body())


def test_a_policy_hears_of_no_parent_as_none() -> None:
    """Not as of an empty digest, which all first chunks would share."""
    told: list[bytes | None] = []

    class Told(LeafFirstLRU):
        def add_all(self, parents: Mapping[ChunkKey, bytes | None]) -> None:
            told.extend(parents.values())
            super().add_all(parents)

    async def body() -> None:
        async with storage(ram=8 * FRAME) as manager:
            assert manager.stack.ram is not None
            manager.stack.ram.policy = manager.stack.ram._bulk = Told()
            client, keys = Client(manager, namespace()), chain(range(8))
            client.store(client.frames(keys))
            assert told == [None, keys.digests[0]]

    run(body())
