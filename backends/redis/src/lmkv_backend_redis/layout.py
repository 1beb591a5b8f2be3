"""How a frame lies in the store: one hash per frame, so that it comes, expires and is evicted as one.

    <prefix>:f:{<namespace>/<shard>/<digest>}            h: the head, 0 … n-1: the parts
    <prefix>:t:{<namespace>/<shard>/<digest>}:<random>   the same while it is being written; then renamed
    <prefix>:n:<namespace>                               what the namespace stands for, JSON

What is in braces decides the slot of a cluster, so a frame and its temporary name are neighbours. All but the prefix
is hexadecimal. The head is text: ``1 <generation> <bytes of the frame> <bytes of a part>``; the last part may be
shorter. A generation is 16 random hexadecimal digits: who reads the same head before and after the parts has read
parts of one writer.
"""

from __future__ import annotations

import os
from binascii import hexlify
from functools import lru_cache
from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Sequence

    from lmkv.types import ChunkKey

HEAD: Final = b"h"
PARTS_MAX: Final = 1 << 12
"""Parts of one frame, so that a wrong number in a head costs little."""
SLACK: Final = 64
"""Bytes by which a part is smaller than `part_bytes`: with the server's own header and terminator it just fills one of
the allocator's size classes (powers of two among them), where a few bytes more would take the next, 25 % larger."""
_DIGITS: Final = 16
_SIZES: Final = 2 + _DIGITS + 1
"""Where the sizes begin."""


class Head(NamedTuple):
    """What a frame's head says."""

    generation: bytes
    nbytes: int
    stride: int
    """Bytes of every part but the last."""

    @property
    def parts(self) -> int:
        """Number of parts."""
        return max(1, -(-self.nbytes // self.stride))

    def size(self, part: int) -> int:
        """Bytes of one part."""
        return min(self.stride, self.nbytes - part * self.stride)

    def pack(self) -> bytes:
        """As it is stored."""
        return b"1 %s %d %d" % (self.generation, self.nbytes, self.stride)


def new_head(nbytes: int, part_bytes: int) -> Head:
    """The head of a frame that is about to be written."""
    return Head(os.urandom(_DIGITS // 2).hex().encode(), nbytes, stride(part_bytes))


def stride(part_bytes: int) -> int:
    """Bytes of a frame in one part."""
    return part_bytes - SLACK


def parse_head(data: object) -> Head | None:
    """None for what is no head of ours; nothing is believed that does not fit together."""
    if not isinstance(data, bytes) or data[:2] != b"1 " or data[_SIZES - 1 : _SIZES] != b" ":
        return None
    sizes = _sizes(data[_SIZES:])
    return None if sizes is None else Head(data[2 : _SIZES - 1], *sizes)


def whole(heads: Sequence[object], fields: Sequence[object]) -> list[bool]:
    """Which frames have all their parts: of each its head and the number of its fields."""
    return [
        isinstance(head, bytes) and head[:2] == b"1 " and _fields(head[_SIZES - 1 :]) == number
        for head, number in zip(heads, fields, strict=True)
    ]


@lru_cache(maxsize=64)
def _fields(rest: bytes) -> int:
    """Of a whole frame, by its head from the blank before the sizes on: head and parts; 0 for what makes no sense."""
    found = _sizes(rest[1:]) if rest[:1] == b" " else None
    return 0 if found is None else Head(b"", *found).parts + 1


@lru_cache(maxsize=64)  # frames have few sizes
def _sizes(data: bytes) -> tuple[int, int] | None:
    numbers = data.split(b" ")
    if len(numbers) != 2 or not all(each.isdigit() and len(each) <= _DIGITS for each in numbers):  # noqa: PLR2004
        return None
    nbytes, step = map(int, numbers)
    return None if step < 1 or nbytes < 1 or -(-nbytes // step) > PARTS_MAX else (nbytes, step)


@lru_cache(maxsize=256)  # a look-up asks for hundreds of one namespace
def _stem(prefix: str, namespace: bytes, shard: int) -> bytes:
    """What the names of all its frames begin with."""
    return f"{prefix}:f:{{{namespace.hex()}/{shard:x}/".encode()


class Names:
    """Keys of one prefix."""

    def __init__(self, prefix: str) -> None:
        self._prefix = prefix

    def frame(self, key: ChunkKey) -> bytes:
        """Of a frame."""
        return self.frames([key])[0]

    def frames(self, keys: Sequence[ChunkKey]) -> list[bytes]:
        """Of many frames."""
        prefix = self._prefix
        return [_stem(prefix, space, shard) + hexlify(digest) + b"}" for space, shard, digest in keys]

    def trial(self) -> bytes:
        """Of a frame that nobody asks for, to try what the store lets us do."""
        return f"{self._prefix}:f:{{check/{os.urandom(8).hex()}}}".encode()

    def namespace(self, namespace: bytes) -> bytes:
        """Of the description of a namespace."""
        return f"{self._prefix}:n:{namespace.hex()}".encode()

    def patterns(self, namespace: bytes | None) -> tuple[str, ...]:
        """Of everything that `clear` removes."""
        inside = "" if namespace is None else f"{namespace.hex()}/"
        return tuple(f"{self._prefix}:{kind}:{{{inside}*" for kind in "ft")


def temporary(frame: bytes, head: Head) -> bytes:
    """The name under which a frame is written before it is renamed to `frame`."""
    prefix, _, rest = frame.partition(b":f:")
    return b"%s:t:%s:%s" % (prefix, rest, head.generation)
