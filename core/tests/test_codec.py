from __future__ import annotations

import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmkv import builtin
from lmkv.errors import FrameError
from lmkv.specs import Codec, Payload
from lmkv.types import ChunkKey

CODECS = {spec.name: spec.load()() for spec in builtin.lmkv_codecs()}
KEY = ChunkKey(bytes(range(16)), 0, bytes(range(32)))
each_codec = pytest.mark.parametrize("name", sorted(CODECS))


def test_the_cores_codecs_are_offered_by_its_hook() -> None:
    assert sorted(CODECS) == ["identity", "zlib"]
    assert all(codec.name == name and codec.lossless for name, codec in CODECS.items())


def encode(codec: Codec, raw: bytes) -> bytes:
    return b"".join(codec.encode(memoryview(raw), Payload(key=KEY, raw_bytes=len(raw))))


def decode(codec: Codec, encoded: bytes, length: int) -> bytes:
    into = bytearray(length)
    codec.decode(memoryview(encoded), memoryview(into), Payload(key=KEY, raw_bytes=length))
    return bytes(into)


@each_codec
@given(raw=st.binary(max_size=5000))
def test_bits_come_back(name: str, raw: bytes) -> None:
    assert decode(CODECS[name], encode(CODECS[name], raw), len(raw)) == raw


@each_codec
@pytest.mark.parametrize("difference", [-1, 1, 4096])
def test_another_length_is_refused(name: str, difference: int) -> None:
    encoded = encode(CODECS[name], bytes(5000))
    with pytest.raises(FrameError):
        decode(CODECS[name], encoded, 5000 + difference)


@given(encoded=st.binary(max_size=200))
def test_zlib_refuses_what_is_no_stream(encoded: bytes) -> None:
    with pytest.raises(FrameError):
        decode(CODECS["zlib"], encoded, 777)


def test_zlib_refuses_a_cut_stream_and_bytes_behind_it() -> None:
    encoded = zlib.compress(bytes(range(256)))
    for wrong in (encoded[:-1], encoded + b"x"):
        with pytest.raises(FrameError):
            decode(CODECS["zlib"], wrong, 256)


def test_a_bomb_is_not_inflated() -> None:
    bomb = zlib.compress(bytes(64 << 20), 9)
    with pytest.raises(FrameError):
        decode(CODECS["zlib"], bomb, 10)
