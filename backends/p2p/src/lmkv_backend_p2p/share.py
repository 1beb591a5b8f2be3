"""Which frames are read from which peer."""

from __future__ import annotations

import threading
from collections import Counter
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


class Shares:
    """Divides batches among peers. Thread-safe: knows what is under way from whom.

    A batch comes from as few peers as possible: what one has that has most of it, then the rest. Of those that have
    equally much, from the one that fewest bytes are under way from, then from the least busy. So the batches of a long
    prompt, several of which run at a time, come from all peers that have it.
    """

    def __init__(self) -> None:
        self._under_way: Counter[str] = Counter()
        self._lock = threading.Lock()

    def begin(
        self, wanted: Sequence[int], nbytes: Sequence[int], where: Mapping[int, Mapping[str, float]]
    ) -> dict[str, list[int]]:
        """Peer → the frames to read from it; they count as under way until `end`.

        Args:
            wanted: numbers of frames.
            nbytes: of each frame, by its number.
            where: for each of them, who has it and how busy that peer is. Frames that nobody has are left out.
        """
        found: dict[str, list[int]] = {}
        left = [i for i in wanted if where[i]]
        with self._lock:
            while left:
                chosen = self._best(left, where)
                found[chosen] = [i for i in left if chosen in where[i]]
                self._under_way[chosen] += sum(nbytes[i] for i in found[chosen])
                left = [i for i in left if chosen not in where[i]]
        return found

    def _best(self, left: Sequence[int], where: Mapping[int, Mapping[str, float]]) -> str:
        has: Counter[str] = Counter()
        busy: dict[str, float] = {}
        for i in left:
            has.update(where[i].keys())
            busy.update(where[i])
        return min(has, key=lambda address: (-has[address], self._under_way[address], busy[address], address))

    def end(self, plan: Mapping[str, Sequence[int]], nbytes: Sequence[int]) -> None:
        """What `begin` has given out has come, or will not."""
        with self._lock:
            for address, numbers in plan.items():
                self._under_way[address] -= sum(nbytes[i] for i in numbers)
                if self._under_way[address] <= 0:
                    del self._under_way[address]
