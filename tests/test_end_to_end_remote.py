"""A real vLLM above stores that others can reach: `cpu → redis`, shared by two engines, and `cpu → disk → s3`."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from redis_rig import RedisServer
from s3_rig import JuiceGateway, make_bucket
from vllm_rig import BLOCK, CHUNK, Vllm, counted, questions, services_gone, stack

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.vllm

SOME, MORE = questions(2), questions(1, first=10)
PROMPT = 317
CHUNKS = PROMPT // CHUNK * CHUNK
"""Tokens of a question's whole chunks."""
WHOLE = PROMPT // BLOCK * BLOCK
"""And of its whole pages."""


@pytest.fixture(scope="module")
def place() -> Iterator[Path]:
    """A short path: unix sockets take no long ones."""
    folder = Path(tempfile.mkdtemp(prefix="lmkv-e-"))
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="module")
def right(place: Path) -> dict[str, list[int]]:
    """What the model says without lmkv."""
    with Vllm(place / "plain", None) as engine:
        return engine.ask(SOME | MORE).answers


def part(answers: dict[str, list[int]], asked: dict[str, Any]) -> dict[str, list[int]]:
    return {name: answers[name] for name in asked}


def hits(health: dict[str, Any], tier: str) -> float:
    """Tokens that came from there. Two questions share a document: the second may find it in RAM by then."""
    return counted(health, "lmkv_hit_tokens_total", tier=tier)


def test_two_engines_share_one_redis(place: Path, right: dict[str, list[int]]) -> None:
    """Two nodes, each with a RAM tier of its own above the same Redis. What one has computed the other does not."""
    with RedisServer(place / "redis") as server:
        config = stack({"name": "redis", "backend": "redis", "deadline": "5s", "options": {"url": server.url}})
        with Vllm(place / "a", config) as first:
            cold = first.ask(SOME)
            assert cold.answers == part(right, SOME)
            assert set(cold.cached.values()) == {0}
            stored = first.quiet()
            assert counted(stored, "lmkv_tier_operations_total", tier="redis", op="put", outcome="ok") > 0
            warm = first.ask(SOME)
            assert warm.answers == part(right, SOME)
            assert set(warm.cached.values()) == {WHOLE}
            with Vllm(place / "b", config) as second:
                there = second.ask(SOME)
                assert there.answers == part(right, SOME)
                assert min(there.cached.values()) >= CHUNKS, "it starts warm"
                health = second.quiet()
                assert hits(health, "redis") >= CHUNKS * len(SOME) // 2
                assert hits(health, "redis") + hits(health, "ram") == sum(there.cached.values())
                new = second.ask(MORE)
                assert new.answers == part(right, MORE)
                assert set(new.cached.values()) == {0}
                second.quiet()
                back = first.ask(MORE)
                assert back.answers == part(right, MORE)
                assert min(back.cached.values()) >= CHUNKS, "and gives back"
            last = first.quiet()
            assert hits(last, "redis") >= CHUNKS * len(MORE) // 2
            assert not any(last["holds"][kind] for kind in ("leases", "holds", "reservations"))
        services_gone(place / "a")
        services_gone(place / "b")


@pytest.mark.slow
def test_disk_and_s3_through_restarts(place: Path, right: dict[str, list[int]]) -> None:
    """Three tiers; then without the disk; then with the disk below S3."""
    disk = {"name": "disk", "backend": "disk", "capacity": "64MiB", "options": {"path": str(place / "disk")}}
    with JuiceGateway(place / "gateway") as server:
        options = {
            "bucket": make_bucket(server),
            "endpoint": server.endpoint,
            "access_key": server.access_key,
            "secret_key": server.secret_key,
        }
        s3 = {"name": "s3", "backend": "s3", "deadline": "10s", "options": options}
        with Vllm(place / "1", stack(disk, s3)) as engine:
            cold = engine.ask(SOME)
            assert cold.answers == part(right, SOME)
            assert set(cold.cached.values()) == {0}
            health = engine.quiet()
            for tier in ("disk", "s3"):
                assert counted(health, "lmkv_tier_operations_total", tier=tier, op="put", outcome="ok") > 0
        services_gone(place / "1")
        with Vllm(place / "2", stack(s3)) as engine:
            warm = engine.ask(SOME)
            assert warm.answers == part(right, SOME)
            assert min(warm.cached.values()) >= CHUNKS
            assert engine.ask(MORE).answers == part(right, MORE)
            health = engine.quiet()
            assert hits(health, "s3") >= CHUNKS * len(SOME) // 2
            assert hits(health, "s3") + hits(health, "ram") == sum(warm.cached.values())
        services_gone(place / "2")
        with Vllm(place / "3", stack(s3, disk)) as engine:
            asked = engine.ask(SOME | MORE)
            assert asked.answers == right
            assert min(asked.cached.values()) >= CHUNKS
            health = engine.quiet()
            assert hits(health, "s3") >= CHUNKS, "the disk has never seen this document"
            assert sum(hits(health, tier) for tier in ("ram", "s3", "disk")) == sum(asked.cached.values())
        services_gone(place / "3")
