"""Server and client over a real socket, with a scripted session behind them."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import random
import socket
import stat
import struct
import threading
import time
from concurrent.futures import Future, wait
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from lmkv.errors import ClosedError, ConfigError, LmkvError, ProtocolError
from lmkv.memory import Pool
from lmkv.service import connection as connection_module
from lmkv.service import files, peer, server, wire
from lmkv.service.client import SocketClient
from lmkv.service.protocol import (
    Clear,
    Done,
    GetHealth,
    HealthReport,
    Hello,
    Lookup,
    Observe,
    Ok,
    Pin,
    Refused,
    Register,
    Release,
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
        self.config = SimpleNamespace(chunk_tokens=4, tail="pages")
        self.pool = Pool.create(1 << 16, hugepages="off", prefault=False)
        self.tiers = ("ram", "disk")
        self.sessions: list[FakeSession] = []
        self.closed = False

    def open_session(self, name: str) -> FakeSession:
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


# --- talking ---------------------------------------------------------------------------------------------------------


def test_calls_are_answered_and_the_pool_is_shared(served: Served, client: SocketClient) -> None:
    report = client.call(GetHealth()).result(10)
    assert isinstance(report, HealthReport)
    assert (client.welcome.chunk_tokens, client.welcome.tail, client.welcome.tiers) == (4, "pages", ("ram", "disk"))
    client.pool.view[100:103] = b"kv!"
    assert bytes(served.storage.pool.view[100:103]) == b"kv!"
    assert client.send(Done(9))
    client.call(GetHealth()).result(10)
    assert Done(9) in served.storage.sessions[0].seen
    assert served.storage.sessions[0].name == "test"


def test_only_its_user_can_open_the_socket(served: Served, path: Path) -> None:
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_refusals_and_faults_cost_one_call(client: SocketClient) -> None:
    with pytest.raises(ConfigError, match="no such tier") as refused:
        client.call(Clear()).result(10)
    assert refused.value.kind == "unknown-tier"
    with pytest.raises(LmkvError, match="a fault of ours") as fault:
        client.call(Unpin(b"", b"")).result(10)
    assert fault.value.kind == "internal"
    with pytest.raises(ProtocolError, match="no answer"):
        client.call(Release(1)).result(10)  # type: ignore[arg-type]
    assert client.call(GetHealth()).result(10)


def test_a28_late_answer(client: SocketClient) -> None:
    """An answer goes to its own call, whenever it comes; one that nobody waits for any more goes nowhere."""
    slow = client.call(Pin(b"", BLOB, 0.3))
    with pytest.raises(TimeoutError):
        slow.result(0.01)
    given_up = client.call(Pin(b"", BLOB * 2, 0.2))
    assert given_up.cancel()
    quick = client.call(Pin(b"", BLOB * 3, 0.0))
    assert quick.result(10) == Ok(3)
    assert slow.result(10) == Ok(1)
    assert client.call(Pin(b"", BLOB * 4, 0.0)).result(10) == Ok(4)


def test_many_threads_share_one_client(client: SocketClient) -> None:
    wrong: list[Any] = []

    def work(seed: int) -> None:
        for n in range(50):
            count = (seed * 50 + n) % 97
            if client.call(Lookup(b"", BLOB * count)).result(20) != Ok(32 * count):
                wrong.append(count)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_two_clients_have_a_session_each(served: Served, client: SocketClient) -> None:
    other = SocketClient(served.path, "other", prefault=False)
    assert other.call(GetHealth()).result(10)
    assert client.call(GetHealth()).result(10)
    other.close()
    first, second = served.storage.sessions
    assert second.closed.wait(10)
    assert not first.closed.is_set()
    with pytest.raises(ClosedError):
        other.call(GetHealth()).result(0)
    assert client.call(GetHealth()).result(10)


def test_large_messages_go_through_small_buffers(client: SocketClient) -> None:
    calls = [client.call(Lookup(b"", BLOB * 60_000)) for _ in range(10)]
    assert [c.result(30) for c in calls] == [Ok(32 * 60_000)] * 10


# --- who may come ----------------------------------------------------------------------------------------------------


def test_another_version_is_told_what_to_do(served: Served) -> None:
    with raw(served.path, hello=False) as sock:
        sock.sendall(wire.encode(0, Hello(99, 1, "future")))
        _, reply = wire.decode_reply(drained(sock)[4:])
    assert isinstance(reply, Refused)
    assert reply.kind == "version"
    assert "version 1" in reply.message
    assert "version 99" in reply.message
    assert "same lmkv" in reply.message
    assert not served.storage.sessions


def test_another_version_of_the_service_is_refused(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection_module, "VERSION", 7)
    service = Served(path)
    with pytest.raises(ProtocolError, match="speaks version 1 of the protocol, this client version 7"):
        SocketClient(service.path, "old")
    service.stop()


def test_another_user_is_refused_on_both_sides(path: Path, served: Served, tmp_path: Path) -> None:
    with pytest.raises(ProtocolError, match=f"belongs to user {os.geteuid() + 1}"):
        SocketClient(served.path, "test", credentials=lambda _: (1, os.geteuid() + 1))

    async def refused() -> bytes:
        storage = FakeStorage()
        listener = files.listen(str(tmp_path / "t"))
        one = server.Server(storage, listener, credentials=lambda _: (1, os.geteuid() + 1))  # type: ignore[arg-type]
        with raw(str(tmp_path / "t"), hello=False) as sock:
            sock.setblocking(False)
            data = await asyncio.get_running_loop().sock_recv(sock, 4096)
        await one.close()
        assert not storage.sessions
        await storage.close(1)
        return data

    _, reply = wire.decode_reply(asyncio.run(refused())[4:])
    assert isinstance(reply, Refused)
    assert reply.kind == "peer"


def test_nobody_there_is_said_at_once(path: Path) -> None:
    with pytest.raises(ClosedError, match="no lmkv service"):
        SocketClient(path, "test")


# --- hostile and broken ends -----------------------------------------------------------------------------------------


def hostile(rng: random.Random) -> bytes:
    """Bytes that a broken or malicious client might send."""
    good = wire.encode(rng.randrange(99), rng.choice([Lookup(b"n" * 16, BLOB), Clear(), Observe({"a": 1.0}), Done(1)]))
    kind = rng.randrange(6)
    if kind == 0:
        return rng.randbytes(rng.randrange(1, 80))
    if kind == 1:
        return wire.LENGTH.pack(rng.randrange(1 << 32)) + rng.randbytes(rng.randrange(40))
    if kind == 2:  # the length fits, the rest does not
        body = rng.randbytes(rng.randrange(1, 60))
        return wire.LENGTH.pack(len(body)) + body
    if kind == 3:  # one wrong byte in a good message
        data = bytearray(good)
        data[rng.randrange(4, len(data))] ^= 1 << rng.randrange(8)
        return bytes(data)
    if kind == 4:
        return struct.pack("<Q", 1 << 60) + b"\x80\x04\x95"
    return good


def test_a43_hostile_bytes(served: Served, client: SocketClient) -> None:
    """10 000 messages, with and without a handshake: those connections are closed, the others served."""
    rng = random.Random(43)
    sent, rounds = 0, 0
    while sent < 10_000:
        with raw(served.path, hello=rng.random() < 0.8) as sock:
            try:
                for _ in range(rng.randrange(1, 60)):
                    sock.sendall(hostile(rng))
                    sent += 1
            except (BrokenPipeError, ConnectionResetError):
                pass
        rounds += 1
        if rounds % 20 == 0:
            assert client.call(Pin(b"", BLOB, 0.0)).result(20) == Ok(1)
    assert client.call(Pin(b"", BLOB, 0.0)).result(20) == Ok(1)
    assert client.connected


def test_who_talks_nonsense_is_told_and_thrown_out(served: Served, client: SocketClient) -> None:
    with raw(served.path) as sock:
        sock.sendall(wire.LENGTH.pack(1 << 31) + b"abc")
        call, reply = wire.decode_reply(drained(sock)[4:])
    assert call == 0
    assert isinstance(reply, Refused)
    assert "claims 2147483648 bytes" in reply.message
    assert client.call(GetHealth()).result(10)


def test_who_is_thrown_out_may_still_be_copying(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer, "GRACE_SECONDS", 0.3)
    with raw(served.path) as sock:
        sock.sendall(wire.encode(1, Hello(1, 1, "again")))
        drained(sock)
        session = served.storage.sessions[0]
        assert not session.closed.is_set()
        assert session.closed.wait(10)


def test_silence_in_the_handshake_ends_it(
    served: Served, client: SocketClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wire, "HANDSHAKE_SECONDS", 0.05)
    with raw(served.path, hello=False) as sock:
        sock.sendall(b"\x10\x00")
        assert drained(sock) == b""
    assert client.call(GetHealth()).result(10)


def test_who_does_not_read_is_not_read_either(
    served: Served, client: SocketClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Answers that nobody fetches do not pile up, and the others are served."""
    monkeypatch.setattr(peer, "OUT_BYTES", 1 << 16)
    request = wire.encode(1, GetHealth())
    with raw(served.path) as sock:
        sock.setblocking(False)
        session = served.storage.sessions[1]
        sent, before = 0, -1
        while before != len(session.seen):  # until nothing moves any more
            before = len(session.seen)
            with contextlib.suppress(BlockingIOError):
                while True:
                    sent += sock.send(request * 10_000)
            assert client.call(GetHealth()).result(20)
            time.sleep(0.2)
        assert before < sent // len(request)


def test_what_waits_for_a_tier_is_bounded(
    served: Served, client: SocketClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peer, "UNDER_WAY", 10)
    calls = [client.call(Pin(b"", BLOB, 0.1)) for _ in range(35)]
    time.sleep(0.05)
    assert len(served.storage.sessions[0].seen) <= 10
    assert [c.result(20) for c in calls] == [Ok(1)] * 35


def test_a_service_that_does_not_read_blocks_no_caller(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its socket is full: calls return at once, and when too much waits it counts as gone."""
    monkeypatch.setattr(connection_module, "BACKLOG_BYTES", 4 << 20)
    pool = Pool.create(4096, prefault=False)
    listener = files.listen(str(path))
    listener.setblocking(True)
    taken: list[socket.socket] = []

    def welcome() -> None:
        sock, _ = listener.accept()
        taken.append(sock)
        storage = SimpleNamespace(pool=pool, tiers=(), config=SimpleNamespace(chunk_tokens=4, tail="none"))
        message = wire.encode(0, server.welcome_of(storage))  # type: ignore[arg-type]
        socket.send_fds(sock, [message], [pool.fd])

    thread = threading.Thread(target=welcome)
    thread.start()
    client = SocketClient(path, "test", prefault=False)
    thread.join()
    calls: list[Future[Any]] = []
    while client.connected and len(calls) < 1000:
        calls.append(client.call(Lookup(b"", BLOB * 4000)))
    assert 30 < len(calls) < 1000
    wait(calls, 20)
    assert all(isinstance(c.exception(0), ClosedError) for c in calls)
    client.close()
    for sock in (*taken, listener):
        sock.close()
    pool.close()


# --- the end ---------------------------------------------------------------------------------------------------------


def test_a42_stop(path: Path) -> None:
    """With calls under way: it ends, they fail, nothing is left behind; closing again does no harm."""
    service = Served(path)
    client = SocketClient(service.path, "test", prefault=False)
    slow = client.call(Pin(b"", BLOB, 60))
    eventually(lambda: bool(service.storage.sessions[0].seen))
    service.stop()
    assert isinstance(slow.exception(10), ClosedError)
    assert service.error is None
    assert service.storage.closed
    assert service.storage.sessions[0].closed.is_set()
    assert list(path.parent.iterdir()) == []
    with pytest.raises(ClosedError):
        client.call(GetHealth()).result(0)
    assert not client.send(Done(1))
    client.close()
    client.close()


def test_the_mapping_outlives_service_and_client(path: Path) -> None:
    service = Served(path)
    client = SocketClient(service.path, "test", prefault=False)
    view = client.pool.view[:4]
    view[:] = b"kept"
    service.stop()
    eventually(lambda: not client.connected)
    client.close()
    assert bytes(view) == b"kept"


def test_a_session_does_not_end_while_its_client_copies(served: Served) -> None:
    client = SocketClient(served.path, "test", prefault=False)
    session = served.storage.sessions[0]
    with client.connection() as link:
        client.close()
        assert not client.connected
        assert link.intact() is False
        assert not session.closed.wait(0.2)
    assert session.closed.wait(10)


def test_a_client_sees_that_its_session_has_ended(served: Served, client: SocketClient) -> None:
    link = client.connection()
    assert link.intact()
    session = served.storage.sessions[0]
    ours = next(o for o in gc.get_objects() if isinstance(o, peer.Peer) and o._session is session)
    ended: list[bool] = []
    session.close = lambda: ended.append(link.intact())  # type: ignore[method-assign]
    served.loop.call_soon_threadsafe(ours.connection_lost, None)
    eventually(lambda: bool(ended))
    assert ended == [False]


def test_linger_counts_from_the_last_client(path: Path) -> None:
    service = Served(path, linger=0.2)
    one = SocketClient(service.path, "one", prefault=False)
    two = SocketClient(service.path, "two", prefault=False)
    one.close()
    time.sleep(0.4)
    assert two.call(GetHealth()).result(10)
    two.close()
    three = SocketClient(service.path, "three", prefault=False)  # within the linger
    time.sleep(0.4)
    assert three.call(GetHealth()).result(10)
    three.close()
    service.thread.join(20)
    assert not service.thread.is_alive()
    assert service.error is None
    assert list(path.parent.iterdir()) == []


def test_a_service_that_nobody_comes_to_goes(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "FIRST_CLIENT_SECONDS", 0.2)
    service = Served(path, linger=0.0)
    files.answers(service.path)  # a look is no client
    service.thread.join(20)
    assert not service.thread.is_alive()
    assert service.storage.closed


# --- the path --------------------------------------------------------------------------------------------------------


def test_a_stale_socket_is_replaced(path: Path) -> None:
    stale = socket.socket(socket.AF_UNIX)
    stale.bind(str(path))
    stale.close()
    assert path.exists()
    assert not files.answers(str(path))
    service = Served(path)
    client = SocketClient(path, "test", prefault=False)
    assert client.call(GetHealth()).result(10)
    client.close()
    service.stop()


def test_a_live_socket_is_left_alone(served: Served, client: SocketClient, path: Path) -> None:
    second = Served(path)
    second.thread.join(20)
    assert isinstance(second.error, ConfigError)
    assert second.error.kind == "in-use"
    assert "listens" in str(second.error)
    assert client.call(GetHealth()).result(10)


def test_a_path_that_cannot_be_is_explained(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    with pytest.raises(ConfigError, match="no socket"):
        files.listen(str(tmp_path / "file"))
    assert (tmp_path / "file").read_text() == "mine"
    with pytest.raises(ConfigError, match="longer than 107 bytes"):
        files.listen(str(tmp_path / ("x" * 120)))
    with pytest.raises(ConfigError, match="errno"):
        files.listen(str(tmp_path / "file" / "s"))


def test_the_default_socket_is_private(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    one, two = files.default_socket("a"), files.default_socket("b")
    assert one != two
    assert one == files.default_socket("a")
    assert one.parent == two.parent
    assert stat.S_IMODE(one.parent.stat().st_mode) == 0o700
    one.parent.chmod(0o777)
    with pytest.raises(ConfigError, match="nobody else"):
        files.default_socket("a")


def test_a_lock_has_one_holder_and_leaves_no_file(tmp_path: Path) -> None:
    where = str(tmp_path / "lock")
    one, two = files.Lock(where), files.Lock(where)
    assert one.acquire()
    assert not two.acquire()
    one.release()
    one.release()
    assert not (tmp_path / "lock").exists()
    with two:
        assert two.wait(5)
        assert not one.acquire()
    assert list(tmp_path.iterdir()) == []


# --- coming back -----------------------------------------------------------------------------------------------------


def test_a29_quick_restart(path: Path) -> None:
    """Another service at the same address: noticed, registered again before anything else, callbacks run."""
    service = Served(path)
    client = SocketClient(service.path, "test", prefault=False)
    called = threading.Event()
    client.on_reconnect(lambda: 1 / 0)  # type: ignore[arg-type,return-value]  costs the others nothing
    client.on_reconnect(called.set)
    first = client.incarnation
    client.call(Register("one")).result(10)
    client.call(Register("two")).result(10)
    link = client.connection()
    service.stop()
    eventually(lambda: not client.connected)
    late = client.call(Register("three"))
    assert isinstance(late.exception(0), ClosedError)
    again = Served(path)
    eventually(lambda: client.connected)
    assert client.incarnation != first
    assert called.wait(10)
    assert [m.namespace_json for m in again.storage.sessions[0].seen] == ["one", "two", "three"]
    assert client.call(GetHealth()).result(10)
    assert not link.alive
    assert not link.send(Done(1))
    assert isinstance(link.call(GetHealth()).exception(0), ClosedError)
    client.close()
    again.stop()


def test_a_client_starts_what_has_gone(path: Path) -> None:
    services = [Served(path)]

    def revive() -> None:
        if len(services) == 1:
            services.append(Served(path))

    client = SocketClient(path, "test", prefault=False, revive=revive)
    services[0].stop()
    eventually(lambda: len(services) == 2 and client.connected)
    assert client.call(GetHealth()).result(10)
    client.close()
    services[1].stop()
