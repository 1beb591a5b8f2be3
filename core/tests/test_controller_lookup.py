"""Look-ups and nodes, over the real API with fake nodes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from controller_rig import CHUNK, PAGE, Controller, Nodes, digests, namespace, until

from lmkv.agent.messages import TierFacts

if TYPE_CHECKING:
    from collections.abc import Iterator

SPACE = namespace()
PROMPT = list(range(1, 5 * CHUNK + PAGE + 2))
"""Five chunks, a tail of one page, and a token."""
CHUNKS = digests(PROMPT, SPACE, tail=False)
TAIL = digests(PROMPT, SPACE)[-1]


@pytest.fixture
def controller() -> Iterator[Controller]:
    with Controller() as running:
        yield running


@pytest.fixture
def nodes(controller: Controller) -> Iterator[Nodes]:
    with Nodes() as made:
        yield made


def hits(controller: Controller, **body: object) -> dict[str, int]:
    answer = controller.post("lookup", {"model": "m", "tokens": PROMPT, **body})
    return {hit["node"]: hit["hit_tokens"] for hit in answer["nodes"]}


def test_best_node_first_and_tiers_apart(nodes: Nodes, controller: Controller) -> None:
    a, b = nodes.start("a", controller, SPACE), nodes.start("b", controller, SPACE)
    a.store(CHUNKS[:2], SPACE)
    a.store(CHUNKS[:3], SPACE, "disk")
    b.store(CHUNKS[2:4], SPACE)
    b.store(CHUNKS[:3], SPACE, "disk")
    until(lambda: hits(controller) == {"b": 4 * CHUNK, "a": 3 * CHUNK}, "both have told")
    answer = controller.post("lookup", {"model": "m", "tokens": PROMPT, "chunks": True})
    assert answer["tokens"] == len(PROMPT)
    first, second = answer["nodes"]
    assert (first["node"], second["node"]) == ("b", "a")
    assert first["tiers"] == [
        {"tier": "ram", "backend": "fake", "hit_tokens": 0, "held": "0c"},
        {"tier": "disk", "backend": "fake", "hit_tokens": 3 * CHUNK, "held": "07"},
    ]
    assert second["tiers"] == [
        {"tier": "ram", "backend": "fake", "hit_tokens": 2 * CHUNK, "held": "03"},
        {"tier": "disk", "backend": "fake", "hit_tokens": 3 * CHUNK, "held": "07"},
    ]
    assert first["endpoints"] == {"peer": "fake:b"}
    assert first["namespace"] == SPACE.id.hex()
    b.evict(CHUNKS[:1], SPACE, "disk")
    until(lambda: hits(controller) == {"a": 3 * CHUNK, "b": 0}, "what was removed is gone")


def test_the_pages_of_a_tail_count(nodes: Nodes, controller: Controller) -> None:
    a = nodes.start("a", controller, SPACE)
    a.store([*CHUNKS, TAIL], SPACE)
    until(lambda: hits(controller) == {"a": 5 * CHUNK + PAGE}, "the tail counts")
    shorter = PROMPT[: CHUNK + PAGE]
    b = nodes.start("b", controller, SPACE)
    b.store(digests(shorter, SPACE), SPACE, "disk")
    until(lambda: hits(controller, tokens=shorter) == {"b": CHUNK + PAGE, "a": CHUNK}, "a tail of another length")
    assert hits(controller) == {"a": 5 * CHUNK + PAGE, "b": CHUNK + PAGE}


def test_by_digests_and_by_namespace(nodes: Nodes, controller: Controller) -> None:
    a = nodes.start("a", controller, SPACE)
    a.store(CHUNKS[:3], SPACE)
    asked = {"namespace": SPACE.id.hex(), "digests": [each.hex() for each in CHUNKS]}
    until(lambda: controller.post("lookup", asked)["nodes"], "told")
    answer = controller.post("lookup", asked)
    assert answer["tokens"] is None
    assert answer["nodes"][0]["hit_tokens"] == 3 * CHUNK


def test_what_the_keys_depend_on(nodes: Nodes, controller: Controller) -> None:
    from lmkv.keys import Extras, KeyChain, MediaSpan

    extras = Extras("tenant", "lora", "7", (MediaSpan("picture", 3, 4),))
    chain = KeyChain(CHUNK, PAGE, extras)
    chain.extend(PROMPT)
    a = nodes.start("a", controller, SPACE)
    a.store(chain.digests, SPACE)
    full = {
        "salt": "tenant",
        "adapter": "lora",
        "adapter_version": "7",
        "media": [{"identity": "picture", "start": 3, "length": 4}],
    }
    until(lambda: hits(controller, **full) == {"a": 5 * CHUNK}, "the same extras find it")
    for left_out in full:
        assert hits(controller, **{k: v for k, v in full.items() if k != left_out}) == {}, left_out


def test_all_namespaces_of_a_model(nodes: Nodes, controller: Controller) -> None:
    other = namespace(revision="r2", chunk=2 * CHUNK)
    a, b = nodes.start("a", controller, SPACE), nodes.start("b", controller, SPACE, other)
    a.store(CHUNKS[:3], SPACE)
    b.store(digests(PROMPT, other, tail=False)[:2], other)
    until(lambda: hits(controller) == {"b": 4 * CHUNK, "a": 3 * CHUNK}, "told")
    assert hits(controller, revision="r1") == {"a": 3 * CHUNK}
    assert hits(controller, revision="r2") == {"b": 4 * CHUNK}
    error = controller.post("lookup", {"model": "n", "tokens": PROMPT}, status=404)["error"]
    assert error["kind"] == "unknown-model"
    assert error["known"] == ["m"]
    assert "'n'" in error["message"]
    assert controller.post("lookup", {"model": "m", "revision": "r9", "tokens": [1]}, status=404)["error"]["known"] == [
        "r1",
        "r2",
    ]


def test_a_node_that_is_silent_or_away_is_not_offered(nodes: Nodes, controller: Controller) -> None:
    a = nodes.start("a", controller, SPACE)
    a.store(CHUNKS, SPACE)
    until(lambda: hits(controller) == {"a": 5 * CHUNK}, "told")
    a.close()
    until(lambda: hits(controller) == {}, "away")


def test_nodes_say_what_they_are(nodes: Nodes, controller: Controller) -> None:
    shared = TierFacts("s3", "s3", 0, shared=True, writable=False)
    a = nodes.start("a", controller, SPACE, more=[shared])
    a.store(CHUNKS[:2], SPACE)
    (state,) = until(
        lambda: [n for n in controller.get("/v1/nodes")["nodes"] if n["tiers"][0]["used_bytes"]], "a heartbeat"
    )
    assert state["node"] == "a"
    assert state["state"] == "connected"
    assert state["load"] == 0.25
    assert state["codecs"] == ["identity", "zstd", "fp8"]
    assert [(t["name"], t["shared"], t["writable"]) for t in state["tiers"]] == [
        ("ram", False, True),
        ("disk", False, True),
        ("s3", True, False),
    ]
    assert state["tiers"][0]["used_bytes"] == 128
    (space,) = state["namespaces"]
    assert (space["namespace"], space["model"], space["chunk_tokens"]) == (SPACE.id.hex(), "m", CHUNK)


def test_metrics_page(nodes: Nodes, controller: Controller) -> None:
    a = nodes.start("a", controller, SPACE)
    a.store(CHUNKS, SPACE)
    until(lambda: hits(controller) == {"a": 5 * CHUNK}, "told")
    page = controller.client.get("/metrics")
    assert page.headers["content-type"].startswith("text/plain; version=0.0.4")
    assert 'lmkv_controller_nodes{instance="' in page.text
    assert 'verb="lookup"' in page.text
    assert controller.server.parts.metrics.value("lmkv_controller_directory_entries") == 5
    assert controller.server.parts.metrics.value("lmkv_controller_hit_tokens_total") > 0
    assert controller.server.parts.metrics.undocumented() == []
