"""The KV that SmolLM2 makes of a text, as the payloads of frames."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch

from lmkv.specs import Payload
from lmkv.types import ChunkKey
from lmkv_vllm.demo.models import model_folder

if TYPE_CHECKING:
    from numpy.typing import NDArray

ROOT: Final = Path(__file__).resolve().parents[2]
CHUNK_TOKENS: Final = 256
PAGE_TOKENS: Final = 16


def text() -> str:
    """English prose with some code: pages of this repository's documentation."""
    pages = ("explanation/architecture.md", "how-to/write-a-backend.md", "how-to/vllm.md", "tutorials/library.md")
    return "\n".join((ROOT / "docs" / page).read_text(encoding="utf-8") for page in pages)


def load(dtype: torch.dtype) -> tuple[Any, Any]:
    """Tokenizer and model; the weights are bfloat16, computed with in `dtype`."""
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    folder = model_folder("smollm2")
    return AutoTokenizer.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()


def bits(cache: Any) -> NDArray[np.uint16]:
    """The bfloat16 of a cache of transformers, as bits: layers, K and V, heads, tokens, channels."""
    layers = [torch.stack([layer.keys[0], layer.values[0]]) for layer in cache.layers]
    return torch.stack(layers).to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16)


def chunk(kv: NDArray[np.uint16], first: int) -> NDArray[np.uint16]:
    """The payload of the chunk from token `first` on: for each layer its tokens, heads, K and V, as vLLM's LBNHC."""
    return np.ascontiguousarray(kv[:, :, :, first : first + CHUNK_TOKENS].transpose(0, 3, 2, 1, 4))


def about(payload: NDArray[np.uint16]) -> Payload:
    """What a codec is told of such a payload."""
    layers, tokens, heads, _, channels = payload.shape
    return Payload(
        key=ChunkKey(bytes(16), 0, bytes(32)),
        raw_bytes=payload.nbytes,
        dtype="bfloat16",
        pages=tokens // PAGE_TOKENS,
        page_tokens=PAGE_TOKENS,
        runs=(PAGE_TOKENS * heads * 2 * channels * 2,) * layers,
    )


def real_chunks(count: int) -> list[NDArray[np.uint16]]:
    """Payloads of chunks as the model really makes them in bfloat16. Computed once, then kept in `build/`."""
    kept = ROOT / "build" / f"smollm2-kv-{count}.npy"
    if not kept.exists():
        tokenizer, model = load(torch.bfloat16)
        ids = tokenizer(text(), return_tensors="pt").input_ids[:, : count * CHUNK_TOKENS]
        with torch.no_grad():
            kv = bits(model(ids, use_cache=True, logits_to_keep=1).past_key_values)
        kept.parent.mkdir(exist_ok=True)
        np.save(kept, np.stack([chunk(kv, i * CHUNK_TOKENS) for i in range(count)]))
    return list(np.load(kept))
