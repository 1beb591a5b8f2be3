"""Two real vLLMs with services of their own, each on a loopback address: the second answers from the first's pool."""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from controller_rig import Controller, until
from p2p_rig import far, place, target
from proxy_rig import FaultProxy
from vllm_rig import CHUNK, Vllm, counted, questions, services_gone, stack

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.vllm

SOME, MORE = questions(2), questions(2, first=10)
PROMPT = 317
CHUNKS = PROMPT // CHUNK * CHUNK
"""Tokens of a question's whole chunks."""


@pytest.fixture
def folder() -> Iterator[Path]:
    """A short path: unix sockets take no long ones."""
    made = Path(tempfile.mkdtemp(prefix="lmkv-p-"))
    yield made
    shutil.rmtree(made, ignore_errors=True)


def node(name: str, address: str, *tiers: dict[str, Any], **more: Any) -> dict[str, Any]:
    peer = {"node": name, "listen": address, "transports": ["tcp"], "share": "100%", **more.pop("peer", {})}
    return stack(*tiers, peer=peer, **more)


def hits(health: dict[str, Any], tier: str) -> float:
    return counted(health, "lmkv_hit_tokens_total", tier=tier)


def kill_service(folder: Path) -> None:
    """-9 for the process that listens on the socket below `folder`."""
    [path] = folder.glob("lmkv/*.sock")
    for process in Path("/proc").glob("[0-9]*"):
        try:
            command = (process / "cmdline").read_bytes()
        except OSError:
            continue
        if os.fsencode(path) in command:
            os.kill(int(process.name), signal.SIGKILL)
            return
    raise AssertionError("no service")


def test_the_second_answers_from_the_firsts_pool(folder: Path) -> None:
    address = place("127.0.0.2")
    with Vllm(folder / "a", node("a", address)) as first:
        cold = first.ask(SOME)
        assert set(cold.cached.values()) == {0}
        first.quiet()
        tier = far(peers=[address], deadline="10s")
        with Vllm(folder / "b", node("b", "127.0.0.3:0", tier)) as second:
            there = second.ask(SOME)
            assert there.answers == cold.answers
            assert min(there.cached.values()) >= CHUNKS
            health = second.quiet()
            assert hits(health, "far") >= CHUNKS * len(SOME) // 2
            assert hits(health, "far") + hits(health, "ram") == sum(there.cached.values())
            begun = counted(health, "lmkv_peer_bytes_total", op="pull")
            again = second.ask(SOME)
            assert again.answers == cold.answers
            health = second.quiet()
            assert counted(health, "lmkv_peer_bytes_total", op="pull") == begun, "it lies in its own RAM now"
            assert not any(health["holds"][kind] for kind in ("leases", "holds", "reservations"))
        served = first.quiet()
        assert counted(served, "lmkv_peer_served_bytes_total", way="out") == begun
        assert not any(served["holds"][kind] for kind in ("leases", "holds", "reservations"))
    services_gone(folder / "a")
    services_gone(folder / "b")


@pytest.mark.slow
@pytest.mark.parametrize("way", ["list", "controller"])
def test_the_peer_is_killed_in_mid_read(folder: Path, way: str) -> None:
    """-9 for the first's service while frames are under way: the second computes them, and says the same."""
    with Vllm(folder / "plain", None) as plain:
        right = plain.ask(SOME | MORE).answers
    address = place("127.0.0.2")
    with Controller() as controller, FaultProxy(target(address)) as proxy:
        groups = {"controller": {"url": controller.url.replace("http", "ws", 1), "heartbeat": "500ms"}}
        with Vllm(folder / "a", node("a", address, peer={"advertise": proxy.address}, **groups)) as first:
            assert first.ask(SOME).answers == {name: right[name] for name in SOME}
            first.quiet()
            where = {"peers": [proxy.address]} if way == "list" else {"controller": controller.url}
            until(lambda: controller.get("/v1/nodes")["nodes"][0]["tiers"][0]["used_bytes"] > 0, "told")
            tier = far(**where, deadline="20s")
            with Vllm(folder / "b", node("b", "127.0.0.3:0", tier, **groups)) as second:
                second.ask({"warm up": list(range(10, 40))}, 1)
                before = proxy.bytes_down
                proxy.throttle(256 << 10)
                asked = second.begin(SOME)
                until(lambda: proxy.bytes_down > before + (64 << 10), "bytes are under way")
                kill_service(folder / "a")
                proxy.drop()  # and what it had sent and nobody has received
                proxy.throttle(0)
                killed = time.monotonic()
                there = asked.result(200)
                assert time.monotonic() - killed < 100
                assert there.answers == {name: right[name] for name in SOME}
                assert sum(there.cached.values()) < CHUNKS * len(SOME)
                assert second.ask(MORE).answers == {name: right[name] for name in MORE}
                again = second.ask(SOME)
                assert again.answers == {name: right[name] for name in SOME}
                assert min(again.cached.values()) >= CHUNKS, "computed once, and in its own RAM"
                health = second.quiet()
                assert not any(health["holds"][kind] for kind in ("leases", "holds", "reservations"))
        services_gone(folder / "b")
