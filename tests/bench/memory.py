"""Keys, look-up, store and retrieve: everything without a disk and without a real engine."""

from __future__ import annotations

import hashlib
import time
from typing import TYPE_CHECKING

import numpy as np
from tests.bench import stack
from tests.bench.harness import Row, absolute, against, interleaved, seconds
from tests.bench.stack import CHUNK_PAGES, CHUNK_TOKENS, PAGE_TOKENS, Pages, chain, client, retrieve_items, store_items

from lmkv.engine import StoreResult
from lmkv.gpu import CopyJob
from lmkv.keys import KeyChain
from lmkv.service.protocol import Unpin

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    from lmkv.engine import CacheEngine

TOKENS = 131_072
MIB = 1 << 20


def digests() -> list[Row]:
    """A chain over a long prompt, against bare SHA-256 of its bytes."""
    tokens = np.random.default_rng(0).integers(0, 100_000, TOKENS).astype(np.uint32)

    def ours(_: int) -> float:
        return seconds(lambda: KeyChain(CHUNK_TOKENS, PAGE_TOKENS).extend(tokens)) * 1e3

    def bare(_: int) -> float:
        return seconds(lambda: hashlib.sha256(tokens.data).digest()) * 1e3

    return [against("digests of 131 072 tokens", "ms", interleaved(ours, bare, 101), at_most=2)]


def lookup() -> list[Row]:
    """512 chunks, all cached, asked through the socket; and what asking for the answer costs the scheduler."""
    pages = Pages(layers=1, run=64, pages=1024)
    with client(through_socket=True, pool=16 * MIB) as link:
        engine = pages.engine(link)
        keys = chain(TOKENS // CHUNK_TOKENS, 1)
        ids = pages.scattered(1) * len(keys.digests)
        assert set(engine.store_frames(store_items(keys, ids))) == {StoreResult.STORED}
        took, polls = [], []
        for number in range(101):
            begin = time.perf_counter()
            ticket = engine.begin_lookup(keys)
            hit = ticket.wait(5.0)
            assert hit is not None
            engine.release(hit.lease)
            took.append((time.perf_counter() - begin) * 1e3)
            assert hit.chunks == len(keys.digests), number
            polls.append(_poll(engine, keys))
    return [
        absolute("look-up of 512 chunks, lease, release", "ms", took[1:], at_most=3),
        absolute("scheduler-side poll", "us", polls[1:], at_most=50),
    ]


def _poll(engine: CacheEngine, keys: KeyChain) -> float:
    """Microseconds of the slowest of all polls until the answer is there."""
    ticket = engine.begin_lookup(keys)
    slowest = 0.0
    while True:
        begin = time.perf_counter()
        hit = ticket.poll()
        slowest = max(slowest, time.perf_counter() - begin)
        if hit is not None:
            break
        time.sleep(0.0001)
    engine.release(hit.lease)
    return slowest * 1e6


def _memcpy(nbytes: int) -> float:
    """Seconds to copy so many bytes from one place to another, all touched."""
    source, target = _memcpy_buffers(nbytes)
    return seconds(lambda: np.copyto(target, source))


_buffers: dict[int, tuple[NDArray[np.uint8], NDArray[np.uint8]]] = {}


def _memcpy_buffers(nbytes: int) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    if nbytes not in _buffers:
        _buffers.clear()
        _buffers[nbytes] = (np.ones(nbytes, np.uint8), np.ones(nbytes, np.uint8))
    return _buffers[nbytes]


CHUNKS = 4


def copies() -> list[Row]:
    """Chunks of 32 MiB from scattered pages into the RAM tier and back, against memcpy of the same bytes."""
    pages = Pages(layers=32, run=64 << 10, pages=512)
    nbytes = CHUNKS * stack.CHUNK_PAGES * pages.layout.page_bytes
    ids = pages.scattered(2 * CHUNKS)
    source, target = ids[:CHUNKS], ids[CHUNKS:]
    gigabytes = nbytes / 1e9
    with client(through_socket=True, pool=1280 * MIB, ram="640MiB") as link:
        engine = pages.engine(link)

        def store(number: int) -> float:
            items = store_items(chain(CHUNKS, number + 100), source)
            results: list[StoreResult] = []
            took = seconds(lambda: results.extend(engine.store_frames(items)))
            assert set(results) == {StoreResult.STORED}, results
            return gigabytes / took

        def retrieve(number: int) -> float:
            keys = chain(CHUNKS, 99)
            hit = engine.begin_lookup(keys).wait(5.0)
            assert hit is not None
            if not hit.chunks:
                engine.store_frames(store_items(keys, source))
                return retrieve(number)
            came: list[bool] = []
            items = retrieve_items(target)
            took = seconds(lambda: came.extend(engine.retrieve_frames(hit.lease, items)))
            engine.release(hit.lease)
            assert all(came), came
            assert all((b[_rows(source)] == b[_rows(target)]).all() for b in _paged(pages))
            return gigabytes / took

        def memcpy(_: int) -> float:
            return gigabytes / _memcpy(nbytes)

        stored = interleaved(store, memcpy, 15)
        retrieved = interleaved(retrieve, memcpy, 15)
    return [
        against("store, pages to RAM tier, 32 MiB chunks", "GB/s", stored, at_least=0.8),
        against("retrieve, RAM tier to pages", "GB/s", retrieved, at_least=0.8),
    ]


def _rows(ids: Sequence[NDArray[np.int64]]) -> NDArray[np.int64]:
    return np.concatenate(ids)[::8]


def _paged(pages: Pages) -> list[NDArray[np.uint8]]:
    return [buffer.reshape(-1, pages.layout.runs[0].length) for buffer in pages.buffers[::8]]


BATCH = 32


def own_time() -> list[Row]:
    """What is not copying: pages of a few bytes, 32 chunks at a time; the copies that are left are taken off."""
    rows = []
    pages = Pages(layers=1, run=64, pages=1024)
    ids = pages.scattered(BATCH)
    for through_socket, at_most in ((False, 40), (True, 150)):
        with client(through_socket=through_socket, pool=32 * MIB) as link:
            engine = pages.engine(link)
            stores, loads = [], []
            for number in range(100):
                keys = chain(BATCH, number)
                gathered, scattered = _copies(pages, ids)
                stores.append(_store(engine, keys, ids) - gathered)
                loads.append(_load(engine, keys, ids) - scattered)
        where = "through the service" if through_socket else "in-process"
        rows.append(absolute(f"own time per chunk, store, {where}", "us", stores[5:], at_most=at_most))
        rows.append(absolute(f"own time per chunk, retrieve, {where}", "us", loads[5:], at_most=at_most))
    return rows


def _microseconds(work: Callable[[], object]) -> float:
    """Per chunk of a batch; unlike in comparisons with C, the collector is part of it."""
    begin = time.perf_counter()
    work()
    return (time.perf_counter() - begin) / BATCH * 1e6


def _copies(pages: Pages, ids: Sequence[NDArray[np.int64]]) -> tuple[float, float]:
    """Of a batch: gathering and scattering alone."""
    nbytes = CHUNK_PAGES * pages.layout.page_bytes
    jobs = [CopyJob(each, memoryview(bytearray(nbytes)), CHUNK_PAGES) for each in ids]
    return _microseconds(lambda: pages.gpu.gather(jobs)), _microseconds(lambda: pages.gpu.scatter(jobs))


def _store(engine: CacheEngine, keys: KeyChain, ids: Sequence[NDArray[np.int64]]) -> float:
    """Until the service has answered what was asked after the commit, which needs no work of it."""
    items = store_items(keys, ids)
    nothing = Unpin(engine.namespace.id, b"")

    def work() -> None:
        assert set(engine.store_frames(items)) == {StoreResult.STORED}
        engine.client.call(nothing).result(5.0)

    return _microseconds(work)


def _load(engine: CacheEngine, keys: KeyChain, ids: Sequence[NDArray[np.int64]]) -> float:
    """From the look-up to the release."""
    items = retrieve_items(ids)

    def work() -> None:
        hit = engine.begin_lookup(keys).wait(5.0)
        assert hit is not None
        assert all(engine.retrieve_frames(hit.lease, items))
        engine.release(hit.lease)

    return _microseconds(work)
