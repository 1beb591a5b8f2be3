"""HTTP for the requests that boto3 has made and signed: kept connections, limits that hold in all, no copy of a frame.

boto3's own transport knows one time-out for every single socket call, waits for leave before it sends a body, and
hands bodies out as fresh bytes. botocore asks the listeners of its event `before-send` first, and takes an answer of
theirs for the server's: `Transport.send` is such a listener.
"""

from __future__ import annotations

import contextlib
import http.client
import threading
import time
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import SplitResult, urlsplit

from botocore.awsrequest import AWSResponse

from lmkv.errors import ClosedError
from lmkv_backend_s3.line import Line, Reply, origin

if TYPE_CHECKING:
    import ssl
    from collections.abc import Iterator

    from botocore.awsrequest import AWSPreparedRequest

IDLE_SECONDS: Final = 15.0
"""A connection that nobody used for so long may be dead without a sign of it; S3 ends them after about 20 s."""


class Exchange:
    """One call of boto3's client on this thread: its limit, and the answer whose body was left to the caller."""

    def __init__(self, until: float) -> None:
        self.until = until
        self.sent = False
        """A connection was there, and the request has gone out on it, or some of it."""
        self.reply: Reply | None = None
        self.line: Line | None = None


class Body:
    """What botocore reads an answer's body from."""

    def __init__(self, content: bytes) -> None:
        self._content = content

    def stream(self) -> Iterator[bytes]:
        """All of it."""
        yield self._content


class Transport:
    """The connections of one client. Thread-safe.

    Args:
        tls: how servers are verified, for https.
    """

    def __init__(self, tls: ssl.SSLContext | None) -> None:
        self._tls = tls
        self._lock = threading.Lock()
        self._idle: dict[str, list[tuple[float, Line]]] = {}
        self._busy: set[Line] = set()
        self._here = threading.local()
        self._closed = False

    @contextlib.contextmanager
    def exchange(self, until: float) -> Iterator[Exchange]:
        """Everything that this thread sends inside ends by `until` (on the monotonic clock)."""
        exchange = self._here.exchange = Exchange(until)
        try:
            yield exchange
        finally:
            self._here.exchange = None
            if exchange.line is not None and exchange.reply is not None:
                self._give_back(exchange.line, exchange.reply)

    def send(self, request: AWSPreparedRequest, **_: Any) -> AWSResponse:
        """For the event `before-send`. Raises OSError (TimeoutError at the limit) or http.client.HTTPException."""
        exchange: Exchange = self._here.exchange
        line, reply = self._ask(request, exchange)
        content = b""
        if request.stream_output and reply.status < http.client.MULTIPLE_CHOICES:
            exchange.line, exchange.reply = line, reply
        else:
            try:
                content = reply.read() if request.method == "HEAD" else reply.receive_all(exchange.until)
            finally:
                self._give_back(line, reply)
        return AWSResponse(request.url, reply.status, reply.headers, Body(content))

    def close(self) -> None:
        """End every connection, also those that somebody waits on. Idempotent."""
        with self._lock:
            self._closed = True
            idle = [line for kept in self._idle.values() for _, line in kept]
            busy = list(self._busy)
            self._idle.clear()
        for line in idle:
            line.close()
        for line in busy:
            line.abort()

    def _ask(self, request: AWSPreparedRequest, exchange: Exchange) -> tuple[Line, Reply]:
        """Send, and read the answer's head; once more, at once, where a kept connection turns out to have ended."""
        url = urlsplit(request.url)
        kept = self._kept(url)
        if kept is not None:
            try:
                return kept, self._asked(kept, request, exchange)
            except TimeoutError:
                raise
            except (OSError, http.client.HTTPException):
                self._forget_idle(url)
                request.reset_stream()
        fresh = Line(url, self._tls, exchange.until)
        with self._lock:
            if self._closed:
                fresh.close()
                raise ClosedError("the S3 client is closed")
            self._busy.add(fresh)
        return fresh, self._asked(fresh, request, exchange)

    def _asked(self, line: Line, request: AWSPreparedRequest, exchange: Exchange) -> Reply:
        exchange.sent = True
        try:
            return line.ask(request, exchange.until)
        except BaseException:
            self._drop(line)
            raise

    def _kept(self, url: SplitResult) -> Line | None:
        """An idle connection; one that has been idle for long is ended instead."""
        with self._lock:
            idle = self._idle.get(origin(url), [])
            while idle:
                since, line = idle.pop()
                if time.monotonic() - since < IDLE_SECONDS:
                    self._busy.add(line)
                    return line
                line.close()
        return None

    def _give_back(self, line: Line, reply: Reply) -> None:
        """Keep it for the next request, if the answer was read to its end and the server allows it."""
        if line.spent(reply):
            self._drop(line)
            return
        with self._lock:
            self._busy.discard(line)
            if not self._closed:
                self._idle.setdefault(line.origin, []).append((time.monotonic(), line))
                return
        line.close()

    def _drop(self, line: Line) -> None:
        with self._lock:
            self._busy.discard(line)
        line.close()

    def _forget_idle(self, url: SplitResult) -> None:
        """One kept connection has ended: the others of its age most likely have as well."""
        with self._lock:
            idle = self._idle.pop(origin(url), [])
        for _, line in idle:
            line.close()
