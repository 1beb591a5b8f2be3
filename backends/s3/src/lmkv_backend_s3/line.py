"""One HTTP connection: sends a signed request without copying its body, reads the answer into given memory."""

from __future__ import annotations

import contextlib
import http.client
import io
import socket
import time
from base64 import b64encode
from functools import partial
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import SplitResult, unquote, urlsplit
from urllib.request import getproxies, proxy_bypass

if TYPE_CHECKING:
    import ssl

    from botocore.awsrequest import AWSPreparedRequest

CONNECT_SECONDS: Final = 1.0
LARGEST_ANSWER: Final = 64 << 20
"""Bytes of an answer that is no frame: listings have some hundred KiB."""
_PIECE: Final = 65536
_BLOCK: Final = 1 << 20
_BUFFERED: Final = max(io.DEFAULT_BUFFER_SIZE, 1 << 17)
"""No less than the buffer of a file that `socket.makefile` makes."""
STALE: Final = 0.8
"""Part of a socket's time-out that has to be left for it to serve on."""


class Payload:
    """Memory as the file that boto3 wants for a body. Reads give slices of the memory, not copies."""

    def __init__(self, view: memoryview) -> None:
        self.view = view
        self._at = 0

    def read(self, size: int | None = -1) -> memoryview:
        """The next bytes; empty at the end."""
        end = len(self.view) if size is None or size < 0 else self._at + size
        piece = self.view[self._at : end]
        self._at += len(piece)
        return piece

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """As of files."""
        self._at = offset + (0, self._at, len(self.view))[whence]
        return self._at

    def tell(self) -> int:
        """As of files."""
        return self._at

    def __len__(self) -> int:
        """Bytes in all."""
        return len(self.view)


class _Timed(io.RawIOBase):
    """A socket to read from, each time for no longer than is left: Python's own file waits as long for every byte."""

    def __init__(self, sock: socket.socket, until: float) -> None:
        self._sock = sock
        self._file = sock.makefile("rb", buffering=0)  # keeps the socket open as long as it is itself
        self._until = until
        self.ended = False

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int | None:
        self._sock.settimeout(remaining(self._until))
        count = self._file.readinto(buffer)
        self.ended = count == 0
        return count

    def close(self) -> None:
        self._file.close()
        super().close()


class Reply(http.client.HTTPResponse):
    """An answer whose body goes into given memory, within a limit for the whole of it."""

    def __init__(self, sock: socket.socket, *args: Any, until: float, **kwargs: Any) -> None:
        super().__init__(sock, *args, **kwargs)
        self.fp.close()
        self._timed = _Timed(sock, until)
        self.fp = io.BufferedReader(self._timed)
        self._sock = sock
        self._direct = False

    def begin(self) -> None:
        """Read the head. Python's own takes one that ends in its middle for a whole one, with fewer headers."""
        super().begin()
        if self._timed.ended:
            self.close()
            raise http.client.IncompleteRead(b"")

    def receive(self, view: memoryview, until: float) -> int:
        """Fill `view`, or less of it where the body ends; the bytes. Raises TimeoutError, or what the socket raises."""
        done = 0
        limit = 0.0
        while done < len(view) and not self.isclosed():
            left = remaining(until)
            if not STALE * limit <= left <= limit:  # a system call each time, where most reads are as small as one
                self._sock.settimeout(left)
                limit = left
            count = self._receive_some(view[done:])
            if not count:
                break
            done += count
        return done

    def receive_all(self, until: float) -> bytes:
        """The body of an answer that is no frame."""
        pieces = bytearray()
        while True:
            piece = bytearray(_PIECE)
            count = self.receive(memoryview(piece), until)
            pieces += piece[:count]
            if count < _PIECE:
                return bytes(pieces)
            if len(pieces) > LARGEST_ANSWER:
                raise http.client.HTTPException("an answer without end")

    def _receive_some(self, view: memoryview) -> int:
        """One read of the socket, where Python lets us at it, so that a trickle cannot hold us; 0 at the end."""
        if self.chunked or self.length is None or not hasattr(self.fp, "readinto1"):
            return self.readinto(view[:_PIECE])
        view = view[: self.length]
        if self._direct:
            count = self._sock.recv_into(view) if view else 0
        else:
            count = self.fp.readinto1(view) if view else 0
            # What came with the head has gone, and this file reads no more than it is asked for into memory of its own
            # as long as it is asked for more than that holds: the rest can come straight from the socket.
            self._direct = len(view) > _BUFFERED
        if not count and self.length:
            raise http.client.IncompleteRead(b"", self.length)
        self.length -= count
        if not self.length:
            self.close()
        return count


class Line:
    """One connection. Used by one thread at a time; only `abort` may come from another.

    Raises, from both steps: OSError (TimeoutError at the limit), http.client.HTTPException.
    """

    def __init__(self, url: SplitResult, tls: ssl.SSLContext | None, until: float) -> None:
        """Connects, by the proxy of the environment where there is one; `tls` says how https servers are verified."""
        self.origin = origin(url)
        self._proxy = _proxy_of(url)
        via = self._proxy or url
        port = via.port or {"http": http.client.HTTP_PORT}.get(via.scheme)  # a proxy's scheme may be another than ours
        limit = min(CONNECT_SECONDS, remaining(until))
        self._http: http.client.HTTPConnection
        if url.scheme == "https":
            self._http = http.client.HTTPSConnection(
                via.hostname or "", port, timeout=limit, blocksize=_BLOCK, context=tls
            )
            if self._proxy is not None:
                self._http.set_tunnel(url.hostname or "", url.port, _leave(self._proxy))
        else:
            self._http = http.client.HTTPConnection(via.hostname or "", port, timeout=limit, blocksize=_BLOCK)
        self._http.connect()
        self._sock = self._http.sock
        self._reply: Reply | None = None

    def ask(self, request: AWSPreparedRequest, until: float) -> Reply:
        """Send, and read the head of the answer."""
        self._sock.settimeout(remaining(until))
        body = request.body.view if isinstance(request.body, Payload) else request.body
        headers = {_text(name): value for name, value in request.headers.items()}
        headers.pop("Expect", None)  # asks for leave before the body is sent: a round trip, and boto3 waits a second
        url = urlsplit(request.url)
        target = f"{url.path or '/'}?{url.query}" if url.query else url.path or "/"
        if self._proxy is not None and url.scheme == "http":
            target = request.url
            headers.update(_leave(self._proxy))
        self._http.putrequest(request.method, target, skip_accept_encoding=True)
        for name, value in headers.items():
            self._http.putheader(name, value)
        chunked = "chunked" in _text(headers.get("Transfer-Encoding", ""))
        try:
            self._http.endheaders(message_body=body, encode_chunked=chunked)
        except (BrokenPipeError, ConnectionResetError):
            # A server that refuses may answer before it has read the whole body, and hang up. Hear what it said.
            with contextlib.suppress(OSError, http.client.HTTPException):
                return self._head(until)
            raise
        return self._head(until)

    def spent(self, reply: Reply) -> bool:
        """Whether the connection cannot take another request after this answer."""
        return not reply.isclosed() or self._http.sock is None

    def abort(self) -> None:
        """Wake whoever waits on it."""
        with contextlib.suppress(OSError):
            # Not the method of a TLS socket: that one ends TLS first, and whoever is about to send would, in the clear.
            socket.socket.shutdown(self._sock, socket.SHUT_RDWR)

    def close(self) -> None:
        """Idempotent. An answer whose end is that of the connection holds the socket open until it is closed itself."""
        self._http.close()
        if self._reply is not None:
            self._reply.close()

    def _head(self, until: float) -> Reply:
        self._http.response_class = partial(Reply, until=until)  # type: ignore[assignment]  # a callable will do
        reply = self._http.getresponse()
        assert isinstance(reply, Reply)
        self._reply = reply
        return reply


def remaining(until: float) -> float:
    """Seconds until then; raises TimeoutError where there are none."""
    left = until - time.monotonic()
    if left <= 0:
        raise TimeoutError("no answer in time")
    return left


def origin(url: SplitResult) -> str:
    """Which server a URL asks."""
    return f"{url.scheme}://{url.netloc}"


def _proxy_of(url: SplitResult) -> SplitResult | None:
    proxy = getproxies().get(url.scheme)
    if not proxy or proxy_bypass(url.hostname or ""):
        return None
    return urlsplit(proxy if "://" in proxy else f"http://{proxy}")


def _leave(proxy: SplitResult) -> dict[str, str]:
    """What a proxy wants to know."""
    if proxy.username is None:
        return {}
    pair = f"{unquote(proxy.username)}:{unquote(proxy.password or '')}"
    return {"Proxy-Authorization": f"Basic {b64encode(pair.encode()).decode()}"}


def _text(value: str | bytes) -> str:
    """Of a header: botocore gives some of its headers as bytes."""
    return value.decode("latin-1") if isinstance(value, bytes) else value
