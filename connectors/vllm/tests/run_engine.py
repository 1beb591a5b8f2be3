"""Run one scenario with a real vLLM, write what happened as JSON: `run_engine.py SCENARIO ARGUMENTS.json RESULT.json`.

A program of its own, so that vLLM's globals and warnings stay out of pytest. The test reads the result.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

BLOCK = 32
CHUNK = 64


def document(number: int, length: int = 300) -> list[int]:
    dice = random.Random(number)
    return [dice.randrange(10, 250) for _ in range(length)]


def questions() -> dict[str, list[int]]:
    """Four documents, two questions each; lengths that are no whole number of pages."""
    return {f"doc{d} q{q}": document(d) + document(100 + q, 17) for d in range(4) for q in range(2)}


def crowd() -> dict[str, list[int]]:
    """Prompts that share two pages, for an engine that has no room for all of them."""
    return {f"crowd{n}": document(7, 64) + document(200 + n, 80) for n in range(8)}


class Engine:
    """A vLLM with the tiny model. `stack` None: without lmkv."""

    def __init__(self, stack: dict[str, Any] | None, **more: Any) -> None:
        from vllm import LLM

        from lmkv_vllm.demo.models import tiny_model

        transfer = {
            "kv_connector": "LMKVConnector",
            "kv_connector_module_path": "lmkv_vllm.connector",
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": {"lmkv.config": stack, "lmkv.lookup_deadline": more.pop("patience", "5s")},
        }
        arguments: dict[str, Any] = {
            "enforce_eager": True,
            "block_size": BLOCK,
            "max_model_len": 1024,
            "max_num_batched_tokens": 256,
            "max_num_seqs": 16,
            "dtype": "float32",
            "enable_prefix_caching": False,
            "disable_log_stats": False,
            **more,
        }
        self.stack = stack
        self.world = arguments.get("tensor_parallel_size", 1)
        self.llm = LLM(str(tiny_model()), kv_transfer_config=transfer if stack is not None else None, **arguments)

    def ask(self, prompts: dict[str, list[int]], max_tokens: int = 24, *, at_once: bool = False, **more: Any) -> Any:
        """Name → answer and how many tokens were not computed."""
        from vllm import SamplingParams

        salt = more.pop("salt", None)
        params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, **more)
        batches = [list(prompts)] if at_once else [[name] for name in prompts]
        out = {}
        for names in batches:
            asked = [{"prompt_token_ids": prompts[n], **({"cache_salt": salt} if salt else {})} for n in names]
            for name, result in zip(names, self.llm.generate(asked, params, use_tqdm=False), strict=True):
                out[name] = {"answer": list(result.outputs[0].token_ids), "cached": result.num_cached_tokens}
                if more.get("prompt_logprobs") is not None:
                    out[name]["logprobs"] = len(result.prompt_logprobs or ())
            self.pause()
        return out

    def pause(self) -> None:
        """Until what was saved is there: the last step's saves are done beside the engine."""
        if self.stack is not None:
            with contextlib.suppress(Exception):
                wait_quiet(self.stack, self.world)

    def metric(self, name: str) -> float:
        return sum(getattr(m, "value", 0) for m in self.llm.get_metrics() if m.name == name)


def service(stack: dict[str, Any], world: int = 1) -> Any:
    """A client of the service that this stack's engines share."""
    from lmkv.service import SocketClient
    from lmkv.service.files import default_socket
    from lmkv_vllm.link import stack_config
    from lmkv_vllm.settings import Settings

    config = stack_config(Settings(config=stack), world)
    assert config is not None
    return SocketClient(default_socket(config.text), "test", prefault=False)


def health(stack: dict[str, Any], world: int = 1) -> dict[str, Any]:
    from lmkv.service.protocol import GetHealth

    client = service(stack, world)
    try:
        report = client.call(GetHealth()).result(10)
        return {"tiers": report.tiers, "holds": report.holds, "counters": report.counters}
    finally:
        client.close()


def total(counters: dict[str, float], name: str) -> float:
    return sum(value for series, value in counters.items() if series.split("{")[0] == name)


def wait_quiet(stack: dict[str, Any], world: int = 1, seconds: float = 5.0) -> None:
    """Until the service's counters have stood still for a moment and nothing is reserved."""
    last, until = None, time.monotonic() + seconds
    while time.monotonic() < until:
        now = health(stack, world)
        state = (total(now["counters"], "lmkv_rank_stored_tokens_total"), now["holds"])
        if state == last and not now["holds"].get("reservations") and not now["holds"].get("holds"):
            return
        last = state
        time.sleep(0.05)


def service_pid(stack: dict[str, Any]) -> int:
    import socket
    import struct

    client = service(stack)
    raw = client.connection()._sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    client.close()
    return int(struct.unpack("3i", raw)[0])


# --- scenarios -------------------------------------------------------------------------------------------------------


def plain(_: dict[str, Any]) -> dict[str, Any]:
    """What the model says without lmkv."""
    engine = Engine(None)
    out = {"questions": engine.ask(questions())}
    first = questions()["doc0 q0"] + out["questions"]["doc0 q0"]["answer"]
    out["turn"] = engine.ask({"turn": [*first, *document(300, 9)]})
    out["crowd"] = engine.ask(crowd(), 60, at_once=True)
    return out


def ram(arguments: dict[str, Any]) -> dict[str, Any]:
    """One process, the engine's own cache off, prompts computed in several steps."""
    stack = arguments["stack"]
    engine = Engine(stack)
    out: dict[str, Any] = {"cold": engine.ask(questions()), "warm": engine.ask(questions())}
    first = questions()["doc0 q0"] + out["cold"]["doc0 q0"]["answer"]
    out["turn"] = engine.ask({"turn": [*first, *document(300, 9)]})
    one = {"doc0 q0": questions()["doc0 q0"]}
    before = health(stack)["counters"]
    out["logprobs"] = engine.ask(one, prompt_logprobs=0)
    after = health(stack)["counters"]
    asked = [total(counters, "lmkv_lookup_tokens_total") for counters in (before, after)]
    out["asked for logprobs"] = asked[1] - asked[0]
    out["salt a"] = [engine.ask(one, salt="a"), engine.ask(one, salt="a"), engine.ask(one, salt="b")]
    out["aborts"] = aborts(engine)
    out["holds"] = health(stack)["holds"]
    out["reset"] = bool(engine.llm.reset_prefix_cache(reset_connector=True))
    out["after reset"] = [engine.ask(one), engine.ask(one)]
    out["counters"] = health(stack)["counters"]
    out["affinity"] = affinities()
    return out


def affinities() -> dict[str, list[int]]:
    """CPUs of the main thread, and of our threads in this process."""
    found = {"main": sorted(os.sched_getaffinity(0))}
    for task in Path("/proc/self/task").iterdir():
        thread = next((t for t in threading.enumerate() if t.native_id == int(task.name)), None)
        if thread is not None and thread.name.startswith(("lmkv-save", "lmkv-load")):
            found[thread.name] = sorted(os.sched_getaffinity(int(task.name)))
    return found


def aborts(engine: Engine) -> dict[str, Any]:  # noqa: C901  one scenario
    """Requests that load, aborted after 0, 1, 2 … steps, some twice, beside others that go on."""
    from vllm import SamplingParams

    core = engine.llm.llm_engine
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    prompts = questions()
    kept: dict[str, list[int]] = {}
    for number in range(16):
        for name, prompt in list(prompts.items())[:3]:
            core.add_request(f"{number} {name}", {"prompt_token_ids": prompt}, params)
        for step in range(number):
            for output in core.step():
                if output.finished:
                    kept[output.request_id] = list(output.outputs[0].token_ids)
            if step % 5 == 4:
                core.abort_request([f"{number} doc0 q1"])
        core.abort_request([f"{number} doc0 q0"])
        if number % 2:
            core.abort_request([f"{number} doc0 q0"])
    while core.has_unfinished_requests():
        for output in core.step():
            if output.finished:
                kept[output.request_id] = list(output.outputs[0].token_ids)
    for _ in range(20):  # loads of aborted requests are reported in steps of their own
        core.step()
        time.sleep(0.005)
    engine.pause()
    return kept


def tight(arguments: dict[str, Any]) -> dict[str, Any]:
    """Far too few blocks: requests preempt each other. The engine's own cache is on."""
    stack = arguments["stack"]
    engine = Engine(stack, enable_prefix_caching=True, num_gpu_blocks_override=arguments["blocks"], max_model_len=512)
    out: dict[str, Any] = {"cold": engine.ask(crowd(), 60, at_once=True), "warm": engine.ask(crowd(), 60, at_once=True)}
    out["preemptions"] = engine.metric("vllm:num_preemptions")
    some = {name: questions()[name] for name in ("doc1 q0", "doc2 q0", "doc3 q0", "doc1 q1")}
    out["questions"] = engine.ask(some)
    out["again"] = engine.ask({"doc1 q1": some["doc1 q1"]})
    health_now = health(stack)
    out["holds"], out["counters"] = health_now["holds"], health_now["counters"]
    return out


def default(arguments: dict[str, Any]) -> dict[str, Any]:
    """Scheduler and worker in processes of their own, RAM and disk; with `kill`, the service dies in the middle."""
    stack = arguments["stack"]
    engine = Engine(stack, enable_prefix_caching=False)
    out: dict[str, Any] = {"first": engine.ask(questions()), "second": engine.ask(questions())}
    out["counters"] = health(stack)["counters"]
    if arguments.get("kill"):
        pid = service_pid(stack)
        threading.Timer(0.15, os.kill, (pid, signal.SIGKILL)).start()
        out["killed"] = engine.ask(questions())
        until = time.monotonic() + 30
        while time.monotonic() < until:
            with contextlib.suppress(Exception):
                if health(stack)["holds"]["sessions"] >= 3:  # this one, the scheduler's, the worker's
                    break
            time.sleep(0.1)
        new = service_pid(stack)
        out["another service"] = new != pid
        out["back"] = [engine.ask(questions()), engine.ask(questions())]
    return out


def two_ranks(arguments: dict[str, Any]) -> dict[str, Any]:
    engine = Engine(arguments["stack"], tensor_parallel_size=2)
    some = {name: prompt for name, prompt in questions().items() if name.startswith(("doc0", "doc1"))}
    out = {"cold": engine.ask(some), "warm": engine.ask(some)}
    engine.ask({"unrelated": document(77, 40)}, 1)  # counts travel with a step
    return {**out, **health(arguments["stack"], 2)}


def rate(arguments: dict[str, Any]) -> dict[str, Any]:
    """Prompts one by one, each of several steps; how long each took, and what the connector makes of it."""
    from vllm import SamplingParams

    engine = Engine(arguments["stack"], async_scheduling=arguments["ahead"])
    params = SamplingParams(temperature=0, max_tokens=1)
    scheduler = engine.llm.llm_engine.engine_core.engine_core.scheduler.connector._scheduler
    out: dict[str, Any] = {"seconds": [], "rates": []}
    for number in range(12):
        prompt: Any = {"prompt_token_ids": document(1000 + number, 1000)}
        begun = time.perf_counter()
        engine.llm.generate([prompt], params, use_tqdm=False)
        out["seconds"].append(time.perf_counter() - begun)
        out["rates"].append(scheduler._rate.tokens_per_second)
        time.sleep(0.05)  # idle time must not count
    engine.ask({f"{n}": document(2000 + n, 900) for n in range(4)}, 40, at_once=True)  # some decode, some begin
    out["rates"].append(scheduler._rate.tokens_per_second)
    return out


def full_disk(arguments: dict[str, Any]) -> dict[str, Any]:
    """Something else fills the disk: requests do not notice."""
    engine = Engine(arguments["stack"])
    ballast = Path(arguments["ballast"])
    with contextlib.suppress(OSError), ballast.open("wb", buffering=0) as file:
        while file.write(bytes(4096)):
            pass
    out = {"cold": engine.ask(questions()), "warm": engine.ask(questions()), **health(arguments["stack"])}
    ballast.unlink()
    return out


def refused(arguments: dict[str, Any]) -> dict[str, Any]:
    """Starts that must fail, and what they say."""
    out = {}
    for name, stack in arguments["stacks"].items():
        try:
            Engine(stack)
        except Exception as error:  # noqa: BLE001  whatever it is: the test reads it
            out[name] = f"{type(error).__name__}: {error}"
        else:
            out[name] = "started"
    return out


def structures(_: dict[str, Any]) -> dict[str, Any]:
    """vLLM's own structures, without an engine: what is accepted, what the pages are, what an import does."""
    before = threading.active_count()
    import torch

    import lmkv_vllm.connector as module
    from lmkv_vllm import plugin

    out: dict[str, Any] = {
        "threads": threading.active_count() - before,
        "cuda": torch.cuda.is_initialized(),
        "hma": issubclass(module.LMKVConnector, module.KVConnectorBase_V1)
        and any(base.__name__ == "SupportsHMA" for base in module.LMKVConnector.__mro__),
    }
    plugin.register()
    plugin.register()
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    out["registered"] = KVConnectorFactory.get_connector_class_by_name("LMKVConnector") is module.LMKVConnector
    out["abstract"] = sorted(module.LMKVConnector.__abstractmethods__)
    out["groups"] = {name: outcome_of(sizes) for name, sizes in GROUPS.items()}
    out["chunks"] = {str(page): chunk_outcome(256, page) for page in (16, 544, 640)}
    out["context parallel"] = outcome_of([16], decode_context_parallel_size=2)
    out["encoder-decoder"] = outcome_of([16], is_encoder_decoder=True)
    out["layouts"] = layouts()
    return out


GROUPS: dict[str, list[int | None]] = {"one": [16], "544": [544], "640, none, 640": [640, None, 640]}


def kv_config(sizes: list[int | None], layout: str = "LBHNC") -> Any:
    """vLLM's KVCacheConfig with one group of three layers for each block size; None: an SSM's group."""
    import torch
    from vllm.v1.kv_cache_interface import (
        FullAttentionSpec,
        KVCacheConfig,
        KVCacheGroupSpec,
        KVCacheTensor,
        MambaSpec,
        SlidingWindowSpec,
    )

    def spec(size: int | None) -> Any:
        if size is None:
            return MambaSpec(block_size=640, shapes=((4, 4),), dtypes=(torch.float32,))
        if size < 0:
            return SlidingWindowSpec(
                block_size=-size, num_kv_heads=2, head_size=64, dtype=torch.bfloat16, sliding_window=64
            )
        return FullAttentionSpec(block_size=size, num_kv_heads=2, head_size=64, dtype=torch.bfloat16)

    groups = [KVCacheGroupSpec([f"{g}.{n}" for n in range(3)], spec(size)) for g, size in enumerate(sizes)]
    blocks, page, layers = 5, groups[0].kv_cache_spec.page_size_bytes, 3
    outer = layout.startswith("B")
    heads = {"LHBNC": page // 2, "BHLNC": page // 2}.get(layout, page)
    tensor = KVCacheTensor(
        size=blocks * layers * page,
        layers=groups[0].layer_names,
        layer_stride=heads if outer else blocks * page,
        block_stride=layers * page if outer else heads,
    )
    return KVCacheConfig(num_blocks=blocks, kv_cache_tensors=[tensor], kv_cache_groups=groups, kv_cache_layout=layout)


def outcome_of(sizes: list[int | None], **parallel: Any) -> str:
    from types import SimpleNamespace

    from lmkv_vllm.geometry import read_geometry

    model = SimpleNamespace(is_encoder_decoder=parallel.pop("is_encoder_decoder", False))
    config = SimpleNamespace(parallel_config=SimpleNamespace(**parallel), model_config=model)
    try:
        return f"pages of {read_geometry(config, kv_config(sizes)).page_tokens}"
    except ValueError as error:
        return str(error)


def chunk_outcome(chunk: int, page: int) -> str:
    from lmkv_vllm.geometry import check_chunk

    try:
        check_chunk(chunk, page)
    except ValueError as error:
        return str(error)
    return "accepted"


def layouts() -> dict[str, Any]:
    """For each layout: the runs, and whether page 3 through them is what vLLM's own views say is block 3."""
    import torch
    from vllm.v1.kv_cache_interface import create_kv_cache_views
    from vllm.v1.kv_cache_layout import KVCacheLayout

    from lmkv_vllm.geometry import read_layout

    out: dict[str, Any] = {}
    for order in KVCacheLayout:
        config = kv_config([32], order.name)
        tensor, spec = config.kv_cache_tensors[0], config.kv_cache_groups[0].kv_cache_spec
        try:
            layout = read_layout(config, {})
        except ValueError as error:
            out[order.name] = str(error)
            continue
        raw = torch.zeros(tensor.size, dtype=torch.int8)
        views = create_kv_cache_views(raw, spec, config.num_blocks, order, tensor)
        for number, view in enumerate(views):
            view[3] = number + 1
        ours = torch.cat([raw[r.offset + 3 * r.stride :][: r.length] for r in layout.runs])
        others = [raw[r.offset + 2 * r.stride :][: r.length].count_nonzero().item() for r in layout.runs]
        whole = int((ours.view(torch.bfloat16) != 0).sum()) == sum(view[3].numel() for view in views)
        out[order.name] = {"runs": len(layout.runs), "bytes": layout.page_bytes, "whole": whole, "others": sum(others)}
    return out


def main() -> None:
    scenario, arguments, result = sys.argv[1:]
    out = globals()[scenario](json.loads(Path(arguments).read_text()))
    Path(result).write_text(json.dumps(out))


if __name__ == "__main__":
    main()
