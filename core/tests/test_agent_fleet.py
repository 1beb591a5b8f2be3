"""Real node services and a real controller: what the one tells and the other asks, end to end."""

from __future__ import annotations

import contextlib
import time
from typing import TYPE_CHECKING, Any

import pytest
from controller_rig import Controller, until
from storage_rig import CHUNK_TOKENS, Client, chain, namespace

from lmkv.config import load_config
from lmkv.plugins import PluginHost
from lmkv.service.host import ThreadHost

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

TOKENS = list(range(16))


class Service:
    """A node service in a thread, with an engine's client."""

    def __init__(self, name: str, url: str, folder: Path) -> None:
        text = f"""
            chunk_tokens: {CHUNK_TOKENS}
            pool: {{size: 8MiB, prefault: false}}
            tiers:
              - {{name: ram, backend: cpu, capacity: 4MiB}}
              - {{name: disk, backend: disk, capacity: 16MiB, write: demote, options: {{path: {folder}}}}}
            peer: {{node: {name}, listen: "127.0.0.1:0"}}
            controller: {{url: "{url.replace("http", "ws", 1)}", heartbeat: 200ms}}
        """
        self.name = name
        self.host = ThreadHost(load_config(text, host=PluginHost.discover(), environ={}))

    def run(self, work: Callable[[Client], Any], model: str = "m") -> Any:
        """Something that an engine's client does, on the storage loop."""

        async def on_loop() -> Any:
            client = Client(self.host.storage.manager, namespace(model=model))
            try:
                done = work(client)
                return await done if hasattr(done, "__await__") else done
            finally:
                client.session.close()

        return self.host.run(on_loop(), 20.0)

    def store(self, tokens: list[int] = TOKENS) -> None:
        self.run(lambda client: client.store(client.frames(chain(tokens))))

    def load(self, tokens: list[int] = TOKENS) -> list[bool]:
        async def load(client: Client) -> list[bool]:
            keys = chain(tokens)
            return await client.load(await client.look_up(keys), keys)

        return self.run(load)  # type: ignore[no-any-return]

    def close(self) -> None:
        self.host.close()


@contextlib.contextmanager
def fleet(folder: Path, *names: str) -> Iterator[tuple[Controller, dict[str, Service]]]:
    with Controller() as controller, contextlib.ExitStack() as stack:
        nodes = {}
        for name in names:
            nodes[name] = Service(name, controller.url, folder / name)
            stack.callback(nodes[name].close)
        until(lambda: {n["node"] for n in controller.get("/v1/nodes")["nodes"] if n["synced"]} == set(names), "all")
        yield controller, nodes


def where(controller: Controller, tokens: list[int] = TOKENS) -> dict[str, dict[str, int]]:
    """Node → tier → leading tokens."""
    if not controller.get("/v1/nodes")["nodes"]:
        return {}
    answer = controller.client.post("/v1/lookup", json={"model": "m", "tokens": tokens})
    nodes = answer.json().get("nodes", []) if answer.status_code == 200 else []
    return {n["node"]: {t["tier"]: t["hit_tokens"] for t in n["tiers"]} for n in nodes}


def test_hot_chunks_move_to_another_node_which_then_answers_alone(tmp_path: Path) -> None:
    with fleet(tmp_path, "a", "b") as (controller, nodes):
        nodes["a"].store()
        until(lambda: where(controller) == {"a": {"ram": 16}}, "a tells what it has stored")
        chunks = {"model": "m", "tokens": TOKENS}
        moved = controller.post(
            "move", {**chunks, "source": {"node": "a"}, "target": {"node": "b", "tier": "ram"}}, status=200
        )
        assert moved["state"] == "done", moved
        until(lambda: where(controller) == {"b": {"ram": 16}}, "it lies on b alone")
        nodes["a"].close()
        assert nodes["b"].load() == [True] * 4
        pinned = controller.post("pin", {**chunks, "seconds": 60.0})
        assert pinned["state"] == "done", pinned
        assert len(nodes["b"].host.storage.manager.pinned) == 4


@pytest.mark.slow
def test_copy_compress_and_clear(tmp_path: Path) -> None:
    with fleet(tmp_path, "a", "b") as (controller, nodes):
        nodes["a"].store()
        until(lambda: where(controller) == {"a": {"ram": 16}}, "a tells what it has stored")
        chunks = {"model": "m", "tokens": TOKENS}
        for target in ({"node": "b", "tier": "disk"}, {"node": "a", "tier": "disk"}):
            source = {"node": "a", "tier": "ram"}
            copied = controller.post("copy", {**chunks, "source": source, "target": target})
            assert copied["state"] == "done", copied
        until(lambda: where(controller) == {"a": {"ram": 16, "disk": 16}, "b": {"disk": 16}}, "it lies in three places")
        compressed = controller.post("compress", {**chunks, "node": "b", "tier": "disk", "codec": "zlib"})
        assert compressed["state"] == "done", compressed
        assert nodes["b"].load() == [True] * 4
        cleared = controller.post("clear", {"node": "*"})
        assert cleared["state"] == "done", cleared
        until(lambda: not where(controller), "nothing lies anywhere")


def test_a29_a_service_that_starts_anew_is_another_one(tmp_path: Path) -> None:
    with fleet(tmp_path, "a") as (controller, nodes):
        nodes["a"].store()
        until(lambda: where(controller) == {"a": {"ram": 16}}, "a tells what it has stored")
        before = controller.get("/v1/nodes")["nodes"][0]
        nodes["a"].close()
        again = Service("a", controller.url, tmp_path / "a")
        try:
            until(lambda: controller.get("/v1/nodes")["nodes"][0]["incarnation"] != before["incarnation"], "it is back")
            until(lambda: not where(controller), "what lay in the RAM of the old one is promised no more")
            again.store(TOKENS[:8])
            until(lambda: where(controller) == {"a": {"ram": 8}}, "the new one tells")
        finally:
            again.close()


def test_a_service_stops_at_once_while_its_controller_hangs(tmp_path: Path) -> None:
    with fleet(tmp_path, "a") as (controller, nodes):
        controller.server.stop()
        begun = time.monotonic()
        nodes["a"].close()
        assert time.monotonic() - begun < 8
