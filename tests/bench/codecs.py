"""Codecs on the KV that SmolLM2 really makes: how much smaller, how fast on one core.

Speeds are of the processor time of the one thread that works, in raw bytes: other work on the machine does not count.
"""

from __future__ import annotations

import os
import statistics
import time
from typing import TYPE_CHECKING

import numpy as np
from tests.bench import kv
from tests.bench.harness import Row

from lmkv.codec.chain import chained
from lmkv.codec.options import AesGcmOptions
from lmkv.plugins import PluginHost

if TYPE_CHECKING:
    from collections.abc import Callable

    from lmkv.specs import Codec

CHUNKS = 4
ROUNDS = 9
TARGETS = {"bf16-planes": (1.35, 0.6, 1.5)}
"""Ratio, GB/s in, GB/s out."""
NAMES = ("bf16-planes", "zstd", "zlib", "fp8", "aes-gcm", "bf16-planes+aes-gcm", "fp8+zstd")


def codecs() -> list[Row]:
    """Three rows for each codec."""
    host, payloads = PluginHost.discover(), kv.real_chunks(CHUNKS)
    options = {"aes-gcm": AesGcmOptions(keys={"k": os.urandom(32).hex()})}  # type: ignore[arg-type]  a text is read
    rows = []
    for name in NAMES:
        codec = chained([host.load_codec(part, options.get(part)) for part in name.split("+")])
        rounds = 2 if name == "zlib" else ROUNDS
        ratio, fast_in, fast_out = measure(codec, payloads, rounds)
        wanted = TARGETS.get(name, (None, None, None))
        rows += [
            _row(f"{name}: ratio on SmolLM2's KV", "x", ratio, wanted[0]),
            _row(f"{name}: in, one core", "GB/s", fast_in, wanted[1]),
            _row(f"{name}: out, one core", "GB/s", fast_out, wanted[2]),
        ]
    return rows


def measure(codec: Codec, payloads: list[np.ndarray], rounds: int) -> tuple[float, float, float]:  # type: ignore[type-arg]
    """Ratio, and raw GB per second of processor time in and out: of the median round over all payloads."""
    raw = [memoryview(payload.reshape(-1).view(np.uint8)) for payload in payloads]
    abouts = [kv.about(payload) for payload in payloads]
    encoded = [memoryview(b"".join(codec.encode(each, about))) for each, about in zip(raw, abouts, strict=True)]
    into = [np.empty(len(each), np.uint8).data for each in raw]

    def encode() -> None:
        for each, about in zip(raw, abouts, strict=True):
            codec.encode(each, about)

    def decode() -> None:
        for each, target, about in zip(encoded, into, abouts, strict=True):
            codec.decode(each, target, about)

    nbytes = sum(map(len, raw))
    times = encode_times, decode_times = [], []  # type: tuple[list[float], list[float]]
    for _ in range(rounds + 1):
        for work, kept in zip((encode, decode), times, strict=True):
            kept.append(_processor_seconds(work))
    if codec.lossless and any(a != b for a, b in zip(raw, into, strict=True)):
        raise AssertionError(f"{codec.name} did not give back what it got")
    fast_in, fast_out = (nbytes / 1e9 / statistics.median(each[1:]) for each in (encode_times, decode_times))
    return nbytes / sum(map(len, encoded)), fast_in, fast_out


def _processor_seconds(work: Callable[[], None]) -> float:
    begin = time.thread_time()
    work()
    return time.thread_time() - begin


def _row(work: str, unit: str, ours: float, at_least: float | None) -> Row:
    holds = at_least is None or ours >= at_least
    return Row(work, unit, ours, None, None, "" if at_least is None else f">= {at_least:g} {unit}", holds)
