"""Two real vLLMs and controllers: what one node has moves to the other; one of two controllers is killed."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from controller_process import ControllerProcess
from controller_rig import SECONDS, until
from p2p_rig import place, target
from proxy_rig import FaultProxy
from redis_rig import RedisServer
from vllm_rig import CHUNK, Vllm, counted, document, questions, services_gone, stack

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

SOME, MORE = questions(2), questions(2, first=10)
CHUNKS = 300 // CHUNK
"""Of a document."""
WHOLE = CHUNKS * CHUNK
DOCUMENTS = document(0)[:WHOLE], document(1)[:WHOLE]
"""What both questions on a document have in common, to the end of a chunk."""


@pytest.fixture
def folder() -> Iterator[Path]:
    """A short path: unix sockets take no long ones."""
    with tempfile.TemporaryDirectory(prefix="lmkv-v-") as made:
        yield Path(made)


def node(folder: Path, name: str, *controllers: ControllerProcess, **peer: Any) -> Vllm:
    """An engine with RAM and disk, whose service has a peer port and an agent."""
    disk = {
        "name": "disk",
        "backend": "disk",
        "capacity": "64MiB",
        "write": "demote",
        "options": {"path": str(folder / f"{name}-disk")},
    }
    peer = {"node": name, "listen": "127.0.0.1:0", "transports": ["tcp"], "share": "100%", **peer}
    urls = [each.url.replace("http", "ws", 1) for each in controllers]
    return Vllm(folder / name, stack(disk, peer=peer, controller={"url": urls, "heartbeat": "500ms"}))


def model(controller: ControllerProcess) -> str:
    """What the engines' model is called, once any has said so."""
    nodes = until(lambda: [n for n in controller.get("/v1/nodes")["nodes"] if n["namespaces"]], "an engine is there")
    return str(nodes[0]["namespaces"][0]["model"])


def held(controller: ControllerProcess, tokens: list[int]) -> dict[str, dict[str, int]]:
    """Node → tier → tokens of a prompt that lie there."""
    found = controller.post("lookup", {"model": model(controller), "tokens": tokens})["nodes"]
    return {hit["node"]: {tier["tier"]: tier["hit_tokens"] for tier in hit["tiers"]} for hit in found}


def move(controller: ControllerProcess, tokens: list[int], tier: str, **more: Any) -> dict[str, Any]:
    """From a to a tier of b."""
    body = {"model": model(controller), "tokens": tokens, "source": {"node": "a"}}
    job: dict[str, Any] = controller.post("move", {**body, "target": {"node": "b", "tier": tier}}, **more)
    return job


def test_hot_chunks_move_and_the_other_answers_warm_when_the_first_has_gone(folder: Path) -> None:
    places = dict(zip(("ram", "disk"), DOCUMENTS, strict=True))
    with ControllerProcess(folder / "controller") as controller, node(folder, "b", controller) as b:
        with node(folder, "a", controller) as a:
            cold = a.ask(SOME)
            assert set(cold.cached.values()) == {0}
            a.quiet()
            for tier, tokens in places.items():
                until(lambda tokens=tokens: held(controller, tokens) == {"a": {"ram": WHOLE}}, "told")
                job = move(controller, tokens, tier)
                assert (job["state"], job["done"], job["failed"]) == ("done", CHUNKS, 0), job
                until(lambda tokens=tokens, tier=tier: held(controller, tokens) == {"b": {tier: WHOLE}}, "moved")
        services_gone(folder / "a")
        pulled = counted(b.health(), "lmkv_peer_bytes_total", op="pull")
        assert pulled > 0
        warm = b.ask(SOME)
        assert warm.answers == cold.answers
        assert set(warm.cached.values()) == {WHOLE}
        health = b.quiet()
        own = [counted(health, "lmkv_hit_tokens_total", tier=tier) for tier in places]
        assert min(own) >= WHOLE
        assert sum(own) == sum(warm.cached.values())
        assert counted(health, "lmkv_peer_bytes_total", op="pull") == pulled


def test_one_of_two_controllers_is_killed(folder: Path) -> None:
    """In the middle of a move: both engines go on, and the other controller answers and ends what was begun."""
    address = place("127.0.0.2")
    with RedisServer(folder / "redis") as redis, FaultProxy(target(address)) as proxy:
        first, second = (
            ControllerProcess(folder / name, "--directory", redis.url) for name in ("controller-1", "controller-2")
        )
        with (
            first,
            second,
            node(folder, "a", first, second, listen=address, advertise=proxy.address) as a,
            node(folder, "b", first, second) as b,
        ):
            right = a.ask(SOME | MORE).answers
            a.quiet()
            until(lambda: held(second, DOCUMENTS[0]) == {"a": {"ram": WHOLE}}, "it knows what the first was told")
            before = proxy.bytes_down
            proxy.throttle(64 << 10)
            job = move(first, DOCUMENTS[0], "ram", wait=0)["id"]
            until(lambda: proxy.bytes_down > before + (16 << 10), "bytes are under way")
            first.kill()
            asked = [each.begin(MORE) for each in (a, b)]
            assert second.get(f"/v1/jobs/{job}")["state"] == "running"
            until(lambda: held(second, DOCUMENTS[1]) == {"a": {"ram": WHOLE}}, "it answers for all")
            for each in asked:
                assert each.result(SECONDS).answers == {name: right[name] for name in MORE}
            proxy.throttle(0)
            ended = second.get(f"/v1/jobs/{job}", params={"wait": SECONDS})
            assert (ended["state"], ended["done"], ended["failed"]) == ("done", CHUNKS, 0), ended
            other = move(second, DOCUMENTS[1], "ram")
            assert (other["state"], other["done"], other["failed"]) == ("done", CHUNKS, 0), other
            for tokens in DOCUMENTS:
                until(lambda tokens=tokens: held(second, tokens) == {"b": {"ram": WHOLE}}, "told")
            warm, anew = b.ask(SOME), a.ask(SOME)
            assert warm.answers == anew.answers == {name: right[name] for name in SOME}
            assert (set(warm.cached.values()), set(anew.cached.values())) == ({WHOLE}, {0})
            for engine in (a, b):
                health = engine.quiet()
                assert not any(health["holds"][kind] for kind in ("leases", "holds", "reservations"))
