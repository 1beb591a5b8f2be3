"""What does not get smaller is kept as it is, behind a byte with which no compressed stream begins."""

from __future__ import annotations

from typing import Final

from lmkv.errors import FrameError

PLAIN: Final = b"\0"


def take_plain(encoded: memoryview, into: memoryview, codec: str) -> None:
    """Fill `into` from the byte and what follows it.

    Raises:
        FrameError: the lengths differ.
    """
    if len(encoded) - len(PLAIN) != len(into):
        raise FrameError(f"codec {codec}: {len(encoded) - len(PLAIN)} bytes stored, {len(into)} wanted")
    into[:] = encoded[len(PLAIN) :]
