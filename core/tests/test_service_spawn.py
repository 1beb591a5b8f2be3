"""The service as a process: who starts it, who ends it, what a kill costs."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest

from lmkv.config import load_config
from lmkv.engine import CacheEngine
from lmkv.errors import ClosedError, ConfigError
from lmkv.gpu import CPUConnector
from lmkv.keys import Namespace
from lmkv.layout import PageLayout, PageRun
from lmkv.plugins import PluginHost
from lmkv.service import SocketClient, connect_or_start, ensure_service
from lmkv.service import spawn as spawn_module
from lmkv.service.protocol import GetHealth, HealthReport, Lookup
from lmkv.service.spawn import log_path
from lmkv.service.wire import peer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

CONFIG = load_config(
    "pool: {size: 1MiB, prefault: false, hugepages: 'off'}\nchunk_tokens: 8\n"
    "tiers:\n  - {name: ram, backend: cpu, capacity: 100%}\n",
    host=PluginHost.discover(),
    environ={},
).text
LAYOUT = PageLayout("test", "uint8", 2, (PageRun(0, 0, 64, 64),))
NAMESPACE = Namespace("m", "r", "uint8", (LAYOUT.describe(),), (LAYOUT.page_bytes,), 8, 2)
TOKENS = np.arange(24)


@pytest.fixture
def path(tmp_path: Path) -> Iterator[Path]:
    where = tmp_path / "s"
    yield where
    eventually(lambda: left_over(where) == set())


def left_over(path: Path) -> set[str]:
    """Files beside the socket that should go with the service."""
    return {
        p.name for p in path.parent.iterdir() if p.suffix in {"", ".lock", ".start"} and p.is_relative_to(path.parent)
    }


def eventually(condition: Callable[[], bool], seconds: float = 40.0) -> None:
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.005)


def service_of(client: SocketClient) -> int:
    """Process id of the service behind a client."""
    return peer(client.connection()._sock)[0]


def gone(pid: int) -> bool:
    """No such process, or one that only waits to be noted."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()[0] in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return True


def health(client: SocketClient) -> HealthReport:
    report = client.call(GetHealth()).result(20)
    assert isinstance(report, HealthReport)
    return report


def engine_on(client: SocketClient, buffer: bytearray) -> CacheEngine:
    return CacheEngine(client, NAMESPACE, gpu=CPUConnector(LAYOUT, [memoryview(buffer)]))


def test_the_first_comer_starts_it_and_the_last_one_ends_it(path: Path) -> None:
    assert ensure_service(CONFIG, path)
    one = connect_or_start(CONFIG, path, "one")
    assert not ensure_service(CONFIG, path)
    two = connect_or_start(CONFIG, path, "two")
    pid = service_of(one)
    assert pid == service_of(two) != os.getpid()
    assert os.getsid(pid) == pid  # signals for our terminal do not reach it
    one.close()
    eventually(lambda: health(two).holds["sessions"] == 1)
    two.close()
    eventually(lambda: gone(pid))
    assert left_over(path) == set()
    assert "ready" in log_path(path).read_text()


def test_pages_go_through_it(path: Path) -> None:
    buffer = bytearray(range(64)) * 100
    engine = engine_on(connect_or_start(CONFIG, path, "worker"), buffer)
    buffer[64 * 50 :] = bytes(64 * 50)
    assert engine.store(TOKENS, np.arange(12)).all()
    other = engine_on(connect_or_start(CONFIG, path, "other"), buffer)
    eventually(lambda: other.lookup(TOKENS) == 24)
    assert other.retrieve(TOKENS, np.arange(60, 72)).all()
    assert buffer[64 * 60 : 64 * 72] == bytes(range(64)) * 12
    assert not any(buffer[64 * 72 :])
    assert other.health().holds["holds"] == 0
    engine.close()
    other.close()


CHILD = textwrap.dedent("""
    import sys, time
    from lmkv.service import connect_or_start
    from lmkv.service.wire import peer
    client = connect_or_start(sys.stdin.readline().strip(), sys.argv[1], "child", linger=float(sys.argv[2]))
    print(peer(client.connection()._sock)[0], flush=True)
    sys.stdin.read()
""")


def child(path: Path, linger: float = 0.0) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", CHILD, str(path), str(linger)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdin is not None
    process.stdin.write(CONFIG + "\n")
    process.stdin.flush()
    return process


def test_of_many_at_once_one_starts_it(path: Path) -> None:
    children = [child(path) for _ in range(5)]
    pids = set()
    for process in children:
        assert process.stdout is not None
        pids.add(int(process.stdout.readline()))
    assert len(pids) == 1
    assert log_path(path).read_text().count(" ready:") == 1
    for process in children:
        process.communicate(timeout=40)
    (pid,) = pids
    eventually(lambda: gone(pid))


def test_a_client_that_is_killed_loses_what_it_held_at_once(path: Path) -> None:
    watcher = connect_or_start(CONFIG, path, "watcher")
    process = child(path)
    assert process.stdout is not None
    process.stdout.readline()
    assert health(watcher).holds["sessions"] == 2
    process.kill()
    process.communicate(timeout=40)
    eventually(lambda: health(watcher).holds["sessions"] == 1)
    watcher.close()


def test_it_lives_on_without_the_process_that_started_it(path: Path) -> None:
    process = child(path, linger=30.0)
    assert process.stdout is not None
    pid = int(process.stdout.readline())
    process.kill()
    process.communicate(timeout=40)
    client = SocketClient(path, "late")
    assert service_of(client) == pid
    assert health(client).state == "ok"
    client.close()
    os.kill(pid, signal.SIGTERM)
    eventually(lambda: gone(pid))


def test_a_service_that_is_killed_costs_misses_only(path: Path) -> None:
    """Calls fail at once; the client starts another one, registers with it, and the engine goes on."""
    client = connect_or_start(CONFIG, path, "engine")
    engine = engine_on(client, bytearray(6400))
    assert engine.store(TOKENS, np.arange(12)).all()
    pid, incarnation, back = service_of(client), client.incarnation, threading.Event()
    client.on_reconnect(back.set)
    view = client.pool.view[:100]
    os.kill(pid, signal.SIGSTOP)
    waiting = client.call(Lookup(NAMESPACE.id, b"d" * 32))
    ticket = engine.begin_lookup(engine.chain())
    os.kill(pid, signal.SIGKILL)
    assert isinstance(waiting.exception(40), ClosedError)
    hit = ticket.wait(40)
    assert hit is not None
    assert hit.tokens == 0
    assert len(bytes(view)) == 100  # copying from the dead one's memory does no harm
    assert back.wait(40)
    assert client.incarnation != incarnation
    assert service_of(client) != pid
    assert engine.lookup(TOKENS) == 0
    assert engine.store(TOKENS, np.arange(12)).all()
    assert engine.lookup(TOKENS) == 24
    engine.close()


def test_a_service_that_cannot_start_says_why(path: Path) -> None:
    with pytest.raises(ConfigError, match="status 2") as e:
        ensure_service(CONFIG.replace("1MiB", "900TiB"), path)
    assert e.value.kind == "start"
    assert "pool.size" in str(e.value)
    with pytest.raises(ConfigError, match="chunk_tokenz"):
        ensure_service("chunk_tokenz: 3\n", path)


def test_a_second_service_on_the_same_socket_is_refused(path: Path) -> None:
    client = connect_or_start(CONFIG, path, "one")
    second = subprocess.run(
        [sys.executable, "-m", "lmkv.service", "--config-file", "-", "--socket", str(path)],
        input=CONFIG,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert second.returncode == 2
    assert "listens at" in second.stderr
    assert health(client).state == "ok"
    client.close()


def test_the_child_gets_our_modules_and_not_the_engines_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", ["", "somewhere", *sys.path])
    environment = spawn_module._environment(
        {"OMP_NUM_THREADS": "1", "KMP_AFFINITY": "x", "LMKV_POOL__SIZE": "1GiB", "LANG": "C", "PYTHONPATH": "old"}
    )
    first, *_ = environment["PYTHONPATH"].split(os.pathsep)
    assert Path(first).is_absolute()
    assert first.endswith("somewhere")
    assert sorted(environment) == ["LANG", "PYTHONPATH", "PYTHONSAFEPATH"]


def test_a_pinned_engine_does_not_pin_the_service(path: Path) -> None:
    every = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(every)})
    try:
        client = connect_or_start(CONFIG, path, "pinned")
    finally:
        os.sched_setaffinity(0, every)
    assert os.sched_getaffinity(service_of(client)) >= every
    client.close()


def test_starting_loads_no_torch() -> None:
    code = "import sys; import lmkv.service, lmkv.service.server, lmkv.engine; print('torch' in sys.modules)"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert out.stdout.strip() == "False"
