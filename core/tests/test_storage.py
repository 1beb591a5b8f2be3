"""The storage through the messages of its clients: look-up, retrieve, store, eviction, tiers, failures."""

from __future__ import annotations

import asyncio
import threading
import time
from typing import TYPE_CHECKING, Any

import pytest
from storage_rig import FRAME, Client, Shelf, chain, namespace, storage

from lmkv.errors import BackendError, ConfigError, ProtocolError
from lmkv.service import protocol as p
from lmkv.types import FAILED, MISS

if TYPE_CHECKING:
    from collections.abc import Coroutine

    from lmkv.storage import StorageManager


def run(coroutine: Coroutine[Any, Any, None]) -> None:
    asyncio.run(coroutine)


def nothing_held(manager: StorageManager) -> bool:
    return not any(n for name, n in manager.holds().items() if name != "sessions")


def test_store_then_retrieve_gives_the_same_bytes() -> None:
    async def body() -> None:
        async with storage() as manager:
            client = Client(manager, namespace())
            keys = chain(range(12))
            client.store(client.frames(keys))
            found = await client.look_up(keys)
            assert (found.chunks, found.pages, found.tiers) == (3, 0, (0, 0, 0))
            assert await client.load(found, keys) == [True] * 3
            client.ask(p.Release(found.lease))
            assert nothing_held(manager)

    run(body())


def test_a_divergence_inside_a_chunk_gets_its_pages() -> None:
    async def body() -> None:
        async with storage() as manager:
            client = Client(manager, namespace())
            stored = chain(range(12))
            client.store(client.frames(stored))
            other = chain([*range(6), 99, 98, 97, 96])
            found = await client.look_up(other)
            assert (found.chunks, found.pages) == (1, 1), "one page of the second chunk is shared"
            assert found.frame == stored.digests[1]
            assert await client.load(found, other) == [True, True]
            client.ask(p.Release(found.lease))
            assert nothing_held(manager)

    run(body())


def test_the_first_chunk_diverges_and_still_gives_a_page() -> None:
    async def body() -> None:
        async with storage() as manager:
            client = Client(manager, namespace())
            client.store(client.frames(chain(range(4))))
            found = await client.look_up(chain([0, 1, 50, 51, 52]))
            assert (found.chunks, found.pages) == (0, 1)
            assert found.lease
            client.ask(p.Release(found.lease))
            assert nothing_held(manager)

    run(body())


def test_a_tail_is_found_and_superseded_by_the_full_chunk() -> None:
    async def body() -> None:
        async with storage() as manager:
            client = Client(manager, namespace())
            short = chain(range(6))
            client.store(client.frames(short, tail=True))
            found = await client.look_up(short)
            assert (found.chunks, found.pages) == (1, 1)
            client.ask(p.Release(found.lease))
            tail = short.prefixes(1)[0]
            longer = chain(range(8))
            client.store(client.frames(longer))
            assert tail not in manager.index.namespace(client.space.id).entries, "the full chunk supersedes the tail"
            found = await client.look_up(short)
            assert (found.chunks, found.pages, found.frame) == (1, 1, longer.digests[1])
            client.ask(p.Release(found.lease))
            [offsets] = client.store(client.frames(short, tail=True))
            assert offsets == (p.PRESENT, p.PRESENT), "a tail that a chunk contains is not stored again"

    run(body())


def test_a_chunk_is_there_only_with_all_its_shards() -> None:
    async def body() -> None:
        async with storage(ram=16 * FRAME) as manager:
            client = Client(manager, namespace(shards=2))
            keys = chain(range(12))
            frames = client.frames(keys)
            client.store(frames, shards=[0])
            assert (await client.look_up(keys)).chunks == 0
            client.store(frames[:2], shards=[1])
            found = await client.look_up(keys)
            assert found.chunks == 2
            assert await client.load(found, keys, shard=0) == [True, True]
            assert await client.load(found, keys, shard=1) == [True, True]
            client.ask(p.Release(found.lease))
            assert nothing_held(manager)
            assert manager.metrics.value("lmkv_misses_total", reason="not_all_shards") > 0

    run(body())


def test_nothing_is_visible_before_commit_and_abort_gives_all_back() -> None:
    async def body() -> None:
        async with storage() as manager:
            client = Client(manager, namespace())
            keys = chain(range(8))
            free = manager.pool.free_bytes
            reply = client.ask(p.Reserve(client.space.id, 0, tuple(client.frames(keys))))
            assert (await client.look_up(keys)).chunks == 0
            again = client.ask(p.Reserve(client.space.id, 0, tuple(client.frames(keys))))
            assert again.offsets == (p.PRESENT, p.PRESENT), "somebody is filling them"
            client.ask(p.Abort(reply.reservation))
            client.ask(p.Abort(reply.reservation))
            assert manager.pool.free_bytes == free
            assert nothing_held(manager)

    run(body())


def test_a_client_that_dies_loses_everything_at_once() -> None:
    async def body() -> None:
        async with storage() as manager:
            client, other = Client(manager, namespace(), "dying"), Client(manager, namespace())
            keys = chain(range(8))
            client.store(client.frames(keys))
            free = manager.pool.free_bytes
            found = await client.look_up(keys)
            await client.wait(p.Acquire(found.lease, 0, 0, 2))
            client.ask(p.Reserve(client.space.id, 0, tuple(client.frames(chain(range(100, 108))))))
            assert not nothing_held(manager)
            client.session.close()
            client.session.close()
            assert nothing_held(manager)
            assert manager.pool.free_bytes == free
            assert (await other.look_up(keys)).chunks == 2

    run(body())


def test_leaf_first_eviction_keeps_the_beginning() -> None:
    async def body() -> None:
        async with storage(ram=4 * FRAME) as manager:
            client = Client(manager, namespace())
            keys = chain(range(16))
            client.store(client.frames(keys))
            client.store(client.frames(chain(range(100, 108))))
            assert (await client.look_up(keys, hold=False)).chunks == 2, "its last two chunks went, two stayed"
            assert manager.metrics.value("lmkv_evictions_total", tier="ram") == 2

    run(body())


def test_leased_and_pinned_chunks_are_no_victims() -> None:
    async def body() -> None:
        async with storage(ram=4 * FRAME) as manager:
            client = Client(manager, namespace())
            leased, pinned = chain(range(8)), chain(range(50, 58))
            client.store(client.frames(leased))
            client.store(client.frames(pinned))
            found = await client.look_up(leased)
            assert client.ask(p.Pin(client.space.id, b"".join(pinned.digests))).count == 2
            [offsets] = client.store(client.frames(chain(range(100, 108))))
            assert offsets == (p.REJECTED, p.REJECTED), "RAM full of what may not go: dropped, not waited for"
            assert manager.metrics.value("lmkv_dropped_stores_total", reason="no_room") == 2
            assert await client.load(found, leased) == [True, True]
            client.ask(p.Release(found.lease))
            [offsets] = client.store(client.frames(chain(range(100, 108))))
            assert min(offsets) >= 0
            assert (await client.look_up(pinned, hold=False)).chunks == 2
            assert client.ask(p.Unpin(client.space.id, b"".join(pinned.digests))).count == 2

    run(body())


def test_pins_and_leases_expire() -> None:
    now = [100.0]

    async def body() -> None:
        async with storage(lease_seconds=0.2, clock=lambda: now[0]) as manager:
            client = Client(manager, namespace())
            keys = chain(range(8))
            client.store(client.frames(keys))
            found = await client.look_up(keys)
            for _ in range(3):
                now[0] += 0.15
                assert await client.load(found, keys) == [True, True], "use prolongs it"
            now[0] += 0.3
            assert await client.load(found, keys) == [False, False], "an expired lease is refused, not served"
            await asyncio.sleep(0.2)
            assert nothing_held(manager), "the keeper has ended it"
            with pytest.raises(ConfigError, match="positive time"):
                client.ask(p.Pin(client.space.id, b"".join(keys.digests), -1.0))

    run(body())


def test_write_through_then_load_after_ram_eviction() -> None:
    async def body() -> None:
        shelf = Shelf()
        async with storage(ram=2 * FRAME, below=[(shelf, {"capacity": 100 * FRAME})]) as manager:
            client = Client(manager, namespace())
            first, second = chain(range(8)), chain(range(100, 108))
            client.store(client.frames(first))
            await client.settled()
            client.store(client.frames(second))
            await client.settled()
            assert len(shelf.frames) == 4
            found = await client.look_up(first)
            assert (found.chunks, found.tiers) == (2, (1, 1))
            assert await client.load(found, first) == [True, True]
            client.ask(p.Release(found.lease))
            assert nothing_held(manager)
            again = await client.look_up(first)
            assert again.tiers == (0, 0), "read: promote"
            client.ask(p.Release(again.lease))

    run(body())


def test_two_requests_share_one_load() -> None:
    async def body() -> None:
        shelf = Shelf()
        async with storage(ram=4 * FRAME, below=[(shelf, {"capacity": 100 * FRAME})]) as manager:
            client = Client(manager, namespace())
            keys = chain(range(8))
            client.store(client.frames(keys))
            await client.settled()
            client.ask(p.Clear(None, "ram"))
            shelf.calls.clear()
            one, two = await client.look_up(keys), await client.look_up(keys)
            assert await client.load(one, keys) == await client.load(two, keys) == [True, True]
            assert sum(n for op, n in shelf.calls if op == "get") == 2
            for found in (one, two):
                client.ask(p.Release(found.lease))
            assert nothing_held(manager)

    run(body())


def test_write_demote_keeps_what_ram_evicts() -> None:
    async def body() -> None:
        shelf = Shelf()
        async with storage(ram=4 * FRAME, below=[(shelf, {"capacity": 100 * FRAME, "write": "demote"})]) as manager:
            client = Client(manager, namespace())
            chains = [chain(range(start, start + 8)) for start in (0, 100, 200, 300)]
            for keys in chains:
                client.store(client.frames(keys))
                await client.settled()
            assert 0 < len(shelf.frames) < 8, "what RAM still holds need not be there"
            for keys in chains:
                found = await client.look_up(keys)
                assert await client.load(found, keys) == [True, True]
                client.ask(p.Release(found.lease))
                await client.settled()
            assert nothing_held(manager)

    run(body())


def test_write_never_is_read_only() -> None:
    async def body() -> None:
        shelf = Shelf()
        async with storage(ram=2 * FRAME, below=[(shelf, {"capacity": 9 * FRAME, "write": "never"})]) as manager:
            client = Client(manager, namespace())
            for start in (0, 100, 200):
                client.store(client.frames(chain(range(start, start + 8))))
            await client.settled()
            assert not shelf.frames

    run(body())


def test_lower_tier_keeps_its_capacity() -> None:
    async def body() -> None:
        shelf = Shelf()
        async with storage(ram=2 * FRAME, below=[(shelf, {"capacity": 4 * FRAME})]) as manager:
            client = Client(manager, namespace())
            for start in range(0, 1000, 100):
                client.store(client.frames(chain(range(start, start + 8))))
                await client.settled()
            assert len(shelf.frames) == 4
            assert manager.tier("shelf1").used == 4 * FRAME

    run(body())


def test_read_direct_does_not_fill_ram() -> None:
    async def body() -> None:
        shelf = Shelf()
        async with storage(ram=4 * FRAME, below=[(shelf, {"capacity": 9 * FRAME, "read": "direct"})]) as manager:
            client = Client(manager, namespace())
            keys = chain(range(8))
            client.store(client.frames(keys))
            await client.settled()
            client.ask(p.Clear(None, "ram"))
            found = await client.look_up(keys)
            assert await client.load(found, keys) == [True, True]
            client.ask(p.Release(found.lease))
            assert manager.tier("ram").used == 0
            assert manager.pool.free_bytes == manager.pool.nbytes
            assert nothing_held(manager)

    run(body())


def test_no_ram_tier() -> None:
    async def body() -> None:
        shelf = Shelf()
        below = [(shelf, {"capacity": 9 * FRAME})]
        async with storage(ram=None, below=below, staging=2 * FRAME, pool=6 * FRAME) as manager:
            client = Client(manager, namespace())
            keys = chain(range(8))
            client.store(client.frames(keys))
            await client.settled()
            assert manager.pool.free_bytes == manager.pool.nbytes
            found = await client.look_up(keys)
            assert await client.load(found, keys) == [True, True]
            client.ask(p.Release(found.lease))
            assert manager.pool.free_bytes == manager.pool.nbytes
            assert nothing_held(manager)

    run(body())


@pytest.mark.parametrize("bad", ["raises", "miss", "short", "flipped"])
def test_a12_middle_chunk_fails(bad: str) -> None:
    async def body() -> None:
        shelf = Shelf()
        async with storage(ram=4 * FRAME, below=[(shelf, {"capacity": 100 * FRAME})]) as manager:
            client = Client(manager, namespace())
            keys = chain(range(12))
            client.store(client.frames(keys))
            await client.settled()
            client.ask(p.Clear(None, "ram"))
            middle = next(k for k in shelf.frames if k.digest == keys.digests[1])

            def fail(asked):  # noqa: ANN001, ANN202
                if middle not in asked:
                    return None
                if bad == "raises":
                    return [FAILED(BackendError("no")) if k == middle else MISS for k in asked]
                return None

            if bad == "raises":
                shelf.on_get = fail
            elif bad == "miss":
                del shelf.frames[middle]
            elif bad == "short":
                shelf.frames[middle] = shelf.frames[middle][:-1]
            else:
                damaged = bytearray(shelf.frames[middle])
                damaged[17] ^= 1
                shelf.frames[middle] = bytes(damaged)
            found = await client.look_up(keys)
            assert found.chunks == 3
            came = await client.load(found, keys)
            assert not came[1]
            client.ask(p.Release(found.lease))
            assert nothing_held(manager)
            if bad in {"short", "flipped"}:
                assert came == [True, False, True]
                await client.settled()
                assert shelf.aside == [middle]
                assert manager.metrics.value("lmkv_misses_total", reason="corrupt") == 1
            if bad != "raises":
                assert (await client.look_up(keys, hold=False)).chunks == 1, "the promise dies with a failed load"
                client.store(client.frames(keys))
                await client.settled()
                assert (await client.look_up(keys, hold=False)).chunks == 3

    run(body())


def test_the_next_tier_is_asked_when_one_fails() -> None:
    async def body() -> None:
        upper, lower = Shelf(), Shelf()
        below = [(upper, {"capacity": 9 * FRAME}), (lower, {"capacity": 9 * FRAME})]
        async with storage(ram=4 * FRAME, below=below) as manager:
            client = Client(manager, namespace())
            keys = chain(range(8))
            client.store(client.frames(keys))
            await client.settled()
            client.ask(p.Clear(None, "ram"))
            upper.frames.clear()
            found = await client.look_up(keys)
            assert await client.load(found, keys) == [True, True]
            client.ask(p.Release(found.lease))

    run(body())


def test_breaker_opens_probes_and_recovers() -> None:
    async def body() -> None:
        shelf = Shelf()
        settings = {"capacity": 100 * FRAME, "failures": 2, "probe": 1.0}
        async with storage(ram=4 * FRAME, below=[(shelf, settings)]) as manager:
            client = Client(manager, namespace())
            keys = chain(range(4))

            def ill(_):  # noqa: ANN001, ANN202
                raise OSError(5, "no disk")

            shelf.on_put = ill
            for start in range(100, 500, 100):
                client.store(client.frames(chain(range(start, start + 4))))
                await client.settled()
            assert sum(n for op, n in shelf.calls if op == "put") == 2, "the breaker holds the others back"
            state, tiers = manager.health()
            assert state == "degraded"
            assert "no disk" in str(tiers["shelf1"]["detail"])
            shelf.on_put = lambda _: None
            while not manager.tier("shelf1").writable:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            client.store(client.frames(keys))
            await client.settled()
            assert len(shelf.frames) == 1
            assert manager.health()[0] == "ok"

    run(body())


def test_deadline_and_late_writer() -> None:
    async def body() -> None:
        shelf = Shelf()
        gate = threading.Event()
        settings = {"capacity": 100 * FRAME, "deadline": 0.1, "threads": 1}
        async with storage(ram=2 * FRAME, below=[(shelf, settings)]) as manager:
            client = Client(manager, namespace())
            keys = chain(range(8))
            client.store(client.frames(keys))
            await client.settled()
            client.ask(p.Clear(None, "ram"))
            held: list[memoryview] = []

            def slow(_):  # noqa: ANN001, ANN202
                gate.wait(5)

            shelf.on_get = slow
            found = await client.look_up(keys)
            begin = time.monotonic()
            assert await client.load(found, keys) == [False, False]
            assert time.monotonic() - begin < 2
            client.ask(p.Release(found.lease))
            assert manager.pool.free_bytes < manager.pool.nbytes, "what was lent to the late call stays its own"
            assert manager.metrics.value("lmkv_misses_total", reason="deadline") == 2
            gate.set()
            await client.settled()
            assert manager.pool.free_bytes == manager.pool.nbytes
            assert nothing_held(manager)
            assert not held

    run(body())


def test_a_put_that_comes_late_is_in_the_books() -> None:
    async def body() -> None:
        shelf = Shelf()
        gate = threading.Event()
        async with storage(ram=2 * FRAME, below=[(shelf, {"capacity": 9 * FRAME, "deadline": 0.05})]) as manager:
            client = Client(manager, namespace())
            keys = chain(range(4))
            shelf.on_put = lambda _: gate.wait(5) and None
            client.store(client.frames(keys))
            await asyncio.sleep(0.15)
            gate.set()
            await client.settled()
            assert manager.tier("shelf1").used == FRAME
            client.ask(p.Clear(None, "ram"))
            assert (await client.look_up(keys, hold=False)).chunks == 1

    run(body())


def test_a19_slow_disk() -> None:
    async def body() -> None:
        shelf = Shelf()
        shelf.on_put = lambda _: time.sleep(0.02)
        settings = {"capacity": 10_000 * FRAME, "queue_calls": 10, "threads": 1}
        async with storage(ram=600 * FRAME, below=[(shelf, settings)]) as manager:
            client = Client(manager, namespace())
            chains = [chain(range(start * 10, start * 10 + 4)) for start in range(200)]
            times = []
            for keys in chains:
                begin = time.perf_counter()
                client.store(client.frames(keys))
                times.append(time.perf_counter() - begin)
                assert manager.tier("shelf1").queue()[0] <= 10
            await client.settled()
            dropped = manager.metrics.value("lmkv_tier_rejected_total", tier="shelf1")
            assert dropped > 100
            assert len(shelf.frames) == 200 - dropped
            client.ask(p.Clear(None, "ram"))
            found = sum([(await client.look_up(keys, hold=False)).chunks for keys in chains])
            assert found == len(shelf.frames), "look-up for dropped ones: 0"
            assert sorted(times)[100] < 0.02, "a store does not wait for a write"

    run(body())


def test_a17_full_and_pinned() -> None:
    async def body() -> None:
        shelf = Shelf()
        below = [(shelf, {"capacity": 99 * FRAME, "deadline": 0.2})]
        async with storage(ram=None, below=below, staging=2 * FRAME, pool=4 * FRAME) as manager:
            client = Client(manager, namespace())
            stored, other = chain(range(16)), chain(range(100, 104))
            for keys in (stored, other):
                for frame in client.frames(keys):
                    client.store([frame])
                    await client.settled()
            found = await client.look_up(stored)
            loaded = await client.wait(p.Acquire(found.lease, 0, 0, 4))
            assert min(loaded.offsets) >= 0
            assert manager.pool.free_bytes == 0, "staging of four chunks, all held"
            begin = time.monotonic()
            [offsets] = client.store(client.frames(chain(range(200, 204))))  # answered in the same turn, or not at all
            assert offsets == (p.REJECTED,)
            blocked = await client.look_up(other)
            assert await client.load(blocked, other) == [False]
            assert time.monotonic() - begin < 1.5
            assert manager.metrics.value("lmkv_misses_total", reason="no_room") == 1
            client.ask(p.Done(loaded.hold))
            client.ask(p.Release(found.lease))
            client.ask(p.Release(blocked.lease))
            freed = await client.look_up(other)
            assert await client.load(freed, other) == [True]
            client.ask(p.Release(freed.lease))
            [offsets] = client.store(client.frames(chain(range(200, 204))))
            assert min(offsets) >= 0
            await client.settled()
            assert nothing_held(manager)

    run(body())


def test_a11_evict_in_between() -> None:
    async def body() -> None:
        async with storage(ram=4 * FRAME) as manager:
            client = Client(manager, namespace())
            keys = chain(range(8))
            client.store(client.frames(keys))
            found = await client.look_up(keys)
            for start in range(100, 900, 100):
                client.store(client.frames(chain(range(start, start + 8))))
            assert await client.load(found, keys) == [True, True]
            client.ask(p.Release(found.lease))
            assert nothing_held(manager)

    run(body())


def test_a16_partial_use() -> None:
    async def body() -> None:
        async with storage(ram=4 * FRAME) as manager:
            client = Client(manager, namespace())
            keys = chain(range(16))
            client.store(client.frames(keys))
            found = await client.look_up(keys)
            assert manager.holds()["entries"] == 4
            client.ask(p.Trim(found.lease, 2))
            assert manager.holds()["entries"] == 2
            assert await client.load(found, keys, first=2) == [True, True]
            client.ask(p.Release(found.lease))
            client.ask(p.Release(found.lease))
            assert nothing_held(manager)

    run(body())


def test_a22_restart() -> None:
    async def body() -> None:
        shelf = Shelf()
        below = [(shelf, {"capacity": 12 * FRAME})]
        space = namespace()
        singles = [chain(range(start, start + 4)) for start in range(0, 1500, 100)]
        async with storage(ram=4 * FRAME, below=below) as manager:
            client = Client(manager, space)
            for keys in singles[:10]:
                client.store(client.frames(keys))
                await client.settled()
        async with storage(ram=4 * FRAME, below=below) as manager:
            tier = manager.tier("shelf1")
            assert tier.used == 10 * FRAME
            client = Client(manager, space)
            for keys in singles[:10]:
                assert (await client.look_up(keys, hold=False)).chunks == 1
            for keys in singles[10:]:
                client.store(client.frames(keys))
                await client.settled()
            assert len(shelf.frames) == 12
            assert tier.used == 12 * FRAME
            left = [keys.digests[0] for keys in singles]
            assert {key.digest for key in shelf.frames} == set(left[3:]), "the three least recently used have gone"

    run(body())


def test_restart_over_capacity_and_damaged_frames() -> None:
    async def body() -> None:
        shelf = Shelf()
        space = namespace()
        async with storage(ram=4 * FRAME, below=[(shelf, {"capacity": 12 * FRAME})]) as manager:
            client = Client(manager, space)
            for start in range(0, 800, 100):
                client.store(client.frames(chain(range(start, start + 4))))
                await client.settled()
        broken = next(iter(shelf.frames))
        shelf.frames[broken] = b"\x80\x04\x95" + shelf.frames[broken][3:-40] + bytes(40)
        async with storage(ram=4 * FRAME, below=[(shelf, {"capacity": 5 * FRAME})]) as manager:
            await asyncio.sleep(0.1)
            assert shelf.aside == [broken]
            assert manager.tier("shelf1").used == 5 * FRAME
            assert len(shelf.frames) == 5

    run(body())


def test_page_prefixes_are_known_after_a_restart() -> None:
    async def body() -> None:
        shelf = Shelf()
        space = namespace()
        async with storage(ram=4 * FRAME, below=[(shelf, {"capacity": 12 * FRAME})]) as manager:
            client = Client(manager, space)
            client.store(client.frames(chain(range(8))))
        async with storage(ram=4 * FRAME, below=[(shelf, {"capacity": 12 * FRAME})]) as manager:
            client = Client(manager, space)
            other = chain([*range(6), 77, 78])
            found = await client.look_up(other)
            assert (found.chunks, found.pages) == (1, 1)
            assert await client.load(found, other) == [True, True]
            client.ask(p.Release(found.lease))

    run(body())


def test_a4_and_a7_another_namespace_finds_nothing() -> None:
    async def body() -> None:
        shelf = Shelf()
        async with storage(ram=4 * FRAME, below=[(shelf, {"capacity": 12 * FRAME})]) as manager:
            keys = chain(range(8))
            mine = Client(manager, namespace())
            mine.store(mine.frames(keys))
            await mine.settled()
            shelf.calls.clear()
            for space in (namespace(model="other"), namespace(page_bytes=4000)):
                other = Client(manager, space)
                assert (await other.look_up(keys)).chunks == 0
            assert not shelf.calls, "nothing is read"
            assert manager.metrics.value("lmkv_misses_total", reason="namespace") == 4

    run(body())


def test_a41_clear() -> None:
    async def body() -> None:
        shelf = Shelf()
        async with storage(ram=4 * FRAME, below=[(shelf, {"capacity": 12 * FRAME})]) as manager:
            client = Client(manager, namespace())
            kept = Client(manager, namespace(model="second version"))
            keys, held = chain(range(8)), chain(range(100, 104))
            client.store(client.frames(keys))
            client.store(client.frames(held))
            kept.store(kept.frames(chain(range(4))))
            await client.settled()
            found = await client.look_up(held)
            cleared = client.ask(p.Clear(client.space.id))
            assert cleared.counts == {"ram": 3, "shelf1": 3}
            assert (await client.look_up(keys)).chunks == 0
            assert (await client.look_up(held)).chunks == 0, "out of sight at once"
            assert await client.load(found, held) == [True], "but the hold survives"
            client.ask(p.Release(found.lease))
            await client.settled()
            assert len(shelf.frames) == 1
            assert (await kept.look_up(chain(range(4)), hold=False)).chunks == 1
            with pytest.raises(ConfigError, match="no namespace"):
                client.ask(p.Clear(b"x" * 16))
            with pytest.raises(ConfigError, match="tiers: ram, shelf1"):
                client.ask(p.Clear(None, "rum"))
            assert nothing_held(manager)

    run(body())


def test_what_is_stored_again_while_the_cleared_one_is_held_stays() -> None:
    async def body() -> None:
        async with storage() as manager:
            client = Client(manager, namespace())
            keys = chain(range(8))
            client.store(client.frames(keys))
            found = await client.look_up(keys)
            client.ask(p.Clear())
            client.store(client.frames(keys))
            assert await client.load(found, keys) == [True, True]
            client.ask(p.Release(found.lease))
            again = await client.look_up(keys)
            assert again.chunks == 2
            assert await client.load(again, keys) == [True, True]
            client.ask(p.Release(again.lease))
            assert manager.tier("ram").used == 2 * FRAME

    run(body())


def test_a42_stop() -> None:
    async def body() -> None:
        shelf, silent = Shelf(), Shelf()
        gate = threading.Event()
        silent.on_put = lambda _: gate.wait(20) and None
        shelf.on_put = lambda _: time.sleep(0.01)
        deep = {"capacity": 999 * FRAME, "queue_calls": 999}
        below = [(shelf, deep), (silent, deep)]
        async with storage(ram=200 * FRAME, below=below) as manager:
            client = Client(manager, namespace())
            for start in range(100):
                client.store(client.frames(chain(range(start * 10, start * 10 + 4))))
            begin = time.monotonic()
            await manager.close(2.0)
            assert time.monotonic() - begin < 2.5
            await manager.close(2.0)
            assert time.monotonic() - begin < 2.6
            assert all(len(frame) == FRAME for frame in shelf.frames.values())
            gate.set()

    run(body())


def test_a30_entry_gone_behind_our_back() -> None:
    async def body() -> None:
        shelf = Shelf(shared=True)
        async with storage(ram=1 * FRAME, below=[(shelf, {})]) as manager:
            client = Client(manager, namespace())
            keys = chain(range(4))
            client.store(client.frames(keys))
            await client.settled()
            client.store(client.frames(chain(range(50, 54))))  # RAM holds one chunk only
            await client.settled()
            found = await client.look_up(keys)
            shelf.frames.clear()
            client.ask(p.Release(found.lease))
            await client.settled()
            client.ask(p.Clear(None, "ram"))
            assert (await client.look_up(keys)).chunks == 0
            client.store(client.frames(keys))
            assert (await client.look_up(keys, hold=False)).chunks == 1
            assert nothing_held(manager)

    run(body())


def test_a_shared_store_is_asked_in_one_round() -> None:
    async def body() -> None:
        shelf = Shelf(shared=True)
        async with storage(ram=8 * FRAME, below=[(shelf, {})]) as manager:
            client = Client(manager, namespace(shards=2))
            keys = chain(range(12))
            client.store(client.frames(keys), shards=[0, 1])
            await client.settled()
            client.ask(p.Clear(None, "ram"))
            assert not manager.index.namespace(client.space.id).entries, "what only the store has is not ours to index"
            shelf.calls.clear()
            found = await client.look_up(keys)
            assert found.chunks == 3
            assert [op for op, _ in shelf.calls].count("contains") == 1
            assert await client.load(found, keys, shard=0) == [True] * 3
            assert await client.load(found, keys, shard=1) == [True] * 3
            client.ask(p.Release(found.lease))
            assert (await client.look_up(chain([*range(10), 90, 91]), hold=False)).pages == 1, "prefixes were learnt"
            assert nothing_held(manager)

    run(body())


def test_tails_of_others_are_found_in_a_shared_store() -> None:
    """What one node stored of a prompt and its answer, another finds when the talk goes on: chunks and tail."""

    async def body() -> None:
        shelf = Shelf(shared=True)
        async with storage(below=[(shelf, {})]) as manager:
            client = Client(manager, namespace(shards=2))
            client.store(client.frames(chain(range(10)), tail=True), shards=[0, 1])  # two chunks, one page of the next
            client.store(client.frames(chain(range(50, 53)), tail=True), shards=[0, 1])  # one page
            await client.settled()
        async with storage(below=[(shelf, {})]) as manager:
            client = Client(manager, namespace(shards=2))
            for keys, chunks in ((chain(range(10)), 2), (chain(range(15)), 2), (chain(range(50, 59)), 0)):
                shelf.calls.clear()
                found = await client.look_up(keys)
                assert (found.chunks, found.pages) == (chunks, 1)
                assert [op for op, _ in shelf.calls].count("contains") <= 2
                for shard in (0, 1):
                    assert await client.load(found, keys, shard=shard) == [True] * (chunks + 1)
                client.ask(p.Release(found.lease))
            assert nothing_held(manager)
            shelf.calls.clear()
            found = await client.look_up(chain(range(70, 75)), hold=False)
            assert (found.chunks, found.pages) == (0, 0)
            assert not manager.index.namespace(client.space.id).entries.keys() & set(chain(range(70, 75)).digests)

    run(body())


def test_move_copy_and_recode() -> None:
    async def body() -> None:
        upper, lower = Shelf(), Shelf()
        fast, slow = {"name": "fast", "capacity": 9 * FRAME}, {"name": "slow", "capacity": 9 * FRAME, "write": "demote"}
        below = [(upper, fast), (lower, slow)]
        async with storage(ram=4 * FRAME, below=below) as manager:
            client = Client(manager, namespace())
            keys = chain(range(8))
            names = (client.space.id, b"".join(keys.digests))
            client.store(client.frames(keys))
            await client.settled()
            assert (await client.wait(p.Move(*names, "ram", "slow"))).count == 2
            assert manager.tier("ram").used == 0
            assert len(lower.frames) == 2
            assert (await client.wait(p.Move(*names, "fast", "ram", keep=True))).count == 2
            assert manager.tier("ram").used == 2 * FRAME
            assert len(upper.frames) == 2
            client.ask(p.Clear(None, "ram"))
            client.ask(p.Clear(None, "fast"))
            await client.settled()
            assert (await client.wait(p.Recode(*names, "slow", "zlib"))).count == 2
            client.ask(p.Clear(None, "ram"))
            found = await client.look_up(keys)
            assert await client.load(found, keys) == [True, True], "the same bytes through the codec"
            client.ask(p.Release(found.lease))
            assert (await client.wait(p.Recode(*names, "slow", "identity"))).count == 2
            with pytest.raises(ConfigError, match="both tier"):
                await client.wait(p.Move(*names, "slow", "slow"))
            with pytest.raises(ConfigError, match="as the engine needs them"):
                await client.wait(p.Recode(*names, "ram", "zlib"))
            assert nothing_held(manager)

    run(body())


def test_prefetch() -> None:
    async def body() -> None:
        shelf = Shelf()
        async with storage(ram=4 * FRAME, below=[(shelf, {"capacity": 12 * FRAME})]) as manager:
            client = Client(manager, namespace())
            keys = chain(range(8))
            client.store(client.frames(keys))
            await client.settled()
            client.ask(p.Clear(None, "ram"))
            assert client.ask(p.Prefetch(client.space.id, b"".join(keys.digests))).count == 2
            await client.settled()
            assert manager.tier("ram").used == 2 * FRAME

    run(body())


def test_what_cannot_fit_is_refused_with_the_numbers() -> None:
    async def body() -> None:
        async with storage(ram=2 * FRAME) as manager:
            with pytest.raises(ConfigError, match="raise its capacity"):
                Client(manager, namespace(page_bytes=1 << 20))

    run(body())


def test_bad_requests_are_refused() -> None:
    async def body() -> None:
        async with storage() as manager:
            client = Client(manager, namespace())
            frame = client.frames(chain(range(4)))[0]
            bad: list[p.Message] = [
                p.Lookup(client.space.id, b"123"),
                p.Reserve(client.space.id, 7, (frame,)),
                p.Reserve(client.space.id, 0, (p.NewFrame(frame.digest, b"", 9, b""),)),
                p.Reserve(client.space.id, 0, (p.NewFrame(b"short", b"", 2, frame.prefixes),)),
                p.Reserve(client.space.id, 0, (p.NewFrame(frame.digest, b"", 2, b""),)),
                p.Observe({"lmkv_pool_bytes": 1.0}),
                p.Observe({"lmkv_tier_bytes_total|tier=ram|op=get": 1.0}),
                p.Observe({"lmkv_hit_tokens_total|tier=made-up": 1.0}),
                p.Observe({"lmkv_misses_total|reason=made up": 1.0}),
                p.Observe({"lmkv_lookup_tokens_total|tier=ram": 1.0}),
                p.Observe({"lmkv_lookup_tokens_total|model=another": 1.0}),
                p.Observe({"lmkv_lookup_tokens_total": -1.0}),
                p.Observe({"lmkv_lookup_tokens_total": float("inf")}),
                p.Observe({"lmkv_lookup_tokens_total": float("nan")}),
                p.Ok(),
            ]
            for message in bad:
                with pytest.raises(ProtocolError):
                    client.ask(message)
            with pytest.raises(ConfigError, match="not registered"):
                client.ask(p.Lookup(b"y" * 16, b""))
            for stranger in (p.Done(77), p.Release(77), p.Commit(77), p.Abort(77), p.Trim(77, 1)):
                client.ask(stranger)
            assert client.ask(p.Acquire(77, 0, 0, 2)).reasons == ("expired", "expired")
            series = len(manager.metrics.snapshot())
            client.ask(p.Observe({"lmkv_hit_tokens_total|tier=ram": 4.0}))
            assert manager.metrics.value("lmkv_hit_tokens_total", tier="ram") == 4
            assert len(manager.metrics.snapshot()) == series + 1, "only what was counted has a series"

    run(body())


def test_a_traced_pool_names_who_still_holds_what(caplog: pytest.LogCaptureFixture) -> None:
    async def body() -> None:
        async with storage() as manager:
            manager.pool.allocate(5000, "forgetful")

    run(body())
    assert "still held: 5000 bytes" in caplog.text
    assert "forgetful" in caplog.text


def test_a_store_that_loses_a_frame_gets_it_again_and_one_that_lied_is_tidied() -> None:
    async def body() -> None:
        shelf = Shelf()
        async with storage(ram=4 * FRAME, below=[(shelf, {"capacity": 9 * FRAME})]) as manager:
            client = Client(manager, namespace())
            keys = chain(range(8))
            client.store(client.frames(keys))
            await client.settled()
            client.ask(p.Clear(None, "ram"))
            shelf.on_get = lambda asked: [MISS for _ in asked]
            found = await client.look_up(keys)
            assert await client.load(found, keys) == [False, False]
            client.ask(p.Release(found.lease))
            shelf.on_get = lambda _: None
            client.store(client.frames(keys)[:1])  # at once: nothing that is under way takes it away again
            await client.settled()
            manager.tier("shelf1").tidy()
            await client.settled()
            assert [key.digest for key in shelf.frames] == keys.digests[:1], "the other had stayed there uncounted"
            assert manager.tier("shelf1").used == FRAME

    run(body())
