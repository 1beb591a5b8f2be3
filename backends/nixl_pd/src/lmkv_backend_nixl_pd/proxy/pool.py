"""Engines of one role: which are up, how busy each is, which is next."""

from __future__ import annotations

import asyncio
import logging
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

from lmkv_backend_nixl_pd.proxy.errors import EngineError

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Sequence

    from lmkv_backend_nixl_pd.proxy.client import Client
    from lmkv_backend_nixl_pd.proxy.metrics import Metrics

logger = logging.getLogger(__name__)

HEALTH_SECONDS: Final = 3.0
"""Time for an engine to answer /health."""
DOWN_AFTER: Final = 3
"""Looks without an answer after which an engine is taken for down; a refused connection is enough by itself."""
DOWN_INTERVAL: Final = 1.0
"""Seconds between two looks at an engine that is down."""
_OK: Final = range(200, 300)


class Engine:
    """One engine server.

    Attributes:
        url: as configured; names it in logs and metrics.
        name: of its node: the peer port's `host:port` (pd) or the controller's name for it (cache-aware); may be empty.
        client: connections to it.
        busy: requests of ours that it works on.
        up: whether it is given requests.
    """

    def __init__(self, url: str, name: str, client: Client, role: str, metrics: Metrics) -> None:
        self.url = url
        self.name = name
        self.client = client
        self.busy = 0
        self.up = True
        self._misses = 0
        self._gauge = metrics.up.labels(role, url)
        self._gauge.set(1)
        self._in_flight = metrics.in_flight.labels(role, url)
        self._in_flight.set_function(lambda: self.busy)
        self._failures = metrics.engine_failures
        self._role = role
        self.served = metrics.engine_requests.labels(role, url)

    @contextmanager
    def use(self) -> Iterator[Client]:
        """Its client, for one request that counts as load."""
        self.busy += 1
        try:
            yield self.client
        finally:
            self.busy -= 1

    def failed(self, error: EngineError) -> None:
        """A request got no answer. Nobody there: it is down until a look at /health finds it."""
        self._failures.labels(self._role, self.url, error.kind).inc()
        logger.warning("%s %s: %s", self._role, self.url, error)
        if error.kind == "connect":
            self._set(up=False)

    async def look(self) -> None:
        """Ask /health once."""
        kind = "silent"
        try:
            with await self.client.send("GET", b"/health", (), b"", silence=HEALTH_SECONDS) as answer:
                await answer.read(1 << 16)
                if answer.status in _OK:
                    self._misses = 0
                    self._set(up=True)
                    return
                kind = "refused"
        except EngineError as error:
            kind = error.kind
        self._misses += 1
        if kind == "connect" or self._misses >= DOWN_AFTER:
            self._set(up=False)

    async def watch(self, interval: float) -> None:
        """Look for ever."""
        while True:
            await self.look()
            await asyncio.sleep(interval if self.up else min(interval, DOWN_INTERVAL))

    def _set(self, *, up: bool) -> None:
        if self.up != up:
            self.up = up
            self._gauge.set(up)
            logger.log(
                logging.INFO if up else logging.WARNING, "%s %s is %s", self._role, self.url, "up" if up else "down"
            )


class Pool:
    """Engines that can do the same, and the way to choose among them."""

    def __init__(self, engines: Sequence[Engine], choose: str) -> None:
        self.engines = list(engines)
        self._turn = 0
        self._load: Callable[[Engine], float] = (lambda e: e.busy) if choose == "least-loaded" else (lambda _: 0)

    def ranked(self, without: Collection[Engine] = (), *, peek: bool = False) -> list[Engine]:
        """Engines that are up, best first: the least busy, and among equals (or by round robin) each in its turn.

        `peek`: for a question only, which takes no turn.
        """
        self._turn += not peek
        count = len(self.engines)
        turned = [self.engines[(self._turn + step) % count] for step in range(count)]
        return sorted((e for e in turned if e.up and e not in without), key=self._load)

    def next(self, without: Collection[Engine] = (), *, desperate: bool = False) -> Engine | None:
        """The best engine, or None. `desperate`: rather one that is taken for down than none."""
        found = self.ranked(without)
        if not found and desperate:
            found = [engine for engine in self.engines if engine not in without]
        return found[0] if found else None
