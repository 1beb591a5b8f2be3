"""A stored frame: payload, zero padding, trailer, footer. The exact bytes are in `docs/reference/frame-format.md`.

The footer is the last thing, so that the last 4 KiB of a file tell what it is. Every length is checked against the
bytes that are really there before it is used, and nothing is allocated by a number that was read.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Final, NamedTuple, TypeAlias

import xxhash

from lmkv.errors import FrameError
from lmkv.types import ALIGNMENT, DIGEST_BYTES, NAMESPACE_BYTES, ChunkKey

if TYPE_CHECKING:
    from lmkv.types import StoredFrame

MAGIC: Final = b"lmkvfram"
VERSION: Final = 1
MAX_CODEC_NAME: Final = 255

# Footer: magic, version, zero, body bytes, frame bytes | trailer checksum | frame checksum.
_HEAD: Final = struct.Struct("<8sHHIQ")
_HEAD_AND_SUM: Final = struct.Struct("<8sHHIQ8s")
_TRAILER_SUM: Final = 8
_FRAME_SUM: Final = 16
_FOOTER: Final = _HEAD.size + _TRAILER_SUM + _FRAME_SUM
# Body: namespace, digest, parent, shard, pages, payload bytes, raw bytes, prefixes, has parent, codec bytes, zero.
_BODY: Final = struct.Struct("<16s32s32sIIQQIBBH")
_U32: Final = 1 << 32
_U63: Final = 1 << 63


@dataclass(frozen=True, slots=True)
class Trailer:
    """What a frame says about itself."""

    key: ChunkKey
    parent: bytes
    """Digest of the preceding chunk, empty for the first."""
    pages: int
    prefixes: tuple[bytes, ...]
    """Digests of its first 1 … pages-1 pages, or empty."""
    codec: str
    payload_bytes: int
    """As stored."""
    raw_bytes: int
    """After decoding."""


class Link(NamedTuple):
    """What an index needs to know of a frame besides its key."""

    parent: bytes
    pages: int
    prefixes: tuple[bytes, ...]
    nbytes: int
    """Of the frame when it is identity-coded."""


@lru_cache(maxsize=256)
def frame_bytes(payload_bytes: int, prefixes: int, codec: str = "identity") -> int:
    """Bytes of a whole frame, a multiple of 4096, given its payload, its number of page prefixes and its codec."""
    used = payload_bytes + _BODY.size + len(codec) + prefixes * DIGEST_BYTES + _FOOTER
    return used + -used % ALIGNMENT


def seal(view: memoryview, trailer: Trailer) -> None:
    """Make a frame of `view`, whose first `payload_bytes` bytes are the payload. Releases the GIL for the checksum.

    Args:
        view: writable bytes, exactly `frame_bytes(…)` of them.
        trailer: what is written behind the payload.

    Raises:
        FrameError: `view` has another length, or the trailer does not fit together.
    """
    _check_numbers(trailer.pages, len(trailer.prefixes), trailer.codec, trailer.payload_bytes, trailer.raw_bytes)
    _check_digests(trailer)
    nbytes = frame_bytes(trailer.payload_bytes, len(trailer.prefixes), trailer.codec)
    if len(view) != nbytes:
        raise FrameError(f"frame: {len(view)} bytes of memory for a frame of {nbytes}", kind="size")
    codec = trailer.codec.encode("ascii")
    fixed = _BODY.pack(
        trailer.key.namespace, trailer.key.digest, trailer.parent, trailer.key.shard, trailer.pages,
        trailer.payload_bytes, trailer.raw_bytes, len(trailer.prefixes), bool(trailer.parent), len(codec), 0,
    )  # fmt: skip
    body = b"".join((fixed, codec, *trailer.prefixes))
    covered = body + _HEAD.pack(MAGIC, VERSION, 0, len(body), nbytes)
    end = nbytes - _FRAME_SUM
    start = end - _TRAILER_SUM - len(covered)
    view[trailer.payload_bytes : start] = bytes(start - trailer.payload_bytes)
    view[start:end] = covered + xxhash.xxh3_64_digest(covered)
    view[end:] = _checksum(view[:end])


def verify(view: memoryview, key: ChunkKey) -> Trailer:
    """The trailer of the frame that `view` is, after checking everything. Releases the GIL for the checksum.

    Raises:
        FrameError: it is not the intact frame of `key`; the message names what differs.
    """
    nbytes, fields = _parse(view)
    trailer = Trailer(*fields)
    if nbytes != len(view):
        raise FrameError(f"frame: {len(view)} bytes are there, {nbytes} were written")
    for name, stored, asked in (
        ("namespace", trailer.key.namespace.hex(), key.namespace.hex()),
        ("shard", trailer.key.shard, key.shard),
        ("digest", trailer.key.digest.hex(), key.digest.hex()),
    ):
        if stored != asked:
            raise FrameError(f"frame: it is of {name} {stored}, not {asked}")
    end = nbytes - _FRAME_SUM
    if _checksum(view[:end]) != bytes(view[end:]):
        raise FrameError("frame: checksum of payload and trailer differs")
    return trailer


def parse_trailer(tail: bytes | memoryview) -> Trailer:
    """The trailer of a frame of which `tail` is the end; verified by its own checksum, the payload is not looked at.

    Raises:
        FrameError: it is no intact trailer; of kind ``short`` when `tail` ends before its start and more is needed.
    """
    return Trailer(*_parse(tail)[1])


def link(stored: StoredFrame) -> Link:
    """Where a frame that a scan found belongs, by its trailer; checked as `parse_trailer` does, and against the key.

    Makes nothing but what the index keeps: a start has 100 000 of them.

    Raises:
        FrameError: as `parse_trailer`, or the trailer is of another key, or of a frame of another length.
    """
    nbytes, (key, parent, pages, prefixes, _, _, raw_bytes) = _parse(stored.trailer)
    if key != stored.key or nbytes != stored.nbytes:
        raise FrameError(f"frame: {stored.key} with {stored.nbytes} bytes is stored as {key} with {nbytes}")
    return Link(parent, pages, prefixes, frame_bytes(raw_bytes, len(prefixes)))


def trailer_bytes(end: bytes | memoryview) -> int:
    """Length of the trailer that `end` ends with, by its footer alone; may exceed `end`. 0: `end` is no frame's."""
    if len(end) < _FOOTER:
        return 0
    magic, _, _, body_bytes, _ = _HEAD.unpack_from(end, len(end) - _FOOTER)
    return body_bytes + _FOOTER if magic == MAGIC else 0


Fields: TypeAlias = tuple[ChunkKey, bytes, int, tuple[bytes, ...], str, int, int]
"""The fields of a `Trailer`, in order."""


def _parse(view: bytes | memoryview) -> tuple[int, Fields]:
    """The length that the whole frame has by the trailer at the end of `view`, and what the trailer says."""
    available = len(view)
    if available < _FOOTER + _BODY.size:
        raise FrameError(f"frame: {available} bytes are too few for a trailer")
    magic, version, zero, body_bytes, nbytes, stored = _HEAD_AND_SUM.unpack_from(view, available - _FOOTER)
    if magic != MAGIC:
        raise FrameError("frame: no magic at the end: not a frame, or cut short")
    if version != VERSION or zero:
        raise FrameError(f"frame: format version {version}, this is version {VERSION}")
    start = available - _FOOTER - body_bytes
    if start < 0:
        raise FrameError(f"frame: trailer of {body_bytes} bytes, {available} bytes are there", kind="short")
    covered = bytes(view[start : available - _FRAME_SUM - _TRAILER_SUM])
    if xxhash.xxh3_64_digest(covered) != stored:
        raise FrameError("frame: checksum of the trailer differs")
    fields = _read_body(covered, body_bytes)
    if nbytes != frame_bytes(fields[5], len(fields[3]), fields[4]):
        raise FrameError(f"frame: {nbytes} bytes for a payload of {fields[5]}")
    return nbytes, fields


def _read_body(body: bytes, size: int) -> Fields:
    """Read the first `size` bytes of `body`."""
    if size < _BODY.size:
        raise FrameError(f"frame: trailer of {size} bytes")
    (namespace, digest, parent, shard, pages, payload_bytes, raw_bytes, prefixes, has_parent, codec_bytes, zero) = (
        _BODY.unpack_from(body)
    )
    first = _BODY.size + codec_bytes
    if size != first + prefixes * DIGEST_BYTES or has_parent > 1 or zero:
        raise FrameError(f"frame: trailer of {size} bytes with {prefixes} prefixes")
    codec = body[_BODY.size : first].decode("latin-1")
    _check_numbers(pages, prefixes, codec, payload_bytes, raw_bytes)
    return (
        ChunkKey(namespace, shard, digest),
        parent if has_parent else b"",
        pages,
        _digests(prefixes).unpack_from(body, first),
        codec,
        payload_bytes,
        raw_bytes,
    )


@lru_cache(maxsize=64)
def _digests(count: int) -> struct.Struct:
    return struct.Struct("32s" * count)


def _check_numbers(pages: int, prefixes: int, codec: str, payload_bytes: int, raw_bytes: int) -> None:
    if not 1 <= pages < _U32 or prefixes not in (0, pages - 1):
        raise FrameError(f"frame: {prefixes} page prefixes for {pages} pages")
    if not codec.isascii() or not 0 < len(codec) <= MAX_CODEC_NAME:
        raise FrameError("frame: the codec's name must be 1 to 255 ASCII characters")
    if not 0 <= payload_bytes < _U63 or not 0 <= raw_bytes < _U63:
        raise FrameError(f"frame: payload of {payload_bytes} bytes, {raw_bytes} decoded")


def _check_digests(trailer: Trailer) -> None:
    key = trailer.key
    if len(key.namespace) != NAMESPACE_BYTES or len(key.digest) != DIGEST_BYTES or not 0 <= key.shard < _U32:
        raise FrameError(f"frame: impossible key {key}")
    if len(trailer.parent) not in (0, DIGEST_BYTES) or any(len(each) != DIGEST_BYTES for each in trailer.prefixes):
        raise FrameError("frame: a digest has 32 bytes")


def _checksum(covered: memoryview) -> bytes:
    # The streaming object, not the one-shot function: it releases the GIL for large buffers in every xxhash release.
    state = xxhash.xxh3_128()
    state.update(covered)
    return state.digest()
