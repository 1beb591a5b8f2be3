"""What the section `peer` means: the port, the key, TLS, shares, and that a service with peers starts and stops."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from typing import TYPE_CHECKING, Any

import pytest
from peer_rig import KEY, SPACE, eventually, peer
from server_rig import make_certificates
from storage_rig import FRAME, chain

from lmkv.config import load_config
from lmkv.config.peer import PeerConfig, parse_address
from lmkv.errors import BackendError, ClosedError, ConfigError, ProtocolError
from lmkv.peer import listener as listening
from lmkv.peer import messages as m
from lmkv.peer import wire
from lmkv.peer.compare import differences
from lmkv.peer.handshake import Identity, tls_contexts
from lmkv.peer.listener import bind
from lmkv.peer.pace import BURST, Pace
from lmkv.peer.peers import STRANGERS, Peers
from lmkv.plugins import PluginHost
from lmkv.service.host import LocalClient, ThreadHost

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


# --- configuration ---------------------------------------------------------------------------------------------------


def faults(**settings: Any) -> str:
    with pytest.raises(ConfigError) as e:
        load_config({"peer": settings}, host=PluginHost.discover(), environ={})
    return str(e.value)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"listen": "10.0.0.5:7000"}, "peer.key: is required: peer.listen '10.0.0.5:7000' is not a loopback address"),
        ({"listen": "0.0.0.0:7000", "key": KEY}, "peer.advertise: is required"),
        ({"listen": "7000"}, "peer.listen: '7000' is not host:port"),
        ({"listen": "::1:7000"}, "in brackets"),
        ({"listen": "127.0.0.1:70000"}, "is not host:port"),
        ({"advertise": "host:0"}, "is not host:port"),
        ({"share": "2GiB"}, "is not a percentage"),
        ({"share": "0%"}, "more than 0%"),
        ({"sockets": 0}, "peer.sockets"),
        ({"tls": {"certificate": "a.pem"}}, "peer.tls.private_key: is required where TLS is on"),
        ({"transports": ["tpc"]}, "did you mean 'tcp'"),
        ({"node": "two words"}, "peer.node"),
        ({"keyy": "x"}, "did you mean 'key'"),
    ],
)
def test_faults_of_the_section_are_named(settings: dict[str, Any], said: str) -> None:
    assert said in faults(**settings)


def test_no_message_shows_the_key() -> None:
    for key in ("fifteen-letters", 123456789012345678, ["sixteen-letters-"]):
        text = faults(key=key, listen="10.0.0.5:7000", sockets=0)
        assert "peer.key" in text
        assert "fifteen" not in text.replace("sixteen", "")
        assert "sixteen" not in text
        assert "123456789" not in text
    config = load_config({"peer": {"key": KEY}}, host=PluginHost.discover(), environ={})
    shown = "".join(setting.value for setting in config.settings())
    assert KEY not in shown + repr(config) + repr(Identity("n", 1, KEY.encode()))


def test_the_port_is_refused_off_loopback_without_a_key() -> None:
    with pytest.raises(ConfigError, match=r"peer\.key"):
        bind("0.0.0.0", 0, keyed=False)
    bind("127.0.0.1", 0, keyed=False).close()
    bind("localhost", 0, keyed=False).close()
    bind("0.0.0.0", 0, keyed=True).close()
    with pytest.raises(ConfigError, match=r"peer\.listen: 192\.0\.2\.1:7000"):
        bind("192.0.2.1", 7000, keyed=True)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(ConfigError, match=f"127.0.0.1:{taken.getsockname()[1]}"):
            bind("127.0.0.1", taken.getsockname()[1], keyed=False)


def test_a_link_off_loopback_needs_the_key_too() -> None:
    peers = Peers(Identity("n", 1, b""))
    try:
        with pytest.raises(ConfigError, match=r"peer\.key"):
            peers.link("192.0.2.1:7000")
        with pytest.raises(ConfigError, match="host:port"):
            peers.link("192.0.2.1")
    finally:
        peers.close()
    peers.close()
    with pytest.raises(ClosedError):
        peers.link("127.0.0.1:7000")


def test_links_that_lead_nowhere_do_not_pile_up() -> None:
    peers = Peers(Identity("n", 1, b"k" * 32))
    try:
        friend = peers.link("10.0.0.1:7000")
        friend.incarnation = 7
        for number in range(3 * STRANGERS):
            peers.link(f"10.1.{number >> 8}.{number & 255}:7000")
        assert len(peers._links) <= STRANGERS + 1
        assert peers.link("10.0.0.1:7000") is friend
    finally:
        peers.close()


# --- TLS -------------------------------------------------------------------------------------------------------------


def certificates(folder: Path) -> dict[str, str]:
    """Files of a CA of its own and of a node's certificate that it has signed."""
    made = make_certificates(folder)
    return {"ca": str(made.ca), "certificate": str(made.cert), "private_key": str(made.key)}


@pytest.mark.anyio
async def test_tls(tmp_path: Path) -> None:
    ours, others, keys = certificates(tmp_path / "ours"), certificates(tmp_path / "others"), chain(range(16))
    async with (
        peer("a", key=KEY, tls=ours) as a,
        peer("b", key=KEY, tls=ours) as b,
        peer("c", key=KEY, tls=others) as c,
        peer("d", key=KEY) as d,
    ):
        b.store(keys)
        outcomes, _ = await a.pull(b, a.keys(keys))
        assert all(o.ok for o in outcomes)
        until = time.monotonic() + 20
        for stranger in (c, d):
            with pytest.raises((ClosedError, ProtocolError)):
                await stranger.on(stranger.link(b).has(SPACE.id, keys.digests, until))
            with pytest.raises((ClosedError, ProtocolError)):
                await a.on(a.link(stranger).has(SPACE.id, keys.digests, until))
        assert len(b.hall.sessions) == 1
        await eventually(b.at_rest)


@pytest.mark.anyio
async def test_slow_bytes_over_tls_are_no_way_to_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each comes in time, and all of them would take for ever: the threads that greet are few."""
    monkeypatch.setattr("lmkv.peer.wire.HANDSHAKE_SECONDS", 0.5)
    ours = certificates(tmp_path)

    def drip(address: str) -> bool:
        sock = socket.create_connection(parse_address(address), 20)
        sock.sendall(wire.DATA)
        context = tls_contexts(PeerConfig(tls=ours).tls).connecting
        assert context is not None
        with context.wrap_socket(sock, server_hostname="127.0.0.1") as secure:
            try:
                secure.sendall(wire.LENGTH.pack(60_000))
                for _ in range(60):
                    secure.sendall(b"x")
                    time.sleep(0.2)
            except OSError:
                return True
        return False

    async with peer("b", key=KEY, tls=ours) as b:
        assert await asyncio.to_thread(drip, b.address)


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("data", "kind"),
    [
        (wire.encode(0, m.DataHello(1, b"t" * 16, 0)), "token"),
        (wire.encode(0, m.PeerHello(m.VERSION, "n", 1, b"n" * 32)), "protocol"),
        (wire.LENGTH.pack(m.HELLO_LIMIT + 1), "protocol"),
    ],
    ids=["of no session", "no data hello", "too long"],
)
async def test_data_connections_of_strangers_over_tls_are_closed(tmp_path: Path, data: bytes, kind: str) -> None:
    ours = certificates(tmp_path)
    context = tls_contexts(PeerConfig(tls=ours).tls).connecting
    assert context is not None

    def says(address: str) -> bytes:
        sock = socket.create_connection(parse_address(address), 20)
        sock.sendall(wire.DATA)
        with context.wrap_socket(sock, server_hostname="127.0.0.1") as secure:
            secure.sendall(data)
            try:
                return secure.recv(1)
            except OSError:
                return b""

    async with peer("b", key=KEY, tls=ours) as b:
        assert await asyncio.to_thread(says, b.address) == b""
        await eventually(lambda: b.manager.metrics.value("lmkv_peer_errors_total", kind=kind) == 1)


def test_certificates_that_cannot_be_used(tmp_path: Path) -> None:
    from lmkv.config.peer import PeerTls

    made = certificates(tmp_path)
    with pytest.raises(ConfigError, match=r"peer\.tls"):
        tls_contexts(PeerTls(**(made | {"private_key": str(tmp_path / "nothing.pem")})))
    with pytest.raises(ConfigError, match=r"peer\.tls"):
        tls_contexts(PeerTls(**(made | {"certificate": made["private_key"]})))


# --- limits ----------------------------------------------------------------------------------------------------------


def test_pace() -> None:
    now = [100.0]
    half = Pace(0.5, None, lambda: now[0])
    for _ in range(10):  # served for ten times 0.1 s, as fast as is allowed
        now[0] += 0.1
        now[0] += half(1 << 20, 0.1)
    assert 2.0 - BURST <= now[0] - 100 <= 2.0 + 0.1
    now[0] += 1000
    assert half.rest == 0.0
    assert half.load == 0.0
    assert half(1 << 20, 0.01) == 0.0
    bounded = Pace(1.0, 1000, lambda: now[0])
    begin = now[0]
    for _ in range(10):
        now[0] += bounded(500, 0.0)
    assert 5.0 - BURST <= now[0] - begin <= 5.0
    assert bounded.rest == 0.0
    bounded(2000, 0.0)
    assert bounded.rest == pytest.approx(2.0)
    assert bounded.load == 1.0
    now[0] += 2.0 + BURST / 2
    assert bounded.load == pytest.approx(0.5)


@pytest.mark.anyio
async def test_bandwidth_bounds_what_is_served() -> None:
    keys = chain(range(32))
    async with peer("a") as a, peer("b", bandwidth=str(16 * FRAME)) as b:
        b.store(keys)
        begun = time.monotonic()
        for _ in range(3):
            outcomes, _ = await a.pull(b, b.keys(keys), seconds=30)
            assert sum(o.ok for o in outcomes) >= 6
        assert time.monotonic() - begun > 12 / 16 - BURST - 0.1  # what the last one costs comes after it
        b.hall.pace(64 * FRAME, 0.0)
        _, wait = await a.on(a.link(b).has(SPACE.id, keys.digests, time.monotonic() + 10))
        assert wait > 0
        with pytest.raises(BackendError) as e:
            await a.pull(b, b.keys(keys), seconds=1.0)
        assert e.value.kind == "busy"
        await eventually(b.at_rest)


@pytest.mark.anyio
async def test_peers_together_lease_no_more_than_a_part_of_the_pool() -> None:
    keys = chain(range(32))
    async with peer("a") as a, peer("c") as c, peer("b", pool=12 * FRAME) as b:
        b.store(keys)
        lent = 0
        for node in (a, c):
            request = m.Lease(SPACE.id, b"".join(keys.digests), (0,), 20.0)
            leased = await node.on(node.link(b).ask(request, time.monotonic() + 10))
            lent += sum(nbytes > 0 for nbytes in leased.lengths)
        assert lent == 3
        assert b.hall.lent == 3 * FRAME
        b.store(chain(range(100, 116)))  # the engine goes on storing
        assert b.manager.metrics.value("lmkv_evictions_total") == 4


@pytest.mark.anyio
async def test_strangers_are_few_and_do_not_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listening, "HANDSHAKES", 3)
    monkeypatch.setattr(listening.wire, "HANDSHAKE_SECONDS", 0.3)
    async with peer("a") as a, peer("b") as b:
        host, port = b.address.rsplit(":", 1)
        idle = [await asyncio.open_connection(host, int(port)) for _ in range(6)]
        ends = await asyncio.wait_for(asyncio.gather(*(reader.read() for reader, _ in idle)), 20)
        assert ends == [b""] * 6
        for _, writer in idle:
            writer.close()
        has, _ = await a.on(a.link(b).has(SPACE.id, [b"d" * 32], time.monotonic() + 10))
        assert has == [False]


@pytest.mark.anyio
async def test_a_node_that_connects_to_itself_is_told_so() -> None:
    async with peer("a") as a:
        with pytest.raises(ProtocolError) as e:
            await a.on(a.link(a).has(SPACE.id, [b"d" * 32], time.monotonic() + 10))
        assert e.value.kind == "self"


# --- namespaces ------------------------------------------------------------------------------------------------------


def test_what_differs_is_named_with_both_values() -> None:
    layout = {"dtype": "bf16", "page_tokens": 16, "runs": [4096]}
    ours = {
        "model": "m", "revision": "r1", "page_tokens": 16, "page_bytes": [4096], "layouts": [layout],
        "extra": {"rope": "a"},
    }  # fmt: skip
    assert list(differences(ours, ours)) == []
    theirs = ours | {"page_tokens": 32, "layouts": [layout | {"page_tokens": 32}], "extra": {"rope": "b", "q": "1"}}
    assert list(differences(theirs, ours)) == [
        'extra: q: "1" there, null here',
        'extra: rope: "b" there, "a" here',
        "layout of shard 0: page_tokens: 32 there, 16 here",
        "page_tokens: 32 there, 16 here",
    ]
    two = ours | {"layouts": [layout] * 2, "page_bytes": [4096] * 2}
    assert list(differences(two, ours)) == ["world size (shards): 2 there, 1 here"]
    long = ours | {"layouts": [layout | {"runs": [1] * 4096}]}
    (text,) = differences(long, ours)
    assert len(text) < 400


# --- as part of a service --------------------------------------------------------------------------------------------


def service(**settings: Any) -> ThreadHost:
    config = load_config(
        {
            "chunk_tokens": 4,
            "pool": {"size": "4MiB", "prefault": False, "hugepages": "off"},
            "tiers": [{"backend": "cpu", "capacity": "100%"}],
            "peer": {"transports": ["tcp"]} | settings,
        },
        host=PluginHost.discover(),
        environ={},
    )
    return ThreadHost(config)


def test_a_service_with_a_port_and_one_without() -> None:
    alone = service()
    assert alone.storage.peer is None
    alone.close()
    one, two = service(listen="127.0.0.1:0", node="one"), service(listen="127.0.0.1:0", node="two")
    try:
        assert one.storage.peer is not None
        assert two.storage.peer is not None
        peers = one.storage.peer.peers
        has, _ = peers.has(two.storage.peer.address, SPACE.id, [b"d" * 32], time.monotonic() + 10)
        assert has == [False]
        assert peers.link(two.storage.peer.address).incarnation == two.welcome.incarnation
        client = LocalClient(two)
        client.close()
    finally:
        one.close()
        two.close()
    assert one.storage.pool._closed  # nothing was left in a thread's hands
    assert two.storage.pool._closed


def test_a_service_does_not_start_when_its_port_is_taken() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(ConfigError, match=r"peer\.listen"):
            service(listen=f"127.0.0.1:{taken.getsockname()[1]}")


@pytest.mark.anyio
async def test_a_transport_that_hangs_does_not_hold_up_the_end(caplog: pytest.LogCaptureFixture) -> None:
    """The end comes in time; the pool stays mapped for whatever is still going on."""
    go = threading.Event()
    async with peer("b") as b:
        transport = b.hall.transports["tcp"]
        closing = transport.close
        transport.close = lambda: (go.wait(20), closing())[1]  # type: ignore[method-assign]
        begun = time.monotonic()
        await b.node.close(0.2)
        assert time.monotonic() - begun < 5
        assert "stays mapped" in caplog.text
        assert b.node._view is not None
        go.set()
        await b.node.close(20)
        assert b.node._view is None


@pytest.mark.anyio
async def test_who_waits_for_a_link_while_all_closes_is_told() -> None:
    """Also when he is cancelled once more after the links' loop has gone."""
    async with peer("a") as a, peer("b") as b:
        waiting = [
            asyncio.ensure_future(a.on(a.link(b).ask(m.Await("t", 20.0), time.monotonic() + 30))) for _ in range(3)
        ]
        b.node.incoming.admit(m.Admit("t", 8, SPACE.id))
        more = asyncio.ensure_future(a.on(a.link(b).ask(m.Await("t", 20.0), time.monotonic() + 30)))
        await eventually(lambda: len(b.hall.sessions) == 1)
        await asyncio.to_thread(a.node.peers.close)
        more.cancel()
        ended = await asyncio.gather(more, *waiting, return_exceptions=True)
        assert isinstance(ended[0], (ClosedError, asyncio.CancelledError))
        assert all(isinstance(end, (ClosedError, m.TransferState)) for end in ended[1:])
        b.node.incoming.finish("t", "aborted")
