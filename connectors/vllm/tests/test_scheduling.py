"""Both sides of the connector under a fake vLLM that checks every byte it reads."""

from __future__ import annotations

import random
import threading
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
from fake_vllm import CHUNK, PAGE, Request, truth

from lmkv.testing import FaultyBackend, hangs
from lmkv_vllm.settings import Settings

if TYPE_CHECKING:
    from pathlib import Path


def tokens(count: int, start: int = 1) -> list[int]:
    return list(range(start, start + count))


def test_second_time_is_loaded(rig: Any) -> None:
    engine = rig.engine()
    first = engine.ask(tokens(17))
    assert first.external == 0
    assert first.output == truth(tokens(17), 3)
    second = engine.ask(tokens(17))
    assert second.external == 16
    assert second.output == first.output


def test_a08_whole_prompt_stored(rig: Any) -> None:
    """Of 8 tokens 7 could be offered; pages are whole, so it is 6, and the page of the last token is not touched."""
    engine = rig.engine()
    engine.ask(tokens(8))
    assert engine.scheduler._engine is not None
    request = engine.add(Request("again", tokens(8)))
    while request.status != "WAITING_FOR_REMOTE_KVS":
        engine.step()
    assert request.offered == 6
    assert len(request.blocks) == 3
    engine.run()
    assert request.output == truth(tokens(8), 3)


def test_a09_engine_owns_a_part(rig: Any) -> None:
    """12 stored, the engine has 6, no multiple of a chunk: 4 more are offered, none of the first 6 is written."""
    engine = rig.engine(caching=True)
    engine.ask(tokens(12))
    engine.blocks.forget()
    engine.ask(tokens(6), max_tokens=1)
    request = engine.add(Request("again", tokens(12)))
    engine.step()
    before = engine.kv[0][request.blocks[:3]].copy()
    assert (request.local, request.offered, request.external) == (6, 4, 4)
    while request.status == "WAITING_FOR_REMOTE_KVS":
        engine.step()
    assert (engine.kv[0][request.blocks[:3]] == before).all()
    engine.run()
    assert request.output == truth(tokens(12), 3)


def test_a10_engine_has_more(rig: Any) -> None:
    engine = rig.engine(caching=True)
    engine.ask(tokens(4), max_tokens=1)
    engine.scheduler._writes = False
    engine.ask(tokens(6), max_tokens=1)
    engine.scheduler._writes = True
    request = engine.ask(tokens(10))
    assert (request.local, request.offered) == (6, 0)
    assert request.output == truth(tokens(10), 3)
    rig.nothing_held()


def test_a16_partial_use(rig: Any) -> None:
    """16 found, the engine lacks the last 2 chunks: the first 2 are let go when that is known."""
    engine = rig.engine(caching=True)
    engine.ask(tokens(17), max_tokens=1)
    engine.blocks.forget()
    engine.ask(tokens(8), max_tokens=1)
    trims: list[tuple[int, int]] = []
    cache = engine.scheduler._engine
    assert cache is not None
    trim = cache.trim
    cache.trim = lambda lease, skip: (trims.append((lease, skip)), trim(lease, skip))[1]  # type: ignore[method-assign]
    request = engine.add(Request("again", tokens(17)))
    engine.step()
    assert (request.local, request.external) == (8, 8)
    assert [skip for _, skip in trims] == [2]
    engine.run()
    rig.nothing_held()


def test_page_granular(rig: Any) -> None:
    """A prompt that diverges in the middle of a chunk gets the pages of it that it shares."""
    engine = rig.engine()
    engine.ask(tokens(20), max_tokens=1)
    other = [*tokens(18), 90, 91, 92]
    request = engine.ask(other)
    assert request.external == 18
    assert request.output == truth(other, 3)


def test_tail_of_a_finished_request(rig: Any) -> None:
    """What was generated is found too, up to the last whole page."""
    engine = rig.engine()
    first = engine.ask(tokens(6), max_tokens=5)
    whole = tokens(6) + first.output
    assert len(whole) == 11
    request = engine.ask([*whole, 77, 78])
    assert request.external == 10
    assert request.output == truth([*whole, 77, 78], 3)


def test_no_decode(rig: Any) -> None:
    engine = rig.engine(settings=Settings(save_decode=False))
    first = engine.ask(tokens(6), max_tokens=9)
    request = engine.ask([*tokens(6), *first.output])
    assert request.external == 6


def test_no_tails(rig: Any) -> None:
    engine = rig.engine(rig.host(tail="none"))
    engine.ask(tokens(7), max_tokens=1)
    assert engine.ask(tokens(7)).external == CHUNK


def test_chunked_prefill(rig: Any) -> None:
    engine = rig.engine(budget=3)
    engine.ask(tokens(21))
    again = engine.ask(tokens(21))
    assert again.external == 20
    assert again.output == truth(tokens(21), 3)


def test_a02_fields_do_not_mix(rig: Any) -> None:
    engine = rig.engine()
    engine.ask(tokens(9), cache_salt="x")
    assert engine.ask(tokens(9)).external == 0
    assert engine.ask(tokens(9), cache_salt="y").external == 0
    again = engine.ask(tokens(9), cache_salt="x")
    assert again.external == 8
    assert again.output == truth(tokens(9), 3, "x")


def test_skip_reading(rig: Any) -> None:
    """A request told to skip the cache is not looked up, adds nothing to the counts, and is stored all the same."""
    engine = rig.engine()
    engine.ask(tokens(9), skip_reading_prefix_cache=True)
    assert engine.ask(tokens(9), skip_reading_prefix_cache=True).external == 0
    assert rig.counted().total("lmkv_lookup_tokens_total") == 0
    assert engine.ask(tokens(9)).external == 8


@pytest.mark.parametrize("ranks", [1, 2])
def test_a40_numbers_add_up(rig: Any, ranks: int) -> None:
    """Prompt of 100, the engine has 60, the cache gives 20 of the remaining 40: asked 40, hit 20, once.

    However many ranks there are; each of them shows its own part under its own labels.
    """
    engine = rig.engine(blocks=128, budget=20, caching=True, ranks=ranks)
    engine.ask(tokens(80), max_tokens=1, skip_reading_prefix_cache=True)
    engine.blocks.forget()
    engine.ask(tokens(60), max_tokens=1, skip_reading_prefix_cache=True)
    assert rig.counted().total("lmkv_lookup_tokens_total") == 0, "told to skip the cache"
    before = rig.counted()
    request = engine.ask([*tokens(80), *range(500, 520)])
    assert (request.local, request.external) == (60, 20)
    engine.step()
    rig.nothing_held()
    counted = rig.counted() - before
    who = {"model": "fake", "instance": "engine"}
    for name, asked in {"lmkv_lookups_total": 1, "lmkv_lookup_tokens_total": 40, "lmkv_hit_tokens_total": 20}.items():
        assert counted.total(name, **who, rank="scheduler") == counted.total(name) == asked, name
    assert counted.total("lmkv_hit_tokens_total", **who, tier="ram") == 20
    stored = 20 + PAGE  # of the prompt, and the whole page of the answer
    assert counted.total("lmkv_stored_tokens_total", **who, rank="0") == stored
    assert counted.total("lmkv_stored_tokens_total") == stored
    for rank in map(str, range(ranks)):
        assert counted.total("lmkv_rank_loaded_tokens_total", **who, rank=rank, tier="ram") == 20
        assert counted.total("lmkv_rank_stored_tokens_total", **who, rank=rank) == stored
    assert counted.total("lmkv_rank_loaded_tokens_total") == 20 * ranks
    assert rig.counted().wrong_labels() == []
    assert all(f'instance="{rig.hosts[0].storage.manager.metrics._constant["instance"]}"' in name
               for name in counted.names() if "rank=" not in name)  # fmt: skip


def test_a40_a_load_after_a_preemption_is_no_second_hit(rig: Any) -> None:
    """However often a request is pushed out and loaded again, it is counted once: no more hits than were asked."""
    engine = rig.engine(blocks=16, budget=8)
    prompts = [tokens(9, 100 * i) for i in range(1, 6)]
    for prompt in prompts:
        engine.ask(prompt, max_tokens=9, skip_reading_prefix_cache=True)
    requests = [Request(f"p{i}", prompt, max_tokens=9) for i, prompt in enumerate(prompts)]
    engine.run(requests)
    engine.step()
    assert sum(request.num_preemptions for request in requests) > 0
    counted = rig.counted()
    assert counted.total("lmkv_lookups_total") == len(prompts)
    assert counted.total("lmkv_lookup_tokens_total") == 9 * len(prompts)
    assert 0 < counted.total("lmkv_hit_tokens_total") <= 8 * len(prompts)
    assert counted.total("lmkv_rank_loaded_tokens_total") > 8 * len(prompts), "what was loaded again was loaded"


def test_preemption_and_resume(rig: Any) -> None:
    """Far too few pages: requests push each other out, come back, find what they had stored, and answer right."""
    engine = rig.engine(blocks=16, budget=8)
    prompts = [tokens(9, 100 * i) for i in range(1, 6)]
    requests = [Request(f"p{i}", prompt, max_tokens=9) for i, prompt in enumerate(prompts)]
    engine.run(requests)
    assert sum(request.num_preemptions for request in requests) > 0
    for request in requests:
        assert request.output == truth(request.prompt_token_ids, 9)


def test_two_ranks(rig: Any) -> None:
    engine = rig.engine(ranks=2)
    engine.ask(tokens(13))
    again = engine.ask(tokens(13))
    assert again.external == 12
    assert again.output == truth(tokens(13), 3)


def test_a13_ranks_disagree(rig: Any) -> None:
    """One rank could not store the last chunk: both get what both have."""
    engine = rig.engine(ranks=2)
    gather = engine.workers[1]._gpu.inner.gather

    def fails(jobs: Any, **more: Any) -> None:
        if any(job.pages[0] == engine.third_chunk for job in jobs):
            raise ValueError("no")
        gather(jobs, **more)

    engine.third_chunk = list(engine.blocks.free)[4]
    engine.workers[1]._gpu.inner.gather = fails  # type: ignore[method-assign]
    engine.ask(tokens(13), max_tokens=1)
    engine.workers[1]._gpu.inner.gather = gather  # type: ignore[method-assign]
    again = engine.ask(tokens(13))
    assert again.external == 8
    assert again.output == truth(tokens(13), 3)
    assert engine.ask(tokens(13)).external == 12


def test_a12_middle_chunk_fails(rig: Any) -> None:
    """Chunk 2 of 3 cannot be copied: chunk 1 is kept, the engine computes from token 4 on, and stores it anew."""
    engine = rig.engine()
    engine.ask(tokens(13), max_tokens=1)
    inner = engine.workers[0]._gpu.inner
    scatter = inner.scatter
    calls = []

    def fails(jobs: Any, **more: Any) -> None:
        calls.append(len(jobs))
        scatter(jobs[:1], **more)
        raise ValueError("no")

    inner.scatter = fails  # type: ignore[method-assign]
    before = engine.computed
    again = engine.ask(tokens(13))
    inner.scatter = scatter  # type: ignore[method-assign]
    assert calls
    assert again.output == truth(tokens(13), 3)
    assert engine.computed - before >= 13
    assert engine.ask(tokens(13)).external == 12


def test_a11_service_forgets_in_between(rig: Any) -> None:
    """The service is replaced between look-up and load: no page is taken for loaded, the engine computes."""
    engine = rig.engine()
    engine.ask(tokens(13), max_tokens=1)
    admit = engine.scheduler._admit
    engine.scheduler._admit = lambda *given: replace(admit(*given), incarnation=1)  # type: ignore[method-assign]
    request = engine.add(Request("again", tokens(13)))
    engine.step()
    engine.scheduler._admit = admit  # type: ignore[method-assign]
    before = engine.computed
    engine.run()
    assert request.external == 12
    assert engine.computed - before >= 13
    assert request.output == truth(tokens(13), 3)


@pytest.mark.parametrize("place", ["hits_of", "load_items", "frames_of"])
def test_own_error_never_strands_a_request(rig: Any, monkeypatch: pytest.MonkeyPatch, place: str) -> None:
    """Our code raises where the engine waits for a load, or while saves are planned: the request is computed."""
    engine = rig.engine()
    engine.ask(tokens(13), max_tokens=1)

    def fails(*_: Any, **__: Any) -> None:
        raise RuntimeError("no")

    with monkeypatch.context() as patch:
        patch.setattr(f"lmkv_vllm.scheduler.{place}", fails)
        again = engine.ask(tokens(13))
    assert again.output == truth(tokens(13), 3)
    assert engine.ask(tokens(13)).external == 12


def test_service_gone(rig: Any) -> None:
    """Nothing is offered while the service cannot be reached, nor what an earlier one had found."""
    engine = rig.engine()
    engine.ask(tokens(13), max_tokens=1)
    request = engine.add(Request("again", tokens(13)))
    cache = engine.scheduler._engine
    assert cache is not None
    cache.client.close()
    engine.run()
    assert request.external == 0
    assert request.output == truth(tokens(13), 3)


def test_lookup_deadline(rig: Any) -> None:
    """A service that does not answer costs the deadline once, and a miss."""
    engine = rig.engine(settings=Settings(lookup_deadline=0.02))
    engine.ask(tokens(9))
    cache = engine.scheduler._engine
    assert cache is not None

    class Never:
        def poll(self) -> None:
            return None

        def wait(self, seconds: float) -> None:
            time.sleep(seconds)

        def cancel(self) -> None:
            return None

    begin = cache.begin_lookup
    cache.begin_lookup = lambda chain, **_: Never()  # type: ignore[method-assign,assignment,misc]
    again = engine.ask(tokens(9))
    cache.begin_lookup = begin  # type: ignore[method-assign]
    assert again.external == 0
    assert again.output == truth(tokens(9), 3)
    assert engine.ask(tokens(9)).external == 8


def test_fence(rig: Any) -> None:
    """A save reads pages that the engine has given away: the step waits, or the save is dropped, never garbage."""
    engine = rig.engine(blocks=12, settings=Settings(fence_deadline=0.05))
    inner = engine.workers[0]._gpu.inner
    gather = inner.gather

    def slow(jobs: Any, **more: Any) -> None:
        time.sleep(0.03)
        gather(jobs, **more)

    inner.gather = slow  # type: ignore[method-assign]
    prompts = [tokens(9, 100 * i) for i in range(1, 8)]
    engine.run([Request(f"p{i}", prompt, max_tokens=2) for i, prompt in enumerate(prompts)])
    inner.gather = gather  # type: ignore[method-assign]
    for prompt in prompts:
        assert engine.ask(prompt, max_tokens=2).output == truth(prompt, 2)


@pytest.mark.parametrize("state", ["queued", "looked up", "loading", "running", "finished"])
def test_a15_abort_at_every_point(rig: Any, state: str) -> None:
    engine = rig.engine(blocks=64)
    engine.ask(tokens(21))
    free = len(engine.blocks.free)
    for number in range(60):
        request = engine.add(Request(f"{state}-{number}", tokens(21), max_tokens=3))
        steps = {"queued": 0, "looked up": 0, "loading": 1, "running": 4, "finished": 60}[state]
        if state == "looked up":
            engine.scheduler.offered(request, 0)
        for _ in range(steps):
            engine.step()
        engine.abort(request)
        if number % 2:
            engine.abort(request)
        engine.step()
    engine.run()
    assert len(engine.blocks.free) == free
    assert not engine.scheduler._tracked
    assert not engine.scheduler._loading
    assert engine.scheduler._held == 0
    rig.nothing_held()


@pytest.mark.parametrize("state", ["queued", "looked up", "loading"])
def test_an_aborted_request_lets_go_at_once(rig: Any, tmp_path: Path, state: str) -> None:
    """Whatever its load waits for: nothing is held for it any more, of loads under way only what has begun goes on.

    An aborted request whose load was handed to the workers gets its blocks back before the tier has answered.
    """
    disk = {"name": "disk", "backend": "disk", "capacity": "4MiB", "options": {"path": str(tmp_path)}, "threads": 1}
    ram = {"name": "ram", "backend": "cpu", "capacity": "1MiB"}
    disk |= {"deadline": "30s", "queue": {"seconds": "30s"}}
    host = rig.host(tiers=[ram, disk], offer={"mode": "always"})
    engine = rig.engine(host, blocks=200, budget=64, settings=Settings(lookup_deadline=10.0))
    prompts = [tokens(17, 100 * number) for number in range(1, 9)]
    for prompt in prompts:
        engine.ask(prompt, max_tokens=1)
    rig.quiet(host)
    tier = host.storage.manager.tier("disk")
    assert rig.clear("ram") == len(tier.index) == len(prompts) * 16 // CHUNK
    free = len(engine.blocks.free)
    backend, go = FaultyBackend(tier.backend), threading.Event()
    backend.script("get", hangs(go), times=None)
    tier.backend = backend
    try:
        requests = [engine.add(Request(f"{state} {number}", prompt)) for number, prompt in enumerate(prompts)]
        for request in requests:
            if state == "looked up":
                engine.scheduler.offered(request, 0)
        until = time.monotonic() + 10
        if state == "loading":
            while not all(request.status == "WAITING_FOR_REMOTE_KVS" for request in requests):
                engine.step()
                assert time.monotonic() < until, "not all are loading"
        assert rig.health(host).holds["leases"] == len(prompts)
        while not backend.calls["get"]:
            assert time.monotonic() < until, "no load has begun"
            time.sleep(0.002)
        for request in requests:
            engine.abort(request)
        until = time.monotonic() + 5
        while len(engine.blocks.free) < free:
            engine.step()
            assert time.monotonic() < until, "the blocks do not come back"
        rig.nothing_held()
        assert backend.calls["get"] == 1
    finally:
        go.set()
    rig.quiet(host)
    assert backend.calls["get"] <= len(prompts) // 2, "loads that nobody wants any more were done"
    assert engine.ask(prompts[-1]).external == 16


def test_reset(rig: Any) -> None:
    """After a change of weights nothing old is found, and what was computed before is not stored as new."""
    engine = rig.engine()
    engine.ask(tokens(13))
    running = engine.add(Request("running", tokens(30, 200), max_tokens=12))
    engine.step()
    engine.step()
    assert engine.scheduler.reset() is True
    engine.run()
    assert running.output == truth(tokens(30, 200), 12)
    assert engine.ask(tokens(30, 200)).external == 0
    assert engine.ask(tokens(13)).external == 0
    assert engine.ask(tokens(13)).external == 12


def test_role(rig: Any) -> None:
    host = rig.host()
    producer, consumer = rig.engine(host, loads=False), rig.engine(host, saves=False)
    producer.ask(tokens(13))
    assert producer.ask(tokens(13)).external == 0
    assert consumer.ask(tokens(13)).external == 12
    consumer.ask(tokens(13, 300))
    assert consumer.ask(tokens(13, 300)).external == 0


def test_uncacheable(rig: Any) -> None:
    engine = rig.engine()
    for more in ({"prompt_embeds": object()}, {"resumable": True}):
        engine.ask(tokens(9), **more)
        assert engine.ask(tokens(9), **more).external == 0
    assert engine.ask(tokens(9)).external == 0


def test_long_prompt_is_hashed_in_a_thread(rig: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lmkv_vllm.lookups.INLINE_TOKENS", 8)
    engine = rig.engine(blocks=64, budget=32)
    engine.ask(tokens(41))
    again = engine.ask(tokens(41))
    assert again.external == 40
    assert again.output == truth(tokens(41), 3)


def test_full_backlog(rig: Any) -> None:
    engine = rig.engine(settings=Settings(save_backlog=1))
    inner = engine.workers[0]._gpu.inner
    gather = inner.gather
    inner.gather = lambda jobs, **more: (time.sleep(0.01), gather(jobs, **more))[1]  # type: ignore[method-assign]
    prompts = [tokens(9, 100 * i) for i in range(1, 8)]
    engine.run([Request(f"p{i}", prompt) for i, prompt in enumerate(prompts)])
    inner.gather = gather  # type: ignore[method-assign]
    for prompt in prompts:
        assert engine.ask(prompt).output == truth(prompt, 3)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("ranks", [1, 2])
def test_random_traffic(rig: Any, seed: int, ranks: int) -> None:
    """Shared prefixes, few pages, aborts anywhere, slow copies, failing loads: every answer right, nothing left."""
    dice = random.Random(seed)
    engine = rig.engine(
        rig.host(ranks=ranks),
        blocks=20,
        budget=7,
        ranks=ranks,
        caching=seed % 2 == 1,
        settings=Settings(fence_deadline=dice.choice([0.0, 0.5])),
    )
    inner = engine.workers[0]._gpu.inner
    gather, scatter = inner.gather, inner.scatter

    def some_gather(jobs: Any, **more: Any) -> None:
        if dice.random() < 0.3:
            time.sleep(0.002)
        gather(jobs, **more)

    def some_scatter(jobs: Any, **more: Any) -> None:
        if dice.random() < 0.15:
            scatter(jobs[: len(jobs) // 2], **more)
            raise ValueError("no")
        scatter(jobs, **more)

    inner.gather, inner.scatter = some_gather, some_scatter  # type: ignore[method-assign]
    base = [dice.randrange(40) for _ in range(24)]
    live: list[Request] = []
    everything: list[Request] = []
    for number in range(70):
        prompt = base[: dice.randrange(1, 20)] + [dice.randrange(40) for _ in range(dice.randrange(1, 8))]
        request = Request(f"q{number}", prompt, max_tokens=dice.randrange(1, 9))
        live.append(engine.add(request))
        everything.append(request)
        for _ in range(dice.randrange(4)):
            engine.step()
        if dice.random() < 0.2:
            engine.abort(live.pop(dice.randrange(len(live))))
    engine.run()
    for request in everything:
        if request.status == "FINISHED_STOPPED":
            assert request.output == truth(request.prompt_token_ids, request.max_tokens)
    assert len(engine.blocks.free) == 19
    assert not engine.scheduler._loading
    assert engine.scheduler._held == 0
