"""The connection to the controller: kept up in the background, and nobody on this node waits for it."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import random
import ssl
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlsplit

from lmkv.agent import messages as m
from lmkv.agent.outbox import Outbox
from lmkv.errors import ClosedError, ConfigError, LmkvError
from lmkv.types import DIGEST_BYTES

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Iterable, Iterator

    from websockets.asyncio.client import ClientConnection

    from lmkv.agent.jobs import Jobs
    from lmkv.agent.tap import Tap
    from lmkv.config.fleet import ControllerConfig
    from lmkv.storage.manager import StorageManager

log = logging.getLogger("lmkv.agent")

OPEN_SECONDS: Final = 10.0
"""For a connection with its handshakes, and for the answer to `Register`."""
CLOSE_SECONDS: Final = 1.0
RETRY_FIRST: Final = 0.2
RETRY_MOST: Final = 15.0
"""Seconds between two tries: they double, and each is made up to half longer by chance, so that a fleet does not come
back all at once."""
AGAIN_MOST: Final = 30.0
"""Seconds, at most, between two epochs that overflow."""
STEADY_SECONDS: Final = 10.0
"""A connection that stood for so long was a good one: the next try is made soon."""
_GOING_AWAY: Final = 1001
_UNAUTHORIZED: Final = frozenset({401, 403})


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """What the agent tells of its node."""

    name: str
    incarnation: int
    backends: tuple[str, ...]
    """Of each tier."""
    codecs: tuple[str, ...] = ()
    """See `Register.codecs`."""
    endpoints: Callable[[], dict[str, str]] = dict
    """See `Register.endpoints`; asked at each registration."""
    load: Callable[[], float] = float
    """See `Heartbeat.load`; asked at each heartbeat."""


class Agent:
    """Registers the node with a controller, tells it what lies here, does what it asks. Lives on the storage loop.

    With the controller away everything local goes on; it is told anew what lies here when it is back.

    Attributes:
        connected: a controller has accepted the node, and the connection stands.
        fault: why it does not, for people; empty while it does.
    """

    def __init__(self, manager: StorageManager, tap: Tap, config: ControllerConfig, node: Node, jobs: Jobs) -> None:
        self._manager = manager
        self._tap = tap
        self._config = config
        self._node = node
        self._jobs = jobs
        self._wake = asyncio.Event()
        self._outbox = Outbox(tap, self._wake.set)
        self._told: set[bytes] = set()
        self._complaints: dict[str, str] = {}
        """URL → what was last logged about it."""
        self._again = 0.0
        self._pause = RETRY_FIRST
        self._context: ssl.SSLContext | None = None
        self._task: asyncio.Task[None] | None = None
        self._connection: ClientConnection | None = None
        self.connected = False
        self.fault = "not connected yet"
        jobs.on_progress = self._wake.set

    def start(self) -> None:
        """Begin to connect, and go on until `close`."""
        self._task = asyncio.get_running_loop().create_task(self._run())

    async def close(self, deadline: float = CLOSE_SECONDS) -> None:
        """Take leave and stop, in about `deadline` seconds at most. Idempotent."""
        task, self._task = self._task, None
        if task is not None:
            if self._connection is not None:
                with contextlib.suppress(Exception):
                    await asyncio.wait_for(self._connection.close(_GOING_AWAY), deadline / 2)
            task.cancel()
            await asyncio.wait((task,), timeout=deadline / 2)
        await self._jobs.close(deadline / 2)

    # --- connection --------------------------------------------------------------------------------------------------

    async def _run(self) -> None:
        pause, now = RETRY_FIRST, asyncio.get_running_loop().time
        for url in itertools.cycle(self._config.url):
            begun = now()
            try:
                await self._converse(url)
            except Exception as e:  # noqa: BLE001  whatever it is, the node goes on without its controller
                fault = _why(e)
            if self.connected and now() - begun > STEADY_SECONDS:
                pause = RETRY_FIRST
            self._disconnected(url, fault)
            await asyncio.sleep(pause * random.uniform(1.0, 1.5))  # noqa: S311  no secret
            pause = min(2 * pause, RETRY_MOST)

    def _disconnected(self, url: str, fault: str) -> None:
        if self.connected or self._complaints.get(url) != fault:  # not the same line at each try
            text = "no controller: %s: %s; trying again, everything local goes on"
            log.warning(text, url, fault, extra={"key": ("controller", url)})
        self.connected = False
        self.fault = f"{url}: {fault}"
        self._complaints[url] = fault
        self._manager.metrics.set("lmkv_agent_connected", 0)

    async def _converse(self, url: str) -> None:
        """One connection, from its beginning to its end."""
        from websockets.asyncio.client import connect  # noqa: PLC0415  only where there is a controller

        token = self._config.token.get_secret_value()
        async with connect(
            url.rstrip("/") + m.PATH,
            additional_headers={"Authorization": f"Bearer {token}"} if token else None,
            ssl=await self._tls() if urlsplit(url).scheme == "wss" else None,
            compression=None,  # digests are noise
            max_size=m.MAX_MESSAGE,
            open_timeout=OPEN_SECONDS,
            close_timeout=CLOSE_SECONDS,
            ping_interval=self._config.heartbeat,
            ping_timeout=max(OPEN_SECONDS, 2 * self._config.heartbeat),
            proxy=None,
        ) as connection:
            await self._register(connection)
            self._tap.join(self._outbox)
            self._outbox.begin()
            self._connected(url)
            self._connection = connection
            try:
                await _first((self._send(connection), self._receive(connection)))
            finally:
                self._connection = None
                self._tap.leave(self._outbox)
                self._outbox.lost("the connection ended")

    async def _tls(self) -> ssl.SSLContext:
        if self._context is None:  # reading many certificates takes some time
            try:
                self._context = await asyncio.to_thread(ssl.create_default_context, cafile=self._config.ca)
            except OSError as e:  # SSLError is one
                raise ConfigError(f"controller.ca {self._config.ca}: {e}") from e
        return self._context

    async def _register(self, connection: ClientConnection) -> None:
        manager, node = self._manager, self._node
        texts = dict(_fitting(manager.declared.items()))
        await connection.send(
            m.encode(
                m.Register(
                    m.VERSION,
                    node.name,
                    node.incarnation,
                    self._outbox.renew(),
                    node.endpoints(),
                    tuple(texts.values()),
                    self._tiers(),
                    self._config.heartbeat,
                    node.codecs,
                )
            )
        )
        answer = m.decode_from_controller(await asyncio.wait_for(connection.recv(), OPEN_SECONDS))
        if isinstance(answer, m.Refused):
            raise ConfigError(f"the controller refuses this node: {answer.message}", kind=answer.kind)
        if not isinstance(answer, m.Accepted):
            raise LmkvError(f"a {type(answer).__name__} in answer to the registration", kind="protocol")
        check_heartbeat(self._config.heartbeat, answer.timeout)
        self._told = set(texts)

    def _tiers(self) -> tuple[m.TierFacts, ...]:
        return tuple(
            m.TierFacts(tier.name, backend, tier.capacity or 0, tier.shared, tier.settings.write != "never")
            for tier, backend in zip(self._manager.stack.tiers, self._node.backends, strict=True)
        )

    def _connected(self, url: str) -> None:
        self.connected, self.fault = True, ""
        self._complaints.clear()
        self._again, self._pause = 0.0, RETRY_FIRST
        self._manager.metrics.set("lmkv_agent_connected", 1)
        log.info("registered with the controller %s as node %s", url, self._node.name)

    # --- from the controller -----------------------------------------------------------------------------------------

    async def _receive(self, connection: ClientConnection) -> None:
        async for body in connection:
            message = m.decode_from_controller(body)
            if isinstance(message, m.Do):
                self._jobs.do(message)
            elif isinstance(message, m.Cancel):
                self._jobs.cancel(message.job)
            elif isinstance(message, m.Resync):
                self._outbox.lost(f"the controller asks: {message.reason}")
            else:
                raise LmkvError(f"a {type(message).__name__} that nothing was asked for", kind="protocol")
        raise ClosedError(f"the controller closed the connection: {connection.close_reason or 'it gave no reason'}")

    # --- to the controller -------------------------------------------------------------------------------------------

    async def _send(self, connection: ClientConnection) -> None:
        loop = asyncio.get_running_loop()
        beat = loop.time()
        while True:
            self._wake.clear()
            if loop.time() >= beat:
                await connection.send(m.encode(self._heartbeat()))
                beat = loop.time() + self._config.heartbeat
            sent = False
            for message in self._due(loop.time()):
                await connection.send(m.encode(message))
                await asyncio.sleep(0)  # sending waits only where the socket is full, and others need the loop, too
                sent = True
            if not sent:
                until = min(beat, self._again) if self._outbox.stale else beat
                with contextlib.suppress(asyncio.TimeoutError):
                    await asyncio.wait_for(self._wake.wait(), max(0.0, until - loop.time()))

    def _due(self, now: float) -> Iterator[m.Message]:
        """What can be told now: one message of each kind, so that none has to wait for all of another."""
        fresh = {i: text for i, text in self._manager.declared.items() if i not in self._told}
        if fresh:
            texts = dict(_fitting(fresh.items()))
            self._told |= texts.keys()
            yield m.Namespaces(tuple(texts.values()))
        yield from self._jobs.progress()
        if self._outbox.stale and now >= self._again:
            self._renew(now)
        events = self._outbox.events()
        if events is not None:
            self._count("event", *(change.stored + change.removed for change in events.changes))
            yield events
        page = self._outbox.page()
        if page is not None:
            self._count("page", page.digests)
            if page.last:
                self._pause = RETRY_FIRST
            yield page

    def _count(self, kind: str, *blobs: bytes) -> None:
        digests = sum(map(len, blobs)) // DIGEST_BYTES
        self._manager.metrics.inc("lmkv_agent_digests_total", digests, kind=kind)

    def _renew(self, now: float) -> None:
        """Begin another epoch; the next one not too soon, if the controller can't take so much."""
        log.info("telling the controller anew what lies here: %s", self._outbox.stale)
        self._manager.metrics.inc("lmkv_agent_resyncs_total")
        self._outbox.renew()
        self._outbox.begin()
        self._pause = min(2 * self._pause, AGAIN_MOST)
        self._again = now + self._pause

    def _heartbeat(self) -> m.Heartbeat:
        used = tuple(0 if tier.shared else tier.used for tier in self._manager.stack.tiers)
        return m.Heartbeat(self._outbox.sequence, used, self._node.load())


def check_heartbeat(heartbeat: float, timeout: float) -> None:
    """Raise `ConfigError` unless a controller that drops nodes after `timeout` seconds hears this one in time."""
    if not heartbeat < timeout:
        raise ConfigError(
            f"a heartbeat every {heartbeat:g} s, but the controller drops a node after {timeout:g} s of silence: set "
            "controller.heartbeat well below that, or start the controller with a longer --timeout",
            kind="heartbeat",
        )


async def _first(coroutines: Iterable[Coroutine[Any, Any, None]]) -> None:
    """Run all until the first one ends; raises what it raised."""
    tasks = [asyncio.ensure_future(coroutine) for coroutine in coroutines]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _fitting(texts: Iterable[tuple[bytes, str]]) -> Iterator[tuple[bytes, str]]:
    """As many namespaces as go into one message."""
    nbytes = 0
    for identity, text in texts:
        nbytes += len(text)
        if nbytes > m.MAX_NAMESPACES_BYTES:
            return
        yield identity, text


def _why(error: Exception) -> str:
    """What went wrong with a connection, for people."""
    if isinstance(error, (TimeoutError, asyncio.TimeoutError)):  # two classes before Python 3.11
        return f"no answer within {OPEN_SECONDS:g} s"
    status = getattr(getattr(error, "response", None), "status_code", None)
    if status in _UNAUTHORIZED:
        return f"HTTP {status}: check controller.token, which needs the role node"
    return str(error) or type(error).__name__
