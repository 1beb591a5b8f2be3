"""The regions of a call, cut for those that carry them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lmkv.peer.transport import Region
from lmkv.types import ALIGNMENT

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence


def pieces(regions: Sequence[Region], most: int) -> Iterator[list[Region]]:
    """`regions` in lists of `most` bytes at most."""
    piece: list[Region] = []
    room = most
    for offset, nbytes in regions:
        at, end = offset, offset + nbytes
        while at < end:
            part = min(room, end - at)
            piece.append(Region(at, part))
            at += part
            room -= part
            if not room:
                yield piece
                piece, room = [], most
    if piece:
        yield piece


def shares(pairs: Sequence[tuple[Region, Region]], total: int, number: int) -> list[list[tuple[Region, Region]]]:
    """The pairs of a call in `number` lists of about equal bytes; long ones are cut."""
    quota = -(-total // number // ALIGNMENT) * ALIGNMENT
    shares: list[list[tuple[Region, Region]]] = [[]]
    room = quota
    for there, here in pairs:
        done = 0
        while done < here.nbytes:
            if not room:
                shares.append([])
                room = quota
            part = min(room, here.nbytes - done)
            shares[-1].append((Region(there.offset + done, part), Region(here.offset + done, part)))
            done += part
            room -= part
    return shares
