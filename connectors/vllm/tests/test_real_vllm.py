"""A real vLLM (its CPU build) with a tiny model: the same answers with lmkv as without it, and hits where due."""

from __future__ import annotations

import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from counted import Counted

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

pytestmark = pytest.mark.vllm

SCRIPT = Path(__file__).with_name("run_engine.py")
BLOCK, CHUNK = 32, 64
PROMPT = 317
WHOLE = PROMPT // BLOCK * BLOCK
"""Tokens of a question's whole pages, without that of its last token."""
SHARED = 300 // BLOCK * BLOCK
"""Whole pages of a document, which two questions share."""


@pytest.fixture(scope="module")
def place() -> Iterator[Path]:
    """A short path: unix sockets take no long ones."""
    folder = Path(tempfile.mkdtemp(prefix="lmkv-t-"))
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="module")
def run(place: Path) -> Callable[..., dict[str, Any]]:
    pytest.importorskip("vllm")

    def scenario(name: str, *, processes: bool = False, bind: str = "0", **arguments: Any) -> dict[str, Any]:
        given, result = place / f"{name}.in.json", place / f"{name}.out.json"
        given.write_text(json.dumps(arguments))
        result.unlink(missing_ok=True)
        environment = {
            **{key: value for key, value in os.environ.items() if not key.startswith("LMKV_CONFIG")},
            "VLLM_ENABLE_V1_MULTIPROCESSING": "1" if processes else "0",
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_CPU_OMP_THREADS_BIND": bind,
            "VLLM_LOGGING_LEVEL": "WARNING",
            "VLLM_NO_USAGE_STATS": "1",
            "HF_HUB_OFFLINE": "1",
            "XDG_RUNTIME_DIR": str(place),
        }
        command = [sys.executable, str(SCRIPT), name, str(given), str(result)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
        assert result.exists(), done.stdout[-3000:] + done.stderr[-6000:]
        out: dict[str, Any] = json.loads(result.read_text())
        out["log"] = done.stdout + done.stderr
        return out

    return scenario


@pytest.fixture(scope="module")
def truth(run: Callable[..., dict[str, Any]]) -> dict[str, Any]:
    return run("plain")


@pytest.fixture(scope="module")
def structures(run: Callable[..., dict[str, Any]]) -> dict[str, Any]:
    return run("structures")


def stack(**more: Any) -> dict[str, Any]:
    return {
        "chunk_tokens": CHUNK,
        "pool": {"size": "96MiB", "prefault": False, "hugepages": "off"},
        "tiers": [{"name": "ram", "backend": "cpu", "capacity": "64MiB"}],
        **more,
    }


def with_disk(folder: Path, capacity: str = "200MiB") -> dict[str, Any]:
    tiers = [
        {"name": "ram", "backend": "cpu", "capacity": "64MiB"},
        {"name": "disk", "backend": "disk", "capacity": capacity, "options": {"path": str(folder)}},
    ]
    return stack(tiers=tiers)


def answers(asked: dict[str, Any]) -> dict[str, list[int]]:
    return {name: one["answer"] for name, one in asked.items()}


def cached(asked: dict[str, Any]) -> list[int]:
    return [one["cached"] for one in asked.values()]


def held(holds: dict[str, int]) -> int:
    return sum(holds[name] for name in ("leases", "holds", "reservations"))


def wait_for_end(place: Path, seconds: float = 30.0) -> None:
    """Until the services of this test have ended: all that is to be on a disk is there."""
    until = time.monotonic() + seconds
    while any(place.glob("lmkv/*.sock")):
        assert time.monotonic() < until, "a service does not end"
        time.sleep(0.05)


def test_structures(structures: dict[str, Any]) -> None:
    """Importing starts nothing; vLLM's own structures give the right pages."""
    out = structures
    assert out["threads"] == 0
    assert out["cuda"] is False
    assert out["hma"] is False
    assert out["registered"] is True
    assert out["abstract"] == []
    page = 32 * 2 * 128 * 2
    for name in ("LBHNC", "LBNHC"):
        assert out["layouts"][name] == {"runs": 3, "bytes": 3 * page, "whole": True, "others": 0}
    for name in ("BLHNC", "BLNHC", "BHLNC"):
        assert out["layouts"][name] == {"runs": 1, "bytes": 3 * page, "whole": True, "others": 0}
    assert "LHBNC" in out["layouts"]["LHBNC"]
    assert "VLLM_KV_CACHE_LAYOUT" in out["layouts"]["LHBNC"]
    assert "encoder-decoder" in out["encoder-decoder"]
    assert "context parallelism of 2" in out["context parallel"]


def test_a34_chunk_versus_block(run: Callable[..., dict[str, Any]], structures: dict[str, Any]) -> None:
    """Chunks of 256: blocks of 16 are taken; 544, and groups {640, none, 640}, refused at the start, with numbers."""
    out = structures
    assert out["groups"]["one"] == "pages of 16"
    assert out["chunks"]["16"] == "accepted"
    assert "256 tokens" in out["chunks"]["544"]
    assert "blocks of 544 tokens" in out["chunks"]["544"]
    assert "such as 544" in out["chunks"]["544"]
    assert "such as 640" in out["chunks"]["640"]
    assert "3 KV cache groups" in out["groups"]["640, none, 640"]
    assert "640" in out["groups"]["640, none, 640"]
    refusal = run("refused", stacks={"48": stack(chunk_tokens=48), "typo": stack(chunk_sizee=64)})
    assert "48 tokens" in refusal["48"] + refusal["log"]
    assert "blocks of 32 tokens" in refusal["48"] + refusal["log"]
    assert "chunk_sizee" in refusal["typo"] + refusal["log"]


def test_one_process(run: Callable[..., dict[str, Any]], truth: dict[str, Any]) -> None:
    """Chunked prefill, pages, decoded tokens, prompt_logprobs, cache_salt, aborts, reset; nothing held."""
    out = run("ram", stack=stack())
    right = answers(truth["questions"])
    assert Counted(out["counters"]).wrong_labels() == []
    assert answers(out["cold"]) == right
    assert answers(out["warm"]) == right
    assert cached(out["cold"]) == [0, SHARED] * 4
    assert cached(out["warm"]) == [WHOLE] * 8
    assert answers(out["turn"]) == answers(truth["turn"])
    # 317 tokens of prompt and 24 of answer: the last token of the answer has no KV.
    assert cached(out["turn"]) == [(PROMPT + 23) // BLOCK * BLOCK]
    one = right["doc0 q0"]
    assert out["logprobs"]["doc0 q0"] == {"answer": one, "cached": 0, "logprobs": PROMPT}
    assert out["asked for logprobs"] == 0
    assert [cached(asked) for asked in out["salt a"]] == [[0], [WHOLE], [0]]
    assert all(answers(asked) == {"doc0 q0": one} for asked in out["salt a"])
    assert out["aborts"]
    for name, answer in out["aborts"].items():
        assert answer == right[name.split(" ", 1)[1]]
    assert held(out["holds"]) == 0
    assert out["reset"] is True
    assert [cached(asked) for asked in out["after reset"]] == [[0], [WHOLE]]
    assert all(answers(asked) == {"doc0 q0": one} for asked in out["after reset"])
    main = set(out["affinity"].pop("main"))
    if len(main) < (os.cpu_count() or 1):
        assert out["affinity"]
        assert all(main < set(cpus) for cpus in out["affinity"].values()), "and elsewhere"


def test_preemption(run: Callable[..., dict[str, Any]], truth: dict[str, Any]) -> None:
    """Blocks for a few requests only, the engine's own cache on."""
    out = run("tight", stack=stack(), blocks=20)
    assert out["preemptions"] > 0
    assert answers(out["cold"]) == answers(truth["crowd"])
    assert answers(out["warm"]) == answers(truth["crowd"])
    right = answers(truth["questions"])
    for asked in (out["questions"], out["again"]):
        assert all(one["answer"] == right[name] for name, one in asked.items())
    assert cached(out["again"]) == [WHOLE]
    assert held(out["holds"]) == 0


def test_restart_damage_and_kill(run: Callable[..., dict[str, Any]], truth: dict[str, Any], place: Path) -> None:
    """Processes of their own. RAM, then disk after a restart with damaged frames, then the service dies by SIGKILL."""
    folder = place / "frames"
    right = answers(truth["questions"])
    out = run("default", processes=True, stack=with_disk(folder))
    assert answers(out["first"]) == right
    assert answers(out["second"]) == right
    assert cached(out["second"]) == [WHOLE] * 8
    wait_for_end(place)
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path.stat().st_size > 100_000)
    assert len(files) >= 20
    dice = random.Random(1)
    for path in dice.sample(files, 3):
        raw = bytearray(path.read_bytes())
        raw[dice.randrange(len(raw) // 2)] ^= 0x40
        path.write_bytes(raw)
    out = run("default", processes=True, stack=with_disk(folder), kill=True)
    assert answers(out["first"]) == right
    assert sum(cached(out["first"])) > WHOLE * 4
    assert answers(out["second"]) == right
    assert cached(out["second"]) == [WHOLE] * 8
    assert any("corrupt" in name and value > 0 for name, value in out["counters"].items())
    assert answers(out["killed"]) == right
    assert out["another service"] is True
    assert all(answers(asked) == right for asked in out["back"])
    assert cached(out["back"][1]) == [WHOLE] * 8
    wait_for_end(place)


@pytest.mark.slow
@pytest.mark.parametrize("ahead", [False, True])
def test_prefill_rate(run: Callable[..., dict[str, Any]], ahead: bool) -> None:
    """What is measured on the steps is what a prompt takes, in the same run, within a factor of two."""
    out = run("rate", stack=stack(), ahead=ahead)
    truth = 1000 / statistics.median(out["seconds"])
    assert out["rates"][0] > 0, "a prompt of four steps is evidence enough"
    assert all(truth / 2 < measured < truth * 2 for measured in out["rates"][-2:]), out


@pytest.fixture(scope="module")
def two_ranks(run: Callable[..., dict[str, Any]]) -> dict[str, Any]:
    # Both on core 0: vLLM's waiting processes spin, and with both cores taken nothing else on a small machine runs.
    return run("two_ranks", processes=True, bind="0|0", stack=stack())


@pytest.mark.slow
def test_two_ranks(two_ranks: dict[str, Any], truth: dict[str, Any]) -> None:
    out = two_ranks
    right = answers(truth["questions"])
    for asked in (out["cold"], out["warm"]):
        assert all(one["answer"] == right[name] for name, one in asked.items())
    assert cached(out["warm"]) == [WHOLE] * 4
    assert held(out["holds"]) == 0


@pytest.mark.slow
def test_a40_numbers_add_up_on_two_ranks(two_ranks: dict[str, Any]) -> None:
    """All processes of an engine count under one model and instance; each rank under its own number, requests once."""
    counted = Counted(two_ranks["counters"])
    assert counted.wrong_labels() == []
    assert len(counted.values("instance", of="lmkv_rank_loaded_tokens_total")) == 1
    for family in ("lmkv_lookup_tokens_total", "lmkv_rank_stored_tokens_total"):
        assert counted.values("instance", of=family) == counted.values("instance", of="lmkv_rank_loaded_tokens_total")
        assert len(counted.values("model", of=family)) == 1
    hits = sum(cached(two_ranks["cold"])) + sum(cached(two_ranks["warm"]))
    asked = sum(PROMPT for name in ("cold", "warm") for _ in two_ranks[name]) + 40
    assert counted.values("rank", of="lmkv_hit_tokens_total") == {"scheduler"}
    assert counted.total("lmkv_hit_tokens_total", tier="ram") == hits
    assert counted.total("lmkv_lookup_tokens_total", rank="scheduler") == asked
    assert counted.total("lmkv_lookups_total") == len(two_ranks["cold"]) + len(two_ranks["warm"]) + 1
    for rank in ("0", "1"):
        assert counted.total("lmkv_rank_loaded_tokens_total", rank=rank, tier="ram") == hits
        assert counted.total("lmkv_rank_stored_tokens_total", rank=rank) == counted.total("lmkv_stored_tokens_total")


@pytest.mark.slow
def test_disk_fills_up(run: Callable[..., dict[str, Any]], truth: dict[str, Any], place: Path) -> None:
    """A file system of 24 MiB that something else fills up."""
    folder = place / "small"
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=24m", "tmpfs", str(folder)], check=False)
    if mounted.returncode:
        pytest.skip("may not mount a tmpfs here")
    try:
        out = run("full_disk", stack=with_disk(folder / "frames", "16MiB"), ballast=str(folder / "ballast"))
        right = answers(truth["questions"])
        assert answers(out["cold"]) == right
        assert answers(out["warm"]) == right
        assert cached(out["warm"]) == [WHOLE] * 8
        assert "No space left" in out["tiers"]["disk"]["detail"]
        wait_for_end(place)
    finally:
        subprocess.run(["umount", str(folder)], check=True)
