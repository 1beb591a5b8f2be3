"""Frames of 32 MiB between the pools of two processes, by the whole peer protocol, against bare copies of the same.

A pull is lease, read, verify, release; a push is reserve, write, verify and commit on the other side. Both are cut into
calls of some frames of which a few are under way at a time, as tiers and transfers do: so the checksums of one part are
worked out while the next is carried.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import numpy as np
from tests.bench.harness import Row, against, interleaved, seconds

from lmkv.config import load_config
from lmkv.errors import PluginError
from lmkv.frame import Arrival, Trailer, frame_bytes, seal
from lmkv.keys import KeyChain, Namespace
from lmkv.memory import Pool
from lmkv.peer.link import Frame
from lmkv.plugins import PluginHost
from lmkv.service import LocalClient, ThreadHost
from lmkv.service import protocol as p
from lmkv.types import ChunkKey

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from lmkv.memory import MemoryObject

FRAMES = 8
PAYLOAD = 32 << 20
PAGES = 16
PAGE_TOKENS = 16
SOCKETS = 4
ROUNDS = 5
"""With each pair of nodes."""
PAIRS = 3
"""Of nodes: where in the machine's memory their pools lie is worth a tenth and more, and stays as it is."""
PART = 1
"""Frames of one call."""
AT_ONCE = 4
"""Calls that are under way."""
NBYTES = frame_bytes(PAYLOAD, PAGES - 1)
TOTAL = FRAMES * NBYTES
LONG = 60.0


class Node:
    """A service in this process, with a peer port and a namespace of large chunks."""

    def __init__(self, transport: str) -> None:
        settings = {
            "chunk_tokens": PAGES * PAGE_TOKENS,
            "pool": {"size": 4 * TOTAL, "staging": "30%"},
            "tiers": [{"name": "ram", "backend": "cpu", "capacity": "100%"}],
            "peer": {"listen": "127.0.0.1:0", "share": "100%", "sockets": SOCKETS, "transports": [transport]},
        }
        self.host = ThreadHost(load_config(settings, host=PluginHost.discover(), environ={}))
        self.client = LocalClient(self.host, "bench")
        runs = {"name": "rig", "dtype": "bf16", "page_tokens": PAGE_TOKENS, "runs": [PAYLOAD // PAGES], "tags": []}
        self.space = Namespace(
            "bench",
            "1",
            "bfloat16",
            (runs,),
            (PAYLOAD // PAGES,),
            PAGES * PAGE_TOKENS,
            PAGE_TOKENS,  # type: ignore[arg-type]
        )
        self.ask(p.Register(self.space.json()))
        self.pool = self.host.storage.pool
        peer = self.host.storage.peer
        assert peer is not None
        self.peers, self.address = peer.peers, peer.address
        while not self.pool.prefaulted:
            time.sleep(0.05)

    def ask(self, request: Any) -> Any:
        return self.client.connection().call(request).result(LONG)

    def store(self, seed: int) -> None:
        """So many frames of noise."""
        keys = chain(seed)
        heads = tuple(
            p.NewFrame(digest, keys.parent(i), PAGES, b"".join(keys.prefixes(i)[: PAGES - 1]))
            for i, digest in enumerate(keys.digests)
        )
        reserved = self.ask(p.Reserve(self.space.id, 0, heads))
        dice = np.random.default_rng(seed)
        for offset, length in zip(reserved.offsets, reserved.lengths, strict=True):
            self.pool.cut(offset, length)[:] = dice.integers(0, 256, length, np.uint8).data
        assert self.client.connection().send(p.Commit(reserved.reservation))

    def clear(self) -> None:
        self.ask(p.Clear(self.space.id))

    def close(self) -> None:
        self.client.close()
        self.host.close()


def chain(seed: int) -> KeyChain:
    """The keys of the frames of that seed."""
    made = KeyChain(PAGES * PAGE_TOKENS, PAGE_TOKENS)
    made.extend(np.random.default_rng(seed).integers(0, 50_000, FRAMES * PAGES * PAGE_TOKENS).astype(np.uint32))
    return made


class BareSockets:
    """Both ends of as many sockets as the transport has, a thread for each: `sendall` here, `recv_into` there."""

    def __init__(self, pool: Pool, sockets: Sequence[socket.socket]) -> None:
        self._pool = pool
        self._sockets = sockets
        self._crew = ThreadPoolExecutor(len(sockets))

    def send(self) -> None:
        list(self._crew.map(lambda one: one[0].sendall(one[1]), self._parts()))

    def receive(self) -> None:
        list(self._crew.map(lambda one: _fill(*one), self._parts()))

    def _parts(self) -> list[tuple[socket.socket, memoryview]]:
        part = self._pool.nbytes // len(self._sockets)
        return [(sock, self._pool.cut(i * part, part)) for i, sock in enumerate(self._sockets)]


def _fill(sock: socket.socket, view: memoryview) -> None:
    while view:
        view = view[sock.recv_into(view) :]


class BareAgent:
    """An agent of NIXL with memory of its own, as the library's examples use it; None of lmkv."""

    def __init__(self, name: str) -> None:
        from lmkv_backend_nixl_pd.agent import Agent, bindings

        self.pool = bare_pool()
        self._agent = Agent(bindings(), f"{name}-{os.getpid()}", [(self.pool.address, self.pool.nbytes)])
        self.place = [self._agent.description.hex(), self.pool.address]

    def meet(self, place: Sequence[Any]) -> None:
        self._peer, self._there = self._agent.add(bytes.fromhex(place[0])), place[1]

    def write(self) -> None:
        """All of the memory, once."""
        blocks = [(i * NBYTES, NBYTES) for i in range(FRAMES)]
        here = [(self.pool.address + offset, nbytes) for offset, nbytes in blocks]
        there = [(self._there + offset, nbytes) for offset, nbytes in blocks]
        handle, done = self._agent.begin("write", here, there, self._peer)
        while not done:
            done = self._agent.done(handle)
        self._agent.release(handle)

    def close(self) -> None:
        self._agent.destroy()


def bare_pool() -> Pool:
    """As much memory as the frames have, touched."""
    pool = Pool.create(TOTAL, prefault=False)
    pool.view[:] = bytes(TOTAL)
    return pool


class Child:
    """The process of `tests.bench.peer_child`."""

    def __init__(self, transport: str) -> None:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            port = listener.getsockname()[1]
            command = [sys.executable, "-m", "tests.bench.peer_child", transport, str(port)]
            self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            self.sockets = [listener.accept()[0] for _ in range(SOCKETS)]
            self.first = self.answer()

    def tell(self, what: str, *more: Any) -> None:
        assert self._process.stdin is not None
        print(json.dumps([what, *more]), file=self._process.stdin, flush=True)

    def answer(self) -> Any:
        assert self._process.stdout is not None
        return json.loads(self._process.stdout.readline())

    def ask(self, what: str, *more: Any) -> Any:
        self.tell(what, *more)
        return self.answer()

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()
        for sock in self.sockets:
            sock.close()


class Ours:
    """Pulls and pushes of the node here from and to the one there."""

    def __init__(self, node: Node, address: str) -> None:
        self._node = node
        self._link = node.peers.link(address)
        self._crew = ThreadPoolExecutor(AT_ONCE)
        self._objects = [self._allocate() for _ in range(FRAMES)]

    def _allocate(self) -> MemoryObject:
        made = self._node.pool.allocate(NBYTES, "bench")
        assert made is not None
        return made

    def pull(self) -> None:
        keys = [ChunkKey(self._node.space.id, 0, digest) for digest in chain(1).digests]

        def part(first: int) -> None:
            some, into = keys[first : first + PART], self._objects[first : first + PART]
            arrivals = [Arrival(obj.view) for obj in into]
            for obj, arrival in zip(into, arrivals, strict=True):
                obj.on_landed = arrival.landed
            outcomes = self._node.peers.run(self._link.pull(some, into, time.monotonic() + LONG))
            for key, arrival, outcome in zip(some, arrivals, outcomes, strict=True):
                assert outcome.ok, outcome
                arrival.verify(outcome.nbytes, key)

        list(self._crew.map(part, range(0, FRAMES, PART)))

    def frames(self, seed: int) -> list[Frame]:
        """Sealed, of the bytes that are there; not part of what is measured."""
        keys = chain(seed)
        made = []
        for i, digest in enumerate(keys.digests):
            key = ChunkKey(self._node.space.id, 0, digest)
            prefixes = tuple(keys.prefixes(i)[: PAGES - 1])
            seal(self._objects[i].view, Trailer(key, keys.parent(i), PAGES, prefixes, "identity", PAYLOAD, PAYLOAD))
            made.append(Frame(key, keys.parent(i), PAGES, b"".join(prefixes), self._objects[i]))
        return made

    def push(self, frames: Sequence[Frame]) -> None:
        def part(first: int) -> None:
            coroutine = self._link.push(frames[first : first + PART], time.monotonic() + LONG)
            for outcome in self._node.peers.run(coroutine):
                assert outcome.ok, outcome

        list(self._crew.map(part, range(0, FRAMES, PART)))


def peer() -> list[Row]:
    """Both ways over each transport that is here."""
    rows = []
    for transport, at_least in (("nixl", 0.9), ("tcp", 0.85)):
        try:
            PluginHost.discover().load_transport(transport)
        except PluginError:
            continue
        rows += _transport(transport, at_least)
    return rows


def _transport(transport: str, at_least: float) -> list[Row]:
    pulls: list[tuple[float, float]] = []
    pushes: list[tuple[float, float]] = []
    for _ in range(PAIRS):
        child = Child(transport)
        node = Node(transport)
        try:
            _measure(transport, child, node, pulls, pushes)
        finally:
            node.close()
            child.close()
    against_what = "a bare NIXL WRITE" if transport == "nixl" else f"{SOCKETS} bare sockets"
    name = f"{FRAMES} frames of 32 MiB {{}} a peer over {transport}, against {against_what}"
    return [
        against(name.format("pulled from"), "GB/s", pulls, at_least=at_least),
        against(name.format("pushed to"), "GB/s", pushes, at_least=at_least),
    ]


def _measure(
    transport: str, child: Child, node: Node, pulls: list[tuple[float, float]], pushes: list[tuple[float, float]]
) -> None:
    """Adds (ours, bare) in GB/s of some rounds."""
    ours = Ours(node, child.first["address"])
    child.ask("store", 1)
    if transport == "nixl":
        agent = BareAgent("here")
        agent.meet(child.first["place"])
        bare_in = bare_out = agent.write
    else:
        sockets = BareSockets(bare_pool(), child.sockets)
        bare_in, bare_out = _both(child, "send", sockets.receive), _both(child, "receive", sockets.send)
    gigabytes = TOTAL / 1e9

    def push(number: int) -> float:
        frames = ours.frames(number + 100)
        child.ask("clear")
        return gigabytes / seconds(lambda: ours.push(frames))

    pulls += interleaved(lambda _: gigabytes / seconds(ours.pull), lambda _: gigabytes / seconds(bare_in), ROUNDS)
    pushes += interleaved(push, lambda _: gigabytes / seconds(bare_out), ROUNDS)


def _both(child: Child, there: str, here: Callable[[], None]) -> Callable[[], None]:
    def work() -> None:
        child.tell(there)
        here()
        child.answer()

    return work
