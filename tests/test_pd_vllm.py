"""Prefill and decode by two real vLLM servers behind `lmkv proxy`: the same text as one vLLM says."""

from __future__ import annotations

import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from pd_rig import (
    ENVIRONMENT,
    START_SECONDS,
    arguments,
    ask,
    ask_all,
    kill_service,
    loaded,
    moved,
    pair,
    prompts,
    until,
)  # fmt: skip
from vllm_rig import BLOCK, Vllm, document, questions, stack

from lmkv.errors import PluginError
from lmkv.plugins import PluginHost

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.vllm
TRANSPORTS = ("tcp", "nixl")


@pytest.fixture
def place() -> Iterator[Path]:
    """A folder with a short path: sockets lie in it."""
    with tempfile.TemporaryDirectory(prefix="pd-", dir="/tmp") as folder:
        yield Path(folder)


def transferable(prompt: list[int]) -> int:
    """Tokens of a prompt that its decode node need not compute."""
    return (len(prompt) - 1) // BLOCK * BLOCK


def needed(transport: str) -> None:
    try:
        PluginHost.discover().load_transport(transport)
    except PluginError as error:
        pytest.skip(str(error))


@pytest.mark.slow
def test_two_engines_without_the_proxy(place: Path) -> None:
    """Requests go from one vLLM to the other as the proxy would send them; each says what one alone says."""
    from lmkv_vllm.demo.server import free_port

    ports = [free_port() for _ in range(2)]
    stacks = [
        stack(peer={"listen": f"127.0.0.1:{port}", "node": name, "transports": ["tcp"]})
        for name, port in zip(("left", "right"), ports, strict=True)
    ]
    with ExitStack() as engines, ThreadPoolExecutor(2) as crew:
        made = crew.map(lambda one: engines.enter_context(Vllm(place, one, max_num_batched_tokens=128)), stacks)
        left, right = list(made)
        wanted = questions(1)
        to = f"127.0.0.1:{ports[1]}"
        computed = left.ask(wanted, 1, transfers={name: {"lmkv": {"transfer": name, "to": to}} for name in wanted})
        assert computed.transfers == {
            name: {"lmkv": {"transfer": name, "node": "left", "tokens": transferable([*prompt, 0])}}
            for name, prompt in wanted.items()
        }
        moved = right.ask(wanted, transfers=computed.transfers)
        assert moved.cached == {name: transferable(prompt) for name, prompt in wanted.items()}
        assert moved.answers == left.ask(wanted).answers
        assert {name: answer[:1] for name, answer in moved.answers.items()} == computed.answers
        odd = {name: {"lmkv": {"transfer": 7, "to": ["x"]}} for name in wanted}
        assert right.ask(wanted, transfers=odd).answers == moved.answers
        held = right.health()["holds"]
        assert not any(count for name, count in held.items() if name not in {"sessions", "pins"})


@pytest.mark.slow
def test_one_request_is_computed_here_and_decoded_there(place: Path) -> None:
    """What the decode engine says alone, where it may not use what it has, it says with the other's pages, too."""
    with pair(place, "tcp") as nodes:
        for prompt, stream in zip(prompts(2), (False, True), strict=True):
            before = loaded(nodes)
            text = ask(nodes.proxy.url, prompt, stream=stream)
            until(lambda before=before, prompt=prompt: loaded(nodes) - before == transferable(prompt))
            assert text == ask(nodes.decode.server.url, prompt, cache_salt="alone")
            assert loaded(nodes) - before == transferable(prompt)
        assert nodes.outcomes() == {"carried": 2}
        assert set(moved(nodes)) == {"tcp"}


@pytest.fixture(scope="module")
def said() -> list[str]:
    """What one plain vLLM says to each of the prompts."""
    pytest.importorskip("vllm")
    from lmkv_vllm.demo.models import tiny_model
    from lmkv_vllm.demo.server import Server

    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        with Server(str(tiny_model()), arguments(), log=log, environment=ENVIRONMENT) as server:
            server.wait_until_ready(START_SECONDS)
            return [ask(server.url, prompt) for prompt in prompts()]


@pytest.mark.slow
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_eight_at_once(place: Path, transport: str, said: list[str]) -> None:
    """Streamed and not, the second time too, when the prefill node has the prompts already."""
    needed(transport)
    with pair(place, transport) as nodes:
        assert ask_all(nodes.proxy.url, prompts()) == said
        until(lambda: loaded(nodes) == sum(map(transferable, prompts())))
        assert ask_all(nodes.proxy.url, prompts(), stream=True) == said
        assert [ask(nodes.proxy.url, prompt, stream=True) for prompt in prompts(3)] == said[:3]
        assert nodes.outcomes() == {"carried": 19}
        assert set(moved(nodes)) == {transport}
        until(lambda: not nodes.decode.metric("lmkv_peer_admitted_bytes", by="instance").popitem()[1])


@pytest.mark.slow
@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("service", [False, True], ids=["engine", "node"])
def test_a37_prefill_killed_in_mid_request(place: Path, transport: str, *, service: bool) -> None:
    """The decode engine goes on with what has come; so do the next requests, and those after the restart."""
    needed(transport)
    long = document(77, 12_000)
    with pair(place, transport, length=16_384, step=512) as nodes, ThreadPoolExecutor(1) as crew:
        alone = ask(nodes.decode.server.url, long, cache_salt="alone")
        first = crew.submit(ask, nodes.proxy.url, long, stream=True)
        until(lambda: sum(moved(nodes).values()) > 0)
        assert not first.done()
        if service:
            kill_service(place, "prefill")
        nodes.prefill.server.kill()
        assert first.result(240) == alone
        assert nodes.outcomes().get("carried", 0) == 0
        short = prompts(1)[0]
        text = ask(nodes.decode.server.url, short, cache_salt="alone")
        assert ask(nodes.proxy.url, short) == text
        with nodes.prefill.server as again:
            again.wait_until_ready(START_SECONDS)
            until(lambda: _carried(nodes.proxy.url, nodes.outcomes))
            before = loaded(nodes)
            other = prompts(3)[2]
            assert ask(nodes.proxy.url, other) == ask(nodes.decode.server.url, other, cache_salt="alone")
            assert loaded(nodes) - before == transferable(other)
        until(lambda: not nodes.decode.metric("lmkv_peer_admitted_bytes", by="instance").popitem()[1])


def _carried(url: str, outcomes: object) -> bool:
    """The proxy has seen that the prefill server is back."""
    ask(url, document(int(time.monotonic() * 1000), 200), tokens=1)
    return outcomes().get("carried", 0) > 0  # type: ignore[operator]


@pytest.mark.slow
def test_clients_that_go_leave_nothing(place: Path) -> None:
    """Half of eight requests are given up in the middle; the others are answered, and nothing stays held."""
    import httpx

    with pair(place, "tcp") as nodes:
        wanted = prompts()
        gone = threading.Event()

        def leave(prompt: list[int]) -> None:
            body = {"model": "tiny", "prompt": prompt, "max_tokens": 400, "ignore_eos": True, "stream": True}
            with httpx.Client(timeout=0.3) as client:
                try:
                    client.post(f"{nodes.proxy.url}/v1/completions", json=body)
                except httpx.TimeoutException:
                    gone.set()

        with ThreadPoolExecutor(4) as crew:
            leaving = [crew.submit(leave, prompt) for prompt in wanted[4:]]
            texts = ask_all(nodes.proxy.url, wanted[:4])
            for future in leaving:
                future.result(120)
        assert gone.is_set()
        assert texts == [ask(nodes.decode.server.url, prompt, cache_salt="alone") for prompt in wanted[:4]]
        until(lambda: not nodes.decode.metric("lmkv_peer_admitted_bytes", by="instance").popitem()[1])
        until(lambda: not nodes.decode.metric("lmkv_leases", by="instance").popitem()[1])
