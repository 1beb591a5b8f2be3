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
_TRAILER_SUM: Final = 8
_FRAME_SUM: Final = 16
_SUMS: Final = _TRAILER_SUM + _FRAME_SUM
_FOOTER: Final = _HEAD.size + _SUMS
# Body: namespace, digest, parent, shard, pages, payload bytes, raw bytes, prefixes, has parent, codec bytes, zero.
_BODY: Final = struct.Struct("<16s32s32sIIQQIBBH")
_DIGESTS: Final = struct.Struct("<16s32s32s")
_NUMBERS_STRUCT: Final = struct.Struct("<IIQQIBBH")
_NUMBERS: Final = _BODY.size - _NUMBERS_STRUCT.size
_CODEC_BYTES: Final = _BODY.size - 3
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


Link: TypeAlias = tuple[bytes, int, bytes, int]
"""What an index needs to know of a frame besides its key: parent, pages, page prefixes one behind the other, and the
bytes that the frame has when it is identity-coded."""


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
    return Arrival(view).verify(len(view), key)


class Arrival:
    """A frame on its way into memory: what has landed is summed up while the processor's caches have it.

    A checksum over bytes that are in a cache is some four times as fast as one that fetches them from memory. Not
    thread-safe: calls for one frame come one after the other.

    Args:
        view: where the frame is put, from its first byte on; may be longer than the frame.
    """

    __slots__ = ("_done", "_sum", "_view")

    def __init__(self, view: memoryview) -> None:
        self._view = view
        self._done = 0
        # The streaming object, not the one-shot function: it releases the GIL for large buffers in every release.
        self._sum = xxhash.xxh3_128()

    def landed(self, nbytes: int) -> None:
        """The first `nbytes` bytes of the view are final. Never goes back; releases the GIL."""
        end = min(nbytes, len(self._view)) - _FRAME_SUM  # the frame may end here, and its checksum is not covered
        if end > self._done:
            self._sum.update(self._view[self._done : end])
            self._done = end

    def verify(self, nbytes: int, key: ChunkKey) -> Trailer:
        """`verify` of the first `nbytes` bytes of the view, of which those that have landed are not read again."""
        if self._done and self._done > nbytes - _FRAME_SUM:  # more was announced than came
            return verify(self._view[:nbytes], key)
        trailer = _whole(self._view[:nbytes], key)
        early = self._done
        self.landed(nbytes)
        if self._sum.digest() != self._view[nbytes - _FRAME_SUM : nbytes]:
            if early:  # unless what was said to be final has been put there anew
                return verify(self._view[:nbytes], key)
            raise FrameError("frame: checksum of payload and trailer differs")
        return trailer


def _whole(view: memoryview, key: ChunkKey) -> Trailer:
    """The trailer of the frame that `view` is, if it is the one of `key`; the payload is not looked at."""
    body, shape = _parse(view)
    trailer, nbytes = _trailer(body, shape), shape.nbytes
    if nbytes != len(view):
        raise FrameError(f"frame: {len(view)} bytes are there, {nbytes} were written")
    for name, stored, asked in (
        ("namespace", trailer.key.namespace.hex(), key.namespace.hex()),
        ("shard", trailer.key.shard, key.shard),
        ("digest", trailer.key.digest.hex(), key.digest.hex()),
    ):
        if stored != asked:
            raise FrameError(f"frame: it is of {name} {stored}, not {asked}")
    return trailer


def parse_trailer(tail: bytes | memoryview) -> Trailer:
    """The trailer of a frame of which `tail` is the end; verified by its own checksum, the payload is not looked at.

    Raises:
        FrameError: it is no intact trailer; of kind ``short`` when `tail` ends before its start and more is needed.
    """
    return _trailer(*_parse(tail))


def link(stored: StoredFrame) -> Link:
    """Where a frame that a scan found belongs, by its trailer; checked as `parse_trailer` does, and against the key.

    Makes nothing but what the index keeps: a start has 100 000 of them.

    Raises:
        FrameError: as `parse_trailer`, or the trailer is of another key, or of a frame of another length.
    """
    key, stored_bytes, trailer, _ = stored
    body, (shard, pages, _, _, _, has_parent, _, first, end, nbytes, raw_nbytes) = _parse(trailer)
    namespace, digest, parent = _DIGESTS.unpack_from(body)
    if key != (namespace, shard, digest) or nbytes != stored_bytes:
        raise FrameError(f"frame: the trailer under {key}, {stored_bytes} bytes, is another frame's")
    return parent if has_parent else b"", pages, body[first:end], raw_nbytes


def trailer_bytes(end: bytes | memoryview) -> int:
    """Length of the trailer that `end` ends with, by its footer alone; may exceed `end`. 0: `end` is no frame's."""
    if len(end) < _FOOTER:
        return 0
    magic, _, _, body_bytes, _ = _HEAD.unpack_from(end, len(end) - _FOOTER)
    return body_bytes + _FOOTER if magic == MAGIC else 0


class _Shape(NamedTuple):
    """All that a trailer says besides digests; most frames of a namespace have the same."""

    shard: int
    pages: int
    payload_bytes: int
    raw_bytes: int
    prefixes: int
    has_parent: bool
    codec: str
    first: int
    """Where the prefixes begin in the body."""
    end: int
    nbytes: int
    """Of the whole frame."""
    raw_nbytes: int
    """Of the whole frame when it is identity-coded."""


def _parse(view: bytes | memoryview) -> tuple[bytes, _Shape]:
    """The body of the trailer at the end of `view` (with the footer's head behind it), and what it means."""
    available = len(view)
    if available < _FOOTER + _BODY.size:
        raise FrameError(f"frame: {available} bytes are too few for a trailer")
    head = bytes(view[-_FOOTER:-_SUMS])
    body_bytes = _body_bytes(head)
    start = available - _FOOTER - body_bytes
    if start < 0:
        raise FrameError(f"frame: trailer of {body_bytes} bytes, {available} bytes are there", kind="short")
    body = bytes(view[start:-_SUMS])
    if xxhash.xxh3_64_digest(body) != view[-_SUMS:-_FRAME_SUM]:
        raise FrameError("frame: checksum of the trailer differs")
    return body, _shape(head, body[_NUMBERS : _BODY.size + body[_CODEC_BYTES]])


@lru_cache(maxsize=256)
def _body_bytes(head: bytes) -> int:
    """The body's length by the first part of the footer."""
    magic, version, zero, body_bytes, _ = _HEAD.unpack(head)
    if magic != MAGIC:
        raise FrameError("frame: no magic at the end: not a frame, or cut short")
    if version != VERSION or zero:
        raise FrameError(f"frame: format version {version}, this is version {VERSION}")
    if body_bytes < _BODY.size:
        raise FrameError(f"frame: trailer of {body_bytes} bytes")
    return int(body_bytes)


@lru_cache(maxsize=256)
def _shape(head: bytes, numbers: bytes) -> _Shape:
    """Read and check the first part of the footer, and what lies in the body between the digests."""
    _, _, _, body_bytes, nbytes = _HEAD.unpack(head)
    (shard, pages, payload_bytes, raw_bytes, prefixes, has_parent, codec_bytes, zero) = _NUMBERS_STRUCT.unpack_from(
        numbers
    )
    first = _BODY.size + codec_bytes
    if body_bytes != first + prefixes * DIGEST_BYTES or has_parent > 1 or zero:
        raise FrameError(f"frame: trailer of {body_bytes} bytes with {prefixes} prefixes")
    codec = numbers[_NUMBERS_STRUCT.size :].decode("latin-1")
    _check_numbers(pages, prefixes, codec, payload_bytes, raw_bytes)
    if nbytes != frame_bytes(payload_bytes, prefixes, codec):
        raise FrameError(f"frame: {nbytes} bytes for a payload of {payload_bytes}")
    return _Shape(
        shard, pages, payload_bytes, raw_bytes, prefixes, bool(has_parent), codec,
        first, body_bytes, nbytes, frame_bytes(raw_bytes, prefixes),
    )  # fmt: skip


def _trailer(body: bytes, shape: _Shape) -> Trailer:
    namespace, digest, parent = _DIGESTS.unpack_from(body)
    return Trailer(
        ChunkKey(namespace, shape.shard, digest),
        parent if shape.has_parent else b"",
        shape.pages,
        struct.unpack_from("32s" * shape.prefixes, body, shape.first),
        shape.codec,
        shape.payload_bytes,
        shape.raw_bytes,
    )


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
    state = xxhash.xxh3_128()  # streaming, as in `Arrival`
    state.update(covered)
    return state.digest()
