"""StorageManager: one node's stack, index and promises, behind the messages of its clients.

Everything here runs on one asyncio loop: one writer, no locks. What a client may ask is in `lmkv.service.session`.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from typing import TYPE_CHECKING, Protocol

from lmkv.errors import ConfigError
from lmkv.frame import frame_bytes
from lmkv.keys import Namespace
from lmkv.memory import Pool
from lmkv.storage.build import build_tiers
from lmkv.storage.index import Index
from lmkv.storage.leases import Holdings
from lmkv.storage.offers import DEFAULT_RULES, Offers, Rules
from lmkv.storage.recovery import recover
from lmkv.storage.stack import Stack
from lmkv.types import HealthState

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from lmkv.config import Config
    from lmkv.memory import MemoryObject
    from lmkv.observe.metrics import Metrics
    from lmkv.plugins import PluginHost
    from lmkv.storage.index import Entry, NamespaceIndex
    from lmkv.storage.leases import Slot
    from lmkv.storage.tier import Tier

log = logging.getLogger(__name__)


class Client(Protocol):
    """What the manager needs to know of a client's session."""

    holds: dict[int, list[MemoryObject]]
    reservations: dict[int, list[Slot]]

    def close(self) -> None:
        """Give back everything."""


class StorageManager:
    """The storage of one node. Build it with `start`; every method belongs to the loop that it was started on.

    Attributes:
        pool: the arena that all frames of the node lie in.
    """

    def __init__(
        self,
        tiers: Sequence[Tier],
        pool: Pool,
        metrics: Metrics,
        *,
        staging: int,
        lease_seconds: float = 60.0,
        chunk_tokens: int = 256,
        tail: str = "pages",
        clock: Callable[[], float] = time.monotonic,
        offer: Rules = DEFAULT_RULES,
    ) -> None:
        self.pool = pool
        self.metrics = metrics
        self.chunk_tokens = chunk_tokens
        self.tail = tail
        self.index = Index()
        self.stack = Stack(tiers, pool, self.index, metrics, staging=staging)
        self.offers = Offers(self.stack, offer)
        self.holdings = Holdings(lease_seconds, clock)
        self.sessions: set[Client] = set()
        self._unused: dict[bytes, float] = {}
        """Namespaces without a client and without an entry; since when."""
        self._unused_seconds = 2 * lease_seconds
        self.pinned: set[Entry] = set()
        self.declared: dict[bytes, str] = {}
        """Canonical JSON of the namespaces that clients have declared, by their ids."""
        self.on_namespace: Callable[[NamespaceIndex], None] = lambda _: None
        """Called when a namespace has been declared for the first time."""
        self.clock = clock
        self._closed = False
        self._keeper = asyncio.get_running_loop().create_task(self._keep_house(min(1.0, lease_seconds / 4)))

    @classmethod
    async def start(cls, config: Config, host: PluginHost, metrics: Metrics) -> StorageManager:
        """Build the pool and the tiers of `config`, and take what persistent tiers hold into the index.

        Raises:
            ConfigError: limits that do not fit, a folder that cannot be used.
            PluginError: a backend, codec or policy that the configuration names cannot be loaded.
            BackendError: a tier cannot be started.
        """
        limits = config.limits()
        tiers = await asyncio.to_thread(build_tiers, config, limits, host, metrics)
        try:
            pool = Pool.create(
                limits.pool_bytes,
                hugepages=config.pool.hugepages,
                prefault=config.pool.prefault,
                trace=config.pool.trace,
            )
        except BaseException:
            for tier in tiers:
                tier.close(1.0)
            raise
        manager = cls(
            tiers,
            pool,
            metrics,
            staging=limits.staging_bytes,
            lease_seconds=config.leases.seconds,
            chunk_tokens=config.chunk_tokens,
            tail=config.tail,
            offer=Rules(config.offer.mode == "measured", config.offer.min_tokens, config.offer.max_wait),
        )
        try:
            await asyncio.to_thread(manager.attach)
            await manager.recover()
        except BaseException:
            await manager.close(1.0)
            raise
        for tier in tiers:
            tier.look()
        manager.gauge()
        return manager

    def attach(self) -> None:
        """Show the pool to the backends that register it. Blocks."""
        for tier in self.stack.tiers:
            if tier.backend.capabilities.registered_memory:
                tier.backend.attach(self.pool)

    @property
    def tiers(self) -> tuple[str, ...]:
        """Names, fastest first."""
        return tuple(tier.name for tier in self.stack.tiers)

    def tier(self, name: str) -> Tier:
        """The tier of that name; `ConfigError` names those that there are."""
        for tier in self.stack.tiers:
            if tier.name == name:
                return tier
        raise ConfigError(f"there is no tier {name!r}; tiers: {', '.join(self.tiers)}", kind="unknown-tier")

    # --- namespaces --------------------------------------------------------------------------------------------------

    def register(self, text: str) -> NamespaceIndex:
        """Make a namespace usable; refuses one whose frames can never fit, with the numbers."""
        namespace = Namespace.from_json(text)
        prefixes = namespace.chunk_pages - 1
        sizes = [frame_bytes(namespace.chunk_pages * nbytes, prefixes) for nbytes in namespace.page_bytes]
        for tier in self.stack.tiers:
            most = sum(map(tier.coder.bound, sizes))
            if tier.capacity is not None and most > tier.capacity:
                raise ConfigError(
                    f"tier {tier.name!r} holds {tier.capacity} bytes, but one chunk of {namespace.chunk_tokens} "
                    f"tokens takes {most} bytes ({len(sizes)} shards): raise its capacity or lower chunk_tokens",
                    kind="too-small",
                )
            tier.coder.check_dtypes({layout["dtype"] for layout in namespace.layouts})
        if max(sizes) > self.pool.nbytes:
            raise ConfigError(
                f"the pool has {self.pool.nbytes} bytes, but one frame takes {max(sizes)}: raise pool.size",
                kind="too-small",
            )
        known = self.index.namespace(namespace.id)
        if known.shards:
            return known
        known.shards = namespace.shards
        known.chunk_pages = namespace.chunk_pages
        known.page_bytes = namespace.page_bytes
        known.page_total = sum(namespace.page_bytes)
        known.layouts = namespace.layouts
        self.declared[known.id] = text
        for tier in self.stack.tiers:
            tier.describe(namespace.id, text)
        self.on_namespace(known)
        return known

    async def recover(self) -> None:
        """Take the frames that persistent tiers still hold into the index, oldest first, and enforce the capacities."""
        for tier in self.stack.tiers:
            capabilities = tier.backend.capabilities
            if tier.shared or not capabilities.scan:
                continue
            damaged = await recover(tier, self.index)
            if damaged:
                tier.set_aside(damaged)
                self.metrics.inc("lmkv_corrupt_frames_total", len(damaged), tier=tier.name)
            if tier.settings.write != "never":
                self.stack.evict(tier, tier.shortfall(0), whole=False)

    # --- promises ----------------------------------------------------------------------------------------------------

    def end_lease(self, number: int) -> None:
        """Give back everything that a lease holds; idempotent."""
        lease = self.holdings.leases.pop(number, None)
        if lease is not None:
            self.stack.settle_all(lease.end())

    def pin(self, entry: Entry, seconds: float | None) -> None:
        """Keep `entry` from eviction; None: until `unpin`."""
        self.pinned.add(entry)
        entry.pinned_until = math.inf if seconds is None else max(entry.pinned_until, time.monotonic() + seconds)

    def unpin(self, entry: Entry) -> bool:
        """Take the pin away; whether there was one."""
        pinned = entry.pinned_until > time.monotonic()
        entry.pinned_until = -math.inf
        self.pinned.discard(entry)
        return pinned

    async def _keep_house(self, interval: float) -> None:
        while True:
            await asyncio.sleep(interval)
            try:
                self._tidy()
            except Exception:
                # One fault must not let every later lease last for ever.
                log.exception("housekeeping failed", extra={"key": "housekeeping"})

    def _tidy(self) -> None:
        for number in self.holdings.expired():
            self.end_lease(number)
            self.metrics.inc("lmkv_leases_expired_total")
        for tier in self.stack.tiers:
            tier.tidy()
        self._forget_unused()
        now = time.monotonic()
        self.pinned = {e for e in self.pinned if e.pinned_until > now and e.visible}
        self.gauge()

    def _forget_unused(self) -> None:
        """Drop the namespaces of which nothing is left, such as those before a reset.

        Later than any lease that was given: nothing of them is held or on its way then.
        """
        now = self.clock()
        unused = [n.id for n in self.index.namespaces.values() if not n.clients and not n.entries]
        self._unused = {identity: self._unused.get(identity, now) for identity in unused}
        for identity in unused:
            if now - self._unused[identity] >= self._unused_seconds:
                del self._unused[identity], self.index.namespaces[identity]
                self.declared.pop(identity, None)
                for tier in self.stack.tiers:
                    tier.forget_namespace(identity)

    def gauge(self) -> None:
        """Bring the gauges up to date."""
        m = self.metrics
        m.set("lmkv_pool_bytes", self.pool.nbytes)
        m.set("lmkv_pool_free_bytes", self.pool.free_bytes)
        m.set("lmkv_leases", len(self.holdings.leases))
        m.set("lmkv_pins", len(self.pinned))
        m.set("lmkv_sessions", len(self.sessions))
        for tier in self.stack.tiers:
            m.set("lmkv_tier_used_bytes", tier.used, tier=tier.name)
            m.set("lmkv_tier_capacity_bytes", tier.capacity or 0, tier=tier.name)
            m.set("lmkv_tier_open", float(not (tier.readable and tier.writable)), tier=tier.name)
            m.set("lmkv_tier_queue_calls", tier.queue()[0], tier=tier.name)
            loads = tier.cost("get")
            m.set("lmkv_tier_load_latency_seconds", loads.latency(), tier=tier.name)
            m.set("lmkv_tier_load_bytes_per_second", loads.bandwidth(tier.settings.threads), tier=tier.name)

    def holds(self) -> dict[str, int]:
        """Numbers of everything that is held now; all zero when no client has anything under way."""
        return {
            "leases": len(self.holdings.leases),
            "holds": sum(len(s.holds) for s in self.sessions),
            "reservations": sum(len(s.reservations) for s in self.sessions),
            "entries": self.index.books.holds,
            "sessions": len(self.sessions),
        }

    def health(self) -> tuple[str, dict[str, dict[str, str | int | float]]]:
        """Overall state and, for each tier, state, detail, used bytes and capacity."""
        tiers: dict[str, dict[str, str | int | float]] = {}
        worst = HealthState.OK
        for tier in self.stack.tiers:
            health = tier.health()
            if health.state is not HealthState.OK:
                worst = HealthState.DEGRADED
            tiers[tier.name] = {
                "state": health.state.value,
                "detail": health.detail,
                "used_bytes": tier.used,
                "frames": len(tier.index),
                "capacity_bytes": tier.capacity or 0,
                "load_latency_seconds": tier.cost("get").latency(),
                "load_bytes_per_second": tier.cost("get").bandwidth(tier.settings.threads),
            }
        return worst.value, tiers

    # --- end ---------------------------------------------------------------------------------------------------------

    async def close(self, deadline: float = 5.0) -> None:
        """Stop. Writes that wait get most of `deadline` (seconds) to finish; returns by then, whatever hangs.

        Idempotent.
        """
        if self._closed:
            return
        self._closed = True
        end = time.monotonic() + deadline
        self._keeper.cancel()
        for tier in self.stack.tiers:
            tier.leave_alone()
        self.stack.demotion.stop()
        for session in list(self.sessions):
            session.close()
        while time.monotonic() < end - deadline / 4 and any(t.busy for t in self.stack.tiers):  # noqa: ASYNC110
            await asyncio.sleep(0.005)
        self.stack.loads.cancel()
        left = max(0.0, end - time.monotonic())
        closing = [asyncio.to_thread(tier.close, left) for tier in self.stack.tiers if not tier.resident]
        closed = await asyncio.gather(*closing, return_exceptions=True)
        for tier in self.stack.tiers:
            if tier.resident:
                tier.close(0.0)
        for offset, nbytes, owners in self.pool.holders():
            log.warning("still held: %d bytes at %d, by %s", nbytes, offset, dict(owners))
        if all(result is True for result in closed):
            self.pool.close()
        else:
            log.warning("closed while a backend still hangs in a call; its memory goes with the process")
