"""The controller's listener: from settings to a port that answers, until it is told to end."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import ssl
from typing import TYPE_CHECKING, Final

import uvicorn

from lmkv.agent.messages import MAX_MESSAGE
from lmkv.controller.app import build
from lmkv.controller.connections import protocol
from lmkv.errors import ConfigError
from lmkv.observe.address import loopback
from lmkv.peer.ports import listen

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable, Iterator

    from lmkv.controller.parts import Parts
    from lmkv.controller.settings import Settings

log = logging.getLogger("lmkv.controller")

CLOSE_SECONDS: Final = 5
"""For requests that are under way when the controller is told to end."""
CONNECTIONS: Final = 4096


class _Server(uvicorn.Server):
    """Without uvicorn's own signal handlers, which end the process by the signal even after a clean stop."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class ControllerServer:
    """A controller on a socket. The socket is bound at once; `serve` answers on it.

    Raises:
        ConfigError: the port is taken, or a file of the settings cannot be used.
    """

    def __init__(self, settings: Settings) -> None:
        app, self.parts = build(settings)
        self.settings = settings
        context = _tls(settings)
        self._socket: socket.socket = listen(settings.host, settings.port, "controller")
        self.port: int = self._socket.getsockname()[1]
        config = uvicorn.Config(
            app,
            http=protocol(settings.request_timeout),
            ws="websockets-sansio",
            ws_max_size=MAX_MESSAGE,
            ws_per_message_deflate=False,
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            limit_concurrency=CONNECTIONS,
            timeout_graceful_shutdown=CLOSE_SECONDS,
            ssl_context_factory=None if context is None else lambda _config, _make: context,
        )
        self._server = _Server(config)

    @property
    def url(self) -> str:
        """Where it answers."""
        host = f"[{self.settings.host}]" if ":" in self.settings.host else self.settings.host
        return f"http{'' if self.settings.certificate is None else 's'}://{host}:{self.port}"

    @property
    def started(self) -> bool:
        """It answers."""
        return self._server.started

    async def serve(self, ready: Callable[[ControllerServer], None] | None = None) -> None:
        """Answer until `stop`; `ready` is called once everything is started.

        Raises:
            LmkvError: what starting its parts raised.
        """
        try:
            # Not as the application's lifespan: of a failure uvicorn would tell nobody but its log.
            await self.parts.start()
            try:
                if ready is not None:
                    ready(self)
                await self._server.serve([self._socket])
            finally:
                await self.parts.close()
        finally:
            self._socket.close()

    def stop(self) -> None:
        """End soon. From the loop's thread, or a signal handler."""
        self._server.should_exit = True


def log_to(handler: logging.Handler) -> None:
    """Have what uvicorn itself warns of in the log of the controller."""
    logger = logging.getLogger("uvicorn")
    logger.handlers[:] = [handler]
    logger.setLevel(logging.WARNING)
    logger.propagate = False
    # It takes an agent's connection that is refused before its handshake for a fault of the application.
    logging.getLogger("uvicorn.error").addFilter(
        lambda record: "without completing handshake" not in record.getMessage()
    )


def run(settings: Settings, ready: Callable[[ControllerServer], None]) -> None:
    """Serve until TERM or INT; HUP reads the file of tokens again. For the main thread.

    Raises:
        LmkvError: it cannot be started.
    """
    server = ControllerServer(settings)

    async def body() -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, server.stop)
        loop.add_signal_handler(signal.SIGHUP, _reload, server.parts)
        await server.serve(ready)

    if loopback(settings.host) is None and settings.certificate is None:
        log.warning("tokens and prompts cross the network as they are: give --tls-certificate, or put TLS before it")
    asyncio.run(body())
    log.info("closed")


def _reload(parts: Parts) -> None:
    if parts.tokens is None:
        return
    try:
        parts.tokens.load()
    except ConfigError as error:
        log.error("the tokens stay as they were: %s", error)  # noqa: TRY400  the user's mistake, not a fault
    else:
        log.info("%d tokens read", len(parts.tokens))


def _tls(settings: Settings) -> ssl.SSLContext | None:
    if settings.certificate is None or settings.private_key is None:
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    try:
        context.load_cert_chain(settings.certificate, settings.private_key, password=_no_password)
    except (OSError, ssl.SSLError) as error:
        text = f"--tls-certificate {settings.certificate}, --tls-key {settings.private_key}: cannot be used: {error}"
        raise ConfigError(text) from error
    if settings.client_ca is not None:
        try:
            context.load_verify_locations(settings.client_ca)
        except (OSError, ssl.SSLError) as error:
            raise ConfigError(f"--tls-client-ca {settings.client_ca}: cannot be used: {error}") from error
        context.verify_mode = ssl.CERT_REQUIRED
    return context


def _no_password() -> str:
    raise ConfigError("--tls-key: is encrypted: give one without a password")
