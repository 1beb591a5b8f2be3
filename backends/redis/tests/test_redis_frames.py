"""What lies in the store: parts, what is lost of them, who else may use it, what expires."""

from __future__ import annotations

import contextlib
import gc
import logging
import threading
import time
from typing import TYPE_CHECKING, Any

import pytest
import redis
from proxy_rig import FaultProxy
from redis_rig import Cluster, RedisServer, Sentinels

from lmkv.errors import BackendError, ConfigError, FrameError
from lmkv.testing import make_key, make_memory, make_payload
from lmkv.types import HealthState, OutcomeKind
from lmkv_backend_redis import talks
from lmkv_backend_redis.channel import RawChannel
from lmkv_backend_redis.layout import parse_head

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from conftest import Open

    from lmkv.types import Outcome
    from lmkv_backend_redis.backend import RedisBackend

FRAME = 100_000
"""Seven parts of 16 KiB."""
KEY = make_key(1)
NAME = f"lmkv:f:{{{KEY}}}"
PAYLOAD = make_payload(1, FRAME)


@pytest.fixture
def client(server: RedisServer) -> Iterator[redis.Redis]:
    with redis.Redis(unix_socket_path=server.unix) as made:
        yield made


def put(backend: RedisBackend, number: int = 1, nbytes: int = FRAME) -> Outcome:
    return backend.put([make_key(number)], [make_memory(make_payload(number, nbytes))])[0]


def get(backend: RedisBackend, number: int = 1, room: int = FRAME) -> Outcome:
    memory = make_memory(room)
    outcome = backend.get([make_key(number)], [memory])[0]
    assert not outcome.ok or bytes(memory.view[: outcome.nbytes]) == make_payload(number, outcome.nbytes)
    return outcome


def test_layout(server: RedisServer, client: redis.Redis, open_redis: Open) -> None:
    backend = open_redis(url=server.url)
    assert put(backend).ok
    backend.describe(KEY.namespace, '{"model": "a/b"}')
    assert set(client.keys("*")) == {NAME.encode(), f"lmkv:n:{KEY.namespace.hex()}".encode()}
    fields = client.hgetall(NAME)
    version, generation, nbytes, stride = fields.pop(b"h").split()
    assert (version, len(generation), int(nbytes), int(stride)) == (b"1", 16, FRAME, 16384 - 64)
    assert b"".join(fields[b"%d" % i] for i in range(7)) == make_payload(1, FRAME)
    assert len(fields) == 7


@pytest.mark.parametrize("lost", ["h", "0", "3", "6"])
def test_a30_lost_part(server: RedisServer, client: redis.Redis, open_redis: Open, lost: str) -> None:
    """A frame that lost a part is not there, a load is a miss, and what was left of it is deleted."""
    backend = open_redis(url=server.url)
    put(backend)
    put(backend, 2)
    client.hdel(NAME, lost)
    assert list(backend.contains([KEY, make_key(2)])) == [False, True]
    assert get(backend).kind is OutcomeKind.MISS
    assert not client.exists(NAME)
    assert get(backend, 2).ok
    assert put(backend).ok
    assert list(backend.contains([KEY])) == [True]
    assert get(backend).ok


def test_deleted_by_another_tool(server: RedisServer, client: redis.Redis, open_redis: Open) -> None:
    backend = open_redis(url=server.url)
    put(backend)
    client.delete(NAME)
    assert get(backend).kind is OutcomeKind.MISS
    assert list(backend.contains([KEY])) == [False]
    assert put(backend).ok
    assert get(backend).ok


@pytest.mark.parametrize("content", [b"", b"x", b"x" * (16384 - 65), b"x" * 16384, b"x" * 3_000_000])
def test_part_of_another_length(server: RedisServer, client: redis.Redis, open_redis: Open, content: bytes) -> None:
    """Damaged, and nothing else: the frames behind it in the batch are read from the same connection."""
    backend = open_redis(url=server.url)
    put(backend)
    put(backend, 2)
    client.hset(NAME, "3", content)
    memory = [make_memory(FRAME), make_memory(FRAME)]
    outcomes = backend.get([KEY, make_key(2)], memory)
    assert isinstance(outcomes[0].error, FrameError)
    assert outcomes[1].ok
    assert bytes(memory[1].view) == make_payload(2, FRAME)
    backend.set_aside([KEY])
    assert not client.exists(NAME)


GENERATION = b"0123456789abcdef"
HEADS = [
    b"", b"1", b"\x80\x04\x95", b"2 %s 100 100" % GENERATION, b"1 %s 0 100" % GENERATION, b"1 %s 100 0" % GENERATION,
    b"1 %s -1 100" % GENERATION, b"1 %s 1152921504606846976 1" % GENERATION, b"1 %s 100000 x" % GENERATION,
    b"1 %s 99999999999999999999999 1" % GENERATION, b"1 short 100 100", b"1 %s 4097 1" % GENERATION,
]  # fmt: skip


@pytest.mark.parametrize("head", HEADS)
def test_hostile_head(server: RedisServer, client: redis.Redis, open_redis: Open, head: bytes) -> None:
    assert parse_head(head) is None, "nothing is asked for by it"
    backend = open_redis(url=server.url)
    put(backend)
    client.hset(NAME, "h", head)
    assert list(backend.contains([KEY])) == [False]
    assert isinstance(get(backend).error, FrameError)
    assert put(backend).ok
    assert get(backend).ok


def test_something_else_under_the_name(server: RedisServer, client: redis.Redis, open_redis: Open) -> None:
    backend = open_redis(url=server.url)
    client.set(NAME, b"not ours")
    assert list(backend.contains([KEY])) == [False]
    assert get(backend).kind is OutcomeKind.FAILED
    assert put(backend).ok
    assert get(backend).ok


def test_no_room_names_the_numbers(server: RedisServer, open_redis: Open) -> None:
    backend = open_redis(url=server.url)
    put(backend)
    assert "the frame has 100000 bytes, the buffer 4096" in str(get(backend, room=4096).error)


def test_a_frame_of_too_many_parts(server: RedisServer, open_redis: Open) -> None:
    backend = open_redis(url=server.url, part_bytes=1024)
    limit = backend.capabilities.max_frame_bytes
    assert limit == 4096 * (1024 - 64)
    outcomes = backend.put([KEY, make_key(2)], [make_memory(limit + 1), make_memory(make_payload(2, 4096))])
    assert str(limit) in str(outcomes[0].error)
    assert str(limit + 1) in str(outcomes[0].error)
    assert outcomes[1].ok


def test_a_writer_of_other_parts(server: RedisServer, open_redis: Open) -> None:
    """Readers go by what the head says, not by their own `part_bytes`."""
    small, large = open_redis(url=server.url, part_bytes=2048), open_redis(url=server.url, part_bytes="1MiB")
    put(small)
    put(large, 2)
    assert get(large).ok
    assert get(small, 2).ok
    assert list(small.contains([KEY, make_key(2)])) == [True, True]


@pytest.mark.parametrize("before", range(1, 9))
def test_replaced_while_it_is_read(
    server: RedisServer, open_redis: Open, monkeypatch: pytest.MonkeyPatch, before: int
) -> None:
    """Parts of two frames are never joined, and the new one is not taken for a damaged one."""
    backend, other = (open_redis(url=server.url, part_bytes="1MiB") for _ in range(2))
    nbytes = 8 << 20
    put(backend, nbytes=nbytes)
    answer = talks._answer
    replaced = []

    def first_replace(channel: Any, reading: Any, what: int) -> None:
        if what == before and not replaced:
            replaced.append(other.put([KEY], [make_memory(make_payload(2, nbytes))])[0].ok)
        answer(channel, reading, what)

    monkeypatch.setattr(talks, "_answer", first_replace)
    outcome = get(backend, room=nbytes)
    assert replaced == [True]
    assert outcome.kind is OutcomeKind.MISS or before > 6
    monkeypatch.undo()
    memory = make_memory(nbytes)
    assert backend.get([KEY], [memory])[0].ok
    assert memory.view == make_payload(2, nbytes)


def test_clear_takes_what_is_ours(server: RedisServer, client: redis.Redis, open_redis: Open) -> None:
    backend, other = open_redis(url=server.url), open_redis(url=server.url, prefix="lmkv-2")
    for number in range(30):
        put(backend, number, 100)
    put(other)
    client.set("somebody", "else's")
    client.hset(f"lmkv:t:{{{KEY}}}:dead", "h", "left behind")
    client.execute_command("CONFIG", "RESETSTAT")
    backend.clear(bytes(16))
    assert client.dbsize() == 33
    backend.clear(KEY.namespace)
    assert sorted(client.keys("*")) == [f"lmkv-2:f:{{{KEY}}}".encode(), b"somebody"]
    used = {name.removeprefix("cmdstat_") for name in client.info("commandstats")}
    assert {"scan", "unlink"} <= used
    assert not used & {"flushdb", "flushall", "del"}


# --- expiry ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sliding", [False, True])
def test_ttl(server: RedisServer, client: redis.Redis, open_redis: Open, sliding: bool) -> None:
    backend = open_redis(url=server.url, ttl="1h", sliding=sliding)
    assert backend.capabilities.native_expiry
    put(backend)
    assert 3_500_000 < client.pttl(NAME) <= 3_600_000
    for use in (lambda: get(backend), lambda: backend.touch([KEY])):
        client.pexpire(NAME, 100_000)
        use()
        assert (client.pttl(NAME) > 3_500_000) == sliding


def test_the_server_expires_frames(server: RedisServer, open_redis: Open) -> None:
    backend = open_redis(url=server.url, ttl="300ms")
    put(backend)
    time.sleep(0.5)
    assert list(backend.contains([KEY])) == [False]
    assert get(backend).kind is OutcomeKind.MISS
    assert server.cli("DBSIZE") == "0"


def test_without_ttl_nothing_expires(server: RedisServer, client: redis.Redis, open_redis: Open) -> None:
    backend = open_redis(url=server.url)
    put(backend)
    assert client.pttl(NAME) == -1
    assert not backend.capabilities.native_expiry


# --- round trips -----------------------------------------------------------------------------------------------------


def test_a_frame_takes_one_round_trip(server: RedisServer, open_redis: Open) -> None:
    with FaultProxy(server.port) as proxy:
        backend = open_redis(url=f"redis://{proxy.address}", ttl="1h", sliding=True)
        put(backend)
        proxy.delay(0.5)
        begin = time.monotonic()
        assert get(backend).ok
        assert time.monotonic() - begin < 2.0
        begin = time.monotonic()
        assert put(backend).ok
        assert time.monotonic() - begin < 2.0


# --- limits of the server --------------------------------------------------------------------------------------------


def test_parts_above_the_servers_limit_stop_the_start(tmp_path: Path, open_redis: Open) -> None:
    with RedisServer(tmp_path / "redis", extra=["--proto-max-bulk-len", "1mb"]) as server:
        with pytest.raises(ConfigError, match=r"2MiB \(2097152 bytes\).*1MiB \(1048576 bytes\).*proto-max-bulk-len"):
            open_redis(url=server.url, part_bytes="2MiB")
        assert put(open_redis(url=server.url, part_bytes="1MiB"), nbytes=3 << 20).ok


def test_memory_limit_without_eviction_is_warned_about(
    tmp_path: Path, open_redis: Open, caplog: pytest.LogCaptureFixture
) -> None:
    with RedisServer(tmp_path / "redis", extra=["--maxmemory", "100mb"]) as server:
        open_redis(url=server.url)
        (line,) = caplog.messages
        assert "maxmemory 100MiB with maxmemory-policy noeviction" in line
        caplog.clear()
        server.cli("CONFIG", "SET", "maxmemory-policy", "volatile-lru")
        open_redis(url=server.url)
        assert "set ttl" in caplog.text
        caplog.clear()
        open_redis(url=server.url, ttl="1h")
        server.cli("CONFIG", "SET", "maxmemory-policy", "allkeys-lru")
        open_redis(url=server.url)
        assert not caplog.messages


def test_full_store(tmp_path: Path, open_redis: Open) -> None:
    """Stores fail with what to do, nothing is left behind, the old frame stays, loads go on."""
    with RedisServer(tmp_path / "redis", extra=["--maxmemory", "30mb"]) as server:
        backend = open_redis(url=server.url, part_bytes="1MiB")
        assert put(backend, nbytes=8 << 20).ok
        outcome = put(backend, 2, nbytes=40 << 20)
        assert outcome.kind is OutcomeKind.FAILED
        assert isinstance(outcome.error, BackendError)
        assert outcome.error.kind == "no-space"
        assert "maxmemory-policy" in str(outcome.error)
        assert server.cli("KEYS", "*") == NAME
        assert get(backend, room=8 << 20).ok
        assert put(backend, 3, nbytes=1000).ok


@pytest.mark.parametrize("old", [False, True])
def test_evicted_while_it_is_written(
    server: RedisServer, client: redis.Redis, open_redis: Open, monkeypatch: pytest.MonkeyPatch, old: bool
) -> None:
    """What was sent of it has gone, and the rest makes a hash without a head: never seen as a frame, and not left."""
    backend = open_redis(url=server.url)
    if old:
        assert put(backend).ok
    plain = RawChannel.send

    def send(channel: RawChannel, *arguments: bytes) -> None:
        evict = arguments[0] == b"PEXPIRE" and b":t:" in arguments[1]
        plain(channel, *((b"UNLINK", arguments[1]) if evict else arguments))

    monkeypatch.setattr(RawChannel, "send", send)
    outcome = put(backend)
    assert isinstance(outcome.error, BackendError)
    assert outcome.error.kind == "no-space"
    assert list(backend.contains([KEY])) == [False]
    assert get(backend).kind is OutcomeKind.MISS
    assert not client.keys("*")


# --- sentinel, cluster -----------------------------------------------------------------------------------------------


def test_failover(tmp_path: Path, open_redis: Open) -> None:
    with Sentinels(tmp_path) as group:
        where = [f"{host}:{port}" for host, port in group.addresses]
        backend = open_redis(sentinels=where, service=group.name, deadline=2.0)
        assert put(backend).ok
        group.sentinels[0].kill()
        group.sentinels[0].start()
        group.fail_over()
        end = time.monotonic() + 20
        while backend.health().state is not HealthState.OK:
            assert time.monotonic() < end
            time.sleep(0.2)
        assert put(backend, 2).ok
        assert get(backend, 2).ok


def test_slots_move(tmp_path: Path, open_redis: Open) -> None:
    """While a slot is on its way (ASK), and after it has moved (MOVED), its frames are found where they are."""
    with Cluster(tmp_path) as group:
        backend = open_redis(cluster=[f"{host}:{port}" for host, port in group.addresses])
        for number in range(1, 4):
            assert put(backend, number).ok
        source = group.owner(NAME)
        target = next(node for node in group.nodes if node is not source)
        slot = source.cli("CLUSTER", "KEYSLOT", NAME)
        ids = {node: node.cli("CLUSTER", "MYID") for node in (source, target)}
        target.cli("CLUSTER", "SETSLOT", slot, "IMPORTING", ids[source])
        source.cli("CLUSTER", "SETSLOT", slot, "MIGRATING", ids[target])
        source.cli("MIGRATE", "127.0.0.1", str(target.port), NAME, "0", "5000")
        assert get(backend).ok
        assert [get(backend, number).ok for number in (2, 3)] == [True, True]
        for node in group.nodes:
            node.cli("CLUSTER", "SETSLOT", slot, "NODE", ids[target])
        assert get(backend).ok
        assert put(backend).ok
        assert list(backend.contains([make_key(number) for number in range(1, 5)])) == [True, True, True, False]
        backend.delete([KEY])
        assert get(backend).kind is OutcomeKind.MISS


def test_contains_learns_where_slots_have_gone(tmp_path: Path, open_redis: Open) -> None:
    with Cluster(tmp_path) as group:
        backend = open_redis(cluster=[f"{host}:{port}" for host, port in group.addresses])
        source = group.owner(NAME)
        target = next(node for node in group.nodes if node is not source)
        slot, mine = source.cli("CLUSTER", "KEYSLOT", NAME), target.cli("CLUSTER", "MYID")
        for node in (target, source, *group.nodes):
            node.cli("CLUSTER", "SETSLOT", slot, "NODE", mine)
        assert list(backend.contains([KEY])) == [False]
        assert put(backend).ok
        assert list(backend.contains([KEY])) == [True]


def test_a_node_of_a_cluster_is_away_and_comes_back(tmp_path: Path, open_redis: Open) -> None:
    """Other threads are in the middle of calls meanwhile; no connection is left behind."""
    with Cluster(tmp_path) as group:
        backend = open_redis(cluster=[f"{host}:{port}" for host, port in group.addresses], deadline=2.0)
        put(backend)
        here, there = group.owner(NAME), next(node for node in group.nodes if node is not group.owner(NAME))
        stop = threading.Event()

        def work() -> None:
            while not stop.is_set():
                with contextlib.suppress(BackendError):
                    get(backend)

        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        there.kill()
        for number in range(2, 12):
            with contextlib.suppress(BackendError):
                put(backend, number)
        stop.set()
        for thread in threads:
            thread.join()
        backend.close()
        gc.collect()
        end = time.monotonic() + 5
        while int(here.facts("clients")["connected_clients"]) > 1:  # the one that asks
            assert time.monotonic() < end
            time.sleep(0.1)


def test_log_is_quiet(server: RedisServer, open_redis: Open, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "lmkv_backend_redis")
    backend = open_redis(url=server.url)
    put(backend)
    get(backend)
    assert not caplog.messages


def test_what_has_come_is_told_part_by_part(server: RedisServer, open_redis: Open) -> None:
    backend = open_redis(url=server.url)
    put(backend)
    memory, told = make_memory(FRAME), list[int]()
    memory.on_landed = lambda nbytes: told.append(nbytes if bytes(memory.view[:nbytes]) == PAYLOAD[:nbytes] else -1)
    assert backend.get([KEY], [memory])[0].ok
    assert told == [*range(16384 - 64, FRAME, 16384 - 64), FRAME]
