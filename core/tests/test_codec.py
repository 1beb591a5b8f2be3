from __future__ import annotations

import re
import struct
import threading
import time
import zlib
from pathlib import Path
from types import ModuleType
from typing import Any

import codec_rig
import numpy as np
import pytest
import zstandard
from codec_rig import HOST, KEY, LOSSLESS, about, bfloats, codec, decode, encode, floats
from hypothesis import given, settings
from hypothesis import strategies as st

from lmkv import builtin
from lmkv.codec.chain import chained
from lmkv.errors import FrameError, PluginError
from lmkv.plugins import PluginHost
from lmkv.specs import GROWTH, Codec, Payload

CODECS = {name: codec(name) for name in LOSSLESS}
each_codec = pytest.mark.parametrize("name", LOSSLESS)
patterns = st.one_of(
    st.binary(max_size=5000),
    st.builds(lambda unit, times: unit * times, st.binary(min_size=1, max_size=7), st.integers(0, 3000)),
    st.lists(st.sampled_from([0x7FC0, 0xFFC1, 0x7F80, 0xFF80, 0x7F81, 0, 0x8000, 1, 0x3F80]), max_size=4000).map(
        lambda values: np.array(values, "<u2").tobytes()
    ),
    st.integers(0, 2**32).map(lambda seed: bfloats(floats(seed))),
)
"""Noise, repetition, NaN, infinities and denormals, and what KV looks like."""


def test_the_cores_codecs_are_offered_by_its_hook() -> None:
    specs = {spec.name: spec for spec in builtin.lmkv_codecs()}
    assert list(specs) == ["identity", "zlib", "zstd", "bf16-planes", "fp8", "aes-gcm"]
    for name, spec in specs.items():
        made = codec(name)
        assert (made.name, made.lossless, made.seals) == (name, spec.lossless, spec.seals)


@each_codec
@settings(deadline=None)
@given(raw=patterns)
def test_bits_come_back(name: str, raw: bytes) -> None:
    encoded = encode(CODECS[name], raw)
    assert decode(CODECS[name], encoded, len(raw)) == raw
    assert len(encoded) <= len(raw) + GROWTH


@each_codec
@pytest.mark.parametrize("length", [0, 1, 2, 3, (1 << 19) - 1, 1 << 19, (1 << 19) + 3, (1 << 20) + 2])
@pytest.mark.parametrize("noise", [False, True])
def test_bits_come_back_at_the_borders_of_blocks(name: str, length: int, noise: bool) -> None:
    dice = np.random.default_rng(length)
    raw = dice.integers(0, 256 if noise else 3, length, np.uint8).tobytes()
    encoded = encode(CODECS[name], raw)
    assert decode(CODECS[name], encoded, length) == raw
    assert len(encoded) <= length + GROWTH


@each_codec
def test_noise_gets_no_longer_than_its_header(name: str) -> None:
    raw = np.random.default_rng(1).bytes(3 << 20)
    assert len(encode(CODECS[name], raw)) <= len(raw) + 100 * (1 + name.count("+"))


@each_codec
@settings(deadline=None)
@given(garbage=st.binary(max_size=300), length=st.integers(10, 700))
def test_garbage_is_a_frame_error(name: str, garbage: bytes, length: int) -> None:
    if name == "identity" and len(garbage) == length:
        return
    plain = garbage[:1] == b"\0" and len(garbage) == length + 1 and name in {"zlib", "zstd", "bf16-planes"}
    if plain:
        assert decode(CODECS[name], garbage, length) == garbage[1:]
        return
    with pytest.raises(FrameError):
        decode(CODECS[name], garbage, length)


@each_codec
@settings(deadline=None)
@given(raw=patterns, data=st.data())
def test_every_flip_is_refused_or_gives_the_length(name: str, raw: bytes, data: st.DataObject) -> None:
    """The frame's checksum finds them before; a codec that meets one all the same must not fall over it."""
    encoded = bytearray(encode(CODECS[name], raw))
    if not encoded:
        return
    place = data.draw(st.integers(0, len(encoded) - 1))
    encoded[place] ^= 1 << data.draw(st.integers(0, 7))
    try:
        got = decode(CODECS[name], bytes(encoded), len(raw))
    except FrameError:
        return
    assert not name.endswith("aes-gcm"), "authenticated"
    assert len(got) == len(raw)


@each_codec
@pytest.mark.parametrize("raw", [b"", b"x", bytes(600), bfloats(floats())[:801], np.random.default_rng(2).bytes(300)])
def test_every_cut_is_refused(name: str, raw: bytes) -> None:
    encoded = encode(CODECS[name], raw)
    for length in range(len(encoded)):
        with pytest.raises(FrameError):
            decode(CODECS[name], encoded[:length], len(raw))
    with pytest.raises(FrameError):
        decode(CODECS[name], encoded + b"\0", len(raw))


@each_codec
@pytest.mark.parametrize("difference", [-1, 1, 4096])
def test_another_length_is_refused(name: str, difference: int) -> None:
    encoded = encode(CODECS[name], bytes(5000))
    with pytest.raises(FrameError):
        decode(CODECS[name], encoded, 5000 + difference)


@pytest.mark.parametrize("name", [name for name in CODECS if name.endswith("aes-gcm")])
@pytest.mark.parametrize(
    "other",
    [
        {"key": KEY._replace(namespace=bytes(16))},
        {"key": KEY._replace(shard=2)},
        {"key": KEY._replace(digest=bytes(32))},
        {"context": b"another place"},
    ],
    ids=["namespace", "shard", "digest", "context"],
)
def test_what_is_encrypted_for_one_place_is_refused_in_another(name: str, other: dict[str, Any]) -> None:
    raw = bfloats(floats())
    encoded = encode(CODECS[name], raw)
    assert decode(CODECS[name], encoded, len(raw)) == raw
    with pytest.raises(FrameError, match="not authentic"):
        decode(CODECS[name], encoded, len(raw), **other)


BOMBS = {
    "zlib": zlib.compress(bytes(64 << 20), 9),
    "zstd": zstandard.ZstdCompressor().compress(bytes(256 << 20)),
    "zstd without its size": zstandard.ZstdCompressor(write_content_size=False).compress(bytes(256 << 20)),
    "bf16-planes": b"\1" + struct.pack("<II", 4, 1) + zstandard.ZstdCompressor().compress(bytes(64 << 20))[:4] + b"x",
    "bf16-planes long": b"\1" + struct.pack("<II", 2**32 - 1, 2**32 - 1) + bytes(100),
    "bf16-planes+aes-gcm": struct.pack("<Q", 2**62) + bytes(100),
}


@pytest.mark.parametrize("bomb", BOMBS)
def test_a_bomb_is_not_inflated(bomb: str) -> None:
    tracked = codec(bomb.split(" ", maxsplit=1)[0])
    begin = time.thread_time()
    with pytest.raises(FrameError):
        decode(tracked, BOMBS[bomb], 10)
    assert time.thread_time() - begin < 0.1, "inflating it takes longer"


def test_zstd_frames_are_of_the_level_and_carry_no_checksum() -> None:
    from lmkv.codec.options import ZstdOptions

    raw = Path(codec_rig.__file__).read_bytes() * 3 + Path(__file__).read_bytes()
    frames = [encode(HOST.load_codec("zstd", ZstdOptions(level=level)), raw) for level in (-5, 1, 19)]
    assert len(frames[0]) > len(frames[1]) > len(frames[2])
    parameters = zstandard.get_frame_parameters(frames[1])
    assert (parameters.content_size, parameters.has_checksum) == (len(raw), False)


def test_the_upper_bytes_of_floats_are_what_gets_smaller() -> None:
    raw = bfloats(np.concatenate([floats(seed) for seed in range(30)]))
    assert len(raw) / len(encode(CODECS["bf16-planes"], raw)) > 1.3
    zeros = bytes(1 << 21)
    assert len(encode(CODECS["bf16-planes"], zeros)) < 1000, "both planes are worth it here"


def test_a_chain_is_undone_by_its_name() -> None:
    chain = codec("bf16-planes+aes-gcm")
    assert (chain.name, chain.lossless, chain.seals) == ("bf16-planes+aes-gcm", True, True)
    assert chained([]).name == "identity"
    lossy = codec("fp8+zstd")
    assert (lossy.lossless, lossy.seals) == (False, False)
    assert lossy.refusal("float32")


def test_a_missing_library_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    for name in [name for name in sys.modules if name.startswith(("lmkv.codec", "zstandard", "cryptography"))]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "zstandard", None)
    monkeypatch.setitem(sys.modules, "cryptography.exceptions", None)
    for name in ("zstd", "bf16-planes", "aes-gcm"):
        with pytest.raises(PluginError, match=r"needs .*: pip install 'lmkv\[codecs\]'$"):
            HOST.load_codec(name)
    assert HOST.load_codec("zlib").name == "zlib"
    assert HOST.load_codec("fp8").name == "fp8"


@pytest.mark.parametrize("name", ["zstd", "bf16-planes", "aes-gcm", "fp8"])
def test_the_work_is_done_without_the_interpreters_lock(name: str) -> None:
    made = codec(name)
    raw = np.tile(np.frombuffer(bfloats(floats()), np.uint8), 4000)  # 40 MB
    payload = about(len(raw), dtype="bfloat16", pages=16000, page_tokens=8, runs=(1024, 1024, 512))
    done = threading.Event()
    used: list[float] = []

    def work() -> None:
        begin = time.thread_time()
        made.encode(raw.data, payload)
        used.append(time.thread_time() - begin)
        done.set()

    thread = threading.Thread(target=work)
    thread.start()
    begin = time.thread_time()
    while not done.is_set():
        sum(range(200))
    thread.join()
    # With the lock held throughout, this thread would have got no time at all.
    assert time.thread_time() - begin > used[0] / 20


class _Stranger(Codec):
    """As somebody else may write one: all that is needed."""

    name = "stranger"

    def encode(self, raw: memoryview, about: Payload) -> tuple[bytes]:
        return (bytes(raw)[::-1],)

    def decode(self, encoded: memoryview, into: memoryview, about: Payload) -> None:
        if len(encoded) != len(into):
            raise FrameError("not so many bytes")
        into[:] = encoded[::-1]


def test_a_strangers_codec_chains_with_ours() -> None:
    chain = chained([_Stranger(), codec("zstd"), codec("aes-gcm")])
    assert decode(chain, encode(chain, b"abc" * 100), 300) == b"abc" * 100
    assert chain.name == "stranger+zstd+aes-gcm"


def test_the_example_of_the_documentation_works() -> None:
    page = (Path(__file__).parents[2] / "docs/reference/codecs.md").read_text(encoding="utf-8")
    [source] = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    module = ModuleType("xor_plugin")
    exec(source, vars(module))
    made = PluginHost.discover(extra=[module]).load_codec("xor")
    assert decode(made, encode(made, b"abc"), 3) == b"abc"
    for spec in builtin.lmkv_codecs():
        assert f"| `{spec.name}` |" in page
