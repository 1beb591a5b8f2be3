"""Frames that are to be pushed, and in what portions."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Sequence

    from lmkv.memory import MemoryObject
    from lmkv.types import ChunkKey

BATCH_FRAMES: Final = 512
HEAD_BYTES: Final = 2 << 20
"""Of page prefixes in one `Reserve`."""
BATCH_BYTES: Final = 16 << 20
"""Of frames, about, in one `Reserve`: some are verified there while others are written."""


class Frame(NamedTuple):
    """One sealed frame of the own pool that is to be pushed; the caller keeps its memory until the push has ended."""

    key: ChunkKey
    parent: bytes
    pages: int
    prefixes: bytes
    object: MemoryObject


def batches(frames: Sequence[Frame]) -> list[list[int]]:
    """Indices of frames that go into one `Reserve` each: of one namespace and shard, not too many."""
    batches: list[list[int]] = []
    filling: dict[tuple[bytes, int], tuple[list[int], int, int]] = {}
    for i, frame in enumerate(frames):
        of = (frame.key.namespace, frame.key.shard)
        batch, heads, nbytes = filling.get(of, ([], 0, 0))
        heads += len(frame.prefixes)
        if not batch or len(batch) >= BATCH_FRAMES or heads > HEAD_BYTES or nbytes >= BATCH_BYTES:
            batch, heads, nbytes = [], len(frame.prefixes), 0
            batches.append(batch)
        batch.append(i)
        filling[of] = (batch, heads, nbytes + frame.object.nbytes)
    return batches
