"""Copies the next victims of a tier down to a tier of `write: demote`, ahead of their eviction.

A store never waits. If the copy began only when room is needed, the victim's memory would stay with the write until it
is done, and the store would have to be refused; so the frames that go next are copied before, and evicting them is then
a matter of books.
"""

from __future__ import annotations

import asyncio
import itertools
from functools import partial
from typing import TYPE_CHECKING, Final

from lmkv.storage.driver import DEMOTE

if TYPE_CHECKING:
    from collections.abc import Sequence

    from lmkv.storage.index import Entry
    from lmkv.storage.stack import Stack
    from lmkv.storage.tier import Tier

CLEAN_ABOVE: Final = 0.5
"""Share of its capacity from which on a tier keeps its next victims copied."""
MARGIN_FRAMES: Final = 256
"""How many victims are looked at each time: what a burst of stores may evict before the next look."""
MARGIN_BYTES: Final = 1 << 30
UNDER_WAY_BYTES: Final = 256 << 20
"""Bytes of such copies under way at once, at most."""
PAUSE_SECONDS: Final = 0.01
"""Between two looks, however many stores there are."""


class Demotion:
    """Keeps the next victims of each tier above a `write: demote` tier copied. Lives on the storage loop."""

    def __init__(self, stack: Stack, tiers: Sequence[Tier]) -> None:
        self._stack = stack
        self._pairs = [
            (tier, lower)
            for tier, lower in itertools.pairwise(tiers)
            if lower.settings.write == "demote" and tier.capacity is not None
        ]
        self._under_way = 0
        self._timer: asyncio.TimerHandle | None = None

    def below(self, tier: Tier) -> Tier | None:
        """The tier that takes what `tier` evicts, if one does."""
        return next((lower for upper, lower in self._pairs if upper is tier), None)

    @property
    def busy(self) -> bool:
        """A look is due, or copies are under way."""
        return self._timer is not None or self._under_way > 0

    def soon(self) -> None:
        """A tier has got more, or a copy has ended: look for what to copy next, in a moment."""
        if self._pairs and self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(PAUSE_SECONDS, self._look)

    def stop(self) -> None:
        """Begin no more copies."""
        self._pairs = []
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _look(self) -> None:
        self._timer = None
        for tier, lower in self._pairs:
            surplus = min(MARGIN_BYTES, tier.used - int(CLEAN_ABOVE * (tier.capacity or 0)))
            if surplus <= 0 or not lower.writable:
                continue
            victims = self._stack.victims(tier, surplus, written=True)
            for key in list(itertools.islice(victims, MARGIN_FRAMES)):
                if self._under_way >= UNDER_WAY_BYTES:
                    return
                entry = self._stack.index.entry(key)
                if entry is not None:
                    self._begin(entry, key.shard, lower)

    def _begin(self, entry: Entry, shard: int, lower: Tier) -> None:
        part = entry.shards.get(shard)
        if (
            part is None
            or not entry.namespace.shards  # found at a start, and nobody has said yet what it is
            or part.tiers & lower.bit
            or part.writes
            or not lower.takes(part.key, lower.coder.bound(part.nbytes))
        ):
            return
        copied = self._copy(entry, shard, lower)
        if copied is not None:
            self._under_way += part.nbytes
            copied.add_done_callback(partial(self._ended, part.nbytes))

    def _copy(self, entry: Entry, shard: int, lower: Tier) -> asyncio.Future[bool] | None:
        obj = self._stack.in_pool(entry, shard)
        if obj is None:
            return asyncio.ensure_future(self._stack.copy(entry, shard, lower, priority=DEMOTE))
        try:
            return self._stack.write(entry, shard, obj, lower, priority=DEMOTE)
        finally:
            obj.release("get")

    def _ended(self, nbytes: int, copied: asyncio.Future[bool]) -> None:
        self._under_way -= nbytes
        if not copied.cancelled() and copied.result():
            self.soon()
