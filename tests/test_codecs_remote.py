"""Codecs on real Redis and S3 servers: nodes that share a store with the same key, with another one, with none."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING, Any

import pytest
from fake_engine import CHUNK, PLUGINS, prompts
from fault_rig import DEADLINE, RedisStore, S3Store, config, start

from lmkv.cli.probe import Result, probe
from lmkv.storage.codecs import Codecs

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from fake_engine import Node
    from fault_rig import RemoteStore

ONE, TWO = os.urandom(32).hex(), os.urandom(32).hex()
KNOWN = list(prompts(4, 2 * CHUNK))


def aes(**keys: str) -> list[Any]:
    return ["zstd", {"aes-gcm": {"keys": keys}}]


@pytest.fixture(params=[RedisStore, S3Store])
def store(request: pytest.FixtureRequest, tmp_path: Any) -> Iterator[RemoteStore]:
    made = request.param(tmp_path / "far")
    try:
        yield made
    finally:
        made.close()


@pytest.fixture
def node(store: RemoteStore) -> Iterator[Callable[..., Node]]:
    """Starts nodes whose only tier is the store."""
    made: list[Node] = []

    def begin(codec: Any) -> Node:
        made.append(start(store, ram=None, codec=codec))
        return made[-1]

    yield begin
    for each in made:
        each.close()


def check(store: RemoteStore, codec: Any) -> Result:
    [tier] = config(store, ram=None, codec=codec, deadline="20s").tiers
    return probe(tier, None, 1, PLUGINS, Codecs([tier.codec], PLUGINS))


def fill(node: Node) -> None:
    engine = node.engine()
    for prompt in KNOWN:
        engine.store(prompt)
    node.settle()


def come(node: Node) -> list[int]:
    """Tokens of each known prompt that come back, all of them right."""
    engine = node.engine()
    return [engine.load(prompt) for prompt in KNOWN]


@pytest.mark.parametrize("codec", ["bf16-planes", "zlib", aes(k=ONE)])
def test_a_second_node_starts_warm(node: Callable[..., Node], codec: Any) -> None:
    fill(node(codec))
    assert come(node(codec)) == [2 * CHUNK] * len(KNOWN)
    others = come(node("identity"))
    wanted = 0 if isinstance(codec, list) else 2 * CHUNK
    assert others == [wanted] * len(KNOWN), "without a codec of its own it reads all that needs no key"


def test_a_wrong_key_costs_misses_and_no_frames(store: RemoteStore, node: Callable[..., Node]) -> None:
    fill(node(aes(k=ONE)))
    wrong = check(store, aes(k=TWO))
    assert "encrypted with another key than the one given here as 'k'" in wrong.problem
    assert check(store, aes(k=ONE)).ok
    assert not wrong.trace
    other = node(aes(k=TWO))
    begin = time.monotonic()
    assert come(other) == [0] * len(KNOWN)
    assert time.monotonic() - begin < 2 * len(KNOWN) * DEADLINE
    assert other.counter("lmkv_misses_total", reason="unreadable") > 0
    assert other.counter("lmkv_corrupt_frames_total") == 0
    assert come(node(aes(k=ONE))) == [2 * CHUNK] * len(KNOWN), "nothing was deleted"


def test_a_key_is_rotated_over_nodes_that_share_a_store(store: RemoteStore, node: Callable[..., Node]) -> None:
    fill(node(aes(old=ONE)))
    both = [{"aes-gcm": {"keys": {"old": ONE, "young": TWO}, "use": "young"}}]
    assert come(node(both)) == [2 * CHUNK] * len(KNOWN)
    assert come(node(aes(young=TWO))) == [0] * len(KNOWN), "what the old key has written is still of the old key"
    young = node(aes(young=TWO))
    fill(young)
    assert come(young) == [2 * CHUNK] * len(KNOWN), "computed anew, stored anew"
    assert check(store, aes(young=TWO)).ok
