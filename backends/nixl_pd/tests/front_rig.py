"""Servers around a proxy under test, each in a thread: engines that do as they are told, raw sockets, the proxy."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import httpx
import uvicorn
import uvloop
from starlette.applications import Starlette
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from lmkv.errors import ClosedError, LmkvError
from lmkv.peer.messages import Admit, Admitted, Finish, NoRoom, PeerOk
from lmkv.peer.ports import listen
from lmkv_backend_nixl_pd.proxy.serve import Parts, server_of
from lmkv_backend_nixl_pd.proxy.settings import Settings

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Coroutine, Iterator

    from starlette.requests import Request

WORDS = ("the", " quick", " brown", ' "fox"', " 🦊", " jumps", "\n")
LONG = "In the beginning there was a prompt. " * 40


def until(condition: Callable[[], object], seconds: float = 20) -> None:
    """Wait for a condition; fails after `seconds`."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.005)


class Served:
    """A uvicorn server in a thread of its own."""

    def __init__(self, server: uvicorn.Server, sock: socket.socket, main: Coroutine[Any, Any, Any]) -> None:
        self.server = server
        self.sock = sock
        self.port = sock.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.thread = threading.Thread(target=asyncio.run, args=(main,))
        self.thread.start()
        until(lambda: server.started or not self.thread.is_alive())

    def close(self, *, force: bool = False) -> None:
        self.server.should_exit = True
        self.server.force_exit = force
        self.thread.join(30)
        assert not self.thread.is_alive()
        self.sock.close()


class Seen(dict[str, Any]):
    """One request that an engine got: method, path, query, headers, body, fields, gone."""

    def __getattr__(self, name: str) -> Any:
        return self[name]


class FakeEngine:
    """An OpenAI-compatible engine; what it answers is decided by attributes that tests set.

    Attributes:
        seen: every completion, and whatever else has no page of its own here, in order of arrival.
        status: of completions.
        gate: completions wait for it after the first of `WORDS`.
        wait: completions wait for it before anything.
        cached: /health status.
    """

    def __init__(self, name: str, *, model: str = "/models/tiny", adapter: str = "") -> None:
        self.name = name
        self.model = model
        self.adapter = adapter
        self.seen: list[Seen] = []
        self.status = 200
        self.health = 200
        self.tokenize_status = 200
        self.tokenize_delay = 0.0
        self.asked = {"/tokenize": 0, "/v1/models": 0}
        self.params: object = ...
        self.wait = threading.Event()
        self.wait.set()
        self.gate = threading.Event()
        self.gate.set()
        self.extra_headers: list[tuple[str, str]] = []
        self.blob: bytes | None = None
        self.sent = 0
        routes = [
            Route("/health", self._health),
            Route("/tokenize", self._tokenize, methods=["POST"]),
            Route("/v1/models", self._models),
            Route("/v1/completions", self._complete, methods=["POST"]),
            Route("/v1/chat/completions", self._complete, methods=["POST"]),
            Route("/{path:path}", self._other, methods=["GET", "POST", "PUT", "DELETE"]),
        ]
        self.app = Starlette(routes=routes)
        self.start(0)

    def start(self, port: int) -> None:
        config = uvicorn.Config(self.app, log_config=None, lifespan="off", ws="none", loop="asyncio")
        server = uvicorn.Server(config)
        server.install_signal_handlers = lambda: None  # type: ignore[attr-defined]
        sock = listen("127.0.0.1", port, "engine")
        self.served = Served(server, sock, server.serve(sockets=[sock]))
        self.url, self.port = self.served.url, self.served.port

    def stop(self) -> None:
        """As a crash: connections are cut."""
        self.wait.set()
        self.gate.set()
        self.served.close(force=True)

    def close(self) -> None:
        if self.served.thread.is_alive():
            self.stop()

    async def _note(self, request: Request) -> Seen:
        body = await request.body()
        fields = json.loads(body) if body[:1] == b"{" else {}
        seen = Seen(
            method=request.method, path=request.scope["raw_path"].decode(), query=request.url.query,
            headers=request.headers, body=body, fields=fields, gone=False,
        )  # fmt: skip
        self.seen.append(seen)
        return seen

    async def _health(self, _: Request) -> Response:
        return Response(status_code=self.health)

    async def _models(self, _: Request) -> Response:
        self.asked["/v1/models"] += 1
        cards = [{"id": "tiny", "object": "model", "root": self.model, "parent": None}]
        if self.adapter:
            cards.append({"id": self.adapter, "object": "model", "root": "/lora", "parent": "tiny"})
        return JSONResponse({"object": "list", "data": cards})

    async def _tokenize(self, request: Request) -> Response:
        self.asked["/tokenize"] += 1
        fields = json.loads(await request.body())
        await asyncio.sleep(self.tokenize_delay)
        ids = tokens(fields)
        status = self.tokenize_status
        return JSONResponse({"count": len(ids), "max_model_len": 9999, "tokens": ids}, status_code=status)

    async def _other(self, request: Request) -> Response:
        seen = await self._note(request)
        text = f"{self.name} {seen.method} {seen.path}?{seen.query} {len(seen.body)}"
        return Response(text, media_type="text/plain", headers=dict(self.extra_headers))

    async def _pass(self, event: threading.Event, seen: Seen, request: Request) -> None:
        while not event.is_set():
            if await request.is_disconnected():
                seen["gone"] = True
                raise asyncio.CancelledError
            await asyncio.sleep(0.005)

    async def _complete(self, request: Request) -> Response:
        seen = await self._note(request)
        try:
            await self._pass(self.wait, seen, request)
        except asyncio.CancelledError:
            return Response(status_code=499)
        if self.status != 200:
            error = {"message": f"{self.name} says no", "type": "BadRequestError", "code": self.status, "param": None}
            return JSONResponse({"error": error}, status_code=self.status)
        if self.blob is not None:
            return StreamingResponse(self._blob(seen), media_type="application/octet-stream")
        if seen.fields.get("stream"):
            return StreamingResponse(self._stream(seen, request), media_type="text/event-stream")
        content = answer(seen.fields, self.name)
        asked = (seen.fields.get("kv_transfer_params") or {}).get("lmkv", {})
        if "to" in asked:
            said = {"lmkv": {"transfer": asked["transfer"], "node": self.name, "tokens": len(tokens(seen.fields))}}
            content["kv_transfer_params"] = said if self.params is ... else self.params
        return JSONResponse(content, headers=dict(self.extra_headers))

    async def _stream(self, seen: Seen, request: Request) -> AsyncIterator[bytes]:
        try:
            for number, chunk in enumerate(events(seen.fields, self.name)):
                if number == 1:
                    await self._pass(self.gate, seen, request)
                yield chunk
                await asyncio.sleep(0)
        except asyncio.CancelledError:
            seen["gone"] = True
            raise

    async def _blob(self, seen: Seen) -> AsyncIterator[bytes]:
        assert self.blob is not None
        try:
            for at in range(0, len(self.blob), 1 << 16):
                yield self.blob[at : at + (1 << 16)]
                self.sent = at + (1 << 16)
        except asyncio.CancelledError:
            seen["gone"] = True
            raise


def tokens(fields: dict[str, Any]) -> list[int]:
    """Token ids of a prompt: one for four characters."""
    prompt = fields.get("prompt")
    if isinstance(prompt, list):
        return list(prompt)
    text = prompt if isinstance(prompt, str) else json.dumps(fields.get("messages"))
    return [sum(text[at : at + 4].encode()) for at in range(0, len(text), 4)]


def usage(fields: dict[str, Any]) -> dict[str, int]:
    count = len(tokens(fields))
    return {"prompt_tokens": count, "completion_tokens": len(WORDS), "total_tokens": count + len(WORDS)}


def answer(fields: dict[str, Any], name: str) -> dict[str, Any]:
    """A completion that is not streamed."""
    text = "".join(WORDS)
    choice = {"index": 0, "finish_reason": "stop", "logprobs": None}
    choice |= {"message": {"role": "assistant", "content": text}} if "messages" in fields else {"text": text}
    kind = "chat.completion" if "messages" in fields else "text_completion"
    head = {"id": "c-1", "object": kind, "created": 1, "model": fields.get("model"), "system_fingerprint": name}
    return {**head, "choices": [choice], "usage": usage(fields)}


def events(fields: dict[str, Any], name: str) -> list[bytes]:
    """The same, streamed: odd spacing, a comment, usage at the end."""
    found = [b": a comment\n\n"]
    for word in WORDS:
        choice = {"delta": {"content": word}} if "messages" in fields else {"text": word}
        chunk = {"id": "c-1", "model": name, "choices": [{"index": 0, "finish_reason": None, **choice}]}
        found.append(b"data:  " + json.dumps(chunk).encode() + b"\n\n")
    if (fields.get("stream_options") or {}).get("include_usage"):
        found.append(
            b"data: " + json.dumps({"id": "c-1", "choices": [], "usage": usage(fields)}).encode() + b"\r\n\r\n"
        )
    return [*found, b"data: [DONE]\n\n"]


class Node:
    """The peer ports of decode nodes, as far as a proxy asks them.

    Attributes:
        room: address → what is answered to `Admit`, each in turn and the last for ever: seconds to wait, an error, or
            None for room.
        admitted: address and request of each that found room.
        finished: transfer → state.
    """

    def __init__(self) -> None:
        self.room: dict[str, list[float | LmkvError | None]] = {}
        self.asked: list[tuple[str, Admit]] = []
        self.admitted: list[tuple[str, Admit]] = []
        self.finished: dict[str, str] = {}

    async def __call__(self, address: str, request: Admit | Finish, /) -> Any:
        await asyncio.sleep(0)
        if isinstance(request, Finish):
            self.finished[request.transfer] = request.state
            return PeerOk()
        self.asked.append((address, request))
        script = self.room.get(address, [None])
        word = script.pop(0) if len(script) > 1 else script[0]
        if isinstance(word, LmkvError):
            raise word
        if word is not None:
            return NoRoom(needed=2, free=1, retry_after=word)
        self.admitted.append((address, request))
        return Admitted(transfer=request.transfer, nbytes=1, seconds=60.0)


GONE = ClosedError("no such peer")


class RunningProxy:
    """A proxy in a thread, with a client that keeps connections."""

    def __init__(self, node: Node | None, **options: Any) -> None:
        patient = {"lookup_timeout": "20s", "connect_timeout": "20s"}  # what is not tested is waited for
        settings = Settings(**{"min_prefill_tokens": 64, "health_interval": "50ms", **patient, **options})
        assert not settings.faults(), settings.faults()
        self.settings = settings
        self.sock = listen("127.0.0.1", 0, "proxy")
        self.parts: Parts
        ready = threading.Event()

        async def main() -> None:
            self.parts = Parts(settings, node)
            self.server = server_of(self.parts)
            ready.set()
            async with self.parts.running():
                await self.server.serve(sockets=[self.sock])

        self.thread = threading.Thread(target=uvloop.run, args=(main(),))  # as in production
        self.thread.start()
        assert ready.wait(30)
        until(lambda: self.server.started)
        scheme = "https" if settings.tls_certificate else "http"
        self.url = f"{scheme}://127.0.0.1:{self.sock.getsockname()[1]}"
        self.client = httpx.Client(base_url=self.url, timeout=30, trust_env=False, verify=False)

    def post(self, path: str = "/v1/completions", **fields: Any) -> httpx.Response:
        headers = fields.pop("headers", None)
        return self.client.post(path, json={"model": "tiny", **fields}, headers=headers)

    def count(self, series: str) -> float:
        """A series' value on the metrics page, 0 if it is not there."""
        for line in self.client.get("/metrics").text.splitlines():
            name, _, value = line.rpartition(" ")
            if name == series:
                return float(value)
        return 0.0

    def close(self) -> None:
        self.client.close()
        self.server.should_exit = True
        self.thread.join(30)
        assert not self.thread.is_alive()
        self.sock.close()


class Site:
    """All servers of one test."""

    def __init__(self) -> None:
        self._stack = ExitStack()
        self._servers: list[uvicorn.Server] = []
        self._engines: list[FakeEngine] = []
        self.node = Node()

    def engine(self, name: str, **options: Any) -> FakeEngine:
        made = FakeEngine(name, **options)
        self._stack.callback(made.close)
        self._engines.append(made)
        return made

    def pd(
        self, prefill: int = 1, decode: int = 1, **options: Any
    ) -> tuple[RunningProxy, list[FakeEngine], list[FakeEngine]]:
        """A proxy of mode `pd` before so many engines; their nodes' peer ports are `node-0:1`, …"""
        prefills = [self.engine(f"prefill-{number}") for number in range(prefill)]
        decodes = [self.engine(f"decode-{number}") for number in range(decode)]
        proxy = self.proxy(
            prefill=tuple(engine.url for engine in prefills),
            decode=tuple((engine.url, f"node-{number}:1") for number, engine in enumerate(decodes)),
            **options,
        )
        return proxy, prefills, decodes

    def proxy(self, **options: Any) -> RunningProxy:
        made = RunningProxy(self.node, **options)
        self._stack.callback(made.close)
        self._servers.append(made.server)
        return made

    def raw(self, *scripts: bytes | Callable[[socket.socket], None]) -> str:
        """A server that answers its connections with these bytes, one after the other, and hangs up; its URL."""
        return self._stack.enter_context(_raw(scripts))

    def close(self) -> None:
        for server in [*self._servers, *(engine.served.server for engine in self._engines)]:
            server.should_exit = True  # all at once: each needs a moment
        self._stack.close()


@contextmanager
def _raw(scripts: tuple[bytes | Callable[[socket.socket], None], ...]) -> Iterator[str]:
    server = socket.create_server(("127.0.0.1", 0))

    def work() -> None:
        left = list(scripts)
        while True:
            try:
                sock, _ = server.accept()
            except OSError:
                return
            with sock:
                sock.settimeout(20)
                got = b""
                while b"\r\n\r\n" not in got:
                    part = sock.recv(1 << 16)
                    if not part:
                        break
                    got += part
                head, _, body = got.partition(b"\r\n\r\n")
                length = int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0] or b"0")
                while len(body) < length:
                    body += sock.recv(1 << 16)
                if not got or b"/health" in got:
                    sock.sendall(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\nconnection: close\r\n\r\n")
                    continue
                script = left.pop(0) if len(left) > 1 else left[0]
                if callable(script):
                    script(sock)
                else:
                    sock.sendall(script)

    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.getsockname()[1]}"
    finally:
        server.shutdown(socket.SHUT_RDWR)
        server.close()
        thread.join(30)
