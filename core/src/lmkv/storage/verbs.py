"""What operators ask of stored chunks: move, recode, drop, clear. The same for a node's clients and its controller."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import TYPE_CHECKING, NamedTuple

from lmkv.errors import BackendError, ConfigError
from lmkv.storage.driver import DEMOTE

if TYPE_CHECKING:
    from collections.abc import Awaitable, Iterable, Iterator

    from lmkv.storage.index import Entry
    from lmkv.storage.manager import StorageManager
    from lmkv.storage.tier import Tier


class Cleared(NamedTuple):
    """What a clear did."""

    counts: Counter[str]
    """Chunk shards removed, by tier."""
    held: list[Entry]
    """Chunks among them that somebody holds: their frames go with the last hold."""


class Verbs:
    """Of one storage. Lives on the storage loop; holds nothing between two calls."""

    def __init__(self, manager: StorageManager) -> None:
        self._manager = manager
        self._stack = manager.stack

    def entries(self, namespace: bytes, digests: Iterable[bytes]) -> Iterator[Entry]:
        """The READY chunks among `digests`.

        Raises:
            ConfigError: nothing is known of the namespace.
        """
        found = self._manager.index.namespaces.get(namespace)
        if found is None:
            raise ConfigError(f"there is no namespace {namespace.hex()}", kind="namespace")
        for digest in digests:
            entry = found.entries.get(digest)
            if entry is not None and entry.ready:
                yield entry

    def movable(self, source: str, target: str, *, keep: bool) -> tuple[Tier, Tier]:
        """The tiers of a move (a copy, `keep`).

        Raises:
            ConfigError: there is no such tier, both are one, or one that has to change is read-only.
        """
        upper, lower = self._manager.tier(source), self._manager.tier(target)
        if upper is lower:
            raise ConfigError(f"source and target are both tier {upper.name!r}")
        check_writable(lower)
        if not keep:
            check_writable(upper)
        return upper, lower

    async def move(self, entry: Entry, source: Tier, target: Tier, *, keep: bool) -> bool:
        """Move (or copy) one chunk. True when it lies whole in `target`, also if it did before; False: not in `source`.

        It leaves `source` when nobody holds it any more.
        """
        if not all(part.tiers & source.bit for part in entry.shards.values()):
            return False
        entry.hold()
        try:
            copied = await asyncio.gather(
                *(
                    self._stack.copy(entry, n, target, priority=DEMOTE)
                    for n, part in list(entry.shards.items())
                    if not part.tiers & target.bit
                )
            )
        finally:
            entry.let_go()
            self._stack.settle(entry)
        done = all(copied)
        if done and not keep:
            self.drop(entry, (source,))
        return done

    def recodable(self, tier: str, codec: str) -> Tier:
        """The tier in which frames can be stored anew with `codec`.

        Raises:
            ConfigError: there is no such tier or codec, the tier is resident or read-only.
        """
        found = self._manager.tier(tier)
        if found.resident:
            raise ConfigError(f"tier {found.name!r} holds frames as the engine needs them: compress a tier below it")
        check_writable(found)
        found.coder.check(codec)
        return found

    async def recode(self, entry: Entry, tier: Tier, codec: str) -> bool:
        """Store one chunk of `tier` anew; False: it is not there, or could not be."""
        shards = [n for n, part in entry.shards.items() if part.tiers & tier.bit]
        done = await asyncio.gather(
            *(self._stack.copy(entry, n, tier, priority=DEMOTE, codec=codec, replace=True) for n in shards)
        )
        return bool(done) and all(done)

    def drop(self, entry: Entry, tiers: Iterable[Tier]) -> None:
        """One chunk leaves these tiers, now or when nobody holds it any more."""
        for tier in tiers:
            entry.leaving |= tier.bit
        self._stack.settle(entry)

    def clear(self, namespace: bytes | None, tier: str | None) -> Cleared | Awaitable[Cleared]:
        """Remove everything (of a namespace, of a tier). Has to wait only for stores that others share.

        Of a store that others share only what this node knows of in it, unless `tier` names it: then all.

        Raises:
            ConfigError: there is no such tier or namespace, or the shared store is read-only.
            BackendError: (awaited) the shared store could not do it, or not yet.
        """
        found = None if tier is None else self._manager.tier(tier)
        if found is None or not found.shared:
            return self._clear(namespace, found)
        check_writable(found)
        return self._clear_shared(namespace, found)

    async def _clear_shared(self, namespace: bytes | None, tier: Tier) -> Cleared:
        """Whoever names a store that others share means their frames too."""
        cleared = self._clear(namespace, tier)
        outcome = await tier.clear(namespace)
        if outcome.error is not None or not outcome.ok:
            raise BackendError(
                f"tier {tier.name!r} was not cleared, or not yet: {outcome.error or 'its queue is full'}"
            )
        return cleared

    def _clear(self, identity: bytes | None, only: Tier | None) -> Cleared:
        tiers = self._stack.tiers if only is None else (only,)
        namespaces = list(self._manager.index.namespaces.values())
        if identity is not None:
            namespaces = [n for n in namespaces if n.id == identity]
            if not namespaces:
                raise ConfigError(f"there is no namespace {identity.hex()}", kind="namespace")
        counts: Counter[str] = Counter({tier.name: 0 for tier in tiers})
        held: list[Entry] = []
        for tier in tiers:
            lost = [key for key in tier.unreadable if key.namespace in {n.id for n in namespaces}]
            counts[tier.name] += len(lost)
            tier.delete(lost)
        for namespace in namespaces:
            for entry in list(namespace.entries.values()):
                there = False
                for tier in tiers:
                    shards = sum(1 for part in entry.shards.values() if part.tiers & tier.bit)
                    counts[tier.name] += shards
                    there |= shards > 0
                if there and entry.holds:
                    held.append(entry)
                if only is None:
                    self._stack.remove(entry)
                else:
                    self.drop(entry, tiers)
        return Cleared(counts, held)


def check_writable(tier: Tier) -> None:
    """Raise `ConfigError` for a read-only tier."""
    if tier.settings.write == "never":
        raise ConfigError(
            f"tier {tier.name!r} is read-only (write: never): nothing is moved into it or removed from it"
        )
