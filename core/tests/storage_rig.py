"""What the storage's tests stand on: a real pool and resident tier, and a shelf that can be made to fail."""

from __future__ import annotations

import asyncio
import inspect
import threading
import time
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
from pydantic import BaseModel

from lmkv.backend import StorageBackendInterface
from lmkv.codec.identity import IdentityCodec
from lmkv.codec.zlib import ZlibCodec
from lmkv.frame import frame_bytes
from lmkv.keys import Extras, KeyChain, Namespace
from lmkv.memory import Pool
from lmkv.observe.metrics import Metrics
from lmkv.policy.leaf_first import LeafFirstLRU
from lmkv.service import protocol as p
from lmkv.service.session import Session
from lmkv.specs import BackendContext
from lmkv.storage.inventory import TierSettings
from lmkv.storage.manager import StorageManager
from lmkv.storage.offers import DEFAULT_RULES, Rules
from lmkv.storage.tier import Tier
from lmkv.types import MISS, OK, Capabilities, ChunkKey, Health, HealthState, Outcome, StoredFrame
from lmkv_backend_cpu.backend import CpuBackend

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator, Sequence

    from lmkv.memory import MemoryObject

PAGE_TOKENS = 2
CHUNK_TOKENS = 4
PAGE_BYTES = 3000
FRAME = frame_bytes(PAGE_BYTES * 2, 1)
"""Bytes of a full chunk's frame."""


class Shelf(StorageBackendInterface):
    """Keeps bytes in a dict. Everything can be made to fail: set `on_get`, `on_put` …, called before the work.

    `calls` has what the tier's work is made of; the questions whether it works again are counted in `asked`.
    """

    def __init__(self, *, shared: bool = False, parallelism: int = 2) -> None:
        self.capabilities = Capabilities(
            scan=not shared, persistent=True, shared=shared, batched_contains=shared, parallelism=parallelism
        )
        self.frames: dict[ChunkKey, bytes] = {}
        self.used: dict[ChunkKey, float] = {}
        self.aside: list[ChunkKey] = []
        self.described: dict[bytes, str] = {}
        self.calls: list[tuple[str, int]] = []
        self.on_get: Callable[[Sequence[ChunkKey]], Sequence[Outcome] | None] = lambda _: None
        self.on_put: Callable[[Sequence[ChunkKey]], Sequence[Outcome] | None] = lambda _: None
        self.on_contains: Callable[[Sequence[ChunkKey]], None] = lambda _: None
        self.on_health: Callable[[], Health] = lambda: Health(HealthState.OK)
        self.asked = 0
        self.lock = threading.Lock()

    def contains(self, keys: Sequence[ChunkKey]) -> Sequence[bool]:
        self.calls.append(("contains", len(keys)))
        self.on_contains(keys)
        return [key in self.frames for key in keys]

    def get(self, keys: Sequence[ChunkKey], into: Sequence[MemoryObject]) -> Sequence[Outcome]:
        if keys[0].namespace != bytes(16):  # nobody stores anything there: asked whether loads work again
            self.calls.append(("get", len(keys)))
        answer = self.on_get(keys)
        if answer is not None:
            return answer
        outcomes = []
        for key, target in zip(keys, into, strict=True):
            frame = self.frames.get(key)
            if frame is None:
                outcomes.append(MISS)
                continue
            target.view[: len(frame)] = frame
            outcomes.append(OK(len(frame)))
        return outcomes

    def put(self, keys: Sequence[ChunkKey], objects: Sequence[MemoryObject]) -> Sequence[Outcome]:
        self.calls.append(("put", len(keys)))
        answer = self.on_put(keys)
        if answer is not None:
            return answer
        with self.lock:
            for key, obj in zip(keys, objects, strict=True):
                self.frames[key] = bytes(obj.view)
                self.used[key] = time.time()
        return [OK(obj.nbytes) for obj in objects]

    def delete(self, keys: Sequence[ChunkKey]) -> None:
        with self.lock:
            for key in keys:
                self.frames.pop(key, None)

    def scan(self) -> Iterator[StoredFrame]:
        for key, frame in sorted(self.frames.items(), key=lambda item: self.used[item[0]]):
            yield StoredFrame(key, len(frame), frame[-4096:], self.used[key])

    def touch(self, keys: Sequence[ChunkKey]) -> None:
        for key in keys:
            if key in self.frames:
                self.used[key] = time.time()

    def set_aside(self, keys: Sequence[ChunkKey]) -> None:
        self.aside.extend(keys)
        self.delete(keys)

    def health(self) -> Health:
        self.asked += 1
        return self.on_health()

    def describe(self, namespace: bytes, text: str) -> None:
        self.described[namespace] = text


class NoOptions(BaseModel):
    """The cpu backend has none."""


def namespace(shards: int = 1, *, model: str = "m", page_bytes: int = PAGE_BYTES) -> Namespace:
    layout = {"name": "rig", "dtype": "bf16", "page_tokens": PAGE_TOKENS, "runs": [page_bytes], "tags": []}
    return Namespace(
        model=model,
        revision="r1",
        kv_dtype="bf16",
        layouts=(layout,) * shards,  # type: ignore[arg-type]
        page_bytes=(page_bytes,) * shards,
        chunk_tokens=CHUNK_TOKENS,
        page_tokens=PAGE_TOKENS,
    )


def chain(tokens: Sequence[int], extras: Extras | None = None) -> KeyChain:
    made = KeyChain(CHUNK_TOKENS, PAGE_TOKENS, extras or Extras())
    made.extend(list(tokens))
    return made


def codecs(name: str) -> Any:
    return {"identity": IdentityCodec, "zlib": ZlibCodec}[name]()


@asynccontextmanager
async def storage(
    *,
    ram: int | None = 8 * FRAME,
    below: Sequence[tuple[StorageBackendInterface, dict[str, Any]]] = (),
    staging: int = 2 * FRAME,
    pool: int | None = None,
    lease_seconds: float = 60.0,
    clock: Callable[[], float] = time.monotonic,
    codecs: Callable[[str], Any] = codecs,
    offer: Rules = DEFAULT_RULES,
) -> AsyncIterator[StorageManager]:
    """A storage of a resident tier (unless `ram` is None) and of `below`: (backend, settings)."""
    metrics = Metrics()
    tiers: list[Tier] = []
    if ram is not None:
        backend = CpuBackend(NoOptions(), BackendContext(tier="ram"))
        tiers.append(Tier(0, TierSettings(name="ram", capacity=ram), backend, LeafFirstLRU(), codecs, metrics))
    for shelf, settings in below:
        number = len(tiers)
        made = TierSettings(**({"name": f"shelf{number}", "capacity": None, "threads": 2} | settings))
        policy = None if made.capacity is None else LeafFirstLRU()
        tiers.append(Tier(number, made, shelf, policy, codecs, metrics))
    arena = Pool.create(pool or (ram or 0) + staging, prefault=False, trace=True)
    manager = StorageManager(
        tiers,
        arena,
        metrics,
        staging=staging,
        lease_seconds=lease_seconds,
        chunk_tokens=CHUNK_TOKENS,
        clock=clock,
        offer=offer,
    )
    await manager.recover()
    try:
        yield manager
    finally:
        await manager.close(1.0)


class Client:
    """A client's calls, with the bytes that a fake model makes: every byte tells its chunk and shard."""

    def __init__(self, manager: StorageManager, space: Namespace, name: str = "client") -> None:
        self.manager = manager
        self.space = space
        self.session = Session(manager, name)
        self.ask(p.Register(space.json()))

    def ask(self, message: p.Message) -> Any:
        return self.session.handle(message)

    async def wait(self, message: p.Message) -> Any:
        reply = self.session.handle(message)
        return await reply if inspect.isawaitable(reply) else reply

    def frames(self, keys: KeyChain, *, tail: bool = False) -> list[p.NewFrame]:
        pages = self.space.chunk_pages
        made = [
            p.NewFrame(digest, keys.parent(i), pages, b"".join(keys.prefixes(i)[: pages - 1]))
            for i, digest in enumerate(keys.digests)
        ]
        prefixes = keys.prefixes(len(keys.digests)) if tail else []
        if prefixes:
            made.append(p.NewFrame(prefixes[-1], keys.parent(len(made)), len(prefixes), b"".join(prefixes[:-1])))
        return made

    def payload(self, digest: bytes, shard: int, length: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
        seed = int.from_bytes(digest[:4], "little") + shard
        return np.random.default_rng(seed).integers(0, 256, length, dtype=np.uint8)

    def store(self, frames: Sequence[p.NewFrame], *, shards: Sequence[int] = (0,)) -> list[tuple[int, ...]]:
        """Reserve, fill, commit; the offsets of each shard."""
        offsets = []
        for shard in shards:
            reply = self.ask(p.Reserve(self.space.id, shard, tuple(frames)))
            for frame, offset, length in zip(frames, reply.offsets, reply.lengths, strict=True):
                if offset >= 0:
                    self.manager.pool.view[offset : offset + length] = self.payload(frame.digest, shard, length).data
            if reply.reservation:
                self.ask(p.Commit(reply.reservation))
            offsets.append(reply.offsets)
        return offsets

    async def look_up(self, keys: KeyChain, *, hold: bool = True, rate: float = 0.0) -> p.Found:
        tail = b"".join(keys.prefixes(len(keys.digests)))
        found: p.Found = await self.wait(p.Lookup(self.space.id, b"".join(keys.digests), tail, hold, rate))
        if found.chunks < len(keys.digests) and not found.withheld:
            prefixes = b"".join(keys.prefixes(found.chunks)[: self.space.chunk_pages - 1])
            found = await self.wait(p.Extend(found.lease, self.space.id, found.chunks, prefixes, hold, rate))
        return found

    async def load(self, found: p.Found, keys: KeyChain, *, shard: int = 0, first: int = 0) -> list[bool]:
        """Acquire everything of a lease; which frames came. Checks every byte of those that did."""
        digests = [*keys.digests[: found.chunks], *([found.frame] if found.pages else [])]
        loaded = await self.wait(p.Acquire(found.lease, shard, first, len(digests) - first))
        for digest, offset, length in zip(digests[first:], loaded.offsets, loaded.lengths, strict=True):
            if offset >= 0:
                got = np.frombuffer(self.manager.pool.view[offset : offset + length], dtype=np.uint8)
                assert np.array_equal(got, self.payload(digest, shard, length)), "wrong bytes offered as right"
        if loaded.hold:
            self.ask(p.Done(loaded.hold))
        return [offset >= 0 for offset in loaded.offsets]

    async def settled(self) -> None:
        """Wait until no copy to or from a tier is under way."""
        for _ in range(400):
            await asyncio.sleep(0.005)
            stack = self.manager.stack
            if not any(tier.busy for tier in stack.tiers) and not stack.demotion.busy:
                break
        await self.manager.stack.loads.finished()
        await asyncio.sleep(0.01)
