"""SocketConnection: one connected socket, from its handshake to its end."""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import select
import threading
import time
from concurrent.futures import Future
from typing import TYPE_CHECKING, Final

from lmkv.errors import ClosedError, LmkvError, ProtocolError
from lmkv.memory import Pool
from lmkv.observe.clients import NOBODY
from lmkv.service import wire
from lmkv.service.link import Connection, failed, settle
from lmkv.service.protocol import MAX_MESSAGE, VERSION, Hello, Refused, Welcome

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable

    from lmkv.observe.clients import Who
    from lmkv.service.protocol import Message, Reply, Request

log = logging.getLogger("lmkv.client")

RECEIVE_BYTES: Final = 1 << 16
BACKLOG_BYTES: Final = MAX_MESSAGE
"""Bytes that wait for a service that does not read; above that it counts as gone."""


class SocketConnection(Connection):
    """One connected socket. Senders write in their own threads; one thread runs `pump`."""

    def __init__(self, sock: socket.socket, welcome: Welcome, pool: Pool) -> None:
        """Takes over `sock` and `pool`; use `connect`."""
        super().__init__()
        self.pool = pool
        self.welcome = welcome
        self.born = time.monotonic()
        self._sock = sock
        self._numbers = itertools.count(1)
        self._pending: dict[int, Future[Reply]] = {}
        self._lock = threading.Lock()
        """Guards `_alive`, `_backlog`, additions to `_pending` and the order of sends."""
        self._alive = True
        self._backlog = bytearray()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._stopping = False
        sock.setblocking(False)

    @classmethod
    def connect(
        cls,
        path: str,
        name: str,
        timeout: float,
        *,
        prefault: bool = True,
        who: Who = NOBODY,
        credentials: Callable[[socket.socket], tuple[int, int]] = wire.peer,
    ) -> SocketConnection:
        """Connect, shake hands and map the pool; blocks at most about `timeout` seconds.

        Raises:
            ClosedError: nobody listens, or the service went or did not answer.
            ProtocolError: another user's service, another version, or no lmkv at all.
        """
        deadline = time.monotonic() + timeout
        sock = wire.new_socket()
        fd: int | None = None
        try:
            try:
                sock.settimeout(timeout)
                sock.connect(path)
                wire.check_peer(sock, credentials)
                sock.sendall(wire.encode(0, Hello(VERSION, os.getpid(), name, **who.labels())))
            except OSError as e:
                raise ClosedError(f"no lmkv service at {path}: {e.strerror or e}") from e
            reply, fd = wire.receive_welcome(sock, deadline)
            welcome = _checked(reply)
            if fd is None:
                raise ProtocolError("the service's welcome came without the pool")  # noqa: TRY301  closes the socket
            return cls(sock, welcome, Pool.attach(fd, welcome.pool_bytes, prefault=prefault))
        except BaseException:
            sock.close()
            raise
        finally:
            if fd is not None:
                os.close(fd)

    def call(self, request: Request) -> Future[Reply]:
        """See `Connection.call`. Costs one system call in the caller's thread; never waits for the service."""
        number = next(self._numbers)
        try:
            data = wire.encode(number, request)
        except ProtocolError as e:
            return failed(e)
        future: Future[Reply] = Future()
        with self._lock:
            if self._alive:
                self._pending[number] = future
                self._transmit(data)
                return future
        return failed(ClosedError("the service has gone"))

    def send(self, message: Message) -> bool:
        """See `Connection.send`."""
        try:
            data = wire.encode(0, message)
        except ProtocolError:
            log.exception("a one-way message was not sent")
            return False
        with self._lock:
            return self._alive and self._transmit(data)

    @property
    def alive(self) -> bool:
        """See `Connection.alive`."""
        return self._alive

    def intact(self) -> bool:
        """See `Connection.intact`: the service shuts the socket down before it lets go of what a session holds."""
        if not self._alive:
            return False
        hangup = select.poll()  # one object must not be used by two threads at once
        hangup.register(self._sock, select.POLLRDHUP)
        return not hangup.poll(0)

    def _transmit(self, data: bytes) -> bool:
        """Give `data` to the kernel, or to `pump` what the kernel does not take. Under `_lock`."""
        rest = memoryview(data)
        if not self._backlog:
            try:
                sent = self._sock.send(data)
            except BlockingIOError:
                sent = 0
            except OSError:
                self._shut()
                return False
            if sent == len(data):
                return True
            rest = rest[sent:]
        if len(self._backlog) + len(rest) > BACKLOG_BYTES:
            log.error("the service reads nothing: %d bytes wait for it; the connection is dropped", len(self._backlog))
            self._shut()
            return False
        self._backlog += rest
        self._signal()
        return True

    def _shut(self) -> None:
        """Nothing goes either way any more; `pump` ends. Under `_lock`.

        What is being copied is safe: the service sees the end of the stream only when the socket is closed (`dispose`).
        """
        self._alive = False
        self._signal()

    def stop(self) -> None:
        """Make `pump` return; nothing is sent from now on."""
        with self._lock:
            self._stopping = True
            self._shut()

    def _signal(self) -> None:
        """Wake `pump`. Under `_lock`, so that the descriptor is not closed meanwhile."""
        if self._wake >= 0:
            with contextlib.suppress(BlockingIOError):  # it is awake
                os.eventfd_write(self._wake, 1)

    def pump(self) -> str:
        """Receive replies and send the backlog until the connection ends; the reason."""
        poller = select.poll()
        poller.register(self._wake, select.POLLIN)
        framer = wire.Framer()
        sock, late = self._sock.fileno(), False
        poller.register(sock, select.POLLIN)
        while True:
            for fd, events in poller.poll():
                if fd == self._wake:
                    with contextlib.suppress(BlockingIOError):
                        os.eventfd_read(fd)
                    if not self._alive:
                        return "closed" if self._stopping else "it does not read"
                elif events & ~select.POLLOUT:
                    ended = self._receive(framer)
                    if ended is not None:
                        return ended
                if late != self._flush():
                    late = not late
                    poller.modify(sock, select.POLLIN | (select.POLLOUT if late else 0))

    def _receive(self, framer: wire.Framer) -> str | None:
        """Take what has arrived; the reason when it was the end."""
        try:
            data = self._sock.recv(RECEIVE_BYTES)
            for body in framer.feed(data):
                self._resolve(body)
        except BlockingIOError:
            return None
        except (OSError, LmkvError) as e:
            return str(e)
        return None if data else "it closed the connection"

    def _flush(self) -> bool:
        """Send of the backlog what the kernel takes; whether something is left."""
        if not self._backlog:
            return False
        with self._lock, contextlib.suppress(OSError):  # a broken socket shows when it is read
            sent = self._sock.send(self._backlog)
            del self._backlog[:sent]
        return bool(self._backlog)

    def _resolve(self, body: bytes) -> None:
        number, reply = wire.decode_reply(body)
        future = self._pending.pop(number, None)
        if isinstance(reply, Refused):
            error = wire.error_of(reply)
            if number == 0:
                raise error  # its last word
            if future is not None:
                settle(future, error)
        elif future is not None:  # else a late answer that nobody waits for
            settle(future, reply)

    def dispose(self, reason: str) -> None:
        """Fail what waits, and close the socket once no thread copies. The mapping lives on with its views."""
        with self._lock:
            self._alive = False
            pending, self._pending = self._pending, {}
        error = ClosedError(f"the service has gone: {reason}")
        for future in pending.values():
            settle(future, error)
        self.when_at_rest(self._close)

    def _close(self) -> None:
        with self._lock:
            self._sock.close()
            wake, self._wake = self._wake, -1
            if wake >= 0:
                os.close(wake)
        self.pool.close()


def _checked(reply: Reply) -> Welcome:
    if isinstance(reply, Refused):
        raise wire.error_of(reply)
    if not isinstance(reply, Welcome):
        raise ProtocolError(f"the service's first message is no welcome but {type(reply).__name__}")
    if reply.version != VERSION:
        raise ProtocolError(version_message(reply.version, VERSION), kind="version")
    return reply


def version_message(service: int, client: int) -> str:
    """What to say when the two sides speak different versions."""
    return (
        f"the service speaks version {service} of the protocol, this client version {client}: "
        "install the same lmkv on both sides and restart the older one"
    )
