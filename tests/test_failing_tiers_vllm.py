"""A tier fails while requests of a real vLLM are in flight: the same tokens, and no step of the engine waits for it."""

from __future__ import annotations

import shutil
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from fault_rig import RedisStore, S3Store
from vllm_rig import Vllm, counted, questions, stack

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from fault_rig import RemoteStore
    from vllm_rig import Asked

pytestmark = pytest.mark.vllm

DEADLINE = 1.0
PROBE = 0.5
SLACK = 5.0
"""vLLM takes a core of two, and its requests take what they take."""
FAR = {"name": "far", "deadline": f"{DEADLINE}s", "breaker": {"failures": 3, "probe": f"{PROBE}s"}}
SOME = questions(3)


@pytest.fixture
def place() -> Iterator[Path]:
    """A short path: unix sockets take no long ones."""
    folder = Path(tempfile.mkdtemp(prefix="lmkv-f-"))
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


def small_ram(tier: dict[str, Any]) -> dict[str, Any]:
    """RAM for three frames: nearly all that is loaded comes from the tier below."""
    config = stack({**FAR, **tier})
    config["tiers"][0]["capacity"] = "1MiB"
    return config


def through_faults(
    place: Path, tier: dict[str, Any], faults: dict[str, Callable[[], object]], heal: Callable[[], object]
) -> None:
    """Every fault comes while requests are in flight, stays for some more, and goes."""
    with Vllm(place, small_ram(tier)) as engine:
        right = engine.ask(SOME)
        assert set(right.cached.values()) == {0}
        engine.quiet()
        warm = engine.ask(SOME)
        assert warm.answers == right.answers
        assert sum(warm.cached.values()) > 0
        calm = max(right.longest_step, warm.longest_step)
        for name, begin in faults.items():
            before = noticed(engine)
            flying = engine.begin(SOME)
            begin()
            for asked in (flying.result(SLACK * 20), engine.ask(SOME), engine.ask(SOME)):
                assert asked.answers == right.answers, name
                assert asked.longest_step < calm + DEADLINE, f"{name}: the engine's thread waited for the tier"
                assert asked.seconds < max(right.seconds, warm.seconds) + 2 * DEADLINE + SLACK, name
            assert noticed(engine) > before, f"{name}: nothing failed"
            heal()
            recovered(engine, right, name)
        assert not any(engine.quiet()["holds"][kind] for kind in ("leases", "holds", "reservations"))
        assert "Traceback" not in engine.log


def noticed(engine: Vllm) -> float:
    """What has gone wrong in the tier so far."""
    health = engine.health()
    failed = [
        counted(health, "lmkv_tier_operations_total", tier="far", outcome=outcome)
        for outcome in ("failed", "deadline", "open")
    ]
    return sum(failed) + counted(health, "lmkv_corrupt_frames_total", tier="far")


def recovered(engine: Vllm, right: Asked, name: str) -> None:
    """Within a probe interval, and what requests take, the tier gives hits again."""
    begin = time.monotonic()
    while True:
        asked = engine.ask(SOME)
        assert asked.answers == right.answers, name
        if sum(asked.cached.values()) > 0 and engine.quiet()["tiers"]["far"]["state"] == "ok":
            return
        assert time.monotonic() - begin < PROBE + DEADLINE + 4 * SLACK, f"{name}: no hits after it is well again"


def test_disk(place: Path) -> None:
    folder, away = place / "disk", place / "away"
    tier = {"backend": "disk", "capacity": "64MiB", "options": {"path": str(folder)}}

    def damage() -> None:
        for path in (folder / "frames").rglob("*.*"):
            if path.is_file() and path.stat().st_size > 100_000:
                with path.open("r+b") as file:
                    file.seek(5000)
                    file.write(bytes(64))

    def heal() -> None:
        if away.exists():
            shutil.move(away, folder)

    through_faults(place, tier, {"gone": lambda: shutil.move(folder, away), "damaged": damage}, heal)


QUICK = {"silent", "garbage", "cut"}
"""One of each kind."""


def remote(place: Path, store: RemoteStore, names: set[str]) -> None:
    """What can happen on the way to a store, and to the store itself."""
    faults: dict[str, Callable[[], object]] = {**store.fails, **store.hangs}
    try:
        through_faults(place, store.tier(), {name: faults[name] for name in faults if name in names}, store.heal)
    finally:
        store.heal()
        store.close()


@pytest.mark.slow
def test_redis(place: Path) -> None:
    remote(place, RedisStore(place / "redis"), QUICK)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [RedisStore, S3Store])
def test_every_fault(place: Path, kind: type[RedisStore | S3Store]) -> None:
    remote(place, kind(place / "store"), {*kind.fails, *kind.hangs})
