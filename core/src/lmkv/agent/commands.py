"""What a controller may ask of a node, carried out chunk by chunk. Each command may be done twice without harm."""

from __future__ import annotations

import asyncio
import inspect
from typing import TYPE_CHECKING, Final

from lmkv.agent import messages as m
from lmkv.agent.fences import Fences
from lmkv.agent.fetch import Fetcher
from lmkv.errors import BackendError, ConfigError
from lmkv.storage.verbs import Verbs, check_writable
from lmkv.types import DIGEST_BYTES, ChunkKey

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence

    from lmkv.agent.jobs import Job
    from lmkv.peer.peers import Peers
    from lmkv.storage.index import Entry
    from lmkv.storage.manager import StorageManager
    from lmkv.storage.tier import Tier

LANES: Final = 4
"""Chunks that one job copies at once."""
TRIES: Final = 5
"""A tier whose queue is full is asked so often."""
PAUSE_SECONDS: Final = 0.1
"""Between two tries, and between two looks at what somebody holds."""
STEP: Final = 512
"""Chunks that are looked up between two turns of the loop."""
ABSENT: Final = "it is not here"


class Commands:
    """Carries out the commands of jobs. Lives on the storage loop."""

    def __init__(self, manager: StorageManager, peers: Peers | None = None) -> None:
        self._manager = manager
        self._verbs = Verbs(manager)
        self._fetcher = Fetcher(manager, peers)
        self._fences = Fences()

    async def __call__(self, job: Job) -> None:
        """Do what the job's command says, until it is done or `Job.check` raises.

        Raises:
            LmkvError: nothing (more) of it can be done; the message says why.
        """
        command = job.command
        if isinstance(command, m.PinChunks):
            await self._pin(job, command)
        elif isinstance(command, m.UnpinChunks):
            await self._unpin(job, command)
        elif isinstance(command, m.Fetch):
            self._fences.end(command.namespace, split(command.digests))
            await self._fetcher.run(job, command)
        elif isinstance(command, m.Fence):
            digests = split(command.digests)
            job.counts["fence"] = self._fences.give(command.namespace, digests)
            job.total = job.done = len(digests)
        elif isinstance(command, m.Drop):
            await self._drop(job, command)
        elif isinstance(command, m.Shift):
            await self._shift(job, command)
        elif isinstance(command, m.RecodeChunks):
            await self._recode(job, command)
        elif isinstance(command, m.ClearTier):
            await self._clear(job, command)

    async def _pin(self, job: Job, command: m.PinChunks) -> None:
        if command.seconds is not None and not command.seconds > 0:
            raise ConfigError(f"a pin of {command.seconds:g} s: give a positive time, or none for one without end")
        async for digest, entry in self._each(job, command.namespace, command.digests):
            if entry is None or not entry.ready:
                job.fail(digest, ABSENT)
            else:
                self._manager.pin(entry, command.seconds)
                job.advance()

    async def _unpin(self, job: Job, command: m.UnpinChunks) -> None:
        async for _, entry in self._each(job, command.namespace, command.digests):
            if entry is not None and command.fetched:
                self._fetcher.unpin(command.namespace, entry)
            elif entry is not None:
                self._manager.unpin(entry)
            job.advance()

    async def _drop(self, job: Job, command: m.Drop) -> None:
        tiers = self._droppable(command.tier)
        if command.fence and not self._fences.allow(command.fence, command.namespace, split(command.digests)):
            job.counts["late"] = 1
            raise BackendError("it comes too late, or chunks of it have come anew since it was begun", kind="late")
        leaving: list[Entry] = []
        async for digest, entry in self._each(job, command.namespace, command.digests):
            if entry is None or not _lies_in(entry, tiers):
                self._forget_shared(command.namespace, digest, tiers)
                job.advance()
                continue
            self._verbs.drop(entry, tiers)
            if _lies_in(entry, tiers):
                leaving.append(entry)
            else:
                job.advance()
        try:
            while leaving:
                await asyncio.sleep(PAUSE_SECONDS)
                held = [entry for entry in leaving if _lies_in(entry, tiers)]
                job.advance(len(leaving) - len(held))
                leaving = held
                job.check()
        finally:
            for entry in leaving:  # nobody waits for it any more: it stays
                entry.leaving &= ~sum(tier.bit for tier in tiers)

    async def _shift(self, job: Job, command: m.Shift) -> None:
        source, target = self._verbs.movable(command.source, command.target, keep=command.keep)

        async def move(entry: Entry) -> str:
            if not entry.ready:
                return ABSENT
            if not _whole_in(entry, source):
                return "" if _whole_in(entry, target) else f"it is not in tier {source.name!r}"
            moved = await _again(job, lambda: self._verbs.move(entry, source, target, keep=command.keep))
            return "" if moved else f"tier {target.name!r} did not take it: no room, too much to do, or off"

        await self._in_lanes(job, command.namespace, command.digests, move)

    async def _recode(self, job: Job, command: m.RecodeChunks) -> None:
        tier = self._verbs.recodable(command.tier, command.codec)

        async def recode(entry: Entry) -> str:
            if not entry.ready or not _whole_in(entry, tier):
                return f"it is not in tier {tier.name!r}"
            recoded = await _again(job, lambda: self._verbs.recode(entry, tier, command.codec))
            return "" if recoded else f"tier {tier.name!r} did not take it: no room, too much to do, or off"

        await self._in_lanes(job, command.namespace, command.digests, recode)

    async def _clear(self, job: Job, command: m.ClearTier) -> None:
        clearing = self._verbs.clear(command.namespace, command.tier)
        cleared = await clearing if inspect.isawaitable(clearing) else clearing
        job.counts.update(cleared.counts)
        job.total = sum(cleared.counts.values())
        held = cleared.held
        while held:
            job.done = max(0, job.total - sum(len(entry.shards) for entry in held))
            await asyncio.sleep(PAUSE_SECONDS)
            job.check()
            held = [entry for entry in held if entry.holds]
        job.done, job.dirty = job.total, True

    # --- inside ------------------------------------------------------------------------------------------------------

    async def _each(self, job: Job, namespace: bytes, blob: bytes) -> AsyncIterator[tuple[bytes, Entry | None]]:
        """Each digest with its entry, some at a time."""
        digests = split(blob)
        job.total = len(digests)
        for first in range(0, len(digests), STEP):
            job.check()
            for digest in digests[first : first + STEP]:
                yield digest, self._entry(namespace, digest)
            await asyncio.sleep(0)

    def _entry(self, namespace: bytes, digest: bytes) -> Entry | None:
        found = self._manager.index.namespaces.get(namespace)
        return None if found is None else found.entries.get(digest)

    async def _in_lanes(self, job: Job, namespace: bytes, blob: bytes, work: Callable[[Entry], Awaitable[str]]) -> None:
        """Do `work` to each chunk, some at a time; it says why it could not, or nothing."""
        digests = split(blob)
        job.total = len(digests)
        left = iter(digests)

        async def lane() -> None:
            for digest in left:
                job.check()
                entry = self._entry(namespace, digest)
                why = ABSENT if entry is None else await work(entry)
                if why:
                    job.fail(digest, why)
                else:
                    job.advance()
                await asyncio.sleep(0)

        await asyncio.gather(*(lane() for _ in range(LANES)))

    def _droppable(self, name: str) -> Sequence[Tier]:
        if not name:
            return [t for t in self._manager.stack.tiers if not t.shared and t.settings.write != "never"]
        tier = self._manager.tier(name)
        check_writable(tier)
        return [tier]

    def _forget_shared(self, namespace: bytes, digest: bytes, tiers: Iterable[Tier]) -> None:
        """What lies in a shared store need not be known here."""
        shards = 0 if (found := self._manager.index.namespaces.get(namespace)) is None else found.shards
        for tier in tiers:
            if tier.shared:
                tier.delete([ChunkKey(namespace, n, digest) for n in range(shards)])


async def _again(job: Job, step: Callable[[], Awaitable[bool]]) -> bool:
    """Try a step some times; whether it was done."""
    for tried in range(1, TRIES + 1):
        if await step():
            return True
        job.check()
        if tried < TRIES:
            await asyncio.sleep(PAUSE_SECONDS * tried)
    return False


def split(blob: bytes) -> list[bytes]:
    """The digests of a blob, each once, in order."""
    m.check_digests(blob)
    return list(dict.fromkeys(blob[at : at + DIGEST_BYTES] for at in range(0, len(blob), DIGEST_BYTES)))


def _lies_in(entry: Entry, tiers: Iterable[Tier]) -> bool:
    """Any of it."""
    bits = sum(tier.bit for tier in tiers)
    return any(part.tiers & bits for part in entry.shards.values())


def _whole_in(entry: Entry, tier: Tier) -> bool:
    return all(part.tiers & tier.bit for part in entry.shards.values())
