"""Cases from the field that are about processes: clients that die, clear, stop, hostile bytes. With a real service."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from fake_engine import CHUNK, FRAME, FakeEngine, Request, namespace, prompts, stack, tokens

from lmkv.errors import ConfigError
from lmkv.frame import verify
from lmkv.service.client import SocketClient
from lmkv.service.spawn import connect_or_start
from lmkv.types import ChunkKey

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from fake_engine import Node

    from lmkv.config import Config
    from lmkv.service.protocol import HealthReport

HERE = Path(__file__).parent


@contextlib.contextmanager
def python(program: str, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    """A process with this folder's modules, which has said that it is ready."""
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join([str(HERE), *filter(None, sys.path)])}
    with subprocess.Popen(
        [sys.executable, "-c", program, *arguments], env=environ, stdout=subprocess.PIPE, text=True
    ) as child:
        try:
            assert child.stdout is not None
            assert child.stdout.readline() == "ready\n"
            yield child
        finally:
            child.kill()


class Service:
    """A service in a process of its own, started by the first client."""

    def __init__(self, config: Config, path: Path) -> None:
        self.config = config
        self.path = path
        self._clients: list[SocketClient] = []

    def client(self, name: str = "test") -> SocketClient:
        self._clients.append(connect_or_start(self.config.text, self.path, name, linger=0.2, prefault=False))
        return self._clients[-1]

    def engine(self) -> FakeEngine:
        return FakeEngine(self.client())

    def close(self) -> None:
        for client in self._clients:
            client.close()
        until = time.monotonic() + 15
        while self.path.exists():
            assert time.monotonic() < until, "the service has not gone with its last client"
            time.sleep(0.02)


@pytest.fixture
def service(tmp_path: Path) -> Iterator[Service]:
    with tempfile.TemporaryDirectory() as folder:  # a socket's path must be short
        made = Service(stack(tmp_path / "disk"), Path(folder) / "lmkv.sock")
        yield made
        made.close()


def eventually(engine: FakeEngine, good: Callable[[HealthReport], bool], seconds: float = 10.0) -> None:
    until = time.monotonic() + seconds
    while not good(report := engine.cache.health()):
        assert time.monotonic() < until, report
        time.sleep(0.01)


def nothing_held(report: HealthReport, sessions: int = 1) -> bool:
    return report.holds["sessions"] == sessions and not any(n for k, n in report.holds.items() if k != "sessions")


def counted(report: HealthReport, name: str) -> float:
    return sum(value for series, value in report.counters.items() if series.split("{")[0] == name)


CLIENT = """
import sys, time
from fake_engine import FakeEngine, Request, tokens
from lmkv.service.client import SocketClient
from lmkv.service.protocol import Acquire, Reserve
from lmkv.engine import frame_of
engine = FakeEngine(SocketClient(sys.argv[1], "dies", prefault=False))
request = Request([engine], tokens(9)).queue().look_up()
assert request.offered == 8
link, space = engine.cache.client, engine.cache.namespace
assert link.call(Acquire(request.hit.lease, 0, 0, 2)).result(5).hold
chain = engine.cache.chain()
chain.extend(tokens(8, 500))
assert link.call(Reserve(space.id, 0, tuple(frame_of(chain, i) for i in range(2)))).result(5).reservation
print("ready", flush=True)
time.sleep(60)
"""


def test_a15_client_is_killed(service: Service) -> None:
    """With a lease, a hold and a reservation: all of it is given back at once, and others store the same."""
    engine = service.engine()
    engine.store(tokens(8))
    eventually(engine, nothing_held)
    free = engine.cache.client.pool.nbytes
    with python(CLIENT, str(service.path)) as child:
        holds = engine.cache.health().holds
        assert (holds["leases"], holds["holds"], holds["reservations"], holds["sessions"]) == (1, 1, 1, 2)
        child.kill()
        child.wait()
    eventually(engine, nothing_held)
    assert engine.find(tokens(8, 500)) == 0
    assert engine.store(tokens(8, 500)) == 8
    assert engine.load(tokens(8, 500)) == 8
    engine.cache.clear()
    eventually(engine, lambda report: counted(report, "lmkv_pool_free_bytes") == free)


def test_a20_service_is_killed(service: Service) -> None:
    """The engine sees misses only; what had reached the disk is found by the next service, which comes by itself."""
    engine = service.engine()
    assert engine.store(tokens(8)) == 8
    eventually(engine, lambda report: report.tiers["disk"]["frames"] == 2)
    held = Request([engine], tokens(9)).queue().look_up()
    assert held.offered == 8
    incarnation = engine.cache.client.incarnation
    pid = struct.unpack("3i", _credentials(service.path))[0]
    os.kill(pid, signal.SIGKILL)
    until = time.monotonic() + 20
    while not engine.cache.client.connected or engine.cache.client.incarnation == incarnation:
        assert time.monotonic() < until
        Request([engine], tokens(9)).queue().look_up().allocate().load().run().store().finish()
        time.sleep(0.02)
    held.allocate().load()
    assert held.computed == 0, "a lease of the service that has gone means nothing to the next one"
    held.run().finish()
    assert engine.load(tokens(8)) == 8
    eventually(engine, nothing_held)


def _credentials(path: Path) -> bytes:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        sock.connect(str(path))
        return sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))


def test_a41_clear(node: Callable[..., Node], tmp_path: Path) -> None:
    """Counts per tier; what is held goes after its release; the unknown is an error; versions of weights are apart."""
    here = node(tmp_path)
    old, new = here.engine(space=namespace(revision="1")), here.engine(space=namespace(revision="2"))
    old.store(tokens(8))
    assert new.find(tokens(8)) == 0
    assert old.find(tokens(8)) == 8, "the old version is there, when it is asked for by name"
    new.store(tokens(8))
    new.store(tokens(4, 100))
    here.settle()
    held = Request([new], tokens(5, 100)).queue().look_up()
    assert new.cache.clear() == {"ram": 3, "disk": 3}
    assert new.find(tokens(8)) == new.find(tokens(4, 100)) == 0
    held.allocate().load()
    assert held.computed == 4, "the promise holds"
    held.run().finish()
    here.settle()
    assert here.manager.tier("disk").used == 2 * FRAME
    assert old.load(tokens(8)) == 8
    assert new.cache.clear() == {"ram": 0, "disk": 0}
    with pytest.raises(ConfigError, match="tiers: ram, disk"):
        new.cache.clear("rum")
    stranger = here.engine(space=namespace(model="other"))
    here.on_loop(lambda: here.manager.index.namespaces.pop(stranger.cache.namespace.id))
    with pytest.raises(ConfigError, match="no namespace"):
        stranger.cache.clear()


SLOW = """
import sys, time
from pathlib import Path
from fake_engine import PLUGINS, stack
from lmkv.service import server
from lmkv_backend_disk.backend import DiskBackend
put = DiskBackend.put
DiskBackend.put = lambda self, keys, objects: (time.sleep(0.1), put(self, keys, objects))[1]
config = stack(Path(sys.argv[1]), disk_queue={"calls": 200}, disk_threads=2)
print("ready", flush=True)
server.run(config, sys.argv[2])
"""


def test_a42_stop(service: Service, tmp_path: Path) -> None:
    """TERM with 100 writes waiting for a slow disk: the process ends in time, every frame is whole or absent."""
    with python(SLOW, str(tmp_path / "slow"), str(service.path)) as child:
        until = time.monotonic() + 20
        while not service.path.exists():
            assert time.monotonic() < until
            time.sleep(0.02)
        engine = FakeEngine(SocketClient(service.path, "test", prefault=False))
        for prompt in prompts(60):
            engine.store(prompt)
        begin = time.monotonic()
        child.terminate()
        child.terminate()
        assert child.wait(15) == 0
        assert time.monotonic() - begin < 12
    engine.cache.close()
    paths = [path for path in (tmp_path / "slow" / "frames").rglob("*.0") if path.is_file()]
    assert paths
    for path in paths:
        digest, shard = path.name.split(".")
        key = ChunkKey(engine.cache.namespace.id, int(shard, 16), bytes.fromhex(digest))
        assert verify(memoryview(path.read_bytes()), key).key == key


def test_a42_close_of_a_host(node: Callable[..., Node], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """100 writes wait, the disk hangs: close(2 s) returns all the same, and again at once; nothing is half there."""
    here = node(tmp_path, disk_queue={"calls": 200}, disk_threads=1, disk_deadline="30s")
    engine = here.engine()
    backend = here.manager.tier("disk").backend
    put = backend.put

    def slow(keys: Sequence[ChunkKey], objects: Sequence[object]) -> object:
        time.sleep(0.2)
        return put(keys, objects)  # type: ignore[arg-type]

    monkeypatch.setattr(backend, "put", slow)
    wanted = list(prompts(100))
    for prompt in wanted:
        engine.store(prompt)
    begin = time.monotonic()
    here.host.close(2.0)
    assert time.monotonic() - begin < 3.5
    here.host.close(2.0)
    assert time.monotonic() - begin < 3.6
    time.sleep(0.3)
    again = node(tmp_path).engine()
    found = [again.find(prompt) for prompt in wanted]
    assert set(found) == {0, CHUNK}
    assert again.load(wanted[found.index(CHUNK)]) == CHUNK


@pytest.mark.parametrize(
    "hostile",
    [
        b"\x80\x04\x95\x1a\x00\x00\x00\x00\x00\x00\x00\x8c\x08builtins\x94\x8c\x04exec\x94\x93\x94.",
        struct.pack("<Q", 1 << 60) * 4,
        struct.pack("<I", (1 << 32) - 1) + bytes(64),
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    ],
    ids=["pickle", "2**60", "2**32-1", "http"],
)
def test_a43_hostile_bytes(service: Service, hostile: bytes) -> None:
    """Refused before anything is allocated or run; the service still answers."""
    engine = service.engine()
    for _ in range(20):
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
            sock.connect(str(service.path))
            sock.sendall(hostile)
            sock.shutdown(socket.SHUT_WR)
            sock.settimeout(10)
            with contextlib.suppress(ConnectionResetError):
                while sock.recv(65536):
                    pass
    assert engine.store(tokens(8)) == 8
    assert engine.load(tokens(8)) == 8
    eventually(engine, nothing_held)


def test_a43_listens_on_loopback_only(tmp_path: Path) -> None:
    assert stack().metrics.port is None
    assert stack(metrics={"port": 0}).metrics.host == "127.0.0.1"
    with pytest.raises(ConfigError, match="not a loopback address"):
        stack(tmp_path / "disk", metrics={"port": 9000, "host": "0.0.0.0"})
