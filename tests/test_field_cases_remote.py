"""Cases from the field about stores that others can reach, on the real stack with real servers."""

from __future__ import annotations

import contextlib
import socket
import statistics
import struct
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from fake_engine import CHUNK, FRAME, FakeEngine, Request, prompts, tokens
from fault_rig import DEADLINE, FAILURES, PROBE, RedisStore, S3Store, config, start, state
from server_rig import HOST

from lmkv.service.client import SocketClient

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from fake_engine import Node
    from fault_rig import RemoteStore

STORES: dict[str, Any] = {"redis": RedisStore, "s3": S3Store}
SLACK = 2.0
"""Two busy cores are in no hurry."""


@pytest.fixture(params=STORES)
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[RemoteStore]:
    made = STORES[request.param](tmp_path / "far")
    try:
        yield made
    finally:
        made.heal()
        made.close()


@pytest.fixture
def far(store: RemoteStore) -> Iterator[Callable[..., Node]]:
    """Starts nodes with the store as their only tier, unless told otherwise."""
    made: list[Node] = []

    def begin(**tier: Any) -> Node:
        made.append(start(store, **{"ram": None, **tier}))
        return made[-1]

    yield begin
    store.heal()
    for node in made:
        node.close()


def serve(engine: FakeEngine, prompt: list[int]) -> tuple[int, float]:
    """One request from look-up to store: tokens that came, and how long it waited for them."""
    begin = time.monotonic()
    request = Request([engine], prompt).queue().look_up().allocate().load()
    waited = time.monotonic() - begin
    request.run().store().finish()
    return request.computed, waited


def until(true: Callable[[], bool], seconds: float, what: str) -> None:
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, f"not within {seconds:g} s: {what}"
        time.sleep(0.02)


def test_a27_store_down(store: RemoteStore, far: Callable[..., Node]) -> None:
    """Absent at the start, up, killed, silent; 50 requests each: a deadline at most, then no wait; only misses."""
    store.proxy.refuse()
    begin = time.monotonic()
    node = far()
    assert time.monotonic() - begin < DEADLINE + 2 * SLACK, "a store that is down does not stop the start"
    engine = node.engine()
    wanted = list(prompts(50, 2 * CHUNK + 1))

    def phase() -> tuple[list[int], list[float]]:
        came, waited = zip(*[serve(engine, prompt) for prompt in wanted], strict=True)
        return list(came), sorted(waited)

    def down() -> None:
        came, waited = phase()
        assert came == [0] * 50
        assert waited[-1] < 2 * DEADLINE + SLACK
        assert sum(wait > DEADLINE / 2 for wait in waited) <= FAILURES + 1, "only those before it counts as down"
        assert statistics.median(waited) < DEADLINE / 10
        assert state(node) != "ok"

    def up() -> None:
        store.heal()
        until(lambda: state(node) == "ok", PROBE + DEADLINE + SLACK, "the tier is back")
        # The first store may be the trial, and until it is told the only one: so once more for the first prompt.
        for number, prompt in enumerate([wanted[0], *wanted]):
            serve(engine, prompt)
            if number % 8 == 0:
                node.settle()
        node.settle()
        came, _ = phase()
        assert came == [2 * CHUNK] * 50

    down()
    up()
    store.server.kill()
    down()
    up()
    store.proxy.silence()
    down()
    up()


def test_a28_late_answer(store: RemoteStore, far: Callable[..., Node]) -> None:
    """Look-up 1 times out and its answer comes during look-up 2, which gets its own; look-up 3 too."""
    node = far(breaker={"failures": 1000, "probe": f"{PROBE}s"})
    engine = node.engine()
    long, short, other = tokens(5 * CHUNK), tokens(CHUNK, 1000), tokens(2 * CHUNK, 2000)
    for prompt in (long, short, other):
        engine.store(prompt)
        node.settle()
    assert engine.find(long) == 5 * CHUNK
    store.proxy.delay(0.8 * DEADLINE)  # of requests and of answers: 1.6 deadlines there and back
    assert engine.find(long) == 0
    store.proxy.delay(0.0)
    for _ in range(20):
        assert engine.find(short) == CHUNK
        assert engine.find(tokens(CHUNK, 3000)) == 0
    time.sleep(DEADLINE)
    assert engine.find(other) == 2 * CHUNK
    assert [engine.load(prompt) for prompt in (long, short, other)] == [5 * CHUNK, CHUNK, 2 * CHUNK]


def test_a28_late_frames(store: RemoteStore, far: Callable[..., Node]) -> None:
    """A load times out, and its frames come while others are loaded, into memory that is nobody else's."""
    node = far(breaker={"failures": 1000, "probe": f"{PROBE}s"})
    engine = node.engine()
    wanted = list(prompts(12, 3 * CHUNK))
    for prompt in wanted:
        engine.store(prompt)
        node.settle()
    for _ in range(3):
        node.settle()
        request = Request([engine], wanted[0]).queue().look_up()
        store.proxy.delay(0.8 * DEADLINE)
        request.allocate().load()
        assert request.computed < 3 * CHUNK
        request.run().finish()
        store.proxy.delay(0.0)
        for prompt in wanted[1:]:
            serve(engine, prompt)
    node.settle()
    assert [engine.load(prompt) for prompt in wanted] == [3 * CHUNK] * 12


@pytest.mark.parametrize("fault", ["cut", "reset", "refused"])
def test_a28_a_put_that_could_not_be_sent(store: RemoteStore, far: Callable[..., Node], fault: str) -> None:
    """It is reported as failed, and the frame is not there."""
    node = far(breaker={"failures": 1000, "probe": f"{PROBE}s"})
    engine = node.engine()
    engine.store(tokens(CHUNK))
    node.settle()
    stored = puts(node, "ok")
    store.begin(fault)
    engine.store(tokens(CHUNK, 1000))
    node.settle()
    assert puts(node, "ok") == stored
    assert puts(node, "failed") + puts(node, "deadline") > 0
    store.heal()
    until(lambda: engine.find(tokens(CHUNK)) == CHUNK, PROBE + DEADLINE + SLACK, "the tier is back")
    assert engine.find(tokens(CHUNK, 1000)) == 0
    assert engine.store(tokens(CHUNK, 1000)) == CHUNK
    node.settle()
    assert engine.load(tokens(CHUNK, 1000)) == CHUNK


def puts(node: Node, outcome: str) -> float:
    return node.counter("lmkv_tier_operations_total", tier="far", op="put", outcome=outcome)


def test_a29_quick_restart(store: RemoteStore, far: Callable[..., Node]) -> None:
    """Restarted in a moment at the same address, with nothing in it: nothing is promised, all works."""
    node = far()
    engine = node.engine()
    engine.store(tokens(3 * CHUNK))
    node.settle()
    promised = Request([engine], tokens(3 * CHUNK + 1)).queue().look_up()
    assert promised.offered == 3 * CHUNK
    store.empty()
    store.server.restart()
    promised.allocate().load().run().store().finish()
    node.settle()
    until(lambda: state(node) == "ok", PROBE + DEADLINE + SLACK, "the tier is well")
    assert engine.find(tokens(CHUNK, 1000)) == 0
    engine.store(tokens(3 * CHUNK))
    node.settle()
    assert engine.load(tokens(3 * CHUNK)) == 3 * CHUNK


def test_a30_gone_behind_our_back(store: RemoteStore, far: Callable[..., Node]) -> None:
    """Another tool deletes what a look-up has found: the load fails, the next look-up finds nothing; then it is new."""
    node = far()
    engine = node.engine()
    engine.store(tokens(3 * CHUNK))
    node.settle()
    requests = [Request([engine], tokens(3 * CHUNK + 1)) for _ in range(2)]
    store.proxy.delay(0.4 * DEADLINE)  # so that the loads that a look-up begins do not come before the deletion
    for request in requests:
        request.queue()
    for request in requests:
        assert request.look_up().offered == 3 * CHUNK
    store.empty()
    store.proxy.delay(0.0)
    for request in requests:
        request.allocate().load()
    assert [request.computed for request in requests] == [0, 0]
    for request in requests:
        request.run().finish()
    assert engine.find(tokens(3 * CHUNK)) == 0
    engine.store(tokens(3 * CHUNK))
    node.settle()
    assert engine.load(tokens(3 * CHUNK)) == 3 * CHUNK
    assert state(node) == "ok", "what is gone is a miss, no illness"


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


PICKLE = b"\x80\x04\x95\x1a\x00\x00\x00\x00\x00\x00\x00\x8c\x08builtins\x94\x8c\x04exec\x94\x93\x94."
LAUGHS = b"<!DOCTYPE x [<!ENTITY a0 'ha'>%s]><x>&a24;</x>" % b"".join(
    b"<!ENTITY a%d '&a%d;&a%d;'>" % (n, n - 1, n - 1) for n in range(1, 25)
)
HTTP = b"HTTP/1.1 200 OK\r\nContent-Type: application/xml\r\n"
BOTH = {
    "pickle": PICKLE,
    "no end of line": b"+" + b"x" * (8 << 20),
    "small noise": b"".join(struct.pack("<I", (n * 2654435761) & 0xFFFFFFFF)[: n % 5] for n in range(10_000)),
}
HOSTILE = {
    "redis": BOTH
    | {
        "bulk of 2**60": b"$1152921504606846976\r\n" + PICKLE,
        "array of 2**60": b"*1152921504606846976\r\n$4\r\n",
        "nested": b"*1\r\n" * 20_000,
        "negative": b"$-9223372036854775808\r\n:99999999999999999999999999\r\n",
    },
    "s3": BOTH
    | {
        "body of 2**60": HTTP + b"Content-Length: 1152921504606846976\r\nContent-Range: bytes 0-9/10\r\n\r\n" + PICKLE,
        "negative": HTTP + b"Content-Length: -1\r\n\r\n",
        "chunk of 2**60": HTTP + b"Transfer-Encoding: chunked\r\n\r\n1000000000000000\r\n" + PICKLE,
        "no end of headers": HTTP + b"X: y\r\n" * 100_000,
        "xml that grows": HTTP + b"Content-Length: %d\r\n\r\n" % len(LAUGHS) + LAUGHS,
    },
}


def resident() -> int:
    """Bytes of memory that this process has touched."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


@pytest.mark.parametrize(
    ("store", "answer"),
    [(store, answer) for store, answers in HOSTILE.items() for answer in answers],
    indirect=["store"],
)
def test_a43_hostile_store(store: RemoteStore, far: Callable[..., Node], answer: str) -> None:
    """Misses, in time; nothing is allocated for what it promises, nothing run; and with the right store all is well."""
    node = far(breaker={"failures": 1000, "probe": f"{PROBE}s"})
    engine = node.engine()
    engine.store(tokens(3 * CHUNK))
    node.settle()
    assert engine.find(tokens(3 * CHUNK)) == 3 * CHUNK
    right = store.proxy.target
    hostile = Hostile(HOSTILE["redis" if isinstance(store, RedisStore) else "s3"][answer])
    try:
        store.proxy.target = (HOST, hostile.port)
        store.proxy.drop()
        before = resident()
        for first in (5000, 1):  # something new, and what the right store has
            came, waited = serve(engine, tokens(3 * CHUNK, first))
            assert came == 0
            assert waited < 2 * DEADLINE + SLACK
            node.settle()  # frames that wait to be put would be found where they wait
        assert resident() < before + (96 << 20)
        store.proxy.target = right
        store.proxy.drop()
        until(lambda: engine.find(tokens(3 * CHUNK)) == 3 * CHUNK, PROBE + 2 * DEADLINE + SLACK, "the store is back")
        assert engine.load(tokens(3 * CHUNK)) == 3 * CHUNK
    finally:
        hostile.close()


SERVICE = """
import sys
from pathlib import Path
from lmkv.config import load_config
from lmkv.plugins import PluginHost
from lmkv.service import server
config = load_config(Path(sys.argv[1]).read_text(), host=PluginHost.discover(), environ={})
print("ready", flush=True)
server.run(config, sys.argv[2])
"""


def test_a42_stop_with_a_silent_store(store: RemoteStore, tmp_path: Path) -> None:
    """100 writes wait for a store that says nothing: TERM ends the process in time; what is there is whole."""
    text = config(store, ram=128 * FRAME, queue={"calls": 128, "bytes": "1MiB"}, deadline="30s").text
    (tmp_path / "stack.yaml").write_text(text)
    with tempfile.TemporaryDirectory() as folder:  # a socket's path must be short
        path = Path(folder) / "lmkv.sock"
        command = [sys.executable, "-c", SERVICE, str(tmp_path / "stack.yaml"), str(path)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
            try:
                until(path.exists, 60, "the service listens")
                engine = FakeEngine(SocketClient(path, "test", prefault=False))
                assert engine.store(tokens(CHUNK)) == CHUNK
                until(lambda: there(engine) == 1, 10, "the first frame is stored")
                store.proxy.silence()
                for prompt in prompts(100):
                    assert engine.store([token + 500 for token in prompt]) == CHUNK
                begin = time.monotonic()
                child.terminate()
                assert child.wait(30) == 0
                assert time.monotonic() - begin < 15
            finally:
                child.kill()
        engine.cache.close()
    store.heal()
    node = start(store, ram=None)
    try:
        engine = node.engine()
        assert engine.load(tokens(CHUNK)) == CHUNK
        assert {engine.load([token + 500 for token in prompt]) for prompt in prompts(100)} <= {0, CHUNK}
    finally:
        node.close()


def there(engine: FakeEngine) -> float:
    """Frames that the tier has taken."""
    counters = engine.cache.health().counters
    return sum(n for name, n in counters.items() if 'op="put"' in name and 'outcome="ok"' in name)
