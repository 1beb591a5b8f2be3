"""Between the frames of the pool, which are identity-coded, and those of a tier that has a codec. In driver threads."""

from __future__ import annotations

import hashlib
import struct
from dataclasses import replace
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from lmkv.errors import BackendError
from lmkv.frame import Trailer, frame_bytes, seal
from lmkv.memory import MemoryObject
from lmkv.specs import Payload
from lmkv.types import ALIGNMENT

if TYPE_CHECKING:
    from collections.abc import Sequence

    from lmkv.layout import LayoutDescription
    from lmkv.specs import Buffer, Codec
    from lmkv.types import ChunkKey

IDENTITY: Final = "identity"
SPARE: Final = 4096
"""Bytes by which a coded frame may be longer than the identity-coded one: a longer name in the trailer, a nonce …"""


def stored_bound(nbytes: int) -> int:
    """The most bytes that a stored frame has, in whatever codec, whose identity-coded frame has `nbytes`."""
    return nbytes + SPARE


class PutItem(NamedTuple):
    """One frame on its way into a tier."""

    key: ChunkKey
    object: MemoryObject
    """The identity-coded frame in the pool; retained by the tier while it needs it."""
    trailer: Trailer
    layout: LayoutDescription | None = None
    """Of the shard's pages, where it is known."""


def encoded(item: PutItem, codec: Codec) -> MemoryObject:
    """The frame as it is to be stored: the pool's own memory, or memory of its own for another codec.

    What a codec does not make smaller is stored as it is, unless the codec seals.

    Raises:
        BackendError: a codec that seals makes more than any frame may have.
    """
    if codec.name != IDENTITY:
        parts = codec.encode(item.object.view[: item.trailer.raw_bytes], payload(item.trailer, item.layout))
        length = sum(map(len, parts))
        nbytes = frame_bytes(length, len(item.trailer.prefixes), codec.name)
        if nbytes < item.object.nbytes or codec.seals:
            if nbytes > stored_bound(item.object.nbytes):
                raise BackendError(f"codec {codec.name} makes {length} bytes of {item.trailer.raw_bytes}")
            return _frame(nbytes, parts, replace(item.trailer, codec=codec.name, payload_bytes=length))
    complete(item.object, item.trailer)
    return item.object


def complete(obj: MemoryObject, trailer: Trailer) -> None:
    """Give an identity-coded frame its trailer, unless it has it. Any thread; two may do the same at once."""
    if not obj.sealed:
        seal(obj.view, trailer)
        obj.sealed = True


def _frame(nbytes: int, parts: Sequence[Buffer], trailer: Trailer) -> MemoryObject:
    made = aligned(nbytes)
    at = 0
    for part in parts:
        made.view[at : at + len(part)] = part
        at += len(part)
    seal(made.view, trailer)
    return made


def aligned(nbytes: int) -> MemoryObject:
    """Memory of its own, on the boundary that direct I/O asks for.

    From the allocator, which has it from the last frame: in a new mapping each page costs a fault, all of them together
    as long as the encoding of what goes in.
    """
    room = np.empty(nbytes + ALIGNMENT, np.uint8)
    start = -room.ctypes.data % ALIGNMENT
    return MemoryObject.over(room[start : start + nbytes])


def decode(source: MemoryObject, trailer: Trailer, target: MemoryObject, codec: Codec) -> None:
    """Make the identity-coded frame of `source` in `target`, sealed.

    Raises:
        FrameError: the payload is none of the codec's.
        UnreadableError: it needs a key that is not here.
    """
    codec.decode(source.view[: trailer.payload_bytes], target.view[: trailer.raw_bytes], payload(trailer, None))
    complete(target, replace(trailer, codec=IDENTITY, payload_bytes=trailer.raw_bytes))


def payload(trailer: Trailer, layout: LayoutDescription | None) -> Payload:
    """What a codec is told of a frame's payload."""
    fixed = struct.pack("<II", trailer.pages, len(trailer.parent))
    context = hashlib.sha256(b"".join((fixed, trailer.parent, *trailer.prefixes))).digest()
    made = Payload(key=trailer.key, raw_bytes=trailer.raw_bytes, context=context, pages=trailer.pages)
    if layout is None:
        return made
    return replace(made, dtype=layout["dtype"], page_tokens=layout["page_tokens"], runs=tuple(layout["runs"]))
