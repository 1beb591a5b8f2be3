"""Mode `cache-aware`: the engine whose node has most of the prompt, weighed against its queue."""

from __future__ import annotations

import asyncio
import json
import re
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pytest
import uvicorn
from controller_rig import Controller, Node, Nodes, digests, namespace
from front_rig import LONG, Served, tokens, until
from starlette.applications import Starlette
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from lmkv.peer.ports import listen
from lmkv_backend_nixl_pd.proxy.aware import cheapest

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from front_rig import FakeEngine, RunningProxy, Site
    from starlette.requests import Request


class FakeController:
    """Answers /v1/lookup with what a test says."""

    def __init__(self) -> None:
        self.hits: dict[str, int] = {}
        self.asked: list[dict[str, Any]] = []
        self.authorization: list[str] = []
        self.answer: Response | None = None
        self.delay = 0.0
        server = uvicorn.Server(
            uvicorn.Config(
                Starlette(routes=[Route("/v1/lookup", self._lookup, methods=["POST"])]),
                log_config=None, lifespan="off", ws="none", loop="asyncio",
            )
        )  # fmt: skip
        sock = listen("127.0.0.1", 0, "controller")
        self.served = Served(server, sock, server.serve(sockets=[sock]))

    async def _lookup(self, request: Request) -> Response:
        self.asked.append(json.loads(await request.body()))
        self.authorization.append(request.headers.get("authorization", ""))
        await asyncio.sleep(self.delay)
        if self.answer is not None:
            return self.answer
        nodes = [
            {"node": node, "namespace": "0" * 32, "hit_tokens": hit, "tiers": [], "load": 0.0, "endpoints": {}}
            for node, hit in self.hits.items()
        ]
        return JSONResponse({"tokens": len(self.asked[-1]["tokens"]), "nodes": nodes})


@pytest.fixture
def controller() -> Iterator[FakeController]:
    made = FakeController()
    yield made
    made.served.close(force=True)


def before(site: Site, controller: FakeController, **options: Any) -> tuple[RunningProxy, list[FakeEngine]]:
    engines = [site.engine(f"engine-{number}", adapter="lora") for number in range(3)]
    proxy = site.proxy(
        engine=tuple((engine.url, f"n{number}") for number, engine in enumerate(engines)),
        controller=controller.served.url,
        **options,
    )
    return proxy, engines


def outcomes(proxy: RunningProxy) -> dict[str, float]:
    text = proxy.client.get("/metrics").text
    found = re.findall(r'^lmkv_proxy_choices_total\{outcome="(.*)"\} (.*)$', text, re.MULTILINE)
    return {name: float(value) for name, value in found}


def test_longest_prefix_gets_the_request(site: Site, controller: FakeController) -> None:
    proxy, engines = before(site, controller, controller_token="tk-1")
    controller.hits = {"n1": 64, "n2": 256, "elsewhere": 300}
    for _ in range(4):
        assert proxy.post(prompt=LONG, cache_salt="tenant").json()["system_fingerprint"] == "engine-2"
    asked = controller.asked[0]
    assert asked == {"model": "/models/tiny", "tokens": tokens({"prompt": LONG}), "salt": "tenant"}
    assert controller.authorization[0] == "Bearer tk-1"
    chat = proxy.post("/v1/chat/completions", messages=[{"role": "user", "content": LONG}], stream=True)
    assert b"engine-2" in chat.content
    assert "salt" not in controller.asked[-1]
    assert outcomes(proxy) == {"cached": 5}
    count = len(asked["tokens"])
    assert proxy.count("lmkv_proxy_hit_tokens_total") == 5 * 256
    assert 5 * count <= proxy.count("lmkv_proxy_prompt_tokens_total") < 6 * count
    assert all(engine.asked["/v1/models"] <= 1 for engine in engines)


def test_a_real_controller_is_understood(site: Site, tmp_path: Path) -> None:
    (tmp_path / "tokens").write_text("proxy read tk-read-0123456789\nnode node tk-node-0123456789\n")
    space, ids = namespace("/models/tiny"), list(range(100))
    with Controller(tokens=tmp_path / "tokens") as real, Nodes() as nodes:
        engines = [site.engine(f"engine-{number}") for number in range(2)]
        proxy = site.proxy(
            engine=tuple((engine.url, f"n{number}") for number, engine in enumerate(engines)),
            controller=real.url,
            controller_token="tk-read-0123456789",
        )
        assert proxy.post(prompt=ids).status_code == 200
        assert outcomes(proxy) == {"not-cached": 1}, "no node has such a model yet"
        node = Node(nodes, "n1", real.url, [space], token="tk-node-0123456789")
        until(lambda: node.connected)
        node.store(digests(ids, space), space)
        until(lambda: proxy.post(prompt=ids).status_code == 200 and outcomes(proxy).get("cached"))
        assert {proxy.post(prompt=ids).json()["system_fingerprint"] for _ in range(3)} == {"engine-1"}
        assert set(outcomes(proxy)) == {"cached", "not-cached"}


def test_queue_weighs_against_hits(site: Site, controller: FakeController) -> None:
    proxy, engines = before(site, controller, queue_tokens=100)
    controller.hits = {"n2": 250}
    for engine in engines:
        engine.wait.clear()
    with ThreadPoolExecutor(8) as threads:
        held = []
        for number in range(6):
            held.append(threads.submit(proxy.post, prompt=LONG))
            until(lambda: sum(len(engine.seen) for engine in engines) == number + 1)  # noqa: B023  used at once
            if number == 4:
                assert [len(engine.seen) for engine in engines] == [1, 1, 3], "three in its queue outweigh the hit"
        assert [len(engine.seen) for engine in engines] == [1, 1, 4]
        for engine in engines:
            engine.wait.set()
        assert {answer.result().status_code for answer in held} == {200}


def test_formula() -> None:
    class Engine:
        def __init__(self, name: str, busy: int) -> None:
            self.name, self.busy = name, busy

    idle, warm, full = Engine("idle", 0), Engine("warm", 1), Engine("full", 3)
    engines: Any = [idle, warm, full]
    assert cheapest(engines, {}, 1000, 512) is idle
    assert cheapest(engines, {"warm": 511}, 1000, 512) is idle
    assert cheapest(engines, {"warm": 513}, 1000, 512) is warm
    assert cheapest(engines, {"warm": 1000, "full": 1000}, 1000, 0) is warm
    assert cheapest(engines, {"full": 9000}, 1000, 512) is idle, "no more than the prompt is saved"
    assert cheapest([], {}, 1000, 512) is None


@pytest.mark.parametrize(
    ("fields", "outcome"),
    [
        ({"prompt": "short"}, "short"),
        ({"prompt": [LONG, LONG]}, "not-divisible"),
        ({"prompt": LONG, "model": "unknown"}, "not-tokenised"),
        ({"prompt": LONG, "model": "lora"}, "adapter"),
    ],
)
def test_what_is_not_looked_up(site: Site, controller: FakeController, fields: dict[str, Any], outcome: str) -> None:
    proxy, engines = before(site, controller)
    for _ in range(3):
        assert proxy.post(**fields).status_code == 200
    assert [len(engine.seen) for engine in engines] == [1, 1, 1]
    assert outcomes(proxy) == {outcome: 3}
    assert not controller.asked


@pytest.mark.parametrize("status", [413, 422])
def test_a_prompt_that_the_controller_does_not_take_is_no_fault_of_the_controller(
    site: Site, controller: FakeController, status: int
) -> None:
    """A salt that is too long, a prompt that is: the next request is looked up at once."""
    proxy, _ = before(site, controller)
    controller.hits = {"n1": 256}
    controller.answer = JSONResponse({"error": {"kind": "body"}}, status_code=status)
    assert proxy.post(prompt=LONG, cache_salt="s" * 2000).status_code == 200
    controller.answer = None
    assert proxy.post(prompt=LONG, cache_salt="s").json()["system_fingerprint"] == "engine-1"
    assert outcomes(proxy) == {"not-cached": 1, "cached": 1}


def test_pictures_are_not_looked_up(site: Site, controller: FakeController) -> None:
    proxy, _ = before(site, controller)
    parts = [{"type": "text", "text": LONG}, {"type": "image_url", "image_url": {"url": "data:…"}}]
    assert proxy.post("/v1/chat/completions", messages=[{"role": "user", "content": parts}]).status_code == 200
    assert proxy.post("/v1/chat/completions", messages=[{"role": "user", "content": parts[:1]}]).status_code == 200
    assert outcomes(proxy) == {"not-divisible": 1, "not-cached": 1}


def test_controller_that_is_away(site: Site, controller: FakeController, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lmkv_backend_nixl_pd.proxy.aware.REST_SECONDS", 0.0)
    proxy, engines = before(site, controller, lookup_timeout="300ms")
    controller.hits = {"n2": 256}
    controller.delay = 20.0
    assert proxy.post(prompt=LONG).status_code == 200
    monkeypatch.setattr("lmkv_backend_nixl_pd.proxy.aware.REST_SECONDS", 30.0)
    until(lambda: proxy.post(prompt=LONG).status_code == 200 and len(controller.asked) == 2)
    assert {proxy.post(prompt=LONG).status_code for _ in range(3)} == {200}
    assert len(controller.asked) == 2, "it is left alone meanwhile"
    controller.delay = 0.0
    monkeypatch.setattr("lmkv_backend_nixl_pd.proxy.aware.REST_SECONDS", 0.02)
    proxy.parts.proxy._mode._controller._rests_until = 0.0  # type: ignore[attr-defined]  # of this mode
    for answer in (
        Response(status_code=500),
        JSONResponse({"nodes": [{"node": "n2"}]}),
        Response(b"\x80\x04garbage"),
    ):
        controller.answer = answer
        asked = len(controller.asked)
        until(lambda: proxy.post(prompt=LONG).status_code == 200 and len(controller.asked) > asked)  # noqa: B023
    controller.answer = JSONResponse({"error": {"kind": "unknown-model"}}, status_code=404)
    until(lambda: proxy.post(prompt=LONG).status_code == 200 and outcomes(proxy).get("not-cached"))
    controller.served.close(force=True)
    until(lambda: proxy.post(prompt=LONG).status_code == 200 and outcomes(proxy)["no-controller"] > 4)
    assert min(len(engine.seen) for engine in engines) >= 1
    controller.served = FakeController().served


def test_tokeniser_that_is_slow(site: Site, controller: FakeController) -> None:
    proxy, engines = before(site, controller, lookup_timeout="100ms")
    for engine in engines:
        engine.tokenize_delay = 20.0
    assert proxy.post(prompt=LONG).status_code == 200
    assert outcomes(proxy) == {"not-tokenised": 1}
    assert not controller.asked
    for engine in engines:
        engine.tokenize_status, engine.tokenize_delay = 404, 0.0
    assert proxy.post(prompt=LONG).status_code == 200
    assert outcomes(proxy) == {"not-tokenised": 2}


def test_engine_with_the_prefix_dies(site: Site, controller: FakeController) -> None:
    proxy, engines = before(site, controller, health_interval="60s")
    controller.hits = {"n2": 256}
    assert proxy.post(prompt=LONG).json()["system_fingerprint"] == "engine-2"
    gone = threading.Thread(target=engines[2].stop)
    gone.start()
    gone.join()
    assert {proxy.post(prompt=LONG).json()["system_fingerprint"] for _ in range(4)} <= {"engine-0", "engine-1"}
