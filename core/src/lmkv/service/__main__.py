"""`python -m lmkv.service`: the service as a process of its own, started by `lmkv.service.spawn`."""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import sys
import threading
from pathlib import Path

from lmkv.errors import LmkvError


def main(arguments: list[str] | None = None) -> int:
    """Parse, load the configuration, serve. Exit status 2: a user's mistake, said on standard error."""
    parser = argparse.ArgumentParser(prog="lmkv.service", description="Serve a KV cache on a unix socket.")
    parser.add_argument("--config-file", required=True, help="YAML; - reads standard input")
    parser.add_argument("--socket", required=True, help="path of the unix socket")
    parser.add_argument(
        "--linger", type=float, help="seconds to stay after the last client has gone; default: for ever"
    )
    options = parser.parse_args(arguments)
    _every_cpu()
    text = sys.stdin.read() if options.config_file == "-" else Path(options.config_file).read_text(encoding="utf-8")

    from lmkv.config import load_config  # noqa: PLC0415  after the affinity, so that their threads have it too
    from lmkv.plugins import PluginHost  # noqa: PLC0415
    from lmkv.service.server import run  # noqa: PLC0415

    try:
        config = load_config(text, host=PluginHost.discover(), environ={})
        run(config, options.socket, options.linger)
    except LmkvError as e:
        sys.stderr.write(f"lmkv: {e}\n")
        return 2
    return 0


def _every_cpu() -> None:
    """Engines pin their process, and children inherit that: take every processor that this container allows."""
    with contextlib.suppress(OSError, ValueError):
        os.sched_setaffinity(0, range(os.sysconf("SC_NPROCESSORS_CONF")))


def _leave(status: int) -> None:
    """End the process even if a thread is stuck in a call to a dead disk: the deadline has passed by now."""
    logging.shutdown()
    sys.stderr.flush()
    if any(not thread.daemon for thread in threading.enumerate() if thread is not threading.main_thread()):
        os._exit(status)
    sys.exit(status)


if __name__ == "__main__":
    _leave(main())
