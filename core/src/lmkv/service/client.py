"""SocketClient: the service is another process."""

from __future__ import annotations

import logging
import os
import threading
import time
from typing import TYPE_CHECKING, Final

from lmkv.errors import ClosedError, LmkvError
from lmkv.observe.clients import NOBODY
from lmkv.service import wire
from lmkv.service.connection import SocketConnection
from lmkv.service.link import StorageClient
from lmkv.service.protocol import Register

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable, Iterable
    from concurrent.futures import Future

    from lmkv.keys import Namespace
    from lmkv.observe.clients import Who
    from lmkv.service.protocol import Reply, Request, Welcome

log = logging.getLogger("lmkv.client")

PAUSE_FIRST: Final = 0.02
PAUSE_LAST: Final = 2.0
"""Seconds between two attempts to come back; grows from the first to the last."""
REVIVE_LAST: Final = 30.0
"""Seconds between two attempts to start a service that goes again and again."""
STEADY_SECONDS: Final = 10.0
"""A connection that lasted so long was a good one: pauses start anew."""


class SocketClient(StorageClient):
    """A client of the service on a unix socket; comes back by itself when that goes and another one comes.

    Args:
        path: the socket.
        name: for people: `vllm-scheduler`, `vllm-worker-0`.
        timeout: seconds that the constructor may wait.
        prefault: touch the mapped pool in the background; for clients that copy.
        who: labels of what is counted for this client.
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
        who: Who = NOBODY,
        revive: Callable[[], None] | None = None,
        credentials: Callable[[socket.socket], tuple[int, int]] = wire.peer,
    ) -> None:
        self.path = os.fspath(path)
        self.name = name
        self._prefault = prefault
        self._who = who
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

    def unregister(self, namespace: Namespace) -> None:
        """See `StorageClient.unregister`."""
        with self._lock:
            self._registered.pop(namespace.json(), None)
        super().unregister(namespace)

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
            self.path, self.name, timeout, prefault=self._prefault, who=self._who, credentials=self._credentials
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


def _run_all(callbacks: Iterable[Callable[[], None]]) -> None:
    for callback in callbacks:
        try:
            callback()
        except Exception:
            log.exception("a reconnect callback failed")
