"""Codecs below a real vLLM: its KV comes back from coded frames, after a restart that leaves nothing in RAM."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import redis
from redis_rig import RedisServer
from vllm_rig import BLOCK, CHUNK, Vllm, counted, questions, services_gone, stack

from lmkv.frame import parse_trailer, verify
from lmkv.specs import BackendContext
from lmkv.testing import make_memory
from lmkv_backend_disk.backend import create
from lmkv_backend_disk.options import DiskOptions

if TYPE_CHECKING:
    from collections.abc import Iterator

    from lmkv.frame import Trailer

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

SOME = questions(2)
PROMPT = 317
CHUNKS = PROMPT // CHUNK * CHUNK
"""Tokens of a question's whole chunks."""
WHOLE = PROMPT // BLOCK * BLOCK
"""And of its whole pages."""
TOKEN = 4 * 2 * 2 * 64 * 2
"""Bytes of its KV in bfloat16: 4 layers, K and V, 2 heads of 64."""


@pytest.fixture
def place() -> Iterator[Path]:
    """A short path: unix sockets take no long ones."""
    folder = Path(tempfile.mkdtemp(prefix="lmkv-c-"))
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


def disk(place: Path, codec: Any) -> dict[str, Any]:
    options = {"path": str(place / "disk")}
    return {"name": "coded", "backend": "disk", "capacity": "64MiB", "codec": codec, "options": options}


def sealed(place: Path) -> list[Any]:
    """Planes, then encryption with a key from a file."""
    key = place / "key"
    if not key.exists():
        key.write_text(os.urandom(32).hex())
        key.chmod(0o600)
    return ["bf16-planes", {"aes-gcm": {"keys": {"k": {"file": str(key)}}}}]


def on_disk(place: Path) -> list[Trailer]:
    """The trailers of all frames there. Every frame is intact."""
    backend = create(DiskOptions(path=place / "disk"), BackendContext(tier="coded"))
    found = []
    try:
        for frame in backend.scan():
            memory = make_memory(frame.nbytes)
            [outcome] = backend.get([frame.key], [memory])
            assert outcome.ok
            found.append(verify(memory.view, frame.key))
    finally:
        backend.close()
    return found


def in_redis(server: RedisServer) -> list[Trailer]:
    """The same: of hashes with the parts of a frame each."""
    found = []
    with redis.Redis(unix_socket_path=server.unix) as client:
        for name in client.scan_iter("lmkv:f:*"):
            parts = client.hgetall(name)
            frame = b"".join(parts[b"%d" % number] for number in range(len(parts) - 1))
            key = parse_trailer(frame).key
            assert name == f"lmkv:f:{{{key}}}".encode()
            found.append(verify(memoryview(frame), key))
    return found


def from_tier(health: dict[str, Any]) -> float:
    return counted(health, "lmkv_hit_tokens_total", tier="coded")


def one_by_one(engine: Vllm) -> tuple[dict[str, list[int]], dict[str, int]]:
    """Answers and tokens not computed. What the engine computes at once is the same each time: bfloat16 shows it."""
    asked = [engine.ask({name: prompt}) for name, prompt in SOME.items()]
    answers = {name: answer for one in asked for name, answer in one.answers.items()}
    return answers, {name: tokens for one in asked for name, tokens in one.cached.items()}


def test_what_planes_and_encryption_give_back_answers_as_without_lmkv(place: Path) -> None:
    """The same greedy text as an engine without lmkv, cold and from coded frames."""
    with Vllm(place / "plain", None) as engine:
        right = engine.ask(SOME).answers
    config = stack(disk(place, sealed(place)))
    with Vllm(place / "1", config) as engine:
        cold = engine.ask(SOME)
        assert cold.answers == right
        assert set(cold.cached.values()) == {0}
        stored = engine.quiet()
        assert counted(stored, "lmkv_tier_operations_total", tier="coded", op="put", outcome="ok") > 0
    services_gone(place / "1")
    frames = on_disk(place)
    assert {trailer.codec for trailer in frames} == {"bf16-planes+aes-gcm"}
    with Vllm(place / "2", config) as engine:
        warm = engine.ask(SOME)
        assert warm.answers == right
        assert set(warm.cached.values()) == {WHOLE}
        health = engine.quiet()
        assert from_tier(health) >= CHUNKS * len(SOME) // 2
        assert from_tier(health) + counted(health, "lmkv_hit_tokens_total", tier="ram") == sum(warm.cached.values())
        assert counted(health, "lmkv_tier_operations_total", tier="coded", op="get", outcome="ok") > 0
        assert not counted(health, "lmkv_corrupt_frames_total")
        assert "Traceback" not in engine.log
    services_gone(place / "2")


def test_bfloat16_comes_back_bit_by_bit(place: Path) -> None:
    """The type that the planes are made for: frames from the disk give the answers that frames from RAM give."""
    config = stack(disk(place, sealed(place)))
    with Vllm(place / "1", config, dtype="bfloat16") as engine:
        _, cached = one_by_one(engine)
        engine.quiet()
        ram, again = one_by_one(engine)
        assert sum(again.values()) > sum(cached.values())
        assert set(again.values()) == {WHOLE}
    services_gone(place / "1")
    frames = on_disk(place)
    assert {trailer.codec for trailer in frames} == {"bf16-planes+aes-gcm"}
    chunks = [trailer for trailer in frames if trailer.raw_bytes == CHUNK * TOKEN]
    assert chunks
    assert all(trailer.payload_bytes < 0.8 * trailer.raw_bytes for trailer in chunks), "they are smaller"
    with Vllm(place / "2", config, dtype="bfloat16") as engine:
        coded, cached = one_by_one(engine)
        assert coded == ram
        assert set(cached.values()) == {WHOLE}
        assert from_tier(engine.quiet()) >= CHUNKS * len(SOME) // 2
    services_gone(place / "2")


def test_fp8_is_loaded_and_counted(place: Path) -> None:
    """Lossy: the text may differ, what is loaded counts as any other hit, and takes half the room in Redis."""
    with RedisServer(place / "redis") as server:
        tier = {"name": "coded", "backend": "redis", "deadline": "5s", "codec": "fp8", "options": {"url": server.url}}
        with Vllm(place / "1", stack(tier), dtype="bfloat16") as engine:
            first = engine.ask(SOME)
            assert set(first.cached.values()) == {0}
            engine.quiet()
        services_gone(place / "1")
        frames = in_redis(server)
        assert {trailer.codec for trailer in frames} == {"fp8"}
        chunks = [trailer for trailer in frames if trailer.raw_bytes == CHUNK * TOKEN]
        assert chunks
        assert all(trailer.payload_bytes < 0.6 * trailer.raw_bytes for trailer in chunks)
        with Vllm(place / "2", stack(tier), dtype="bfloat16") as engine:
            loaded = engine.ask(SOME)
            assert min(loaded.cached.values()) >= CHUNKS
            assert all(len(answer) == len(first.answers[name]) for name, answer in loaded.answers.items())
            health = engine.quiet()
            assert from_tier(health) >= CHUNKS * len(SOME) // 2
            assert from_tier(health) + counted(health, "lmkv_hit_tokens_total", tier="ram") == sum(
                loaded.cached.values()
            )
            assert not counted(health, "lmkv_load_failures_total")
            assert "Traceback" not in engine.log
        services_gone(place / "2")


def test_fp8_is_refused_for_float32(place: Path) -> None:
    """At the start, by the tier's name and what to do."""
    engine = Vllm(place / "1", stack(disk(place, "fp8")))
    with pytest.raises(AssertionError, match="vLLM ended"), engine:
        pass
    assert "fp8" in engine.log
    assert "'coded'" in engine.log
