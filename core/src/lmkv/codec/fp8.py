"""Lossy compression of 16-bit floats to 8 bits: E4M3 (4 bits of exponent, 3 of mantissa) with a scale per channel.

A channel is a place within a token: the payload's runs are read as tables with a row for each token and a column for
each channel. (Where the engine orders a page's values otherwise, a column holds other values that share a scale; the
bound on the error holds all the same.) A column's scale is the least power of two that makes its values fit, so scaling
itself rounds nothing, and coding again what was decoded changes nothing more.

Error: a value x comes back within 2**-4 of |x|, or within 2**-17 of the greatest |x| of its column where that is more.
NaN stays NaN; an infinity becomes NaN.

The encoded payload, numbers little-endian: the byte 1; 0 for bfloat16 or 1 for float16; the number of kinds of tables
(2 bytes); for each kind how many there are, their rows, their columns (4 bytes each); then all scales (exponents of
two, plus 128) and all values, a byte each.
"""

from __future__ import annotations

import struct
from itertools import groupby
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from lmkv.errors import BackendError, FrameError
from lmkv.specs import Codec

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from numpy.typing import NDArray

    from lmkv.specs import Buffer, Payload

    Bytes = NDArray[np.uint8]
    Halves = NDArray[np.uint16]
    """The bits of bfloat16 or float16."""
    Floats = NDArray[np.float32]

DTYPES: Final = ("bfloat16", "float16")
BLOCK: Final = 1 << 17
"""Values that are worked on at a time, so that their float32 stay in the processor's cache."""
_HEAD: Final = struct.Struct("<BBH")
_TABLE: Final = struct.Struct("<III")
_GREATEST: Final = 448.0
_LARGEST: Final = (np.float32((2 - 2**-7) * 2.0**127), np.float32(65504))
"""The greatest bfloat16 and the greatest float16."""
_NAN: Final = 0x7F
_SCALE: Final = 128
"""Scales are stored plus this, since float32 has exponents from -126 on."""


class Tables(NamedTuple):
    """Neighbouring runs of one shape."""

    number: int
    rows: int
    columns: int


class Fp8Codec(Codec):
    """See the module. For KV of bfloat16 or float16 only; its work releases the GIL."""

    name = "fp8"
    lossless = False

    def encode(self, raw: memoryview, about: Payload) -> Sequence[Buffer]:
        """As the module says.

        Raises:
            BackendError: the KV is of another type, or it is not known how it lies.
        """
        if about.dtype not in DTYPES or any(n % 2 for n in about.runs) or sum(about.runs) * about.pages != len(raw):
            raise BackendError(f"codec fp8: {len(raw)} bytes of {about.dtype or 'an unknown type'}")
        half = about.dtype == "float16"
        values = np.frombuffer(raw, np.uint16)
        codes = np.empty(len(values), np.uint8)
        scales: list[Bytes] = []
        shapes = list(_tables(about))
        for at, tables in _each(shapes):
            size = tables.rows * tables.columns
            grid = values[at : at + size].reshape(tables.rows, tables.columns)
            exponents = _exponents(grid, half=half)
            scales.append((exponents + _SCALE).astype(np.uint8))
            factors = np.ldexp(np.float32(1), -exponents)
            target = codes[at : at + size].reshape(grid.shape)
            with np.errstate(invalid="ignore"):  # a NaN may warn
                for rows in _blocks(tables):
                    _round(_widened(grid[rows], half=half) * factors, target[rows])
        head = _HEAD.pack(1, DTYPES.index(about.dtype), len(shapes)) + b"".join(_TABLE.pack(*each) for each in shapes)
        return (head, np.concatenate(scales).data, codes.data)

    def decode(self, encoded: memoryview, into: memoryview, about: Payload) -> None:  # noqa: ARG002
        """Fill `into` with values of the type that was encoded.

        Raises:
            FrameError: it is nothing that `encode` made of so many bytes.
        """
        half, shapes, at = _read_head(encoded)
        count = sum(t.number * t.rows * t.columns for t in shapes)
        columns = sum(t.number * t.columns for t in shapes)
        if 2 * count != len(into) or len(encoded) != at + columns + count:
            raise FrameError(f"codec fp8: {len(encoded)} bytes are none of {len(into)}")
        scales = np.frombuffer(encoded[at : at + columns], np.uint8).astype(np.int32) - _SCALE
        codes = np.frombuffer(encoded[at + columns :], np.uint8)
        values = np.frombuffer(into, np.uint16)
        limit = _LARGEST[half]
        column = 0
        for first, tables in _each(shapes):
            size = tables.rows * tables.columns
            factors = np.ldexp(np.float32(1), scales[column : column + tables.columns])
            column += tables.columns
            source = codes[first : first + size].reshape(tables.rows, tables.columns)
            target = values[first : first + size].reshape(source.shape)
            with np.errstate(invalid="ignore", over="ignore"):  # what `encode` did not make may have any scale
                for rows in _blocks(tables):
                    floats = _FLOATS[source[rows]]
                    floats *= factors
                    if np.max(factors) * _GREATEST > limit:  # what was rounded up is still no infinity
                        np.clip(floats, -limit, limit, out=floats)
                    _narrow(floats, target[rows], half=half)

    def refusal(self, dtype: str) -> str:
        """It takes 16-bit floats only."""
        if dtype in DTYPES:
            return ""
        return f"compresses KV of bfloat16 or float16, not of {dtype or 'an unknown type'}: choose a lossless one"


def _tables(about: Payload) -> Iterable[Tables]:
    """How the payload's runs are read: a row for each token; where that does not come out, one column for all."""
    for length, runs in groupby(about.runs):
        token = 2 * about.page_tokens
        columns = length // token if token and length % token == 0 else 1
        yield Tables(len(list(runs)), about.pages * length // (2 * columns), columns)


def _each(shapes: Sequence[Tables]) -> Iterable[tuple[int, Tables]]:
    """Every single table, with the number of its first value."""
    at = 0
    for tables in shapes:
        for _ in range(tables.number):
            yield at, tables
            at += tables.rows * tables.columns


def _blocks(tables: Tables) -> Iterable[slice]:
    step = max(1, BLOCK // tables.columns)
    return (slice(first, first + step) for first in range(0, tables.rows, step))


def _exponents(grid: Halves, *, half: bool) -> NDArray[np.int32]:
    """The exponent of two for each column by which its greatest finite value is at most 448."""
    bits = grid & np.uint16(0x7FFF)
    bits[bits >= (0x7C00 if half else 0x7F80)] = 0
    greatest = _widened(bits.max(axis=0), half=half)
    _, exponents = np.frexp(greatest / np.float32(_GREATEST))
    exponents -= np.ldexp(np.float32(_GREATEST), exponents - 1) >= greatest
    return np.clip(np.where(greatest > 0, exponents, 0), 2 - _SCALE, _SCALE - 1).astype(np.int32)


def _widened(values: Halves, *, half: bool) -> Floats:
    if half:
        return values.view(np.float16).astype(np.float32)
    return np.left_shift(values, 16, dtype=np.uint32).view(np.float32)


def _narrow(floats: Floats, into: Halves, *, half: bool) -> None:
    """The reverse; exact for bfloat16 that `encode` can have made, rounded where float16 has no such small values."""
    if half:
        np.copyto(into.view(np.float16), floats, casting="same_kind")
    else:
        np.copyto(into, floats.view(np.uint32) >> np.uint32(16), casting="unsafe")


def _round(floats: Floats, into: Bytes) -> None:
    """The nearest E4M3 code of each; ties to even."""
    bits = floats.view(np.uint32)
    # The upper half decides, and that the lower one is not zero. So a table of 65 536 codes does for all floats.
    top = (bits >> np.uint32(16)).astype(np.uint16)
    top |= (bits & np.uint32(0xFFFF)) != 0
    np.take(_CODES, top, out=into)


def _read_head(encoded: memoryview) -> tuple[bool, list[Tables], int]:
    """Whether it is float16, the shapes, and where the scales begin."""
    version, dtype, kinds = _HEAD.unpack_from(encoded) if len(encoded) >= _HEAD.size else (0, 0, 0)
    at = _HEAD.size + kinds * _TABLE.size
    if version != 1 or dtype >= len(DTYPES) or len(encoded) < at:
        raise FrameError(f"codec fp8: begins with {bytes(encoded[: _HEAD.size]).hex() or 'nothing'}")
    shapes = [Tables(*_TABLE.unpack_from(encoded, _HEAD.size + i * _TABLE.size)) for i in range(kinds)]
    if not all(all(each) for each in shapes):
        raise FrameError("codec fp8: a table without values")
    return dtype == 1, shapes, at


def _float_of_code() -> Floats:
    """The value of each E4M3 code."""
    codes = np.arange(256)
    exponent, mantissa = codes >> 3 & 15, codes & 7
    values = np.where(exponent, np.ldexp(1 + mantissa / 8, exponent - 7), np.ldexp(mantissa / 8, -6))
    values[codes & 0x7F == _NAN] = np.nan
    return np.where(codes & 0x80, -values, values).astype(np.float32)


def _code_of_top() -> Bytes:
    """The nearest code of every float32 whose lower half is zero, by its upper half; ties go to the even code."""
    tops = np.arange(1 << 15, dtype=np.uint32)
    with np.errstate(invalid="ignore"):
        floats = (tops << np.uint32(16)).view(np.float32).astype(np.float64)
    known = _FLOATS[:_NAN].astype(np.float64)
    between = (known[1:] + known[:-1]) / 2
    codes = np.searchsorted(between, floats, side="left")
    tied = floats == between[np.minimum(codes, len(between) - 1)]
    codes += tied & (codes % 2 == 1)
    codes[~(floats <= _GREATEST)] = _NAN
    return np.concatenate([codes, codes | 0x80], dtype=np.uint8, casting="unsafe")


_FLOATS: Final = _float_of_code()
_CODES: Final = _code_of_top()
