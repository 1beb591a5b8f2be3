"""What everything above the service talks to: `StorageClient`, and the `Connection` that it has at a moment."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from concurrent.futures import Future
from typing import TYPE_CHECKING, TypeVar, cast

from lmkv.errors import ClosedError, ProtocolError
from lmkv.service.protocol import Unregister

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType

    from typing_extensions import Self

    from lmkv.keys import Namespace
    from lmkv.memory import Pool
    from lmkv.service.protocol import Message, Reply, Request, Welcome

R = TypeVar("R")


class Connection(ABC):
    """One session with one incarnation of the service: lease and hold numbers, pool offsets mean something only here.

    A context manager: while a thread is inside, the session is not ended from this side, so that the service cannot
    give memory that this thread copies to or from to somebody else. Thread-safe.

    Attributes:
        pool: this process's mapping of the pool; usable even after the service has gone.
        welcome: what the service said of itself.
    """

    pool: Pool
    welcome: Welcome

    def __init__(self) -> None:
        self._guard = threading.Lock()
        self._users = 0
        self._at_rest: Callable[[], None] | None = None

    @abstractmethod
    def call(self, request: Request) -> Future[Reply]:
        """Send a request; the future gets the reply, the `LmkvError` of a refusal, or `ClosedError`.

        Callbacks of the future run in the thread that reads from the service: they must be quick and must not wait.
        """

    @abstractmethod
    def send(self, message: Message) -> bool:
        """Send a one-way message. False when the connection has gone; never raises, never waits."""

    @property
    @abstractmethod
    def alive(self) -> bool:
        """As far as is known without asking the kernel."""

    @abstractmethod
    def intact(self) -> bool:
        """Asks the kernel: the service has not ended this session until now, so what it held for us it still held."""

    def __enter__(self) -> Self:
        with self._guard:
            self._users += 1
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._guard:
            self._users -= 1
            then = self._at_rest if self._users == 0 else None
            if then is not None:
                self._at_rest = None
        if then is not None:
            then()

    def when_at_rest(self, then: Callable[[], None]) -> None:
        """Run `then` once nobody is inside: now, or in the thread that leaves last."""
        with self._guard:
            if self._users:
                self._at_rest = then
                return
        then()


class StorageClient(ABC):
    """The way to a `StorageManager`. Thread-safe; no method waits for the service (but `close`, briefly).

    While the service cannot be reached every call fails at once with `ClosedError`; the client comes back by itself,
    registers again what was registered, and then runs the `on_reconnect` callbacks.
    """

    @abstractmethod
    def connection(self) -> Connection:
        """The present connection.

        Raises:
            ClosedError: there is none now.
        """

    @property
    @abstractmethod
    def welcome(self) -> Welcome:
        """What the service said of itself, the last time that it was reached."""

    @property
    @abstractmethod
    def connected(self) -> bool:
        """Calls have a chance now."""

    @abstractmethod
    def on_reconnect(self, callback: Callable[[], None]) -> None:
        """Run `callback` in a thread of its own after each reconnection: every lease and hold number is void then."""

    @abstractmethod
    def close(self) -> None:
        """End the session: leases, holds and reservations go. Idempotent."""

    @property
    def pool(self) -> Pool:
        """This process's mapping of the pool of the present connection; ClosedError when there is none."""
        return self.connection().pool

    @property
    def incarnation(self) -> int:
        """Random number of the service's start; another one means that everything it held for us has gone."""
        return self.welcome.incarnation

    def call(self, request: Request) -> Future[Reply]:
        """`Connection.call` on the present connection; without one the future fails with `ClosedError` at once."""
        try:
            return self.connection().call(request)
        except ClosedError as e:
            return failed(e)

    def unregister(self, namespace: Namespace) -> None:
        """This client is through with a namespace: the service may forget it, and is not told of it again. Never waits.

        The frames stay; whoever wants them gone clears before.
        """
        self.send(Unregister(namespace.id))

    def send(self, message: Message) -> bool:
        """`Connection.send` on the present connection; False (and nothing else) when there is none."""
        try:
            return self.connection().send(message)
        except ClosedError:
            return False


def failed(error: BaseException) -> Future[Reply]:
    """A future that has failed."""
    future: Future[Reply] = Future()
    future.set_exception(error)
    return future


def settle(future: Future[Reply], reply: Message | BaseException) -> None:
    """Give a future its result or error, unless its owner has cancelled it."""
    if not future.set_running_or_notify_cancel():
        return
    if isinstance(reply, BaseException):
        future.set_exception(reply)
    else:
        future.set_result(cast("Reply", reply))


def expect(reply: Reply, kind: type[R]) -> R:
    """`reply`, if it is of the class that the protocol gives for the request.

    Raises:
        ProtocolError: it is not.
    """
    if not isinstance(reply, kind):
        raise ProtocolError(f"the service answered {type(reply).__name__}, expected {kind.__name__}")
    return reply
