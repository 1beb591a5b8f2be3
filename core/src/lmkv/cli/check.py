"""`lmkv check`: is the configuration right, does it fit this machine, does every tier answer."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from lmkv.cli.table import table
from lmkv.config import Machine, load_config
from lmkv.plugins import PluginHost

if TYPE_CHECKING:
    from lmkv.config import Config


def run(file: str | None, *, show: bool, offline: bool) -> int:
    """Check; 0: all is well, 1: a tier does not answer. Mistakes are raised as `ConfigError`."""
    host = PluginHost.discover()
    machine = Machine.local()
    config = load_config(file, host=host, machine=machine)
    if show:
        print(table([(setting.path, setting.value, setting.source) for setting in config.settings()]))
        return 0
    limits = config.limits(machine)
    print(f"{config.origin or 'no file, defaults'}: the configuration is right")
    print(table([tuple(line.split(": ", 1)) for line in limits.lines], indent="  "))
    return 0 if offline else _probe(config, limits.capacities, host)


def _probe(config: Config, capacities: tuple[int | None, ...], host: PluginHost) -> int:
    from lmkv.cli.probe import probe  # noqa: PLC0415  `--show` needs no memory and no frames
    from lmkv.storage.codecs import Codecs  # noqa: PLC0415

    codecs = Codecs([tier.codec for tier in config.tiers], host)
    results = [
        probe(tier, capacity, config.ranks, host, codecs)
        for tier, capacity in zip(config.tiers, capacities, strict=True)
    ]
    print("round trip of one frame:")
    print(table([("tier", "backend", "result", ""), *(result.row for result in results)], indent="  "))
    for result in results:
        if result.trace:
            print(f"\n{result.tier}:\n{result.trace}", file=sys.stderr)
    return 0 if all(result.ok for result in results) else 1
