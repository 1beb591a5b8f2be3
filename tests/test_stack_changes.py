"""The stack of the YAML changes between restarts: a tier is added, removed, moved. What is stored stays of use."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import pytest
from fake_engine import CHUNK, FRAME, PLUGINS, Node, prompts

from lmkv.config import load_config

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

RAM = {"name": "ram", "backend": "cpu", "capacity": 4 * FRAME}
WANTED = list(prompts(6, 2 * CHUNK))
MORE = [[token + 500 for token in prompt] for prompt in WANTED]


@pytest.fixture
def run() -> Iterator[Callable[..., Node]]:
    """Starts a node with these tiers; the one before it must have been closed."""
    made: list[Node] = []

    def start(*tiers: dict[str, Any]) -> Node:
        pool = {"size": 1 << 20, "staging": 16 * FRAME, "prefault": False}
        config = load_config({"chunk_tokens": CHUNK, "pool": pool, "tiers": list(tiers)}, host=PLUGINS, environ={})
        made.append(Node(config))
        return made[-1]

    yield start
    for node in made:
        node.close()


def disk(folder: Path, name: str, **more: Any) -> dict[str, Any]:
    return {"name": name, "backend": "disk", "capacity": 256 * FRAME, "options": {"path": str(folder / name)}, **more}


def store(node: Node, wanted: list[list[int]]) -> None:
    engine = node.engine()
    for prompt in wanted:
        engine.store(prompt)
        until = time.monotonic() + 10
        while node.on_loop(lambda: node.manager.stack.demotion.busy):  # copies ahead of an eviction begin in a moment
            assert time.monotonic() < until
            time.sleep(0.005)
        node.settle()


def load(node: Node, wanted: list[list[int]]) -> list[int]:
    """Tokens of each that came, all of them right."""
    engine = node.engine()
    return [engine.load(prompt) for prompt in wanted]


ALL = [2 * CHUNK] * len(WANTED)
NONE = [0] * len(WANTED)


def test_a_tier_is_added_below(run: Callable[..., Node], tmp_path: Path) -> None:
    with_one = run(RAM, disk(tmp_path, "a"))
    store(with_one, WANTED)
    with_one.close()
    with_two = run(RAM, disk(tmp_path, "a"), disk(tmp_path, "b"))
    assert load(with_two, WANTED) == ALL
    store(with_two, MORE)
    with_two.close()
    only_the_new = run(RAM, disk(tmp_path, "b"))
    assert load(only_the_new, MORE) == ALL
    assert load(only_the_new, WANTED) == NONE, "reading puts nothing into tiers below"


def test_a_tier_is_removed_and_comes_back(run: Callable[..., Node], tmp_path: Path) -> None:
    both = [RAM, disk(tmp_path, "a"), disk(tmp_path, "b")]
    node = run(*both)
    store(node, WANTED)
    node.close()
    node = run(both[0], both[2])
    assert load(node, WANTED) == ALL
    store(node, MORE)
    node.close()
    node = run(*both)
    assert load(node, WANTED + MORE) == ALL * 2
    assert node.manager.tier("a").used == len(WANTED) * 2 * FRAME
    assert node.manager.tier("b").used == len(WANTED) * 4 * FRAME
    node.close()
    node = run(both[0], both[1])
    assert load(node, WANTED) == ALL
    assert load(node, MORE) == NONE


def test_tiers_change_places(run: Callable[..., Node], tmp_path: Path) -> None:
    first, second = disk(tmp_path, "a"), disk(tmp_path, "b")
    node = run(RAM, first, second)
    store(node, WANTED)
    node.close()
    node = run(RAM, second, first)
    assert load(node, WANTED) == ALL
    gets = [node.counter("lmkv_tier_operations_total", tier=name, op="get", outcome="ok") for name in "ab"]
    assert gets == [0, len(WANTED) * 2], "the one that is the faster now is asked"


def test_a_tier_gets_another_name_and_codec(run: Callable[..., Node], tmp_path: Path) -> None:
    node = run(RAM, disk(tmp_path, "a"))
    store(node, WANTED)
    node.close()
    renamed = {**disk(tmp_path, "a"), "name": "cold", "codec": "zlib"}
    node = run(RAM, renamed)
    assert load(node, WANTED) == ALL, "frames say themselves how they are coded"
    store(node, MORE)
    node.close()
    node = run(RAM, disk(tmp_path, "a"))
    assert load(node, WANTED + MORE) == ALL * 2


def test_the_fast_tier_is_removed(run: Callable[..., Node], tmp_path: Path) -> None:
    node = run(RAM, disk(tmp_path, "a"))
    store(node, WANTED)
    node.close()
    node = run(disk(tmp_path, "a"))
    assert load(node, WANTED) == ALL
    node.close()
    node = run(RAM)
    assert load(node, WANTED) == NONE


def test_write_mode_changes(run: Callable[..., Node], tmp_path: Path) -> None:
    """From read-only to read-write: it fills again."""
    node = run(RAM, disk(tmp_path, "a"))
    store(node, WANTED)
    node.close()
    node = run(RAM, disk(tmp_path, "a", write="never"))
    assert load(node, WANTED) == ALL
    store(node, MORE)
    assert node.manager.tier("a").used == len(WANTED) * 2 * FRAME
    node.close()
    node = run(RAM, disk(tmp_path, "a", write="demote"))
    store(node, MORE)
    assert load(node, WANTED) == ALL
    assert node.manager.tier("a").used > len(WANTED) * 2 * FRAME
