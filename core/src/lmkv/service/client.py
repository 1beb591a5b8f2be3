"""SocketClient: the service is another process."""

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
from lmkv.service import wire
from lmkv.service.link import Connection, StorageClient, failed, settle
from lmkv.service.protocol import MAX_MESSAGE, VERSION, Hello, Refused, Register, Welcome

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable, Iterable

    from lmkv.service.protocol import Message, Reply, Request

log = logging.getLogger("lmkv.client")

RECEIVE_BYTES: Final = 1 << 16
BACKLOG_BYTES: Final = MAX_MESSAGE
"""Bytes that wait for a service that does not read; above that it counts as gone."""
PAUSE_FIRST: Final = 0.02
PAUSE_LAST: Final = 2.0
"""Seconds between two attempts to come back; grows from the first to the last."""
REVIVE_LAST: Final = 30.0
"""Seconds between two attempts to start a service that goes again and again."""
STEADY_SECONDS: Final = 10.0
"""A connection that lasted so long was a good one: pauses start anew."""


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
                sock.sendall(wire.encode(0, Hello(VERSION, os.getpid(), name)))
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


class SocketClient(StorageClient):
    """A client of the service on a unix socket; comes back by itself when that goes and another one comes.

    Args:
        path: the socket.
        name: for people: `vllm-scheduler`, `vllm-worker-0`.
        timeout: seconds that the constructor may wait.
        prefault: touch the mapped pool in the background; for clients that copy.
        revive: called in the client's thread, at growing pauses, while nobody listens: may start the service.
        credentials: for tests.

    Raises:
        ClosedError: the service was not reached within `timeout`.
        ProtocolError: it is another user's or speaks another version.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        name: str,
        *,
        timeout: float = 10.0,
        prefault: bool = True,
        revive: Callable[[], None] | None = None,
        credentials: Callable[[socket.socket], tuple[int, int]] = wire.peer,
    ) -> None:
        self.path = os.fspath(path)
        self.name = name
        self._prefault = prefault
        self._credentials = credentials
        self._revive = revive
        self._registered: dict[str, Register] = {}
        self._callbacks: list[Callable[[], None]] = []
        self._closing = threading.Event()
        self._lock = threading.Lock()
        """A registration is either known before a connection is presented, or sent on it."""
        self._connection: SocketConnection | None = self._connect(timeout)
        self._coming: SocketConnection | None = self._connection
        self._welcome = self._connection.welcome
        self._thread = threading.Thread(target=self._run, args=(self._connection,), name="lmkv-client", daemon=True)
        self._thread.start()

    def connection(self) -> SocketConnection:
        """See `StorageClient.connection`."""
        connection = self._connection
        if connection is None or not connection.alive:
            raise ClosedError("the client is closed" if self._closing.is_set() else "the service cannot be reached now")
        return connection

    def call(self, request: Request) -> Future[Reply]:
        """See `StorageClient.call`. Remembers registrations, for the next incarnation too."""
        if isinstance(request, Register):
            with self._lock:
                self._registered[request.namespace_json] = request
        return super().call(request)

    @property
    def welcome(self) -> Welcome:
        """See `StorageClient.welcome`."""
        return self._welcome

    @property
    def connected(self) -> bool:
        """See `StorageClient.connected`."""
        connection = self._connection
        return connection is not None and connection.alive

    def on_reconnect(self, callback: Callable[[], None]) -> None:
        """See `StorageClient.on_reconnect`."""
        self._callbacks.append(callback)

    def close(self) -> None:
        """See `StorageClient.close`. A copy that is under way in another thread delays the end of the session."""
        self._closing.set()
        for connection in (self._connection, self._coming):
            if connection is not None:
                connection.stop()
        if threading.current_thread() is not self._thread:
            self._thread.join(2.0)

    def _connect(self, timeout: float) -> SocketConnection:
        return SocketConnection.connect(
            self.path, self.name, timeout, prefault=self._prefault, credentials=self._credentials
        )

    # --- the client's own thread ---

    def _run(self, connection: SocketConnection) -> None:
        pause = PAUSE_FIRST
        current: SocketConnection | None = connection
        while current is not None:
            if self._closing.is_set():
                current.stop()
            reason = current.pump()
            self._connection = None
            if not self._closing.is_set():
                log.warning("%s: the service has gone: %s", self.name, reason)
            current.dispose(reason)
            pause = PAUSE_FIRST if time.monotonic() - current.born > STEADY_SECONDS else min(pause * 2, REVIVE_LAST)
            current = self._return(pause)

    def _return(self, pause: float) -> SocketConnection | None:
        """Connect again, however long it takes; None when the client is closed."""
        while not self._closing.wait(min(pause, PAUSE_LAST)):
            try:
                connection = self._connect(wire.HANDSHAKE_SECONDS)
            except LmkvError as e:
                log.debug("%s: %s", self.name, e)
                if isinstance(e, ClosedError) and self._revive is not None:
                    pause = self._try_revive(pause)
            except Exception:  # whatever it is (descriptors used up, memory), the next attempt may do better
                log.exception("%s: cannot connect to the service", self.name)
            else:
                self._introduce(connection)
                return connection
            pause = min(pause * 2, REVIVE_LAST)
        return None

    def _try_revive(self, pause: float) -> float:
        """Start the service; the pause until the next attempt at anything."""
        if pause > PAUSE_LAST and self._closing.wait(pause - PAUSE_LAST):
            return pause
        try:
            assert self._revive is not None
            self._revive()
        except Exception as e:  # noqa: BLE001  it failed, for whatever reason: said, and tried again later
            log.warning("%s: cannot start the service: %s", self.name, e)
        return pause

    def _introduce(self, connection: SocketConnection, done: frozenset[str] = frozenset()) -> None:
        """Register what was registered; after the last answer the connection is the present one."""
        self._coming = connection
        with self._lock:
            requests = [request for text, request in self._registered.items() if text not in done]
            if not requests:
                fresh = connection.welcome.incarnation != self._welcome.incarnation
                self._welcome = connection.welcome
                self._connection = connection
        if not requests:
            log.info("%s: connected again to %s service", self.name, "a new" if fresh else "the same")
            self._call_back()
            return
        left = len(requests)

        def answered(future: Future[Reply]) -> None:
            nonlocal left
            left -= 1
            error = future.exception()
            if isinstance(error, ClosedError):
                return
            if error is not None:
                log.error("%s: the service refused a namespace: %s", self.name, error)
            if left == 0:  # there may be others by now
                self._introduce(connection, done | {request.namespace_json for request in requests})

        for request in requests:
            connection.call(request).add_done_callback(answered)

    def _call_back(self) -> None:
        callbacks = list(self._callbacks)
        if callbacks:
            threading.Thread(target=_run_all, args=(callbacks,), name="lmkv-reconnect", daemon=True).start()


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


def _run_all(callbacks: Iterable[Callable[[], None]]) -> None:
    for callback in callbacks:
        try:
            callback()
        except Exception:
            log.exception("a reconnect callback failed")
