"""The service: one storage, one socket, any number of clients."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import signal
import socket
import time
from typing import TYPE_CHECKING, Final

from lmkv.acceptor import Acceptor, exactly
from lmkv.errors import ConfigError, LmkvError, ProtocolError
from lmkv.observe.clients import Who
from lmkv.service import files, wire
from lmkv.service.connection import version_message
from lmkv.service.host import start_storage, welcome_of
from lmkv.service.peer import Peer
from lmkv.service.protocol import VERSION, Hello

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from lmkv.config import Config
    from lmkv.service.node import NodeStorage
    from lmkv.service.protocol import Message

log = logging.getLogger("lmkv.service")

CLOSE_SECONDS: Final = 8.0
"""Below the ten seconds that most supervisors give between TERM and KILL."""
PREDECESSOR_SECONDS: Final = 15.0
"""A service that is closing holds its tiers until it has gone."""
FIRST_CLIENT_SECONDS: Final = 30.0
"""A service with a linger goes when no client has come within so long."""
HANDSHAKES: Final = 64
"""Connections that may be without a handshake at a time; more are closed."""
NAME_CHARACTERS: Final = 64


class Server:
    """Accepts clients on a listening socket. On the storage loop only.

    Args:
        storage: what they are served from; stays the caller's.
        listener: non-blocking; taken over.
        linger: seconds after the last client until `finished` is set; None: never.
        credentials: for tests.
    """

    def __init__(
        self,
        storage: NodeStorage,
        listener: socket.socket,
        *,
        linger: float | None = None,
        credentials: Callable[[socket.socket], tuple[int, int]] = wire.peer,
    ) -> None:
        self.finished = asyncio.Event()
        self._storage = storage
        self._listener = listener
        self._linger = linger
        self._credentials = credentials
        self._welcome = welcome_of(storage)
        self._loop = asyncio.get_running_loop()
        self._peers: set[Peer] = set()
        self._orphans: set[asyncio.Future[Message]] = set()
        """What clients that have gone were waiting for. Not cancelled: others may wait for the same loads."""
        self._lonely: asyncio.TimerHandle | None = None
        self._acceptor = Acceptor(
            listener,
            self._admit,
            most=HANDSHAKES,
            failed=lambda error: log.warning("cannot accept a client: %s", error),
        )
        if linger is not None:
            self._wait_for_client(max(linger, FIRST_CLIENT_SECONDS))

    @property
    def clients(self) -> int:
        """Connected now."""
        return len(self._peers)

    async def _admit(self, sock: socket.socket) -> bool:
        """Handshake, then a session, or not; whatever fails costs this connection only."""
        try:
            wire.roomy(sock)
            pid = wire.check_peer(sock, self._credentials)
            hello = await asyncio.wait_for(self._hello(sock), wire.HANDSHAKE_SECONDS)
            name = "".join(c if c.isprintable() else "?" for c in hello.name[:NAME_CHARACTERS])
            if hello.version != VERSION:
                raise ProtocolError(version_message(VERSION, hello.version), kind="version")  # noqa: TRY301
            await self._enter(sock, name or "unnamed", Who(hello.model, hello.rank, hello.instance), pid)
        except LmkvError as e:
            log.warning("a connection was refused: %s", e)
            with contextlib.suppress(OSError):
                sock.send(wire.encode(0, wire.refusal(e)))
        except (OSError, asyncio.TimeoutError) as e:
            log.debug("a connection ended in the handshake: %r", e)
        except Exception:
            log.exception("a connection could not be admitted")
        else:
            return True
        return False

    async def _hello(self, sock: socket.socket) -> Hello:
        head = await exactly(sock, wire.LENGTH.size)
        (length,) = wire.LENGTH.unpack(head)
        if length > wire.HELLO_LIMIT:
            raise ProtocolError(f"a first message that claims {length} bytes; the limit is {wire.HELLO_LIMIT}")
        _, message = wire.decode_request(await exactly(sock, length))
        if not isinstance(message, Hello):
            raise ProtocolError(f"a first message that is no Hello but {type(message).__name__}")
        return message

    async def _enter(self, sock: socket.socket, name: str, who: Who, pid: int) -> None:
        """From here on it is a client."""
        peer = Peer(sock, self._storage.open_session(name, who), name, pid, self._gone)
        try:
            welcome = wire.encode(0, self._welcome)
            if socket.send_fds(sock, [welcome], [self._storage.pool.fd]) != len(welcome):
                raise ConnectionResetError("the welcome did not go out whole")  # noqa: TRY301  one clean-up
        except BaseException:
            peer.connection_lost(None)
            raise
        self._peers.add(peer)
        if self._lonely is not None:
            self._lonely.cancel()
            self._lonely = None
        try:
            await self._loop.connect_accepted_socket(lambda: peer, sock=sock)
        except BaseException:
            peer.connection_lost(None)
            raise
        log.info("client %s (process %d) has come; %d now", name, pid, len(self._peers))

    def _gone(self, peer: Peer) -> None:
        self._peers.discard(peer)
        for task in peer.under_way:
            self._orphans.add(task)
            task.add_done_callback(self._orphans.discard)
        log.info("client %s has gone; %d left", peer.name, len(self._peers))
        if not self._peers and self._linger is not None:
            self._wait_for_client(self._linger)

    def _wait_for_client(self, seconds: float) -> None:
        if self._lonely is not None:
            self._lonely.cancel()
        self._lonely = self._loop.call_later(seconds, self._nobody)

    def _nobody(self) -> None:
        if self._peers or self._acceptor.meeting:
            self._wait_for_client(0.1)
            return
        log.info("no client is left")
        self.finished.set()

    async def close(self) -> None:
        """Close the listener and every connection; sessions end."""
        if self._lonely is not None:
            self._lonely.cancel()
        await self._acceptor.close()
        self._listener.close()
        for peer in list(self._peers):
            peer.abort()
        await asyncio.sleep(0)  # aborted transports tell their peers in the next turn
        for peer in list(self._peers):
            peer.connection_lost(None)

    async def abandon(self) -> None:
        """After the storage has closed: stop waiting for what it did not answer."""
        orphans = list(self._orphans)
        for task in orphans:
            task.cancel()
        await asyncio.gather(*orphans, return_exceptions=True)


async def serve(
    config: Config,
    socket_path: str | os.PathLike[str],
    *,
    linger: float | None = None,
    stop: asyncio.Event | None = None,
    start: Callable[[Config], Awaitable[NodeStorage]] = start_storage,
    deadline: float = CLOSE_SECONDS,
) -> None:
    """Serve until `stop` is set, or, with a `linger`, so many seconds after the last client has gone.

    Args:
        config: what to serve.
        socket_path: the unix socket; made with mode 0600, removed at the end.
        linger: None: stay for ever.
        stop: set by whoever wants an end.
        start: makes the storage.
        deadline: seconds that closing may take.

    Raises:
        ConfigError: the socket cannot be had, or another service has it (kind `in-use`).
        LmkvError: what starting the storage raised.
    """
    path = os.fspath(socket_path)
    files.check_path(path)
    stop = stop or asyncio.Event()
    with files.Lock(f"{path}.lock") as lock:
        await _succeed(lock, path)
        storage = await start(config)
        try:
            server = Server(storage, files.listen(path), linger=linger)
            log.info("ready: %d bytes of pool, tiers %s", storage.pool.nbytes, ", ".join(storage.tiers))
            try:
                await _first(stop, server.finished)
            finally:
                until = time.monotonic() + deadline
                # First the name, so that whoever finds nobody listening may be sure that the name is his to take.
                files.remove(path)
                await server.close()
                await storage.close(max(0.1, until - time.monotonic()))
                await server.abandon()
        finally:
            await storage.close(deadline)
    log.info("closed")


def _quieten_collector() -> None:
    """Keep the index out of the garbage collector's way.

    A hundred thousand entries are a million objects without a cycle among them: a full collection would find nothing
    and stop the loop for a third of a second each time.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 1_000_000)


async def _first(*events: asyncio.Event) -> None:
    waits = [asyncio.ensure_future(event.wait()) for event in events]
    try:
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for wait in waits:
            wait.cancel()


async def _succeed(lock: files.Lock, path: str) -> None:
    """Wait for a predecessor that is closing."""
    until = time.monotonic() + PREDECESSOR_SECONDS
    while not lock.acquire():
        if files.answers(path):
            raise files.in_use(path)
        if time.monotonic() > until:
            raise ConfigError(f"another service has had the lock of {path} for too long: stop it", kind="in-use")
        await asyncio.sleep(0.02)


def run(config: Config, socket_path: str | os.PathLike[str], linger: float | None = None) -> None:
    """As `serve`, with log and metrics page as configured; TERM and INT end it. For the main thread."""
    from lmkv.observe.log import set_up  # noqa: PLC0415

    set_up(config.logging.level, config.logging.format)
    loop = asyncio.new_event_loop()
    try:
        stop = asyncio.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, stop.set)

        async def start(config: Config) -> NodeStorage:
            storage = await start_storage(config)
            _quieten_collector()
            return storage

        loop.run_until_complete(serve(config, socket_path, linger=linger, stop=stop, start=start))
        loop.run_until_complete(loop.shutdown_asyncgens())
    finally:
        loop.close()
