"""What no single setting can tell: names that must exist, settings that contradict each other."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from lmkv.config.fleet import controller_faults, events_faults
from lmkv.config.peer import peer_faults
from lmkv.errors import PluginError
from lmkv.observe.address import loopback

if TYPE_CHECKING:
    from collections.abc import Iterator

    from lmkv.config.faults import Path
    from lmkv.config.model import Config, TierConfig
    from lmkv.config.peer import PeerConfig
    from lmkv.plugins import PluginHost

_SOCKET_PATH_MAX: Final = 107
"""Bytes that the kernel takes for the path of a unix socket."""


def cross_check(config: Config, host: PluginHost, unknown: frozenset[Path]) -> Iterator[tuple[Path, str]]:
    """Faults in `config` by path. Settings in `unknown` are faulty already: nothing is concluded from them."""
    if not config.tiers:
        yield ("tiers",), "needs at least one tier, such as {backend: cpu, capacity: 100%}"
    names: dict[str, int] = {}
    for number, tier in enumerate(config.tiers):
        path: Path = ("tiers", number)
        if (*path, "backend") in unknown and "name" not in tier.model_fields_set:
            continue
        if (*path, "name") not in unknown and names.setdefault(tier.name, number) != number:
            text = f"{tier.name!r} is also the name of tiers[{names[tier.name]}]: give each tier a name of its own"
            yield (*path, "name"), text
        for fault in _tier(tier, path, host, unknown):
            if fault[0] not in unknown:
                yield fault
    if loopback(config.metrics.host) is None:
        yield ("metrics", "host"), f"{config.metrics.host!r} is not a loopback address: the page has no key"
    fleet = (*_peer(config.peer, host), *controller_faults(config.controller), *events_faults(config.events))
    yield from (fault for fault in fleet if fault[0] not in unknown)
    socket = config.service.socket
    if socket is not None and len(socket.encode()) > _SOCKET_PATH_MAX:
        text = f"{len(socket.encode())} bytes are too long for a unix socket's path, at most {_SOCKET_PATH_MAX}"
        yield ("service", "socket"), text


def _peer(peer: PeerConfig, host: PluginHost) -> Iterator[tuple[Path, str]]:
    yield from peer_faults(peer)
    for name in peer.transports:
        try:
            host.transport(name)
        except PluginError as error:
            yield ("peer", "transports"), str(error)


def _tier(tier: TierConfig, path: Path, host: PluginHost, unknown: frozenset[Path]) -> Iterator[tuple[Path, str]]:
    if tier.evict == "none":
        if tier.capacity is not None and (*path, "capacity") not in unknown:
            text = (
                "a capacity without an eviction policy fills up and then stores nothing: choose leaf-first-lru or lru"
            )
            yield (*path, "evict"), text
    else:
        try:
            host.policy(tier.evict)
        except PluginError as error:
            yield (*path, "evict"), str(error)
    if path[-1] == 0 and tier.write == "demote":
        yield (*path, "write"), "'demote' waits for evictions of the tier above, and the first tier has none above it"
