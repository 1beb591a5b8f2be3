"""Verbs of the controller as jobs, over the real API with fake nodes."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import pytest
from controller_rig import CHUNK, SECONDS, Controller, Nodes, digests, namespace, until

from lmkv.agent import messages as m

if TYPE_CHECKING:
    from collections.abc import Iterator

SPACE = namespace()
PROMPT = list(range(1, 4 * CHUNK + 1))
CHUNKS = digests(PROMPT, SPACE)
ASKED: dict[str, Any] = {"model": "m", "tokens": PROMPT}


@pytest.fixture
def controller() -> Iterator[Controller]:
    with Controller() as running:
        yield running


@pytest.fixture
def nodes(controller: Controller) -> Iterator[Nodes]:
    with Nodes() as made:
        yield made


def held(controller: Controller, digest: bytes = CHUNKS[0]) -> list[str]:
    """Nodes that have a chunk, as the directory knows."""
    body = {"model": "m", "digests": [digest.hex()]}
    return sorted(hit["node"] for hit in controller.post("lookup", body)["nodes"] if hit["hit_tokens"])


def test_pin_wherever_they_lie_with_an_expiry_and_unpin(nodes: Nodes, controller: Controller) -> None:
    a, b = (nodes.start(name, controller, SPACE) for name in "ab")
    a.store(CHUNKS, SPACE)
    b.store(CHUNKS[:2], SPACE)
    until(lambda: held(controller, CHUNKS[1]) == ["a", "b"], "told")
    job = controller.post("pin", {**ASKED, "seconds": 60})
    assert (job["verb"], job["state"], job["total"], job["done"], job["failed"]) == ("pin", "done", 6, 6, 0)
    assert a.pins == dict.fromkeys(CHUNKS, 60.0)
    assert b.pins == dict.fromkeys(CHUNKS[:2], 60.0)
    controller.post("unpin", {**ASKED, "node": "b"})
    assert not b.pins
    assert len(a.pins) == 4
    controller.post("pin", {**ASKED, "node": "b"}, status=200)
    assert b.pins == dict.fromkeys(CHUNKS[:2])
    controller.post("unpin", ASKED)
    assert not a.pins
    assert not b.pins


def test_results_are_told_chunk_by_chunk(nodes: Nodes, controller: Controller) -> None:
    a = nodes.start("a", controller, SPACE)
    a.store(CHUNKS[:3], SPACE)
    job = controller.post("pin", {**ASKED, "node": "a"})
    assert (job["state"], job["done"], job["failed"]) == ("failed", 3, 1)
    assert job["error"] == "not there"
    (failure,) = job["chunks"]
    expected = {"namespace": SPACE.id.hex(), "digest": CHUNKS[3].hex(), "node": "a", "state": "failed"}
    assert failure == {**expected, "reason": "not there"}
    every = controller.get(f"/v1/jobs/{job['id']}", params={"chunks": True})["chunks"]
    assert {each["digest"]: each["state"] for each in every} == {
        **{each.hex(): "done" for each in CHUNKS[:3]},
        CHUNKS[3].hex(): "failed",
    }
    nowhere = controller.post("pin", {"model": "m", "tokens": [7] * CHUNK})
    assert nowhere["state"] == "failed"
    assert nowhere["chunks"][0]["reason"] == "no node has it"


def test_move_between_nodes(nodes: Nodes, controller: Controller) -> None:
    a, b = (nodes.start(name, controller, SPACE) for name in "ab")
    a.store(CHUNKS, SPACE)
    a.store(CHUNKS[:1], SPACE, "disk")
    until(lambda: held(controller) == ["a"], "told")
    job = controller.post("move", {**ASKED, "source": {"node": "a"}, "target": {"node": "b", "tier": "disk"}})
    assert (job["state"], job["total"], job["done"]) == ("done", 4, 4)
    assert b.tiers[1].of(SPACE.id) == set(CHUNKS)
    assert not a.tiers[0].of(SPACE.id)
    assert not a.tiers[1].of(SPACE.id)
    assert not b.pins
    assert [type(command).__name__ for _, command in b.commands] == ["Fetch", "UnpinChunks"]
    fetch = b.commands[0][1]
    assert isinstance(fetch, m.Fetch)
    assert fetch.namespace_json == SPACE.json()
    assert fetch.pin_seconds > 60
    until(lambda: held(controller) == ["b"], "the directory follows")


def test_copy_between_nodes_and_move_between_tiers(nodes: Nodes, controller: Controller) -> None:
    a, b = (nodes.start(name, controller, SPACE) for name in "ab")
    a.store(CHUNKS, SPACE)
    controller.post("copy", {**ASKED, "source": {"node": "a", "tier": "ram"}, "target": {"node": "b", "tier": "ram"}})
    assert nodes.where(CHUNKS[0]) == {"a", "b"}
    controller.post("move", {**ASKED, "source": {"node": "a", "tier": "ram"}, "target": {"node": "a", "tier": "disk"}})
    assert not a.tiers[0].of(SPACE.id)
    assert a.tiers[1].of(SPACE.id) == set(CHUNKS)
    controller.post("copy", {**ASKED, "source": {"node": "a", "tier": "disk"}, "target": {"node": "a", "tier": "ram"}})
    assert a.tiers[0].of(SPACE.id) == a.tiers[1].of(SPACE.id) == set(CHUNKS)
    assert not b.tiers[1].of(SPACE.id)


def test_a_chunk_that_did_not_arrive_stays_where_it_was(nodes: Nodes, controller: Controller) -> None:
    a, b = (nodes.start(name, controller, SPACE) for name in "ab")
    a.store(CHUNKS, SPACE)

    def lose(_: str, command: m.Command) -> bool:
        if isinstance(command, m.Fetch):
            nodes["a"].evict(CHUNKS[2:3], SPACE)
        return True

    b.before = lose
    job = controller.post("move", {**ASKED, "source": {"node": "a"}, "target": {"node": "b", "tier": "ram"}})
    assert (job["state"], job["done"], job["failed"]) == ("failed", 3, 1)
    fence, drop = [command for _, command in a.commands]
    assert isinstance(fence, m.Fence)
    assert isinstance(drop, m.Drop)
    assert CHUNKS[2] not in drop.digests
    assert drop.digests == fence.digests
    assert drop.fence


@pytest.mark.parametrize("times", [1, 99])
def test_what_comes_too_late_to_the_source_is_asked_anew(times: int, nodes: Nodes, controller: Controller) -> None:
    """The controller stood still, or the source was busy: nothing is taken away on what was true then."""
    a, b = (nodes.start(name, controller, SPACE) for name in "ab")
    a.store(CHUNKS, SPACE)
    refused: list[str] = []

    def late(job: str, command: m.Command) -> bool:
        if isinstance(command, m.Drop) and len(refused) < times:
            refused.append(job)
            a._say(m.Progress(job, 0, len(CHUNKS), {}, {"late": 1}, m.FAILED, "it comes too late"))
            return False
        return True

    a.before = late
    job = controller.post("move", {**ASKED, "source": {"node": "a"}, "target": {"node": "b", "tier": "ram"}})
    assert job["state"] == ("done" if times == 1 else "failed")
    assert a.tiers[0].of(SPACE.id) == (set() if times == 1 else set(CHUNKS))
    assert b.tiers[0].of(SPACE.id) == set(CHUNKS)
    assert times == 1 or "too late" in job["error"]
    assert not b.pins
    assert len(set(refused)) == len(refused) == min(times, 3)


def test_a_target_that_starts_anew_in_between_gets_nothing_taken_away(nodes: Nodes, controller: Controller) -> None:
    a, b = (nodes.start(name, controller, SPACE) for name in "ab")
    a.store(CHUNKS, SPACE)

    def lost(_: str, command: m.Command) -> bool:
        if isinstance(command, m.Fetch):  # all is there; then the machine goes, and its memory with it
            b.tiers[0].chunks.clear()
            b.incarnation += 1
            b.cut()
            until(lambda: not b.connected, "it is gone")
            until(lambda: b.connected, "it is back")
        return True

    b.after = lost
    job = controller.post("move", {**ASKED, "source": {"node": "a"}, "target": {"node": "b", "tier": "ram"}})
    assert job["state"] == "failed"
    assert "has started anew" in job["error"]
    assert a.tiers[0].of(SPACE.id) == set(CHUNKS)
    assert not a.commands


def test_a_fetch_that_fails_as_a_whole_takes_nothing_away(nodes: Nodes, controller: Controller) -> None:
    """It says of no chunk how that fared: none is known to be safe."""
    a, b = (nodes.start(name, controller, SPACE) for name in "ab")
    a.store(CHUNKS, SPACE)

    def fail(job: str, command: m.Command) -> bool:
        if isinstance(command, m.Fetch):
            b._say(m.Progress(job, 0, len(CHUNKS), {}, {}, m.FAILED, "the peer refuses the key"))
        return not isinstance(command, m.Fetch)

    b.before = fail
    job = controller.post("move", {**ASKED, "source": {"node": "a"}, "target": {"node": "b", "tier": "ram"}})
    assert (job["state"], job["failed"], job["error"]) == ("failed", 4, "the peer refuses the key")
    assert a.tiers[0].of(SPACE.id) == set(CHUNKS)
    assert not a.commands


def test_what_the_source_may_yet_take_away_stays_pinned(monkeypatch: pytest.MonkeyPatch) -> None:
    """It was told to, and says nothing: when it does so, the other copy must not have been evicted."""
    monkeypatch.setattr("lmkv.controller.courier.ASK_SECONDS", 0.2)
    with Controller(step_timeout=0.5) as controller, Nodes() as nodes:
        a, b = (nodes.start(name, controller, SPACE) for name in "ab")
        a.store(CHUNKS, SPACE)
        a.before = lambda _job, command: not isinstance(command, m.Drop)
        job = controller.post("move", {**ASKED, "source": {"node": "a"}, "target": {"node": "b", "tier": "ram"}})
        assert job["state"] == "failed"
        assert "perhaps not removed" in job["error"]
        assert set(b.pins) >= set(CHUNKS)


def test_compress_and_decompress(nodes: Nodes, controller: Controller) -> None:
    a = nodes.start("a", controller, SPACE)
    a.store(CHUNKS, SPACE, "disk")
    where = {"node": "a", "tier": "disk"}
    job = controller.post("compress", {**ASKED, **where, "codec": "zstd"})
    assert (job["state"], job["done"]) == ("done", 4)
    assert a.tiers[1].codecs == dict.fromkeys(CHUNKS, "zstd")
    controller.post("decompress", {**ASKED, **where})
    assert a.tiers[1].codecs == dict.fromkeys(CHUNKS, "identity")
    error = controller.post("compress", {**ASKED, **where, "codec": "fp8+lz5"}, status=404)["error"]
    assert error["kind"] == "unknown-codec"
    assert error["known"] == ["fp8", "identity", "zstd"]
    assert "'lz5'" in error["message"]


def test_a41_clear_counts_by_tier_waits_for_what_is_held_and_refuses_unknown_nodes(
    nodes: Nodes, controller: Controller
) -> None:
    a, b = (nodes.start(name, controller, SPACE) for name in "ab")
    a.store(CHUNKS, SPACE)
    a.store(CHUNKS[:3], SPACE, "disk")
    b.store(CHUNKS[:1], SPACE)
    error = controller.post("clear", {"node": "c"}, status=404)["error"]
    assert (error["kind"], error["known"]) == ("unknown-node", ["a", "b"])
    assert "'c'" in error["message"]
    released = threading.Event()
    a.before = lambda _job, _command: released.wait(SECONDS)  # an engine still reads one of them
    job = controller.post("clear", {"node": "*"}, params={"wait": 0}, status=202)
    until(lambda: not b.tiers[0].of(SPACE.id), "the other node has cleared")
    assert controller.get(f"/v1/jobs/{job['id']}")["state"] == "running"
    released.set()
    job = controller.get(f"/v1/jobs/{job['id']}", params={"wait": SECONDS})
    assert job["state"] == "done"
    assert job["counts"] == {"a": {"ram": 4, "disk": 3}, "b": {"ram": 1, "disk": 0}}
    until(lambda: held(controller) == [], "the directory follows")


def test_a41_clear_of_one_tier_model_or_namespace(nodes: Nodes, controller: Controller) -> None:
    new = namespace(revision="r2")  # the weights have been replaced
    a = nodes.start("a", controller, SPACE, new)
    nodes.start("b", controller)
    a.store(CHUNKS, SPACE)
    a.store(digests(PROMPT, new)[:2], new)
    a.store(CHUNKS, SPACE, "disk")
    body = {"model": "m", "tokens": PROMPT}
    assert until(lambda: controller.post("lookup", {**body, "revision": "r1"})["nodes"], "told")[0]["hit_tokens"] == 16
    assert controller.post("clear", {"node": "a", "tier": "disk"})["counts"] == {"a": {"disk": 4}}
    job = controller.post("clear", {"node": "a", "namespace": new.id.hex()})
    assert job["counts"] == {"a": {"ram": 2, "disk": 0}}
    assert a.tiers[0].of(SPACE.id) == set(CHUNKS), "the old version is still there, by its name"
    assert controller.post("clear", {"node": "*", "model": "m"})["counts"] == {"a": {"ram": 4, "disk": 0}}
    assert controller.post("clear", {"node": "a", "tier": "tape"}, status=404)["error"]["known"] == ["disk", "ram"]
    assert controller.post("clear", {"node": "a", "model": "x"}, status=404)["error"]["known"] == ["m"]
    assert controller.post("clear", {"node": "b", "model": "m"}, status=404)["error"]["kind"] == "unknown-model"


def test_what_does_not_exist_or_cannot_be(nodes: Nodes, controller: Controller) -> None:
    shared = m.TierFacts("s3", "s3", 0, shared=True, writable=True)
    archive = m.TierFacts("old", "disk", 0, shared=False, writable=False)
    nodes.start("a", controller, SPACE, more=[shared, archive])
    nodes.start("b", controller, SPACE, more=[shared, archive])

    def move(source: tuple[str, str], target: tuple[str, str], status: int, **more: object) -> Any:
        ends = {"source": {"node": source[0]}, "target": {"node": target[0], "tier": target[1]}}
        if source[1]:
            ends["source"]["tier"] = source[1]
        return controller.post("move", {**ASKED, **ends, **more}, status=status)["error"]

    assert move(("c", ""), ("b", "ram"), 404)["known"] == ["a", "b"]
    assert move(("a", ""), ("c", "ram"), 404)["known"] == ["a", "b"]
    assert move(("a", "tape"), ("b", "ram"), 404)["known"] == ["disk", "old", "ram", "s3"]
    assert move(("a", ""), ("b", "tape"), 404)["kind"] == "unknown-tier"
    assert move(("a", ""), ("b", "ram"), 404, model="n")["known"] == ["m"]
    assert move(("a", ""), ("b", "old"), 409)["kind"] == "read-only"
    assert move(("a", "old"), ("b", "ram"), 409)["kind"] == "read-only"
    assert move(("a", "s3"), ("b", "ram"), 409)["kind"] == "shared"
    assert move(("a", ""), ("a", "ram"), 409)["kind"] == "same-place"
    assert move(("a", "ram"), ("a", "ram"), 409)["kind"] == "same-place"
    assert move(("a", ""), ("b", "ram"), 409, tokens=[1])["kind"] == "no-chunk"
    assert controller.get("/v1/jobs/0123456789abcdef", status=404)["error"]["kind"] == "unknown-job"
    assert controller.get("/v1/jobs")["jobs"] == []


def test_a_job_is_cancelled(nodes: Nodes, controller: Controller) -> None:
    a = nodes.start("a", controller, SPACE)
    a.store(CHUNKS, SPACE)
    reached, go = threading.Event(), threading.Event()

    def wait(_job: str, _command: m.Command) -> bool:
        reached.set()
        return go.wait(SECONDS)

    a.before = wait
    job = controller.post("pin", {**ASKED, "node": "a"}, params={"wait": 0}, status=202)
    assert reached.wait(SECONDS)
    controller.client.delete(f"/v1/jobs/{job['id']}").raise_for_status()
    until(lambda: a._cancelled, "the node hears of it")
    go.set()
    job = controller.get(f"/v1/jobs/{job['id']}", params={"wait": SECONDS})
    assert (job["state"], job["done"], job["failed"]) == ("cancelled", 0, 4)
    assert not a.pins
    again = controller.client.delete(f"/v1/jobs/{job['id']}")
    assert again.json()["state"] == "cancelled"


def test_an_idempotency_key_does_nothing_twice(nodes: Nodes, controller: Controller) -> None:
    controller.server.parts.fleet.roster.timeout = 1.0
    a = nodes.start("a", controller, SPACE, heartbeat=0.2)
    a.store(CHUNKS, SPACE)
    body = {**ASKED, "node": "a"}
    first = controller.post("pin", body, headers={"Idempotency-Key": "k1"})
    again = controller.post("pin", body, headers={"Idempotency-Key": "k1"})
    assert again == first
    assert len(a.commands) == 1
    other = controller.post("pin", {**body, "seconds": 5}, headers={"Idempotency-Key": "k1"}, status=409)
    assert other["error"]["kind"] == "idempotency-key"
    assert controller.post("unpin", body, headers={"Idempotency-Key": "k1"}, status=409)
    assert controller.post("pin", body, headers={"Idempotency-Key": "k2"})["id"] != first["id"]
    assert controller.post("pin", body)["id"] != first["id"]
    a.close()
    until(lambda: not controller.get("/v1/nodes")["nodes"], "the node is gone")
    assert controller.post("pin", body, headers={"Idempotency-Key": "k1"}) == first, "although it could not be done now"


def test_a_lost_connection_does_not_lose_a_command(nodes: Nodes, controller: Controller) -> None:
    a = nodes.start("a", controller, SPACE)
    a.store(CHUNKS, SPACE)
    cuts: list[str] = []

    def cut(job: str, _: m.Command) -> bool:
        if not cuts:
            cuts.append(job)
            a.cut()
            return False
        return True

    a.before = cut
    job = controller.post("pin", {**ASKED, "node": "a"})
    assert job["state"] == "done"
    assert [name for name, _ in a.commands] == cuts * 2, "the same command under the same name"


@pytest.mark.slow
def test_a_node_that_goes_for_good_fails_its_step(nodes: Nodes) -> None:
    with Controller(step_timeout=2.0) as controller:
        a = nodes.start("a", controller, SPACE)
        a.store(CHUNKS, SPACE)
        gone = threading.Event()
        a.before = lambda _job, _command: gone.set() or False
        job = controller.post("pin", {**ASKED, "node": "a"}, params={"wait": 0}, status=202)
        assert gone.wait(SECONDS)
        a.close()
        job = controller.get(f"/v1/jobs/{job['id']}", params={"wait": SECONDS})
        assert (job["state"], job["failed"]) == ("failed", 4)
        assert "'a'" in job["error"]
        assert controller.server.parts.metrics.value("lmkv_controller_jobs_total", state="failed") == 1
