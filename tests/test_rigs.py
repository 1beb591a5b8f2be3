"""The rigs do what they say: a fault that does not happen would make every test of it pass."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from typing import TYPE_CHECKING

import pytest
from proxy_rig import FaultProxy
from redis_rig import Cluster, RedisServer, Sentinels, has_tls
from s3_rig import JuiceGateway, Moto, client, make_bucket

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

HERE = "127.0.0.1"


@pytest.fixture
def echo() -> Iterator[int]:
    """A port where everything comes back."""

    def answer(link: socket.socket) -> None:
        with link:
            try:
                while data := link.recv(65536):
                    link.sendall(data)
            except OSError:
                return

    def serve() -> None:
        while True:
            try:
                link, _ = listener.accept()
            except OSError:
                return
            threading.Thread(target=answer, args=[link], daemon=True).start()

    with socket.create_server((HERE, 0)) as listener:
        threading.Thread(target=serve, daemon=True).start()
        yield listener.getsockname()[1]
        listener.shutdown(socket.SHUT_RDWR)


@pytest.fixture
def proxy(echo: int) -> Iterator[FaultProxy]:
    with FaultProxy(echo) as made:
        yield made


def connect(proxy: FaultProxy, seconds: float = 10.0) -> socket.socket:
    return socket.create_connection((HERE, proxy.port), seconds)


def say(link: socket.socket, data: bytes) -> bytes:
    """What comes back, until as much has come or the connection ends."""
    sender = threading.Thread(target=_send, args=[link, data])
    sender.start()
    back = bytearray()
    try:
        while len(back) < len(data) and (more := link.recv(65536)):
            back += more
    finally:
        sender.join()
    return bytes(back)


def _send(link: socket.socket, data: bytes) -> None:
    try:
        link.sendall(data)
    except OSError:
        return


def test_proxy_passes_everything(proxy: FaultProxy) -> None:
    data = os.urandom(3_000_000)
    with connect(proxy) as link, connect(proxy) as other:
        assert say(link, data) == data
        assert say(other, b"x") == b"x"
        assert proxy.live == 2
    assert (proxy.accepted, proxy.bytes_up, proxy.bytes_down) == (2, 3_000_001, 3_000_001)


def test_proxy_delays_and_throttles_open_connections(proxy: FaultProxy) -> None:
    with connect(proxy) as link:
        proxy.delay(0.2)
        begin = time.monotonic()
        assert len(say(link, bytes(2_000_000))) == 2_000_000
        assert 0.4 <= time.monotonic() - begin < 5.0, "once for each direction, not for each piece"
        proxy.heal()
        proxy.throttle(1_000_000)
        begin = time.monotonic()
        assert len(say(link, bytes(500_000))) == 500_000
        assert time.monotonic() - begin >= 0.45


def test_proxy_cuts(proxy: FaultProxy) -> None:
    with connect(proxy) as link:
        proxy.cut_after(1000)
        assert len(say(link, bytes(5000))) < 1000
    proxy.heal()
    with connect(proxy) as link:
        assert say(link, b"well") == b"well"


def test_proxy_is_silent(proxy: FaultProxy) -> None:
    with connect(proxy, 0.3) as link:
        proxy.silence()
        with pytest.raises(TimeoutError):
            say(link, b"x")
        with connect(proxy, 0.3) as new, pytest.raises(TimeoutError):
            say(new, b"x")
        proxy.heal()
        assert link.recv(1) == b"", "it has lost a byte, so it is of no use any more"
    with connect(proxy) as link:
        assert say(link, b"well") == b"well"


def test_proxy_resets(proxy: FaultProxy) -> None:
    with connect(proxy) as link:
        assert say(link, b"x") == b"x"
        proxy.reset()
        with pytest.raises(ConnectionResetError):
            link.recv(1)
        with connect(proxy) as new, pytest.raises(ConnectionResetError):
            say(new, b"x")


def test_proxy_talks_nonsense(proxy: FaultProxy) -> None:
    with connect(proxy) as link:
        proxy.garbage()
        back = say(link, b"x" * 100)
        assert len(back) == 100
        assert back != b"x" * 100


def test_proxy_refuses(proxy: FaultProxy) -> None:
    with connect(proxy) as link:
        assert say(link, b"x") == b"x"
        proxy.refuse()
        assert link.recv(1) == b""
        with pytest.raises(ConnectionRefusedError):
            connect(proxy)
    proxy.heal()
    with connect(proxy) as link:
        assert say(link, b"well") == b"well"


def test_redis(tmp_path: Path) -> None:
    with RedisServer(tmp_path, password="a@b:c", extra=["--maxmemory", "64mb"]) as server:
        assert server.cli("SET", "k", "v") == "OK"
        assert server.facts("memory")["maxmemory"] == str(64 << 20)
        pid = server.pid
        server.restart()
        assert server.cli("GET", "k") == "", "it keeps nothing"
        assert server.pid != pid
    assert not server.running


def test_redis_with_tls(tmp_path: Path) -> None:
    if not has_tls():
        pytest.skip("this redis-server is built without TLS")
    with RedisServer(tmp_path, tls=True, client_certificate=True) as server:
        assert server.cli("PING") == "PONG"
        with socket.create_connection((HERE, server.port), 5) as plain, contextlib.suppress(ConnectionResetError):
            plain.sendall(b"PING\r\n")
            assert not plain.recv(5).startswith(b"+PONG")


def test_redis_sentinels(tmp_path: Path) -> None:
    with Sentinels(tmp_path, password="secret") as group:
        assert group.primary() == group.first.port
        group.fail_over()
        assert group.primary() == group.second.port


def test_redis_cluster(tmp_path: Path) -> None:
    with Cluster(tmp_path) as cluster:
        owner = cluster.owner("k")
        assert owner.cli("SET", "k", "v") == "OK"


@pytest.mark.parametrize("kind", [JuiceGateway, Moto])
def test_s3(kind: Callable[[Path], JuiceGateway | Moto], tmp_path: Path) -> None:
    pytest.importorskip("boto3")
    with kind(tmp_path) as server:
        bucket = make_bucket(server)
        with contextlib.closing(client(server)) as s3:
            s3.put_object(Bucket=bucket, Key="k", Body=b"v" * 100)
            assert s3.get_object(Bucket=bucket, Key="k", Range="bytes=10-19")["Body"].read() == b"v" * 10
        server.restart()
    assert not server.running
