"""Two real vLLM servers with the tiny model, one for prefill and one for decode, behind `lmkv proxy`."""

from __future__ import annotations

import json
import os
import signal
import socket
import struct
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import httpx
import pytest
from vllm_rig import BLOCK, CHUNK, document, stack

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from lmkv_vllm.demo.pair import Pair

START_SECONDS = 300.0
ANSWER_SECONDS = 240.0
ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "0",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}
ARGUMENTS = [
    "--enforce-eager", "--block-size", str(BLOCK), "--max-num-seqs", "16", "--dtype", "float32",
    "--served-model-name", "tiny", "--no-enable-prefix-caching",
]  # fmt: skip


def arguments(*, length: int = 1024, step: int = 256) -> list[str]:
    """Of vLLM: tokens of the longest request, and of a step."""
    return [*ARGUMENTS, "--max-model-len", str(length), "--max-num-batched-tokens", str(step)]


def pair(place: Path, transport: str, *, length: int = 1024, step: int = 256, **more: Any) -> Pair:
    """Two nodes and the proxy, to be entered."""
    pytest.importorskip("vllm")
    from lmkv_vllm.demo.models import tiny_model
    from lmkv_vllm.demo.pair import Pair, Shape

    places = [place / node for node in ("prefill", "decode")]
    for each in places:
        each.mkdir(parents=True)
    shape = Shape(
        str(tiny_model()),
        arguments(length=length, step=step),
        ({**ENVIRONMENT, "XDG_RUNTIME_DIR": str(places[0])}, {**ENVIRONMENT, "XDG_RUNTIME_DIR": str(places[1])}),
        stack(**more),
        (transport,),
        {"lmkv.lookup_deadline": "30s", "lmkv.transfer_deadline": "30s"},
    )
    return Pair(shape, place, start_seconds=START_SECONDS, least=CHUNK)


def prompts(count: int = 8) -> list[list[int]]:
    """No two alike from the first token on; lengths that are no whole number of pages."""
    return [document(number, 290 + 17 * number) for number in range(count)]


def ask(url: str, prompt: list[int], *, stream: bool = False, tokens: int = 16, **more: Any) -> str:
    """The text of a greedy completion."""
    body = {
        "model": "tiny", "prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True,
        "stream": stream, **more,
    }  # fmt: skip
    with httpx.Client(timeout=ANSWER_SECONDS) as client:
        answer = client.post(f"{url}/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    if not stream:
        return str(answer.json()["choices"][0]["text"])
    lines = [line.removeprefix("data: ") for line in answer.text.splitlines() if line.startswith("data: ")]
    assert lines[-1] == "[DONE]"
    return "".join(json.loads(line)["choices"][0]["text"] for line in lines[:-1])


def ask_all(url: str, wanted: list[list[int]], **more: Any) -> list[str]:
    """All at once."""
    with ThreadPoolExecutor(len(wanted)) as crew:
        return list(crew.map(lambda prompt: ask(url, prompt, **more), wanted))


def loaded(nodes: Pair) -> float:
    """Tokens that the decode engine took out of its RAM tier."""
    return nodes.decode.metric("lmkv_hit_tokens_total", by="tier").get("ram", 0.0)


def moved(nodes: Pair) -> Mapping[str, float]:
    """Bytes that the prefill node has pushed, by transport."""
    return nodes.prefill.metric("lmkv_peer_bytes_total", by="transport")


def until(true: Callable[[], Any], seconds: float = 60.0) -> None:
    """Wait for it."""
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, "it does not come true"
        time.sleep(0.02)


def kill_service(place: Path, node: str) -> None:
    """SIGKILL for the service of a node."""
    (path,) = (place / node / "lmkv").glob("*.sock")
    with socket.socket(socket.AF_UNIX) as probe:
        probe.connect(str(path))
        pid = int(struct.unpack("3i", probe.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))[0])
    os.kill(pid, signal.SIGKILL)
