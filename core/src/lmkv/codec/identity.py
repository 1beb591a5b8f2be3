"""The codec that changes nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lmkv.errors import FrameError
from lmkv.specs import Codec

if TYPE_CHECKING:
    from collections.abc import Sequence

    from lmkv.specs import Buffer, Payload


class IdentityCodec(Codec):
    """Payloads as they are; `encode` copies nothing."""

    name = "identity"

    def encode(self, raw: memoryview, about: Payload) -> Sequence[Buffer]:  # noqa: ARG002
        """`raw` itself."""
        return (raw,)

    def decode(self, encoded: memoryview, into: memoryview, about: Payload) -> None:  # noqa: ARG002
        """Copy.

        Raises:
            FrameError: the lengths differ.
        """
        if len(encoded) != len(into):
            raise FrameError(f"codec identity: {len(encoded)} bytes stored, {len(into)} wanted")
        into[:] = encoded
