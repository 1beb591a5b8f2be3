"""Zstandard, through the `zstandard` package."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import zstandard

from lmkv.codec.plain import PLAIN, take_plain
from lmkv.errors import FrameError
from lmkv.specs import Codec

if TYPE_CHECKING:
    from collections.abc import Sequence

    from lmkv.codec.options import ZstdOptions
    from lmkv.specs import Buffer, Payload


class Zstd(threading.local):
    """One compressor and decompressor for each thread: the library's may not be shared. Both release the GIL."""

    def __init__(self, parameters: zstandard.ZstdCompressionParameters) -> None:
        self.compress = zstandard.ZstdCompressor(compression_params=parameters).compress
        self._decompressor = zstandard.ZstdDecompressor()

    def decompress(self, encoded: memoryview, nbytes: int) -> bytes:
        """Exactly `nbytes`; allocates no more than that, whatever the frame says.

        Raises:
            FrameError: it is no single frame of that length.
        """
        try:
            if zstandard.frame_content_size(encoded) != nbytes:
                raise FrameError(f"codec zstd: no frame of {nbytes} bytes")
            raw = self._decompressor.decompress(encoded, allow_extra_data=False)
        except zstandard.ZstdError as error:
            raise FrameError(f"codec zstd: {error}") from error
        if len(raw) != nbytes:
            raise FrameError(f"codec zstd: {len(raw)} bytes, not {nbytes}")
        return raw


class ZstdCodec(Codec):
    """A zstd frame without a checksum, since ours has one; what does not get smaller stays as it is."""

    name = "zstd"

    def __init__(self, options: ZstdOptions) -> None:
        self._zstd = Zstd(
            zstandard.ZstdCompressionParameters.from_level(options.level, write_content_size=1, write_checksum=0)
        )

    def encode(self, raw: memoryview, about: Payload) -> Sequence[Buffer]:  # noqa: ARG002
        """The zstd frame of `raw`, where that is shorter."""
        frame = self._zstd.compress(raw)
        return (frame,) if len(frame) <= len(raw) else (PLAIN, raw)

    def decode(self, encoded: memoryview, into: memoryview, about: Payload) -> None:  # noqa: ARG002
        """Fill `into`.

        Raises:
            FrameError: no zstd frame, one of another length, bytes behind it.
        """
        if bytes(encoded[:1]) == PLAIN:
            take_plain(encoded, into, self.name)
        else:
            into[:] = self._zstd.decompress(encoded, len(into))
