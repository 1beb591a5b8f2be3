"""The Prometheus page: one path, on a loopback port, served by a daemon thread."""

from __future__ import annotations

import socket
import threading
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Final

from lmkv.errors import ConfigError
from lmkv.observe.address import loopback

if TYPE_CHECKING:
    from lmkv.observe.metrics import Metrics

CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"


class MetricsServer:
    """A running page. `close` stops it."""

    def __init__(self, server: ThreadingHTTPServer, thread: threading.Thread) -> None:
        self._server = server
        self._thread = thread
        self.port: int = server.server_address[1]
        """The port, also where 0 was asked for."""

    @property
    def url(self) -> str:
        """Address of the page."""
        host = str(self._server.server_address[0])
        return f"http://{f'[{host}]' if ':' in host else host}:{self.port}/metrics"

    def close(self) -> None:
        """Stop listening. Idempotent."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def serve_metrics(metrics: Metrics, host: str = "127.0.0.1", port: int = 0) -> MetricsServer:
    """Serve `metrics` at ``/metrics``.

    Raises:
        ConfigError: `host` is not a loopback address (a listener off loopback needs a key, which this page has not),
            or the port cannot be had.
    """
    address = loopback(host)
    if address is None:
        raise ConfigError(f"metrics.host: {host!r} is not a loopback address: the page has no key")

    family = socket.AF_INET6 if ":" in address else socket.AF_INET

    class Page(_Page):
        source = metrics

    class Server(ThreadingHTTPServer):
        daemon_threads = True
        address_family = family

        def handle_error(self, request: object, client_address: object) -> None:
            """A client that went away in the middle is nobody's problem."""

    try:
        server = Server((address, port), Page)
    except OSError as error:
        text = f"metrics.port: cannot listen on {address} port {port}: {error.strerror} (errno {error.errno})"
        raise ConfigError(text) from error
    thread = threading.Thread(target=server.serve_forever, args=(0.1,), name="lmkv-metrics", daemon=True)
    thread.start()
    return MetricsServer(server, thread)


class _Page(BaseHTTPRequestHandler):
    source: Metrics
    timeout = 5
    server_version = "lmkv"
    sys_version = ""

    def do_GET(self) -> None:
        if self.path.split("?", 1)[0] != "/metrics":
            self.send_error(HTTPStatus.NOT_FOUND, "only /metrics is here")
            return
        body = self.source.render().encode()
        self.send_response(HTTPStatus.OK)
        self.send_header("Content-Type", CONTENT_TYPE)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002  the base class's name
        """Scrapes are not news."""
