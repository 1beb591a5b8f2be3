"""The `curl` lines of the how-to work as they are written, on two real nodes with real bytes."""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import shutil
import subprocess
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from controller_rig import Controller, until
from fake_engine import CHUNK, FRAME, PLUGINS, FakeEngine, Node, namespace

from lmkv.config import load_config

if TYPE_CHECKING:
    from collections.abc import Iterator

PAGE = Path(__file__).parent.parent / "docs" / "how-to" / "controller.md"
MODEL = "Qwen/Qwen3-8B"
SPACE = namespace(model=MODEL)
TOKEN = "an-operators-token-0123456789"


class Member(Node):
    """A node of the fleet, with an engine."""

    def __init__(self, name: str, folder: Path, controller: Controller) -> None:
        tiers = [
            {"name": "ram", "backend": "cpu", "capacity": 64 * FRAME},
            {"name": "disk", "backend": "disk", "capacity": 64 * FRAME, "options": {"path": str(folder / name)}},
        ]
        tiers[1]["write"] = "demote"
        groups = {
            "chunk_tokens": CHUNK,
            "pool": {"size": 1 << 20, "staging": 16 * FRAME, "prefault": False},
            "peer": {"node": name, "listen": "127.0.0.1:0"},
            "controller": {
                "url": [controller.url.replace("http", "ws", 1)],
                "token": TOKEN,
                "heartbeat": "200ms",
            },
        }
        super().__init__(load_config({"tiers": tiers, **groups}, host=PLUGINS, environ={}))
        self.engine_of_mine: FakeEngine = self.engine(space=SPACE)


@pytest.fixture
def controller(tmp_path: Path) -> Iterator[Controller]:
    tokens = tmp_path / "tokens"
    tokens.write_text(f"ops operate {TOKEN}\n")
    with Controller(tokens=tokens, journal=tmp_path / "jobs") as running:
        running.client.headers["Authorization"] = f"Bearer {TOKEN}"
        yield running


@pytest.fixture
def fleet(controller: Controller, tmp_path: Path) -> Iterator[dict[str, Member]]:
    made: dict[str, Member] = {}
    with contextlib.ExitStack() as stack:
        for name in ("gpu-1", "gpu-2"):
            made[name] = Member(name, tmp_path, controller)
            stack.callback(made[name].close)
        until(lambda: len([n for n in controller.get("/v1/nodes")["nodes"] if n["synced"]]) == 2, "both are there")
        yield made


def hits(controller: Controller, prompt: list[int]) -> dict[str, int]:
    answer = controller.post("lookup", {"model": MODEL, "tokens": prompt})
    return {hit["node"]: hit["hit_tokens"] for hit in answer["nodes"]}


def test_hot_chunks_move_and_the_other_node_answers_warm_when_the_first_has_gone(
    controller: Controller, fleet: dict[str, Member]
) -> None:
    a, b = fleet["gpu-1"], fleet["gpu-2"]
    prompts = [list(range(1000 * n, 1000 * n + 4 * CHUNK + 2)) for n in range(1, 4)]
    for prompt in prompts:
        assert a.engine_of_mine.store(prompt) == len(prompt)
        assert b.engine_of_mine.load(prompt) == 0
        until(lambda prompt=prompt: hits(controller, prompt) == {"gpu-1": len(prompt)}, "told")
        job = controller.post(
            "move",
            {"model": MODEL, "tokens": prompt, "source": {"node": "gpu-1"}, "target": {"node": "gpu-2", "tier": "ram"}},
        )
        assert (job["state"], job["done"]) == ("done", 5)
        assert a.engine_of_mine.find(prompt) == 0
    a.close()
    for prompt in prompts:
        assert b.engine_of_mine.load(prompt) == len(prompt), "warm, every byte looked at"
        until(lambda prompt=prompt: hits(controller, prompt) == {"gpu-2": len(prompt)}, "told")
    assert b.on_loop(lambda: len(b.manager.pinned)) == 0


def test_a_pin_of_the_operators_outlives_a_transfer(controller: Controller, fleet: dict[str, Member]) -> None:
    a, b = fleet["gpu-1"], fleet["gpu-2"]
    prompt = list(range(1, 4 * CHUNK + 1))
    asked = {"model": MODEL, "tokens": prompt}
    copy = {**asked, "source": {"node": "gpu-1"}, "target": {"node": "gpu-2", "tier": "ram"}}
    for member in (a, b):
        member.engine_of_mine.store(prompt)
    first = {**asked, "tokens": prompt[:CHUNK], "node": "gpu-2"}
    assert controller.post("pin", first)["state"] == "done"
    second = {**asked, "tokens": prompt[: 2 * CHUNK], "node": "gpu-2", "seconds": 60}
    assert controller.post("pin", second)["state"] == "done"
    for _ in range(2):
        assert controller.post("copy", copy)["counts"]["gpu-2"]["present"] == 4

        def pins() -> list[float]:
            return sorted(entry.pinned_until - time.monotonic() for entry in b.manager.pinned)

        kept = b.on_loop(pins)
        assert len(kept) == 2, "those of the operator, and no others"
        assert 0 < kept[0] <= 60
        assert kept[1] == math.inf


def blocks() -> list[str]:
    """The page's shell blocks that ask the controller."""
    found: list[str] = re.findall(
        r"^```sh\n(curl .*?)^```$", PAGE.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE
    )
    return found


def test_the_curl_lines_of_the_how_to(controller: Controller, fleet: dict[str, Member], tmp_path: Path) -> None:
    assert shutil.which("curl"), "the page needs it, and so does this test"
    found = blocks()
    verbs = {match for block in found for match in re.findall(r"/v1/(\w+)", block)}
    assert verbs == {
        *("nodes", "lookup", "pin", "unpin", "copy", "move", "jobs", "compress", "decompress", "clear", "health"),
    }
    prompt = [int(word) for word in re.findall(r"\d+", re.findall(r'"tokens": \[(.*?)\]', found[1])[0])]
    a = fleet["gpu-1"]
    assert a.engine_of_mine.store(prompt) == len(prompt)
    until(lambda: hits(controller, prompt) == {"gpu-1": len(prompt)}, "told")
    (tmp_path / ".curlrc").write_text("fail-with-body\nsilent\nshow-error\nnoproxy = *\n")
    environ = {**os.environ, "CONTROLLER": controller.url, "TOKEN": TOKEN, "CURL_HOME": str(tmp_path)}
    answers: list[Any] = []
    for block in found:
        done = subprocess.run(
            ["bash", "-euc", block], env=environ, capture_output=True, text=True, check=False, timeout=60
        )
        assert done.returncode == 0, f"{block}\n{done.stdout}\n{done.stderr}"
        answers.append(json.loads(done.stdout) if done.stdout.startswith("{") else done.stdout)
        if isinstance(answers[-1], dict) and "id" in answers[-1]:
            environ["JOB"] = answers[-1]["id"]
    assert [n["node"] for n in answers[0]["nodes"]] == ["gpu-1", "gpu-2"]
    assert answers[1]["nodes"][0]["hit_tokens"] == len(prompt) == 16
    jobs = [answer for answer in answers if isinstance(answer, dict) and "verb" in answer]
    assert [(job["verb"], job["state"], job["failed"]) for job in jobs] == [
        ("pin", "done", 0),
        ("unpin", "done", 0),
        ("copy", "done", 0),
        ("move", "done", 0),
        ("move", "done", 0),
        ("move", "done", 0),
        ("compress", "done", 0),
        ("decompress", "done", 0),
        ("clear", "done", 0),
    ]
    assert [chunk["state"] for chunk in jobs[4]["chunks"]] == ["done"] * 4
    assert jobs[-1]["counts"] == {"gpu-2": {"ram": 4, "disk": 4}}
    assert answers[-2]["state"] == "ok"
    assert "lmkv_controller_requests_total" in answers[-1]
    assert fleet["gpu-2"].engine_of_mine.find(prompt) == 0
