"""A table from digests to small numbers: tens of millions of rows, asked and changed by whole batches.

Open addressing in *segments* of 4096 rows. The upper bits of a digest's hash choose the segment (by an index that is
doubled as needed: extendible hashing), further bits a bucket of 8 rows in it; a full bucket flows over into the next.
A full segment is split in two, or rebuilt where most of its rows are dead; two that are nearly empty become one.
So the table grows and shrinks by steps of a millisecond, and never has to be there twice.

A row is 36 bytes: the hash, three quarters of the digest, the number. The hash is a sum of the digest's four words,
each times a secret odd or even number of this table, and is one to one in the first word: with the other three it says
what the whole digest says. So all 32 bytes are compared, and nobody can choose digests that fall into one bucket.
"""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from lmkv.types import DIGEST_BYTES

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Hashes = NDArray[np.uint64]
    Numbers = NDArray[np.uint32]
    Rows = NDArray[np.int64]

BUCKET: Final = 8
"""Rows of a bucket: their hashes fill a cache line."""
BUCKETS: Final = 512
SEGMENT: Final = BUCKET * BUCKETS
BATCH: Final = SEGMENT // 2
"""Digests, at most, that may be given to `rows` at once."""
FULL: Final = SEGMENT * 4 // 5
"""Rows in use, dead ones included, above which a segment is split or rebuilt."""
_SPARSE: Final = SEGMENT * 31 // 100
"""Living rows below which a segment is joined with its other half, if one segment has room for both."""
_ROOM: Final = SEGMENT * 3 // 5
"""Living rows up to which a full segment is rebuilt rather than split."""
_STEP: Final = 64
"""The memory grows by such a part of itself."""
_BUCKET_SHIFT: Final = np.uint64(20)  # 9 bits from there; the index may take up to the 32 highest
_WORD: Final = np.dtype("<u8")


class Keys(NamedTuple):
    """Digests as the table compares them."""

    hashes: Hashes
    rest: NDArray[np.uint64]
    """`(n, 3)`."""

    def take(self, which: NDArray[np.integer]) -> Keys:
        """Some of them."""
        return Keys(self.hashes[which], self.rest[which])


class DigestTable:
    """Digest → number from 1 on; 0: not there. One thread.

    Attributes:
        entries: digests with a number.
    """

    def __init__(self) -> None:
        self.entries = 0
        self._factors = [np.uint64(secrets.randbits(64) | (not i)) for i in range(5)]
        self._hashes = np.zeros(SEGMENT, np.uint64)  # 0: a row that was never used
        self._rest = np.zeros((SEGMENT, 3), np.uint64)
        self._numbers = np.zeros(SEGMENT, np.uint32)  # 0: a dead row, if it was ever used
        self._index = np.zeros(2, np.int64)
        self._bits = 1
        # Of each segment:
        self._depth = [0]  # bits of the hash that all its rows share
        self._prefix = [0]  # these bits
        self._used = np.zeros(1, np.int64)
        self._living = np.zeros(1, np.int64)
        self._swept = np.zeros(1, np.int64)

    @property
    def nbytes(self) -> int:
        """Of memory."""
        arrays = self._hashes, self._rest, self._numbers, self._index, self._used, self._living, self._swept
        return sum(array.nbytes for array in arrays) + 80 * len(self._depth)

    @property
    def segments(self) -> int:
        """How many there are."""
        return len(self._depth)

    def keys(self, digests: bytes | memoryview) -> Keys:
        """Digests, 32 bytes each, for the other methods of this table."""
        words = np.frombuffer(digests, _WORD).reshape(-1, DIGEST_BYTES // 8)
        hashes = np.full(len(words), self._factors[4], np.uint64)
        for i in range(4):
            hashes += words[:, i] * self._factors[i]
        # 0 says that a row is free. One digest in 2**64 is so moved beside another that shares its last 24 bytes.
        np.maximum(hashes, np.uint64(1), out=hashes)
        return Keys(hashes, words[:, 1:])

    def get(self, keys: Keys) -> Numbers:
        """Their numbers."""
        rows = self._find(keys)
        numbers = self._numbers[rows]  # of one that is not there: a row from the end, whichever
        numbers[rows < 0] = 0
        return numbers

    def rows(self, keys: Keys) -> Rows:
        """The row of each, made where there is none: dead until it is given a number. At most `BATCH` keys."""
        rows = self._find(keys)
        missing = np.flatnonzero(rows < 0)
        while missing.size and self._make_room(keys.hashes[missing]):
            rows = self._find(keys)  # they have moved, and dead ones are gone
            missing = np.flatnonzero(rows < 0)
        while missing.size:
            # Several may be about to take the same row: the last to say so gets it, the others look again.
            free, claims = ~rows[missing], np.arange(missing.size, dtype=np.uint32)
            self._numbers[free] = claims
            first = self._numbers[free] == claims
            winners, free = missing[first], free[first]
            self._put(free, keys.take(winners), np.uint32(0))
            np.add.at(self._used, free // SEGMENT, 1)
            rows[winners] = free
            missing = missing[~first]
            if missing.size:
                rows[missing] = self._find(keys.take(missing))
                missing = missing[rows[missing] < 0]
        return rows

    def read(self, rows: Rows) -> Numbers:
        """Numbers of rows."""
        return self._numbers[rows]

    def write(self, rows: Rows, numbers: Numbers) -> None:
        """Give rows, each named once, other numbers; with 0 they die. Rows that were got before are void then."""
        change = (numbers != 0).astype(np.int64) - (self._numbers[rows] != 0)
        self._numbers[rows] = numbers
        segments = rows // SEGMENT
        np.add.at(self._living, segments, change)
        self.entries += int(change.sum())
        lost = segments[change < 0]
        if lost.size:
            self._join_sparse(np.unique(lost[self._living[lost] < _SPARSE]))

    def sweep(self, numbers: Numbers, mark: int, most: int) -> bool:
        """Put `numbers[n]` in place of each number n, in at most `most` segments; True when all are done.

        A segment is done once for each `mark`; marks rise.
        """
        todo = np.flatnonzero(self._swept < mark)[:most]
        for segment in todo:
            part = self._slice(int(segment))
            self._numbers[part] = numbers[self._numbers[part]]
            living = int(np.count_nonzero(self._numbers[part]))
            self.entries += living - int(self._living[segment])
            self._living[segment] = living
            self._swept[segment] = mark
        self._join_sparse(todo[self._living[todo] < _SPARSE])
        return not (self._swept < mark).any()

    def _segments(self, hashes: Hashes) -> Rows:
        return self._index[(hashes >> np.uint64(64 - self._bits)).astype(np.int64)]

    def _find(self, keys: Keys) -> Rows:
        """Row of each; of one that is not there ~r, where r is the row it would get."""
        starts, buckets = self._segments(keys.hashes) * BUCKETS, _home(keys.hashes)
        rows, left = self._look(keys, starts + buckets)
        while left.size:
            buckets[left] = (buckets[left] + 1) % BUCKETS
            rows[left], further = self._look(keys.take(left), starts[left] + buckets[left])
            left = left[further]
        return rows

    def _look(self, keys: Keys, at: Rows) -> tuple[Rows, Rows]:
        """As `_find`, in one bucket for each; and those that may be in the next, for theirs is full of others."""
        seen = self._hashes.reshape(-1, BUCKET).take(at, axis=0)
        which, column = (seen == keys.hashes[:, None]).nonzero()
        candidates = at[which] * BUCKET + column
        same = (self._rest.take(candidates, axis=0) == keys.rest[which]).all(axis=1)
        # Buckets fill from the left.
        rows = ~(at * BUCKET + (seen != 0).sum(axis=1))
        rows[which[same]] = candidates[same]
        return rows, ((rows < 0) & (seen[:, -1] != 0)).nonzero()[0]

    def _make_room(self, hashes: Hashes) -> bool:
        """Split and rebuild segments until those keys fit in; True if rows have moved."""
        moved = False
        if (self._used[self._segments(hashes)] + len(hashes) <= FULL).all():
            return moved
        while True:
            coming = np.bincount(self._segments(hashes), minlength=len(self._used))
            over = np.flatnonzero(self._used + coming > FULL)
            if not over.size:
                return moved
            moved = True
            for segment in over:
                if self._living[segment] + coming[segment] <= _ROOM:
                    self._fill(int(segment), *self._alive(int(segment)))
                else:
                    self._split(int(segment))

    def _split(self, segment: int) -> None:
        """Move half of a segment's rows into a new one."""
        depth, prefix = self._depth[segment], self._prefix[segment]
        if depth == self._bits:
            self._index = np.repeat(self._index, 2)
            self._bits += 1
        other = len(self._depth)
        self._depth[segment] = depth + 1
        self._prefix[segment] = 2 * prefix
        self._depth.append(depth + 1)
        self._prefix.append(2 * prefix + 1)
        self._resize()
        self._swept[other] = self._swept[segment]
        self._point(other)
        keys, numbers = self._alive(segment)
        upper = (keys.hashes >> np.uint64(63 - depth)) & np.uint64(1) != 0
        self._fill(segment, keys.take(~upper), numbers[~upper])
        self._fill(other, keys.take(upper), numbers[upper])

    def _join_sparse(self, segments: Rows) -> None:
        # From the last on: joining moves only segments behind the joined ones.
        for segment in segments[::-1].tolist():
            if segment < len(self._depth) and self._living[segment] < _SPARSE and self._depth[segment]:
                self._join(segment)

    def _join(self, segment: int) -> None:
        """Join a segment with its other half, if that is not split further and one has room for both."""
        depth, prefix = self._depth[segment], self._prefix[segment]
        other = int(self._index[(prefix ^ 1) << (self._bits - depth)])
        if self._depth[other] != depth or self._living[segment] + self._living[other] > _ROOM:
            return
        segment, other = min(segment, other), max(segment, other)
        mine, others = self._alive(segment), self._alive(other)
        keys = Keys(*map(np.concatenate, zip(mine[0], others[0], strict=True)))
        self._depth[segment], self._prefix[segment] = depth - 1, prefix >> 1
        self._swept[segment] = min(self._swept[segment], self._swept[other])
        self._point(segment)
        self._fill(segment, keys, np.concatenate([mine[1], others[1]]))
        self._close_gap(other)

    def _close_gap(self, segment: int) -> None:
        """Put the last segment in the place of one that is empty now."""
        last = len(self._depth) - 1
        if segment != last:
            for array in (self._hashes, self._rest, self._numbers):
                array[self._slice(segment)] = array[self._slice(last)]
            for each in (self._depth, self._prefix, self._used, self._living, self._swept):
                each[segment] = each[last]
            self._point(segment)
        del self._depth[last], self._prefix[last]
        self._resize()

    def _alive(self, segment: int) -> tuple[Keys, Numbers]:
        """Copies of the living rows."""
        part = self._slice(segment)
        living = self._numbers[part] != 0
        return Keys(self._hashes[part][living], self._rest[part][living]), self._numbers[part][living]

    def _fill(self, segment: int, keys: Keys, numbers: Numbers) -> None:
        """Write a segment anew with these rows."""
        part = self._slice(segment)
        self._hashes[part] = 0
        self._numbers[part] = 0
        self._used[segment] = self._living[segment] = len(numbers)
        homes = _home(keys.hashes)
        order = np.argsort(homes, kind="stable")
        # Each in turn goes to the first row of its bucket, or behind the one before if that is further.
        count = np.arange(len(order))
        rows = np.maximum.accumulate(homes[order] * BUCKET - count) + count
        wrapped = order[rows >= SEGMENT]
        placed = order[: len(order) - len(wrapped)]
        self._put(segment * SEGMENT + rows[: len(placed)], keys.take(placed), numbers[placed])
        for one in wrapped:  # past the end: a few, if any, which begin again at the first bucket
            key = keys.take(np.array([one]))
            self._put(~self._find(key), key, numbers[one : one + 1])

    def _put(self, rows: Rows, keys: Keys, numbers: Numbers | np.uint32) -> None:
        self._hashes[rows], self._rest[rows], self._numbers[rows] = keys.hashes, keys.rest, numbers

    def _point(self, segment: int) -> None:
        """Let the index lead to a segment."""
        shift = self._bits - self._depth[segment]
        first = self._prefix[segment] << shift
        self._index[first : first + (1 << shift)] = segment

    def _slice(self, segment: int) -> slice:
        return slice(segment * SEGMENT, (segment + 1) * SEGMENT)

    def _resize(self) -> None:
        """Memory for the segments that there are, and some more."""
        count = len(self._depth)
        for name in ("_used", "_living", "_swept"):
            array = getattr(self, name)
            setattr(self, name, np.concatenate([array[:count], np.zeros(max(0, count - len(array)), np.int64)]))
        there, step = len(self._numbers) // SEGMENT, max(1, count // _STEP)
        if there < count or there > count + 2 * step:
            # In place: the allocator moves pages, not bytes. Nothing else looks into these arrays now.
            for array, shape in ((self._hashes, ()), (self._rest, (3,)), (self._numbers, ())):
                array.resize(((count + step) * SEGMENT, *shape), refcheck=False)


def distinct(rows: Rows) -> tuple[Rows, Rows]:
    """Each once, in order, and where in that each is. A third of the time of `np.unique`."""
    once = np.sort(rows)
    first = np.ones(len(once), bool)
    np.not_equal(once[1:], once[:-1], out=first[1:])
    once = once[first]
    return once, once.searchsorted(rows)


def _home(hashes: Hashes) -> Rows:
    return ((hashes >> _BUCKET_SHIFT) & np.uint64(BUCKETS - 1)).astype(np.int64)
