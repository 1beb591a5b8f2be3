"""Cases from the field: prefix arithmetic, look-up, load and abort, on the real stack."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from fake_engine import CHUNK, FRAME, Request, Shape, namespace, prompts, tokens

from lmkv.errors import BackendError
from lmkv.types import FAILED
from lmkv_backend_disk.names import frame_path

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from fake_engine import FakeEngine, Node

    from lmkv.memory import MemoryObject
    from lmkv.types import ChunkKey


def digest_of(engine: FakeEngine, prompt: Sequence[int], chunk: int) -> bytes:
    chain = engine.cache.chain()
    chain.extend(prompt)
    return chain.digests[chunk]


def test_a08_whole_prompt_stored(node: Callable[..., Node]) -> None:
    """8 tokens, all stored: 7 could be offered, whole pages make it 6; the page of the last token is not touched."""
    engine = node().engine()
    engine.store(tokens(8))
    request = Request([engine], tokens(8)).queue().look_up()
    assert (request.hit.tokens, request.offered) == (8, 6)
    request.allocate().load()
    assert request.computed == 6
    assert not engine.wrong(tokens(8), request.ids[0], 6)
    assert engine.untouched(request.ids[0][3:])
    request.run().finish()


def test_a09_engine_owns_a_part(node: Callable[..., Node]) -> None:
    """12 stored, the engine has 6, no multiple of a chunk: 5 more could be offered, in whole pages 4; its own stay."""
    engine = node().engine()
    engine.store(tokens(12))
    request = Request([engine], tokens(12), has=6).queue().look_up()
    assert request.offered == 4
    request.allocate()
    own = [layer[request.ids[0][:3]].copy() for layer in engine.kv]
    request.load()
    assert request.computed == 10
    assert all((layer[request.ids[0][:3]] == kept).all() for layer, kept in zip(engine.kv, own, strict=True))
    assert not engine.wrong(tokens(12), request.ids[0], 10)
    assert engine.untouched(request.ids[0][5:])
    request.run().finish()


def test_a10_engine_has_more(node: Callable[..., Node]) -> None:
    here = node()
    engine = here.engine()
    engine.store(tokens(4))
    request = Request([engine], tokens(10), has=6).queue().look_up()
    assert (request.hit.tokens, request.offered) == (4, 0)
    request.allocate()
    here.settle()
    assert here.held() == {}
    request.load().run().finish()


def test_a11_evict_in_between(node: Callable[..., Node]) -> None:
    """Everything that can go is evicted between look-up and load: what was found is held, and comes back right."""
    here = node(ram=8 * FRAME)
    engine = here.engine()
    engine.store(tokens(8))
    request = Request([engine], tokens(9)).queue().look_up()
    for prompt in prompts(40):
        engine.store(prompt)
    request.allocate().load()
    assert request.computed == 8
    request.run().finish()


def test_a11_promise_is_over(node: Callable[..., Node]) -> None:
    """The lease has expired and the chunks are gone: nothing is reported good, nothing is written."""
    here = node(ram=8 * FRAME, leases={"seconds": "50ms"})
    engine = here.engine()
    engine.store(tokens(8))
    request = Request([engine], tokens(9)).queue().look_up()
    assert request.offered == 8
    time.sleep(0.1)
    for prompt in prompts(40):
        engine.store(prompt)
    request.allocate().load()
    assert request.computed == 0
    assert engine.untouched(request.ids[0])
    assert here.counter("lmkv_misses_total", reason="expired") > 0
    request.run().finish()


@pytest.mark.parametrize("bad", ["raises", "nothing", "short"])
def test_a12_middle_chunk_fails(
    node: Callable[..., Node], tmp_path: Path, bad: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The middle one of 3 chunks on the disk: chunk 1 is good, the engine computes from token 4 on, once."""
    here = node(tmp_path, ram=None)
    engine = here.engine()
    engine.store(tokens(12))
    here.settle()
    backend: Any = here.manager.tier("disk").backend
    digest = digest_of(engine, tokens(12), 1)
    key = next(key for key in here.manager.tier("disk").index if key.digest == digest)
    path = Path(frame_path(str(tmp_path), key))
    if bad == "raises":
        get = backend.get

        def fails(keys: Sequence[ChunkKey], into: Sequence[MemoryObject]) -> Any:
            outcomes = get(keys, into)
            return [FAILED(BackendError("no")) if k == key else o for k, o in zip(keys, outcomes, strict=True)]

        monkeypatch.setattr(backend, "get", fails)
    elif bad == "nothing":
        path.unlink()
    else:
        os.truncate(path, path.stat().st_size - 1)
    request = Request([engine], tokens(13)).queue().look_up()
    assert request.offered == 12
    request.allocate().load()
    assert request.computed == 4
    request.run()
    assert not engine.wrong(tokens(13), request.ids[0])
    reason = {"raises": "failed", "nothing": "evicted", "short": "corrupt"}[bad]
    assert here.counter("lmkv_misses_total", reason=reason) == 1
    if bad != "raises":
        request.store()
        here.settle()
        assert engine.find(tokens(12)) == 12, "stored anew"
    request.finish()


def test_a13_ranks_disagree(node: Callable[..., Node]) -> None:
    """Rank 0 holds 3 chunks and rank 1 holds 2: both get the 2 that both have."""
    here = node()
    shape = Shape()
    ranks = here.ranks(namespace(shape, shape), shape, shape)
    ranks[0].store(tokens(12))
    ranks[1].store(tokens(8))
    assert [rank.find(tokens(12)) for rank in ranks] == [8, 8]
    request = Request(ranks, tokens(13)).queue().look_up().allocate().load()
    assert request.computed == 8
    request.run().store().finish()
    assert ranks[0].find(tokens(12)) == 12
    assert here.counter("lmkv_misses_total", reason="not_all_shards") > 0


@pytest.mark.parametrize("vanishes", [False, True])
def test_a14_side_object_missing(
    node: Callable[..., Node], tmp_path: Path, vanishes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A chunk has a KV object and an index object (a shard of another layout); only two chunks have their index."""
    here = node(tmp_path, ram=None)
    kv, index = Shape(layers=4), Shape(layers=1, slot=16, order="index")
    ranks = here.ranks(namespace(kv, index), kv, index)
    ranks[0].store(tokens(16))
    ranks[1].store(tokens(8))
    here.settle()
    backend: Any = here.manager.tier("disk").backend
    if vanishes:
        digest = digest_of(ranks[1], tokens(16), 1)
        key = next(key for key in here.manager.tier("disk").index if key.digest == digest and key.shard == 1)
        get = backend.get

        def late(keys: Sequence[ChunkKey], into: Sequence[MemoryObject]) -> Any:
            Path(frame_path(str(tmp_path), key)).unlink(missing_ok=True)
            return get(keys, into)

        monkeypatch.setattr(backend, "get", late)
    request = Request(ranks, tokens(17)).queue().look_up()
    assert request.hit.tokens == 8
    request.allocate().load()
    assert request.computed == (4 if vanishes else 8)
    request.run().finish()
    assert ranks[0].find(tokens(16)) == request.computed


STATES = ("queued", "looked up", "allocated", "loading", "running", "storing", "finished")


def bring_to(here: Node, request: Request, state: str) -> Callable[[], object]:
    """Drive a request into a state; returns what waits for the step that is under way there."""
    steps: dict[str, Callable[[], object]] = {
        "queued": request.queue,
        "looked up": request.look_up,
        "allocated": request.allocate,
        "loading": request.load,
        "running": request.run,
        "storing": request.store,
        "finished": request.finish,
    }
    for name in STATES[: STATES.index(state)]:
        steps[name]()
    if state in {"loading", "storing"}:
        return here.start(steps[state]).result
    steps[state]()
    return lambda: None


@pytest.mark.parametrize("place", ["ram", "disk"])
@pytest.mark.parametrize("state", STATES)
def test_a15_abort_at_every_point(node: Callable[..., Node], tmp_path: Path, state: str, place: str) -> None:
    """200 requests aborted in each state, half of them twice: no hold, no page and no byte of the pool is lost."""
    here = node(tmp_path, ram=64 * FRAME if place == "ram" else None, disk_queue={"calls": 1000, "bytes": 1 << 30})
    engine = here.engine()
    everything, pages = here.manager.pool.free_bytes, len(engine.free)
    engine.store(tokens(16))
    for number in range(200):
        # Half of each is in the cache already, so that every state has both a load and a store.
        request = Request([engine], [*tokens(8), *tokens(9, 1000 * number)])
        under_way = bring_to(here, request, state)
        request.abort()
        if number % 2:
            request.abort()
        under_way()
        request.finish()
        if number % 2:
            request.finish()
            request.abort()
    here.settle()
    assert here.held() == {}
    assert len(engine.free) == pages
    assert engine.find(tokens(8)) == 8, "others are not hurt"
    engine.cache.clear()
    here.settle()
    assert here.manager.pool.free_bytes == everything
    engine.cache.close()
    here.settle()
    assert here.on_loop(here.manager.holds)["sessions"] == 0


def test_a15_client_dies_in_the_middle_of_a_store(node: Callable[..., Node], monkeypatch: pytest.MonkeyPatch) -> None:
    """What it was filling and holding is free again; others may store the same."""
    here = node()
    dies, other = here.engine(), here.engine()
    free = here.manager.pool.free_bytes

    def gone(jobs: object, **more: object) -> None:
        dies.cache.close()
        raise KeyboardInterrupt

    monkeypatch.setattr(dies.gpu, "gather", gone)
    with pytest.raises(KeyboardInterrupt):
        dies.store(tokens(8))
    here.settle()
    assert here.manager.pool.free_bytes == free
    assert other.find(tokens(8)) == 0
    assert other.store(tokens(8)) == 8
    assert other.load(tokens(8)) == 8


def test_a16_partial_use(node: Callable[..., Node]) -> None:
    """16 held, the engine lacks the last 2 chunks only: the first 2 are let go at once, all after the load."""
    here = node()
    engine = here.engine()
    engine.store(tokens(16))
    request = Request([engine], tokens(17), has=2 * CHUNK).queue().look_up()
    assert here.held()["entries"] == 4
    request.allocate()
    assert here.held()["entries"] == 2
    request.load()
    assert request.computed == 16
    here.settle()
    assert here.held() == {}
    request.run().finish()
