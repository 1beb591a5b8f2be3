"""The storage in a thread of this process (`ThreadHost`), and its client (`LocalClient`).

Short-cuts the socket and nothing else: messages go to the same `Session`s on the same kind of loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import threading
from collections import deque
from concurrent.futures import Future
from inspect import isawaitable
from typing import TYPE_CHECKING, Any, Final

from lmkv.errors import ClosedError, LmkvError
from lmkv.observe.clients import NOBODY, label_value
from lmkv.service.link import Connection, StorageClient, failed, settle
from lmkv.service.protocol import VERSION, Welcome

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine

    from lmkv.config import Config
    from lmkv.observe.clients import Who
    from lmkv.service.node import NodeStorage
    from lmkv.service.protocol import Message, Reply, Request
    from lmkv.service.session import Session

log = logging.getLogger("lmkv.service")

START_SECONDS: Final = 600.0
"""A disk tier may have to scan a very large folder."""
CLOSE_SECONDS: Final = 10.0


def welcome_of(storage: NodeStorage) -> Welcome:
    """The first message of the service of `storage`."""
    config = storage.config
    return Welcome(
        VERSION,
        storage.incarnation,
        storage.pool.nbytes,
        config.chunk_tokens,
        config.tail,
        tuple(storage.tiers),
        config.leases.seconds,
        storage.asks,
        storage.name,
    )


async def start_storage(config: Config) -> NodeStorage:
    """The storage of `config`, with the plugins that are installed."""
    from lmkv.observe.metrics import Metrics  # noqa: PLC0415  clients of a service need none of this
    from lmkv.plugins import PluginHost  # noqa: PLC0415
    from lmkv.service.node import NodeStorage  # noqa: PLC0415

    instance = label_value(config.metrics.instance or f"{socket.gethostname()}:{os.getpid()}")
    return await NodeStorage.start(config, PluginHost.discover(), Metrics({"instance": instance}))


class ThreadHost:
    """Runs a storage on an asyncio loop in a thread of its own, for libraries, tests and tools.

    Args:
        config: what to start.
        start: makes the storage; for tests and for those who have their own plugin host or metrics.

    Raises:
        LmkvError: what starting the storage raised.
    """

    def __init__(self, config: Config, *, start: Callable[[Config], Awaitable[NodeStorage]] = start_storage) -> None:
        self._loop = asyncio.new_event_loop()
        self._closed = threading.Event()
        self._clients: set[LocalClient] = set()
        self._thread = threading.Thread(target=self._run, name="lmkv-storage", daemon=True)
        self._thread.start()
        try:
            self.storage: NodeStorage = self.run(_await(start(config)), START_SECONDS)
        except BaseException:
            self._end()
            raise
        self.welcome = welcome_of(self.storage)

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        """The storage loop."""
        return self._loop

    @property
    def closed(self) -> bool:
        """`close` was called."""
        return self._closed.is_set()

    def run(self, coroutine: Coroutine[Any, Any, Any], seconds: float) -> Any:
        """Run a coroutine on the loop and wait for its result."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(seconds)

    def adopt(self, client: LocalClient) -> None:
        """For `LocalClient`: it is closed when the host is."""
        self._clients.add(client)

    def forget(self, client: LocalClient) -> None:
        """For `LocalClient`: it has closed itself."""
        self._clients.discard(client)

    def close(self, deadline: float = CLOSE_SECONDS) -> None:
        """Close all clients, stop the storage within `deadline` seconds, end the thread. Idempotent."""
        if self._closed.is_set():
            return
        for client in list(self._clients):
            client.close()
        self._closed.set()
        try:
            self.run(self.storage.close(deadline), deadline + 1.0)
        except Exception:  # closing goes on whatever it was
            log.exception("the storage did not close cleanly")
        self._end()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()
        tasks = asyncio.all_tasks(self._loop)
        for task in tasks:
            task.cancel()
        if tasks:
            self._loop.run_until_complete(asyncio.wait(tasks, timeout=1.0))
        self._loop.run_until_complete(self._loop.shutdown_asyncgens())
        self._loop.close()

    def _end(self) -> None:
        self._closed.set()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(CLOSE_SECONDS)


async def _await(awaitable: Awaitable[Any]) -> Any:
    return await awaitable


class LocalConnection(Connection):
    """A session of a `ThreadHost`. Its loop is woken once for all messages that are waiting."""

    def __init__(self, host: ThreadHost, name: str, who: Who) -> None:
        super().__init__()
        self.pool = host.storage.pool
        self.welcome = host.welcome
        self._loop = host.loop
        self._session: Session = host.run(self._open(host.storage, name, who), CLOSE_SECONDS)
        self._inbox: deque[tuple[Message, Future[Reply] | None]] = deque()
        self._woken = False
        self._alive = True
        self._ended = False
        self._tasks: set[asyncio.Future[Message]] = set()
        self._pending: set[Future[Reply]] = set()

    @staticmethod
    async def _open(storage: NodeStorage, name: str, who: Who) -> Session:
        return storage.open_session(name, who)

    def call(self, request: Request) -> Future[Reply]:
        """See `Connection.call`; the loop thread is the one that runs callbacks."""
        future: Future[Reply] = Future()
        return future if self._put(request, future) else failed(ClosedError("the storage has been closed"))

    def send(self, message: Message) -> bool:
        """See `Connection.send`."""
        return self._put(message, None)

    @property
    def alive(self) -> bool:
        """See `Connection.alive`."""
        return self._alive

    def intact(self) -> bool:
        """See `Connection.intact`: this side ends the session, and not while a thread is inside."""
        return self._alive

    def _put(self, message: Message, future: Future[Reply] | None) -> bool:
        if not self._alive:
            return False
        self._inbox.append((message, future))
        if not self._woken:  # the loop takes the flag down before it looks, so that no message is left behind
            self._woken = True
            try:
                self._loop.call_soon_threadsafe(self._drain)
            except RuntimeError:  # the loop is closed
                self._alive = False
                return False
        return True

    def _drain(self) -> None:
        self._woken = False
        inbox = self._inbox
        while inbox:
            message, future = inbox.popleft()
            if self._ended:
                if future is not None:
                    settle(future, ClosedError("the storage has been closed"))
                continue
            try:
                reply = self._session.handle(message)
            except LmkvError as e:
                self._fail(message, future, e)
            except Exception as e:
                log.exception("%s failed", type(message).__name__)
                self._fail(message, future, LmkvError(f"{type(e).__name__}: {e}", kind="internal"))
            else:
                if isawaitable(reply):
                    self._later(asyncio.ensure_future(_await(reply)), future)
                elif future is not None:
                    settle(future, reply if reply is not None else LmkvError("no answer", kind="protocol"))

    def _fail(self, message: Message, future: Future[Reply] | None, error: LmkvError) -> None:
        if future is None:
            log.debug("%s was refused: %s", type(message).__name__, error)
        else:
            settle(future, error)

    def _later(self, task: asyncio.Future[Message], future: Future[Reply] | None) -> None:
        self._tasks.add(task)  # the loop itself keeps only weak references
        if future is not None:
            self._pending.add(future)

        def done(task: asyncio.Future[Message]) -> None:
            self._tasks.discard(task)
            error = ClosedError("the storage has been closed") if task.cancelled() else task.exception()
            if future is None or future not in self._pending:
                return
            self._pending.discard(future)
            settle(future, error if error is not None else task.result())

        task.add_done_callback(done)

    def stop(self) -> None:
        """No more messages; the session ends once those before are done and no thread copies."""
        self._alive = False
        self.when_at_rest(self._end_soon)

    def _end_soon(self) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed, and the storage with it
            self._loop.call_soon_threadsafe(self._end)

    def _end(self) -> None:
        self._drain()
        self._ended = True
        pending, self._pending = self._pending, set()
        for future in pending:
            settle(future, ClosedError("the storage has been closed"))
        self._session.close()


class LocalClient(StorageClient):
    """A client of a `ThreadHost`.

    Args:
        host: stays the caller's, who closes it after its clients.
        name: for people.
        who: labels of what is counted for this client.

    Raises:
        ClosedError: the host is closed.
    """

    def __init__(self, host: ThreadHost, name: str = "local", who: Who = NOBODY) -> None:
        if host.closed:
            raise ClosedError("the host is closed")
        self._host = host
        self._connection = LocalConnection(host, name, who)
        host.adopt(self)

    def connection(self) -> LocalConnection:
        """See `StorageClient.connection`."""
        if not self._connection.alive:
            raise ClosedError("the client is closed")
        return self._connection

    @property
    def welcome(self) -> Welcome:
        """See `StorageClient.welcome`."""
        return self._connection.welcome

    @property
    def connected(self) -> bool:
        """See `StorageClient.connected`."""
        return self._connection.alive

    def on_reconnect(self, callback: Callable[[], None]) -> None:
        """Nothing ever reconnects here: the storage goes with the process."""

    def close(self) -> None:
        """See `StorageClient.close`."""
        if self._connection.alive:
            self._connection.stop()
            self._host.forget(self)
