"""What came into the node's own tiers and what went, told to whoever listens, some times a second.

Tiers note the keys of frames that come or go (`Inventory.changed`), and only while somebody listens. Every `PERIOD`
the tap looks what is there now of each chunk noted: a chunk is *stored* in a tier when all its shards lie there and
can be read, else *removed*. So each word is about the present: what comes and goes between two looks is not told, and
to tell something twice does no harm. Tiers that nodes share are not tapped: what lies in them is asked of them.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from typing import TYPE_CHECKING, Final, Protocol

from lmkv.types import ChunkKey

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from lmkv.storage.index import Entry, NamespaceIndex
    from lmkv.storage.manager import StorageManager
    from lmkv.storage.tier import Tier

log = logging.getLogger(__name__)

PERIOD: Final = 0.05
"""Seconds between two looks."""
STEP: Final = 2048
"""Chunks that are looked at between two turns of the loop."""
MOST: Final = 1 << 17
"""Frames noted between two looks; of more than that, all that is there is told anew instead."""


class Listener(Protocol):
    """Called on the storage loop; must not take long."""

    def changed(self, tier: int, namespace: bytes, stored: list[bytes], removed: list[bytes]) -> None:
        """These digests lie whole in the tier now; those do not."""

    def lost(self, why: str) -> None:
        """Not everything was told: ask `listing` for all that is there."""

    def declared(self, namespace: NamespaceIndex) -> None:
        """A client has declared a namespace."""


class Tap:
    """Of one storage. Lives on the storage loop."""

    def __init__(self, manager: StorageManager) -> None:
        self._manager = manager
        self.own = tuple(tier for tier in manager.stack.tiers if not tier.shared)
        """The tiers that are tapped."""
        self._listeners: list[Listener] = []
        self._task: asyncio.Task[None] | None = None
        manager.on_namespace = self._declared

    def join(self, listener: Listener) -> None:
        """Tell `listener` from now on. What is there already is in `listing`."""
        self._listeners.append(listener)
        if self._task is None:
            for tier in self.own:
                tier.changed = {}
            self._task = asyncio.get_running_loop().create_task(self._run())

    def leave(self, listener: Listener) -> None:
        """Tell it no more. Idempotent."""
        if listener in self._listeners:
            self._listeners.remove(listener)
        if not self._listeners and self._task is not None:
            self._task.cancel()
            self._task = None
            for tier in self.own:
                tier.changed = None

    def listing(self) -> Iterator[tuple[Tier, NamespaceIndex, list[Entry]]]:
        """All that lies in the node's own tiers, in pieces; each is true at the moment when it is taken.

        What comes later is told to those who have joined before. Takes some 20 ns per chunk at its beginning.
        """
        for namespace in list(self._manager.index.namespaces.values()):
            if not namespace.shards:
                continue  # nobody has said yet how many shards make a chunk
            entries = list(namespace.entries.values())
            for first in range(0, len(entries), STEP):
                piece = entries[first : first + STEP]
                for tier in self.own:
                    there = _lying_in(piece, tier.bit, namespace.shards)
                    if there:
                        yield tier, namespace, there

    def _declared(self, namespace: NamespaceIndex) -> None:
        for listener in list(self._listeners):
            listener.declared(namespace)
            if namespace.entries:  # found at the start; only now is it known what makes a chunk of them
                listener.lost("a namespace of stored chunks was declared")

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(PERIOD)
            try:
                for tier in self.own:
                    await self._look(tier)
            except Exception:
                log.exception("looking at what has changed failed", extra={"key": "tap"})
                self._lost("a fault")

    async def _look(self, tier: Tier) -> None:
        keys = tier.changed
        if not keys:
            return
        tier.changed = {}
        if len(keys) > MOST:
            self._lost("too many changes at once")
            return
        left = iter(keys)
        while piece := list(itertools.islice(left, STEP)):
            self._tell(tier, piece)
            await asyncio.sleep(0)

    def _tell(self, tier: Tier, keys: Iterable[ChunkKey]) -> None:
        by_namespace: dict[bytes, list[ChunkKey]] = {}
        for key in keys:
            by_namespace.setdefault(key[0], []).append(key)
        for identity, noted in by_namespace.items():
            namespace = self._manager.index.namespaces.get(identity)
            shards = 0 if namespace is None else namespace.shards
            if shards == 1:
                index, unreadable = tier.index, tier.unreadable
                there = [key in index and key not in unreadable for key in noted]
                digests = [key[2] for key in noted]
            else:
                digests = list(dict.fromkeys([key[2] for key in noted]))
                there = [_whole(tier, identity, shards, digest) for digest in digests]
            stored = list(itertools.compress(digests, there))
            removed = [digest for digest, lies in zip(digests, there, strict=True) if not lies]
            for listener in list(self._listeners):
                listener.changed(tier.number, identity, stored, removed)

    def _lost(self, why: str) -> None:
        for listener in list(self._listeners):
            listener.lost(why)


def _whole(tier: Tier, identity: bytes, shards: int, digest: bytes) -> bool:
    """All shards lie in the tier and can be read; False where nobody has said how many there are."""
    return shards > 0 and all(tier.offers(ChunkKey(identity, n, digest)) for n in range(shards))


def _lying_in(entries: Iterable[Entry], bit: int, shards: int) -> list[Entry]:
    """Those of which all shards lie in the tier of that bit."""
    if shards == 1:
        return [entry for entry in entries if (part := entry.shards.get(0)) is not None and part.tiers & bit]
    return [
        entry
        for entry in entries
        if len(entry.shards) == shards and all(part.tiers & bit for part in entry.shards.values())
    ]
