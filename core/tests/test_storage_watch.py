"""Tiers that are off: no request goes there or pays for finding out, and they come back by themselves."""

from __future__ import annotations

import asyncio
import threading
import time
from typing import TYPE_CHECKING, Any

import pytest
from storage_rig import FRAME, Client, Shelf, chain, namespace, storage

from lmkv.errors import BackendError
from lmkv.service import protocol as p
from lmkv.storage.breaker import Breaker, State
from lmkv.types import Health, HealthState, MissReason

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    from lmkv.storage import StorageManager

DEADLINE = 0.3
OWN: dict[str, Any] = {"capacity": 100 * FRAME, "deadline": DEADLINE, "failures": 2, "probe": 0.05}
SHARED: dict[str, Any] = {"deadline": DEADLINE, "failures": 2, "probe": 0.05}


def run(coroutine: Coroutine[Any, Any, None]) -> None:
    asyncio.run(coroutine)


async def until(good: Callable[[], bool], seconds: float = 10.0) -> None:
    end = time.monotonic() + seconds
    while not good():
        assert time.monotonic() < end, "it never came about"
        await asyncio.sleep(0.005)


def ill(*_: object) -> Any:
    raise BackendError("no route")


def state(manager: StorageManager, tier: str = "shelf1") -> tuple[object, str]:
    health = manager.health()[1][tier]
    return health["state"], str(health["detail"])


async def below_ram(client: Client, start: int = 0) -> Any:
    """A prompt of two chunks that lies in the tier below RAM only."""
    keys = chain(range(start, start + 8))
    client.store(client.frames(keys))
    await client.settled()
    await client.wait(p.Clear(None, "ram"))
    return keys


def test_a_breaker_counts_opens_and_tries() -> None:
    opened: list[int] = []
    reads, writes = Breaker(2), Breaker(2, background=True)
    reads.opened = lambda: opened.append(1)
    for breaker in (reads, writes):
        breaker.failed()
        breaker.succeeded()
        breaker.failed()
        assert breaker.allow()
        breaker.failed()
        assert breaker.open
        assert not breaker.allow()
        breaker.retry()
        assert breaker.state is State.TRIAL
    assert opened == [1]
    assert reads.allow()
    assert reads.allow(), "a request may need several calls"
    reads.failed()
    assert reads.open, "on trial one failure is enough"
    assert writes.allow()
    assert not writes.allow(), "one store at a time"
    writes.untold()
    assert writes.allow()
    writes.succeeded()
    assert writes.state is State.CLOSED


def test_an_open_tier_is_asked_in_the_background_only() -> None:
    async def body() -> None:
        shelf = Shelf()
        async with storage(below=[(shelf, OWN)]) as manager:
            client = Client(manager, namespace())
            keys = await below_ram(client)
            shelf.on_get = shelf.on_health = ill  # type: ignore[assignment]
            for _ in range(2):
                found = await client.look_up(keys)
                assert await client.load(found, keys) == [False, False]
                client.ask(p.Release(found.lease))
            assert state(manager)[0] == "down"
            assert "no route" in state(manager)[1]
            shelf.calls.clear()
            shelf.asked = 0
            for _ in range(50):
                found = await client.look_up(keys)
                assert (found.chunks, found.lease) == (0, 0), "what cannot be loaded is not offered"
            assert manager.metrics.value("lmkv_misses_total", reason="tier_open") >= 100
            await until(lambda: shelf.asked >= 2)
            assert shelf.calls == [], "no request went there"
            shelf.on_get, shelf.on_health = (lambda _: None), (lambda: Health(HealthState.OK))
            await until(lambda: state(manager)[0] == "ok")
            found = await client.look_up(keys)
            assert await client.load(found, keys) == [True, True]
            client.ask(p.Release(found.lease))
            asked = shelf.asked
            await asyncio.sleep(0.2)
            assert shelf.asked == asked, "a tier that works is not asked"

    run(body())


def test_a_backend_that_only_says_that_it_is_well_stays_off() -> None:
    async def body() -> None:
        shelf = Shelf()
        async with storage(below=[(shelf, OWN)]) as manager:
            client = Client(manager, namespace())
            keys = await below_ram(client)
            shelf.on_get = ill
            for _ in range(2):
                found = await client.look_up(keys)
                await client.load(found, keys)
                client.ask(p.Release(found.lease))
            await until(lambda: shelf.asked >= 3)
            assert state(manager)[0] == "down", "health is fine, but loads are not"

    run(body())


def test_a27_down_from_the_start() -> None:
    async def body() -> None:
        shelf = Shelf(shared=True)
        shelf.on_get = shelf.on_put = ill
        shelf.on_contains = ill
        shelf.on_health = lambda: Health(HealthState.DOWN, "connection refused")
        async with storage(below=[(shelf, SHARED)]) as manager:
            manager.tier("shelf1").look()  # as a start does
            await until(lambda: state(manager)[0] == "down")
            assert "connection refused" in state(manager)[1]
            client = Client(manager, namespace())
            keys = chain(range(8))
            assert (await client.look_up(keys)).chunks == 0
            client.store(client.frames(keys))
            await client.settled()
            assert shelf.calls == []
            assert manager.metrics.value("lmkv_tier_dropped_writes_total", reason="open") == 2
            shelf.on_get = shelf.on_put = lambda _: None
            shelf.on_contains = lambda _: None
            shelf.on_health = lambda: Health(HealthState.OK)
            await until(lambda: state(manager)[0] == "ok")
            client.store(client.frames(chain(range(100, 104))))
            await client.settled()
            assert len(shelf.frames) == 1

    run(body())


@pytest.mark.parametrize("op", ["get", "contains"])
def test_a27_silent_store_takes_one_deadline_and_all_threads(op: str) -> None:
    """Calls that never return: with more failures to go than threads, the tier is off after one deadline."""

    async def body() -> None:
        shelf, gate = Shelf(shared=True), threading.Event()
        async with storage(below=[(shelf, SHARED | {"failures": 100})]) as manager:
            client = Client(manager, namespace())
            keys = await below_ram(client)

            def silent(*_: object) -> None:
                gate.wait(20)

            shelf.on_contains = silent
            shelf.on_get = silent if op == "get" else shelf.on_get
            shelf.on_health = lambda: (gate.wait(20), Health(HealthState.OK))[1]
            begin = time.monotonic()
            asked = [asyncio.ensure_future(client.look_up(keys, hold=False)) for _ in range(6)]
            assert [found.chunks for found in await asyncio.gather(*asked)] == [0] * 6
            assert time.monotonic() - begin < 4 * DEADLINE
            assert state(manager)[0] == "down"
            begin = time.monotonic()
            for _ in range(20):
                assert (await client.look_up(keys, hold=False)).chunks == 0
            assert time.monotonic() - begin < DEADLINE, "no request waits any more"
            await asyncio.sleep(0.3)
            assert shelf.asked <= 1, "all threads hang: the question waits, and is not asked again"
            gate.set()
            await until(lambda: state(manager)[0] == "ok")
            found = await client.look_up(keys)
            assert await client.load(found, keys) == [True, True]
            client.ask(p.Release(found.lease))

    run(body())


def test_a_question_that_hangs_takes_one_thread_and_no_other_tier() -> None:
    async def body() -> None:
        hung, well, gate = Shelf(), Shelf(), threading.Event()
        async with storage(below=[(hung, OWN | {"write": "never"}), (well, OWN)]) as manager:
            client = Client(manager, namespace())
            hung.on_health = lambda: (gate.wait(20), Health(HealthState.OK))[1]
            manager.tier("shelf1").look()
            await until(lambda: state(manager)[0] == "down")
            assert "no answer" in state(manager)[1]
            keys = await below_ram(client)
            found = await client.look_up(keys)
            assert await client.load(found, keys) == [True, True]
            client.ask(p.Release(found.lease))
            await asyncio.sleep(0.3)
            assert hung.asked == 1
            gate.set()
            await until(lambda: state(manager)[0] == "ok")

    run(body())


def test_stores_come_back_one_at_a_time() -> None:
    async def body() -> None:
        shelf, gate = Shelf(), threading.Event()
        async with storage(ram=40 * FRAME, below=[(shelf, OWN)]) as manager:
            client = Client(manager, namespace())
            shelf.on_put = ill
            for start in (0, 100):
                client.store(client.frames(chain(range(start, start + 4))))
                await client.settled()
            assert state(manager) == ("degraded", "takes no stores after failures; last: put: BackendError: no route")
            await until(lambda: manager.tier("shelf1").writable)
            shelf.calls.clear()
            shelf.on_put = lambda _: gate.wait(10) and None
            for start in range(200, 260, 10):
                client.store(client.frames(chain(range(start, start + 4))))
            await until(lambda: shelf.calls == [("put", 1)])
            await asyncio.sleep(0.05)
            assert shelf.calls == [("put", 1)], "the others wait for what becomes of it: they are dropped"
            gate.set()
            await client.settled()
            for start in range(300, 330, 10):
                client.store(client.frames(chain(range(start, start + 4))))
            await client.settled()
            assert len(shelf.frames) == 4
            assert state(manager) == ("ok", "")

    run(body())


@pytest.mark.parametrize("op", ["put", "contains"])
def test_what_waits_when_a_breaker_opens_goes_nowhere(op: str) -> None:
    """Neither stores nor look-ups that were queued while the store was still taken for well."""

    async def body() -> None:
        shelf, gate = Shelf(shared=True), threading.Event()
        settings = SHARED | {"deadline": 20.0, "threads": 2, "probe": 20.0}
        async with storage(ram=40 * FRAME, below=[(shelf, settings)]) as manager:
            client = Client(manager, namespace())

            def fails(*_: object) -> None:
                gate.wait(10)
                time.sleep(0.05)
                raise BackendError("no route")

            shelf.on_put = shelf.on_contains = fails
            prompts = [chain(range(start, start + 4)) for start in range(0, 160, 10)]
            if op == "put":
                for keys in prompts:
                    client.store(client.frames(keys))
            looks = [asyncio.ensure_future(client.look_up(keys)) for keys in prompts if op == "contains"]
            await until(lambda: len(shelf.calls) == 2)
            gate.set()
            await asyncio.gather(*looks)
            await client.settled()
            assert not manager.tier("shelf1").queue()[0]
            assert {name for name, _ in shelf.calls} == {op}
            assert len(shelf.calls) <= 4, "two failed; two may have been under way by then"
            dropped = manager.metrics.value("lmkv_tier_dropped_writes_total", tier="shelf1", reason="open")
            refused = manager.metrics.value("lmkv_tier_operations_total", tier="shelf1", op=op, outcome="open")
            assert refused >= 12
            assert dropped == (refused if op == "put" else 0)

    run(body())


def test_deletes_and_descriptions_wait_until_the_tier_is_back() -> None:
    async def body() -> None:
        shelf = Shelf()
        async with storage(below=[(shelf, OWN)], lease_seconds=0.4) as manager:
            client = Client(manager, namespace())
            await below_ram(client)
            shelf.on_health = lambda: Health(HealthState.DOWN, "away")
            manager.tier("shelf1").look()
            await until(lambda: state(manager)[0] == "down")
            other = Client(manager, namespace(model="other"))
            await client.wait(p.Clear())
            await client.settled()
            assert len(shelf.frames) == 2
            assert other.space.id not in shelf.described
            assert manager.tier("shelf1").used == 0, "out of the books at once"
            shelf.on_health = lambda: Health(HealthState.OK)
            await until(lambda: not shelf.frames and other.space.id in shelf.described)

    run(body())


def test_what_lies_in_another_tier_too_is_offered() -> None:
    async def body() -> None:
        first, second = Shelf(), Shelf()
        async with storage(below=[(first, OWN), (second, OWN)]) as manager:
            client = Client(manager, namespace())
            keys = await below_ram(client)
            first.on_health = lambda: Health(HealthState.DOWN, "away")
            first.on_get = ill
            manager.tier("shelf1").look()
            await until(lambda: state(manager)[0] == "down")
            found = await client.look_up(keys)
            assert found.chunks == 2
            assert await client.load(found, keys) == [True, True]
            client.ask(p.Release(found.lease))
            assert manager.metrics.value("lmkv_misses_total", reason=MissReason.TIER_OPEN.value) == 0

    run(body())


def test_a_good_answer_that_comes_too_late_is_none() -> None:
    async def body() -> None:
        shelf = Shelf()
        async with storage(below=[(shelf, OWN)]) as manager:
            client = Client(manager, namespace())
            keys = await below_ram(client)
            shelf.on_get = ill
            for _ in range(2):
                found = await client.look_up(keys)
                await client.load(found, keys)
                client.ask(p.Release(found.lease))
            shelf.on_get = lambda _: None

            def slow() -> Health:
                time.sleep(2 * DEADLINE)
                return Health(HealthState.OK)

            shelf.on_health = slow
            asked = shelf.asked
            await until(lambda: shelf.asked >= asked + 3)
            assert state(manager)[0] == "down"

    run(body())
