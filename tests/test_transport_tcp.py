"""The serving side of the transport over TCP: hostile and slow peers, grants that end, limits."""

from __future__ import annotations

import socket
import struct
import threading
import time
from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from transport_rig import SESSION, TOKEN, Side, noise

from lmkv.peer import cut, tcp, wire
from lmkv.peer import line as lines
from lmkv.peer.line import Line
from lmkv.peer.transport import DeadlineError, Reach, Region, TransportError, neighbours

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

POOL = 32 << 20
SOON = 20.0


class Counter:
    """What a node is told of what it serves."""

    def __init__(self) -> None:
        self.pieces: list[tuple[int, float]] = []
        self.batches: list[tuple[int, int]] = []
        self.rest = 0.0

    def throttle(self, nbytes: int, seconds: float) -> float:
        self.pieces.append((nbytes, seconds))
        return self.rest

    def served(self, session: int, nbytes: int) -> None:
        self.batches.append((session, nbytes))


@pytest.fixture
def counter() -> Counter:
    return Counter()


@pytest.fixture
def side(counter: Counter) -> Iterator[Side]:
    made = Side("tcp", POOL, throttle=counter.throttle, served=counter.served)
    made.fill(1)
    yield made
    made.close()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("lmkv-serve")]


@pytest.fixture
def client() -> Iterator[Side]:
    made = Side("tcp", POOL)
    yield made
    made.close()


def reach(side: Side, token: bytes = TOKEN) -> Reach:
    return Reach("127.0.0.1", side.port, SESSION, token)


def until(seconds: float = SOON) -> float:
    return time.monotonic() + seconds


def raw(side: Side) -> Line:
    """A data socket that has been admitted, on which a test may say what it likes."""
    line = Line(wire.open_data(reach(side), 0, until()))
    try:
        lines.take_ready(line, until())
    except TransportError:
        line.close()
        raise
    return line


def closed(line: Line) -> bool:
    """Whether the serving side ends the connection, having said nothing or that it refuses."""
    try:
        lines.take_reply(line, until())
    except DeadlineError:
        return False
    except TransportError:
        return True
    return False


def eventually(condition: Callable[[], bool]) -> None:
    end = until()
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.005)


HEAD = struct.Struct("<4sB3xIQ")
HOSTILE = {
    "a pickle": b"\x80\x04\x95\x10\x00\x00\x00\x00\x00\x00\x00\x8c\x05posix\x94.",
    "another mark": HEAD.pack(b"GET ", 1, 1, 4096),
    "another operation": HEAD.pack(b"lmkT", 3, 1, 4096) + struct.pack("<2Q", 0, 4096),
    "no regions": HEAD.pack(b"lmkT", 1, 0, 0),
    "2^32 - 1 regions": HEAD.pack(b"lmkT", 1, 2**32 - 1, 4096),
    "2^60 bytes": HEAD.pack(b"lmkT", 2, 1, 2**60),
    "one byte beyond the pool": HEAD.pack(b"lmkT", 1, 1, 2) + struct.pack("<2Q", POOL - 1, 2),
    "an offset of 2^64 - 1": HEAD.pack(b"lmkT", 2, 1, 2) + struct.pack("<2Q", 2**64 - 1, 2),
    "an empty region": HEAD.pack(b"lmkT", 1, 1, 0) + struct.pack("<2Q", 0, 0),
    "more than it says": HEAD.pack(b"lmkT", 2, 1, 10) + struct.pack("<2Q", 0, 4096),
    "less than it says": HEAD.pack(b"lmkT", 2, 2, 8192) + struct.pack("<4Q", 0, 4096, 4096, 10),
}


@pytest.mark.parametrize("what", HOSTILE)
def test_a43_hostile_requests(side: Side, client: Side, what: str) -> None:
    before = side.bytes.copy()
    line = raw(side)
    message = HOSTILE[what]
    with np.errstate(all="raise"):
        line.send([message + bytes(max(0, HEAD.size - len(message)))], until())
    assert closed(line)
    line.close()
    assert np.array_equal(side.bytes, before)
    channel = client.transport.connect(reach(side), b"")
    channel.read([Region(0, 4096)], [Region(0, 4096)], until())
    channel.close()


def test_a43_random_messages(side: Side, client: Side) -> None:
    """Anything at all on data sockets, also behind a head that is right: nothing is written, and it goes on serving."""
    side.grants.writes = side.grants.reads = []
    dice = np.random.default_rng(5)
    before = side.bytes.copy()
    for turn in range(300):
        line = raw(side)
        message = dice.bytes(int(dice.integers(1, 200)))
        if turn % 2:
            message = HEAD.pack(b"lmkT", int(dice.integers(0, 4)), int(dice.integers(0, 20)), 4096) + message
        line.send([message], until())
        line.close()
    assert np.array_equal(side.bytes, before)
    side.grants.reads = None
    channel = client.transport.connect(reach(side), b"")
    channel.read([Region(0, 4096)], [Region(0, 4096)], until())
    channel.close()


def test_what_is_not_granted_is_refused(side: Side, client: Side) -> None:
    side.grants.reads = side.grants.writes = [Region(4096, 8192)]
    before = side.bytes.copy()
    channel = client.transport.connect(reach(side), b"")
    for region in (Region(4095, 2), Region(0, POOL), Region(12287, 2)):
        for _ in range(2):
            with pytest.raises(TransportError) as caught:
                channel.read([region], [Region(0, region.nbytes)], until())
            assert caught.value.kind == "refused"
            with pytest.raises(TransportError) as caught:
                channel.write([Region(0, region.nbytes)], [region], until())
            assert caught.value.kind == "refused"
    with pytest.raises(TransportError):
        channel.write([Region(0, 4096), Region(4096, 1)], [Region(4096, 4096), Region(0, 1)], until())
    assert np.array_equal(side.bytes, before), "a batch of which one region is not granted is refused as a whole"
    channel.write([Region(0, 8192)], [Region(4096, 8192)], until())
    assert not side.bytes[4096:12288].any()
    channel.close()


def test_a_grant_that_ends_in_the_middle_of_a_write(side: Side) -> None:
    """The piece that is under way may still come; nothing after it. Until then the memory counts as touched."""
    region = Region(0, 3 * tcp.PIECE)
    line = raw(side)
    line.send([lines.request(lines.WRITE, [region]), bytes(tcp.PIECE + 4096)], until())
    eventually(lambda: not side.bytes[: tcp.PIECE].any())
    assert side.transport.touches(SESSION, Region(2 * tcp.PIECE, 1))
    assert not side.transport.touches(SESSION + 1, region)
    assert not side.transport.touches(SESSION, Region(3 * tcp.PIECE, 4096))
    side.grants.writes = []
    assert side.transport.touches(SESSION, region)
    line.send([bytes(tcp.PIECE - 4096)], until())
    eventually(lambda: not side.transport.touches(SESSION, region))
    assert closed(line)
    assert np.array_equal(side.bytes[2 * tcp.PIECE :], noise(POOL, 1)[2 * tcp.PIECE :])
    line.close()


@pytest.mark.parametrize("operation", [lines.READ, lines.WRITE])
def test_a_session_that_ends_in_the_middle(side: Side, operation: int) -> None:
    """`drop` ends a thread that waits for its peer, at once; afterwards nothing touches the memory."""
    line = raw(side)
    line.send(
        [lines.request(operation, [Region(0, POOL)]), *([bytes(100)] if operation == lines.WRITE else [])], until()
    )
    eventually(lambda: side.transport.touches(SESSION, Region(0, 1)))
    begin = time.monotonic()
    side.transport.drop(SESSION + 1)
    assert side.transport.touches(SESSION, Region(0, 1))
    side.transport.drop(SESSION)
    assert time.monotonic() - begin < 5
    assert not side.transport.touches(SESSION, Region(0, 1))
    line.close()


def test_a_peer_that_stops_writing_is_cut_off(side: Side, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tcp, "PATIENCE", 0.2)
    line = raw(side)
    line.send([lines.request(lines.WRITE, [Region(0, 4096)]), bytes(4095)], until())
    assert closed(line)
    eventually(lambda: not side.transport.touches(SESSION, Region(0, 4096)))
    line.close()


def test_a_session_has_so_many_sockets_and_no_more(side: Side) -> None:
    opened = [raw(side) for _ in range(tcp.MAX_SESSION_LINES)]
    with pytest.raises(TransportError):
        raw(side)
    opened.pop().close()
    eventually(lambda: sum(thread.name == f"lmkv-serve-{SESSION}" for thread in threading.enumerate()) < 16)
    opened.append(raw(side))
    for line in opened:
        line.close()


def test_a_wrong_token(side: Side, client: Side) -> None:
    with pytest.raises(TransportError):
        client.transport.connect(reach(side, b"fifteen bytes, wrong"), b"")


def test_nobody_listens(client: Side) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with pytest.raises(TransportError):
        client.transport.connect(Reach("127.0.0.1", port, SESSION, TOKEN), b"")


def test_what_is_served_is_paced_and_counted(side: Side, client: Side, counter: Counter) -> None:
    channel = client.transport.connect(reach(side), b"")
    channel.read([Region(0, 9 << 20)], [Region(0, 9 << 20)], until())
    eventually(lambda: sum(nbytes for _, nbytes in counter.batches) == 9 << 20)
    assert sum(nbytes for nbytes, _ in counter.pieces) == 9 << 20
    assert max(nbytes for nbytes, _ in counter.pieces) <= tcp.PIECE
    assert all(seconds >= 0 for _, seconds in counter.pieces)
    assert {session for session, _ in counter.batches} == {SESSION}
    counter.rest = 0.15
    begin = time.monotonic()
    channel.write([Region(0, 3 * tcp.PIECE)], [Region(0, 3 * tcp.PIECE)], until())
    assert time.monotonic() - begin >= 0.15, "each thread rests after each piece"
    counter.rest = 60.0
    with pytest.raises(DeadlineError):
        channel.read([Region(0, POOL)], [Region(0, POOL)], until(0.3))
    channel.close()  # and the fixture's end does not wait for the rest


def test_deadlines_hold_while_all_sockets_are_busy(side: Side, client: Side, counter: Counter) -> None:
    counter.rest = 60.0
    channel = client.transport.connect(reach(side), b"")
    begin = time.monotonic()
    errors: list[BaseException] = []

    def read() -> None:
        try:
            channel.read([Region(0, POOL)], [Region(0, POOL)], begin + 0.5)
        except TransportError as e:
            errors.append(e)

    threads = [threading.Thread(target=read) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SOON)
    assert time.monotonic() - begin < SOON / 2
    assert len(errors) == 6
    assert all(isinstance(error, DeadlineError) for error in errors)
    channel.close()


def test_closing_a_channel_ends_its_calls(side: Side, client: Side, counter: Counter) -> None:
    counter.rest = 60.0
    channel = client.transport.connect(reach(side), b"")
    threading.Timer(0.2, channel.close).start()
    begin = time.monotonic()
    with pytest.raises(TransportError) as caught:
        channel.read([Region(0, POOL)], [Region(0, POOL)], until(60))
    assert not isinstance(caught.value, DeadlineError)
    assert time.monotonic() - begin < SOON


def test_a_channel_mends_itself(side: Side, client: Side) -> None:
    """Sockets that were cut are opened anew; those that idle beside a broken one are not believed any more."""
    channel = client.transport.connect(reach(side), b"")
    channel.read([Region(0, POOL)], [Region(0, POOL)], until())
    side.transport.drop(SESSION)
    with pytest.raises(TransportError):
        channel.read([Region(0, POOL)], [Region(0, POOL)], until())
    channel.read([Region(0, POOL)], [Region(0, POOL)], until())
    assert np.array_equal(client.bytes, side.bytes)
    channel.close()


def test_a_closed_transport_takes_and_makes_no_connections(client: Side) -> None:
    other = Side("tcp", POOL)
    there = reach(other)
    other.transport.close()
    with pytest.raises(TransportError):
        client.transport.connect(there, b"")
    with pytest.raises(TransportError):
        other.transport.connect(reach(client), b"")
    other.close()


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 3 << 20)), min_size=1, max_size=40), st.integers(1, 6))
def test_shares_cover_a_call(shape: list[tuple[bool, int]], number: int) -> None:
    """Every byte once, in pairs of equal length, in shares of about equal size."""
    remote, local, at = [], [], 0
    for gap, nbytes in shape:
        at += 4096 * gap
        remote.append(Region(at, nbytes))
        local.append(Region(2 * at, nbytes))
        at += nbytes
    total = sum(nbytes for _, nbytes in shape)
    shares = cut.shares(neighbours(remote, local), total, number)
    assert 1 <= len(shares) <= number
    assert all(there.nbytes == here.nbytes > 0 for share in shares for there, here in share)
    sizes = [sum(here.nbytes for _, here in share) for share in shares]
    assert sum(sizes) == total
    assert max(sizes) <= -(-total // number) + 4096
    flat = [pair for share in shares for pair in share]
    assert neighbours([there for there, _ in flat], [here for _, here in flat]) == neighbours(remote, local)


def test_neighbours_on_one_side_only_stay_apart() -> None:
    pairs = neighbours([Region(0, 10), Region(10, 10), Region(20, 5)], [Region(0, 10), Region(20, 10), Region(30, 5)])
    assert pairs == [(Region(0, 10), Region(0, 10)), (Region(10, 15), Region(20, 15))]


@pytest.mark.parametrize("nbytes", [1, lines.LOW - 1, 2 * lines.LOW, 2 * lines.LOW + 1, 5 * lines.LOW + 7])
def test_a_socket_is_filled_however_its_bytes_come(nbytes: int) -> None:
    """The kernel wakes who waits for many bytes when it has some; that must not be when there are no more to come."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        there = socket.create_connection(listener.getsockname())
        line = Line(listener.accept()[0])
    data = memoryview(noise(nbytes, 1)).cast("B")
    dice = np.random.default_rng(nbytes)

    def send() -> None:
        at = 0
        while at < len(data):
            part = int(dice.integers(1, lines.LOW))
            there.sendall(data[at : at + part])
            at += part
            time.sleep(0.001)

    sender = threading.Thread(target=send)
    sender.start()
    try:
        views = [memoryview(bytearray(part)) for part in (nbytes // 3, nbytes - nbytes // 3)]
        begin = time.monotonic()
        line.fill([view for view in views if view], until())
        assert b"".join(views) == data
        assert time.monotonic() - begin < SOON / 2, "it was woken by the bytes, not by the end of its time"
    finally:
        line.close()
        there.close()
        sender.join()


class Ends:
    """A socket as far as its buffers are chosen."""

    def __init__(self, here: str | None, there: str) -> None:
        self.options: dict[int, int] = {}
        self._here, self._there = here, there

    def getsockname(self) -> tuple[str, int]:
        if self._here is None:
            raise OSError("it has ended")
        return self._here, 1

    def getpeername(self) -> tuple[str, int]:
        return self._there, 2

    def setsockopt(self, _: int, option: int, value: int) -> None:
        self.options[option] = value


@pytest.mark.parametrize(
    ("here", "there", "near"),
    [
        ("127.0.0.1", "127.0.0.2", True),
        ("10.0.0.7", "10.0.0.7", True),
        ("::1", "::1", True),
        ("10.0.0.7", "10.0.0.8", False),
        ("fd00::7", "fd00::8", False),
        (None, "10.0.0.8", False),
    ],
)
def test_little_is_under_way_to_a_peer_on_this_machine_only(here: str | None, there: str, near: bool) -> None:
    """Through a network a small buffer would bound the bandwidth."""
    ends = Ends(here, there)
    Line(ends)  # type: ignore[arg-type]
    assert ends.options[socket.SO_SNDBUF] == (lines.NEAR_BUFFER if near else lines.BUFFER)
    assert ends.options[socket.SO_RCVBUF] == lines.BUFFER
