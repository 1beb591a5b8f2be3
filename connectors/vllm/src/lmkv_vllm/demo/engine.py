"""How the demos start vLLM."""

from __future__ import annotations

import os
from typing import Final

_ROOM_FOR_QUESTION: Final = 1024
"""Tokens: chat template, question and answer."""
STOP_SECONDS: Final = 20
START_SECONDS: Final = 600.0
"""A first start on a slow machine compiles and loads for minutes."""


def arguments(tokens: int, dtype: str | None, *, gpu_share: float) -> list[str]:
    """Of a server without prefix cache of its own, for documents of so many tokens."""
    gpu = has_gpu()
    given = ["--no-enable-prefix-caching", "--enforce-eager", "--max-model-len", str(tokens + _ROOM_FOR_QUESTION)]
    # The default, 0, means that vLLM kills all its descendants at once.
    given += ["--shutdown-timeout", str(STOP_SECONDS)]
    # float32 on a CPU: many compute it faster than bfloat16, and answers stay equal to the last token although a prompt
    # that is partly cached is computed in other steps than a whole one.
    given += ["--dtype", dtype or ("auto" if gpu else "float32")]
    return [*given, *(["--gpu-memory-utilization", str(gpu_share)] if gpu else ["--block-size", "32"])]


def environment() -> dict[str, str]:
    """Of such a server."""
    if has_gpu():
        return {}
    return {"VLLM_CPU_KVCACHE_SPACE": os.environ.get("VLLM_CPU_KVCACHE_SPACE", "1")}


def halves() -> tuple[dict[str, str], dict[str, str]]:
    """The environments of two servers that share this machine; each has the same share to itself where it can."""
    cpus = sorted(os.sched_getaffinity(0))
    each = max(1, len(cpus) // 2)
    if has_gpu():
        return environment(), environment()
    first, second = (",".join(map(str, half)) for half in (cpus[:each], cpus[-each:]))
    name = "VLLM_CPU_OMP_THREADS_BIND"
    return {**environment(), name: first}, {**environment(), name: second}


def has_gpu() -> bool:
    """Whether vLLM will compute on one."""
    import torch  # noqa: PLC0415 - seconds to import; `--help` needs none of it

    return torch.cuda.is_available()
