"""A store that is away, silent, slow, gone in mid-sentence, or talks nonsense; and logins that it refuses."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from typing import TYPE_CHECKING

import pytest
from proxy_rig import FaultProxy
from redis_rig import Cluster, RedisServer, has_tls
from server_rig import free_port, make_certificates

from lmkv.errors import BackendError, ClosedError, ConfigError, LmkvError
from lmkv.testing import make_key, make_memory, make_payload
from lmkv.testing.material import guard_bytes
from lmkv.types import HealthState

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from conftest import Open

    from lmkv_backend_redis.backend import RedisBackend

FRAME = 400_000
DEADLINE = 0.7
SLACK = 2.0
"""Two busy cores are in no hurry."""
KEYS = [make_key(number) for number in range(4)]


def put(backend: RedisBackend, number: int = 1, nbytes: int = FRAME) -> bool:
    return backend.put([make_key(number)], [make_memory(make_payload(number, nbytes))])[0].ok


def get(backend: RedisBackend, number: int = 1) -> bool:
    memory = make_memory(FRAME)
    outcome = backend.get([make_key(number)], [memory])[0]
    assert set(guard_bytes(memory)) == {0xA5}
    assert not outcome.ok or bytes(memory.view[: outcome.nbytes]) == make_payload(number, FRAME)
    return outcome.ok


def calls(backend: RedisBackend) -> list[Callable[[], object]]:
    return [
        lambda: backend.contains(KEYS),
        lambda: get(backend),
        lambda: put(backend, 2),
        lambda: backend.delete([make_key(2)]),
        lambda: backend.touch([make_key(1)]),
        lambda: backend.describe(KEYS[0].namespace, "{}"),
        backend.clear,
    ]


@contextlib.contextmanager
def within(seconds: float) -> Iterator[None]:
    begin = time.monotonic()
    yield
    assert time.monotonic() - begin < seconds


@pytest.fixture
def proxy(server: RedisServer) -> Iterator[FaultProxy]:
    with FaultProxy(server.port) as made:
        yield made


def test_away_at_the_start(tmp_path: Path, open_redis: Open, caplog: pytest.LogCaptureFixture) -> None:
    """The start is quick, calls fail quickly and name the address; used when it is there, without a restart."""
    server = RedisServer(tmp_path / "redis")
    with within(1.0 + SLACK):
        backend = open_redis(url=server.url)
    assert "it will be used when it answers" in caplog.text
    for call in calls(backend):
        with within(1.0 + SLACK), pytest.raises(BackendError, match=f"redis 127.0.0.1:{server.port}: .*refused"):
            call()
    assert backend.health().state is HealthState.DOWN
    with server:
        assert backend.health().state is HealthState.OK
        assert put(backend)
        assert get(backend)


def test_a_name_that_is_nobodys(open_redis: Open) -> None:
    backend = open_redis(host="no-such-host.invalid")
    with pytest.raises(BackendError, match=r"no-such-host\.invalid:6379"):
        get(backend)


def test_killed_and_started_again(server: RedisServer, open_redis: Open) -> None:
    """The first call after a restart works: idle connections that have gone are noticed."""
    backend = open_redis(url=server.url)
    assert put(backend)
    server.kill()
    with pytest.raises(BackendError):
        get(backend)
    server.start()
    assert not get(backend)
    assert put(backend)
    server.restart()
    assert not get(backend)
    assert put(backend)
    assert get(backend)


def test_killed_in_the_middle(server: RedisServer, open_redis: Open) -> None:
    backend = open_redis(url=server.url)
    server.stop_answering()
    killer = threading.Timer(0.3, server.kill)
    killer.start()
    with within(10.0), pytest.raises(BackendError):
        put(backend)
    killer.join()


def test_silent(server: RedisServer, open_redis: Open) -> None:
    """Every call ends by the deadline; what was asked for then is not what is answered later (A28)."""
    backend = open_redis(url=server.url, deadline=DEADLINE)
    for number in range(3):
        assert put(backend, number)
    assert get(backend)
    server.stop_answering()
    for call in calls(backend):
        with within(2 * DEADLINE + SLACK), pytest.raises(BackendError, match=r"no answer in time"):
            call()
    with within(2 * DEADLINE + SLACK):
        assert backend.health().state is HealthState.DOWN
    server.go_on()
    end = time.monotonic() + 10
    while backend.health().state is not HealthState.OK:  # it works off what it was sent
        assert time.monotonic() < end
    for number in range(3):
        put(backend, number)
        assert get(backend, number)


def test_silent_at_the_start(server: RedisServer, open_redis: Open) -> None:
    server.stop_answering()
    with within(1.0 + SLACK):
        backend = open_redis(url=server.url)
    server.go_on()
    assert put(backend)


def test_close_ends_calls_that_wait(server: RedisServer, open_redis: Open) -> None:
    backend = open_redis(url=server.url, deadline=60.0)
    put(backend)
    server.stop_answering()
    errors: list[BaseException] = []

    def wait() -> None:
        try:
            get(backend)
        except LmkvError as error:
            errors.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    time.sleep(0.3)
    with within(SLACK):
        backend.close()
        backend.close()
    thread.join(SLACK)
    assert not thread.is_alive()
    assert isinstance(errors[0], ClosedError)
    server.go_on()


def test_what_connects_while_all_closes_is_closed_too(
    server: RedisServer, open_redis: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """redis-py's client connects anew for a command that was under way: nobody else would end that connection."""
    backend = open_redis(url=server.url)
    assert put(backend)
    client = backend._store._client
    ping = client.ping

    def closing_meanwhile() -> object:
        backend.close()
        return ping()

    monkeypatch.setattr(client, "ping", closing_meanwhile)
    backend.health()
    others = [line for line in server.cli("CLIENT", "LIST").splitlines() if "cmd=client" not in line]
    assert not others


def test_the_deadline_is_for_the_whole_call(proxy: FaultProxy, open_redis: Open) -> None:
    """A server that trickles answers every moment, and is too slow all the same."""
    backend = open_redis(url=f"redis://{proxy.address}", deadline=DEADLINE)
    put(backend)
    proxy.throttle(50_000)
    for call in (lambda: get(backend), lambda: put(backend, 2)):
        with within(2 * DEADLINE + SLACK), pytest.raises(BackendError, match="no answer in time"):
            call()


@pytest.mark.parametrize("fault", ["garbage", "reset", "refuse"])
def test_goes_wrong_and_comes_back(proxy: FaultProxy, open_redis: Open, fault: str) -> None:
    backend = open_redis(url=f"redis://{proxy.address}", deadline=DEADLINE)
    put(backend)
    getattr(proxy, fault)()
    for call in calls(backend):
        with within(2 * DEADLINE + SLACK), pytest.raises(BackendError):
            call()
    assert backend.health().state is HealthState.DOWN
    proxy.heal()
    assert put(backend)
    assert get(backend)
    assert backend.health().state is HealthState.OK


def test_a_failure_costs_one_deadline_not_one_for_each_idle_connection(proxy: FaultProxy, open_redis: Open) -> None:
    """What is silent on one is silent on all of its age."""
    backend = open_redis(url=f"redis://{proxy.address}", deadline=DEADLINE)
    assert put(backend)
    with contextlib.ExitStack() as calls_at_once:
        for _ in range(4):
            calls_at_once.enter_context(backend._store.exchange("test", [b"any"]))
    before = proxy.live
    assert before >= 4
    proxy.silence()
    with pytest.raises(BackendError):
        get(backend)
    end = time.monotonic() + 10.0
    while proxy.live > before - 4:
        assert time.monotonic() < end, "idle connections were kept"
        time.sleep(0.01)
    proxy.heal()
    assert get(backend)


@pytest.mark.parametrize("after", [1, 30, 1000, 20_000, 300_000])
@pytest.mark.parametrize("work", [get, put])
def test_cut_in_mid_sentence(
    server: RedisServer, proxy: FaultProxy, open_redis: Open, after: int, work: Callable[[RedisBackend], bool]
) -> None:
    """A reply shorter than it says, a request that ends half-way: an error, and nothing half is ever visible."""
    backend = open_redis(url=f"redis://{proxy.address}", deadline=5.0)
    put(backend)
    proxy.cut_after(after)
    with pytest.raises(BackendError):
        work(backend)
    proxy.heal()
    assert get(backend)
    backend.delete([KEYS[1]])
    left = server.cli("KEYS", "*").split()
    assert all(name.startswith("lmkv:t:") for name in left), left
    assert all(0 < int(server.cli("PTTL", name)) <= 60_000 for name in left), "gone by themselves"
    proxy.cut_after(after)
    with contextlib.suppress(BackendError):
        put(backend)
    proxy.heal()
    assert backend.contains([KEYS[1]])[0] == get(backend)


def test_answers_of_others_are_never_taken(proxy: FaultProxy, open_redis: Open) -> None:
    """A28: answers that come after their deadline, while other calls go on."""
    backend = open_redis(url=f"redis://{proxy.address}", deadline=DEADLINE)
    for number in range(4):
        put(backend, number)
    for _ in range(3):
        proxy.delay(DEADLINE)
        with pytest.raises(BackendError):
            get(backend, 1)
        proxy.delay(0.0)
        for number in (2, 3, 0):
            assert get(backend, number)
        assert list(backend.contains([*KEYS, make_key(9)])) == [True] * 4 + [False]


# --- refused ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def guarded(tmp_path: Path) -> Iterator[RedisServer]:
    with RedisServer(tmp_path / "guarded", password="right one") as made:
        yield made


def test_refused_logins_stop_the_start(guarded: RedisServer, server: RedisServer, open_redis: Open) -> None:
    here = {"host": "127.0.0.1", "port": guarded.port}
    for options, said in [
        ({**here, "password": "wrong one"}, "check username and password"),
        (here, "check username and password"),
        ({**here, "username": "nobody", "password": "wrong one"}, "check username and password"),
        ({**here, "password": "right one", "db": 99}, "check db"),
        ({"url": server.url.removesuffix("/0"), "password": "not asked for", "username": "kv"}, "check username"),
    ]:
        with pytest.raises(ConfigError, match=said) as caught:
            open_redis(**options)
        assert "one'" not in str(caught.value)
        assert str(caught.value).startswith("redis 127.0.0.1:")


@pytest.mark.parametrize("missing", ["hset", "hget", "hlen", "pexpire", "persist", "rename", "unlink", "touch"])
def test_missing_permissions_stop_the_start(server: RedisServer, open_redis: Open, missing: str) -> None:
    server.cli("ACL", "SETUSER", "kv", "on", ">pw", "~lmkv:*", "+@all", f"-{missing}")
    with pytest.raises(ConfigError, match=f"ACL user may not do this.*{missing}"):
        open_redis(url=f"redis://kv:pw@127.0.0.1:{server.port}")


def test_another_prefix_is_not_permitted(server: RedisServer, open_redis: Open) -> None:
    server.cli("ACL", "SETUSER", "kv", "on", ">pw", "~lmkv:*", "+@all")
    with pytest.raises(ConfigError, match="ACL user may not do this"):
        open_redis(url=f"redis://kv:pw@127.0.0.1:{server.port}", prefix="other")


def test_a_refused_login_is_told_when_the_store_comes(tmp_path: Path, open_redis: Open) -> None:
    server = RedisServer(tmp_path / "redis", password="right one")
    backend = open_redis(host="127.0.0.1", port=server.port, password="wrong one")
    with server:
        health = backend.health()
        assert health.state is HealthState.DOWN
        assert "check username and password" in health.detail


def test_permissions_taken_away_later(server: RedisServer, open_redis: Open) -> None:
    server.cli("ACL", "SETUSER", "kv", "on", ">pw", "~lmkv:*", "+@all")
    backend = open_redis(url=f"redis://kv:pw@127.0.0.1:{server.port}")
    put(backend)
    server.cli("ACL", "SETUSER", "kv", "-hget")
    with pytest.raises(BackendError, match="ACL user may not do this"):
        get(backend)
    server.cli("ACL", "SETUSER", "kv", "+hget")
    assert get(backend)


def test_replica_takes_no_stores(
    tmp_path: Path, server: RedisServer, open_redis: Open, caplog: pytest.LogCaptureFixture
) -> None:
    with RedisServer(tmp_path / "replica", extra=["--replicaof", f"127.0.0.1 {server.port}"]) as replica:
        with contextlib.suppress(ConfigError):
            backend = open_redis(url=replica.url)
            with pytest.raises(BackendError, match="READONLY"):
                put(backend)
        assert "READONLY" in caplog.text


def test_tls_that_does_not_fit(tmp_path: Path, server: RedisServer, open_redis: Open) -> None:
    if not has_tls():
        pytest.skip("this redis-server is built without TLS")
    other = make_certificates(tmp_path / "other")
    with RedisServer(tmp_path / "tls", tls=True) as secure:
        with pytest.raises(ConfigError, match=r"not trusted: check tls\.ca"):
            open_redis(url=f"rediss://localhost:{secure.port}", tls={"ca": other.ca})
        assert secure.certificates is not None
        assert put(open_redis(url=f"rediss://localhost:{secure.port}", tls={"ca": secure.certificates.ca}))
        for url in (f"rediss://127.0.0.1:{server.port}", f"redis://127.0.0.1:{secure.port}"):
            backend = open_redis(url=url, deadline=DEADLINE)
            with within(2 * DEADLINE + SLACK), pytest.raises(BackendError):
                get(backend)


def test_tls_is_as_patient(tmp_path: Path, open_redis: Open) -> None:
    """The other way of keeping the deadline."""
    if not has_tls():
        pytest.skip("this redis-server is built without TLS")
    with RedisServer(tmp_path / "tls", tls=True) as secure:
        backend = open_redis(url=secure.url, tls={"verify": "none"}, deadline=DEADLINE)
        assert put(backend)
        secure.stop_answering()
        for work in (get, put):
            with within(2 * DEADLINE + SLACK), pytest.raises(BackendError):
                work(backend)
        secure.go_on()
        assert put(backend)
        assert get(backend)


def test_silent_cluster(tmp_path: Path, open_redis: Open) -> None:
    with Cluster(tmp_path) as group:
        for node in group.nodes:
            node.stop_answering()
        with within(1.0 + SLACK):
            backend = open_redis(cluster=[f"{host}:{port}" for host, port in group.addresses])
        waits = threading.Thread(target=backend.health)
        waits.start()
        time.sleep(0.2)
        with within(0.5 * SLACK):
            backend.close()
        waits.join(1.0 + SLACK)
        assert not waits.is_alive()
        for node in group.nodes:
            node.go_on()


def test_dead_sentinels(open_redis: Open) -> None:
    where = [f"127.0.0.1:{free_port()}" for _ in range(3)]
    with within(2.0 + SLACK):
        backend = open_redis(sentinels=where, service="kv")
    with within(2.0 + SLACK), pytest.raises(BackendError, match="redis 'kv' of sentinels") as told:
        get(backend)
    assert "no sentinel that answers knows the service" in str(told.value)
    assert "redis.connection" not in str(told.value), "redis-py's inside"


def test_dead_cluster(open_redis: Open) -> None:
    with within(2.0 + SLACK):
        backend = open_redis(cluster=[f"127.0.0.1:{free_port()}" for _ in range(3)])
    with within(2.0 + SLACK), pytest.raises(BackendError, match="redis cluster"):
        get(backend)


def test_log_does_not_repeat(server: RedisServer, open_redis: Open, caplog: pytest.LogCaptureFixture) -> None:
    """Errors are told to the tier, which logs them; not logged here as well."""
    backend = open_redis(url=server.url)
    server.kill()
    caplog.set_level(logging.INFO)
    for call in calls(backend) * 3:
        with contextlib.suppress(BackendError):
            call()
    assert not [record for record in caplog.records if record.name.startswith("lmkv")]
