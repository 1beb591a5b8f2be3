"""From a configuration to tiers: the one place where plugins become backends."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lmkv.errors import ConfigError, LmkvError
from lmkv.specs import BackendContext
from lmkv.storage.codecs import Codecs
from lmkv.storage.coding import IDENTITY
from lmkv.storage.inventory import TierSettings
from lmkv.storage.tier import Tier

if TYPE_CHECKING:
    from lmkv.config import Config, Limits, TierConfig
    from lmkv.observe.metrics import Metrics
    from lmkv.plugins import PluginHost


def build_tiers(config: Config, limits: Limits, host: PluginHost, metrics: Metrics) -> list[Tier]:
    """Start every backend of the configuration. Blocks. When one fails, those before it are closed again.

    Raises:
        ConfigError: a resident tier that is not the first, or whatever a backend finds wrong.
        PluginError: a plugin that the configuration names cannot be loaded.
        BackendError: a backend cannot be started; the message names the tier.
    """
    codecs = Codecs([entry.codec for entry in config.tiers], host)
    tiers: list[Tier] = []
    try:
        for number, entry in enumerate(config.tiers):
            tier = build_tier(number, entry, limits.capacities[number], config.ranks, host, codecs, metrics)
            tiers.append(tier)
            _check(tier)
    except BaseException:
        for tier in tiers:
            tier.close(1.0)
        raise
    return tiers


def _check(tier: Tier) -> None:
    """What only the started backend tells."""
    if tier.resident and tier.number:
        raise ConfigError(f"tier {tier.name!r} keeps frames in host memory: it must be the first of the stack")
    if tier.resident and tier.settings.codec != IDENTITY:
        raise ConfigError(f"tier {tier.name!r} keeps frames as the engine needs them: it takes no codec")
    if tier.backend.capabilities.read_only and tier.settings.write != "never":
        raise ConfigError(f"tier {tier.name!r} only reads: set its `write: never` (it says {tier.settings.write!r})")
    if tier.capacity is None and not tier.shared:
        raise ConfigError(f"tier {tier.name!r} needs a capacity: this node alone decides what it holds")


def build_tier(  # noqa: PLR0917  what one tier is made of
    number: int,
    entry: TierConfig,
    capacity: int | None,
    ranks: int,
    host: PluginHost,
    codecs: Codecs,
    metrics: Metrics,
) -> Tier:
    """One tier, its backend started."""
    codec = codecs.of(entry.codec, entry.name)
    factory = host.load_backend(entry.backend)
    context = BackendContext(tier=entry.name, capacity=capacity, ranks=ranks, deadline=entry.deadline)
    try:
        backend = factory(entry.options, context)
    except (LmkvError, OSError) as e:
        e.args = (f"tier {entry.name!r} (backend {entry.backend!r}) cannot be started: {e}", *e.args[1:])
        raise
    settings = TierSettings(
        name=entry.name,
        capacity=capacity,
        write=entry.write,
        read=entry.read,
        codec=codec(entry.codec.name).name,
        deadline=entry.deadline,
        threads=entry.threads or backend.capabilities.parallelism,
        queue_calls=entry.queue.calls,
        queue_bytes=entry.queue.bytes,
        queue_seconds=entry.queue.seconds,
        failures=entry.breaker.failures,
        probe=entry.breaker.probe,
    )
    policy = None if capacity is None else host.load_policy(entry.evict)
    return Tier(number, settings, backend, policy, codec, metrics)
