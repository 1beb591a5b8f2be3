"""Frames for measurements of a single tier: sealed, of noise, in a pool of their own."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from lmkv.frame import Trailer, frame_bytes, seal
from lmkv.memory import Pool
from lmkv.storage.coding import PutItem
from lmkv.types import ChunkKey

if TYPE_CHECKING:
    from lmkv.memory import MemoryObject


class Frames(NamedTuple):
    """What was made."""

    pool: Pool
    """With room for one frame more."""
    trailers: list[Trailer]
    objects: list[MemoryObject]

    def unsealed(self) -> list[PutItem]:
        """As they come from a client, without trailers."""
        for obj in self.objects:
            obj.sealed = False
        return [PutItem(t.key, o, t) for t, o in zip(self.trailers, self.objects, strict=True)]


def make_frames(number: int, payload: int, pages: int) -> Frames:
    """So many frames of `payload` bytes in `pages` pages, one after the other of one namespace."""
    prefixes = (bytes(32),) * (pages - 1)
    nbytes = frame_bytes(payload, pages - 1)
    made = Frames(Pool.create((number + 1) * nbytes, prefault=False), [], [])
    dice = np.random.default_rng(0)
    for i in range(number):
        key = ChunkKey(bytes(16), 0, bytes((i,)) * 32)
        trailer = Trailer(key, b"", pages, prefixes, "identity", payload, payload)
        room = made.pool.allocate(nbytes, "bench")
        assert room is not None
        np.frombuffer(room.view, np.uint8)[:] = dice.integers(0, 256, nbytes, np.uint8)
        seal(room.view, trailer)
        made.trailers.append(trailer)
        made.objects.append(room)
    return made
