"""Chunks of a peer brought into a tier of this node, as a controller asks: pulled, verified, stored, pinned."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Final, NamedTuple

from lmkv.errors import ConfigError, FrameError
from lmkv.frame import frame_bytes, verify
from lmkv.keys import Namespace
from lmkv.peer.threads import outlast
from lmkv.storage.coding import IDENTITY
from lmkv.storage.driver import DEMOTE
from lmkv.storage.verbs import check_writable
from lmkv.types import DIGEST_BYTES, ChunkKey

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from lmkv.agent.jobs import Job
    from lmkv.agent.messages import Fetch
    from lmkv.frame import Trailer
    from lmkv.memory import MemoryObject
    from lmkv.peer.peers import Peers
    from lmkv.storage.index import Entry, NamespaceIndex
    from lmkv.storage.manager import StorageManager
    from lmkv.storage.tier import Tier
    from lmkv.types import Outcome

BATCH_BYTES: Final = 64 << 20
"""Of frames that are pulled at once; they lie in the pool until they are stored."""
BATCH_CHUNKS: Final = 128
PULL_SECONDS: Final = 30.0
"""For one batch."""
ROOM_SECONDS: Final = 10.0
"""That memory is waited for."""
MAX_PINS: Final = 1 << 16
"""Of fetches; at this number those that have ended are forgotten."""
TRIES: Final = 5
PAUSE_SECONDS: Final = 0.1
"""A tier whose queue is full is asked again so many times, so much later each time."""


class Order(NamedTuple):
    """What is to be fetched for a job, and whereto."""

    job: Job
    peer: str
    namespace: NamespaceIndex
    target: Tier
    pin_seconds: float


class Fetcher:
    """Carries out `Fetch`. Lives on the storage loop; bytes come through the peers' loop and threads."""

    def __init__(self, manager: StorageManager, peers: Peers | None) -> None:
        self._manager = manager
        self._stack = manager.stack
        self._peers = peers
        self._pins: dict[tuple[bytes, bytes], tuple[float, float]] = {}
        """Namespace and digest → until when a fetch has pinned the chunk, and until when it was pinned before."""

    def unpin(self, namespace: bytes, entry: Entry) -> None:
        """A fetch's pin is not needed any more: what was before it, or came after it, holds."""
        until, before = self._pins.pop((namespace, entry.digest), (0.0, 0.0))
        if until and entry.pinned_until == until:
            self._manager.unpin(entry)
            if before > time.monotonic():
                self._manager.pinned.add(entry)
                entry.pinned_until = before

    async def run(self, job: Job, command: Fetch) -> None:
        """Fetch the chunks of `command`, in batches; what cannot be had is told by chunk.

        Raises:
            LmkvError: no such tier or namespace, or the peer is not to be had.
        """
        target = self._manager.tier(command.tier)
        check_writable(target)
        order = Order(job, command.peer, self._namespace(command), target, command.pin_seconds)
        blob = command.digests
        digests = list(dict.fromkeys(blob[at : at + DIGEST_BYTES] for at in range(0, len(blob), DIGEST_BYTES)))
        job.total = len(digests)
        job.counts.update(bytes=0, present=0)
        step = self._at_once(order.namespace)
        for first in range(0, len(digests), step):
            job.check()
            missing = await self._keep_present(order, digests[first : first + step])
            if missing:
                await self._pull_missing(order, missing)

    def _namespace(self, command: Fetch) -> NamespaceIndex:
        if command.namespace_json and command.namespace not in self._manager.declared:
            found = Namespace.from_json(command.namespace_json).id
            if found != command.namespace:
                raise ConfigError(
                    f"the JSON is of namespace {found.hex()}, not {command.namespace.hex()}", kind="namespace"
                )
            self._manager.register(command.namespace_json)
        return self._manager.index.registered(command.namespace)

    def _at_once(self, namespace: NamespaceIndex) -> int:
        """Chunks of a batch: so few that requests find room beside them."""
        most = min(BATCH_BYTES, self._stack.room.reserve // 2)
        return max(1, min(BATCH_CHUNKS, most // max(1, sum(_sizes(namespace)))))

    async def _keep_present(self, order: Order, digests: Sequence[bytes]) -> list[bytes]:
        """What is here in whichever tier need not be pulled; returns the others."""
        missing = []
        for digest in digests:
            entry = order.namespace.entries.get(digest)
            if entry is None or not entry.ready:
                missing.append(digest)
            else:
                order.job.counts["present"] += 1
                await self._keep(order, entry)
        return missing

    async def _pull_missing(self, order: Order, digests: Sequence[bytes]) -> None:
        namespace = order.namespace
        objects: dict[ChunkKey, MemoryObject] = {}
        try:
            for digest in digests:
                for shard, nbytes in enumerate(_sizes(namespace)):
                    obj = await self._room(nbytes)
                    if obj is not None:
                        objects[ChunkKey(namespace.id, shard, digest)] = obj
            outcomes = await self._pull(order.peer, objects)
            checking = asyncio.get_running_loop().run_in_executor(None, _verify, namespace, objects, outcomes)
            frames = await outlast(checking)  # whose memory is not given back meanwhile
            for digest in digests:
                keys = [ChunkKey(namespace.id, shard, digest) for shard in range(namespace.shards)]
                why = _wrong([frames.get(key, "there was no memory for it") for key in keys])
                if why:
                    order.job.fail(digest, why)
                else:
                    await self._store(order, [(objects[key], frames[key]) for key in keys])  # type: ignore[misc]
        finally:
            for obj in objects.values():
                obj.release("load")
            self._stack.room.more()

    async def _room(self, nbytes: int) -> MemoryObject | None:
        until = asyncio.get_running_loop().time() + ROOM_SECONDS
        return await self._stack.room.wait(until, lambda: self._stack.room.for_load(nbytes))

    async def _pull(self, peer: str, objects: Mapping[ChunkKey, MemoryObject]) -> list[Outcome]:
        """Read frames of a peer into `objects`, one outcome each; `LmkvError` when the peer is not to be had."""
        if self._peers is None:
            raise ConfigError("this node talks to no peers: see the section `peer` of its configuration")
        if not objects:
            return []
        link = self._peers.link(peer)
        until = time.monotonic() + PULL_SECONDS
        # Ends when nothing of it touches the memory any more, also when this job is cancelled.
        return await self._peers.attend(link.pull(list(objects), list(objects.values()), until, bring=True))

    async def _store(self, order: Order, frames: Sequence[tuple[MemoryObject, Trailer]]) -> None:
        """One chunk whose frames have come: into the index, into the tier, under its pin."""
        first = frames[0][1]
        entry = order.namespace.add(first.key.digest, first.parent, first.pages, b"".join(first.prefixes))
        if entry.pages != first.pages:
            order.job.fail(entry.digest, f"it came as {first.pages} pages, and has {entry.pages} here")
            return
        entry.hold()
        try:
            for obj, trailer in frames:
                shard = trailer.key.shard
                part = entry.part(shard, obj.nbytes, trailer.key)
                order.job.counts["bytes"] += obj.nbytes
                if not part.present and not part.filling:
                    obj.sealed = True
                    self._stack.place(entry, shard, obj, promote=order.target.resident)
            await self._keep(order, entry)
        finally:
            entry.let_go()
            self._stack.settle(entry)

    async def _keep(self, order: Order, entry: Entry) -> None:
        """A chunk that is somewhere here: into the tier with it, and pin it, before it counts as done."""
        target = order.target
        entry.hold()
        try:
            if not await self._bring(entry, target):
                entry.leaving |= target.bit  # a part of it is of no use there
                order.job.fail(entry.digest, f"tier {target.name!r} did not take it: no room, too much to do, or off")
                return
            if order.pin_seconds > 0:
                self._pin(order, entry)
            order.job.advance()
        finally:
            entry.let_go()
            self._stack.settle(entry)

    def _pin(self, order: Order, entry: Entry) -> None:
        key = (order.namespace.id, entry.digest)
        until, before = self._pins.get(key, (0.0, 0.0))
        if entry.pinned_until != until:  # and not what a fetch before this one has done
            before = entry.pinned_until
        self._manager.pin(entry, order.pin_seconds)
        if len(self._pins) >= MAX_PINS:
            now = time.monotonic()
            self._pins = {key: pins for key, pins in self._pins.items() if pins[0] > now}
        self._pins[key] = (entry.pinned_until, before)

    async def _bring(self, entry: Entry, target: Tier) -> bool:
        """Copy what lacks into the tier; whether all is there."""
        for tried in range(1, TRIES + 1):
            lacking = [n for n, part in entry.shards.items() if not part.tiers & target.bit]
            copies = [self._stack.copy(entry, n, target, priority=DEMOTE) for n in lacking]
            if all(await asyncio.gather(*copies)):
                return entry.ready and all(part.tiers & target.bit for part in entry.shards.values())
            if tried < TRIES:
                await asyncio.sleep(PAUSE_SECONDS * tried)
        return False


def _sizes(namespace: NamespaceIndex) -> list[int]:
    """Bytes of a full chunk's frame, by shard; a tail's is smaller."""
    pages = namespace.chunk_pages
    return [frame_bytes(pages * nbytes, pages - 1) for nbytes in namespace.page_bytes]


def _verify(
    namespace: NamespaceIndex, objects: Mapping[ChunkKey, MemoryObject], outcomes: Sequence[Outcome]
) -> dict[ChunkKey, Trailer | str]:
    """The trailer of each frame, or what is wrong with it. Reads all of their bytes: in a thread."""
    return {
        key: _checked(namespace, key, obj, outcome)
        for (key, obj), outcome in zip(objects.items(), outcomes, strict=True)
    }


def _checked(namespace: NamespaceIndex, key: ChunkKey, obj: MemoryObject, outcome: Outcome) -> Trailer | str:
    if not outcome.ok:
        return "the peer does not have it" if outcome.error is None else f"it did not come: {outcome.error}"
    try:
        trailer = verify(obj.view[: outcome.nbytes], key)
    except FrameError as e:
        return f"it came damaged: {e}"
    pages, nbytes = trailer.pages, trailer.pages * namespace.page_bytes[key.shard]
    if trailer.codec != IDENTITY or pages > namespace.chunk_pages or trailer.payload_bytes != nbytes:
        return f"it came as {pages} pages of {trailer.payload_bytes} bytes in codec {trailer.codec!r}"
    obj.shorten(outcome.nbytes)
    return trailer


def _wrong(frames: Sequence[Trailer | str]) -> str:
    """Why these are not the frames of a chunk; empty if they are."""
    whys = [frame for frame in frames if isinstance(frame, str)]
    if whys:
        return whys[0]
    shapes = {(frame.pages, frame.parent, frame.prefixes) for frame in frames if not isinstance(frame, str)}
    return "" if len(shapes) == 1 else "its shards do not belong together"
