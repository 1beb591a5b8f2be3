"""Several codecs as one."""

from __future__ import annotations

import struct
from dataclasses import replace
from typing import TYPE_CHECKING, Final

import numpy as np

from lmkv.codec.identity import IdentityCodec
from lmkv.errors import FrameError
from lmkv.specs import GROWTH, Codec

if TYPE_CHECKING:
    from collections.abc import Sequence

    from lmkv.specs import Buffer, Payload

SEPARATOR: Final = "+"
"""Between the names in a chain's name; in no codec's own name."""


def chained(codecs: Sequence[Codec]) -> Codec:
    """The codecs as one; a single one itself, none: identity."""
    return ChainCodec(codecs) if len(codecs) > 1 else codecs[0] if codecs else IdentityCodec()


class ChainCodec(Codec):
    """Encodes with the first codec, what that gives with the second, and so on. Its name joins theirs with ``+``.

    The output begins with the length of each input but the first (eight bytes each, little-endian).
    """

    def __init__(self, codecs: Sequence[Codec]) -> None:
        self.name = SEPARATOR.join(codec.name for codec in codecs)
        self.lossless = all(codec.lossless for codec in codecs)
        self.seals = any(codec.seals for codec in codecs)
        self._codecs = tuple(codecs)
        self._lengths = struct.Struct(f"<{len(codecs) - 1}Q")

    def encode(self, raw: memoryview, about: Payload) -> Sequence[Buffer]:
        """The lengths, and what the last codec gives."""
        parts = self._codecs[0].encode(raw, about)
        lengths = []
        for codec in self._codecs[1:]:
            whole = memoryview(parts[0] if len(parts) == 1 else b"".join(parts))
            lengths.append(len(whole))
            parts = codec.encode(whole, replace(about, raw_bytes=len(whole)))
        return (self._lengths.pack(*lengths), *parts)

    def decode(self, encoded: memoryview, into: memoryview, about: Payload) -> None:
        """Undo them from the last to the first. Allocates no more than the raw length, and `GROWTH`, for each.

        Raises:
            FrameError: impossible lengths, or as the codecs say.
        """
        if len(encoded) < self._lengths.size:
            raise FrameError(f"codec {self.name}: {len(encoded)} bytes are too few")
        lengths = self._lengths.unpack_from(encoded)
        if any(length > len(into) + (i + 1) * GROWTH for i, length in enumerate(lengths)):
            raise FrameError(f"codec {self.name}: a step of {max(lengths)} bytes for {len(into)}")
        source = encoded[self._lengths.size :]
        for codec, length in zip(reversed(self._codecs[1:]), reversed(lengths), strict=True):
            between = np.empty(length, np.uint8).data  # not zeroed first
            codec.decode(source, between, replace(about, raw_bytes=length))
            source = between
        self._codecs[0].decode(source, into, about)

    def refusal(self, dtype: str) -> str:
        """Of the first codec; the others see no KV."""
        return self._codecs[0].refusal(dtype)
