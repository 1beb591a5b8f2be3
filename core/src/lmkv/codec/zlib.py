"""DEFLATE from the standard library: slow, but everywhere."""

from __future__ import annotations

import zlib
from typing import Final

from lmkv.errors import FrameError

LEVEL: Final = 1
"""KV values hardly compress; a higher level costs time and gains next to nothing."""


class ZlibCodec:
    """zlib streams of level 1. Releases the GIL in its work."""

    name = "zlib"
    lossless = True

    def encode(self, raw: memoryview) -> bytes | memoryview:
        """The zlib stream of `raw`."""
        return zlib.compress(raw, LEVEL)

    def decode(self, encoded: memoryview, into: memoryview) -> None:
        """Fill `into`; never inflates to more than its length.

        Raises:
            FrameError: no zlib stream, a stream of another length, bytes behind it.
        """
        stream = zlib.decompressobj()
        try:
            # One byte more than wanted tells a stream that is too long; it also lets the checksum at the end be read.
            raw = stream.decompress(encoded, len(into) + 1)
        except zlib.error as error:
            raise FrameError(f"codec zlib: {error}") from error
        if len(raw) != len(into) or not stream.eof or stream.unused_data:
            raise FrameError(f"codec zlib: the stream is not one of {len(into)} bytes")
        into[:] = raw
