"""What is offered: the prefix that saves most, by what the tiers cost and how fast the engine computes."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Any

import pytest
from storage_rig import CHUNK_TOKENS, FRAME, Client, Shelf, chain, namespace, storage

from lmkv.errors import BackendError
from lmkv.service import protocol as p
from lmkv.storage import load_queue, loads, offers
from lmkv.storage.cost import Cost
from lmkv.storage.offers import Rules, Timetable
from lmkv.types import FAILED

if TYPE_CHECKING:
    from collections.abc import Coroutine

    from lmkv.keys import KeyChain
    from lmkv.storage import StorageManager


def run(coroutine: Coroutine[Any, Any, None]) -> None:
    asyncio.run(coroutine)


@pytest.fixture(autouse=True)
def one_frame_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """As it is with frames of a real size."""
    monkeypatch.setattr(loads, "BATCH_FRAMES", 1)


SETTINGS: dict[str, Any] = {"capacity": 1000 * FRAME, "threads": 1, "deadline": 10.0}


def teach(manager: StorageManager, latency: float, each: float, *, ago: float = 0.0) -> None:
    """A load takes `latency` seconds, and `each` seconds more for a frame; so it was until `ago` seconds ago."""
    cost = Cost()
    took = [(frames, latency + frames * each) for frames in (1, 4, 2, 8, 3, 6, 1, 4)]
    began = time.monotonic() - ago - sum(seconds for _, seconds in took)
    for frames, seconds in took:
        cost.note(frames * FRAME, began, began + seconds)
        began += seconds
    calls = manager.tier("shelf1")._calls
    assert calls is not None
    calls.costs["get"] = cost


async def below_ram(client: Client, chunks: int, start: int = 0) -> KeyChain:
    keys = chain(range(start, start + chunks * CHUNK_TOKENS))
    for first in range(0, chunks, 4):
        client.store(client.frames(keys)[first : first + 4])
        await client.settled()
    await client.wait(p.Clear(None, "ram"))
    return keys


def test_what_is_computed_sooner_is_withheld_and_counted() -> None:
    async def body() -> None:
        shelf = Shelf()
        async with storage(ram=60 * FRAME, below=[(shelf, SETTINGS)]) as manager:
            client = Client(manager, namespace())
            keys = await below_ram(client, 10)
            teach(manager, 0.0, 0.1)  # 40 tokens a second
            shelf.calls.clear()
            found = await client.look_up(keys, rate=80.0)
            assert (found.chunks, found.lease, found.withheld) == (0, 0, 40)
            await client.settled()
            assert shelf.calls == [], "no load is begun"
            assert manager.holds()["leases"] == 0
            assert manager.metrics.value("lmkv_withheld_tokens_total", tier="shelf1") == 40
            assert manager.metrics.value("lmkv_misses_total") == 0
            found = await client.look_up(keys, rate=20.0)
            assert (found.chunks, found.withheld) == (10, 0)
            assert await client.load(found, keys) == [True] * 10
            client.ask(p.Release(found.lease))
            found = await client.look_up(keys, rate=80.0)
            assert found.chunks == 10, "what lies in RAM is always offered"
            client.ask(p.Release(found.lease))

    run(body())


def test_nothing_is_withheld_while_a_speed_is_not_known() -> None:
    async def body() -> None:
        shelf = Shelf()
        async with storage(ram=60 * FRAME, below=[(shelf, SETTINGS)]) as manager:
            client = Client(manager, namespace())
            keys = await below_ram(client, 10)
            assert (await client.look_up(keys, hold=False, rate=1e9)).chunks == 10, "a tier never tried is tried"
            teach(manager, 5.0, 5.0)
            assert (await client.look_up(keys, hold=False)).chunks == 10, "the engine's rate is not known"
            assert (await client.look_up(keys, hold=False, rate=1e9)).chunks == 0

    run(body())


def test_where_the_latency_is_high_only_a_long_prefix_pays(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first chunks alone would be computed sooner; with those behind them it pays to load all."""
    monkeypatch.setattr(loads, "BATCH_FRAMES", 100)

    async def body() -> None:
        shelf = Shelf()
        async with storage(ram=60 * FRAME, below=[(shelf, SETTINGS)]) as manager:
            client = Client(manager, namespace())
            keys = await below_ram(client, 20)
            teach(manager, 0.5, 0.01)
            rate = 40.0  # a chunk in 0.1 s
            for chunks in (1, 3, 5):
                short = chain(range(chunks * CHUNK_TOKENS))
                assert (await client.look_up(short, hold=False, rate=rate)).chunks == 0
            for chunks in (7, 20):
                longer = chain(range(chunks * CHUNK_TOKENS))
                assert (await client.look_up(longer, hold=False, rate=rate)).chunks == chunks
            assert (await client.look_up(keys, hold=False, rate=rate)).withheld == 0

    run(body())


def test_the_prefix_that_saves_most_is_offered() -> None:
    """RAM, then a tier that is slower than computing: none of it, though all of it would still save something."""

    async def body() -> None:
        shelf = Shelf()
        async with storage(ram=60 * FRAME, below=[(shelf, SETTINGS)]) as manager:
            client = Client(manager, namespace())
            keys = await below_ram(client, 10)
            head = chain(range(6 * CHUNK_TOKENS))
            found = await client.look_up(head)
            assert await client.load(found, head) == [True] * 6
            client.ask(p.Release(found.lease))
            teach(manager, 0.0, 0.15)
            found = await client.look_up(keys, rate=40.0)
            assert (found.chunks, found.withheld, found.tiers) == (6, 16, (0,) * 6)
            client.ask(p.Release(found.lease))

    run(body())


def test_loads_that_wait_already_are_reckoned_with(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load_queue, "SPARE", 0)

    async def body() -> None:
        shelf = Shelf()
        async with storage(ram=90 * FRAME, below=[(shelf, SETTINGS)]) as manager:
            client = Client(manager, namespace())
            busy = await below_ram(client, 20, 1000)
            keys = await below_ram(client, 4)
            teach(manager, 0.0, 0.05)
            shelf.on_get = lambda _: time.sleep(0.05)
            assert (await client.look_up(keys, hold=False, rate=40.0)).chunks == 4
            first = await client.look_up(busy)
            found = await client.look_up(keys, rate=40.0)
            assert (found.chunks, found.withheld) == (0, 16), "a second of loads is before it"
            same = await client.look_up(busy, rate=30.0)
            assert same.chunks == 20, "its own loads are those that wait: it need not start them anew"
            client.ask(p.Release(first.lease))
            client.ask(p.Release(same.lease))
            await client.settled()

    run(body())


def test_a_fixed_rule_instead() -> None:
    async def body() -> None:
        shelf = Shelf()
        rules = Rules(measured=False, min_tokens=5 * CHUNK_TOKENS, max_wait=0.85)
        async with storage(ram=60 * FRAME, below=[(shelf, SETTINGS)], offer=rules) as manager:
            client = Client(manager, namespace())
            keys = await below_ram(client, 10)
            found = await client.look_up(chain(range(4 * CHUNK_TOKENS)), hold=False, rate=1e9)
            assert (found.chunks, found.withheld) == (0, 16)
            assert (await client.look_up(keys, hold=False, rate=1e9)).chunks == 10
            teach(manager, 0.0, 0.1)
            found = await client.look_up(keys, hold=False, rate=1e9)
            assert (found.chunks, found.withheld) == (8, 8), "what takes more than 0.85 s is cut off"
            asked = p.Lookup(client.space.id, b"".join(keys.digests), hold=False, min_tokens=9 * CHUNK_TOKENS)
            assert (await client.wait(asked)).chunks == 0, "a client may ask for more"
            asked = p.Lookup(client.space.id, b"".join(keys.digests), hold=False, max_wait=0.62)
            assert (await client.wait(asked)).chunks == 6

    run(body())


def test_pages_of_the_next_chunk_have_to_pay_too() -> None:
    async def body() -> None:
        shelf = Shelf()
        async with storage(ram=60 * FRAME, below=[(shelf, SETTINGS)]) as manager:
            client = Client(manager, namespace())
            await below_ram(client, 3)
            teach(manager, 0.0, 0.1)
            other = chain([*range(10), 99, 98])
            whole = chain(range(10))
            for rate, pages in ((10.0, 1), (30.0, 0)):  # a page of two tokens in 0.2 s, in 0.07 s
                for keys in (other, whole):
                    found = await client.look_up(keys, hold=False, rate=rate)
                    assert found.chunks == 2
                    assert found.pages == pages
                    assert found.withheld == (0 if pages else 2)

    run(body())


def test_a_tier_that_is_not_used_is_measured_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    async def body() -> None:
        shelf = Shelf()
        async with storage(ram=60 * FRAME, below=[(shelf, SETTINGS)]) as manager:
            client = Client(manager, namespace())
            keys = await below_ram(client, 10)
            teach(manager, 0.0, 0.5, ago=offers.EXPLORE_SECONDS + 1)
            shelf.calls.clear()
            begin = time.monotonic()
            assert (await client.look_up(keys, rate=1000.0)).chunks == 0
            assert (await client.look_up(keys, rate=1000.0)).chunks == 0
            assert time.monotonic() - begin < 0.5, "nobody waits for it"
            await client.settled()
            assert [op for op, _ in shelf.calls] == ["get"], "one load, that of the first frame"
            assert (await client.look_up(keys, rate=8.0)).chunks == 10, "it has become quick: it is offered again"

    run(body())


def test_the_timetable_of_threads_and_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loads, "BATCH_FRAMES", 2)

    async def body() -> None:
        shelf = Shelf()
        async with storage(below=[(shelf, SETTINGS | {"threads": 2})]) as manager:
            tier = manager.tier("shelf1")
            assert Timetable(tier, (0, 0)).end == 0
            teach(manager, 0.1, 0.1)
            table = Timetable(tier, (0, 0))
            ends = []
            for _ in range(6):
                table.add([FRAME])
                ends.append(round(table.end, 1))
            assert ends == [0.2, 0.3, 0.3, 0.3, 0.5, 0.6], "two batches at once, then a third"
            later = Timetable(tier, (2, 4 * FRAME))
            later.wait()
            assert later.end == pytest.approx(0.3, rel=0.1)

    run(body())


def test_what_comes_behind_loads_that_are_waited_for_anyway_costs_its_own_time_only() -> None:
    async def body() -> None:
        shelf = Shelf()
        async with storage(ram=60 * FRAME, below=[(shelf, SETTINGS)]) as manager:
            client = Client(manager, namespace())
            await below_ram(client, 11)
            teach(manager, 0.0, 0.05)
            shelf.on_get = lambda _: time.sleep(0.05)
            found = await client.look_up(chain([*range(10 * CHUNK_TOKENS + 2), 99, 98]), rate=8.0)
            assert (found.chunks, found.pages, found.withheld) == (10, 1, 0), (
                "a page of 0.25 s, 0.05 s after the others"
            )
            client.ask(p.Release(found.lease))
            await client.settled()

    run(body())


def test_a_measurement_that_fails_is_not_repeated_at_once() -> None:
    async def body() -> None:
        shelf = Shelf()
        async with storage(ram=60 * FRAME, below=[(shelf, SETTINGS)]) as manager:
            client = Client(manager, namespace())
            keys = await below_ram(client, 10)
            teach(manager, 0.0, 0.5, ago=offers.EXPLORE_SECONDS + 1)
            shelf.on_get = lambda asked: [FAILED(BackendError("no route"))] * len(asked)
            shelf.calls.clear()
            for _ in range(3):
                assert (await client.look_up(keys, rate=1000.0)).chunks == 0
                await client.settled()
            assert [op for op, _ in shelf.calls] == ["get"]

    run(body())


def test_an_answer_goes_out_before_its_loads_begin() -> None:
    async def body() -> None:
        shelf = Shelf(shared=True)
        async with storage(ram=8 * FRAME, below=[(shelf, {})]) as manager:
            client = Client(manager, namespace())
            keys = chain(range(8))
            client.store(client.frames(keys))
            await client.settled()
            client.ask(p.Clear(None, "ram"))
            begun: list[bool] = []

            def answered(_: object) -> None:
                entries = manager.index.namespace(client.space.id).entries.values()
                begun.append(any(part.loading is not None for entry in entries for part in entry.shards.values()))

            asked = asyncio.ensure_future(client.look_up(keys))
            asked.add_done_callback(answered)
            lease = (await asked).lease
            await client.settled()
            assert begun == [False]
            assert manager.tier("ram").index, "nobody has asked for the frames, and yet they are here"
            client.ask(p.Release(lease))
            client.ask(p.Clear(None, "ram"))
            shelf.calls.clear()
            client.ask(p.Release((await client.look_up(keys)).lease))
            await client.settled()
            assert not [op for op, _ in shelf.calls if op == "get"], "released before its loads had begun"
            assert manager.holds()["entries"] == 0

    run(body())


def test_a_look_up_reckons_with_the_loads_of_one_just_answered() -> None:
    async def body() -> None:
        async with storage(ram=8 * FRAME, below=[(Shelf(), {})]) as manager:
            client = Client(manager, namespace())
            first, second = chain(range(8)), chain(range(50, 58))
            client.store(client.frames(first))
            client.store(client.frames(second))
            await client.settled()
            client.ask(p.Clear(None, "ram"))
            found = client.ask(p.Lookup(client.space.id, b"".join(first.digests)))
            shelf = manager.stack.tiers[1]
            assert manager.stack.loads.backlog(shelf) == (0, 0)
            other = client.ask(p.Lookup(client.space.id, b"".join(second.digests), hold=False))
            assert manager.stack.loads.backlog(shelf)[0] == 2
            assert (found.chunks, other.chunks) == (2, 2)
            client.ask(p.Release(found.lease))
            await client.settled()
            assert manager.holds()["entries"] == 0

    run(body())
