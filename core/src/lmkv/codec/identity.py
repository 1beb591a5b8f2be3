"""The codec that changes nothing."""

from __future__ import annotations

from lmkv.errors import FrameError


class IdentityCodec:
    """Payloads as they are; `encode` copies nothing."""

    name = "identity"
    lossless = True

    def encode(self, raw: memoryview) -> bytes | memoryview:
        """`raw` itself."""
        return raw

    def decode(self, encoded: memoryview, into: memoryview) -> None:
        """Copy.

        Raises:
            FrameError: the lengths differ.
        """
        if len(encoded) != len(into):
            raise FrameError(f"codec identity: {len(encoded)} bytes stored, {len(into)} wanted")
        into[:] = encoded
