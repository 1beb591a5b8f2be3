"""A controller on a real port, and fake nodes: they say what an agent says, and hold digests instead of bytes."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import threading
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import httpx
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import connect

from lmkv.agent import messages as m
from lmkv.controller.server import ControllerServer
from lmkv.controller.settings import Settings
from lmkv.keys import KeyChain, Namespace

if TYPE_CHECKING:
    import ssl
    from collections.abc import Callable, Iterable, Sequence
    from typing import Self

    from websockets.sync.connection import Connection

CHUNK = 4
PAGE = 2
SECONDS = 20.0
"""Of every wait on a condition: generous, for the machine is busy."""


def namespace(model: str = "m", revision: str = "r1", chunk: int = CHUNK, page: int = PAGE) -> Namespace:
    layout: Any = {"name": "fake", "dtype": "bf16", "page_tokens": page, "runs": [64], "tags": []}
    return Namespace(model, revision, "bf16", (layout,), (64,), chunk, page)


def digests(tokens: Iterable[int], space: Namespace, *, tail: bool = True) -> list[bytes]:
    """Of a prompt's chunks and of its tail."""
    chain = KeyChain(space.chunk_tokens, space.page_tokens)
    chain.extend(list(tokens))
    return [*chain.digests, *(chain.prefixes(len(chain.digests))[-1:] if tail else [])]


def until(true: Callable[[], Any], what: str, seconds: float = SECONDS) -> Any:
    """Wait for a condition; its value."""
    end = time.monotonic() + seconds
    while not (found := true()):
        assert time.monotonic() < end, f"not within {seconds:g} s: {what}"
        time.sleep(0.01)
    return found


class Controller:
    """A controller in a thread of this process, on a free port of the loopback."""

    def __init__(self, *, verify: ssl.SSLContext | bool = False, **settings: Any) -> None:
        self.server = ControllerServer(Settings(**{"port": 0, "node_timeout": 15.0, **settings}))
        self.url = self.server.url
        self.error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="controller")
        # Without TLS no authorities are read from the disk, which takes as long as all the rest.
        self.client = httpx.Client(base_url=self.url, timeout=2 * SECONDS, verify=verify)  # of which it may wait one

    def _run(self) -> None:
        try:
            asyncio.run(self.server.serve())
        except BaseException as error:  # noqa: BLE001  the test looks at it
            self.error = error

    def __enter__(self) -> Self:
        self._thread.start()
        until(lambda: self.server.started or not self._thread.is_alive(), "the controller answers")
        assert self.error is None, self.error
        return self

    def __exit__(self, *_: object) -> None:
        self.client.close()
        self.server._server.force_exit = True  # nobody waits for connections; a process of its own does, in its test
        self.server.stop()
        self._thread.join(SECONDS)
        assert not self._thread.is_alive(), "the controller does not end"

    def post(self, verb: str, body: Any, *, status: int = 200, **arguments: Any) -> Any:
        """The answer to a request, which has that status."""
        if verb != "lookup":
            arguments.setdefault("params", {"wait": SECONDS})
        answer = self.client.post(f"/v1/{verb}", json=body, **arguments)
        assert answer.status_code == status, answer.text
        return answer.json()

    def get(self, path: str, *, status: int = 200, **arguments: Any) -> Any:
        answer = self.client.get(path, **arguments)
        assert answer.status_code == status, answer.text
        return answer.json()


@dataclass
class Tier:
    """What lies in one tier of a fake node."""

    facts: m.TierFacts
    chunks: dict[bytes, set[bytes]] = field(default_factory=dict)
    codecs: dict[bytes, str] = field(default_factory=dict)

    def of(self, space: bytes) -> set[bytes]:
        return self.chunks.setdefault(space, set())


class Nodes(dict[str, "Node"]):
    """The nodes of a test, by name: they fetch from each other. Closed at its end.

    Attributes:
        lost: chunks that were taken away from a node while no other one had them pinned.
    """

    def __init__(self) -> None:
        super().__init__()
        self.lost: list[bytes] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for node in self.values():
            node.close()

    def start(self, name: str, controller: Controller, *spaces: Namespace, **more: Any) -> Node:
        """A node that is registered, and of which the directory knows all."""
        made = Node(self, name, controller.url, spaces, **more)
        until(
            lambda: any(n["node"] == name and n["synced"] for n in controller.get("/v1/nodes")["nodes"]),
            f"{name} is there",
        )
        return made

    def where(self, digest: bytes) -> set[str]:
        """Names of the nodes that have a chunk."""
        return {n.name for n in self.values() if any(digest in held for t in n.tiers for held in t.chunks.values())}


class Node:
    """A node's agent over a real WebSocket. Comes back after its connection ends, as agents do.

    Attributes:
        commands: those that it was told to do, with the names of their jobs.
        before: called with each command before it is done, in a thread of its own; returns whether to do it.
        after: called when it is done and before that is told; returns whether to tell.
        urls: of controllers; when one does not answer, the next is tried, as behind a load balancer.
    """

    def __init__(
        self,
        nodes: Nodes,
        name: str,
        url: str,
        spaces: Sequence[Namespace] = (),
        *,
        tiers: Sequence[str] = ("ram", "disk"),
        token: str = "",
        heartbeat: float = 0.5,
        codecs: Sequence[str] = ("identity", "zstd", "fp8"),
        more: Sequence[m.TierFacts] = (),
    ) -> None:
        self.name = name
        self.urls = [url]
        self.tiers = [Tier(m.TierFacts(tier, "fake", 1 << 20, shared=False, writable=True)) for tier in tiers]
        self.tiers += [Tier(facts) for facts in more]
        self.spaces = {space.id: space for space in spaces}
        self.incarnation = int.from_bytes(hashlib.sha256(f"{name}{time.time()}".encode()).digest()[:7], "little")
        self.pins: dict[bytes, float | None] = {}
        self.fetched: set[bytes] = set()
        self.commands: list[tuple[str, m.Command]] = []
        self.before: Callable[[str, m.Command], bool] = lambda _job, _command: True
        self.after: Callable[[str, m.Command], bool] = lambda _job, _command: True
        self._nodes = nodes
        self._token = token
        self._heartbeat = heartbeat
        self._codecs = tuple(codecs)
        self._ended: dict[str, m.Progress] = {}
        self._epoch = 0
        self._sequence = 0
        self._lock = threading.RLock()
        self._socket: Connection | None = None
        self._closing = threading.Event()
        self._cancelled: set[str] = set()
        nodes[name] = self
        self._threads = [
            threading.Thread(target=each, name=f"{name}-{each.__name__}") for each in (self._run, self._beat)
        ]
        for thread in self._threads:
            thread.start()

    # what tests do with it

    @property
    def connected(self) -> bool:
        return self._socket is not None

    def store(self, chunks: Iterable[bytes], space: Namespace, tier: str = "ram") -> None:
        """The engine has stored something."""
        self._change(self._tier(tier), space.id, set(chunks), set())

    def evict(self, chunks: Iterable[bytes], space: Namespace, tier: str = "ram") -> None:
        self._change(self._tier(tier), space.id, set(), set(chunks))

    def cut(self) -> None:
        """The connection ends."""
        if self._socket is not None:
            self._socket.close()

    def close(self) -> None:
        """The node goes away. Idempotent."""
        self._closing.set()
        self.cut()
        for thread in self._threads:
            thread.join(SECONDS)

    # what an agent does

    def _tier(self, name: str) -> Tier:
        return next(tier for tier in self.tiers if tier.facts.name == name)

    def _run(self) -> None:
        while not self._closing.is_set():
            with contextlib.suppress(OSError, ConnectionClosed, TimeoutError):
                self._talk()
            self._socket = None
            self._closing.wait(0.1)

    def _talk(self) -> None:
        headers = {"Authorization": f"Bearer {self._token}"} if self._token else {}
        self.urls.append(self.urls.pop(0))
        url = self.urls[-1].replace("http", "ws", 1) + m.PATH
        with connect(url, additional_headers=headers, max_size=m.MAX_MESSAGE, open_timeout=SECONDS) as socket:
            self._epoch += 1
            self._send(
                socket,
                m.Register(
                    m.VERSION,
                    self.name,
                    self.incarnation,
                    self._epoch,
                    {"peer": f"fake:{self.name}"},
                    tuple(space.json() for space in self.spaces.values()),
                    tuple(tier.facts for tier in self.tiers),
                    self._heartbeat,
                    self._codecs,
                ),
            )
            answer = m.decode_from_controller(socket.recv(SECONDS))
            assert isinstance(answer, m.Accepted), answer
            with self._lock:
                self._pages(socket)
                self._socket = socket
            for body in socket:
                message = m.decode_from_controller(body)
                if isinstance(message, m.Resync):
                    with self._lock:
                        self._epoch += 1
                        self._pages(socket)
                elif isinstance(message, m.Cancel):
                    self._cancelled.add(message.job)
                elif isinstance(message, m.Do):
                    threading.Thread(target=self._do, args=(message,)).start()

    def _pages(self, socket: Connection) -> None:
        self._sequence = 0
        parts = [(n, key, held) for n, tier in enumerate(self.tiers) for key, held in tier.chunks.items() if held]
        parts = parts or [(0, b"", set())]
        for number, (tier, key, held) in enumerate(parts):
            page = m.Page(self._epoch, number, number == len(parts) - 1, 0, key, tier, b"".join(sorted(held)))
            self._send(socket, page)

    def _beat(self) -> None:
        while not self._closing.wait(self._heartbeat):
            self._say(
                m.Heartbeat(self._sequence, tuple(64 * sum(map(len, t.chunks.values())) for t in self.tiers), 0.25)
            )

    def _change(self, tier: Tier, key: bytes, stored: set[bytes], removed: set[bytes]) -> None:
        with self._lock:
            tier.of(key).update(stored)
            tier.of(key).difference_update(removed)
            if self._socket is not None:
                self._sequence += 1
                change = m.Change(key, self.tiers.index(tier), b"".join(stored), b"".join(removed))
                self._say(m.Events(self._epoch, self._sequence, (change,)))

    def _say(self, message: m.Message) -> None:
        with self._lock:
            if self._socket is not None:
                with contextlib.suppress(OSError, ConnectionClosed):
                    self._send(self._socket, message)

    @staticmethod
    def _send(socket: Connection, message: m.Message) -> None:
        socket.send(m.encode(message))

    # what it is told to do

    def _do(self, message: m.Do) -> None:
        with self._lock:
            done = self._ended.get(message.job)
        if done is not None:
            self._say(done)
            return
        self.commands.append((message.job, message.command))
        if not self.before(message.job, message.command):
            return
        command = message.command
        total = 0 if isinstance(command, m.ClearTier) else m.check_digests(command.digests)
        try:
            with self._lock:
                failed, counts = self._carry_out(message.job, command)
            done = m.Progress(message.job, total - len(failed), total, failed, counts, m.DONE)
        except InterruptedError:
            done = m.Progress(message.job, 0, total, {}, {}, m.CANCELLED)
        self._ended[message.job] = done
        if self.after(message.job, command):
            self._say(done)

    def _carry_out(self, job: str, command: m.Command) -> tuple[dict[str, str], dict[str, int]]:
        if job in self._cancelled:
            raise InterruptedError
        if isinstance(command, m.ClearTier):
            return {}, self._clear(command)
        asked = [command.digests[at : at + 32] for at in range(0, len(command.digests), 32)]
        if isinstance(command, m.Fetch):
            return self._fetch(command, asked), {}
        if isinstance(command, (m.PinChunks, m.UnpinChunks)):
            return self._pin(command, asked), {}
        if isinstance(command, m.Fence):
            return {}, {"fence": 7}
        if isinstance(command, m.Drop):
            self._nodes.lost += [
                d for d in asked if not any(d in n.pins for n in self._nodes.values() if n is not self)
            ]
            for tier in self.tiers:
                if command.tier in {"", tier.facts.name}:
                    self._change(tier, command.namespace, set(), set(asked) & tier.of(command.namespace))
            return {}, {}
        return self._within(command, asked), {}

    def _pin(self, command: m.PinChunks | m.UnpinChunks, asked: list[bytes]) -> dict[str, str]:
        if isinstance(command, m.UnpinChunks):
            for digest in asked:
                if not command.fetched or digest in self.fetched:
                    self.pins.pop(digest, None)
                    self.fetched.discard(digest)
            return {}
        there = set().union(*(tier.of(command.namespace) for tier in self.tiers))
        self.pins |= {d: command.seconds for d in asked if d in there}
        return {d.hex(): "not there" for d in asked if d not in there}

    def _within(self, command: m.Shift | m.RecodeChunks, asked: list[bytes]) -> dict[str, str]:
        here = self._tier(command.source if isinstance(command, m.Shift) else command.tier)
        there = set(asked) & here.of(command.namespace)
        if isinstance(command, m.RecodeChunks):
            here.codecs |= dict.fromkeys(there, command.codec)
        else:
            self._change(self._tier(command.target), command.namespace, there, set())
            if not command.keep:
                self._change(here, command.namespace, set(), there)
        return {d.hex(): f"not in {here.facts.name}" for d in asked if d not in there}

    def _fetch(self, command: m.Fetch, asked: list[bytes]) -> dict[str, str]:
        peer = self._nodes[command.peer.removeprefix("fake:")]
        theirs = set().union(*(tier.of(command.namespace) for tier in peer.tiers))
        tier = self._tier(command.tier)
        got = {d for d in asked if d in theirs or d in tier.of(command.namespace)}
        self._change(tier, command.namespace, got, set())
        if command.pin_seconds:
            self.fetched |= got - self.pins.keys()
            self.pins |= {d: self.pins.get(d, command.pin_seconds) for d in got}
        return {d.hex(): f"{peer.name} has it not" for d in asked if d not in got}

    def _clear(self, command: m.ClearTier) -> dict[str, int]:
        counts: dict[str, int] = {}
        for tier in self.tiers:
            if command.tier in {None, tier.facts.name}:
                counts[tier.facts.name] = 0
                for key, held in list(tier.chunks.items()):
                    if command.namespace in {None, key}:
                        counts[tier.facts.name] += len(held)
                        self._change(tier, key, set(), set(held))
        return counts
