"""Sets of places as small numbers: millions of chunks lie in few different sets of places."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Final

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

    from lmkv.controller.digest_table import Numbers

SET_BYTES: Final = 300
"""Of memory that a set takes, about: a tuple of some places, its entry in a dictionary, its two list entries."""
_SLICE: Final = 4096


class PlaceSets:
    """Numbers for sets of places; 0 is the empty one. One thread.

    A place is a number that is given out once. Rows of tables hold numbers of sets; this counts them, and a set without
    a row gives its number back. To take places that have gone out of all rows takes a *purge*: `begin`, then all that
    `cleaning` yields, then every row gets the number that `mapping` has for its own, then `finish`. In between
    everything else goes on, and what it makes is clean.

    Attributes:
        content: number → places, ascending; those that have gone may still be among them.
        gone: places that are to be taken out.
    """

    def __init__(self) -> None:
        self.content: list[tuple[int, ...]] = [()]
        self.gone: set[int] = set()
        self._numbers: dict[tuple[int, ...], int] = {(): 0}
        self._rows = [0]
        self._free: list[int] = []
        self._idle: set[int] = set()
        self._purged: frozenset[int] = frozenset()
        self._mapping: list[int] | None = None  # while there is one, no number is given back

    def __len__(self) -> int:
        """Sets that have a number."""
        return len(self._numbers)

    def changed(self, before: Numbers, add: Collection[int] = (), drop: Collection[int] = ()) -> Numbers:
        """The sets of rows that were in the sets `before`, once `drop` was taken out and `add` put in."""
        numbers = before.tolist()
        out = self.gone.union(drop)
        after = {}
        for number, count in Counter(numbers).items():
            other = after[number] = self._number(tuple(sorted({*self.content[number]} - out | {*add})))
            self._rows[number] -= count
            self._rows[other] += count
            self._idle.add(number)
        self._let_go()
        return np.array([after[number] for number in numbers], np.uint32)

    def begin(self) -> None:
        """Begin a purge of the places that have gone until now."""
        self._purged = frozenset(self.gone)
        self._mapping = list(range(len(self.content)))

    def cleaning(self) -> Iterator[None]:
        """Find what the sets become, in slices."""
        assert self._mapping is not None
        for number in range(len(self._mapping)):
            places = self.content[number]
            if not self._purged.isdisjoint(places):
                self._mapping[number] = self._number(tuple(place for place in places if place not in self.gone))
            if number % _SLICE == _SLICE - 1:
                yield

    def mapping(self) -> Numbers:
        """Number → number of the set without the places of this purge, for all numbers that there are now."""
        assert self._mapping is not None
        # Those that came since are clean.
        self._mapping.extend(range(len(self._mapping), len(self.content)))
        return np.array(self._mapping, np.uint32)

    def finish(self) -> None:
        """No row holds a set any more with a place of this purge in it."""
        assert self._mapping is not None
        for number, other in enumerate(self._mapping):
            if number != other:
                self._rows[other] += self._rows[number]
                self._rows[number] = 0
                self._idle |= {number, other}
        self.gone -= self._purged
        self._mapping = None
        self._let_go()

    def _number(self, places: tuple[int, ...]) -> int:
        number = self._numbers.get(places)
        if number is None:
            if self._free:
                number = self._free.pop()
                self.content[number] = places
            else:
                number = len(self.content)
                self.content.append(places)
                self._rows.append(0)
            self._numbers[places] = number
            self._idle.add(number)
        return number

    def _let_go(self) -> None:
        if self._mapping is not None:
            return
        for number in self._idle:
            if number and not self._rows[number]:
                del self._numbers[self.content[number]]
                self.content[number] = ()
                self._free.append(number)
        self._idle.clear()
