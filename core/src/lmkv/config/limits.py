"""What the sizes of a configuration mean on a machine: products over ranks, shares in bytes, and whether it fits."""

from __future__ import annotations

import contextlib
import logging
import os
from dataclasses import dataclass
from pathlib import Path as FilePath
from textwrap import indent
from typing import TYPE_CHECKING, Final, NamedTuple

from lmkv.config.codecs import IDENTITY
from lmkv.config.faults import Fault, at, in_order, printed
from lmkv.config.memory import available_memory
from lmkv.errors import ConfigError, LmkvError
from lmkv.plugins import PluginHost
from lmkv.specs import BackendContext
from lmkv.types import ALIGNMENT, Capabilities
from lmkv.units import Share, format_size

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from lmkv.config.faults import Path
    from lmkv.config.model import Config, TierConfig

_log = logging.getLogger(__name__)
_LEAST_POOL: Final = 1 << 20


class Volume(NamedTuple):
    """The file system that a path lies on."""

    device: int
    """Names the file system: two tiers on one share its space."""
    free: int
    """Bytes that may still be written."""


@dataclass(frozen=True, slots=True)
class Machine:
    """What limits must fit into."""

    memory: int
    """Bytes that can be allocated now."""
    volume: Callable[[str], Volume | None]
    """The file system of a path; None when there is none to ask."""
    used: Callable[[str], int]
    """Bytes below a path that are there already, such as frames of an earlier run. Asked only where space is short."""

    @classmethod
    def local(cls) -> Machine:
        """This machine, now: available memory is bounded by the control group's limit."""
        return cls(available_memory(), volume_of, used_below)


@dataclass(frozen=True, slots=True)
class Limits:
    """Every limit in bytes."""

    pool_bytes: int
    """The whole pool of the node, a multiple of 4 KiB."""
    staging_bytes: int
    """Part of the pool that is kept for loads."""
    capacities: tuple[int | None, ...]
    """Of each tier, in order; None: the store limits itself."""
    lines: tuple[str, ...]
    """For people: each limit with its product."""


def limits_of(config: Config, machine: Machine | None) -> Limits:
    """See `Config.limits`. Warns, once per call, when nobody configured any tier."""
    machine = machine or Machine.local()
    limits, faults = compute(config, machine)
    if faults:
        raise refusal(config.origin, faults)
    assert limits is not None
    if not any(path[:1] == ("tiers",) for path in config._places):  # noqa: SLF001  one package
        _log.warning(
            "no tiers configured: using a RAM tier of %s (pool of %s, of %s available), chunks of %d tokens",
            format_size(limits.capacities[0] or 0),
            format_size(limits.pool_bytes),
            format_size(machine.memory),
            config.chunk_tokens,
        )
    return limits


def refusal(origin: str, faults: list[Fault]) -> ConfigError:
    """One error for all `faults`."""
    lines = tuple(str(fault) for fault in in_order(faults))
    count = "1 fault" if len(lines) == 1 else f"{len(lines)} faults"
    what = f"{count} in {origin or 'the configuration'}:"
    return ConfigError("\n".join((what, *(indent(line, "  ") for line in lines))), faults=lines)


def compute(
    config: Config, machine: Machine, unknown: frozenset[Path] = frozenset()
) -> tuple[Limits | None, list[Fault]]:
    """Limits of `config`, and all faults found; settings below `unknown` are faulty already and stand for nothing."""
    return _Sums(config, machine, unknown).result()


class _Claim(NamedTuple):
    """Space that a tier asks of a file system."""

    number: int
    capacity: int
    path: str
    free: int


class _Sums:
    """One computation; collects faults as it goes."""

    def __init__(self, config: Config, machine: Machine, unknown: frozenset[Path]) -> None:
        self.config = config
        self.machine = machine
        self.unknown = unknown
        self.host = config._host or PluginHost.discover()  # noqa: SLF001  one package
        self.faults: list[Fault] = []
        self.lines: list[str] = []

    def result(self) -> tuple[Limits | None, list[Fault]]:
        pool, staging = self._pool()
        usable = pool - staging
        capacities: list[int | None] = [None] * len(self.config.tiers)
        resident: list[int] = []
        claims: dict[int, list[_Claim]] = {}
        for number, tier in enumerate(self.config.tiers):
            if not self._known("tiers", number, "backend"):
                continue
            loaded, capabilities = self._capabilities(number, tier)
            if not loaded or not self._known("tiers", number, "capacity"):
                continue
            capacity = self._capacity(number, tier, capabilities, usable)
            capacities[number] = capacity
            if capacity is None:
                continue
            self.lines.append(f"{tier.name}: capacity {format_size(capacity)}")
            if capabilities is not None and capabilities.resident:
                resident.append(number)
            else:
                self._ask_options(number, tier, capacity, claims)
        self._fit_pool(resident, capacities, pool, staging)
        self._fit_volumes(claims)
        if self.faults:
            return None, self.faults
        return Limits(pool, staging, tuple(capacities), tuple(self.lines)), []

    def _pool(self) -> tuple[int, int]:
        pool, ranks, memory = self.config.pool, self.config.ranks, self.machine.memory
        each = pool.size.of(memory) if isinstance(pool.size, Share) else pool.size
        factor = ranks if pool.per == "rank" else 1
        total = each * factor // ALIGNMENT * ALIGNMENT
        staging = pool.staging.of(total) if isinstance(pool.staging, Share) else pool.staging
        product = f"{ranks} ranks x {format_size(each)} = {format_size(total)}" if factor > 1 else format_size(total)
        self.lines.append(f"pool: {product} of {format_size(memory)} available; {format_size(staging)} kept for loads")
        if not self._known("pool", "size") or not self._known("pool", "per") or not self._known("ranks"):
            return total, staging
        if total > memory:
            self._fault(("pool", "size"), f"{product}, but {format_size(memory)} of memory is free on this machine")
        elif total < _LEAST_POOL:
            self._fault(("pool", "size"), f"{product} is less than the least pool, {format_size(_LEAST_POOL)}")
        elif staging >= total and self._known("pool", "staging"):
            self._fault(
                ("pool", "staging"), f"{format_size(staging)} leaves nothing of the pool of {format_size(total)}"
            )
        return total, staging

    def _capabilities(self, number: int, tier: TierConfig) -> tuple[bool, Capabilities | None]:
        """Whether the backend can be loaded, and what it claims; None where only an instance would tell."""
        try:
            factory = self.host.load_backend(tier.backend)
        except LmkvError as error:
            self._fault(("tiers", number, "backend"), str(error))
            return False, None
        found = getattr(factory, "capabilities", None)
        return True, found if isinstance(found, Capabilities) else None

    def _capacity(self, number: int, tier: TierConfig, claims: Capabilities | None, usable: int) -> int | None:
        path: Path = ("tiers", number, "capacity")
        resident = claims is not None and claims.resident
        if claims is not None and claims.shared:
            for key, given in (("capacity", tier.capacity is not None), ("evict", _evict_given(tier))):
                if given:
                    text = f"has no effect: the store behind {tier.backend!r} is shared and limits itself"
                    self._fault((*path[:-1], key), text)
            return None
        if tier.capacity is None:
            if claims is not None:
                example = "100% (of the pool) or 8GiB" if resident else "100GiB"
                text = f"is required: {tier.backend!r} is this node's own, so write its limit, such as {example}"
                self._fault(path, text)
            return None
        if not isinstance(tier.capacity, Share):
            return tier.capacity
        if resident:
            return tier.capacity.of(usable)
        self._fault(path, "a percentage is of the pool, and this tier is not in the pool: write a size such as 100GiB")
        return None

    def _ask_options(self, number: int, tier: TierConfig, capacity: int, claims: dict[int, list[_Claim]]) -> None:
        """Let the backend's options check themselves; note the space that a `path` among them asks for."""
        if not self._known("tiers", number, "options"):
            return
        check = getattr(tier.options, "check", None)
        if callable(check):
            context = BackendContext(tier=tier.name, capacity=capacity, ranks=self.config.ranks, deadline=tier.deadline)
            try:
                messages = [str(message) for message in check(context)]
            except Exception as error:  # noqa: BLE001  a stranger's check may raise anything
                messages = [f"{type(error).__name__} in the backend's check: {error}"]
            for message in messages:
                self._fault(("tiers", number, "options"), message)
            if messages:
                return
        path = getattr(tier.options, "path", None)
        volume = self.machine.volume(str(path)) if path is not None else None
        if volume is not None:
            claims.setdefault(volume.device, []).append(_Claim(number, capacity, str(path), volume.free))

    def _fit_pool(self, resident: list[int], capacities: list[int | None], pool: int, staging: int) -> None:
        for number in resident:
            if number:
                self._fault(("tiers", number, "backend"), "keeps frames in host memory, so it must be the first tier")
            if self.config.tiers[number].codec.name != IDENTITY:
                text = (
                    "has no effect: this tier keeps frames in memory, as the engine needs them. Set it on a tier below"
                )
                self._fault(("tiers", number, "codec"), text)
        wanted = [capacities[number] or 0 for number in resident]
        sound = all(self._known("pool", key) for key in ("size", "staging", "per")) and self._known("ranks")
        if not resident or not sound or sum(wanted) <= pool - staging:
            return
        added = " + ".join(format_size(size) for size in wanted)
        total = f" = {format_size(sum(wanted))}" if len(wanted) > 1 else ""
        room = f"{format_size(pool)} of pool less {format_size(staging)} for loads is {format_size(pool - staging)}"
        self._fault(("tiers", resident[-1], "capacity"), f"{added}{total} does not fit: {room}")

    def _fit_volumes(self, volumes: Mapping[int, list[_Claim]]) -> None:
        for claims in volumes.values():
            wanted, free = sum(claim.capacity for claim in claims), claims[0].free
            if wanted <= free:
                continue
            used = sum(self.machine.used(path) for path in {claim.path for claim in claims})
            if wanted <= free + used:
                continue
            added = " + ".join(format_size(claim.capacity) for claim in claims)
            total = f" = {format_size(wanted)}" if len(claims) > 1 else ""
            kept = f", and {format_size(used)} is there already" if used else ""
            text = f"{added}{total}, but {format_size(free)} is free on that file system{kept}"
            self._fault(("tiers", claims[-1].number, "capacity"), text)

    def _known(self, *path: str | int) -> bool:
        """False when the setting, or something that it is part of, or a part of it, is faulty already."""
        return not any(path[: len(bad)] == bad or bad[: len(path)] == path for bad in self.unknown)

    def _fault(self, path: Path, message: str) -> None:
        where = at(self.config._places, path, self.config.origin)  # noqa: SLF001  one package
        self.faults.append(Fault(where, printed(path), message))


def _evict_given(tier: TierConfig) -> bool:
    return "evict" in tier.model_fields_set and tier.evict != "none"


def volume_of(path: str) -> Volume | None:
    """The file system of `path`, or of the nearest folder above that exists."""
    try:
        here = FilePath(path).absolute()
        while not here.exists() and here != here.parent:
            here = here.parent
        stats = os.statvfs(here)
        return Volume(here.stat().st_dev, stats.f_bavail * stats.f_frsize)
    except OSError:
        return None


def used_below(path: str) -> int:
    """Bytes that the files below `path` take."""
    total = 0
    for folder, _, names in os.walk(path):
        for name in names:
            with contextlib.suppress(OSError):  # a file that went while we looked
                total += os.lstat(f"{folder}/{name}").st_blocks * 512
    return total
