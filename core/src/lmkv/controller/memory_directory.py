"""The directory in this process's memory."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final

import numpy as np

from lmkv.controller.digest_table import DigestTable
from lmkv.controller.directory import Directory, Place, Placement, Size, check_blob, placement
from lmkv.controller.place_sets import SET_BYTES, PlaceSets
from lmkv.types import DIGEST_BYTES

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator, Sequence

    from lmkv.agent.messages import Change

STEP: Final = 1024
"""Digests that are taken in before the loop turns again."""
_SEGMENTS: Final = 32
"""Segments that are swept before the loop turns again."""


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
        for change in changes:
            check_blob(change.namespace, change.removed)
            check_blob(change.namespace, change.stored)
        for change in changes:
            await self._remove(node, change)
            await self._store(node, change.namespace, change.tier, change.stored)

    async def begin(self, node: str) -> None:
        """As the contract says."""
        self._retire(self._fresh.pop(node, {}))
        self._fresh[node] = {}
        self._tidy()

    async def page(self, node: str, namespace: bytes, tier: int, digests: bytes) -> None:
        """As the contract says."""
        check_blob(namespace, digests)
        await self._store(node, namespace, tier, digests)

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

    async def _store(self, node: str, namespace: bytes, tier: int, digests: bytes) -> None:
        async for part in _steps(digests):
            # Looked up anew in each step: others were at work meanwhile.
            table = self._tables.get(namespace)
            if table is None:
                table = self._tables[namespace] = DigestTable()
            rows = table.rows(table.keys(part))
            table.write(rows, self._sets.changed(table.read(rows), add=(self._place(node, tier),)))

    async def _remove(self, node: str, change: Change) -> None:
        async for part in _steps(change.removed):
            table = self._tables.get(change.namespace)
            if table is None:
                return
            places = [tiers[change.tier] for tiers in self._told(node) if change.tier in tiers]
            rows = table.known(table.keys(part))
            table.write(rows, self._sets.changed(table.read(rows), drop=places))

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


async def _steps(digests: bytes) -> AsyncIterator[memoryview]:
    view, size = memoryview(digests), STEP * DIGEST_BYTES
    for start in range(0, len(digests), size):
        if start:
            await asyncio.sleep(0)
        yield view[start : start + size]
