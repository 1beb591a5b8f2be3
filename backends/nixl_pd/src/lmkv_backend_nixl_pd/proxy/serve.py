"""Puts the parts of a proxy together and serves it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import ssl
import sys
from typing import TYPE_CHECKING, Final

import uvicorn
import uvloop

from lmkv.errors import ConfigError
from lmkv.peer.ports import Rank, listen
from lmkv_backend_nixl_pd.proxy.admission import Admission, PeerPorts
from lmkv_backend_nixl_pd.proxy.app import Proxy
from lmkv_backend_nixl_pd.proxy.aware import CacheAware, Controller
from lmkv_backend_nixl_pd.proxy.client import Client
from lmkv_backend_nixl_pd.proxy.connections import Connection
from lmkv_backend_nixl_pd.proxy.metrics import Metrics
from lmkv_backend_nixl_pd.proxy.models import Models
from lmkv_backend_nixl_pd.proxy.pd import PrefillDecode
from lmkv_backend_nixl_pd.proxy.pool import Engine, Pool

if TYPE_CHECKING:
    import socket
    from collections.abc import AsyncIterator, Iterable, Iterator

    from pydantic import SecretStr

    from lmkv_backend_nixl_pd.proxy.admission import Ask
    from lmkv_backend_nixl_pd.proxy.settings import Settings

DRAIN_SECONDS: Final = 10
"""Time for requests under way to end after SIGTERM."""
KEEP_ALIVE_SECONDS: Final = 75
FINISH_SECONDS: Final = 2.0
"""Time at the end for nodes to be told of transfers that nobody wants any more."""


class Parts:
    """A proxy and what has to be started and ended with it.

    Args:
        settings: checked.
        ask: asks peer ports; mode `pd` only.
    """

    def __init__(self, settings: Settings, ask: Ask | None) -> None:
        self.settings = settings
        self.metrics = Metrics()
        self._context = _engine_context(settings)
        self._clients: list[Client] = []
        models = Models(settings.lookup_timeout)
        if settings.engine:
            engines = self._pool("engine", settings.engine)
            self.pools = {"engine": engines}
            controller = Controller(
                self._client(settings.controller or ""), _text(settings.controller_token), settings.lookup_timeout
            )
            mode: CacheAware | PrefillDecode = CacheAware(settings, engines, controller, models, self.metrics)
        else:
            assert ask is not None
            prefill = self._pool("prefill", [(url, "") for url in settings.prefill])
            decode = self._pool("decode", settings.decode)
            self.pools = {"prefill": prefill, "decode": decode}
            self.admission = Admission(ask, decode, wait=settings.admission_wait, most=settings.max_waiting)
            mode = PrefillDecode(settings, prefill, decode, self.admission, models, self.metrics)
        self.proxy = Proxy(settings, mode, self.pools, self.metrics, _text(settings.keys).split())

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Looks at the engines' health go on meanwhile."""
        engines = [engine for pool in self.pools.values() for engine in pool.engines]
        looks = [asyncio.create_task(engine.watch(self.settings.health_interval)) for engine in engines]
        try:
            yield
        finally:
            for look in looks:
                look.cancel()
            await asyncio.gather(*looks, return_exceptions=True)
            if not self.settings.engine:
                await self.admission.settle(FINISH_SECONDS)
            for client in self._clients:
                client.close()
            await asyncio.sleep(0)  # for the loop to close them before it ends

    def _pool(self, role: str, engines: Iterable[tuple[str, str]]) -> Pool:
        made = [Engine(url, name, self._client(url), role, self.metrics) for url, name in engines]
        return Pool(made, self.settings.choose)

    def _client(self, url: str) -> Client:
        client = Client(url, context=self._context, connect_seconds=self.settings.connect_timeout)
        self._clients.append(client)
        return client


class _Server(uvicorn.Server):
    """Leaves signals to us: it would raise them again when it has ended."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Nothing."""
        yield


def serve(settings: Settings) -> int:
    """Serve until SIGTERM or SIGINT; a second one ends it at once."""
    logging.basicConfig(level=settings.log_level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    host, port = settings.address
    sock = listen(host, port, "proxy", Rank(settings.instance))
    try:
        if settings.engine:
            uvloop.run(_serve(Parts(settings, None), sock))
        else:
            from lmkv.peer.peers import Peers  # noqa: PLC0415  the other mode asks no peers

            peers = Peers.asking(_text(settings.peer_key), node="proxy", tls=_peer_context(settings))
            try:
                for _, address in settings.decode:
                    peers.link(address)  # says at once what is no address
                uvloop.run(_serve(Parts(settings, PeerPorts(peers, settings.peer_timeout)), sock))
            finally:
                peers.close()
    finally:
        sock.close()
    return 0


async def _serve(parts: Parts, sock: socket.socket) -> None:
    server = server_of(parts)
    loop = asyncio.get_running_loop()

    def stop() -> None:
        server.force_exit = server.should_exit
        server.should_exit = True

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop)
    host, port = sock.getsockname()[:2]
    scheme = "https" if parts.settings.tls_certificate else "http"
    print(f"proxy: {scheme}://{f'[{host}]' if ':' in host else host}:{port}", file=sys.stderr, flush=True)  # noqa: T201
    async with parts.running():
        await server.serve(sockets=[sock])


def server_of(parts: Parts) -> uvicorn.Server:
    """What serves the application: it adds nothing to answers, logs nothing for each and leaves signals alone."""
    settings = parts.settings
    try:
        config = uvicorn.Config(
            parts.proxy,
            http=Connection,
            loop="none",
            ws="none",
            lifespan="off",
            access_log=False,
            log_config=None,
            server_header=False,
            date_header=False,
            proxy_headers=False,
            timeout_keep_alive=KEEP_ALIVE_SECONDS,
            timeout_graceful_shutdown=DRAIN_SECONDS,
            ssl_certfile=settings.tls_certificate,
            ssl_keyfile=settings.tls_key,
        )
        config.load()
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(
            f"--tls-certificate {settings.tls_certificate}, --tls-key {settings.tls_key}: {error}"
        ) from None
    logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)  # it takes an answer that is cut off for a fault
    return _Server(config)


def _engine_context(settings: Settings) -> ssl.SSLContext | None:
    urls = [*settings.prefill, *(url for url, _ in settings.decode + settings.engine), settings.controller or ""]
    if not any(url.startswith("https:") for url in urls):
        return None
    try:
        return ssl.create_default_context(cafile=settings.engine_ca)
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(f"--engine-ca {settings.engine_ca}: {error}") from None


def _peer_context(settings: Settings) -> ssl.SSLContext | None:
    """As the section `peer.tls` of a node means it."""
    if settings.peer_tls_certificate is None:
        return None
    try:
        context = ssl.create_default_context(cafile=settings.peer_tls_ca)
        context.load_cert_chain(settings.peer_tls_certificate, settings.peer_tls_key)
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(f"--peer-tls-ca, --peer-tls-certificate, --peer-tls-key: {error}") from None
    return context


def _text(secret: SecretStr | None) -> str:
    return secret.get_secret_value() if secret is not None else ""
