"""Digests in messages: one blob of 32-byte values."""

from __future__ import annotations

import struct
from functools import lru_cache
from typing import TYPE_CHECKING, Final

from lmkv.errors import ProtocolError
from lmkv.service.protocol import MAX_FRAMES
from lmkv.types import DIGEST_BYTES

if TYPE_CHECKING:
    from collections.abc import Callable

_BLOCK: Final = 256


def split_digests(blob: bytes) -> list[bytes]:
    """A blob of digests as a list."""
    if len(blob) % DIGEST_BYTES or len(blob) > MAX_FRAMES * DIGEST_BYTES:
        raise ProtocolError(f"{len(blob)} bytes of digests of {DIGEST_BYTES} bytes each")
    count = len(blob) // DIGEST_BYTES
    found: list[bytes] = []
    for first in range(0, count, _BLOCK):
        found += _unpacker(min(_BLOCK, count - first))(blob, first * DIGEST_BYTES)
    return found


@lru_cache(maxsize=_BLOCK)
def _unpacker(count: int) -> Callable[[bytes, int], tuple[bytes, ...]]:
    """Cuts so many digests out of a blob by one call, several times faster than slices or `iter_unpack` do."""
    return struct.Struct(f"{DIGEST_BYTES}s" * count).unpack_from
