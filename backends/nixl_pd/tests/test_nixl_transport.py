"""What is special about NIXL: its errors, transfers that cannot be taken back, and ways that are not good enough."""

from __future__ import annotations

import itertools
import signal
import ssl
import time
import zlib
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from transport_rig import SESSION, Other, Side

from lmkv.errors import PluginError
from lmkv.peer.transport import DeadlineError, Region, TransportError
from lmkv.plugins import PluginHost
from lmkv_backend_nixl_pd import agent, transport
from lmkv_backend_nixl_pd.doorstep import Blob, Doorstep

if TYPE_CHECKING:
    from collections.abc import Iterator

POOL = 32 << 20
SOON = 30.0
ALL = [Region(0, POOL)]


@pytest.fixture(autouse=True)
def library() -> None:
    try:
        agent.bindings()
    except PluginError as e:
        pytest.skip(str(e))


@pytest.fixture(scope="module")
def pair() -> Iterator[tuple[Side, Other]]:
    side = Side("nixl", POOL)
    with Other("nixl", POOL) as other:
        yield side, other
    side.close()


def until(seconds: float = SOON) -> float:
    return time.monotonic() + seconds


def changed(blob: bytes, **fields: Any) -> bytes:
    return Blob.unpack(blob)._replace(**fields).pack()


def test_a_machine_without_the_library_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agent, "PACKAGES", ("nixl_nowhere",))
    with pytest.raises(PluginError, match=r"'nixl' needs the NIXL library: it is not installed.*pip install"):
        PluginHost.discover().load_transport("nixl")


def test_a_library_that_does_not_load_says_why(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    (tmp_path / "nixl_broken").mkdir()
    (tmp_path / "nixl_broken" / "__init__.py").write_text("raise ImportError('libcuda.so.1: cannot open')")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(agent, "PACKAGES", ("nixl_broken",))
    with pytest.raises(PluginError, match=r"libcuda.so.1: cannot open"):
        PluginHost.discover().load_transport("nixl")


def test_an_idle_transport_takes_no_processor(pair: tuple[Side, Other]) -> None:
    pair[0].transport.connect(pair[1].reach(), pair[1].blob).close()
    begin, used = time.monotonic(), time.process_time()
    time.sleep(1.0)
    assert time.process_time() - used < (time.monotonic() - begin) / 2


def test_peers_tell_what_they_have_moved(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transport, "NOTES_SECONDS", 0.05)
    told: list[tuple[int, int]] = []
    side = Side("nixl", POOL, served=lambda session, nbytes: told.append((session, nbytes)))
    with Other("nixl", POOL) as other:
        other.ask("connect", port=side.port, blob=side.transport.advertise().hex())
        regions = {"remote": [[0, 4096], [8192, 4096]], "local": [[0, 4096], [4096, 4096]]}
        other.ask("repeat", operation="read", **regions)
        end = until()
        while not told:
            assert time.monotonic() < end
            time.sleep(0.05)
    assert all(session == SESSION and nbytes > 0 and nbytes % 8192 == 0 for session, nbytes in told)
    side.close()


@pytest.mark.parametrize(
    "change",
    [
        lambda blob: blob[:-1],
        lambda blob: blob[:-100],
        lambda blob: changed(blob, metadata=b""),
        lambda blob: changed(blob, metadata=b"\x80\x04garbage"),
        lambda blob: bytes([blob[0] ^ 1]) + blob[1:],
        lambda blob: blob + bytes(1 << 20),
    ],
)
def test_what_a_peer_says_may_be_cut_off_or_garbage(pair: tuple[Side, Other], change: Any) -> None:
    side, other = pair
    with pytest.raises(TransportError):
        side.transport.connect(other.reach(), change(other.blob)).read(ALL, ALL, until())


def test_somebody_elses_memory_is_noticed(pair: tuple[Side, Other], monkeypatch: pytest.MonkeyPatch) -> None:
    side, other = pair
    wrong = changed(other.blob, sign=bytes(64))
    with pytest.raises(TransportError, match="the kernel does not let"):
        side.transport.connect(other.reach(), wrong)
    monkeypatch.setattr(Doorstep, "check", lambda *_: None)
    with pytest.raises(TransportError, match="somebody else's memory"):
        side.transport.connect(other.reach(), wrong)


def test_where_only_sockets_are_left_it_is_refused(pair: tuple[Side, Other], monkeypatch: pytest.MonkeyPatch) -> None:
    """What NIXL would send through sockets the core sends better itself."""
    there = Blob.unpack(pair[1].blob)
    door: Any = Doorstep(there.version)
    elsewhere = there._replace(machine=bytes(16))
    for devices, peers, right in (
        (False, False, False),
        (True, False, False),
        (False, True, False),
        (True, True, True),
    ):
        monkeypatch.setattr(door, "devices", devices)
        for where, good in ((elsewhere._replace(devices=peers), right), (there._replace(devices=peers), True)):
            if good:
                door.check(where)
            else:
                with pytest.raises(TransportError, match="not both have an RDMA device"):
                    door.check(where)
    monkeypatch.setattr(door, "devices", False)
    with pytest.raises(TransportError, match="the kernel does not let"):
        door.check(there._replace(process=1))
    for setting, good in (("tcp", False), ("^cma", False), ("tcp,cma,self", True), ("all", True), ("^ib", True)):
        monkeypatch.setenv("UCX_TLS", setting)
        if good:
            door.check(there)
        else:
            with pytest.raises(TransportError, match="UCX_TLS is"):
                door.check(there)


def test_a_read_tells_what_has_landed(pair: tuple[Side, Other], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transport, "WARM_BYTES", 4096)
    side, other = pair
    channel = side.transport.connect(other.reach(), other.blob)
    regions = [Region(0, 8192), Region(16384, 100), Region(32768, 5000)]
    told: list[int] = []
    channel.read(regions, regions, until(), told.append)
    channel.close()
    assert told == sorted(told)
    assert told[-1] == 8192 + 100 + 5000
    assert len(told) > 2, "not only at the end"


@pytest.mark.parametrize("slow", [0, 1])
@pytest.mark.parametrize("good", [True, False])
def test_a_large_write_ends_when_all_of_its_parts_have(
    pair: tuple[Side, Other], monkeypatch: pytest.MonkeyPatch, slow: int, good: bool
) -> None:
    """Also when one of them has failed: nothing of a call goes on behind its back."""
    side, other = pair
    channel = side.transport.connect(other.reach(), other.blob)
    plain, begun = agent.Agent.begin, itertools.count()
    ended: list[int] = []

    def begin(self: agent.Agent, operation: str, *more: Any) -> tuple[int, bool]:
        number = next(begun)
        if number == slow:
            time.sleep(0.3)
        elif not good:
            raise TransportError("this part fails")
        try:
            return plain(self, operation, *more)
        finally:
            ended.append(number)

    monkeypatch.setattr(agent.Agent, "begin", begin)
    regions = [Region(0, 2 * transport.PART_BYTES)]
    if good:
        channel.write(regions, regions, until())
        assert sorted(ended) == [0, 1]
    else:
        with pytest.raises(TransportError, match="this part fails"):
            channel.write(regions, regions, until())
        assert ended == [slow]
    monkeypatch.undo()
    channel.close()


def test_a_dead_peer_is_refused_at_once_and_its_place_is_free_again() -> None:
    side = Side("nixl", POOL)
    other = Other("nixl", POOL)
    channel = side.transport.connect(other.reach(), other.blob)
    channel.read(ALL, ALL, until())
    other.close()
    begin = time.monotonic()
    for _ in range(3):
        with pytest.raises(TransportError) as caught:
            channel.write(ALL, ALL, until())
        assert not isinstance(caught.value, DeadlineError)
    channel.close()
    with pytest.raises(TransportError):
        side.transport.connect(other.reach(), other.blob)
    assert time.monotonic() - begin < 15
    with Other("nixl", POOL) as new:
        channel = side.transport.connect(new.reach(), new.blob)
        channel.write(ALL, ALL, until())
        assert zlib.crc32(side.pool.view) == new.ask("crc", regions=[[0, POOL]])
        channel.close()
    side.close()


@pytest.mark.slow
@pytest.mark.parametrize("operation", ["read", "write"])
def test_what_comes_late_finds_no_agent(monkeypatch: pytest.MonkeyPatch, operation: str) -> None:
    """Over sockets, where a transfer takes its time: released by the library it goes on, so its agent is destroyed."""
    monkeypatch.setenv("UCX_TLS", "tcp")
    monkeypatch.setattr(Doorstep, "check", lambda *_: None)
    side = Side("nixl", POOL)
    other = Other("nixl", POOL)
    channel = side.transport.connect(other.reach(), other.blob)
    channel.read(ALL, ALL, until())
    move = channel.read if operation == "read" else channel.write
    other.stop()
    begin = time.monotonic()
    with pytest.raises(DeadlineError):
        move(ALL, ALL, until(0.5))
    assert time.monotonic() - begin < 10
    side.bytes[:] = 9
    other.process.send_signal(signal.SIGCONT)
    time.sleep(1.0)
    assert np.all(side.bytes == 9), "the bytes that come late go nowhere"
    with pytest.raises(TransportError):
        move(ALL, ALL, until())
    channel.close()
    other.close()
    with Other("nixl", POOL) as new:
        again = side.transport.connect(new.reach(), new.blob)
        again.write(ALL, ALL, until())
        assert zlib.crc32(side.pool.view) == new.ask("crc", regions=[[0, POOL]])
        again.close()
    side.close()


def test_a43_no_damaged_byte_reaches_the_library(pair: tuple[Side, Other], monkeypatch: pytest.MonkeyPatch) -> None:
    """It ends the process at some of them."""
    side, other = pair
    monkeypatch.setattr(agent.Agent, "add", lambda *_: pytest.fail("the library was asked"))
    dice = np.random.default_rng(3)
    for at in range(len(other.blob)):
        blob = bytearray(other.blob)
        blob[at] ^= int(dice.integers(1, 256))
        with pytest.raises(TransportError):
            side.transport.connect(other.reach(), bytes(blob))


def test_another_version_of_the_library_is_refused(pair: tuple[Side, Other]) -> None:
    side, other = pair
    with pytest.raises(TransportError, match=r"and 0\.9\.0 there: install the same on both"):
        side.transport.connect(other.reach(), changed(other.blob, version="0.9.0"))


def test_nothing_leaves_the_machine_unencrypted(pair: tuple[Side, Other], monkeypatch: pytest.MonkeyPatch) -> None:
    side, other = pair
    monkeypatch.setattr(Doorstep, "check", lambda *_: None)
    secure = other.reach()._replace(tls=ssl.create_default_context())
    with pytest.raises(TransportError, match="unencrypted"):
        side.transport.connect(secure, changed(other.blob, machine=bytes(16)))
    side.transport.connect(secure, other.blob).close()
