"""The conformance suite on real servers, reached in every way there is."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import pytest
import redis
from redis_rig import Cluster, RedisServer, Sentinels, ValkeyServer, has_tls

from lmkv.specs import BackendContext
from lmkv.testing import BackendSuite
from lmkv_backend_redis.backend import RedisBackend
from lmkv_backend_redis.layout import Names
from lmkv_backend_redis.options import RedisOptions

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from server_rig import Certificates

    from lmkv.backend import StorageBackendInterface
    from lmkv.types import ChunkKey

PART = 16384
"""Small, so that most frames of the suite have several parts."""
HOW_TO = Path(__file__).parents[3] / "docs" / "how-to" / "redis.md"


def let_in(server: RedisServer) -> dict[str, Any]:
    """The user of the how-to, who may do no more than he must."""
    line = next(line for line in HOW_TO.read_text(encoding="utf-8").splitlines() if line.startswith("ACL SETUSER kv"))
    server.cli(*line.split())
    return {"username": "kv", "password": "the-password"}


def shown(made: Certificates | None) -> dict[str, Any]:
    """The options of `tls`, with a client's certificate."""
    assert made is not None
    return {"ca": made.ca, "cert": made.client_cert, "key": made.client_key}


class Reach(NamedTuple):
    options: dict[str, Any]
    servers: Sequence[RedisServer]
    db: int = 0


@pytest.fixture(scope="module")
def tcp(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Reach]:
    with RedisServer(tmp_path_factory.mktemp("tcp")) as server:
        yield Reach({"url": server.url}, [server])


@pytest.fixture(scope="module")
def unix(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Reach]:
    with RedisServer(tmp_path_factory.mktemp("unix"), password="s:e@c ret") as server:
        yield Reach({"socket": server.unix, "db": 3, "password": server.password}, [server], 3)


@pytest.fixture(scope="module")
def tls(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Reach]:
    """With a client's certificate."""
    if not has_tls():
        pytest.skip("this redis-server is built without TLS")
    with RedisServer(tmp_path_factory.mktemp("tls"), tls=True, client_certificate=True) as server:
        files = shown(server.certificates)
        yield Reach({"host": "localhost", "port": server.port, **let_in(server), "tls": files}, [server])


@pytest.fixture(scope="module")
def sentinel(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Reach]:
    with Sentinels(tmp_path_factory.mktemp("sentinel"), password="pw") as group:
        watchers = [f"{host}:{port}" for host, port in group.addresses]
        yield Reach({"sentinels": watchers, "service": group.name, "password": "pw"}, [group.first])


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Reach]:
    with Cluster(tmp_path_factory.mktemp("cluster")) as group:
        login = {}
        for node in group.nodes:
            login = let_in(node)
        yield Reach({"cluster": [f"{host}:{port}" for host, port in group.addresses[:2]], **login}, group.nodes)


@pytest.fixture(scope="module")
def sentinel_tls(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Reach]:
    """TLS to the sentinels and to what they point to, both of which ask for a client's certificate."""
    if not has_tls():
        pytest.skip("this redis-server is built without TLS")
    with Sentinels(tmp_path_factory.mktemp("sentinel"), password="pw", tls=True) as group:
        watchers = [f"{host}:{port}" for host, port in group.addresses]
        options = {"sentinels": watchers, "service": group.name, "password": "pw", "tls": shown(group.certificates)}
        yield Reach(options, [group.first])


@pytest.fixture(scope="module")
def cluster_tls(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Reach]:
    """With replicas, and a client's certificate."""
    if not has_tls():
        pytest.skip("this redis-server is built without TLS")
    with Cluster(tmp_path_factory.mktemp("cluster"), replicas=1, tls=True) as group:
        nodes = [f"{host}:{port}" for host, port in group.addresses]
        yield Reach({"cluster": nodes, "tls": shown(group.certificates)}, group.primaries())


@pytest.fixture(scope="module")
def valkey(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Reach]:
    with ValkeyServer(tmp_path_factory.mktemp("valkey"), password="pw") as server:
        yield Reach({"host": "127.0.0.1", "port": server.port, "db": 3, **let_in(server)}, [server], 3)


@pytest.fixture(scope="module")
def valkey_sentinel(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Reach]:
    with Sentinels(tmp_path_factory.mktemp("valkey"), password="pw", kind=ValkeyServer) as group:
        watchers = [f"{host}:{port}" for host, port in group.addresses]
        yield Reach({"sentinels": watchers, "service": group.name, "password": "pw"}, [group.first])


@pytest.fixture(scope="module")
def valkey_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Reach]:
    with Cluster(tmp_path_factory.mktemp("valkey"), kind=ValkeyServer) as group:
        yield Reach({"cluster": [f"{host}:{port}" for host, port in group.addresses]}, group.nodes)


class RedisSuite(BackendSuite):
    way: ClassVar[str]
    more: ClassVar[dict[str, Any]] = {}

    @pytest.fixture
    def make_backend(self, request: pytest.FixtureRequest) -> Callable[[], StorageBackendInterface]:
        self.reach: Reach = request.getfixturevalue(self.way)
        for server in self.reach.servers:
            server.cli("FLUSHALL")
        options = RedisOptions.model_validate({**self.reach.options, "part_bytes": PART, **self.more})
        return lambda: RedisBackend(options, BackendContext(tier="far", deadline=20.0))

    def read_back(self, key: ChunkKey) -> bytes | None:
        name = Names("lmkv").frame(key)
        for server in self.reach.servers:
            with redis.Redis(unix_socket_path=server.unix, password=server.password, db=self.reach.db) as client:
                found = client.hgetall(name) if client.keys(name) else {}
            if found:
                return b"".join(found[b"%d" % i] for i in range(len(found) - 1))
        return None


class TestTCP(RedisSuite):
    way = "tcp"


@pytest.mark.slow
class TestExpiry(RedisSuite):
    way = "tcp"
    more: ClassVar = {"ttl": "1h", "sliding": True, "connections": 2}


class TestPlain(RedisSuite):
    """Without the socket of redis-py's connection, which is not public."""

    way = "tcp"

    @pytest.fixture(autouse=True)
    def no_socket(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("lmkv_backend_redis.store.SOCKET", "_no_such_attribute")


@pytest.mark.slow
class TestSocket(RedisSuite):
    way = "unix"


class TestTLSWithUser(RedisSuite):
    way = "tls"


class TestSentinel(RedisSuite):
    way = "sentinel"


class TestCluster(RedisSuite):
    way = "cluster"


@pytest.mark.slow
class TestSentinelTLS(RedisSuite):
    way = "sentinel_tls"


@pytest.mark.slow
class TestClusterTLS(RedisSuite):
    way = "cluster_tls"


@pytest.mark.slow
class TestValkey(RedisSuite):
    """By the user of the how-to, in a database of its own."""

    way = "valkey"


@pytest.mark.slow
class TestValkeySentinel(RedisSuite):
    way = "valkey_sentinel"


@pytest.mark.slow
class TestValkeyCluster(RedisSuite):
    way = "valkey_cluster"
