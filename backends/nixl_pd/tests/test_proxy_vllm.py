"""Before a real vLLM without lmkv: what the proxy asks of it is understood, and its answers are passed on."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import httpx
import pytest

if TYPE_CHECKING:
    from pathlib import Path

    from front_rig import Site

TEXT = "word " * 60
CHAT = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": TEXT}]
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}
ONE = {"temperature": 0.5, "top_k": 1}
"""As greedy, but several answers are allowed."""
REQUESTS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("/v1/completions", {"prompt": TEXT}),
    (
        "/v1/completions",
        {"prompt": list(range(10, 150)), "n": 2, **ONE, "logprobs": 2, "min_tokens": 3, "stop": ["zzz"]},
    ),
    ("/v1/completions", {"prompt": TEXT, "stream": True, "stream_options": {"include_usage": True}}),
    ("/v1/chat/completions", {"messages": CHAT}),
    ("/v1/chat/completions", {"messages": CHAT, "max_completion_tokens": 5, "logprobs": True, "top_logprobs": 2}),
    (
        "/v1/chat/completions",
        {"messages": CHAT, "stream": True, "stream_options": {"include_usage": True}, "n": 2, **ONE},
    ),
    ("/v1/chat/completions", {"messages": CHAT, "response_format": {"type": "json_object"}, "min_tokens": 2}),
    ("/v1/chat/completions", {"messages": CHAT, "tools": [TOOL], "tool_choice": "none", "seed": 7}),
)
PASSING = {"id", "created", "request_id", "service_tier"}


def lasting(content: bytes) -> list[Any]:
    """What is the same in two answers to one greedy request."""

    def strip(value: Any) -> Any:
        if isinstance(value, dict):
            return {name: strip(inner) for name, inner in value.items() if name not in PASSING and inner is not None}
        return [strip(inner) for inner in value] if isinstance(value, list) else value

    events = [content] if content.startswith(b"{") else content.split(b"\n\n")
    found = [json.loads(event.removeprefix(b"data: ")) for event in events if b"{" in event]
    return sorted(json.dumps(strip(event), sort_keys=True) for event in found)


@pytest.mark.slow
@pytest.mark.vllm
def test_real_engine_understands_what_it_is_asked(site: Site, tmp_path: Path) -> None:
    pytest.importorskip("vllm")
    from lmkv_vllm.demo.models import model_folder
    from lmkv_vllm.demo.server import Server

    arguments = ["--max-model-len", "1024", "--max-num-seqs", "16", "--dtype", "float32", "--no-enable-prefix-caching"]
    arguments += ["--served-model-name", "tiny"]
    environment = {"VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    folder = str(model_folder("tiny"))
    with Server(folder, arguments, log=tmp_path / "log", environment=environment) as server:
        server.wait_until_ready(300)
        url = f"http://127.0.0.1:{server._port}"
        proxy = site.proxy(prefill=(url,), decode=((url, "node:1"),), min_prefill_tokens=32, health_interval="5s")
        for number, (path, fields) in enumerate(REQUESTS, 1):
            body = {"model": "tiny", "temperature": 0, "max_tokens": 8, **fields}
            direct = httpx.post(url + path, json=body, timeout=120)
            assert direct.status_code == 200, (fields, direct.text)
            through = proxy.post(path, **body)
            assert lasting(through.content) == lasting(direct.content), fields
            assert proxy.count("lmkv_proxy_prefill_seconds_count") == number, ("the prefill was refused", fields)
        assert {admit.model for _, admit in site.node.admitted} == {folder}
        usages = [json.loads(httpx.post(f"{url}/tokenize", json={"prompt": TEXT}).content)["count"]]
        assert site.node.admitted[0][1].tokens == usages[0]
        wrong = proxy.post(prompt=TEXT, max_tokens=-1)
        assert wrong.status_code == 400
        assert wrong.json()["error"]["code"] == 400, "the engine's own words"
