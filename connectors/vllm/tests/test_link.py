"""The way to the service: started apart from the engine, revived when killed, or somebody else's."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import struct
import tempfile
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from fake_vllm import CHUNK, FakeVLLM, stack

from lmkv.errors import ConfigError
from lmkv.service.protocol import GetHealth, HealthReport
from lmkv_vllm.link import Link, stack_config
from lmkv_vllm.settings import Settings
from lmkv_vllm.start import start_apart

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from lmkv.service import SocketClient


@pytest.fixture
def place() -> Iterator[Path]:
    """A short path: unix sockets take no long ones."""
    folder = Path(tempfile.mkdtemp(prefix="lmkv-l-"))
    yield folder
    until = time.monotonic() + 15
    while any(folder.glob("*.sock")):
        assert time.monotonic() < until, "a service does not end"
        time.sleep(0.05)
    shutil.rmtree(folder)


def settings(place: Path, **more: Any) -> Settings:
    config = {
        "pool": {"size": "4MiB", "prefault": False, "hugepages": "off"},
        "tiers": [{"name": "ram", "backend": "cpu", "capacity": "2MiB"}],
        "service": {"socket": str(place / "s.sock")},
        **more,
    }
    return Settings(config=config, lookup_deadline=10.0)


def service_pid(client: Any) -> int:
    real: SocketClient = client
    raw = real.connection()._sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    return int(struct.unpack("3i", raw)[0])


def ancestors(pid: int) -> list[int]:
    found = []
    while pid > 1:
        pid = int(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[1])
        found.append(pid)
    return found


def test_started_apart_shared_and_revived(place: Path) -> None:
    """Two processes' links share one service, which is nobody's descendant, and comes back when it is killed."""
    given = settings(place)
    links = [Link(given, stack_config(given, 1), f"link-{n}", copies=False) for n in range(2)]
    try:
        assert all(link.wait(60) for link in links)
        first, second = (link.client for link in links)
        assert first is not None
        assert second is not None
        pid = service_pid(first)
        assert service_pid(second) == pid
        assert os.getpid() not in ancestors(pid)
        incarnation = first.incarnation
        os.kill(pid, signal.SIGKILL)
        until = time.monotonic() + 60
        while not all(client.connected and client.incarnation != incarnation for client in (first, second)):
            assert time.monotonic() < until, "the service does not come back"
            time.sleep(0.05)
        assert service_pid(first) != pid
    finally:
        for link in links:
            link.close()


def test_what_cannot_start_says_why(place: Path) -> None:
    """A folder that cannot be: the start of the engine is refused with the service's own words."""
    (place / "file").write_text("no folder")
    disk = {"name": "disk", "backend": "disk", "capacity": "1MiB", "options": {"path": str(place / "file")}}
    given = settings(place, tiers=[disk])
    link = Link(given, stack_config(given, 1), "link", copies=False)
    try:
        with pytest.raises(ConfigError, match="is no directory"):
            link.wait(60)
    finally:
        link.close()


def test_operators_service_comes_later(place: Path) -> None:
    """The engine starts without cache, and gets it when there is one."""
    path = place / "operator.sock"
    link = Link(Settings(socket=str(path)), None, "link", copies=False)
    called: list[bool] = []
    link.when_ready(lambda: called.append(True))
    try:
        assert link.wait(0.1) is False
        assert link.client is None
        start_apart(stack().text, str(path), 1.0)
        assert link.wait(60)
        assert called == [True]
    finally:
        link.close()


def test_error_of_a_callback_is_the_links_fault(place: Path) -> None:
    given = settings(place)
    link = Link(given, stack_config(given, 1), "link", copies=False)

    def refuses() -> None:
        raise ConfigError("no")

    try:
        assert link.wait(60)
        link.when_ready(refuses)
        with pytest.raises(ConfigError, match="no"):
            link.wait(60)
    finally:
        link.close()


def test_ready_only_when_every_callback_has_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that comes just as the service is reached finds another thread calling: it does not say that all is done.

    An engine that was told so would begin without its cache, and miss all that it asks for until the end of the start.
    """
    reach, go, called = threading.Event(), threading.Event(), threading.Event()

    def connect(link: Link) -> Any:
        del link
        reach.wait(20)
        return SimpleNamespace(close=lambda: None)

    monkeypatch.setattr(Link, "_connect", connect)
    link = Link(Settings(), None, "link", copies=False)
    order: list[str] = []

    def slow() -> None:
        called.set()
        go.wait(20)
        order.append("slow")

    try:
        link.when_ready(slow)
        reach.set()
        assert called.wait(20)
        link.when_ready(lambda: order.append("quick"))
        assert link.wait(0.3) is False
        go.set()
        assert link.wait(20) is True
        assert order == ["slow", "quick"]
    finally:
        go.set()
        link.close()


@pytest.mark.slow
def test_restarts_in_a_row(place: Path) -> None:
    """Engine and service stop and start, or the service is killed, in any order: what was stored is always found."""
    given = settings(
        place,
        chunk_tokens=CHUNK,
        pool={"size": "8MiB", "prefault": False, "hugepages": "off"},
        tiers=[
            {"name": "ram", "backend": "cpu", "capacity": "4MiB"},
            {"name": "disk", "backend": "disk", "capacity": "16MiB", "options": {"path": str(place / "disk")}},
        ],
    )
    prompts = [list(range(100 * i, 100 * i + 17)) for i in range(1, 9)]
    engine = started(given)
    try:
        hits(engine, prompts)
        assert hits(engine, prompts) == [16] * len(prompts)
        until_written(engine, len(prompts))
        for way in ("stop", "kill", "stop", "kill", "stop at once", "stop"):
            if way == "kill":
                clients = [link.client for link in engine.links]
                before = clients[0].incarnation
                os.kill(service_pid(clients[0]), signal.SIGKILL)
                eventually(lambda: all(c.connected and c.incarnation != before for c in clients))  # noqa: B023  now
            else:
                engine.close()
                if way == "stop":
                    eventually(lambda: not list(place.glob("*.sock")))
                engine = started(given)
            assert hits(engine, prompts) == [16] * len(prompts), way
    finally:
        engine.close()


def started(given: Settings) -> FakeVLLM:
    """An engine that begins as vLLM does: the workers first, then the scheduler, which waits for its cache."""
    links = [Link(given, stack_config(given, 1), f"link-{n}", copies=n > 0) for n in range(2)]
    assert links[1].wait(60)
    engine = FakeVLLM(None, links=links, blocks=200, budget=64, settings=given)
    assert links[0].wait(60)
    return engine


def hits(engine: FakeVLLM, prompts: list[list[int]]) -> list[int]:
    return [engine.ask(prompt, max_tokens=2).external for prompt in prompts]


def until_written(engine: FakeVLLM, count: int) -> None:
    """Until the disk tier has a frame for each chunk of so many prompts, and their tails."""

    def frames() -> int:
        report = engine.links[0].client.call(GetHealth()).result(10)
        assert isinstance(report, HealthReport)
        return int(report.tiers["disk"]["frames"])

    eventually(lambda: frames() >= 5 * count)


def eventually(condition: Callable[[], bool], seconds: float = 60.0) -> None:
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.01)
