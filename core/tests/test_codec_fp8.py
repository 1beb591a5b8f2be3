from __future__ import annotations

import struct
from typing import TYPE_CHECKING

import numpy as np
import pytest
from codec_rig import PAGE_TOKENS, PAGES, RUNS, about, bfloats, codec, decode, encode, floats, geometry, halves, widened
from hypothesis import example, given, settings
from hypothesis import strategies as st

from lmkv.codec.fp8 import _CODES, _FLOATS, Fp8Codec
from lmkv.errors import BackendError, FrameError

if TYPE_CHECKING:
    from numpy.typing import NDArray

FP8 = Fp8Codec()
WRITTEN = {"bfloat16": bfloats, "float16": halves}
dtypes = pytest.mark.parametrize("dtype", sorted(WRITTEN))


def values(raw: bytes, dtype: str) -> NDArray[np.float64]:
    read = widened(raw) if dtype == "bfloat16" else np.frombuffer(raw, np.float16)
    with np.errstate(invalid="ignore"):  # of a signalling NaN
        return read.astype(np.float64)


def again(raw: bytes, dtype: str) -> bytes:
    encoded = encode(FP8, raw, **geometry(dtype))
    return decode(FP8, encoded, len(raw))


def tables(flat: NDArray[np.float64]) -> list[NDArray[np.float64]]:
    at, made = 0, []
    for run in RUNS:
        size = PAGES * run // 2
        made.append(flat[at : at + size].reshape(PAGES * PAGE_TOKENS, -1))
        at += size
    return made


@dtypes
@settings(deadline=None)
@given(seed=st.integers(0, 2**32))
def test_the_error_is_what_the_page_says(dtype: str, seed: int) -> None:
    raw = WRITTEN[dtype](floats(seed))
    for before, after in zip(tables(values(raw, dtype)), tables(values(again(raw, dtype), dtype)), strict=True):
        bound = np.maximum(np.abs(before) * 2.0**-4, np.abs(before).max(axis=0) * 2.0**-17)
        assert (np.abs(after - before) <= bound).all()


@dtypes
def test_half_the_bytes(dtype: str) -> None:
    raw = WRITTEN[dtype](floats())
    assert len(encode(FP8, raw, **geometry(dtype))) < len(raw) / 2 + 250


@dtypes
@settings(deadline=None)
@given(bits=st.lists(st.integers(0, 0xFFFF), min_size=1, max_size=50))
@example(bits=[0x7BFF])
@example(bits=[0x7F7F, 0xFF7F])
@example(bits=[0x7BC0, 0x7C01])
@example(bits=[0x7F81])
def test_any_pattern_comes_back_as_a_number_near_it_or_as_nan(dtype: str, bits: list[int]) -> None:
    size = PAGES * sum(RUNS) // 2
    raw = np.resize(np.array(bits, np.uint16), size).tobytes()
    before, after = values(raw, dtype), values(again(raw, dtype), dtype)
    assert (np.isnan(after) == ~np.isfinite(before)).all()
    finite = np.isfinite(before)
    least = 2.0**-25 if dtype == "float16" else 2.0**-132
    most = np.max(np.abs(before[finite]), initial=0) * 2.0**-17
    assert (np.abs(after[finite] - before[finite]) <= np.maximum(np.abs(before[finite]) * 2.0**-4, most) + least).all()
    assert (np.signbit(after) == np.signbit(before))[finite & (after != 0)].all()


@dtypes
def test_what_was_coded_once_is_not_changed_again(dtype: str) -> None:
    once = again(WRITTEN[dtype](floats(7)), dtype)
    assert again(once, dtype) == once


def test_codes_are_those_of_e4m3() -> None:
    """Against the definition, by brute force over all codes."""
    for code in range(0x7F):
        exponent, mantissa = code >> 3, code & 7
        value = (1 + mantissa / 8) * 2.0 ** (exponent - 7) if exponent else mantissa / 8 * 2.0**-6
        assert _FLOATS[code] == value
        assert _FLOATS[code | 0x80] == -value
        assert _CODES[int(np.float32(value).view(np.uint32)) >> 16] == code
    assert np.isnan(_FLOATS[[0x7F, 0xFF]]).all()
    assert _FLOATS[0x7E] == 448


@pytest.mark.parametrize("value", [0.3, 1.0625, 1.1875, 17.9, 2.0**-9, 1.5 * 2.0**-9, 3.1 * 2.0**-8, 447.0])
def test_rounding_is_to_the_nearest_and_ties_to_even(value: float) -> None:
    known = _FLOATS[:0x7F].astype(np.float64)
    raw = bfloats(np.resize(np.array([value, 448.0], np.float32), PAGES * sum(RUNS) // 2))
    exact = float(widened(raw)[0])
    distance = np.abs(known - exact)
    nearest = np.flatnonzero(distance == distance.min())
    code = int(nearest[0] if len(nearest) == 1 else nearest[nearest % 2 == 0][0])
    one_column = {**geometry("bfloat16"), "page_tokens": 0}
    got = widened(decode(FP8, encode(FP8, raw, **one_column), len(raw)))
    assert got[0] == known[code]


def test_a_column_of_great_values_does_not_cost_the_others_theirs() -> None:
    grid = np.full((PAGES * PAGE_TOKENS, RUNS[0] // PAGE_TOKENS // 2), 0.001, np.float32)
    grid[:, 3] = 1e30
    grid[:, 4] = 0
    raw = bfloats(np.concatenate([grid.ravel(), floats()[grid.size :]]))
    got = widened(again(raw, "bfloat16"))[: grid.size].reshape(grid.shape)
    assert np.allclose(got[:, :3], 0.001, rtol=2**-4)
    assert np.allclose(got[:, 3], 1e30, rtol=2**-4)
    assert (got[:, 4] == 0).all()


@pytest.mark.parametrize("dtype", ["float32", "fp8_e4m3", "", "uint8"])
def test_other_kv_is_refused(dtype: str) -> None:
    assert "not of" in FP8.refusal(dtype)
    with pytest.raises(BackendError):
        encode(FP8, bytes(PAGES * sum(RUNS)), **geometry(dtype))
    assert not FP8.refusal("bfloat16")
    assert not FP8.refusal("float16")


@pytest.mark.parametrize("runs", [(3, 2557), (2558, 2), (2560,)])
def test_runs_that_are_no_whole_tokens_share_a_scale(runs: tuple[int, ...]) -> None:
    raw = bfloats(floats())
    geometry = {"dtype": "bfloat16", "pages": PAGES, "page_tokens": 7, "runs": runs}
    if any(run % 2 for run in runs):
        with pytest.raises(BackendError):
            encode(FP8, raw, **geometry)
        return
    got = widened(decode(FP8, encode(FP8, raw, **geometry), len(raw)))
    before = widened(raw)
    assert (np.abs(got - before) <= np.maximum(np.abs(before) / 16, np.abs(before).max() / 2**17)).all()


@settings(deadline=None)
@given(garbage=st.binary(max_size=300), length=st.integers(0, 700))
def test_garbage_is_a_frame_error(garbage: bytes, length: int) -> None:
    for start in (b"", b"\1\0\1\0", b"\1\1\2\0" + struct.pack("<III", 1, 2, 2)):
        try:
            got = decode(FP8, start + garbage, length)
        except FrameError:
            continue
        assert len(got) == length


def test_every_cut_is_refused() -> None:
    raw = bfloats(floats())
    encoded = encode(FP8, raw, **geometry("bfloat16"))
    for length in [*range(100), *range(100, len(encoded), 97), len(encoded) - 1]:
        with pytest.raises(FrameError):
            decode(FP8, encoded[:length], len(raw))
    for wrong in (len(raw) - 2, len(raw) + 2):
        with pytest.raises(FrameError):
            decode(FP8, encoded, wrong)
    assert decode(codec("fp8"), encoded, len(raw), dtype="") == decode(FP8, encoded, len(raw)), "needs no namespace"
    assert about(3).dtype == ""
