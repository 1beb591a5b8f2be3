"""Keys, payloads and memory objects for tests: the same ones for the same numbers."""

from __future__ import annotations

import ctypes
import hashlib
import random
from typing import Final

from lmkv.memory import MemoryObject
from lmkv.types import ALIGNMENT, NAMESPACE_BYTES, ChunkKey

NAMESPACE: Final = bytes(range(NAMESPACE_BYTES))
OTHER_NAMESPACE: Final = bytes(range(1, NAMESPACE_BYTES + 1))


def make_key(number: int, *, namespace: bytes = NAMESPACE, shard: int = 0) -> ChunkKey:
    """The key of test frame `number`; looks as random as real ones."""
    return ChunkKey(namespace, shard, hashlib.sha256(number.to_bytes(8, "little")).digest())


def make_payload(number: int, nbytes: int) -> bytes:
    """Bytes that differ between numbers and don't compress."""
    return random.Random(number).randbytes(nbytes)  # noqa: S311  test data


def make_memory(content: bytes | int, *, misaligned_by: int = 0) -> MemoryObject:
    """A memory object with this content, or of this many zero bytes.

    Its first byte lies `misaligned_by` bytes behind a 4 KiB boundary. The bytes around it are 0xA5: see `guard_bytes`.
    """
    nbytes = content if isinstance(content, int) else len(content)
    buffer = bytearray(b"\xa5" * (nbytes + 3 * ALIGNMENT))
    address = ctypes.addressof(ctypes.c_char.from_buffer(buffer))
    start = ALIGNMENT + -address % ALIGNMENT + misaligned_by
    view = memoryview(buffer)[start : start + nbytes]
    view[:] = bytes(nbytes) if isinstance(content, int) else content
    return MemoryObject.over(view)


def guard_bytes(memory: MemoryObject) -> bytes:
    """The bytes around an object from `make_memory`; all of them 0xA5 unless somebody wrote outside the object."""
    buffer = memory.view.obj
    if not isinstance(buffer, bytearray):
        raise TypeError("not an object from make_memory")
    base = ctypes.addressof(ctypes.c_char.from_buffer(buffer))
    start = ctypes.addressof(ctypes.c_char.from_buffer(memory.view)) - base if memory.nbytes else 0
    return bytes(buffer[:start] + buffer[start + memory.nbytes :])
