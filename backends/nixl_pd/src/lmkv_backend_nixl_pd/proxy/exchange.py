"""One request of a client and the answer to it, in ASGI's terms."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, Final

from lmkv_backend_nixl_pd.proxy.client import end_to_end
from lmkv_backend_nixl_pd.proxy.errors import ApiError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable, MutableMapping

    from lmkv_backend_nixl_pd.proxy.client import Answer, Headers

    Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
    Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]

BODY_SECONDS: Final = 60.0
"""Time for a request's body to come."""


class Exchange:
    """A request and its answer.

    Attributes:
        method: such as `POST`.
        path: decoded, without the query.
        target: path and query as the client sent them.
        headers: end to end ones, names in lower case.
        body: all of it, after `take_body`.
        status: of the answer; 0 before it has begun.
        gone: the client went away before it had all.
    """

    def __init__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        self.method: str = scope["method"]
        self.path: str = scope["path"]
        query: bytes = scope["query_string"]
        self.target: bytes = scope["raw_path"] + (b"?" + query if query else b"")
        self.headers: Headers = end_to_end(scope["headers"])
        self.body = b""
        self.status = 0
        self.gone = False
        self._ended = self._events = False
        self._receive = receive
        self._send = send

    def header(self, name: bytes) -> bytes:
        """The value of the first header of that name, or nothing."""
        return next((value for key, value in self.headers if key == name), b"")

    async def take_body(self, limit: int) -> None:
        """Read the request's body.

        Raises:
            ApiError: it is longer than `limit` bytes (413), or does not come (408).
        """
        worker = asyncio.current_task()
        assert worker is not None
        late = False

        def cancel() -> None:
            nonlocal late
            late = True
            worker.cancel()

        timer = asyncio.get_running_loop().call_later(BODY_SECONDS, cancel)
        try:
            await self._take_body(limit)
        except asyncio.CancelledError:
            if self.gone or not late:
                raise
            raise ApiError(408, f"the body did not come within {BODY_SECONDS:g} s", code="body_too_slow") from None
        finally:
            timer.cancel()

    async def _take_body(self, limit: int) -> None:
        declared = self.header(b"content-length")
        parts: list[bytes] = []
        left = limit
        while True:
            if (declared.isdigit() and int(declared) > limit) or left < 0:
                raise ApiError(413, f"the body is longer than {limit} bytes", code="body_too_large")
            message = await self._receive()
            if message["type"] == "http.disconnect":
                self.gone = True
                raise asyncio.CancelledError
            parts.append(message.get("body", b""))
            left -= len(parts[-1])
            if not message.get("more_body", False) and left >= 0:
                break
        self.body = parts[0] if len(parts) == 1 else b"".join(parts)

    async def watch(self, worker: asyncio.Task[Any]) -> None:
        """Cancel `worker` when the client goes away before it has its answer."""
        while (await self._receive())["type"] != "http.disconnect":
            pass
        if not self._ended:
            self.gone = True
            worker.cancel()

    async def answer(self, status: int, headers: Iterable[tuple[bytes, bytes]], content: bytes) -> None:
        """Answer with what the proxy itself has to say."""
        self.status = status
        length = (b"content-length", b"%d" % len(content))
        await self._send({"type": "http.response.start", "status": status, "headers": [*headers, length]})
        self._ended = True
        await self._send({"type": "http.response.body", "body": content})

    async def relay(self, answer: Answer) -> None:
        """Pass an engine's answer on, byte for byte and as it comes.

        Raises:
            EngineError: it broke off. What the client has got is not whole, and it sees so: see `break_off`.
        """
        part = await answer.some()  # before the head: an engine that dies in between can still be replaced
        self.status = answer.status
        self._events = any(k == b"content-type" and v.startswith(b"text/event-stream") for k, v in answer.headers)
        await self._send({"type": "http.response.start", "status": answer.status, "headers": answer.headers})
        while not answer.ended:
            await self._send({"type": "http.response.body", "body": part, "more_body": True})
            part = await answer.some()
        self._ended = True
        await self._send({"type": "http.response.body", "body": part})

    async def break_off(self, error: ApiError) -> None:
        """Tell the client that what it has got is not whole.

        A stream of events gets one with the error. The answer is left without an end, so the server cuts the
        connection, and no client takes it for complete.
        """
        if self._events:
            event = b"\n\ndata: " + error.body() + b"\n\n"
            await self._send({"type": "http.response.body", "body": event, "more_body": True})
