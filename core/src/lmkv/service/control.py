"""The operator's messages: pin, prefetch, move, recode, clear, health. They name chunks by namespace and digest."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lmkv.errors import ConfigError
from lmkv.service import protocol as p
from lmkv.service.digests import split_digests
from lmkv.storage.driver import QUEUED
from lmkv.storage.load_queue import Wanted
from lmkv.storage.verbs import Cleared, Verbs

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator

    from lmkv.storage.index import Entry
    from lmkv.storage.manager import StorageManager


class Control:
    """Verbs that any session may use; they hold nothing for it."""

    def __init__(self, manager: StorageManager) -> None:
        self._manager = manager
        self._stack = manager.stack
        self._verbs = Verbs(manager)
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
        return self._verbs.entries(namespace, split_digests(blob))

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
        source, target = self._verbs.movable(message.source, message.target, keep=message.keep)
        count = 0
        for entry in list(self._entries(message.namespace, message.digests)):
            count += await self._verbs.move(entry, source, target, keep=message.keep)
        return p.Ok(count)

    async def _recode(self, message: p.Recode) -> p.Ok:
        tier = self._verbs.recodable(message.tier, message.codec)
        count = 0
        for entry in list(self._entries(message.namespace, message.digests)):
            count += await self._verbs.recode(entry, tier, message.codec)
        return p.Ok(count)

    def _clear(self, message: p.Clear) -> p.Cleared | Awaitable[p.Cleared]:
        cleared = self._verbs.clear(message.namespace, message.tier)
        return _reply(cleared) if isinstance(cleared, Cleared) else self._clear_later(cleared)

    @staticmethod
    async def _clear_later(cleared: Awaitable[Cleared]) -> p.Cleared:
        return _reply(await cleared)

    def _health(self, message: p.GetHealth) -> p.HealthReport:
        del message
        state, tiers = self._manager.health()
        return p.HealthReport(state, tiers, self._manager.holds(), self._manager.metrics.snapshot())


def _reply(cleared: Cleared) -> p.Cleared:
    return p.Cleared(dict(cleared.counts))
