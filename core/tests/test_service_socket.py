"""Server and client over a real socket: calls, who may come, who misbehaves."""

from __future__ import annotations

import asyncio
import contextlib
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

import msgspec
import pytest
from service_rig import BLOB, FakeStorage, Served, drained, raw

from lmkv.errors import ClosedError, ConfigError, LmkvError, ProtocolError
from lmkv.memory import Pool
from lmkv.observe.clients import NOBODY, Who
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
    Release,
    Unpin,
)

if TYPE_CHECKING:
    from pathlib import Path

# --- talking ---------------------------------------------------------------------------------------------------------


def test_calls_are_answered_and_the_pool_is_shared(served: Served, client: SocketClient) -> None:
    report = client.call(GetHealth()).result(10)
    assert isinstance(report, HealthReport)
    assert (client.welcome.chunk_tokens, client.welcome.tail, client.welcome.tiers) == (4, "pages", ("ram", "disk"))
    assert client.welcome.lease_seconds == 60.0
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


def test_a_client_says_who_it_is(served: Served) -> None:
    """Also one with names that are no names: they are cut and cleaned before they are sent, and again on arrival."""
    wild = Who("m\udcff" + "\x00" * 5000, "0", "engine")
    for who in (Who("model", "1", "engine"), wild):
        SocketClient(served.path, "rank", prefault=False, who=who).close()
    first, second = served.storage.who
    assert first == Who("model", "1", "engine")
    assert len(second.model) == 128
    assert second.instance == "engine"
    with socket.socket(socket.AF_UNIX) as sock:  # an older client, whose message has no such fields
        sock.settimeout(20)
        sock.connect(served.path)
        old = msgspec.msgpack.encode([0, ["Hello", 1, 1, "old"]])
        sock.sendall(wire.LENGTH.pack(len(old)) + old)
        _, fd = wire.receive_welcome(sock, time.monotonic() + 20)
        assert fd is not None
        os.close(fd)
    assert served.storage.who[2] == NOBODY


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


def test_a_first_message_is_short(served: Served) -> None:
    """Who has not said who he is gets no memory for what he says that he will send."""
    with raw(served.path, hello=False) as sock:
        sock.sendall(wire.LENGTH.pack(wire.HELLO_LIMIT + 1))  # and nothing of it
        call, reply = wire.decode_reply(drained(sock)[4:])
    assert call == 0
    assert isinstance(reply, Refused)
    assert f"claims {wire.HELLO_LIMIT + 1} bytes" in reply.message


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
        config = SimpleNamespace(chunk_tokens=4, tail="none", leases=SimpleNamespace(seconds=60.0))
        storage = SimpleNamespace(pool=pool, tiers=(), asks=False, config=config, incarnation=7, name="")
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
