"""Loads from the tiers below: shared, in order, bounded, urgent ones first, given up when nobody wants them."""

from __future__ import annotations

import asyncio
import threading
import time
from typing import TYPE_CHECKING, Any

import pytest
from storage_rig import FRAME, PAGE_BYTES, Client, Shelf, chain, codecs, namespace, storage

from lmkv.frame import Trailer, frame_bytes, seal
from lmkv.service import protocol as p
from lmkv.specs import Payload
from lmkv.storage import loads
from lmkv.storage.driver import QUEUED, RUNNING
from lmkv.storage.load_queue import Batch, LoadQueue
from lmkv.types import MISS, REJECTED, ChunkKey

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Sequence

    from lmkv.keys import KeyChain
    from lmkv.storage.manager import StorageManager
    from lmkv.types import Outcome


def run(coroutine: Coroutine[Any, Any, None]) -> None:
    asyncio.run(coroutine)


async def until(good: Callable[[], bool], seconds: float = 10.0) -> None:
    end = time.monotonic() + seconds
    while not good():
        assert time.monotonic() < end, "it never came about"
        await asyncio.sleep(0.002)


class Gate:
    """Lets loads of a shelf through one by one; remembers what they asked for, in order."""

    def __init__(self, shelf: Shelf) -> None:
        self.asked: list[list[bytes]] = []
        self.most = 0
        self._inside = 0
        self._turns = threading.Semaphore(0)
        self._lock = threading.Lock()
        shelf.on_get = self._get

    def open(self, count: int = 1000) -> None:
        self._turns.release(count)

    def _get(self, keys: Sequence[ChunkKey]) -> Sequence[Outcome] | None:
        with self._lock:
            self.asked.append([key.digest for key in keys])
            self._inside += 1
            self.most = max(self.most, self._inside)
        assert self._turns.acquire(timeout=20)
        with self._lock:
            self._inside -= 1
        return None


@pytest.fixture(autouse=True)
def one_frame_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """As it is with frames of a real size."""
    monkeypatch.setattr(loads, "BATCH_FRAMES", 1)


async def stored(client: Client, *chains: KeyChain) -> None:
    """Chains that lie below RAM only."""
    for keys in chains:
        client.store(client.frames(keys))
        await client.settled()
    await client.wait(p.Clear(None, "ram"))


def settings(**more: Any) -> dict[str, Any]:
    return {"capacity": 1000 * FRAME, "threads": 2, "deadline": 10.0} | more


def test_loads_begin_at_once_in_order_and_as_many_as_there_are_threads() -> None:
    async def body() -> None:
        shelf = Shelf()
        async with storage(ram=200 * FRAME, below=[(shelf, settings(queue_calls=4))]) as manager:
            client = Client(manager, namespace())
            keys = chain(range(400))
            for start in range(0, 100, 2):
                client.store(client.frames(keys)[start : start + 2])
                await client.settled()
            await client.wait(p.Clear(None, "ram"))
            gate = Gate(shelf)
            found = await client.look_up(keys)
            assert found.chunks == 100
            await until(lambda: len(gate.asked) == 2)
            gate.open()
            assert await client.load(found, keys) == [True] * 100, "many more than the queue holds"
            assert gate.most <= 2
            order = [digests[0] for digests in gate.asked]
            place = {digest: i for i, digest in enumerate(keys.digests)}
            assert all(abs(place[digest] - i) <= 2 for i, digest in enumerate(order)), "the order of the prompt"
            client.ask(p.Release(found.lease))

    run(body())


def test_what_a_running_request_waits_for_goes_first() -> None:
    async def body() -> None:
        shelf = Shelf()
        async with storage(ram=60 * FRAME, below=[(shelf, settings(threads=1))]) as manager:
            client = Client(manager, namespace())
            queued, running = chain(range(40)), chain(range(100, 108))
            await stored(client, queued, running)
            gate = Gate(shelf)
            first = await client.look_up(queued)
            second = await client.look_up(running)
            await until(lambda: len(gate.asked) == 1)
            load = asyncio.ensure_future(client.load(second, running))
            await asyncio.sleep(0.02)
            gate.open(4)
            assert await load == [True, True]
            asked = [digests[0] for digests in gate.asked]
            assert max(asked.index(digest) for digest in running.digests) <= 2, "it waits for what had begun, no more"
            gate.open()
            assert await client.load(first, queued) == [True] * 10
            for found in (first, second):
                client.ask(p.Release(found.lease))

    run(body())


def test_loads_before_stores_before_demotions() -> None:
    async def body() -> None:
        shelf = Shelf()
        order: list[str] = []
        turn = threading.Semaphore(0)
        below = [(shelf, settings(threads=1, queue_calls=50))]
        async with storage(ram=60 * FRAME, below=below) as manager:
            client = Client(manager, namespace())
            queued, running, moved = chain(range(4)), chain(range(100, 104)), chain(range(200, 204))
            await stored(client, queued, running)
            shelf.on_put = lambda keys: [REJECTED] * len(keys)
            client.store(client.frames(moved))  # lies in RAM only
            await client.settled()
            named = {queued.digests[0]: "queued", running.digests[0]: "running"}

            def get(keys: Sequence[ChunkKey]) -> None:
                order.append(named.get(keys[0].digest, "demote"))
                turn.acquire(timeout=20)

            def put(keys: Sequence[ChunkKey]) -> None:
                order.append("store" if keys[0].digest not in moved.digests else "demote")
                turn.acquire(timeout=20)

            shelf.on_get, shelf.on_put = get, put  # type: ignore[assignment]
            client.store(client.frames(chain(range(300, 304))))  # takes the thread
            await until(lambda: len(order) == 1)
            move = p.Move(client.space.id, moved.digests[0], "ram", "shelf1")
            moving = asyncio.ensure_future(client.wait(move))
            await asyncio.sleep(0.01)
            client.store(client.frames(chain(range(400, 404))))
            one = await client.look_up(queued)
            two = await client.look_up(running)
            load = asyncio.ensure_future(client.load(two, running))
            await asyncio.sleep(0.05)
            turn.release(10)
            assert await load == [True]
            assert (await moving).count == 1
            await client.settled()
            assert order[1:3] in (["queued", "running"], ["running", "queued"]), "one load may be at hand already"
            assert order[3:] == ["store", "demote"]
            for found in (one, two):
                client.ask(p.Release(found.lease))

    run(body())


@pytest.mark.parametrize("shared", [False, True])
def test_requests_share_a_load(shared: bool) -> None:
    async def body() -> None:
        shelf = Shelf(shared=shared)
        async with storage(
            ram=60 * FRAME, below=[(shelf, settings(capacity=None if shared else 99 * FRAME))]
        ) as manager:
            client, other = Client(manager, namespace()), Client(manager, namespace())
            keys = chain(range(16))
            await stored(client, keys)
            gate = Gate(shelf)
            one = await client.look_up(keys)
            two = await other.look_up(keys)
            await until(lambda: len(gate.asked) == 2)
            client.ask(p.Release(one.lease))
            gate.open()
            assert await other.load(two, keys) == [True] * 4, "the other still wants it"
            assert len(gate.asked) == 4
            other.ask(p.Release(two.lease))

    run(body())


async def one_under_way(manager: StorageManager, shelf: Shelf) -> tuple[Client, KeyChain, Gate, p.Found]:
    """Ten chunks below RAM, looked up: the load of the first has begun, and hangs in the gate."""
    client = Client(manager, namespace())
    keys = chain(range(40))
    await stored(client, keys)
    gate = Gate(shelf)
    found = await client.look_up(keys)
    await until(lambda: len(gate.asked) == 1)
    return client, keys, gate, found


def test_a_load_that_nobody_wants_is_given_up_unless_it_has_begun() -> None:
    async def body() -> None:
        shelf = Shelf()
        async with storage(ram=60 * FRAME, below=[(shelf, settings(threads=1))]) as manager:
            client, keys, gate, found = await one_under_way(manager, shelf)
            client.ask(p.Release(found.lease))
            assert manager.metrics.value("lmkv_loads_cancelled_total", tier="shelf1") >= 7
            gate.open()
            await client.settled()
            assert len(gate.asked) <= 3
            assert manager.tier("ram").used == len(gate.asked) * FRAME, "what had begun has ended in RAM"
            again = await client.look_up(keys)
            assert await client.load(again, keys) == [True] * 10
            client.ask(p.Release(again.lease))

    run(body())


@pytest.mark.parametrize("waits", [False, True], ids=["in the same turn", "while it is waited for"])
def test_who_lets_go_of_a_lease_is_answered_at_once(waits: bool) -> None:
    """An engine has the pages of an aborted request back only when its worker has heard what became of the load."""

    async def body() -> None:
        shelf = Shelf()
        async with storage(ram=60 * FRAME, below=[(shelf, settings(threads=1))]) as manager:
            client, _, gate, found = await one_under_way(manager, shelf)
            loading = asyncio.ensure_future(client.ask(p.Acquire(found.lease, 0, 0, 10)))
            if waits:
                await asyncio.sleep(0.02)
            client.ask(p.Release(found.lease))
            loaded = await asyncio.wait_for(loading, 5)
            assert set(loaded.offsets) == {p.ABSENT}
            assert manager.index.books.holds == 0
            gate.open()
            await client.settled()
            assert len(gate.asked) <= 3, "nobody wants the rest"

    run(body())


def test_a_prefetch_is_wanted_without_a_lease() -> None:
    async def body() -> None:
        shelf = Shelf()
        async with storage(ram=60 * FRAME, below=[(shelf, settings(threads=1))]) as manager:
            client = Client(manager, namespace())
            keys = chain(range(40))
            await stored(client, keys)
            gate = Gate(shelf)
            found = await client.look_up(keys)
            assert client.ask(p.Prefetch(client.space.id, b"".join(keys.digests))).count == 10
            client.ask(p.Release(found.lease))
            gate.open()
            await client.settled()
            assert manager.tier("ram").used == 10 * FRAME
            assert manager.metrics.value("lmkv_loads_cancelled_total") == 0

    run(body())


def test_a_hanging_tier_costs_one_deadline_however_much_waits() -> None:
    async def body() -> None:
        shelf, second = Shelf(), Shelf()
        below = [(shelf, settings(deadline=0.3, failures=100)), (second, settings())]
        async with storage(ram=60 * FRAME, below=below) as manager:
            client = Client(manager, namespace())
            keys = chain(range(80))
            await stored(client, keys)
            second.frames.pop(next(key for key in second.frames if key.digest == keys.digests[15]))
            gate = Gate(shelf)
            found = await client.look_up(keys)
            begin = time.monotonic()
            came = await client.load(found, keys)
            assert time.monotonic() - begin < 3 * 0.3
            assert came == [True] * 15 + [False] + [True] * 4, "the next tier has the others"
            client.ask(p.Release(found.lease))
            gate.open()
            await client.settled()

    run(body())


def test_a_tier_that_has_become_slow_is_not_waited_for() -> None:
    """Every load comes within the deadline, but all of them take far longer than was measured."""

    async def body() -> None:
        shelf = Shelf()
        async with storage(ram=60 * FRAME, below=[(shelf, settings(threads=1, deadline=0.5))]) as manager:
            client = Client(manager, namespace())
            keys = chain(range(120))
            await stored(client, keys)
            found = await client.look_up(keys)
            assert await client.load(found, keys) == [True] * 30
            client.ask(p.Release(found.lease))
            await client.wait(p.Clear(None, "ram"))
            shelf.on_get = lambda _: time.sleep(0.1)
            found = await client.look_up(keys)
            assert found.chunks == 30
            begin = time.monotonic()
            came = await client.load(found, keys)
            assert time.monotonic() - begin < 1.5, "not the three seconds that all would take"
            assert 1 <= sum(came) < 29
            assert came == sorted(came, reverse=True)
            assert manager.metrics.value("lmkv_misses_total", reason="deadline") == 30 - sum(came)
            client.ask(p.Release(found.lease))
            await client.settled()

    run(body())


def test_no_load_holds_memory_while_it_waits_for_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two requests for more than the pool has at once, in batches: both get through."""
    monkeypatch.setattr(loads, "BATCH_FRAMES", 8)

    async def body() -> None:
        shelf = Shelf()
        one, two = chain(range(24)), chain(range(100, 124))
        async with storage(ram=60 * FRAME, below=[(shelf, settings())]) as manager:
            await stored(Client(manager, namespace()), one, two)
        below = [(shelf, settings(read="direct", deadline=5.0))]
        async with storage(ram=None, below=below, staging=8 * FRAME) as manager:
            client = Client(manager, namespace())

            async def request(keys: KeyChain) -> list[bool]:
                found = await client.look_up(keys)
                came = []
                for first in range(0, 6, 2):
                    loaded = await client.wait(p.Acquire(found.lease, 0, first, 2))
                    came += [offset >= 0 for offset in loaded.offsets]
                    client.ask(p.Done(loaded.hold))
                    client.ask(p.Trim(found.lease, first + 2))
                client.ask(p.Release(found.lease))
                return came

            begin = time.monotonic()
            assert await asyncio.gather(request(one), request(two)) == [[True] * 6, [True] * 6]
            assert time.monotonic() - begin < 5.0
            assert manager.pool.free_bytes == manager.pool.nbytes

    run(body())


def test_a30_a_shared_store_that_lost_it_is_a_miss_once() -> None:
    async def body() -> None:
        shelf = Shelf(shared=True)
        async with storage(ram=60 * FRAME, below=[(shelf, settings(capacity=None))]) as manager:
            client = Client(manager, namespace())
            keys = chain(range(16))
            await stored(client, keys)
            found = await client.look_up(keys)
            await client.settled()
            client.ask(p.Release(found.lease))
            await client.wait(p.Clear(None, "ram"))
            found = await client.look_up(keys, hold=False)
            assert found.chunks == 4
            frames = dict(shelf.frames)
            shelf.on_get = lambda keys: [MISS] * len(keys)
            found = await client.look_up(keys)
            shelf.frames.clear()
            assert await client.load(found, keys) == [False] * 4
            client.ask(p.Release(found.lease))
            assert (await client.look_up(keys, hold=False)).chunks == 0
            shelf.on_get = lambda _: None
            client.store(client.frames(keys))
            await client.settled()
            assert shelf.frames.keys() == frames.keys()

    run(body())


@pytest.mark.parametrize("codec", ["identity", "zlib"])
@pytest.mark.parametrize(("pages", "nbytes"), [(2, 2 * PAGE_BYTES - 2), (2, 100), (1, PAGE_BYTES)])
def test_an_intact_frame_of_another_size_is_none(codec: str, pages: int, nbytes: int) -> None:
    """Who reads it would read what lies behind it in the pool: somebody else's."""

    async def body() -> None:
        shelf, space, keys = Shelf(shared=True), namespace(), chain(range(4))
        key = ChunkKey(space.id, 0, keys.digests[0])
        prefixes = tuple(keys.prefixes(0)[: pages - 1])
        raw = memoryview(bytearray(nbytes))
        stored = b"".join(codecs(codec).encode(raw, Payload(key=key, raw_bytes=nbytes)))
        frame = bytearray(frame_bytes(len(stored), len(prefixes), codec))
        frame[: len(stored)] = stored
        seal(memoryview(frame), Trailer(key, b"", pages, prefixes, codec, len(stored), nbytes))
        shelf.frames[key] = bytes(frame)
        async with storage(below=[(shelf, {})]) as manager:
            client = Client(manager, space)
            found = await client.look_up(keys)
            assert found.chunks == 1
            assert await client.load(found, keys) == [False]
            client.ask(p.Release(found.lease))
            await client.settled()
            assert shelf.aside == [key]
            assert not manager.pool.holders()

    run(body())


def test_memory_goes_to_what_comes_first() -> None:
    tier: Any = None
    queue = LoadQueue(threads=1)
    one, two, urgent = Batch(tier, QUEUED), Batch(tier, QUEUED), Batch(tier, RUNNING)
    queue.push(one)
    queue.push(two)
    assert [queue.next(), queue.next(), queue.next()] == [one, two, None]
    queue.hungry |= {one, two}
    assert queue.first(one)
    assert not queue.first(two), "the one before it waits for memory"
    queue.hungry.discard(one)
    assert queue.first(two)
    queue.push(urgent)
    assert not queue.first(two), "something more urgent is about to begin"
    queue.forget(urgent)
    assert queue.first(two)


def test_what_passes_on_to_another_tier_stays_for_a_request_that_joins_it() -> None:
    async def body() -> None:
        upper, lower = Shelf(), Shelf()
        below = [(upper, settings()), (lower, settings(write="demote"))]
        async with storage(ram=60 * FRAME, staging=8 * FRAME, below=below) as manager:
            client = Client(manager, namespace())
            alone, joined = chain(range(4)), chain(range(100, 104))
            await stored(client, alone, joined)
            gate = Gate(upper)
            moving = [
                asyncio.ensure_future(client.wait(p.Move(client.space.id, keys.digests[0], "shelf1", "shelf2", True)))
                for keys in (alone, joined)
            ]
            await until(lambda: len(gate.asked) == 2)
            found = await client.look_up(joined)
            gate.open()
            assert [(await each).count for each in moving] == [1, 1]
            assert await client.load(found, joined) == [True]
            client.ask(p.Release(found.lease))
            await client.settled()
            assert manager.tier("ram").used == FRAME, "the one that a request wanted"

    run(body())


@pytest.mark.parametrize("tried", [0, 1])
def test_what_waits_for_memory_in_the_second_tier_gets_no_second_deadline(tried: int) -> None:
    tier: Any = None
    batch = Batch(tier, QUEUED, tried=tried)
    batch.begun = 5.0
    rest = batch.rest([], 0)
    assert rest.place == batch.place
    assert rest.begun == (5.0 if tried else 0.0)
