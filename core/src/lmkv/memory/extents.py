"""Which parts of an arena are free: best fit over extents that merge with their neighbours when they are given back."""

from __future__ import annotations

from bisect import bisect_left, insort
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator


class Extents:
    """Free extents of `[0, nbytes)`. Not thread-safe: the pool calls it under its lock.

    All offsets and lengths are bytes; callers round, so whatever unit they keep to stays aligned. With one frame size,
    `take` and `give` are a few dict operations, whatever the number of extents: a free extent of exactly that size is
    taken first, the one given back last (still in the caches) before others. With mixed sizes a binary search over the
    *distinct* free lengths is added; n frames of one size have at most √(2n) of those.
    """

    __slots__ = ("_bins", "_end_to_start", "_sizes", "_start_to_length", "free_bytes", "nbytes")

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self.free_bytes = 0
        self._start_to_length: dict[int, int] = {}
        self._end_to_start: dict[int, int] = {}
        self._bins: dict[int, dict[int, None]] = {}  # length → starts; a dict is a set that pops its newest member
        self._sizes: list[int] = []  # the lengths that have a bin, ascending
        if nbytes > 0:
            self._insert(0, nbytes)
            self.free_bytes = nbytes

    @property
    def largest(self) -> int:
        """Length of the largest free extent, 0 when nothing is free."""
        return self._sizes[-1] if self._sizes else 0

    def __iter__(self) -> Iterator[tuple[int, int]]:
        """`(start, length)` of every free extent, ascending by start."""
        return iter(sorted(self._start_to_length.items()))

    def take(self, length: int) -> int:
        """Take `length` bytes (> 0) out of the smallest extent that holds them; its start, or -1."""
        starts = self._bins.get(length)
        if starts is not None:  # exact fit
            start, _ = starts.popitem()
            if not starts:
                self._drop_bin(length)
            del self._start_to_length[start]
            del self._end_to_start[start + length]
            self.free_bytes -= length
            return start
        i = bisect_left(self._sizes, length)
        if i == len(self._sizes):
            return -1
        found = self._sizes[i]
        starts = self._bins[found]
        start, _ = starts.popitem()
        if not starts:
            del self._bins[found]
            del self._sizes[i]
        del self._start_to_length[start]
        self._insert(start + length, found - length)
        self.free_bytes -= length
        return start

    def take_run(self, length: int, most: int) -> tuple[int, int]:
        """As `take`, up to `most` (> 0) times as far as they come to lie in a row: where the first starts, how many.

        None is ``(-1, 0)``. They get the same places as if they were taken one by one.
        """
        if length not in self._bins:  # so they are cut off the front of one extent
            i = bisect_left(self._sizes, length)
            if i < len(self._sizes):
                most = min(most, self._sizes[i] // length)
                return self.take(most * length), most
        start = self.take(length)
        return start, int(start >= 0)

    def give(self, start: int, length: int) -> None:
        """Give back what `take` gave, and merge it with free neighbours."""
        self.free_bytes += length
        end = start + length
        before = self._end_to_start.get(start)
        if before is not None:
            self._remove(before, start - before)
            start = before
        after = self._start_to_length.get(end)
        if after is not None:
            self._remove(end, after)
            end += after
        self._insert(start, end - start)

    def _insert(self, start: int, length: int) -> None:
        self._end_to_start[start + length] = start
        bin_ = self._bins.get(length)
        if bin_ is None:
            self._bins[length] = {start: None}
            insort(self._sizes, length)
        else:
            bin_[start] = None
        self._start_to_length[start] = length

    def _remove(self, start: int, length: int) -> None:
        del self._start_to_length[start]
        del self._end_to_start[start + length]
        starts = self._bins[length]
        del starts[start]
        if not starts:
            self._drop_bin(length)

    def _drop_bin(self, length: int) -> None:
        del self._bins[length]
        del self._sizes[bisect_left(self._sizes, length)]
