"""What waits for a tier: bounded in calls, bytes and seconds; loads before stores; the newest stores are dropped."""

from __future__ import annotations

import asyncio
import threading
import time
from typing import TYPE_CHECKING, Any

import pytest
from storage_rig import FRAME, Client, Shelf, chain, namespace, storage

from lmkv.frame import verify
from lmkv.service import protocol as p
from lmkv.storage.driver import Driver
from lmkv.types import Health, HealthState

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    from lmkv.storage.driver import Call


def run(coroutine: Coroutine[Any, Any, None]) -> None:
    asyncio.run(coroutine)


def test_a19_two_seconds_of_work() -> None:
    """A store that takes 200 ms for a frame may have 2 s of work: ten frames, one of which it has in hand."""

    async def body() -> None:
        shelf = Shelf()
        shelf.on_put = lambda _: time.sleep(0.2)
        settings = {"capacity": 10_000 * FRAME, "queue_calls": 400, "queue_seconds": 2.0, "threads": 1}
        async with storage(ram=600 * FRAME, below=[(shelf, settings)]) as manager:
            client = Client(manager, namespace())
            tier = manager.tier("shelf1")
            client.store(client.frames(chain(range(4))))
            await client.settled()
            chains = [chain(range(start * 10, start * 10 + 4)) for start in range(1, 500)]
            longest, times = 0, []
            for keys in chains:
                begin = time.perf_counter()
                client.store(client.frames(keys))
                times.append(time.perf_counter() - begin)
                longest = max(longest, tier.queue()[0])
                await asyncio.sleep(0.002)
            assert sorted(times)[250] < 0.005
            assert 5 <= longest <= 10
            dropped = manager.metrics.value("lmkv_tier_dropped_writes_total", reason="seconds")
            assert dropped >= 400
            await manager.close(5.0)
            assert len(shelf.frames) == 500 - dropped
            assert manager.metrics.value("lmkv_tier_dropped_writes_total") == dropped

    run(body())


def test_stores_that_wait_are_dropped_when_the_tier_turns_out_to_be_slow() -> None:
    async def body() -> None:
        shelf = Shelf()
        shelf.on_put = lambda _: time.sleep(0.1)
        settings = {"capacity": 10_000 * FRAME, "queue_calls": 400, "queue_seconds": 0.5, "threads": 1}
        async with storage(ram=600 * FRAME, below=[(shelf, settings)]) as manager:
            client = Client(manager, namespace())
            chains = [chain(range(start * 10, start * 10 + 4)) for start in range(50)]
            for keys in chains:
                client.store(client.frames(keys))
            await client.settled()
            assert 1 <= len(shelf.frames) <= 6
            assert manager.metrics.value("lmkv_tier_dropped_writes_total", reason="seconds") == 50 - len(shelf.frames)
            await client.wait(p.Clear(None, "ram"))
            there = [(await client.look_up(keys, hold=False)).chunks for keys in chains]
            assert sum(there) == len(shelf.frames)
            assert there[0] == 1, "the newest are dropped, not the oldest"
            assert not any(there[len(shelf.frames) :])

    run(body())


def test_a_store_waits_no_longer_than_it_may() -> None:
    async def body() -> None:
        shelf, gate = Shelf(), threading.Event()
        shelf.on_put = lambda _: gate.wait(10) and None
        settings = {"capacity": 100 * FRAME, "queue_seconds": 0.2, "threads": 1, "deadline": 5.0}
        async with storage(ram=60 * FRAME, below=[(shelf, settings)]) as manager:
            client = Client(manager, namespace())
            client.store(client.frames(chain(range(12))))
            await asyncio.sleep(0.4)
            assert manager.tier("shelf1").queue() == (0, 0)
            assert manager.metrics.value("lmkv_tier_dropped_writes_total", reason="seconds") == 2
            gate.set()
            await client.settled()
            assert len(shelf.frames) == 1

    run(body())


def _hang(gate: threading.Event) -> Callable[..., Any]:
    return lambda *_: gate.wait(20) and None


@pytest.mark.parametrize("where", ["put", "get", "contains", "health", "close", "slow puts"])
def test_a42_a_silent_remote_holds_up_no_end(where: str) -> None:
    """100 stores wait, the store says nothing any more: the end comes in time, and again at once."""

    async def body() -> None:
        shelf, gate = Shelf(shared=True), threading.Event()
        settings = {"queue_calls": 200, "queue_seconds": 60.0, "deadline": 30.0, "threads": 2}
        async with storage(ram=300 * FRAME, below=[(shelf, settings)]) as manager:
            client = Client(manager, namespace())
            stored = chain(range(16))
            client.store(client.frames(stored))
            await client.settled()
            await client.wait(p.Clear(None, "ram"))
            waiting: list[asyncio.Future[Any]] = []
            if where == "contains":
                shelf.on_contains = _hang(gate)
                waiting = [asyncio.ensure_future(client.look_up(chain(range(n, n + 8)))) for n in range(100, 900, 100)]
            elif where == "get":
                shelf.on_get = _hang(gate)
                found = await client.look_up(stored)
                waiting = [asyncio.ensure_future(client.load(found, stored))]
            elif where == "health":
                shelf.on_health = lambda: (gate.wait(20), Health(HealthState.OK))[1]
                manager.tier("shelf1").look()
            elif where == "close":
                shelf.close = _hang(gate)  # type: ignore[method-assign]
            elif where == "put":
                shelf.on_put = _hang(gate)
            else:
                shelf.on_put = lambda _: time.sleep(0.3)
            for start in range(1000, 2000, 10):
                client.store(client.frames(chain(range(start, start + 4))))
            await asyncio.sleep(0.05)
            begin = time.monotonic()
            await manager.close(1.0)
            assert time.monotonic() - begin < 1.5
            await manager.close(1.0)
            assert time.monotonic() - begin < 1.6, "the second time there is nothing left to wait for"
            gate.set()
            await asyncio.gather(*waiting, return_exceptions=True)
            for key, frame in shelf.frames.items():
                verify(memoryview(frame), key)

    run(body())


def test_a_flood_of_stores_keeps_out_no_load() -> None:
    async def body() -> None:
        shelf = Shelf()
        settings = {"capacity": 1000 * FRAME, "queue_calls": 8, "threads": 1, "deadline": 5.0}
        async with storage(ram=60 * FRAME, below=[(shelf, settings)]) as manager:
            client = Client(manager, namespace())
            keys = chain(range(8))
            client.store(client.frames(keys))
            await client.settled()
            await client.wait(p.Clear(None, "ram"))
            shelf.on_put = lambda _: time.sleep(0.1)
            for start in range(100, 400, 10):
                client.store(client.frames(chain(range(start, start + 4))))
            assert manager.tier("shelf1").queue()[0] == 8
            begin = time.monotonic()
            found = await client.look_up(keys)
            assert await client.load(found, keys) == [True, True]
            assert time.monotonic() - begin < 0.6, "it waits for the store that runs, not for those that wait"
            client.ask(p.Release(found.lease))

    run(body())


def test_a_tier_is_busy_until_its_books_are_right(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its call has returned, but the loop does not know it yet: the frame cannot be evicted, nor is it counted."""
    returned, go_on = threading.Event(), threading.Event()
    plain = Driver._returned

    def slowly(driver: Driver, call: Call) -> None:
        plain(driver, call)
        returned.set()
        go_on.wait(10.0)

    async def body() -> None:
        async with storage(below=[(Shelf(), {"capacity": 10 * FRAME})]) as manager:
            client, tier = Client(manager, namespace()), manager.tier("shelf1")
            monkeypatch.setattr(Driver, "_returned", slowly)
            try:
                client.store(client.frames(chain(range(4))))
                assert await asyncio.to_thread(returned.wait, 10.0)
                assert tier.busy
                assert not tier.index
            finally:
                go_on.set()
            await client.settled()
            assert len(tier.index) == 1

    run(body())
