"""`lmkv serve`: the node service, until it is told to end."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from lmkv.config import Machine, load_config
from lmkv.plugins import PluginHost
from lmkv.service.files import default_socket
from lmkv.service.server import run as run_service

if TYPE_CHECKING:
    from collections.abc import Mapping


def run(file: str | None, socket: str | None) -> int:
    """Serve until SIGTERM or SIGINT. Mistakes are raised as `ConfigError` before anything is started."""
    overrides: Mapping[str, object] = {"service.socket": socket} if socket else {}
    machine = Machine.local()
    config = load_config(file, host=PluginHost.discover(), machine=machine, overrides=overrides)
    path = config.service.socket or str(default_socket(config.text))
    for line in config.limits(machine).lines:
        print(line, file=sys.stderr)
    print(f"socket: {path}", file=sys.stderr, flush=True)
    run_service(config, path)
    return 0
