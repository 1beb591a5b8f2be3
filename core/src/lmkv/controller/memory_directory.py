"""The directory in this process's memory."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from lmkv.controller.digest_table import DigestTable, distinct
from lmkv.controller.directory import Directory, Place, Placement, Size, check_blob, placement
from lmkv.controller.place_sets import SET_BYTES, PlaceSets
from lmkv.types import DIGEST_BYTES

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from lmkv.agent.messages import Change
    from lmkv.controller.digest_table import Numbers

STEP: Final = 1024
"""Digests that are taken in before the loop turns again."""
_SEGMENTS: Final = 32
"""Segments that are swept before the loop turns again."""


class _Part(NamedTuple):
    """Digests of one tier that are there now, or no more."""

    tier: int
    digests: bytes
    stored: bool


class MemoryDirectory(Directory):
    """A table of digests for each namespace; see `DigestTable` for its size and `PlaceSets` for what it holds.

    Each tier of a node is a place, and with each resync another one: the old ones hold until its end and are gone then,
    at once for look-ups and, by a sweep in small steps, from the tables.
    """

    def __init__(self) -> None:
        self._tables: dict[bytes, DigestTable] = {}
        self._sets = PlaceSets()
        self._places: dict[int, Place] = {}
        self._last = 0
        self._current: dict[str, dict[int, int]] = {}  # node → tier → place
        self._fresh: dict[str, dict[int, int]] = {}  # the same, of resyncs under way
        self._mark = 0
        self._tidying: asyncio.Task[None] | None = None

    async def apply(self, node: str, changes: Sequence[Change]) -> None:
        """As the contract says."""
        told: dict[bytes, list[_Part]] = {}
        for change in changes:
            check_blob(change.namespace, change.removed)
            check_blob(change.namespace, change.stored)
            parts = told.setdefault(change.namespace, [])
            parts += (_Part(change.tier, change.removed, stored=False), _Part(change.tier, change.stored, stored=True))
        for namespace, parts in told.items():
            await self._take(node, namespace, parts)

    async def begin(self, node: str) -> None:
        """As the contract says."""
        self._retire(self._fresh.pop(node, {}))
        self._fresh[node] = {}
        self._tidy()

    async def page(self, node: str, namespace: bytes, tier: int, digests: bytes) -> None:
        """As the contract says."""
        check_blob(namespace, digests)
        await self._take(node, namespace, [_Part(tier, digests, stored=True)])

    async def end(self, node: str) -> bool:
        """As the contract says; returns when the tables are swept."""
        fresh = self._fresh.pop(node, None)
        if fresh is None:
            return False
        self._retire(self._current.pop(node, {}))
        self._current[node] = fresh
        await self._tidied()
        return True

    async def drop(self, node: str) -> None:
        """As the contract says; returns when the tables are swept."""
        self._retire(self._current.pop(node, {}))
        self._retire(self._fresh.pop(node, {}))
        await self._tidied()

    async def lookup(self, namespace: bytes, digests: bytes) -> Placement:
        """As the contract says."""
        count = check_blob(namespace, digests)
        table = self._tables.get(namespace)
        if table is None or not count:
            return Placement(count, ())
        sets, which = np.unique(table.get(table.keys(digests)), return_inverse=True)
        return placement([self._named(number) for number in sets.tolist()], which)

    async def holders(self, namespace: bytes, digests: bytes) -> list[tuple[Place, ...]]:
        """As the contract says."""
        count = check_blob(namespace, digests)
        table = self._tables.get(namespace)
        if table is None:
            return [()] * count
        numbers = table.get(table.keys(digests)).tolist()
        places = {number: self._named(number) for number in set(numbers)}
        return [places[number] for number in numbers]

    async def size(self) -> Size:
        """As the contract says; what a sweep under way has still to take out is counted."""
        tables = self._tables.values()
        nbytes = sum(table.nbytes for table in tables) + len(self._sets) * SET_BYTES
        return Size(sum(table.entries for table in tables), nbytes)

    async def close(self) -> None:
        """Stop sweeping."""
        if self._tidying is not None:
            self._tidying.cancel()

    async def _take(self, node: str, namespace: bytes, parts: Iterable[_Part]) -> None:
        """Take in what was told of one namespace, all in one pass over the table if it is little."""
        for number, some in enumerate(_batches(parts)):
            if number:
                await asyncio.sleep(0)
            # Looked up anew after each turn of the loop: others were at work meanwhile.
            table = self._tables.get(namespace)
            if table is None:
                table = self._tables[namespace] = DigestTable()
            rows = table.rows(table.keys(b"".join(part.digests for part in some)))
            rows, which = distinct(rows)
            numbers = table.read(rows)
            start = 0
            for part in some:
                end = start + len(part.digests) // DIGEST_BYTES
                mine, _ = distinct(which[start:end])
                numbers[mine] = self._changed(node, part, numbers[mine])
                start = end
            table.write(rows, numbers)

    def _changed(self, node: str, part: _Part, before: Numbers) -> Numbers:
        if part.stored:
            return self._sets.changed(before, add=(self._place(node, part.tier),))
        places = [tiers[part.tier] for tiers in self._told(node) if part.tier in tiers]
        return self._sets.changed(before, drop=places)

    def _told(self, node: str) -> Iterator[dict[int, int]]:
        for told in (self._current, self._fresh):
            if node in told:
                yield told[node]

    def _place(self, node: str, tier: int) -> int:
        """Where what a node says now is put."""
        told = self._fresh if node in self._fresh else self._current
        tiers = told.setdefault(node, {})
        if tier not in tiers:
            self._last += 1
            tiers[tier] = self._last
            self._places[self._last] = Place(node, tier)
        return tiers[tier]

    def _named(self, number: int) -> tuple[Place, ...]:
        # During a resync a place may be there twice.
        return tuple(sorted({self._places[each] for each in self._sets.content[number] if each in self._places}))

    def _retire(self, tiers: dict[int, int]) -> None:
        for place in tiers.values():
            del self._places[place]
        self._sets.gone.update(tiers.values())

    def _tidy(self) -> asyncio.Task[None] | None:
        """Let a sweep run until there is nothing left to sweep."""
        if self._sets.gone and (self._tidying is None or self._tidying.done()):
            self._tidying = asyncio.create_task(self._sweep(), name="lmkv-directory-sweep")
        return self._tidying

    async def _tidied(self) -> None:
        task = self._tidy()
        if task is not None:
            # In a task of its own: half a sweep would leave the counts of rows wrong.
            await asyncio.shield(task)

    async def _sweep(self) -> None:
        while self._sets.gone:
            self._sets.begin()
            for _ in self._sets.cleaning():
                await asyncio.sleep(0)
            self._mark += 1
            for namespace, table in list(self._tables.items()):
                while not table.sweep(self._sets.mapping(), self._mark, _SEGMENTS):  # noqa: ASYNC110  it works, not waits
                    await asyncio.sleep(0)
                if not table.entries:
                    del self._tables[namespace]
            self._sets.finish()


def _batches(parts: Iterable[_Part]) -> Iterator[list[_Part]]:
    """The same in the same order, cut so that none has more than `STEP` digests."""
    most, batch, left = STEP * DIGEST_BYTES, list[_Part](), STEP * DIGEST_BYTES
    for tier, digests, stored in parts:
        start = 0
        while start < len(digests):
            batch.append(_Part(tier, digests[start : start + left], stored))
            start += len(batch[-1].digests)
            left -= len(batch[-1].digests)
            if not left:
                yield batch
                batch, left = [], most
    if batch:
        yield batch
