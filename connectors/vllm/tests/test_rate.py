"""How fast the engine computes, measured on its own steps."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from fake_vllm import truth

from lmkv.testing import FaultyBackend, slow
from lmkv_vllm.rate import FRESH_SECONDS, LEAST_TOKENS, UNDER_WAY, PrefillRate, prompt_tokens

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


def output(*counts: int, drafts: int = 0, encoder: bool = False) -> Any:
    """What was scheduled: so many tokens for each request; the last `drafts` of them decode with a draft model."""
    scheduled = {f"r{number}": count for number, count in enumerate(counts)}
    return SimpleNamespace(
        num_scheduled_tokens=scheduled,
        total_num_scheduled_tokens=sum(counts),
        scheduled_spec_decode_tokens={name: [1] for name in list(scheduled)[len(counts) - drafts :]},
        scheduled_encoder_inputs={"r0": [0]} if encoder else {},
    )


class Clock:
    """An engine of 10 000 tokens a second whose steps also cost 2 ms each."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.rate = PrefillRate(lambda: self.now)
        self.speed = 10_000.0

    def step(self, *counts: int, **more: Any) -> None:
        number = self.rate.scheduled(output(*counts, **more))
        self.now += sum(counts) / self.speed + 0.002
        self.rate.ended(number)
        self.rate.processed()


@pytest.fixture
def clock() -> Clock:
    return Clock()


def test_unknown_until_there_is_evidence(clock: Clock) -> None:
    assert clock.rate.tokens_per_second == 0
    clock.step(1000)
    clock.step(1000)
    assert clock.rate.tokens_per_second == 0
    clock.step(1000)
    assert clock.rate.tokens_per_second == pytest.approx(1000 / 0.102)


def test_idle_time_does_not_count(clock: Clock) -> None:
    for _ in range(5):
        clock.step(1000)
        clock.now += 60
    assert clock.rate.tokens_per_second == pytest.approx(1000 / 0.102)


def test_planning_ahead(clock: Clock) -> None:
    """The next step is scheduled while one runs: it begins when that one has ended, not when it was scheduled."""
    rate = clock.rate
    under_way = rate.scheduled(output(1000))
    for _ in range(6):
        following = rate.scheduled(output(1000))
        clock.now += 0.1
        rate.ended(under_way)
        rate.processed()
        under_way = following
    assert rate.tokens_per_second == pytest.approx(10_000)


def test_steps_that_say_nothing(clock: Clock) -> None:
    """Few tokens, or few of them of prompts, drafts, and steps that compute images too."""
    for _ in range(10):
        clock.step(LEAST_TOKENS - 1)
        clock.step(*[1] * 300)
        clock.step(200, *[1] * 100)
        clock.step(200, *[4] * 100, drafts=100)
        clock.step(1000, encoder=True)
        clock.step()
    assert clock.rate.tokens_per_second == 0
    assert not clock.rate._under_way


def test_what_belongs_to_prompts() -> None:
    assert prompt_tokens(output(500, 300, 1, 1)) == 800
    assert prompt_tokens(output(500, 4, 4, drafts=2)) == 500
    assert prompt_tokens(output(2, 2, 2, 2, *[200])) == 208
    assert prompt_tokens(output(100, *[1] * 200)) == 0


def test_steps_with_some_decoding_count(clock: Clock) -> None:
    """A busy engine never computes prompts alone; what it makes of them then is what the next prompt gets, too."""
    for _ in range(5):
        clock.step(960, *[1] * 40)
    assert clock.rate.tokens_per_second == pytest.approx(960 / 0.102)


def test_the_largest_steps_count(clock: Clock) -> None:
    """Where the fixed cost of a step, a sixth of a small one, matters least."""
    for number in range(40):
        clock.step(2000 if number % 4 == 0 else 100)
    assert clock.rate.tokens_per_second == pytest.approx(2000 / 0.202)


def test_a_slow_step_does_not_matter(clock: Clock) -> None:
    """The first one compiles; later ones are held up by others."""
    for number in range(12):
        clock.speed = 30.0 if number in {0, 5, 9} else 10_000.0
        clock.step(1000)
    assert clock.rate.tokens_per_second == pytest.approx(1000 / 0.102)


def test_ageing(clock: Clock) -> None:
    """The machine has other work now: what was measured long ago, and what many steps ago, is forgotten."""
    for _ in range(40):
        clock.step(1000)
    clock.speed = 1000.0
    clock.now += FRESH_SECONDS + 1
    clock.step(1000)
    assert clock.rate.tokens_per_second == pytest.approx(1000 / 0.102), "one step alone says too little"
    clock.step(900)
    clock.step(900)
    assert clock.rate.tokens_per_second == pytest.approx(900 / 0.902)
    clock.speed = 10_000.0
    for _ in range(64):
        clock.step(800)
    assert clock.rate.tokens_per_second == pytest.approx(800 / 0.082)


def test_outputs_that_never_come(clock: Clock) -> None:
    for _ in range(10 * UNDER_WAY):
        clock.rate.scheduled(output(1000))
    assert len(clock.rate._under_way) == UNDER_WAY
    clock.rate.ended(1)
    clock.rate.ended(0)
    clock.rate.ended(10**9)
    assert clock.rate.tokens_per_second == 0


def test_measured_and_passed_on(rig: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine of 20 000 tokens a second at most: unknown for the first requests, then asked about with its rate."""
    asked: list[float] = []
    engine = rig.engine(rig.host(pool={"size": "32MiB", "prefault": False, "hugepages": "off"}), blocks=400, budget=128)
    cache = engine.scheduler._engine
    begin = cache.begin_lookup
    spy: Callable[..., Any] = lambda chain, **more: (asked.append(more["prefill_rate"]), begin(chain, **more))[1]  # noqa: E731
    monkeypatch.setattr(cache, "begin_lookup", spy)
    engine.seconds_per_token = 0.0005
    for number in range(4):
        engine.ask(list(range(1000 * number, 1000 * number + 300)), max_tokens=4)
    assert asked[0] == 0
    assert 200 < asked[-1] < 2000
    assert engine.scheduler._rate.tokens_per_second < 2000


@pytest.mark.parametrize("mode", ["measured", "always"])
def test_never_slower_than_computing(rig: Any, tmp_path: Path, mode: str) -> None:
    """Loads of 0.4 s where computing takes 0.05 s: once both are known, the prompt is computed, and counted as such."""
    host = rig.host(
        pool={"size": "32MiB", "prefault": False, "hugepages": "off"},
        tiers=[
            {"name": "ram", "backend": "cpu", "capacity": "8MiB"},
            {
                "name": "far",
                "backend": "disk",
                "capacity": "16MiB",
                "options": {"path": str(tmp_path)},
                "threads": 1,
                "queue": {"calls": 1000},
            },
        ],
        offer={"mode": mode},
    )
    engine = rig.engine(host, blocks=400, budget=128)
    engine.seconds_per_token = 0.0002
    prompts = [list(range(1000 * number, 1000 * number + 257)) for number in range(5)]
    for prompt in prompts:
        engine.ask(prompt, max_tokens=1)
        rig.quiet(host)
    assert engine.scheduler._rate.tokens_per_second > 500
    assert rig.clear("ram") > 0
    tier = host.storage.manager.tier("far")
    tier.backend = FaultyBackend(tier.backend)
    tier.backend.script("get", slow(0.4), times=None)
    offered = [engine.ask(prompt, max_tokens=1).external for prompt in prompts[:3]]
    assert offered[0] == 256, "what it costs is not known before"
    rig.quiet(host)
    before = rig.counted()
    last = engine.ask(prompts[4], max_tokens=3)
    assert last.output == truth(prompts[4], 3)
    engine.step()
    counted = rig.counted() - before
    asked = {"model": "fake", "rank": "scheduler", "instance": "engine"}
    assert counted.total("lmkv_lookup_tokens_total", **asked) == 257
    if mode == "always":
        assert last.external == 256
        assert counted.total("lmkv_withheld_tokens_total") == 0
        return
    assert last.external == 0
    assert counted.total("lmkv_withheld_tokens_total", **asked, tier="far") == 256
    assert counted.total("lmkv_withheld_tokens_total") == 256
    assert counted.total("lmkv_hit_tokens_total") == 0
    assert counted.total("lmkv_misses_total") == 0
    assert counted.total("lmkv_rank_loaded_tokens_total") == 0
    rig.nothing_held()
