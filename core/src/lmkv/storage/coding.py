"""Between the frames of the pool, which are identity-coded, and those of a tier that has a codec. In driver threads."""

from __future__ import annotations

import mmap
from dataclasses import replace
from typing import TYPE_CHECKING, Final, NamedTuple

from lmkv.frame import Trailer, frame_bytes, seal
from lmkv.memory import MemoryObject

if TYPE_CHECKING:
    from lmkv.specs import Codec
    from lmkv.types import ChunkKey

IDENTITY: Final = "identity"


class PutItem(NamedTuple):
    """One frame on its way into a tier."""

    key: ChunkKey
    object: MemoryObject
    """The identity-coded frame in the pool; retained by the tier while it needs it."""
    trailer: Trailer
    sealed: bool
    """The frame carries its trailer already."""


def encoded(item: PutItem, codec: Codec) -> MemoryObject:
    """The frame as it is to be stored: the pool's own memory, or memory of its own for another codec."""
    if codec.name == IDENTITY:
        if not item.sealed:
            seal(item.object.view, item.trailer)
        return item.object
    payload = codec.encode(item.object.view[: item.trailer.raw_bytes])
    trailer = replace(item.trailer, codec=codec.name, payload_bytes=len(payload))
    buffer = memoryview(mmap.mmap(-1, frame_bytes(len(payload), len(trailer.prefixes), codec.name)))
    buffer[: len(payload)] = payload
    seal(buffer, trailer)
    return MemoryObject.over(buffer)


def decode(source: MemoryObject, trailer: Trailer, target: MemoryObject, codec: Codec) -> None:
    """Make the identity-coded frame of `source` in `target`, sealed.

    Raises:
        FrameError: the payload is none of the codec's.
    """
    codec.decode(source.view[: trailer.payload_bytes], target.view[: trailer.raw_bytes])
    seal(target.view, replace(trailer, codec=IDENTITY, payload_bytes=trailer.raw_bytes))
