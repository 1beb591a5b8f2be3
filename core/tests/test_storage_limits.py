"""What the storage refuses or bounds: read-only tiers, clients that have gone, trailers that are cut off."""

from __future__ import annotations

import asyncio
import threading
import time
from typing import TYPE_CHECKING, Any

import pytest
from storage_rig import FRAME, Client, Shelf, chain, namespace, storage

from lmkv.errors import BackendError, ConfigError
from lmkv.keys import Extras, KeyChain, Namespace
from lmkv.memory import MemoryObject
from lmkv.service import protocol as p
from lmkv.storage import demotion
from lmkv.storage.driver import DEMOTE, QUEUED, RUNNING, STORE, Driver
from lmkv.types import Capabilities

if TYPE_CHECKING:
    from collections.abc import Coroutine, Sequence

    from lmkv.types import ChunkKey


def run(coroutine: Coroutine[Any, Any, None]) -> None:
    asyncio.run(coroutine)


def prompt(number: int) -> KeyChain:
    """One chunk, another one for each number."""
    return chain(range(number * 10, number * 10 + 4))


def test_a_look_up_of_a_client_that_has_gone_leaves_no_lease() -> None:
    async def body() -> None:
        shelf, gate = Shelf(shared=True), threading.Event()
        async with storage(below=[(shelf, {})]) as manager:
            client, other = Client(manager, namespace()), Client(manager, namespace(), "other")
            other.store(other.frames(chain(range(8))))
            await other.settled()

            def slow(_: Sequence[ChunkKey]) -> None:
                gate.wait(5)

            shelf.on_contains = slow
            digests = b"".join(chain(range(12)).digests)
            asking = asyncio.ensure_future(client.wait(p.Lookup(client.space.id, digests)))
            await asyncio.sleep(0.05)
            client.session.close()
            gate.set()
            await asyncio.wait([asking])
            assert manager.holds()["leases"] == 0
            assert manager.holds()["entries"] == 0

    run(body())


def test_a_read_only_tier_stays_as_it_is() -> None:
    async def body() -> None:
        shelf = Shelf()
        async with storage(below=[(shelf, {"capacity": 40 * FRAME})]) as manager:
            client = Client(manager, namespace())
            for i in range(6):
                client.store(client.frames(prompt(i)))
                await client.settled()
        frames, used = dict(shelf.frames), dict(shelf.used)
        shelf.described.clear()
        async with storage(below=[(shelf, {"capacity": 3 * FRAME, "write": "never"})]) as manager:
            client = Client(manager, namespace())
            keys = prompt(100)
            client.store(client.frames(keys))
            digest = keys.digests[0]
            with pytest.raises(ConfigError, match="'shelf1' is read-only"):
                await client.wait(p.Move(client.space.id, digest, "ram", "shelf1", True))
            there = prompt(5)
            with pytest.raises(ConfigError, match="'shelf1' is read-only"):
                await client.wait(p.Move(client.space.id, there.digests[0], "shelf1", "ram"))
            with pytest.raises(ConfigError, match="'shelf1' is read-only"):
                await client.wait(p.Recode(client.space.id, there.digests[0], "shelf1", "zlib"))
            found = await client.look_up(there)
            assert await client.load(found, there) == [True]
            client.ask(p.Release(found.lease))
            copied = await client.wait(p.Move(client.space.id, prompt(4).digests[0], "shelf1", "ram", True))
            assert copied.count == 1
            await client.settled()
        assert (shelf.frames, shelf.used, shelf.described) == (frames, used, {})

    run(body())


def test_a_backend_that_lists_cut_off_trailers_loses_nothing(caplog: pytest.LogCaptureFixture) -> None:
    """128 pages: 127 page prefixes make a trailer of more than the 4 KiB that `Shelf` lists."""

    async def body() -> None:
        pages, tokens, nbytes = 128, 16, 64
        layout = {"name": "rig", "dtype": "bf16", "page_tokens": tokens, "runs": [nbytes], "tags": []}
        space = Namespace(
            model="m", revision="r", kv_dtype="bf16", layouts=(layout,),  # type: ignore[arg-type]
            page_bytes=(nbytes,), chunk_tokens=tokens * pages, page_tokens=tokens,
        )  # fmt: skip
        keys = KeyChain(tokens * pages, tokens, Extras())
        keys.extend(list(range(tokens * pages * 2)))
        shelf = Shelf()
        for turn in range(2):
            async with storage(ram=1 << 20, staging=1 << 20, below=[(shelf, {"capacity": 1 << 28})]) as manager:
                client = Client(manager, space)
                if not turn:
                    client.store(client.frames(keys))
                    await client.settled()
                found = await client.look_up(keys)
                assert await client.load(found, keys) == [True, True]
                assert not manager.metrics.value("lmkv_corrupt_frames_total")
        assert not shelf.aside

    run(body())
    assert "2 frames with less than their trailers" in caplog.text


async def stored(client: Client, prompts: Sequence[KeyChain]) -> None:
    for keys in prompts:
        client.store(client.frames(keys))
        await client.settled()


async def loaded(client: Client, keys: KeyChain) -> bool:
    found = await client.look_up(keys)
    if not found.chunks:
        return False
    try:
        return all(await client.load(found, keys))
    finally:
        client.ask(p.Release(found.lease))


def test_loads_that_fail_close_the_way_for_loads_only() -> None:
    async def body() -> None:
        shelf = Shelf()
        below = [(shelf, {"capacity": 40 * FRAME, "failures": 3, "probe": 60.0})]
        async with storage(ram=None, pool=8 * FRAME, below=below) as manager:
            client = Client(manager, namespace())
            await stored(client, [prompt(i) for i in range(6)])

            def broken(_: Sequence[ChunkKey]) -> None:
                raise BackendError("it is broken")

            shelf.on_get = broken
            for i in range(3):
                assert not await loaded(client, prompt(i))
            shelf.calls.clear()
            for i in range(3, 6):
                assert not await loaded(client, prompt(i))
            assert not shelf.calls
            assert manager.metrics.value("lmkv_misses_total", reason="tier_open") == 3
            await stored(client, [prompt(7)])
            assert ("put", 1) in shelf.calls, "stores go on"

    run(body())


def test_stores_that_fail_close_the_way_for_stores_only() -> None:
    async def body() -> None:
        shelf = Shelf()
        below = [(shelf, {"capacity": 40 * FRAME, "failures": 3, "probe": 60.0})]
        async with storage(ram=None, pool=8 * FRAME, below=below) as manager:
            client = Client(manager, namespace())
            await stored(client, [prompt(0)])

            def full(_: Sequence[ChunkKey]) -> None:
                raise BackendError("it is full")

            shelf.on_put = full
            await stored(client, [prompt(i) for i in range(1, 4)])
            shelf.calls.clear()
            await stored(client, [prompt(4)])
            assert ("put", 1) not in shelf.calls
            assert await loaded(client, prompt(0)), "loads go on"

    run(body())


def test_damaged_frames_are_no_sign_of_illness() -> None:
    async def body() -> None:
        shelf = Shelf()
        below = [(shelf, {"capacity": 40 * FRAME, "failures": 2, "probe": 60.0})]
        async with storage(ram=None, pool=8 * FRAME, below=below) as manager:
            client = Client(manager, namespace())
            await stored(client, [prompt(i) for i in range(6)])
            whole = prompt(5).digests[0]
            for key, frame in list(shelf.frames.items()):
                if key.digest != whole:
                    shelf.frames[key] = bytes([frame[0] ^ 1]) + frame[1:]
            for i in range(5):
                assert not await loaded(client, prompt(i))
            assert manager.metrics.value("lmkv_corrupt_frames_total") == 5
            assert await loaded(client, prompt(5))

    run(body())


def test_stores_that_wait_are_written_before_the_end() -> None:
    async def body() -> None:
        shelf = Shelf()

        def slow(_: Sequence[ChunkKey]) -> None:
            time.sleep(0.03)

        shelf.on_put = slow
        async with storage(ram=30 * FRAME, below=[(shelf, {"capacity": 40 * FRAME})]) as manager:
            client = Client(manager, namespace())
            for i in range(20):
                client.store(client.frames(prompt(i)))
            assert len(shelf.frames) < 20
            await manager.close(10.0)
            assert len(shelf.frames) == 20

    run(body())


def test_the_use_of_frames_is_remembered_over_a_restart() -> None:
    async def body() -> None:
        shelf = Shelf()
        async with storage(ram=2 * FRAME, below=[(shelf, {"capacity": 40 * FRAME})]) as manager:
            client = Client(manager, namespace())
            await stored(client, [prompt(i) for i in range(6)])
            assert await loaded(client, prompt(0))
            await client.settled()
        async with storage(ram=2 * FRAME, below=[(shelf, {"capacity": 2 * FRAME})]) as manager:
            client = Client(manager, namespace())
            await client.settled()
            assert {key.digest for key in shelf.frames} == {prompt(0).digests[0], prompt(5).digests[0]}

    run(body())


def test_frames_that_a_backend_cannot_take_are_not_sent() -> None:
    async def body() -> None:
        shelf = Shelf()
        shelf.capabilities = Capabilities(scan=True, persistent=True, parallelism=2, max_frame_bytes=FRAME - 1)
        async with storage(below=[(shelf, {"capacity": 40 * FRAME})]) as manager:
            client = Client(manager, namespace())
            await stored(client, [prompt(0)])
            assert ("put", 1) not in shelf.calls
            assert manager.metrics.value("lmkv_tier_dropped_writes_total", reason="not_taken") == 1

    run(body())


def test_copies_ahead_of_evictions_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demotion, "UNDER_WAY_BYTES", 3 * FRAME)

    async def body() -> None:
        shelf, gate = Shelf(), threading.Event()

        def blocked(_: Sequence[ChunkKey]) -> None:
            gate.wait(10)

        shelf.on_put = blocked
        below = [(shelf, {"capacity": 99 * FRAME, "write": "demote", "deadline": 20.0})]
        async with storage(ram=20 * FRAME, below=below) as manager:
            client = Client(manager, namespace())
            for i in range(20):
                client.store(client.frames(prompt(i)))
            await asyncio.sleep(0.1)
            try:
                writes = [
                    part.writes
                    for entry in manager.index.namespace(client.space.id).entries.values()
                    for part in entry.shards.values()
                ]
                assert sum(writes) == 3
            finally:
                gate.set()
            await client.settled()
            assert len(shelf.frames) >= 9, "and they go on"

    run(body())


def test_a_driver_takes_no_more_bytes_than_it_may() -> None:
    driver, gate = Driver("t", threads=1, max_calls=99, max_bytes=1000), threading.Event()
    started = threading.Event()
    try:
        driver.submit(lambda: started.set() or gate.wait(10), done=lambda *_: None)
        assert started.wait(10)
        objects = [MemoryObject.over(bytearray(600)) for _ in range(3)]
        taken = [driver.submit(lambda: None, done=lambda *_: None, objects=[obj]) is not None for obj in objects[:2]]
        assert taken == [True, False]
        load = driver.submit(lambda: None, done=lambda *_: None, objects=objects[2:], priority=QUEUED)
        assert load is not None, "loads have a queue of their own"
    finally:
        gate.set()
        assert driver.close(10)
    assert [obj.count for obj in objects] == [1, 1, 1]


def test_a_driver_does_first_what_is_most_urgent() -> None:
    driver, gate = Driver("t", threads=1, max_calls=99, max_bytes=1000), threading.Event()
    started, order, over = threading.Event(), [], threading.Event()
    try:
        driver.submit(lambda: started.set() or gate.wait(10), done=lambda *_: None)
        assert started.wait(10)
        for priority in (DEMOTE, STORE, QUEUED, RUNNING):
            driver.submit(lambda priority=priority: order.append(priority), done=lambda *_: None, priority=priority)
        driver.submit(over.set, done=lambda *_: None, priority=DEMOTE + 1)
        gate.set()
        assert over.wait(10)
    finally:
        gate.set()
        driver.close(10)
    assert order == [RUNNING, QUEUED, STORE, DEMOTE]


def test_a_shared_store_is_cleared_by_who_names_it() -> None:
    async def body() -> None:
        shelf = Shelf(shared=True)
        cleared: list[bytes | None] = []

        def clear(space: bytes | None = None) -> None:
            cleared.append(space)
            for key in [key for key in shelf.frames if space in {None, key.namespace}]:
                del shelf.frames[key]

        shelf.clear = clear  # type: ignore[method-assign]
        async with storage(below=[(shelf, {"name": "shared", "deadline": 1.0})]) as manager:
            client, other = Client(manager, namespace()), Client(manager, namespace(model="other"))
            for each in (client, other):
                await stored(each, [prompt(0), prompt(1)])
            await client.wait(p.Clear(client.space.id))
            await client.settled()
            assert not cleared, "it may be of use to others"
            await client.wait(p.Clear(client.space.id, "shared"))
            assert cleared == [client.space.id]
            assert {key.namespace for key in shelf.frames} == {other.space.id}

            def broken(_: bytes | None = None) -> None:
                raise BackendError("it is broken")

            shelf.clear = broken  # type: ignore[method-assign]
            with pytest.raises(BackendError, match=r"'shared' was not cleared.*it is broken"):
                await client.wait(p.Clear(None, "shared"))

    run(body())
