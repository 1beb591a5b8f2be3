"""DEFLATE from the standard library: slow, but everywhere."""

from __future__ import annotations

import zlib
from typing import TYPE_CHECKING, Final

from lmkv.codec.plain import PLAIN, take_plain
from lmkv.errors import FrameError
from lmkv.specs import Codec

if TYPE_CHECKING:
    from collections.abc import Sequence

    from lmkv.specs import Buffer, Payload

LEVEL: Final = 1
"""KV values hardly compress; a higher level costs time and gains next to nothing."""


class ZlibCodec(Codec):
    """A zlib stream of level 1, or what does not get smaller as it is. Releases the GIL in its work."""

    name = "zlib"

    def encode(self, raw: memoryview, about: Payload) -> Sequence[Buffer]:  # noqa: ARG002
        """The zlib stream of `raw`, where that is shorter."""
        stream = zlib.compress(raw, LEVEL)
        return (stream,) if len(stream) <= len(raw) else (PLAIN, raw)

    def decode(self, encoded: memoryview, into: memoryview, about: Payload) -> None:  # noqa: ARG002
        """Fill `into`; never inflates to more than its length.

        Raises:
            FrameError: no zlib stream, a stream of another length, bytes behind it.
        """
        if bytes(encoded[:1]) == PLAIN:
            take_plain(encoded, into, self.name)
            return
        stream = zlib.decompressobj()
        try:
            # One byte more than wanted tells a stream that is too long; it also lets the checksum at the end be read.
            raw = stream.decompress(encoded, len(into) + 1)
        except zlib.error as error:
            raise FrameError(f"codec zlib: {error}") from error
        if len(raw) != len(into) or not stream.eof or stream.unused_data:
            raise FrameError(f"codec zlib: the stream is not one of {len(into)} bytes")
        into[:] = raw
