"""What the engine's pages are: `PageLayout` from vLLM's `KVCacheConfig`, and what cannot be cached.

Nothing is inferred from a tensor's shape. The page of layer l in block b starts at `offset + l * layer_stride +
b * block_stride` of the one buffer behind all layers (`KVCacheTensor`), and is opaque: K and V, heads and scales stay
as the attention kernel packs them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from lmkv.errors import ConfigError
from lmkv.keys import Namespace
from lmkv.layout import PageLayout, PageRun

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from lmkv.layout import LayoutDescription
    from lmkv_vllm.metadata import Handshake

FULL: Final = ("full_attention", "mla_attention")
"""Kinds of attention whose blocks all stay valid while a request runs."""


@dataclass(frozen=True, slots=True)
class Geometry:
    """The one group of layers that is cached."""

    page_tokens: int
    blocks: int
    volatile_tail: bool
    """A draft model shares the group: the last page may be written again while a request decodes."""


def check_chunk(chunk_tokens: int, page_tokens: int) -> None:
    """Raises `ConfigError` with the numbers when a chunk is no whole number of pages."""
    if chunk_tokens % page_tokens == 0:
        return
    larger = -(-chunk_tokens // page_tokens) * page_tokens
    raise ConfigError(
        f"lmkv's chunks of {chunk_tokens} tokens are no whole number of vLLM's blocks of {page_tokens} tokens: "
        f"set chunk_tokens to a multiple of {page_tokens} (such as {larger}) in the stack file, "
        f"or start vLLM with a --block-size that divides {chunk_tokens}"
    )


def read_geometry(vllm_config: Any, kv_cache_config: Any) -> Geometry:
    """What both sides can know of the pages. Raises `ConfigError` with every reason why they cannot be cached."""
    faults = _parallel_faults(vllm_config)
    if getattr(vllm_config.model_config, "is_encoder_decoder", False):
        faults.append("encoder-decoder models are not supported: cross-attention KV has no token prefix")
    groups = kv_cache_config.kv_cache_groups
    if not groups:
        faults.append("the model has no KV cache: start vLLM without --kv-transfer-config")
    elif len(groups) > 1:
        sizes = ", ".join(str(_block_size(group) or "no") for group in groups)
        faults.append(
            f"{len(groups)} KV cache groups (blocks of {sizes} tokens) remain, lmkv caches one: start vLLM with "
            "--disable-hybrid-kv-cache-manager; hybrid models that need more than one group are not supported yet"
        )
    else:
        faults += _group_faults(groups[0])
    if faults:
        listed = "\n  ".join(faults)
        raise ConfigError(f"LMKVConnector cannot cache this engine's KV:\n  {listed}", faults=tuple(faults))
    group = groups[0]
    return Geometry(_block_size(group), kv_cache_config.num_blocks, bool(getattr(group, "is_eagle_group", False)))


def _parallel_faults(vllm_config: Any) -> list[str]:
    parallel = vllm_config.parallel_config
    decode = getattr(parallel, "decode_context_parallel_size", 1)
    prefill = getattr(parallel, "prefill_context_parallel_size", 1)
    return [
        f"{kind} context parallelism of {size} is not supported: its ranks split each block's tokens; set it to 1"
        for kind, size in (("decode", decode), ("prefill", prefill))
        if size > 1
    ]


def _layer_specs(group: Any) -> list[Any]:
    inner = getattr(group.kv_cache_spec, "kv_cache_specs", None)
    return list(inner.values()) if inner else [group.kv_cache_spec]


def _block_size(group: Any) -> int:
    return int(getattr(group.kv_cache_spec, "block_size", None) or 0)


def _group_faults(group: Any) -> list[str]:
    from vllm.v1.kv_cache_interface import get_kv_cache_spec_kind  # noqa: PLC0415  vLLM is there when this runs

    faults = []
    kinds = sorted({str(get_kv_cache_spec_kind(spec).value) for spec in _layer_specs(group)})
    if not set(kinds) <= set(FULL):
        faults.append(
            f"layers of kind {', '.join(kinds)}: only full attention (also MLA) can be cached, since other layers "
            "give up or overwrite blocks while a request runs"
        )
    if any(getattr(spec, "non_causal", False) for spec in _layer_specs(group)):
        faults.append("non-causal attention: the KV of a prefix depends on what follows it")
    if getattr(group, "host_resident", False) or not getattr(group, "enable_kv_transfer", True):
        faults.append("the KV cache group is not the engine's own state (host resident, or not transferable)")
    return faults


def read_layout(kv_cache_config: Any, tags: Mapping[str, str]) -> PageLayout:
    """The page layout of this worker. Raises `ConfigError` when a page is not made of whole runs."""
    from vllm.v1.kv_cache_layout import KVCacheLayout  # noqa: PLC0415  vLLM is there when this runs

    name = kv_cache_config.kv_cache_layout
    if name is None:
        raise ConfigError("LMKVConnector: vLLM declares no KV cache layout; lmkv does not guess one")
    order = KVCacheLayout[name]
    group = kv_cache_config.kv_cache_groups[0]
    specs = _specs_by_layer(group)
    tensors = [t for t in kv_cache_config.kv_cache_tensors if not getattr(t, "host_resident", False)]
    if order.is_block_outermost:
        runs = _whole_blocks(tensors, kv_cache_config.num_blocks)
    elif order.is_block_compact:
        runs = [run for tensor in tensors for run in _layer_runs(tensor, specs)]
    else:
        raise ConfigError(
            f"LMKVConnector: with the KV cache layout {name} a block is not one run of bytes per layer; "
            "choose LBHNC, LBNHC, BLHNC or BLNHC with VLLM_KV_CACHE_LAYOUT, or another attention backend"
        )
    dtypes = sorted({str(spec.dtype).removeprefix("torch.") for spec in specs.values()})
    return PageLayout(
        name=f"vllm-{name}",
        dtype="+".join(dtypes),
        page_tokens=int(group.kv_cache_spec.block_size),
        runs=tuple(runs),
        tags=tuple(sorted(tags.items())),
    )


def _specs_by_layer(group: Any) -> dict[str, Any]:
    inner = getattr(group.kv_cache_spec, "kv_cache_specs", None)
    return dict(inner) if inner else dict.fromkeys(group.layer_names, group.kv_cache_spec)


def _layer_runs(tensor: Any, specs: Mapping[str, Any]) -> list[PageRun]:
    """One run for each layer. Padding after a page is left out: it is garbage."""
    runs = []
    for number, layer in enumerate(tensor.layers):
        spec = specs[layer]
        length = int(getattr(spec, "unpadded_page_size_bytes", spec.page_size_bytes))
        runs.append(PageRun(0, int(tensor.offset + number * tensor.layer_stride), int(tensor.block_stride), length))
    return runs


def _whole_blocks(tensors: list[Any], blocks: int) -> list[PageRun]:
    """One run of all layers: the block is outermost."""
    strides, sizes = {t.block_stride for t in tensors}, {t.size for t in tensors}
    if len(strides) != 1 or len(sizes) != 1 or blocks * min(strides) > min(sizes):
        raise ConfigError(
            f"LMKVConnector: blocks of {sorted(strides)} bytes in buffers of {sorted(sizes)} do not fit {blocks} blocks"
        )
    stride = int(strides.pop())
    return [PageRun(0, 0, stride, stride)]


def layout_tags(vllm_config: Any, layer_names: list[str]) -> dict[str, str]:
    """What else the bytes of a page depend on, known to the worker: attention kernels, and the CPU's packing of K."""
    context = getattr(vllm_config.compilation_config, "static_forward_context", {}) or {}
    layers = [context[name] for name in layer_names if name in context]
    backends = sorted({layer.attn_backend.get_name() for layer in layers if hasattr(layer, "attn_backend")})
    tags = {"attention": "+".join(backends) or "unknown"}
    if isas := sorted({str(layer.isa) for layer in layers if getattr(layer, "isa", None)}):
        tags["isa"] = "+".join(isas)
    elif any("CPU" in name for name in backends):
        raise ConfigError("LMKVConnector: vLLM's CPU attention does not say which instruction set packs its keys")
    return tags


def namespace_extra(vllm_config: Any, model: Mapping[str, str]) -> dict[str, str]:
    """The `extra` of the namespace: the model's, and how its KV is split over ranks."""
    import vllm  # noqa: PLC0415  vLLM is there when this runs

    parallel, cache = vllm_config.parallel_config, vllm_config.cache_config
    return {
        **model,
        "engine": f"vllm {vllm.__version__}",
        "cache_dtype": str(cache.cache_dtype),
        "tp": str(parallel.tensor_parallel_size),
        "pp": str(parallel.pipeline_parallel_size),
    }


def namespace_of(
    model: tuple[str, str, Mapping[str, str]], handshakes: Sequence[Handshake], chunk_tokens: int, epoch: str
) -> Namespace:
    """The namespace of an engine with these workers.

    Args:
        model: name, revision, and what else the bytes depend on (`namespace_extra`).
        handshakes: of all workers, by rank.
        chunk_tokens: the service's.
        epoch: sets what was computed after a reset apart from what was before; empty: there was none.
    """
    name, revision, extra = model
    return Namespace(
        model=name,
        revision=revision,
        kv_dtype=str(handshakes[0].layout["dtype"]),
        layouts=tuple(h.layout for h in handshakes),
        page_bytes=tuple(h.page_bytes for h in handshakes),
        chunk_tokens=chunk_tokens,
        page_tokens=handshakes[0].layout["page_tokens"],
        extra={**extra, **({"epoch": epoch} if epoch else {})},
    )


def same_pages(layouts: list[LayoutDescription]) -> int:
    """The page size in tokens that all shards share; raises `ConfigError` when they differ."""
    sizes = sorted({layout["page_tokens"] for layout in layouts})
    if len(sizes) != 1:
        raise ConfigError(f"LMKVConnector: the ranks' blocks differ: {sizes} tokens")
    return sizes[0]
