"""HTTP/1.1 to one engine: kept-alive connections, parsed by httptools, bodies passed on as they come.

A tenth of what a general client costs per request, which is what a proxy adds (see the decision on it). It does what a
proxy needs and no more: no redirects, cookies, decompression, environment.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import TYPE_CHECKING, Any, Final, TypeVar, cast
from urllib.parse import urlsplit

import httptools

from lmkv_backend_nixl_pd.proxy.errors import EngineError

if TYPE_CHECKING:
    import ssl
    from collections.abc import Coroutine, Iterable
    from types import TracebackType

    from typing_extensions import Self

Headers = list[tuple[bytes, bytes]]
Result = TypeVar("Result")

HOP_BY_HOP: Final = frozenset(
    (b"connection", b"expect", b"keep-alive", b"proxy-authenticate", b"proxy-authorization", b"proxy-connection",
     b"te", b"trailer", b"transfer-encoding", b"upgrade")
)  # fmt: skip
"""Of one connection, not of the message: passed on by nobody."""
IDLE_SECONDS: Final = 4.0
"""A connection that was idle longer is not used again: vLLM's server closes it after 5 s."""
MAX_IDLE: Final = 256
MAX_HEAD: Final = 128 << 10
"""Bytes of an answer's header lines."""
HIGH_WATER: Final = 256 << 10
"""Bytes of an answer that wait here for a slow client before the engine's socket is read no more."""
_NO_BODY: Final = (204, 304)
_FINAL: Final = 200


async def bounded(work: Coroutine[Any, Any, Result], seconds: float) -> Result:
    """As `asyncio.wait_for`, which before Python 3.12 loses a cancellation that comes as the work ends."""
    task = asyncio.ensure_future(work)
    try:
        await asyncio.wait((task,), timeout=seconds)
        if task.done():
            return task.result()
    finally:
        task.cancel()
    raise asyncio.TimeoutError


def end_to_end(headers: Iterable[tuple[bytes, bytes]]) -> Headers:
    """The headers that are the message's; names in lower case already."""
    headers = list(headers)
    named = {
        word.strip().lower() for name, value in headers if name == b"connection" for word in value.split(b",")
    } - {b"keep-alive", b"close"}  # fmt: skip
    return [pair for pair in headers if pair[0] not in HOP_BY_HOP and pair[0] not in named]


class Answer:
    """The answer of an engine. Its head is there; its body comes with `some` or `read`.

    Use as a context manager: at its end the connection is kept if the whole body was taken, and cut off if not, by
    which the engine learns that nobody waits.

    Attributes:
        status: HTTP status.
        headers: end to end ones, names in lower case.
    """

    def __init__(self, connection: _Connection, silence: float) -> None:
        self.status = connection.status
        self.headers = end_to_end(connection.headers)
        self._connection = connection
        self._silence = silence

    async def some(self) -> bytes:
        """The next bytes of the body as they come, empty at its end; `EngineError` where it breaks off."""
        connection = self._connection
        while not connection.parts and not connection.done:
            await connection.wait(self._silence)
        return connection.take()

    async def read(self, limit: int) -> bytes:
        """The whole body; `EngineError` if it is longer than `limit` bytes."""
        parts = []
        while part := await self.some():
            parts.append(part)
            limit -= len(part)
            if limit < 0:
                raise EngineError("protocol", "the answer is too long")
        return b"".join(parts)

    @property
    def ended(self) -> bool:
        """Whether `some` has given all of the body."""
        return self._connection.done and not self._connection.parts

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._connection.release()


class Client:
    """All connections to one server.

    Args:
        url: `http://host:port` or `https://…`, with or without a path that goes before every request's.
        context: for https.
        connect_seconds: time to connect, TLS included.
    """

    def __init__(self, url: str, *, context: ssl.SSLContext | None, connect_seconds: float) -> None:
        parts = urlsplit(url)
        self._host = parts.hostname or ""
        self._secure = parts.scheme == "https"
        self._port = parts.port or (443 if self._secure else 80)
        self._context = context if self._secure else None
        self._prefix = parts.path.rstrip("/").encode()
        self._authority = parts.netloc.rpartition("@")[2].encode()
        self._connect_seconds = connect_seconds
        self._idle: deque[_Connection] = deque()

    async def send(
        self, method: str, target: bytes, headers: Iterable[tuple[bytes, bytes]], body: bytes, *, silence: float
    ) -> Answer:
        """Send a request and wait for the head of its answer.

        Args:
            method: such as `POST`.
            target: path and query, percent-encoded.
            headers: end to end ones; `host` and `content-length` are replaced.
            body: all of it.
            silence: seconds without a byte from the server after which it is given up, now and while the body comes.

        Raises:
            EngineError: there is no answer. A request on a connection that had been closed meanwhile is sent again.
        """
        lines = [method.encode(), b" ", self._prefix, target, b" HTTP/1.1\r\nhost: ", self._authority, b"\r\n"]
        for name, value in headers:
            if name not in {b"host", b"content-length"}:
                lines += (name, b": ", value, b"\r\n")
        if body or method not in {"GET", "HEAD", "OPTIONS"}:
            lines.append(b"content-length: %d\r\n" % len(body))
        lines.append(b"\r\n")
        head = b"".join(lines)
        while (connection := self._kept()) is not None:
            try:
                await connection.ask(head, body, silence, bodiless=method == "HEAD")
            except EngineError as error:
                if error.kind != "closed" or connection.began:
                    raise
            else:
                return Answer(connection, silence)
        connection = await self._connect()
        await connection.ask(head, body, silence, bodiless=method == "HEAD")
        return Answer(connection, silence)

    def close(self) -> None:
        """Close the idle connections; those in use end with their answers."""
        while self._idle:
            self._idle.pop().cut()

    def keep(self, connection: _Connection) -> None:
        """Take back a connection whose answer has been read whole."""
        oldest = asyncio.get_running_loop().time() - IDLE_SECONDS
        while self._idle and (self._idle[0].since < oldest or len(self._idle) >= MAX_IDLE):
            self._idle.popleft().cut()
        self._idle.append(connection)

    def _kept(self) -> _Connection | None:
        """The connection that was used last, if it can be used again."""
        oldest = asyncio.get_running_loop().time() - IDLE_SECONDS
        while self._idle:
            connection = self._idle.pop()
            if not connection.lost and connection.since >= oldest:
                return connection
            connection.cut()
        return None

    async def _connect(self) -> _Connection:
        loop = asyncio.get_running_loop()
        where = f"{self._host}:{self._port}"
        connection = _Connection(self, loop)
        try:
            await bounded(
                loop.create_connection(lambda: connection, self._host, self._port, ssl=self._context),
                self._connect_seconds,
            )
        except asyncio.TimeoutError:
            connection.cut()
            raise EngineError("connect", f"{where}: no connection within {self._connect_seconds:g} s") from None
        except OSError as error:  # ssl.SSLError is one
            raise EngineError("connect", f"{where}: {error.strerror or error}") from error
        except BaseException:
            connection.cut()
            raise
        return connection


class _Connection(asyncio.Protocol):
    """One connection, one exchange at a time. Also what httptools calls for each part of an answer."""

    def __init__(self, client: Client, loop: asyncio.AbstractEventLoop) -> None:
        self.lost = False
        self.since = 0.0
        self.status = 0
        self.headers: Headers = []
        self.parts: list[bytes] = []
        self.began = self.done = False
        self._client = client
        self._loop = loop
        self._transport: asyncio.Transport | None = None
        self._parser: httptools.HttpResponseParser | None = None
        self._error: EngineError | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._head = self._bodiless = self._paused = self._reusable = False
        self._head_bytes = self._waiting_bytes = 0

    async def ask(self, head: bytes, body: bytes, silence: float, *, bodiless: bool) -> None:
        """Send a request; returns when the answer's head is there."""
        self.status, self.headers, self.parts = 0, [], []
        self.began = self.done = self._head = self._reusable = False
        self._head_bytes = self._waiting_bytes = 0
        self._bodiless = bodiless
        self._parser = httptools.HttpResponseParser(self)
        assert self._transport is not None
        try:
            if len(body) < HIGH_WATER:
                self._transport.write(head + body)
            else:
                self._transport.write(head)
                self._transport.write(body)
            while not self._head:
                await self.wait(silence)
        except BaseException:
            self.cut()
            raise

    async def wait(self, silence: float) -> None:
        """Until something has come; `EngineError` where nothing does or will."""
        if self._error is not None:
            raise self._error
        if self.lost:
            raise EngineError("closed", "the connection was closed before the answer was whole")
        self._waiter = self._loop.create_future()
        timer = self._loop.call_later(silence, self._fail, EngineError("silent", f"no answer for {silence:g} s"))
        try:
            await self._waiter
        finally:
            timer.cancel()
            self._waiter = None
        if self._error is not None:
            raise self._error

    def take(self) -> bytes:
        """What has come of the body."""
        parts = self.parts
        self.parts, self._waiting_bytes = [], 0
        if self._paused and self._transport is not None:
            self._paused = False
            self._transport.resume_reading()
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def release(self) -> None:
        """The exchange has ended: keep the connection for another, or cut it off."""
        if self.done and self._reusable and not self.parts and not self.lost and self._error is None:
            self._parser = None
            self.since = self._loop.time()
            self._client.keep(self)
        else:
            self.cut()

    def cut(self) -> None:
        """Close at once, also if it is still to come."""
        self.lost = True
        if self._transport is not None:
            self._transport.abort()

    # --- asyncio calls

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Connected."""
        self._transport = cast("asyncio.Transport", transport)
        if self.lost:
            self._transport.abort()

    def data_received(self, data: bytes) -> None:
        """Parse it; the methods below are called from there."""
        if self._parser is None:  # nobody has asked for anything
            self.cut()
            return
        self.began = True
        if not self._head:
            self._head_bytes += len(data)
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            self._fail(EngineError("protocol", "the answer switches protocols"))
        except httptools.HttpParserError as error:
            self._fail(EngineError("protocol", f"the answer is no HTTP/1.1: {error}"))
        if self._head_bytes > MAX_HEAD and not self._head:
            self._fail(EngineError("protocol", f"the answer's headers are longer than {MAX_HEAD} bytes"))
        if self._waiting_bytes > HIGH_WATER and not self._paused and not self.done and self._transport is not None:
            self._paused = True
            self._transport.pause_reading()
        self._wake()

    def connection_lost(self, error: Exception | None) -> None:
        """Closed, by whichever side."""
        del error
        self.lost = True
        if self._head and self._until_close():
            self.done = True
        elif not self.done and self._error is None:
            self._error = EngineError("closed", "the connection was closed before the answer was whole")
        self._wake()

    # --- httptools calls

    def on_message_begin(self) -> None:
        """Of the answer, or of one that nobody has asked for."""
        if self.done:
            self._fail(EngineError("protocol", "more than one answer"))

    def on_header(self, name: bytes, value: bytes) -> None:
        """One header line."""
        self.headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        """The head is there, unless it is an interim one (1xx)."""
        assert self._parser is not None
        status = self._parser.get_status_code()
        if status < _FINAL:
            self.headers = []
            return
        self.status, self._head = status, True
        if self._bodiless:  # the answer to HEAD has the lengths of a body that does not come
            self.done = True

    def on_body(self, body: bytes) -> None:
        """Some of the body."""
        if not self._bodiless:
            self.parts.append(body)
            self._waiting_bytes += len(body)

    def on_message_complete(self) -> None:
        """All of the answer is there."""
        if self._head:
            assert self._parser is not None
            self.done = True
            self._reusable = self._parser.should_keep_alive() and not self._bodiless

    def _until_close(self) -> bool:
        """Whether the end of the connection is the end of the body."""
        framed = any(name in {b"content-length", b"transfer-encoding"} for name, _ in self.headers)
        return not framed and self.status not in _NO_BODY

    def _fail(self, error: EngineError) -> None:
        if self._error is None:
            self._error = error
        self.cut()
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
