"""Nodes that are peers, on the loop of the test, each with a storage of its own."""

from __future__ import annotations

import asyncio
import secrets
import time
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from storage_rig import FRAME, Client, namespace, storage

from lmkv.config.peer import PeerConfig
from lmkv.frame import frame_bytes
from lmkv.peer.link import Frame
from lmkv.peer.node import PeerNode
from lmkv.plugins import PluginHost
from lmkv.storage.coding import complete
from lmkv.types import ChunkKey

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Coroutine, Sequence

    from lmkv.keys import KeyChain, Namespace
    from lmkv.memory import MemoryObject
    from lmkv.peer.link import PeerLink
    from lmkv.storage.manager import StorageManager
    from lmkv.types import Outcome

SPACE = namespace()
KEY = "a key of more than sixteen characters"


class Clock:
    """Seconds that pass when the test says so, besides those that pass anyway."""

    def __init__(self) -> None:
        self.ahead = 0.0

    def __call__(self) -> float:
        return time.monotonic() + self.ahead


class Peer:
    """One node: its storage, what it has to do with others, and an engine's client."""

    def __init__(self, manager: StorageManager, node: PeerNode, space: Namespace | None) -> None:
        self.manager = manager
        self.node = node
        self.client = None if space is None else Client(manager, space)
        self.address = node.address
        self.hall = node._hall

    def link(self, other: Peer | str) -> PeerLink:
        return self.node.peers.link(other if isinstance(other, str) else other.address)

    async def on(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        """The result of a coroutine of a link."""
        return await self.node.peers.attend(coroutine)

    def store(self, keys: KeyChain, *, tail: bool = False, shards: Sequence[int] = (0,)) -> None:
        assert self.client is not None
        self.client.store(self.client.frames(keys, tail=tail), shards=shards)

    def keys(self, keys: KeyChain, shard: int = 0) -> list[ChunkKey]:
        assert self.client is not None
        return [ChunkKey(self.client.space.id, shard, digest) for digest in keys.digests]

    def memory(self, count: int, nbytes: int = FRAME) -> list[MemoryObject]:
        made = [self.manager.pool.allocate(nbytes, "test") for _ in range(count)]
        assert None not in made
        return [obj for obj in made if obj is not None]

    async def pull(
        self, other: Peer | str, keys: Sequence[ChunkKey], *, seconds: float = 10.0, bring: bool = False
    ) -> tuple[list[Outcome], list[bytes]]:
        """Outcomes, and the bytes of those that came."""
        assert self.client is not None
        into = self.memory(len(keys), frame_bytes(2 * self.client.space.page_bytes[0], 1))
        try:
            until = time.monotonic() + seconds
            outcomes = await self.on(self.link(other).pull(keys, into, until, bring=bring))
            return outcomes, [bytes(o.view[: r.nbytes]) for o, r in zip(into, outcomes, strict=True) if r.ok]
        finally:
            for obj in into:
                obj.release("test")

    def at_rest(self) -> bool:
        """Nothing is held for anybody."""
        held = [owners for _, _, owners in self.manager.pool.holders() if set(owners) - {"ram"}]
        return (
            not held
            and not self.manager.index.books.holds
            and not self.manager.stack.room.filling
            and not self.hall.lent
            and not self.hall.quarantine.nbytes
            and not self.hall.incoming.admitted
        )


@asynccontextmanager
async def peer(
    name: str = "a",
    *,
    ram: int = 8 * FRAME,
    pool: int | None = None,
    below: Sequence[Any] = (),
    space: Namespace | None = SPACE,
    host: PluginHost | None = None,
    clock: Callable[[], float] = time.monotonic,
    **settings: Any,
) -> AsyncIterator[Peer]:
    """A node that listens on the loopback (`listen=None`: it does not)."""
    config = PeerConfig(**({"listen": "127.0.0.1:0", "share": "100%", "transports": ("tcp",)} | settings))
    async with storage(ram=ram, pool=pool or 3 * ram, below=below, clock=clock) as manager:
        node = await PeerNode.start(
            config, manager, host or PluginHost.discover(), name=name, incarnation=secrets.randbits(62) + 1
        )
        try:
            yield Peer(manager, node, space)
        finally:
            await node.close()


async def eventually(condition: Callable[[], bool], seconds: float = 20.0) -> None:
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until
        await asyncio.sleep(0.005)


def borrowed(node: Peer, keys: KeyChain) -> list[Frame]:
    """Frames of what a node has, whether or not they carry their trailers; each held until `drop`."""
    found = []
    for key in node.keys(keys):
        entry = node.manager.index.entry(key)
        assert entry is not None
        obj = node.manager.stack.in_pool(entry, 0)
        assert obj is not None
        found.append(Frame(key, entry.parent, entry.pages, entry.packed, obj))
    return found


def sealed(node: Peer, keys: KeyChain) -> list[Frame]:
    """As `borrowed`, as they are pushed."""
    frames = borrowed(node, keys)
    for frame in frames:
        entry = node.manager.index.entry(frame.key)
        assert entry is not None
        complete(frame.object, node.manager.stack.trailer(entry, 0))
    return frames


def drop(frames: list[Frame]) -> None:
    """Let go of what `borrowed` or `sealed` gave."""
    for frame in frames:
        frame.object.release("get")
