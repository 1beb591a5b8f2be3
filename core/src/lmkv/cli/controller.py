"""`lmkv controller`: the fleet's controller, until it is told to end."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

from lmkv.errors import PluginError

if TYPE_CHECKING:
    import argparse

    from lmkv.controller.server import ControllerServer

EXTRA = 'pip install "lmkv[controller]"'


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's options."""
    parser.add_argument("--listen", metavar="HOST:PORT", help="default: 127.0.0.1:17004; port 0: any free one")
    parser.add_argument("--tokens", metavar="FILE", type=Path, help="bearer tokens; needed off the loopback")
    parser.add_argument("--directory", metavar="URL", help="redis://…: shared by several controllers (default: memory)")
    parser.add_argument("--journal", metavar="PATH", type=Path, help="file in which jobs outlive the controller")
    parser.add_argument("--tls-certificate", metavar="FILE", type=Path, help="PEM; with --tls-key: answer with TLS")
    parser.add_argument("--tls-key", metavar="FILE", type=Path, help="PEM, without a password")
    parser.add_argument("--tls-client-ca", metavar="FILE", type=Path, help="answer only clients certified by it")
    parser.add_argument(
        "--node-timeout", metavar="TIME", default="30s", help="silence that drops a node (default: 30s)"
    )
    parser.add_argument(
        "--request-timeout", metavar="TIME", default="30s", help="for a request to come, and its answer"
    )
    parser.add_argument("--step-timeout", metavar="TIME", default="120s", help="silence of a node that fails its step")
    parser.add_argument(
        "--max-body", metavar="SIZE", default="16MiB", help="longest body of a request (default: 16MiB)"
    )
    parser.add_argument("--log-level", choices=("debug", "info", "warning", "error"), default="info")
    parser.add_argument("--log-format", choices=("text", "json"), default="text")


def run(options: argparse.Namespace) -> int:
    """Serve until SIGTERM or SIGINT. Mistakes are raised as `ConfigError` before anything is started."""
    try:
        import fastapi  # noqa: F401, PLC0415  only to see whether they are there
        import uvicorn  # noqa: F401, PLC0415
        import websockets  # noqa: F401, PLC0415
    except ModuleNotFoundError as error:
        raise PluginError(f"the controller needs {error.name}, which is not installed: {EXTRA}") from None
    from lmkv.controller.server import log_to  # noqa: PLC0415  after the look at what it needs
    from lmkv.controller.server import run as run_controller  # noqa: PLC0415  after the look at what it needs
    from lmkv.controller.settings import DEFAULT_LISTEN, Settings, interval, listen_address, size  # noqa: PLC0415
    from lmkv.observe.log import set_up  # noqa: PLC0415

    host, port = listen_address(options.listen or DEFAULT_LISTEN)
    settings = Settings(
        host=host,
        port=port,
        tokens=options.tokens,
        directory=options.directory,
        journal=options.journal,
        certificate=options.tls_certificate,
        private_key=options.tls_key,
        client_ca=options.tls_client_ca,
        node_timeout=interval("--node-timeout", options.node_timeout),
        request_timeout=interval("--request-timeout", options.request_timeout),
        step_timeout=interval("--step-timeout", options.step_timeout),
        max_body=size("--max-body", options.max_body),
    )
    log_to(set_up(options.log_level, options.log_format))

    def ready(server: ControllerServer) -> None:
        print(f"controller: {server.url}", file=sys.stderr, flush=True)
        if settings.journal is None and settings.directory is None:
            print("jobs end with this process: give --journal PATH to keep them", file=sys.stderr, flush=True)

    run_controller(settings, ready)
    return 0
