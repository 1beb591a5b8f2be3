"""The way to the service: started apart from the engine, revived when killed, or somebody else's."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import struct
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from fake_vllm import stack

from lmkv.errors import ConfigError
from lmkv_vllm.link import Link, stack_config
from lmkv_vllm.settings import Settings
from lmkv_vllm.start import start_apart

if TYPE_CHECKING:
    from collections.abc import Iterator

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
    return Settings(config=config)


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
