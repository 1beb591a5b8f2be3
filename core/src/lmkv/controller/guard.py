"""What stands before the API: tokens, limits of size and time, and the count of requests."""

from __future__ import annotations

import asyncio
import time
from http import HTTPStatus
from typing import TYPE_CHECKING, Final
from urllib.parse import parse_qs

from lmkv.controller.auth import ANYBODY, NODE, OPERATE, READ, Principal
from lmkv.controller.problems import Problem, send_problem

if TYPE_CHECKING:
    from collections.abc import Iterable

    from starlette.types import ASGIApp, Message, Receive, Scope, Send

    from lmkv.controller.auth import Tokens
    from lmkv.observe.metrics import Metrics

OPEN: Final = frozenset({"/v1/health", "/v1/openapi.json"})
"""Answered without a token: they say nothing about anybody."""
READERS: Final = frozenset({"/v1/lookup"})
"""Posted to, and yet change nothing."""
WAIT_MAX: Final = 60.0
"""Seconds that a request may ask to wait for its job, at most."""
_BEARER: Final = "bearer "


class Guard:
    """Lets through what may pass. An ASGI application around another one.

    A body is taken in here, whole, before anything looks at it: too long a one is refused by its announced length, or
    as soon as it is longer than allowed. `scope["principal"]` says who asked.

    Args:
        app: what is guarded.
        tokens: None: everybody may do everything.
        max_body: bytes.
        seconds: for a body to arrive, and again for the answer to be made.
        metrics: counts requests.
    """

    def __init__(self, app: ASGIApp, *, tokens: Tokens | None, max_body: int, seconds: float, metrics: Metrics) -> None:
        self._app = app
        self._tokens = tokens
        self._max_body = max_body
        self._seconds = seconds
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """As ASGI says."""
        if scope["type"] == "http":
            await self._http(scope, receive, send)
        elif scope["type"] == "websocket":
            await self._websocket(scope, receive, send)
        else:
            await self._app(scope, receive, send)

    async def _http(self, scope: Scope, receive: Receive, send: Send) -> None:
        begun = time.monotonic()
        status = 0

        async def counted(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            right = "" if scope["path"] in OPEN else _right(scope["method"], scope["path"])
            scope["principal"] = self._admit(scope["headers"], right)
            body = await self._body(scope["headers"], receive)
            await asyncio.wait_for(
                self._app(scope, _replay(body, receive), counted), self._seconds + _wait(scope["query_string"])
            )
        except Problem as problem:
            await send_problem(problem, counted)
        except (TimeoutError, asyncio.TimeoutError):  # two classes before Python 3.11
            if not status:
                text = f"not answered within {self._seconds:g} s; a job that was begun goes on, see `jobs`"
                await send_problem(Problem(HTTPStatus.GATEWAY_TIMEOUT, "deadline", text), counted)
        finally:
            verb = getattr(scope.get("route"), "name", "") or "other"
            self._metrics.inc("lmkv_controller_requests_total", verb=verb, status=str(status))
            self._metrics.observe("lmkv_controller_request_seconds", time.monotonic() - begun, verb=verb)

    async def _websocket(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            scope["principal"] = self._admit(scope["headers"], NODE)
        except Problem as problem:
            await receive()
            if "websocket.http.response" not in scope.get("extensions", {}):
                await send({"type": "websocket.close", "code": 1008})
                return

            async def denial(message: Message) -> None:
                await send({**message, "type": f"websocket.{message['type']}"})

            await send_problem(problem, denial)
            return
        await self._app(scope, receive, send)

    def _admit(self, headers: Iterable[tuple[bytes, bytes]], right: str) -> Principal:
        """Who asks. Raises `Problem` if it has not the right; an empty one everybody has."""
        if self._tokens is None:
            if any(name == b"origin" for name, _ in headers):
                text = "without tokens no page of a browser is answered: it may be anybody's"
                raise Problem(HTTPStatus.FORBIDDEN, "origin", text)
            return ANYBODY
        given = [value for name, value in headers if name == b"authorization"]
        principal = self._tokens.find(_token(given[0])) if len(given) == 1 else None
        if not right:
            return principal or Principal("anybody", READ)
        if principal is None:
            raise Problem(
                HTTPStatus.UNAUTHORIZED,
                "token",
                "a token is needed: send `Authorization: Bearer …` with one of the controller's file of tokens",
                headers={"WWW-Authenticate": "Bearer"},
            )
        if not principal.may(right):
            raise Problem(
                HTTPStatus.FORBIDDEN,
                "role",
                f"the token {principal.name!r} has the role {principal.role!r}, which may not {_DOING[right]}",
            )
        return principal

    async def _body(self, headers: Iterable[tuple[bytes, bytes]], receive: Receive) -> bytes:
        for name, value in headers:
            if name == b"content-length" and (not value.isdigit() or int(value) > self._max_body):
                raise self._too_long()
        try:
            return await asyncio.wait_for(self._collect(receive), self._seconds)
        except (TimeoutError, asyncio.TimeoutError):
            text = f"the body did not arrive within {self._seconds:g} s"
            raise Problem(HTTPStatus.REQUEST_TIMEOUT, "deadline", text, headers={"Connection": "close"}) from None

    async def _collect(self, receive: Receive) -> bytes:
        parts: list[bytes] = []
        size = 0
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                return b""
            parts.append(message.get("body", b""))
            size += len(parts[-1])
            if size > self._max_body:
                raise self._too_long()
            if not message.get("more_body", False):
                return b"".join(parts)

    def _too_long(self) -> Problem:
        text = f"a body has {self._max_body} bytes at most; --max-body of the controller says so"
        # What is still to come of it would be taken for the next request.
        return Problem(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, "too-large", text, headers={"Connection": "close"})


_DOING: Final = {READ: "look up", NODE: "register nodes", OPERATE: "change what lies where"}


def _right(method: str, path: str) -> str:
    return READ if method in {"GET", "HEAD", "OPTIONS"} or path in READERS else OPERATE


def _token(value: bytes) -> str:
    text = value.decode("latin-1")
    return text[len(_BEARER) :].strip() if text[: len(_BEARER)].lower() == _BEARER else ""


def _wait(query: bytes) -> float:
    """Seconds that the request asks to wait for its job."""
    try:
        seconds = float(parse_qs(query.decode("latin-1"))["wait"][-1])
    except (KeyError, ValueError):
        return 0.0
    return seconds if 0 <= seconds <= WAIT_MAX else 0.0


def _replay(body: bytes, receive: Receive) -> Receive:
    given = False

    async def replay() -> Message:
        nonlocal given
        if given:
            return await receive()
        given = True
        return {"type": "http.request", "body": body, "more_body": False}

    return replay
