"""Cases from the field: a pool that is full, a disk that is slow, on the real stack."""

from __future__ import annotations

import threading
import time
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
from fake_engine import CHUNK, Request, Shape, namespace, prompts, tokens

from lmkv.engine import RetrieveItem, StoreItem, StoreResult, frame_of
from lmkv.service.protocol import Acquire, Done

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from fake_engine import FakeEngine, Node

    from lmkv.memory import MemoryObject
    from lmkv.types import ChunkKey

LARGE = Shape(slot=16_128)
"""Four frames of it fill the pool."""
LONG = Shape(slot=2048)
"""Some thirty."""


def store_one(engine: FakeEngine, prompt: Sequence[int]) -> StoreResult:
    """Store the first chunk of a prompt; what became of it."""
    ids = engine.take(CHUNK)
    engine.compute(prompt[:CHUNK], ids)
    chain = engine.cache.chain()
    chain.extend(prompt[:CHUNK])
    [result] = engine.cache.store_frames([StoreItem(frame_of(chain, 0), ids)])
    engine.give(ids)
    return result


@pytest.mark.parametrize("shards", [1, 2])
def test_more_than_the_pool_holds(node: Callable[..., Node], tmp_path: Path, shards: int) -> None:
    """A prompt three times as large as the pool is loaded whole: what all ranks have copied makes room for the rest."""
    here = node(tmp_path, ram=None, disk=1 << 28, pool={"size": 1 << 20, "staging": LONG.frame}, disk_deadline="5s")
    ranks = here.ranks(namespace(*[LONG] * shards), *[LONG] * shards)
    prompt = tokens(96 * CHUNK // shards)
    assert len(prompt) // CHUNK * shards * LONG.frame > 3 * here.manager.pool.nbytes
    for stop in range(2 * CHUNK, len(prompt) + 1, 2 * CHUNK):  # a store never waits for room
        for rank in ranks:
            rank.store(prompt[:stop])
            here.settle()
    request = Request(ranks, [*prompt, 1]).queue().look_up()
    assert request.offered == len(prompt)
    request.allocate()

    def load(rank: FakeEngine, ids: Any) -> list[bool]:
        items = [RetrieveItem(i, 2, ids[2 * i : 2 * i + 2]) for i in range(request.hit.chunks)]
        return rank.cache.retrieve_frames(request.hit.lease, items, timeout=30.0, last=True)

    loads = [here.start(partial(load, rank, ids)) for rank, ids in zip(ranks, request.ids, strict=True)]
    assert all(all(future.result(60)) for future in loads)
    for rank, ids in zip(ranks, request.ids, strict=True):
        assert rank.wrong(prompt, ids) == []
    assert here.held() == {"leases": 1}, "the lease is there, and holds nothing any more"
    here.settle()
    assert here.manager.pool.free_bytes == here.manager.pool.nbytes
    assert here.counter("lmkv_misses_total", rank="unknown", reason="no_room") == 0
    request.finish()


def test_a17_full_and_pinned(node: Callable[..., Node], tmp_path: Path) -> None:
    """No RAM tier, room for 4 loads, all of it held: a store is dropped, a load fails in time, both work later."""
    here = node(
        tmp_path, ram=None, disk=64 * LARGE.frame, pool={"size": 1 << 20, "staging": LARGE.frame}, disk_deadline="500ms"
    )
    assert here.manager.pool.nbytes == 4 * LARGE.frame
    engine = here.engine(shape=LARGE, pages=64)
    wanted = list(prompts(5))
    for prompt in wanted:
        assert store_one(engine, prompt) is StoreResult.STORED
        here.settle()
    held = [Request([engine], prompt).queue().look_up() for prompt in wanted[:4]]
    here.settle()
    assert here.manager.pool.free_bytes == 0
    link = engine.cache.client.connection()
    copying = [link.call(Acquire(request.hit.lease, 0, 0, 1)).result(5).hold for request in held]
    assert all(copying)

    begin, busy = time.monotonic(), time.process_time()
    assert store_one(engine, tokens(CHUNK, 7000)) is StoreResult.REJECTED
    assert here.counter("lmkv_dropped_stores_total", reason="no_room") == 1
    assert time.monotonic() - begin < 0.5, "a store never waits for room"
    late = Request([engine], [*wanted[4], 1]).queue().look_up()
    assert late.offered == CHUNK
    late.allocate().load()
    assert late.computed == 0
    assert engine.untouched(late.ids[0])
    assert time.monotonic() - begin < 4, "a load waits until its deadline"
    assert here.counter("lmkv_misses_total", reason="no_room") == 1
    assert time.process_time() - busy < 0.4, "nobody waits by asking again and again"
    late.run().finish()

    for request, hold in zip(held, copying, strict=True):
        link.send(Done(hold))
        request.finish()
    here.settle()
    assert here.manager.pool.free_bytes == here.manager.pool.nbytes
    again = Request([engine], [*wanted[4], 1]).queue().look_up().allocate().load()
    assert again.computed == CHUNK
    again.run().finish()
    here.settle()
    assert store_one(engine, tokens(CHUNK, 7000)) is StoreResult.STORED


def test_a19_slow_disk(node: Callable[..., Node], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk that takes its time for 500 stores: they don't wait, its queue has a bound, the rest is dropped."""
    limit = 10
    here = node(
        tmp_path,
        ram_capacity="50%",
        pool={"size": 8 << 20},
        disk=2000 * 4096,
        disk_threads=1,
        disk_queue={"calls": limit},
    )
    engine = here.engine()
    disk = here.manager.tier("disk")
    backend: Any = disk.backend
    put, gate = backend.put, threading.Semaphore(0)

    def slow(keys: Sequence[ChunkKey], objects: Sequence[MemoryObject]) -> Any:
        gate.acquire()
        return put(keys, objects)

    monkeypatch.setattr(backend, "put", slow)
    everything = list(prompts(500))
    longest = 0
    for number, prompt in enumerate(everything):
        assert store_one(engine, prompt) is StoreResult.STORED
        longest = max(longest, here.on_loop(lambda: disk.queue()[0]))
        if number % 50 == 49:
            gate.release()
    assert longest == limit
    gate.release(500)
    here.settle()
    dropped = here.counter("lmkv_tier_rejected_total", tier="disk", op="put")
    assert dropped >= 500 - 10 - limit - 1
    assert len(disk.index) == 500 - dropped
    engine.cache.clear("ram")
    here.settle()
    found = [engine.find(prompt) for prompt in everything]
    assert sum(found) == len(disk.index) * CHUNK, "of what was dropped nothing is found"
    first = everything[found.index(CHUNK)]
    assert engine.load(first) == CHUNK
