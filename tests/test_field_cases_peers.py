"""Cases from the field about a tier of other nodes: found through a list, or through a real controller."""

from __future__ import annotations

import contextlib
import http.server
import json
import socket
import statistics
import struct
import threading
import time
from typing import TYPE_CHECKING, Any

import pytest
from controller_rig import Controller
from fake_engine import CHUNK, Request, Shape, prompts, tokens
from p2p_rig import DEADLINE, PROBE, SLACK, Fleet, Member, far, place, process, serve, target, until
from proxy_rig import FaultProxy
from server_rig import HOST

if TYPE_CHECKING:
    from collections.abc import Iterator

    from fake_engine import FakeEngine

    from lmkv.storage.index import Entry

LONG = {"breaker": {"failures": 1000, "probe": f"{PROBE}s"}}
"""The tier is asked on, whatever happens."""
BIG = Shape(slot=65536)
"""1 MiB a chunk: a peer sends four of them, and then looks at its pace."""


class Way:
    """How node b finds node a, whose port is reached through `proxy`."""

    def __init__(self, fleet: Fleet, proxy: FaultProxy, controller: Controller | None) -> None:
        self.fleet = fleet
        self.proxy = proxy
        self.controller = controller
        self._listen = f"{proxy.target[0]}:{proxy.target[1]}"

    def _groups(self) -> dict[str, Any]:
        if self.controller is None:
            return {}
        return {"controller": {"url": self.controller.url.replace("http", "ws", 1), "heartbeat": "200ms"}}

    def a(self, **settings: Any) -> Member:
        """The one that has something."""
        peer = {"advertise": self.proxy.address}
        made = self.fleet.node("a", listen=self._listen, peer=peer, **self._groups(), **settings)
        self.proxy.drop()
        return made

    def b(self, *, ram: int | None = None, shape: Shape | None = None, **settings: Any) -> Member:
        """The one that reads, through this tier alone unless told otherwise. It registers nowhere: it gives nothing."""
        where = {"peers": [self.proxy.address]} if self.controller is None else {"controller": self.controller.url}
        return self.fleet.node("b", far(**where, **settings), ram=ram, **({"shape": shape} if shape else {}))

    def found(self, engine: FakeEngine, prompt: list[int], count: int) -> None:
        """Wait until so many tokens of a prompt are found: the directory is told of them a little later."""
        until(lambda: engine.find(prompt) == count, f"{count} tokens are found")


slow_with_controller = pytest.mark.parametrize(
    "way", ["list", pytest.param("controller", marks=pytest.mark.slow)], indirect=True
)


@pytest.fixture(params=["list", "controller"])
def way(request: pytest.FixtureRequest) -> Iterator[Way]:
    with contextlib.ExitStack() as stack:
        controller = stack.enter_context(Controller()) if request.param == "controller" else None
        proxy = stack.enter_context(FaultProxy(target(place("127.0.0.2"))))
        yield Way(stack.enter_context(Fleet()), proxy, controller)
        proxy.heal()


def entries(node: Member) -> list[Entry]:
    """All that is in the index; on its loop."""
    return [entry for known in node.manager.index.namespaces.values() for entry in known.entries.values()]


@slow_with_controller
def test_a27_peer_down(way: Way) -> None:
    """Absent at the start, up, gone, up, silent, up; 20 requests each: a deadline at most, then no wait."""
    begin = time.monotonic()
    b = way.b(ram=None)
    assert time.monotonic() - begin < DEADLINE + SLACK, "a peer that is away does not stop the start"
    wanted = list(prompts(20, 2 * CHUNK + 1))

    def down() -> None:
        came, waited = zip(*[serve(b.llm, prompt) for prompt in wanted], strict=True)
        assert set(came) == {0}
        assert max(waited) < 2 * DEADLINE + SLACK
        assert sum(wait > DEADLINE / 2 for wait in waited) <= 4, "only until it counts as away"
        assert statistics.median(waited) < DEADLINE / 4

    def up() -> None:
        for prompt in wanted:
            way.found(b.llm, prompt, 2 * CHUNK)
        assert [serve(b.llm, prompt)[0] for prompt in wanted] == [2 * CHUNK] * len(wanted)
        assert b.far["state"] == "ok"

    def start() -> Member:
        a = way.a()
        for prompt in wanted:
            a.llm.store(prompt)
        return a

    down()
    a = start()
    up()
    a.close()
    down()
    start()
    up()
    way.proxy.silence()
    down()
    way.proxy.heal()
    up()


@slow_with_controller
def test_a28_late_answer(way: Way) -> None:
    """What comes after its time is nobody's answer, and what it brings is in nobody else's memory."""
    a, b = way.a(), way.b(**LONG)
    wanted = list(prompts(8, 3 * CHUNK))
    for prompt in wanted:
        a.llm.store(prompt)
    for prompt in wanted:
        way.found(b.llm, prompt, 3 * CHUNK)
    for _ in range(2):
        request = Request([b.llm], wanted[0])
        way.proxy.delay(0.8 * DEADLINE)
        request.queue().look_up().allocate().load()
        assert request.computed < 3 * CHUNK
        request.run().finish()
        way.proxy.delay(0.0)
        until(lambda: b.llm.find(wanted[1]) == 3 * CHUNK, "the peer answers again")
        for prompt in wanted[1:]:
            serve(b.llm, prompt)
        assert b.llm.find(tokens(CHUNK, 9_000_000)) == 0
    b.settle()
    assert [serve(b.llm, [*prompt, 0])[0] for prompt in wanted] == [3 * CHUNK] * len(wanted)


def test_a29_quick_restart(way: Way) -> None:
    """Another life at the same address, with nothing in it: nothing is promised for long, all works."""
    a, b = way.a(), way.b()
    prompt = tokens(3 * CHUNK + 1)
    a.llm.store(prompt)
    way.found(b.llm, prompt, 3 * CHUNK)
    way.proxy.delay(0.2 * DEADLINE)  # so that what a look-up begins to load has not come yet
    promised = Request([b.llm], prompt).queue().look_up()
    assert promised.offered == 3 * CHUNK
    a.close()
    a = way.a()
    way.proxy.delay(0.0)
    assert promised.allocate().load().computed == 0
    promised.run().store().finish()
    way.found(b.llm, prompt, 0)
    a.llm.store(tokens(CHUNK, 1000))
    a.llm.store(prompt)
    for one, count in ((prompt, 3 * CHUNK), (tokens(CHUNK, 1000), CHUNK)):
        way.found(b.llm, one, count)
        assert b.llm.load(one) == count
    until(lambda: b.far["state"] == "ok", "the tier is well")


def test_a30_gone_behind_our_back(way: Way) -> None:
    """Evicted there after a look-up here: the load fails, the next look-up finds nothing; no illness."""
    a, b = way.a(), way.b()
    prompt = tokens(3 * CHUNK + 1)
    a.llm.store(prompt)
    way.found(b.llm, prompt, 3 * CHUNK)
    way.proxy.delay(0.2 * DEADLINE)
    requests = [Request([b.llm], prompt).queue() for _ in range(2)]
    assert [request.look_up().offered for request in requests] == [3 * CHUNK] * 2
    a.on_loop(lambda: [a.manager.stack.remove(entry) for entry in entries(a)])
    way.proxy.delay(0.0)
    for request in requests:
        assert request.allocate().load().computed == 0
        request.run().finish()
    way.found(b.llm, prompt, 0)
    assert b.far["state"] == "ok", "what is gone is a miss"
    a.llm.store(prompt)
    way.found(b.llm, prompt, 3 * CHUNK)
    assert b.llm.load(prompt) == 3 * CHUNK


PICKLE = b"\x80\x04\x95\x1a\x00\x00\x00\x00\x00\x00\x00\x8c\x08builtins\x94\x8c\x04exec\x94\x93\x94."


class Hostile:
    """Says the same to whoever comes, as soon as that one says something."""

    def __init__(self, answer: bytes) -> None:
        self.answer = answer
        self._listener = socket.create_server((HOST, 0))
        self.port: int = self._listener.getsockname()[1]
        threading.Thread(target=self._serve, daemon=True).start()

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _serve(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                threading.Thread(target=self._talk, args=[self._listener.accept()[0]], daemon=True).start()

    def _talk(self, link: socket.socket) -> None:
        with link, contextlib.suppress(OSError):
            while link.recv(65536):
                link.sendall(self.answer)


NOISE = {
    "pickle": PICKLE,
    "four gigabytes": struct.pack("<I", 0xFFFFFFFF) + PICKLE,
    "nothing, often": b"\0" * 65536,
    "nested": struct.pack("<I", 64) + b"\x91" * 64,
}


@pytest.mark.parametrize("answer", NOISE)
def test_a43_hostile_peer(answer: str) -> None:
    """Misses, in time; with the right peer all is well again."""
    with FaultProxy(target(place("127.0.0.2"))) as proxy, Fleet() as fleet:
        way = Way(fleet, proxy, None)
        a, b = way.a(), way.b(**LONG)
        prompt = tokens(3 * CHUNK + 1)
        a.llm.store(prompt)
        way.found(b.llm, prompt, 3 * CHUNK)
        right, hostile = proxy.target, Hostile(NOISE[answer])
        try:
            proxy.target = (HOST, hostile.port)
            proxy.drop()
            came, waited = serve(b.llm, prompt)
            assert came == 0
            assert waited < 2 * DEADLINE + SLACK
        finally:
            proxy.target = right
            proxy.drop()
            hostile.close()
        way.found(b.llm, prompt, 3 * CHUNK)
        assert b.llm.load(prompt) == 3 * CHUNK


def hit(**changes: Any) -> dict[str, Any]:
    tier = {"tier": "ram", "backend": "cpu", "hit_tokens": 12, "held": "0f"}
    return {"node": "x", "namespace": "", "hit_tokens": 12, "tiers": [tier], "load": 0.0, "endpoints": {}, **changes}


def told(*hits: dict[str, Any]) -> bytes:
    return json.dumps({"tokens": None, "nodes": hits}).encode()


GARBLED = {
    "pickle": PICKLE,
    "no JSON": b"[" * 100_000,
    "another shape": b'{"nodes": {"a": 1}}',
    "no bitmap": told(hit(tiers=[{"tier": "ram", "backend": "cpu", "held": None}])),
    "a wrong bitmap": told(hit(tiers=[{"tier": "ram", "backend": "cpu", "held": "zz"}], endpoints={"peer": "x"})),
    "no address": told(hit(endpoints={"peer": "nowhere"}), hit(endpoints={"peer": "10.0.0.1:7000"}), hit()),
    "nobody there": told(hit(endpoints={"peer": "127.0.0.1:1"})),
    "a number too many": told(hit(load=float("inf"), endpoints={"peer": "127.0.0.1:1"})),
}


HARMLESS = {"no address", "nobody there"}
"""It may be that way: a node without a port, one that has just gone."""


class Lying(http.server.BaseHTTPRequestHandler):
    """A directory that answers everything with the same."""

    answer = b""

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        self.send_response(200)
        self.send_header("content-length", str(len(self.answer)))
        self.end_headers()
        self.wfile.write(self.answer)

    def log_message(self, *_: object) -> None:
        """Nobody reads it."""


@pytest.mark.parametrize("answer", GARBLED)
def test_a43_hostile_directory(answer: str) -> None:
    """Whatever it says: misses in time, and not a process that falls over."""
    server = http.server.ThreadingHTTPServer((HOST, 0), type("Told", (Lying,), {"answer": GARBLED[answer]}))
    thread = threading.Thread(target=server.serve_forever, args=[0.01])
    thread.start()
    try:
        with Fleet() as fleet:
            b = fleet.node("b", far(controller=f"http://{HOST}:{server.server_port}", **LONG), ram=None)
            for _ in range(2):
                came, waited = serve(b.llm, tokens(3 * CHUNK + 1))
                assert came == 0
                assert waited < 2 * DEADLINE + SLACK
            failed = b.counter("lmkv_tier_operations_total", tier="far", op="contains", outcome="failed")
            assert (b.far["state"] == "ok" and not failed) == (answer in HARMLESS)
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def test_a43_damaged_frames_are_misses(way: Way) -> None:
    """A bit that has flipped in the peer's pool after the frame was sealed."""
    a, b = way.a(), way.b()
    prompt = tokens(3 * CHUNK + 1)
    a.llm.store(prompt)
    way.found(b.llm, prompt, 3 * CHUNK)
    assert b.llm.load(prompt) == 3 * CHUNK, "sealed from now on"
    b.settle()

    def flip() -> None:
        [root] = [entry for entry in entries(a) if not entry.parent]
        obj = a.manager.stack.in_pool(root, 0)
        assert obj is not None
        obj.view[17] ^= 1
        obj.release("get")

    a.on_loop(flip)
    came, _ = serve(b.llm, prompt)
    assert came == 0, "the first chunk is damaged"
    assert b.far["state"] == "ok"


@pytest.mark.parametrize("others", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a27_killed_in_mid_read(others: bool) -> None:
    """kill -9 while frames are under way: misses within the deadline, or all of it from another that has it."""
    count = 16 * CHUNK
    wanted = list(prompts(2, count))
    slow = {"bandwidth": "2MiB", "sockets": 1}
    with process(BIG, 2, 16, **slow) as (child, address), Fleet() as fleet, FaultProxy(target(address)) as proxy:
        peers = [proxy.address]
        b = fleet.node("b", far(peers=peers, deadline="6s", **LONG), shape=BIG)
        if others:
            c = fleet.node("c", far(peers=peers, deadline="30s"), shape=BIG)
            for prompt in wanted:
                c.llm.store(prompt)
            b = fleet.node("d", far(peers=[*peers, c.address], deadline="6s", **LONG), shape=BIG)
        request = Request([b.llm], [*wanted[0], 0]).queue().look_up().allocate()
        assert request.offered == count
        loading = b.start(request.load)
        until(lambda: proxy.bytes_down > BIG.frame, "bytes are under way")  # of four; the others come 2 s later
        begin = time.monotonic()
        child.kill()
        loading.result(30)
        assert time.monotonic() - begin < 6 + SLACK
        assert request.computed == count if others else request.computed < count
        request.run().finish()
        assert serve(b.llm, [*wanted[1], 0])[0] == (count if others else 0)
        if others:
            assert c.served() > 0
