"""An HTTP server that speaks just enough S3, and answers as a script tells it: for faults that real ones don't show."""

from __future__ import annotations

import contextlib
import re
import socket
import ssl
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs, unquote, urlsplit

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Self

    from server_rig import Certificates

ACCESS_KEY = "fake-access"
SECRET_KEY = "fake-secret-that-nobody-may-see"
BUCKET = "kv-frames"
TOKEN = "fake-token-that-nobody-may-see"


@dataclass
class Seen:
    """One request."""

    method: str
    target: str
    """As in the request line."""
    headers: dict[str, str]
    connection: socket.socket
    at: float = field(default_factory=time.monotonic)


class FakeS3:
    """A context manager. Keeps objects in `objects`, requests in `seen`.

    Attributes:
        script: asked before each request; returns a status to refuse with, or None. It may sleep.
        ranges: whether it takes them.
        etags: whether it sends them.
        written: when all objects were, if it is to say so.
    """

    def __init__(self, certificates: Certificates | None = None) -> None:
        self.objects: dict[str, bytes] = {}
        self.seen: list[Seen] = []
        self.script: Callable[[Seen], tuple[int, str] | None] = lambda _: None
        self.ranges = True
        self.etags = True
        self.chunked = False
        self.written: float | None = None
        self.hang = threading.Event()
        """Set: requests are taken and not answered."""
        self.connections = 0
        self._tls = certificates
        self._sockets: set[socket.socket] = set()

    @property
    def endpoint(self) -> str:
        return f"{'https' if self._tls else 'http'}://127.0.0.1:{self.port}"

    @property
    def counts(self) -> Counter[str]:
        return Counter(each.method for each in self.seen)

    def options(self, **more: object) -> dict[str, object]:
        return {
            "endpoint": self.endpoint,
            "bucket": BUCKET,
            "prefix": "",
            "access_key": ACCESS_KEY,
            "secret_key": SECRET_KEY,
            **more,
        }

    def __enter__(self) -> Self:
        fake = self

        class Requests(_Requests):
            server_of = fake

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Requests)
        self._server.daemon_threads = True
        self.port = self._server.server_address[1]
        if self._tls is not None:
            context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
            context.load_cert_chain(self._tls.cert, self._tls.key)
            self._server.socket = context.wrap_socket(self._server.socket, server_side=True)
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self.hang_up()
        self._thread.join()

    def hang_up(self) -> None:
        """End every connection, as servers do with idle ones."""
        for each in list(self._sockets):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)


class _Requests(BaseHTTPRequestHandler):
    server_of: FakeS3
    protocol_version = "HTTP/1.1"

    def setup(self) -> None:
        super().setup()
        self.server_of.connections += 1
        self.server_of._sockets.add(self.connection)

    def finish(self) -> None:
        self.server_of._sockets.discard(self.connection)
        with contextlib.suppress(OSError):
            super().finish()

    def log_message(self, *_: Any) -> None:
        pass

    def handle_one_request(self) -> None:
        try:
            super().handle_one_request()
        except OSError:
            self.close_connection = True

    def _serve(self) -> None:
        fake = self.server_of
        seen = Seen(self.command, self.path, {k.lower(): v for k, v in self.headers.items()}, self.connection)
        fake.seen.append(seen)
        refusal = fake.script(seen)
        body = self.rfile.read(int(seen.headers.get("content-length", 0)))
        while fake.hang.is_set():
            time.sleep(0.01)
        if refusal is not None:
            status, code = refusal
            text = f"<Error><Code>{code}</Code><Message>said so</Message></Error>"
            if self.path == "/":  # not S3, but STS
                text = f"<ErrorResponse>{text}</ErrorResponse>"
            self._answer(status, text.encode())
            return
        url = urlsplit(self.path)
        name = unquote(url.path).lstrip("/")
        if not seen.headers["host"].startswith(f"{BUCKET}."):
            name = name.partition("/")[2]
        getattr(self, f"_{self.command.lower()}")(name, parse_qs(url.query, keep_blank_values=True), body)

    do_GET = do_PUT = do_DELETE = do_HEAD = do_POST = _serve  # noqa: N815  what http.server looks for

    def _put(self, name: str, query: dict[str, Any], body: bytes) -> None:
        self.server_of.objects[name] = body
        self._answer(200, b"", ETag='"made"')

    def _delete(self, name: str, query: dict[str, Any], body: bytes) -> None:
        self.server_of.objects.pop(name, None)
        self._answer(204)

    def _head(self, name: str, query: dict[str, Any], body: bytes) -> None:
        written = self.server_of.written
        dated = {} if written is None else {"Last_Modified": formatdate(written, usegmt=True)}
        data = b"" if not name else self.server_of.objects.get(name)
        self._answer(404 if data is None else 200, data or b"", **dated)

    def _post(self, name: str, query: dict[str, Any], body: bytes) -> None:
        for key in re.findall(r"<Key>(.*?)</Key>", body.decode()):
            self.server_of.objects.pop(key, None)
        self._answer(200, b"<DeleteResult/>")

    def _get(self, name: str, query: dict[str, Any], body: bytes) -> None:
        fake = self.server_of
        if "list-type" in query:
            prefix = query.get("prefix", [""])[0]
            found = sorted(key for key in fake.objects if key.startswith(prefix))
            stamp = "<LastModified>2026-01-01T00:00:00.000Z</LastModified>"
            entries = "".join(f"<Contents><Key>{key}</Key>{stamp}<Size>1</Size></Contents>" for key in found)
            self._answer(200, f"<ListBucketResult>{entries}</ListBucketResult>".encode())
            return
        data = fake.objects.get(name)
        if data is None:
            self._answer(404, b"<Error><Code>NoSuchKey</Code><Message>gone</Message></Error>")
            return
        headers = {"ETag": f'"{hash(data)}"'} if fake.etags else {}
        wanted = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range") or "")
        if wanted is None or not fake.ranges:
            self._answer(200, data, **headers)
            return
        first, last = int(wanted[1]), min(int(wanted[2]), len(data) - 1)
        if first > last:
            self._answer(416, b"<Error><Code>InvalidRange</Code></Error>")
            return
        place = {"Content-Range": f"bytes {first}-{last}/{len(data)}"}
        self._answer(206, data[first : last + 1], **headers, **place)

    def _answer(self, status: int, body: bytes = b"", **headers: str) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        if self.server_of.chunked and body and status == 200:
            self.send_header("Transfer-Encoding", "chunked")
            body = b"%x\r\n%s\r\n0\r\n\r\n" % (len(body), body)
        elif status != 204:
            self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)
