"""A service in a thread of the test, on a real socket, with a scripted session behind it."""

from __future__ import annotations

import asyncio
import os
import secrets
import socket
import threading
import time
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from lmkv.errors import ConfigError
from lmkv.memory import Pool
from lmkv.observe.clients import NOBODY, Who
from lmkv.service import files, server, wire
from lmkv.service.client import SocketClient
from lmkv.service.protocol import (
    Clear,
    GetHealth,
    HealthReport,
    Hello,
    Lookup,
    Ok,
    Pin,
    Register,
    Unpin,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

BLOB = b"d" * 32


class FakeSession:
    def __init__(self, storage: FakeStorage, name: str) -> None:
        self.storage, self.name = storage, name
        self.seen: list[Any] = []
        self.closed = threading.Event()
        storage.sessions.append(self)

    def handle(self, message: Any) -> Any:
        self.seen.append(message)
        match message:
            case GetHealth():
                return HealthReport("ok", {}, {"sessions": len(self.storage.sessions)}, {})
            case Register():
                return Ok()
            case Pin():  # answered after so many seconds, with the number of digests
                return self.later(message)
            case Clear():
                raise ConfigError("there is no such tier", kind="unknown-tier")
            case Unpin():
                raise KeyError("a fault of ours")
            case Lookup():
                return Ok(len(message.digests))
        return None

    async def later(self, message: Pin) -> Ok:
        await asyncio.sleep(message.seconds or 0)
        return Ok(len(message.digests) // 32)

    def close(self) -> None:
        self.closed.set()


class FakeStorage:
    def __init__(self) -> None:
        self.config = SimpleNamespace(chunk_tokens=4, tail="pages", leases=SimpleNamespace(seconds=60.0))
        self.pool = Pool.create(1 << 16, hugepages="off", prefault=False)
        self.tiers = ("ram", "disk")
        self.asks = False
        self.name = "rig"
        self.incarnation = secrets.randbits(62) + 1
        self.sessions: list[FakeSession] = []
        self.who: list[Who] = []
        self.closed = False

    def open_session(self, name: str, who: Who = NOBODY) -> FakeSession:
        self.who.append(who)
        return FakeSession(self, name)

    async def close(self, deadline: float) -> None:
        self.closed = True
        self.pool.close()


class Served:
    """A service in a thread of the test, on a socket like any other."""

    def __init__(self, path: Path, **options: Any) -> None:
        self.path = str(path)
        self.storage = FakeStorage()
        self.error: BaseException | None = None
        self.loop = asyncio.new_event_loop()
        self.stopping = asyncio.Event()
        self.thread = threading.Thread(target=self._run, args=(options,), daemon=True)
        self.thread.start()
        until = time.monotonic() + 20
        while not files.answers(self.path) and self.thread.is_alive() and time.monotonic() < until:
            time.sleep(0.002)

    def _run(self, options: dict[str, Any]) -> None:
        async def start(config: Any) -> Any:
            del config
            return self.storage

        try:
            serving = server.serve(None, self.path, stop=self.stopping, start=start, **options)  # type: ignore[arg-type]
            self.loop.run_until_complete(serving)
        except BaseException as e:  # noqa: BLE001  whatever it is, the test looks at it
            self.error = e
        finally:
            self.loop.close()

    def stop(self) -> None:
        if self.thread.is_alive():
            self.loop.call_soon_threadsafe(self.stopping.set)
            self.thread.join(20)
        assert not self.thread.is_alive()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "s"


@pytest.fixture
def served(path: Path) -> Iterator[Served]:
    service = Served(path)
    yield service
    service.stop()


@pytest.fixture
def client(served: Served) -> Iterator[SocketClient]:
    one = SocketClient(served.path, "test", prefault=False)
    yield one
    one.close()


def eventually(condition: Callable[[], bool], seconds: float = 20.0) -> None:
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.002)


def raw(path: str, *, hello: bool = True) -> socket.socket:
    """A connection without our client."""
    sock = socket.socket(socket.AF_UNIX)
    sock.settimeout(20)
    sock.connect(path)
    if hello:
        sock.sendall(wire.encode(0, Hello(1, os.getpid(), "raw")))
        _, fd = wire.receive_welcome(sock, time.monotonic() + 20)
        assert fd is not None
        os.close(fd)
        sock.settimeout(20)
    return sock


def drained(sock: socket.socket) -> bytes:
    """Everything until the end of the stream."""
    data = b""
    try:
        while more := sock.recv(65536):
            data += more
    except ConnectionResetError:
        pass
    return data
