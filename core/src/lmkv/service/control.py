"""The operator's messages: pin, prefetch, move, recode, clear, health. They name chunks by namespace and digest."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import TYPE_CHECKING

from lmkv.errors import BackendError, ConfigError
from lmkv.service import protocol as p
from lmkv.service.protocol import split_digests
from lmkv.storage.driver import DEMOTE, QUEUED
from lmkv.storage.load_queue import Wanted

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator

    from lmkv.storage.index import Entry
    from lmkv.storage.manager import StorageManager
    from lmkv.storage.tier import Tier


class Control:
    """Verbs that any session may use; they hold nothing for it."""

    def __init__(self, manager: StorageManager) -> None:
        self._manager = manager
        self._stack = manager.stack
        self.verbs: dict[type[p.Message], Callable[..., p.Message | Awaitable[p.Message] | None]] = {
            p.Pin: self._pin,
            p.Unpin: self._unpin,
            p.Prefetch: self._prefetch,
            p.Move: self._move,
            p.Recode: self._recode,
            p.Clear: self._clear,
            p.GetHealth: self._health,
        }

    def _entries(self, namespace: bytes, blob: bytes) -> Iterator[Entry]:
        """The READY entries among the digests of a blob."""
        digests = split_digests(blob)
        found = self._manager.index.namespaces.get(namespace)
        if found is None:
            raise ConfigError(f"there is no namespace {namespace.hex()}", kind="namespace")
        for digest in digests:
            entry = found.entries.get(digest)
            if entry is not None and entry.ready:
                yield entry

    def _pin(self, message: p.Pin) -> p.Ok:
        if message.seconds is not None and message.seconds <= 0:
            raise ConfigError(f"a pin of {message.seconds:g} s: give a positive time, or none for one without end")
        count = 0
        for entry in self._entries(message.namespace, message.digests):
            self._manager.pin(entry, message.seconds)
            count += 1
        return p.Ok(count)

    def _unpin(self, message: p.Unpin) -> p.Ok:
        count = 0
        for entry in self._entries(message.namespace, message.digests):
            count += self._manager.unpin(entry)
        return p.Ok(count)

    def _prefetch(self, message: p.Prefetch) -> p.Ok:
        entries = list(self._entries(message.namespace, message.digests))
        self._stack.loads.start((Wanted(e, n) for e in entries for n in e.shards), priority=QUEUED, keep=True)
        return p.Ok(len(entries))

    async def _move(self, message: p.Move) -> p.Ok:
        source, target = self._manager.tier(message.source), self._manager.tier(message.target)
        if source is target:
            raise ConfigError(f"source and target are both tier {source.name!r}")
        _check_writable(target)
        if not message.keep:
            _check_writable(source)
        count = 0
        for entry in list(self._entries(message.namespace, message.digests)):
            there = [part.tiers & source.bit for part in entry.shards.values()]
            if not all(there):
                continue
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
            if all(copied):
                count += 1
                if not message.keep:
                    entry.leaving |= source.bit
            self._stack.settle(entry)
        return p.Ok(count)

    async def _recode(self, message: p.Recode) -> p.Ok:
        tier = self._manager.tier(message.tier)
        if tier.resident:
            raise ConfigError(f"tier {tier.name!r} holds frames as the engine needs them: compress a tier below it")
        _check_writable(tier)
        tier.coder.check(message.codec)
        count = 0
        for entry in list(self._entries(message.namespace, message.digests)):
            shards = [n for n, part in entry.shards.items() if part.tiers & tier.bit]
            done = await asyncio.gather(
                *(self._stack.copy(entry, n, tier, priority=DEMOTE, codec=message.codec, replace=True) for n in shards)
            )
            count += bool(done) and all(done)
        return p.Ok(count)

    def _clear(self, message: p.Clear) -> p.Cleared | Awaitable[p.Cleared]:
        if message.tier is not None and (tier := self._manager.tier(message.tier)).shared:
            return self._clear_shared(message, tier)
        return self._clear_known(message)

    async def _clear_shared(self, message: p.Clear, tier: Tier) -> p.Cleared:
        """Whoever names a store that others share means their frames too."""
        _check_writable(tier)
        cleared = self._clear_known(message)
        outcome = await tier.clear(message.namespace)
        if outcome.error is not None or not outcome.ok:
            raise BackendError(
                f"tier {tier.name!r} was not cleared, or not yet: {outcome.error or 'its queue is full'}"
            )
        return cleared

    def _clear_known(self, message: p.Clear) -> p.Cleared:
        manager = self._manager
        tiers = self._stack.tiers if message.tier is None else (manager.tier(message.tier),)
        namespaces = list(manager.index.namespaces.values())
        if message.namespace is not None:
            namespaces = [n for n in namespaces if n.id == message.namespace]
            if not namespaces:
                raise ConfigError(f"there is no namespace {message.namespace.hex()}", kind="namespace")
        counts: Counter[str] = Counter({tier.name: 0 for tier in tiers})
        for tier in tiers:
            lost = [key for key in tier.unreadable if key.namespace in {n.id for n in namespaces}]
            counts[tier.name] += len(lost)
            tier.delete(lost)
        for namespace in namespaces:
            for entry in list(namespace.entries.values()):
                for tier in tiers:
                    counts[tier.name] += sum(1 for part in entry.shards.values() if part.tiers & tier.bit)
                if message.tier is None:
                    self._stack.remove(entry)
                else:
                    entry.leaving |= tiers[0].bit
                    self._stack.settle(entry)
        return p.Cleared(dict(counts))

    def _health(self, message: p.GetHealth) -> p.HealthReport:
        del message
        state, tiers = self._manager.health()
        return p.HealthReport(state, tiers, self._manager.holds(), self._manager.metrics.snapshot())


def _check_writable(tier: Tier) -> None:
    if tier.settings.write == "never":
        raise ConfigError(
            f"tier {tier.name!r} is read-only (write: never): nothing is moved into it or removed from it"
        )
