"""A fake engine on the real stack: paged KV in host memory, and a model that makes every wrong byte visible.

Every page starts as `SENTINEL`. The KV of a token is a digest of everything that it may depend on (salt, adapter,
images, all tokens up to it) and of layer and shard: bytes of another prompt, position, layer or rank never pass for it.
An engine takes whole pages only, so an offer is rounded down to them.
"""

from __future__ import annotations

import hashlib
import struct
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from lmkv.config import load_config
from lmkv.engine import CacheEngine, RetrieveItem
from lmkv.engine.lookup import NOTHING
from lmkv.frame import frame_bytes
from lmkv.gpu import CPUConnector
from lmkv.keys import Extras, Namespace
from lmkv.layout import PageLayout, PageRun
from lmkv.plugins import PluginHost
from lmkv.service import LocalClient, ThreadHost

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from concurrent.futures import Future
    from pathlib import Path

    from numpy.typing import NDArray

    from lmkv.config import Config
    from lmkv.engine import Hit, LookupTicket
    from lmkv.service.link import StorageClient
    from lmkv.storage import StorageManager

CHUNK = 4
PAGE = 2
SENTINEL = 0xA5
NO_EXTRAS = Extras()
PLUGINS = PluginHost.discover()


@dataclass(frozen=True)
class Shape:
    """What the engine declares of one shard."""

    layers: int = 4
    slot: int = 32
    """Bytes of one token in one layer; a multiple of 16."""
    order: str = "LBHC"
    dtype: str = "bf16"

    @property
    def layout(self) -> PageLayout:
        """One buffer, and one run of a page, for each layer."""
        size = PAGE * self.slot
        runs = tuple(PageRun(layer, 0, size, size) for layer in range(self.layers))
        return PageLayout("fake", self.dtype, PAGE, runs, (("order", self.order),))

    @property
    def frame(self) -> int:
        """Bytes of a full chunk's frame."""
        return frame_bytes(CHUNK * self.slot * self.layers, CHUNK // PAGE - 1)


SHAPE = Shape()
FRAME = SHAPE.frame


def namespace(*shapes: Shape, model: str = "m", revision: str = "r1", kv_dtype: str = "bf16") -> Namespace:
    """The namespace of an engine with one shard for each shape (default: one)."""
    layouts = [shape.layout for shape in shapes or (SHAPE,)]
    return Namespace(
        model=model,
        revision=revision,
        kv_dtype=kv_dtype,
        layouts=tuple(layout.describe() for layout in layouts),
        page_bytes=tuple(layout.page_bytes for layout in layouts),
        chunk_tokens=CHUNK,
        page_tokens=PAGE,
    )


def stack(folder: Path | None = None, *, ram: int | None = 64 * FRAME, disk: int = 256 * FRAME, **more: Any) -> Config:
    """A RAM tier (unless `ram` is None) above a disk tier (if there is a `folder`), in a pool of 1 MiB.

    Keyword arguments `ram_…` and `disk_…` are settings of these tiers, others whole groups of the configuration.
    """
    tiers: list[dict[str, Any]] = []
    groups: dict[str, Any] = {
        "chunk_tokens": CHUNK,
        "pool": {"size": 1 << 20, "staging": 4 * FRAME, "prefault": False},
    }
    if ram is not None:
        tiers.append({"name": "ram", "backend": "cpu", "capacity": ram})
    if folder is not None:
        tiers.append({"name": "disk", "backend": "disk", "capacity": disk, "options": {"path": str(folder)}})
    for name, value in more.items():
        tier, _, key = name.partition("_")
        if tier in {"ram", "disk"} and key:
            next(t for t in tiers if t["name"] == tier)[key] = value
        else:
            groups[name] = value
    return load_config({"tiers": tiers, **groups}, host=PLUGINS, environ={})


class Model:
    """What each token's KV is."""

    def __init__(self, shape: Shape, shard: int) -> None:
        self._shape = shape
        self._shard = shard

    def kv(self, tokens: Sequence[int], extras: Extras = NO_EXTRAS) -> NDArray[np.uint8]:
        """[layer, token, byte]"""
        state = hashlib.blake2b(repr((extras.salt, extras.adapter, extras.adapter_version)).encode())
        made = np.empty((self._shape.layers, len(tokens), self._shape.slot), np.uint8)
        for position, token in enumerate(tokens):
            seen = [m.identity for m in extras.media if m.start <= position < m.start + m.length]
            state.update(struct.pack("<I", token) + repr(seen).encode())
            for layer in range(self._shape.layers):
                made[layer, position] = self._slot(state.digest(), layer)
        return made

    def _slot(self, context: bytes, layer: int) -> NDArray[np.uint8]:
        made = hashlib.blake2b(context + bytes((layer, self._shard)), digest_size=16).digest()
        return np.frombuffer(made * (self._shape.slot // 16), np.uint8)


class FakeEngine:
    """One rank: pages, the model, and a cache engine on a client of its own."""

    def __init__(
        self,
        client: StorageClient,
        *,
        space: Namespace | None = None,
        shard: int = 0,
        shape: Shape = SHAPE,
        pages: int = 256,
    ) -> None:
        layout = shape.layout
        self.shape = shape
        self.kv = [np.full((pages, PAGE, shape.slot), SENTINEL, np.uint8) for _ in range(shape.layers)]
        self.model = Model(shape, shard)
        self.gpu = CPUConnector(layout, self.kv)
        self.cache = CacheEngine(client, space or namespace(shape), shard=shard, gpu=self.gpu)
        self.free = list(range(pages))

    def take(self, tokens: int) -> NDArray[np.int64]:
        """Fresh pages for so many tokens."""
        count = -(-tokens // PAGE)
        ids = np.array([self.free.pop() for _ in range(count)], np.int64)
        self.wipe(ids)
        return ids

    def give(self, ids: NDArray[np.int64]) -> None:
        """Pages that nobody uses any more."""
        self.free += ids.tolist()

    def wipe(self, ids: NDArray[np.int64]) -> None:
        """As they were in the beginning."""
        for layer in self.kv:
            layer[ids] = SENTINEL

    def compute(
        self, tokens: Sequence[int], ids: NDArray[np.int64], first: int = 0, *, extras: Extras = NO_EXTRAS
    ) -> None:
        """The model writes the KV of the tokens from `first` on."""
        made = self.model.kv(tokens, extras)
        for layer, values in zip(self.kv, made, strict=True):
            for position in range(first, len(tokens)):
                layer[ids[position // PAGE], position % PAGE] = values[position]

    def wrong(
        self, tokens: Sequence[int], ids: NDArray[np.int64], stop: int | None = None, *, extras: Extras = NO_EXTRAS
    ) -> list[int]:
        """Positions before `stop` whose KV is not what the model makes of them."""
        made = self.model.kv(tokens, extras)
        return [
            position
            for position in range(len(tokens) if stop is None else stop)
            if any(
                not np.array_equal(layer[ids[position // PAGE], position % PAGE], values[position])
                for layer, values in zip(self.kv, made, strict=True)
            )
        ]

    def untouched(self, ids: NDArray[np.int64]) -> bool:
        """Nobody has written to these pages since they were taken."""
        return all(bool((layer[ids] == SENTINEL).all()) for layer in self.kv)

    def store(self, tokens: Sequence[int], *, extras: Extras = NO_EXTRAS) -> int:
        """Compute a prompt, store it, give its pages back; the number of tokens that are in the cache now."""
        ids = self.take(len(tokens))
        self.compute(tokens, ids, extras=extras)
        stored = self.cache.store(tokens, ids, extras=extras)
        self.wipe(ids)
        self.give(ids)
        return int(stored.sum())

    def find(self, tokens: Sequence[int], *, extras: Extras = NO_EXTRAS) -> int:
        """Tokens that a look-up finds; nothing is held or loaded."""
        return self.cache.lookup(tokens, extras)

    def load(self, tokens: Sequence[int], *, extras: Extras = NO_EXTRAS) -> int:
        """Bring a prompt back into fresh pages; how many of its tokens came, all of them right."""
        ids = self.take(len(tokens))
        came = int(self.cache.retrieve(tokens, ids[: len(tokens) // PAGE], extras=extras).sum())
        assert not self.wrong(tokens, ids, came, extras=extras), "wrong bytes offered as right"
        self.wipe(ids)
        self.give(ids)
        return came


class Request:
    """One request on all ranks, step by step as a scheduler drives it; may be aborted before, during or after any."""

    def __init__(
        self, ranks: Sequence[FakeEngine], tokens: Sequence[int], *, has: int = 0, extras: Extras = NO_EXTRAS
    ) -> None:
        """`has`: tokens that the engine's own prefix cache has, in pages of the request's own."""
        self.ranks = ranks
        self.tokens = list(tokens)
        self.extras = extras
        self.has = has
        self.hit: Hit = NOTHING
        self.offered = 0
        self.computed = 0
        self.ids: list[NDArray[np.int64]] = []
        self.ticket: LookupTicket | None = None
        self.over = False
        self._released = False

    def queue(self) -> Request:
        """It has come: its look-up begins."""
        chain = self.ranks[0].cache.chain(self.extras)
        chain.extend(self.tokens)
        self.ticket = self.ranks[0].cache.begin_lookup(chain)
        return self

    def look_up(self) -> Request:
        """The answer, and what the engine is offered: never its last token, whole pages, never negative."""
        assert self.ticket is not None
        self.hit = self.ticket.wait(5.0) or NOTHING
        self.offered = max(0, min(self.hit.tokens, len(self.tokens) - 1) - self.has) // PAGE * PAGE
        return self

    def allocate(self) -> Request:
        """Pages, of which the engine's own prefix cache fills the first; what is not needed of the hit is let go."""
        self.ids = [rank.take(len(self.tokens)) for rank in self.ranks]
        for rank, ids in zip(self.ranks, self.ids, strict=True):
            rank.compute(self.tokens[: self.has], ids, extras=self.extras)
        self.computed = self.has
        if not self.offered:
            self._release()
        elif skip := self.has // CHUNK:
            self.ranks[0].cache.trim(self.hit.lease, skip)
        return self

    def load(self) -> Request:
        """Every rank brings back what was offered; the engine goes on after the last token that all of them have."""
        if self.offered:
            came = [self._load(rank, ids) for rank, ids in zip(self.ranks, self.ids, strict=True)]
            self.computed = self.has + min(came)
            self._release()
        return self

    def run(self) -> Request:
        """Compute what is left, after looking at every byte that attention reads."""
        for rank, ids in zip(self.ranks, self.ids, strict=True):
            assert not rank.wrong(self.tokens, ids, self.computed, extras=self.extras), "wrong bytes taken for right"
            rank.compute(self.tokens, ids, self.computed, extras=self.extras)
        return self

    def store(self) -> Request:
        """Put it into the cache."""
        for rank, ids in zip(self.ranks, self.ids, strict=True):
            rank.cache.store(self.tokens, ids[: len(self.tokens) // PAGE], extras=self.extras)
        return self

    def finish(self) -> Request:
        """Give everything back. Idempotent; also what an abort does once no step is under way."""
        if not self.over:
            self.over = True
            if self.ticket is not None and not self._released:
                self._released = True
                self.ticket.cancel()
            for rank, ids in zip(self.ranks, self.ids, strict=False):
                rank.give(ids)
        return self

    def abort(self) -> None:
        """The user has gone: the promise ends at once, whoever still copies. Pages stay until `finish`."""
        if self.ticket is not None and not self._released:
            self._released = True
            self.ticket.cancel()

    def _release(self) -> None:
        if not self._released:
            self._released = True
            self.ranks[0].cache.release(self.hit.lease)

    def _load(self, rank: FakeEngine, ids: NDArray[np.int64]) -> int:
        """Tokens that arrived."""
        items: list[RetrieveItem] = []
        per_chunk = CHUNK // PAGE
        page, stop = self.has // PAGE, (self.has + self.offered) // PAGE
        while page < stop:
            index = page // per_chunk
            end = min(stop, (index + 1) * per_chunk)
            held = per_chunk if index < self.hit.chunks else 0
            items.append(RetrieveItem(index, held, ids[page:end], page - index * per_chunk))
            page = end
        came = rank.cache.retrieve_frames(self.hit.lease, items, timeout=5.0)
        good = came.index(False) if False in came else len(came)
        return sum(len(item.pages) for item in items[:good]) * PAGE


class Node:
    """A storage in a thread, with as many engines as are asked of it; at its end nothing may be held."""

    def __init__(self, config: Config) -> None:
        self.host = ThreadHost(config)
        self.threads = ThreadPoolExecutor(4)
        self._clients: list[LocalClient] = []

    def client(self) -> LocalClient:
        """A session of its own."""
        self._clients.append(LocalClient(self.host, f"engine-{len(self._clients)}"))
        return self._clients[-1]

    def engine(self, **arguments: Any) -> FakeEngine:
        """One rank with a client of its own."""
        return FakeEngine(self.client(), **arguments)

    def ranks(self, space: Namespace, *shapes: Shape) -> list[FakeEngine]:
        """An engine for each shard of a namespace."""
        return [self.engine(space=space, shard=number, shape=shape) for number, shape in enumerate(shapes)]

    @property
    def manager(self) -> StorageManager:
        """To look at, not to touch: it lives on another thread."""
        return self.host.storage.manager

    def on_loop(self, work: Callable[[], Any]) -> Any:
        """Run `work` on the storage loop."""

        async def body() -> Any:
            return work()

        return self.host.run(body(), 10.0)

    def counter(self, name: str, **labels: str) -> float:
        """A counter of the service."""
        return self.manager.metrics.value(name, **labels)

    def start(self, work: Callable[[], Any]) -> Future[Any]:
        """Run `work` in another thread."""
        return self.threads.submit(work)

    def settle(self, seconds: float = 10.0) -> None:
        """Wait until no copy is under way and no message is waiting."""
        until = time.monotonic() + seconds
        while self.on_loop(lambda: any(tier.busy for tier in self.manager.stack.tiers)):
            assert time.monotonic() < until, "a tier is still busy"
            time.sleep(0.002)
        self.host.run(self.manager.stack.loads.finished(), seconds)

    def held(self) -> dict[str, int]:
        """Everything that is held now, by kind."""
        return {name: count for name, count in self.on_loop(self.manager.holds).items() if count and name != "sessions"}

    def close(self) -> None:
        """Nothing may be held; then stop. Idempotent."""
        if self.host.closed:
            return
        try:
            self.settle()
            until = time.monotonic() + 20.0
            while self.held() and time.monotonic() < until:  # the last word of a peer may be on its way
                time.sleep(0.01)
            assert self.held() == {}
        finally:
            self.threads.shutdown()
            self.host.close()


def tokens(count: int, start: int = 1) -> list[int]:
    """Tokens `start`, `start + 1`, …"""
    return list(range(start, start + count))


def prompts(count: int, length: int = CHUNK) -> Iterator[list[int]]:
    """So many prompts that have no first token in common."""
    for number in range(1, count + 1):
        yield tokens(length, 1000 * number)
