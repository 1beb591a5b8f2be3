"""Lossless compression of 16-bit floats: the bytes that hold sign and exponent apart from those that hold mantissas.

Of a KV value the exponent is nearly all that can be compressed: those of one layer lie close together, while the lower
bits of the mantissa are noise. In bfloat16 the upper byte of a value is its sign and all but one bit of its exponent.
So each block is split into the plane of its upper and that of its lower bytes, and a plane is entropy-coded if it gets
smaller: by Huffman codes only, which zstd's literals are when it is made not to look for matches. (Splitting exactly
between exponent and mantissa gains nothing: the lowest bit of the exponent is as random as the sign.)

The encoded payload, numbers little-endian: the byte 1; for each block of 262144 values, and for what is left at the
end, the stored lengths of its two planes (4 bytes each), then the planes, upper first, each a zstd frame or, if as long
as the plane, the plane itself; at the end the last byte of an odd payload. Or the byte 0 and the payload as it is, if
that is not longer.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Final

import numpy as np
import zstandard

from lmkv.codec.plain import PLAIN, take_plain
from lmkv.codec.zstd import Zstd
from lmkv.errors import FrameError
from lmkv.specs import Codec

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

    from lmkv.specs import Buffer, Payload

    Plane = NDArray[np.uint8]
    Values = NDArray[np.uint16]

BLOCK: Final = 1 << 18
"""Values. Two planes of a block stay in the processor's cache, and one call is worth handing the GIL over."""
TASTE: Final = 4096
"""Bytes at the start of a block's lower plane that tell whether to try the whole."""
WORTH: Final = 0.97
"""A plane that gets no smaller than this part of it costs more time than it saves room."""
_SPLIT: Final = b"\1"
_LENGTHS: Final = struct.Struct("<II")
_HUFFMAN_ONLY: Final = {
    # The fast strategy with the smallest table and the longest match finds next to nothing and skips ahead quickly; a
    # target length of 0 keeps its literals compressed, which all negative levels don't.
    "strategy": zstandard.STRATEGY_FAST,
    "target_length": 0,
    "hash_log": 6,
    "chain_log": 6,
    "search_log": 1,
    "min_match": 7,
    "window_log": 17,
    "write_checksum": 0,
    "write_content_size": 1,
}


class PlanesCodec(Codec):
    """See the module. Bit-exact for any bytes, whatever they mean; never longer than they are by more than a byte."""

    name = "bf16-planes"

    def __init__(self) -> None:
        self._zstd = Zstd(zstandard.ZstdCompressionParameters(**_HUFFMAN_ONLY))

    def encode(self, raw: memoryview, about: Payload) -> Sequence[Buffer]:  # noqa: ARG002
        """As the module says."""
        parts: list[Buffer] = [_SPLIT]
        lower_bytes = np.empty(len(raw) // 2, np.uint8)
        wide = np.empty(min(BLOCK, len(lower_bytes)), np.uint16)
        for at, values in _blocks(raw):
            count = len(values)
            lower, upper = lower_bytes[at : at + count], np.empty(count, np.uint8)
            np.copyto(lower, values, casting="unsafe")
            np.right_shift(values, 8, out=wide[:count])
            np.copyto(upper, wide[:count], casting="unsafe")
            planes = self._smaller(upper), self._smaller(lower, taste=True)
            parts += (_LENGTHS.pack(*map(len, planes)), *planes)
        parts.append(raw[len(raw) & ~1 :])
        return parts if sum(map(len, parts)) <= len(raw) else (PLAIN, raw)

    def decode(self, encoded: memoryview, into: memoryview, about: Payload) -> None:  # noqa: ARG002
        """Fill `into`.

        Raises:
            FrameError: it is nothing that `encode` made of so many bytes.
        """
        first = bytes(encoded[:1])
        if first == PLAIN:
            take_plain(encoded, into, self.name)
            return
        if first != _SPLIT:
            raise FrameError(f"codec {self.name}: begins with {first.hex() or 'nothing'}")
        at = 1
        for _, values in _blocks(into):
            if len(encoded) - at < _LENGTHS.size:
                raise FrameError(f"codec {self.name}: cut short")
            lengths = _LENGTHS.unpack_from(encoded, at)
            middle = at + _LENGTHS.size + lengths[0]
            upper = self._plane(encoded[at + _LENGTHS.size : middle], lengths[0], len(values))
            at = middle + lengths[1]
            lower = self._plane(encoded[middle:at], lengths[1], len(values))
            np.multiply(upper, 256, out=values, dtype=np.uint16)
            np.add(values, lower, out=values)
        last = into[len(into) & ~1 :]
        if len(encoded) - at != len(last):
            raise FrameError(f"codec {self.name}: {len(encoded) - at} bytes at the end, not {len(last)}")
        last[:] = encoded[at:]

    def _smaller(self, plane: Plane, *, taste: bool = False) -> Buffer:
        """The plane's zstd frame if it is worth it, else the plane."""
        if taste and len(plane) > TASTE and len(self._zstd.compress(plane[:TASTE].data)) > WORTH * TASTE:
            return plane.data
        frame = self._zstd.compress(plane.data)
        return frame if len(frame) < WORTH * len(plane) else plane.data

    def _plane(self, stored: memoryview, nbytes: int, count: int) -> Plane:
        if len(stored) != nbytes or nbytes > count:
            raise FrameError(
                f"codec {self.name}: a plane of {nbytes} bytes for {count} values, {len(stored)} are there"
            )
        return np.frombuffer(stored if nbytes == count else self._zstd.decompress(stored, count), np.uint8)


def _blocks(buffer: memoryview) -> Iterator[tuple[int, Values]]:
    """The 16-bit values of a buffer in blocks, each with the number of its first value."""
    values = np.frombuffer(buffer[: len(buffer) & ~1], "<u2")
    for at in range(0, len(values), BLOCK):
        yield at, values[at : at + BLOCK]
