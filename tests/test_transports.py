"""Every transport between two processes: the right bytes, in time or an error, and nothing that is not granted."""

from __future__ import annotations

import os
import signal
import time
import zlib
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np
import pytest
from server_rig import make_certificates
from transport_rig import Other, Side, spread

from lmkv.errors import PluginError
from lmkv.peer.transport import DeadlineError, Region, TransportError
from lmkv.plugins import PluginHost

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from lmkv.peer.transport import Channel

POOL = 64 << 20
SOON = 30.0
"""Seconds that are enough for everything here on a machine that does other things."""


@pytest.fixture(scope="module", params=["tcp", "tcp+tls", "nixl"])
def kind(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    try:
        PluginHost.discover().load_transport(name.partition("+")[0])
    except PluginError as e:
        pytest.skip(str(e).splitlines()[0])
    return name


@pytest.fixture(scope="module")
def name(kind: str) -> str:
    return kind.partition("+")[0]


@pytest.fixture(scope="module")
def tls(kind: str, tmp_path_factory: pytest.TempPathFactory) -> Path | None:
    if not kind.endswith("+tls"):
        return None
    return make_certificates(tmp_path_factory.mktemp("tls")).ca.parent


@pytest.fixture(scope="module")
def pair(name: str, tls: Path | None) -> Iterator[tuple[Side, Other]]:
    side = Side(name, POOL)
    with Other(name, POOL, tls) as other:
        yield side, other
    side.close()


@pytest.fixture
def other(pair: tuple[Side, Other]) -> Other:
    pair[1].ask("grant")
    return pair[1]


@pytest.fixture
def side(pair: tuple[Side, Other]) -> Side:
    return pair[0]


@pytest.fixture
def channel(side: Side, other: Other) -> Iterator[Channel]:
    channel = side.transport.connect(other.reach(), other.blob)
    yield channel
    channel.close()


def until(seconds: float = SOON) -> float:
    return time.monotonic() + seconds


KINDS = ["tcp", pytest.param("tcp+tls", marks=pytest.mark.slow), pytest.param("nixl", marks=pytest.mark.slow)]
"""For tests that start processes."""
OPERATIONS = ["read", pytest.param("write", marks=pytest.mark.slow)]
SHAPES = {
    "one byte": (1, 1, 1),
    "one frame": (1, 3 << 20, 4096),
    "many small": (3000, 1000, 1),
    "unaligned": (37, (1 << 18) + 13, 1),
    "the whole pool": (1, POOL - 1, 1),
}


@pytest.mark.parametrize("shape", SHAPES)
def test_read(side: Side, other: Other, channel: Channel, shape: str) -> None:
    number, nbytes, align = SHAPES[shape]
    other.ask("fill", seed=number)
    side.fill(999)
    remote, local = spread(POOL, number, nbytes, 1, align), spread(POOL, number, nbytes, 2, align)
    expected = side.bytes.copy()
    channel.read(remote, local, until())
    crc = 0
    for region in local:
        crc = zlib.crc32(side.pool.cut(*region), crc)
    assert crc == other.ask("crc", regions=remote)
    for offset, size in local:
        expected[offset : offset + size] = side.bytes[offset : offset + size]
    assert np.array_equal(expected, side.bytes), "nothing else was touched"


@pytest.mark.parametrize("shape", SHAPES)
def test_write(side: Side, other: Other, channel: Channel, shape: str) -> None:
    number, nbytes, align = SHAPES[shape]
    other.ask("fill", seed=number)
    side.fill(998)
    remote, local = spread(POOL, number, nbytes, 3, align), spread(POOL, number, nbytes, 4, align)
    gaps = [Region(a + nbytes, b - a - nbytes) for (a, _), (b, _) in pairwise(sorted(remote)) if b > a + nbytes]
    before = other.ask("crc", regions=gaps)
    channel.write(local, remote, until())
    crc = 0
    for region in local:
        crc = zlib.crc32(side.pool.cut(*region), crc)
    assert crc == other.ask("crc", regions=remote)
    assert before == other.ask("crc", regions=gaps), "nothing else was touched"


def test_nothing_to_do(channel: Channel) -> None:
    channel.read([], [], until())
    channel.write([], [], until())


@pytest.mark.parametrize(
    ("remote", "local"),
    [
        ([Region(0, 4096)], []),
        ([Region(0, 4096)], [Region(0, 4095)]),
        ([Region(0, 0)], [Region(0, 0)]),
        ([Region(0, 4096)], [Region(POOL - 4095, 4096)]),
        ([Region(0, 4096)], [Region(-1, 4096)]),
        ([Region(-1, 4096)], [Region(0, 4096)]),
    ],
)
def test_lists_that_are_wrong(channel: Channel, remote: list[Region], local: list[Region]) -> None:
    for call in (lambda: channel.read(remote, local, until()), lambda: channel.write(local, remote, until())):
        with pytest.raises(ValueError, match=r"region|Region"):
            call()


def test_many_threads_share_channels(side: Side, other: Other) -> None:
    other.ask("fill", seed=5)
    side.fill(6)
    channels = [side.transport.connect(other.reach(), other.blob) for _ in range(2)]
    size = POOL // 64

    def work(number: int) -> int:
        here = Region(number * size, size)
        for turn in range(5):
            there = Region((number + turn) % 64 * size, size)
            channels[number % 2].read([there], [here], until())
        return there.offset

    with ThreadPoolExecutor(16) as crew:
        offsets = list(crew.map(work, range(64)))
    assert zlib.crc32(side.pool.view) == other.ask("crc", regions=[[at, size] for at in offsets])
    for channel in channels:
        channel.close()


def test_the_peers_pool_ends_where_it_ends(channel: Channel) -> None:
    for regions in ([Region(POOL - 100, 101)], [Region(2**60, 4096)]):
        with pytest.raises(TransportError) as caught:
            channel.read(regions, [Region(0, regions[0].nbytes)], until())
        assert not isinstance(caught.value, DeadlineError)
        with pytest.raises(TransportError):
            channel.write([Region(0, regions[0].nbytes)], regions, until())


def test_too_late_before_it_begins(channel: Channel) -> None:
    with pytest.raises(DeadlineError):
        channel.read([Region(0, 4096)], [Region(0, 4096)], time.monotonic() - 1)
    with pytest.raises(DeadlineError):
        channel.write([Region(0, 4096)], [Region(0, 4096)], time.monotonic() - 1)


def test_a_closed_channel(side: Side, other: Other) -> None:
    channel = side.transport.connect(other.reach(), other.blob)
    channel.close()
    channel.close()
    with pytest.raises(TransportError):
        channel.read([Region(0, 4096)], [Region(0, 4096)], until())
    again = side.transport.connect(other.reach(), other.blob)
    again.read([Region(0, 4096)], [Region(0, 4096)], until())
    again.close()


@pytest.mark.parametrize("blob", [b"garbage", b"\0" * 300, b"\x80\x04K\x01."])
def test_a43_what_is_advertised_may_be_anything(side: Side, other: Other, blob: bytes) -> None:
    with pytest.raises(TransportError):
        side.transport.connect(other.reach(), blob)


@pytest.mark.parametrize("kind", KINDS, indirect=True)
@pytest.mark.parametrize("operation", OPERATIONS)
def test_peer_killed_in_mid_transfer(name: str, tls: Path | None, operation: str) -> None:
    """Errors soon, no hang, and a new peer at the same place works."""
    side = Side(name, POOL)
    other = Other(name, POOL, tls)
    channel = side.transport.connect(other.reach(), other.blob)
    move = channel.read if operation == "read" else channel.write
    regions = [Region(0, POOL)]
    begun = time.monotonic()
    with ThreadPoolExecutor(1) as crew:

        def work() -> None:
            while time.monotonic() < begun + SOON:
                move(regions, regions, until(10))

        future = crew.submit(work)
        time.sleep(0.3)
        other.process.send_signal(signal.SIGKILL)
        with pytest.raises(TransportError):
            future.result(SOON)
    assert time.monotonic() < begun + 20
    channel.close()
    other.close()
    with Other(name, POOL, tls) as new:
        new.ask("fill", seed=1)
        channel = side.transport.connect(new.reach(), new.blob)
        channel.read(regions, regions, until())
        assert zlib.crc32(side.pool.view) == new.ask("crc", regions=regions)
        channel.close()
    side.close()


@pytest.mark.parametrize("kind", KINDS, indirect=True)
@pytest.mark.parametrize("operation", ["write", pytest.param("read", marks=pytest.mark.slow)])
def test_killed_in_mid_transfer_by_the_peer(name: str, operation: str) -> None:
    """The side that serves goes on, and serves the next."""
    side = Side(name, POOL)
    side.fill(1)
    regions = [[0, POOL]]
    blob = side.transport.advertise().hex()
    with Other(name, POOL) as other:
        other.ask("connect", port=side.port, blob=blob)
        other.ask("repeat", operation=operation, remote=regions, local=regions)
        time.sleep(0.3)
        os.kill(other.process.pid, signal.SIGKILL)
    with Other(name, POOL) as other:
        channel = side.transport.connect(other.reach(), other.blob)
        channel.write([Region(0, POOL)], [Region(0, POOL)], until())
        assert zlib.crc32(side.pool.view) == other.ask("crc", regions=regions)
        channel.close()
    side.close()


@pytest.mark.parametrize("kind", KINDS[:2], indirect=True)
@pytest.mark.parametrize("operation", OPERATIONS)
def test_a_peer_that_falls_silent(name: str, tls: Path | None, operation: str) -> None:
    """Not for nixl: on one machine the kernel copies, also from and to a process that is stopped."""
    side = Side(name, POOL)
    with Other(name, POOL, tls) as other:
        channel = side.transport.connect(other.reach(), other.blob)
        channel.read([Region(0, 4096)], [Region(0, 4096)], until())
        other.stop()
        begin = time.monotonic()
        move = channel.read if operation == "read" else channel.write
        with pytest.raises(DeadlineError):
            move([Region(0, POOL)], [Region(0, POOL)], until(0.5))
        assert 0.4 < time.monotonic() - begin < 10
        side.fill(3)
        before = zlib.crc32(side.pool.view)
        other.process.send_signal(signal.SIGCONT)
        time.sleep(0.2)
        assert zlib.crc32(side.pool.view) == before, "what comes late goes nowhere"
        channel.read([Region(0, POOL)], [Region(0, POOL)], until())
        channel.close()
    side.close()
