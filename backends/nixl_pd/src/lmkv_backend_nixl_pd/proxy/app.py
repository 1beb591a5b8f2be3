"""The proxy as an ASGI application: limits, keys, its own pages, and what is passed on to whom."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import logging
import time
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, Final, Protocol

import msgspec
from prometheus_client import CONTENT_TYPE_LATEST

from lmkv_backend_nixl_pd.proxy.errors import ApiError
from lmkv_backend_nixl_pd.proxy.exchange import Exchange
from lmkv_backend_nixl_pd.proxy.forward import Cut, forward
from lmkv_backend_nixl_pd.proxy.prompts import CHAT, TEXT

if TYPE_CHECKING:
    from collections.abc import MutableMapping, Sequence

    from lmkv_backend_nixl_pd.proxy.exchange import Receive, Send
    from lmkv_backend_nixl_pd.proxy.metrics import Metrics
    from lmkv_backend_nixl_pd.proxy.pool import Pool
    from lmkv_backend_nixl_pd.proxy.settings import Settings

logger = logging.getLogger(__name__)

COMPLETIONS: Final = frozenset((CHAT, TEXT))
PAGES: Final = frozenset(("/health", "/metrics"))
GONE: Final = 499
"""Status, in metrics only, of a request whose client went away."""
OTHER: Final = "other"
"""Label of all paths that are not named above."""


class Mode(Protocol):
    """Answers completions."""

    main: Pool
    """Whose engines answer everything else."""

    async def complete(self, exchange: Exchange) -> None:
        """Answer one completion request, or raise `ApiError` or `Cut`."""

    def look(self, exchange: Exchange) -> None:
        """See whether anything else may pass, with a body that is for the engine to read; `ApiError` if not."""


class Proxy:
    """The application.

    Args:
        settings: limits.
        mode: what it does with completions.
        pools: role → engines, for /health.
        metrics: counts.
        keys: API keys, one of which clients have to show; none: whoever comes.
    """

    def __init__(
        self, settings: Settings, mode: Mode, pools: MutableMapping[str, Pool], metrics: Metrics, keys: Sequence[str]
    ) -> None:
        self._settings = settings
        self._mode = mode
        self._pools = pools
        self._metrics = metrics
        self._keys = [hashlib.sha256(key.encode()).digest() for key in keys]
        self._requests = 0
        self._series: dict[tuple[str, int], Any] = {}

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        """ASGI. Never raises: what is wrong is the answer, or is logged."""
        if scope["type"] != "http":
            return
        began = time.perf_counter()
        exchange = Exchange(scope, receive, send)
        self._requests += 1
        watch: asyncio.Task[None] | None = None
        try:
            self._admit(exchange)
            await exchange.take_body(self._settings.max_body)
            worker = asyncio.current_task()
            assert worker is not None
            watch = asyncio.create_task(exchange.watch(worker))
            await self._serve(exchange)
        except ApiError as error:
            await self._refuse(exchange, error)
        except Cut:
            pass
        except RecursionError:
            await self._refuse(exchange, ApiError(400, "the body is nested too deeply", code="invalid_json"))
        except asyncio.CancelledError:
            if not exchange.gone:
                raise
            exchange.status = GONE
        except Exception:
            logger.exception("a fault of the proxy's own")
            await self._refuse(exchange, ApiError(500, "the proxy failed, see its log", code="proxy_fault"))
        finally:
            self._requests -= 1
            if watch is not None:
                watch.cancel()
            self._count(exchange, time.perf_counter() - began)

    def _admit(self, exchange: Exchange) -> None:
        """Refuse who shows no key, and what is too much."""
        if exchange.path == "/health":
            return
        if self._keys:
            scheme, _, shown = exchange.header(b"authorization").partition(b" ")
            digest = hashlib.sha256(shown.strip()).digest()
            matches = [hmac.compare_digest(digest, key) for key in self._keys]
            if scheme.lower() != b"bearer" or not any(matches):
                raise ApiError(401, "no API key, or not one of the proxy's", code="invalid_api_key")
        if self._requests > self._settings.max_requests:
            raise ApiError(503, "too many requests at one time", code="overloaded", retry_after=1)

    async def _serve(self, exchange: Exchange) -> None:
        if exchange.path in COMPLETIONS and exchange.method == "POST" and not encoded(exchange):
            await self._mode.complete(exchange)
        elif exchange.path in PAGES:
            if exchange.method not in {"GET", "HEAD"}:
                raise ApiError(405, f"{exchange.path} is for GET", code="method_not_allowed")
            await (self._health(exchange) if exchange.path == "/health" else self._page(exchange))
        else:
            self._mode.look(exchange)
            await forward(exchange, self._mode.main, self._settings.silence)

    async def _health(self, exchange: Exchange) -> None:
        """200 while an engine is up that can answer."""
        well = any(engine.up for engine in self._mode.main.engines)
        engines = [
            {"role": role, "url": engine.url, "up": engine.up, "in_flight": engine.busy}
            for role, pool in self._pools.items()
            for engine in pool.engines
        ]
        body = msgspec.json.encode({"status": "ok" if well else "no engine is up", "engines": engines})
        status = HTTPStatus.OK if well else HTTPStatus.SERVICE_UNAVAILABLE
        await exchange.answer(status, [(b"content-type", b"application/json")], body)

    async def _page(self, exchange: Exchange) -> None:
        await exchange.answer(200, [(b"content-type", CONTENT_TYPE_LATEST.encode())], self._metrics.page())

    async def _refuse(self, exchange: Exchange, error: ApiError) -> None:
        if exchange.status:  # too late to say so
            await exchange.break_off(error)
        else:
            await exchange.answer(error.status, error.headers(), error.body())

    def _count(self, exchange: Exchange, seconds: float) -> None:
        path = exchange.path if exchange.path in COMPLETIONS or exchange.path in PAGES else OTHER
        series = self._series.get((path, exchange.status))
        if series is None:
            series = self._series[path, exchange.status] = (
                self._metrics.requests.labels(path, exchange.status), self._metrics.seconds.labels(path)
            )  # fmt: skip
        series[0].inc()
        series[1].observe(seconds)


def encoded(exchange: Exchange) -> bool:
    """Whether the body is compressed, so that only the engine can read it."""
    return exchange.header(b"content-encoding").lower() not in {b"", b"identity"}
