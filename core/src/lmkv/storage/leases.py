"""Promises and holds: leases of look-ups, holds of workers that copy, reservations of workers that fill.

Each has one owner (a session), an expiry where it is a promise, and one idempotent way to end; counts cannot go
negative.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import secrets
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from lmkv.memory import MemoryObject
    from lmkv.storage.index import Entry


class Lease:
    """What a look-up found and promised: full chunks in order, then at most one frame of which only pages are used.

    Attributes:
        entries: None where the engine has let go of a chunk that it does not need.
        chunks: how many of `entries` are full chunks.
        expires: loop time.
        patience: seconds that its loads may be waited for in all, from the first time that somebody waits.
    """

    __slots__ = ("_copied", "_ended", "_over", "_until", "chunks", "entries", "expires", "number", "patience")

    def __init__(self, number: int, entries: list[Entry | None], expires: float) -> None:
        self.number = number
        self.entries = entries
        self.chunks = len(entries)
        self.expires = expires
        self.patience = math.inf
        self._until: float | None = None
        self._ended = False
        self._over: asyncio.Future[None] | None = None
        self._copied: dict[int, set[int]] = {}
        for entry in entries:
            if entry is not None:
                entry.hold()
                entry.leased += 1

    @property
    def over(self) -> asyncio.Future[None]:
        """Done when the lease has ended, for those who wait for what it holds."""
        if self._over is None:
            self._over = asyncio.get_running_loop().create_future()
            if self._ended:
                self._over.set_result(None)
        return self._over

    def left(self, now: float) -> float | None:
        """Seconds that may still be waited for its loads; None: as long as it takes."""
        if self.patience == math.inf:
            return None
        if self._until is None:
            self._until = now + self.patience
        return max(0.0, self._until - now)

    def end(self) -> Iterator[Entry]:
        """Let go of everything, as `drop` does."""
        self._ended = True
        yield from self.drop(0, len(self.entries))
        if self._over is not None and not self._over.done():
            self._over.set_result(None)

    def copied(self, index: int, shard: int) -> Iterator[Entry]:
        """A shard of entry `index` will not be asked for again; lets go of it when that is so of all shards."""
        entry = self.entries[index] if 0 <= index < len(self.entries) else None
        if entry is not None:
            shards = self._copied.setdefault(index, set())
            shards.add(shard)
            if len(shards) >= len(entry.shards):
                del self._copied[index]
                yield from self.drop(index, index + 1)

    def add_partial(self, entry: Entry) -> None:
        """Put the frame behind the last full chunk under the lease."""
        entry.hold()
        entry.leased += 1
        self.entries.append(entry)

    def drop(self, first: int, stop: int) -> Iterator[Entry]:
        """Let go of the entries in this range; yields each whose hold was given back."""
        for i in range(max(0, first), min(stop, len(self.entries))):
            entry, self.entries[i] = self.entries[i], None
            if entry is not None:
                entry.leased -= 1
                entry.let_go()
                yield entry


class Slot(NamedTuple):
    """One frame that a client fills."""

    entry: Entry
    shard: int
    object: MemoryObject


class Holdings:
    """All leases of the node, by number. Sessions keep the numbers that are theirs."""

    def __init__(self, seconds: float, clock: Callable[[], float]) -> None:
        self.leases: dict[int, Lease] = {}
        self._seconds = seconds
        self._clock = clock
        # A lease's number goes from process to process: one of an earlier start must not mean anything to this one.
        self._numbers = itertools.count(secrets.randbits(60) + 1)

    def number(self) -> int:
        """A number that was never used before: for leases, holds and reservations alike."""
        return next(self._numbers)

    def lease(self, entries: list[Entry | None]) -> Lease:
        """Promise `entries` for the configured time."""
        lease = Lease(self.number(), entries, self._clock() + self._seconds)
        self.leases[lease.number] = lease
        return lease

    def get(self, number: int) -> Lease | None:
        """A live lease, prolonged by its use."""
        lease = self.leases.get(number)
        if lease is None:
            return None
        now = self._clock()
        if lease.expires <= now:
            return None
        lease.expires = now + self._seconds
        return lease

    def expired(self) -> list[int]:
        """Numbers of the leases whose time is over."""
        now = self._clock()
        return [number for number, lease in self.leases.items() if lease.expires <= now]
