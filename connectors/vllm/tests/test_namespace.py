"""Whatever the bytes of a page depend on sets namespaces apart."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from lmkv.errors import ConfigError
from lmkv.layout import PageLayout, PageRun
from lmkv_vllm.geometry import layout_tags, namespace_extra, namespace_of
from lmkv_vllm.metadata import Handshake

LAYERS = ["layer.0", "layer.1"]


def layer(name: str = "CPU_ATTN", isa: str | None = "avx512") -> Any:
    return SimpleNamespace(attn_backend=SimpleNamespace(get_name=lambda: name), isa=isa)


def engine(**changes: Any) -> bytes:
    """The identity of the namespace of an engine that differs so."""
    values: dict[str, Any] = {
        "vllm": "0.32", "cache_dtype": "auto", "tp": 1, "pp": 1, "isa": "avx512", "attention": "CPU_ATTN",
        "model": ("name", "revision", {"weights": "w"}), "order": "LBHNC", "dtype": "bfloat16", "page": 64,
        "chunk": 8, "epoch": "", **changes,
    }  # fmt: skip
    layers = {name: layer(values["attention"], values["isa"]) for name in LAYERS}
    config = SimpleNamespace(
        parallel_config=SimpleNamespace(tensor_parallel_size=values["tp"], pipeline_parallel_size=values["pp"]),
        cache_config=SimpleNamespace(cache_dtype=values["cache_dtype"]),
        compilation_config=SimpleNamespace(static_forward_context=layers),
    )
    module = ModuleType("vllm")
    module.__version__ = values["vllm"]  # type: ignore[attr-defined]
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "vllm", module)
        name, revision, extra = values["model"]
        model = (name, revision, namespace_extra(config, extra))
    tags = tuple(sorted(layout_tags(config, LAYERS).items()))
    layout = PageLayout(f"vllm-{values['order']}", values["dtype"], 4, (PageRun(0, 0, 64, values["page"]),), tags)
    handshakes = [Handshake(layout.describe(), layout.page_bytes)] * (values["tp"] * values["pp"])
    return namespace_of(model, handshakes, values["chunk"], values["epoch"]).id


@pytest.mark.parametrize(
    "change",
    [
        {"vllm": "0.33"},
        {"cache_dtype": "fp8"},
        {"tp": 2},
        {"pp": 2},
        {"isa": "amx"},
        {"attention": "OTHER"},
        {"model": ("other", "revision", {"weights": "w"})},
        {"model": ("name", "other", {"weights": "w"})},
        {"model": ("name", "revision", {"weights": "other"})},
        {"order": "LBNHC"},
        {"dtype": "float16"},
        {"page": 32},
        {"chunk": 16},
        {"epoch": "1"},
    ],
)
def test_another_namespace(change: dict[str, Any]) -> None:
    assert engine(**change) != engine()
    assert engine(**change) == engine(**change)


def test_how_ranks_split_pages_matters_beyond_their_number() -> None:
    """Two ranks side by side, or one behind the other: the same number of shards, other bytes in them."""
    assert engine(tp=2) != engine(pp=2)


def test_cpu_attention_that_does_not_say_how_it_packs() -> None:
    with pytest.raises(ConfigError, match="instruction set"):
        engine(isa=None)
    assert engine(isa=None, attention="FLASH_ATTN") != engine()
