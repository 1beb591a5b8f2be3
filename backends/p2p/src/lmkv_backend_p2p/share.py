"""Which frames are read from which peer."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


def shares(
    wanted: Sequence[int], nbytes: Sequence[int], where: Mapping[int, Mapping[str, float]], split: int
) -> dict[str, list[int]]:
    """Peer → the frames to read from it.

    A batch of at most `split` bytes comes from as few peers as possible: first from the one that has most of it and, of
    those, is least busy. A larger one is spread over all that have it, each frame to whoever has fewest bytes to send.

    Args:
        wanted: numbers of frames.
        nbytes: of each frame, by its number.
        where: for each of them, who has it and how busy that peer is. Frames that nobody has are left out.
        split: bytes.
    """
    has: Counter[str] = Counter()
    busy: dict[str, float] = {}
    for i in wanted:
        for address, wait in where[i].items():
            has[address] += 1
            busy[address] = wait
    order = {address: n for n, address in enumerate(sorted(has, key=lambda a: (-has[a], busy[a], a)))}
    spread = sum(nbytes[i] for i in wanted) > split
    given: Counter[str] = Counter()
    found: dict[str, list[int]] = {}
    for i in wanted:
        if where[i]:
            chosen = min(where[i], key=lambda a: (given[a] if spread else 0, order[a]))
            given[chosen] += nbytes[i]
            found.setdefault(chosen, []).append(i)
    return found
