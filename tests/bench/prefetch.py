"""Slow tiers: what one costs that is off; a load hidden behind the queue; whether loading or computing is chosen."""

from __future__ import annotations

import statistics
import threading
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

from pydantic import BaseModel
from tests.bench.harness import Row, absolute, against
from tests.bench.stack import CHUNK_PAGES, CHUNK_TOKENS, Pages, chain, retrieve_items, store_items

from lmkv.backend import StorageBackendInterface
from lmkv.config import load_config
from lmkv.engine import StoreResult
from lmkv.errors import BackendError
from lmkv.hookspecs import hookimpl
from lmkv.observe.metrics import Metrics
from lmkv.plugins import PluginHost
from lmkv.service import LocalClient, ThreadHost
from lmkv.service.node import NodeStorage
from lmkv.specs import BackendContext, BackendSpec
from lmkv.types import MISS, OK, Capabilities, Health, HealthState

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from lmkv.engine import CacheEngine
    from lmkv.keys import KeyChain
    from lmkv.memory import MemoryObject
    from lmkv.types import ChunkKey, Outcome

MIB = 1 << 20
CHUNK_BYTES = MIB
"""Of an engine with 16 layers of 4 KiB for each page of 16 tokens."""


class SlowOptions(BaseModel):
    """How slow; in seconds, and seconds per chunk of 1 MiB."""

    latency: float = 0.0
    each: float = 0.0


class Slow(StorageBackendInterface):
    """Bytes in a dict behind one link: a call takes the latency, then its bytes take their turn on the link."""

    capabilities = Capabilities(shared=True, batched_contains=True, parallelism=4)
    down = False

    def __init__(self, options: SlowOptions, context: BackendContext) -> None:
        del context
        self._options = options
        self._frames: dict[ChunkKey, bytes] = {}
        self._link = threading.Lock()

    def contains(self, keys: Sequence[ChunkKey]) -> list[bool]:
        if self.down:
            raise BackendError("it is down")
        return [key in self._frames for key in keys]

    def get(self, keys: Sequence[ChunkKey], into: Sequence[MemoryObject]) -> list[Outcome]:
        if self.down:
            raise BackendError("it is down")
        found = [self._frames.get(key) for key in keys]
        time.sleep(self._options.latency)
        with self._link:
            time.sleep(self._options.each * sum(map(len, filter(None, found))) / CHUNK_BYTES)
        outcomes = []
        for frame, target in zip(found, into, strict=True):
            if frame is not None:
                target.view[: len(frame)] = frame
            outcomes.append(MISS if frame is None else OK(len(frame)))
        return outcomes

    def put(self, keys: Sequence[ChunkKey], objects: Sequence[MemoryObject]) -> list[Outcome]:
        if self.down:
            raise BackendError("it is down")
        for key, obj in zip(keys, objects, strict=True):
            self._frames[key] = bytes(obj.view)
        return [OK(obj.nbytes) for obj in objects]

    def delete(self, keys: Sequence[ChunkKey]) -> None:
        for key in keys:
            self._frames.pop(key, None)

    def health(self) -> Health:
        return Health(HealthState.DOWN, "it is down") if self.down else Health(HealthState.OK)


class SlowPlugin:
    """Offers `backend: slow` to this process."""

    @hookimpl
    def lmkv_backends(self) -> list[BackendSpec]:
        """The one."""
        return [BackendSpec(name="slow", summary="a dict", options=lambda: SlowOptions, load=lambda: Slow)]  # type: ignore[arg-type,return-value]


class Node(NamedTuple):
    """A stack of RAM and, below it, perhaps a slow tier."""

    host: ThreadHost
    engine: CacheEngine
    pages: Pages

    def store(self, keys: KeyChain) -> None:
        """Into all tiers, but out of RAM again where there is another."""
        ids = self.pages.scattered(len(keys.digests))
        assert set(self.engine.store_frames(store_items(keys, ids))) <= {StoreResult.STORED, StoreResult.PRESENT}
        self.settle()

    def settle(self) -> None:
        """Until nothing is under way."""

        async def busy() -> bool:  # on the loop: what was sent before has been heard there
            return any(tier.busy for tier in self.host.storage.manager.stack.tiers)

        while self.host.run(busy(), 10):
            time.sleep(0.002)

    def forget(self) -> None:
        """Everything leaves RAM."""
        self.settle()
        self.engine.clear("ram")

    def first_token(self, keys: KeyChain, *, rate: float, queue: float = 0.0, trust: bool = True) -> float:
        """Seconds from a request's arrival until all its KV is there: what is not loaded is computed at `rate`.

        `trust`: let the look-up choose by the rate; else all that is there is loaded.
        """
        begin = time.perf_counter()
        ticket = self.engine.begin_lookup(keys, prefill_rate=rate if trust else 0.0)
        if queue:
            time.sleep(queue)
        hit = ticket.wait(5.0)
        assert hit is not None
        came = self.engine.retrieve_frames(hit.lease, retrieve_items(self.pages.scattered(hit.chunks)))
        assert all(came)
        self.engine.release(hit.lease)
        time.sleep((len(keys.digests) - len(came)) * CHUNK_TOKENS / rate)
        return time.perf_counter() - begin


@contextmanager
def node(*below: dict[str, Any], chunks: int = 64) -> Iterator[Node]:
    """A stack in this process."""
    plugins = PluginHost.discover([SlowPlugin()])
    tiers = [{"name": "ram", "backend": "cpu", "capacity": "100%"}, *below]
    settings = {"chunk_tokens": CHUNK_TOKENS, "pool": {"size": (chunks + 40) * MIB, "staging": "10%"}, "tiers": tiers}
    config = load_config(settings, host=plugins, environ={})

    async def start(config: Any) -> NodeStorage:
        return await NodeStorage.start(config, plugins, Metrics())

    host = ThreadHost(config, start=start)
    try:
        pages = Pages(layers=16, run=4 << 10, pages=chunks * CHUNK_PAGES)
        client = LocalClient(host, "bench")
        while not client.pool.prefaulted:
            time.sleep(0.05)
        yield Node(host, pages.engine(client), pages)
        client.close()
    finally:
        host.close()


def tier_down() -> list[Row]:
    """A request of 32 chunks, half of them in RAM, that stores one: with a shared tier that is off, and without."""
    off = {"backend": "slow", "name": "off", "breaker": {"probe": "1h"}}
    added = []
    with node() as without, node(off) as beside:
        tier = beside.host.storage.manager.tier("off")
        tier.backend.down = True  # type: ignore[attr-defined]
        beside.host.loop.call_soon_threadsafe(tier.look)
        while tier.readable:
            time.sleep(0.01)
        for number in range(1001):
            keys, fresh = chain(32, 1), chain(1, 1000 + number)
            head = chain(32, 1)
            times = []
            for where in (without, beside) if number % 2 else (beside, without):
                if not number:
                    where.engine.store_frames(store_items(head, where.pages.scattered(32))[:16])
                items = store_items(fresh, where.pages.scattered(1))
                begin = time.perf_counter()
                hit = where.engine.begin_lookup(keys).wait(5.0)
                assert hit is not None
                assert hit.chunks == 16
                where.engine.release(hit.lease)
                where.engine.store_frames(items)
                where.engine.health()  # answered after all of it
                times.append((time.perf_counter() - begin) * 1e6)
            if number:
                without_it, with_it = times if number % 2 else reversed(times)
                added.append(with_it - without_it)
    return [absolute("a tier that is down, breaker open: added per request", "us", added, at_most=100)]


def hidden() -> list[Row]:
    """A request that waits 200 ms in the engine's queue; 8 chunks on a tier with 20 ms each, or in RAM."""
    queue, rate = 0.2, 20_000.0
    pairs, after = [], []
    with node({"backend": "slow", "name": "slow", "options": {"each": 0.02}}) as here:
        keys = chain(8, 1)
        here.store(keys)
        for number in range(11):
            here.forget()
            slow = here.first_token(keys, rate=rate, queue=queue, trust=False)
            ram = here.first_token(keys, rate=rate, queue=queue)
            if number:
                pairs.append((slow * 1e3, ram * 1e3))
                after.append((slow - ram) * 1e3)
    return [
        against("prefetch while queued, 8 chunks of 20 ms: first token, against RAM", "ms", pairs, at_most=1.05),
        absolute("prefetch while queued: what is left to wait for", "ms", after, at_most=10),
    ]


class Regime(NamedTuple):
    """A tier and an engine."""

    name: str
    latency: float
    each: float
    """Seconds to load a chunk, latency aside."""
    computed: float
    """Seconds to compute one."""
    lengths: tuple[int, ...]
    """In chunks."""


MOST_REGRET = 1.15
REGIMES = (
    Regime("latency 100 ms, then twice as fast as computing", 0.1, 0.01, 0.02, (1, 4, 7, 9, 10, 11, 12, 14, 18, 28)),
    Regime("slower than computing", 0.0, 0.03, 0.02, (1, 2, 8, 17, 28)),
    Regime("faster than computing", 0.0, 0.01, 0.02, (1, 2, 8, 17, 28)),
)


def crossing() -> list[Row]:
    """The shape of Figure 15 of the LMCache paper: loading against computing over the length of the prefix."""
    rows = []
    for regime in REGIMES:
        load, compute, chosen, loads = _sweep(regime)
        regret = max(chosen[n] / min(load[n], compute[n]) for n in regime.lengths)
        what = f"load or compute, {regime.name}: worst length, against the better"
        rows.append(Row(what, "x", regret, 1.0, regret, "<= 1.15 x", regret <= MOST_REGRET))
        if regime.latency:
            said = float(min((n for n in regime.lengths if loads[n]), default=2 * regime.lengths[-1]))
            found = _crossing(load, compute)
            what = "load or compute: length from which on it loads, against where the lines cross"
            holds = found / 1.25 <= said <= found * 1.25
            rows.append(Row(what, "chunks", said, found, said / found, "0.8 to 1.25 x", holds))
    return rows


Times = dict[int, float]


def _sweep(regime: Regime) -> tuple[Times, Times, Times, dict[int, bool]]:
    """For each length: seconds when all is loaded, when all is computed, when the system chooses; whether it loads."""
    rate = CHUNK_TOKENS / regime.computed
    slow = {"backend": "slow", "name": "slow", "options": {"latency": regime.latency, "each": regime.each}}
    load: dict[int, list[float]] = {n: [] for n in regime.lengths}
    compute: dict[int, list[float]] = {n: [] for n in regime.lengths}
    chosen: dict[int, list[float]] = {n: [] for n in regime.lengths}
    loads: dict[int, list[bool]] = {n: [] for n in regime.lengths}
    with node(slow) as here:
        everything = {n: chain(n, n) for n in regime.lengths}
        for keys in everything.values():
            here.forget()
            here.store(keys)
        for number in range(5):
            for n, keys in everything.items():
                here.forget()
                load[n].append(here.first_token(keys, rate=rate, trust=False))
                here.forget()
                compute[n].append(here.first_token(chain(n, 1000 * number + n), rate=rate))
                chosen[n].append(here.first_token(keys, rate=rate))
                loads[n].append(bool(here.host.storage.manager.tier("ram").index))
    middle = statistics.median
    return (
        {n: middle(times) for n, times in load.items()},
        {n: middle(times) for n, times in compute.items()},
        {n: middle(times) for n, times in chosen.items()},
        {n: sum(said) > len(said) / 2 for n, said in loads.items()},
    )


def _crossing(load: Times, compute: Times) -> float:
    """The length at which loading becomes the quicker one, between two of those that were measured."""
    before = 0, 1.0
    for n in load:
        over = load[n] - compute[n]
        if over <= 0:
            return before[0] + (n - before[0]) * before[1] / (before[1] - over)
        before = n, over
    return float("inf")
