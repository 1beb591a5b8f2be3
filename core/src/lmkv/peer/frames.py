"""Frames that are to be pushed, and in what portions."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple, TypeVar

from lmkv.peer.messages import MAX_FRAMES, MAX_PREFIXES

if TYPE_CHECKING:
    from collections.abc import Sequence
    from concurrent.futures import Future

    from lmkv.memory import MemoryObject
    from lmkv.types import ChunkKey

BATCH_BYTES: Final = 16 << 20
"""Of frames, about, in one `Reserve`: some are verified there while others are written."""


Item = TypeVar("Item")


class Frame(NamedTuple):
    """One frame of the own pool that is to be pushed; the caller keeps its memory until push and sealing have ended."""

    key: ChunkKey
    parent: bytes
    pages: int
    prefixes: bytes
    object: MemoryObject
    payload: int = 0
    """Bytes in front that are final while it is being sealed."""
    sealed: Future[None] | None = None
    """Done when it is sealed; None: it is."""


def batches(frames: Sequence[Frame]) -> list[list[int]]:
    """Indices of frames that go into one `Reserve` each: of one namespace and shard, not too many."""
    batches: list[list[int]] = []
    filling: dict[tuple[bytes, int], tuple[list[int], int, int]] = {}
    for i, frame in enumerate(frames):
        of = (frame.key.namespace, frame.key.shard)
        batch, heads, nbytes = filling.get(of, ([], 0, 0))
        heads += len(frame.prefixes)
        if not batch or len(batch) >= MAX_FRAMES or heads > MAX_PREFIXES or nbytes >= BATCH_BYTES:
            batch, heads, nbytes = [], len(frame.prefixes), 0
            batches.append(batch)
        batch.append(i)
        filling[of] = (batch, heads, nbytes + frame.object.nbytes)
    return batches


def portions(items: Sequence[Item], most: int) -> list[Sequence[Item]]:
    """`items` in order, in runs of at most `most`; of none there is one empty run."""
    return [items[at : at + most] for at in range(0, len(items) or 1, most)]
