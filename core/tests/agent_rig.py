"""A controller for the agent's tests: a real WebSocket server that keeps a directory as simply as can be."""

from __future__ import annotations

import asyncio
import contextlib
import http
import time
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from websockets.asyncio.server import serve

from lmkv.agent import messages as m
from lmkv.agent.client import Agent, Node
from lmkv.agent.commands import Commands
from lmkv.agent.jobs import Jobs
from lmkv.agent.tap import Tap
from lmkv.config.fleet import ControllerConfig

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from websockets.asyncio.server import Server, ServerConnection

    from lmkv.storage.manager import StorageManager

Known = dict[tuple[bytes, int], set[bytes]]
"""(namespace, tier) → digests."""


def split(blob: bytes) -> set[bytes]:
    return {blob[at : at + 32] for at in range(0, len(blob), 32)}


class Controller:
    """Keeps what the connected node told. `gate` closed: it reads no more."""

    def __init__(self, *, timeout: float = 30.0, refuse: m.Refused | None = None, token: str = "") -> None:
        self.timeout = timeout
        self.refuse = refuse
        self.token = token
        self.registered: list[m.Register] = []
        self.beats: list[float] = []
        self.progress: dict[str, list[m.Progress]] = {}
        self.jsons: set[str] = set()
        self.known: Known = {}
        self.synced = False
        self.epochs: list[int] = []
        self.lose_next = 0
        """`Events` that get lost."""
        self.gate = asyncio.Event()
        self.gate.set()
        self.port = 0
        self._sequence = 0
        self._named: Known = {}
        self._server: Server | None = None
        self._connection: ServerConnection | None = None

    @property
    def url(self) -> str:
        return f"ws://127.0.0.1:{self.port}"

    @property
    def connected(self) -> bool:
        return self._connection is not None

    async def start(self, **options: Any) -> None:
        self._server = await serve(
            self._talk, "127.0.0.1", self.port, process_request=self._admit, max_size=m.MAX_MESSAGE, **options
        )
        self.port = next(iter(self._server.sockets)).getsockname()[1]

    async def stop(self) -> None:
        """As a process that is killed: whoever is connected finds the connection cut."""
        if self._server is not None:
            if self._connection is not None:
                self._connection.transport.abort()
            self._server.close()
            self._server = None
            self.synced = False

    async def send(self, message: m.Message) -> None:
        assert self._connection is not None
        await self._connection.send(m.encode(message))

    async def do(self, job: str, command: m.Command) -> m.Progress:
        """Its last progress."""
        self.progress.pop(job, None)
        await self.send(m.Do(job, command))
        return await self.ended(job)

    async def ended(self, job: str) -> m.Progress:
        await eventually(lambda: any(p.state != m.RUNNING for p in self.progress.get(job, ())))
        return next(p for p in self.progress[job] if p.state != m.RUNNING)

    # --- server ------------------------------------------------------------------------------------------------------

    def _admit(self, connection: ServerConnection, request: Any) -> Any:
        if request.path != m.PATH:
            return connection.respond(http.HTTPStatus.NOT_FOUND, "")
        if self.token and request.headers.get("Authorization") != f"Bearer {self.token}":
            return connection.respond(http.HTTPStatus.UNAUTHORIZED, "")
        return None

    async def _talk(self, connection: ServerConnection) -> None:
        with contextlib.suppress(Exception):
            self.synced = False
            register = m.decode_from_node(await connection.recv())
            assert isinstance(register, m.Register)
            if self.refuse is not None:
                await connection.send(m.encode(self.refuse))
                return
            self.registered.append(register)
            self.jsons |= set(register.namespaces)
            await connection.send(m.encode(m.Accepted(self.timeout)))
            self._connection = connection
            try:
                async for body in connection:
                    await self.gate.wait()
                    await self._take(m.decode_from_node(body))
            finally:
                if self._connection is connection:
                    self._connection = None

    async def _take(self, message: Any) -> None:
        match message:
            case m.Heartbeat():
                self.beats.append(time.monotonic())
                if self.synced and message.sequence != self._sequence:
                    await self._resync("a heartbeat tells of a gap")
            case m.Progress():
                self.progress.setdefault(message.job, []).append(message)
            case m.Namespaces():
                self.jsons |= set(message.jsons)
            case m.Page():
                self._page(message)
            case m.Events():
                await self._events(message)

    async def _resync(self, reason: str) -> None:
        self.synced = False
        await self.send(m.Resync(reason))

    def _page(self, page: m.Page) -> None:
        if page.number == 0:
            assert page.epoch not in self.epochs
            self.epochs.append(page.epoch)
            self._sequence, self._named = 0, {}
        if page.digests:
            for table in (self.known, self._named):
                table.setdefault((page.namespace, page.tier), set()).update(split(page.digests))
        if page.last and page.epoch == self.epochs[-1]:
            self.known = {place: digests & self._named.get(place, set()) for place, digests in self.known.items()}
            self.synced = True

    async def _events(self, events: m.Events) -> None:
        if self.lose_next:
            self.lose_next -= 1
            return
        if not self.epochs or events.epoch != self.epochs[-1]:
            return
        if events.sequence != self._sequence + 1:
            await self._resync("a gap")
            return
        self._sequence = events.sequence
        for change in events.changes:
            assert not split(change.stored) & split(change.removed)
            place = change.namespace, change.tier
            self.known.setdefault(place, set()).update(split(change.stored))
            self.known[place] -= split(change.removed)
            self._named.setdefault(place, set()).update(split(change.stored))


def truth(manager: StorageManager) -> Known:
    """What lies in the own tiers, all shards of it."""
    found: Known = {}
    for tier in manager.stack.tiers:
        shards: dict[tuple[bytes, bytes], int] = {}
        for key in tier.index:
            shards[key.namespace, key.digest] = shards.get((key.namespace, key.digest), 0) + 1
        for (identity, digest), count in shards.items():
            if count == manager.index.namespaces[identity].shards:
                found.setdefault((identity, tier.number), set()).add(digest)
    return found


def agree(controller: Controller, manager: StorageManager) -> bool:
    return controller.synced and {k: v for k, v in controller.known.items() if v} == truth(manager)


async def eventually(condition: Callable[[], bool], seconds: float = 30.0) -> None:
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until, "it did not come to pass"
        await asyncio.sleep(0.005)


@asynccontextmanager
async def agent(
    manager: StorageManager, *urls: str, heartbeat: float = 0.2, incarnation: int = 1, peers: Any = None, **options: Any
) -> AsyncIterator[Agent]:
    node = Node(
        name="n1", incarnation=incarnation, backends=tuple("cpu" for _ in manager.stack.tiers), codecs=("identity",)
    )
    config = ControllerConfig.model_validate({"url": list(urls), "heartbeat": f"{heartbeat}s", **options})
    made = Agent(manager, Tap(manager), config, node, Jobs(Commands(manager, peers), manager.metrics))
    made.start()
    try:
        yield made
    finally:
        await made.close()


@asynccontextmanager
async def running(controller: Controller, **options: Any) -> AsyncIterator[Controller]:
    await controller.start(**options)
    try:
        yield controller
    finally:
        controller.gate.set()
        await controller.stop()
