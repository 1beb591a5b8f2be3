"""What the codecs' tests stand on: every codec with keys of its own, payloads as engines make them."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import numpy as np

from lmkv.codec.chain import chained
from lmkv.codec.options import AesGcmOptions
from lmkv.plugins import PluginHost
from lmkv.specs import Codec, Payload
from lmkv.types import ChunkKey

if TYPE_CHECKING:
    from numpy.typing import NDArray

KEY = ChunkKey(bytes(range(16)), 1, bytes(range(32)))
HOST = PluginHost.discover()
SECRETS = {name: os.urandom(32).hex() for name in ("old", "current")}
OPTIONS = {"aes-gcm": AesGcmOptions(keys=SECRETS, use="current")}  # type: ignore[arg-type]  pydantic reads texts
LOSSLESS = (
    "identity", "zlib", "zstd", "bf16-planes", "aes-gcm",
    "zlib+aes-gcm", "bf16-planes+aes-gcm", "bf16-planes+zstd+aes-gcm",
)  # fmt: skip
PAGES, PAGE_TOKENS, RUNS = 4, 8, (1024, 1024, 512)
"""Of the payloads of `bfloats` and `halves`: runs of 64, 64 and 32 values for each token."""


def codec(name: str) -> Codec:
    return chained([HOST.load_codec(part, OPTIONS.get(part)) for part in name.split("+")])


def about(length: int, **more: Any) -> Payload:
    return Payload(**({"key": KEY, "raw_bytes": length, "context": b"place"} | more))


def geometry(dtype: str) -> dict[str, Any]:
    return {"dtype": dtype, "pages": PAGES, "page_tokens": PAGE_TOKENS, "runs": RUNS}


def encode(codec: Codec, raw: bytes, **more: Any) -> bytes:
    return b"".join(codec.encode(memoryview(raw), about(len(raw), **more)))


def decode(codec: Codec, encoded: bytes, length: int, **more: Any) -> bytes:
    into = bytearray(length)
    codec.decode(memoryview(encoded), memoryview(into), about(length, **more))
    return bytes(into)


def floats(seed: int = 0) -> NDArray[np.float32]:
    """Values of a payload: each channel with a spread of its own, as keys have."""
    dice = np.random.default_rng(seed)
    parts = []
    for run in RUNS:
        columns = run // PAGE_TOKENS // 2
        spread = np.exp2(dice.integers(-6, 7, columns))
        parts.append((dice.standard_normal((PAGES * PAGE_TOKENS, columns)) * spread).ravel())
    return np.concatenate(parts).astype(np.float32)


def bfloats(values: NDArray[np.float32]) -> bytes:
    return (values.view(np.uint32) >> 16).astype("<u2").tobytes()


def widened(raw: bytes) -> NDArray[np.float32]:
    """The float32 of bfloat16."""
    return (np.frombuffer(raw, "<u2").astype(np.uint32) << 16).view(np.float32)


def halves(values: NDArray[np.float32]) -> bytes:
    return values.astype(np.float16).tobytes()
