"""Frames that a backend is reading, summed up as they land."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

from lmkv.frame import Arrival

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from lmkv.memory import MemoryObject


@contextmanager
def arriving(objects: Sequence[MemoryObject]) -> Iterator[list[Arrival]]:
    """An `Arrival` for each object, told by it what has landed for as long as the block lasts."""
    arrivals = [Arrival(obj.view) for obj in objects]
    for obj, arrival in zip(objects, arrivals, strict=True):
        obj.on_landed = arrival.landed
    try:
        yield arrivals
    finally:
        for obj in objects:
            obj.on_landed = None
