"""A primary is killed while requests go on: its replica takes over, and the tier with it, without a restart of ours."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import pytest
from fault_rig import BYTES, CALLS, DEADLINE, KNOWN, Store, Traffic, descriptors, fill, lines, start, state
from redis_rig import Cluster, RedisServer, Sentinels, ValkeyServer, has_tls

from lmkv.errors import BackendError
from lmkv.testing import make_key, make_memory
from lmkv.types import HealthState

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from conftest import Open
    from fake_engine import Node
    from server_rig import Certificates

pytestmark = pytest.mark.slow

SLACK = 4.0
"""Two busy cores are in no hurry."""
PROMOTION = 45.0
"""Seconds in which a replica takes over: the servers notice, wait, and vote."""


class Group(Store):
    """A primary that can be killed, and what is said about it."""

    def __init__(self, group: Sentinels | Cluster) -> None:
        self.group = group
        self.dead: RedisServer | None = None

    @property
    def files(self) -> dict[str, Any]:
        made: Certificates | None = self.group.certificates
        return {} if made is None else {"tls": {"ca": made.ca, "cert": made.client_cert, "key": made.client_key}}

    def tier(self) -> dict[str, Any]:
        where = [f"{host}:{port}" for host, port in self.group.addresses]
        if isinstance(self.group, Sentinels):
            way: dict[str, Any] = {"sentinels": where, "service": self.group.name, "password": "secret"}
        else:
            way = {"cluster": where}
        return {"backend": "redis", "options": {**way, **self.files}}

    def primaries(self) -> list[RedisServer]:
        if isinstance(self.group, Cluster):
            return self.group.primaries()
        port = self.group.primary()
        return [server for server in (self.group.first, self.group.second) if server.port == port]

    def kill(self) -> None:
        """-9 for a primary: in a cluster that of the last slots, for redis-py asks that of the first when it starts."""
        self.dead = max(self.primaries(), key=first_slot)
        assert int(self.dead.cli("DBSIZE"))
        self.dead.kill()

    def promoted(self) -> bool:
        """Whether the replica has taken over."""
        dead = self.dead
        assert dead is not None
        if isinstance(self.group, Cluster):
            return len(self.group.primaries()) == len(self.group.nodes) // 2
        return self.group.primary() != dead.port


def first_slot(server: RedisServer) -> int:
    """Of those that it keeps."""
    if "cluster_enabled:1" not in server.cli("INFO", "cluster"):
        return 0
    mine = next(line for line in server.cli("CLUSTER", "NODES").splitlines() if "myself" in line)
    return int(mine.split()[8].split("-")[0])


def make(kind: str, folder: Path, *, tls: bool, server: type[RedisServer] = RedisServer) -> Sentinels | Cluster:
    if kind == "sentinel":
        return Sentinels(folder, password="secret", tls=tls, kind=server)
    return Cluster(folder, replicas=1, tls=tls, kind=server)


@pytest.fixture(
    params=[
        "sentinel",
        "sentinel with TLS",
        "sentinel of Valkey",
        "cluster",
        "cluster with TLS",
        "cluster of Valkey",
    ]
)
def group(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Group]:
    kind, _, more = request.param.partition(" ")
    if more == "with TLS" and not has_tls():
        pytest.skip("this redis-server is built without TLS")
    server = ValkeyServer if more == "of Valkey" else RedisServer
    with make(kind, tmp_path / "group", tls=more == "with TLS", server=server) as made:
        yield Group(made)


def done(node: Node, op: str, outcome: str) -> float:
    return node.counter("lmkv_tier_operations_total", tier="far", op=op, outcome=outcome)


def failed(node: Node) -> float:
    return sum(done(node, op, outcome) for op in ("get", "put", "contains") for outcome in ("failed", "deadline"))


def follows(server: RedisServer) -> bool:
    facts = server.facts("replication")
    return facts["role"] == "slave" and facts["master_link_status"] == "up"


def test_a_primary_dies_in_mid_traffic(group: Group) -> None:
    """Right bytes always, counted failures, ill, and well again once a replica has taken over."""
    node = start(group)
    try:
        fill(node)
        files = descriptors()
        with Traffic(node) as traffic, lines() as log:
            assert any(visit.came for visit in traffic.go_on(1.0))
            assert state(node) == "ok"
            before = failed(node)
            begin = time.monotonic()
            group.kill()
            traffic.wait(lambda: state(node) != "ok", 3 * DEADLINE + SLACK, "the tier counts as ill")
            assert failed(node) > before
            traffic.wait(group.promoted, PROMOTION, "a replica has taken over")
            traffic.wait(lambda: state(node) == "ok", PROMOTION, "the tier is well again")
            stored, loaded = done(node, "put", "ok"), done(node, "get", "ok")
            traffic.wait(
                lambda: done(node, "put", "ok") > stored and done(node, "get", "ok") > loaded, 20.0, "it serves again"
            )
            assert max(visit.waited for visit in traffic.since(begin)) < 2 * DEADLINE + SLACK
            assert max(calls for calls, _ in traffic.queues) <= CALLS
            assert max(nbytes for _, nbytes in traffic.queues) <= BYTES
            assert descriptors() <= files + 64
            assert len(log.lines) <= 12, log.lines
            assert group.dead is not None
            back = group.dead.start()
            traffic.wait(lambda: follows(back), PROMOTION, "the old primary follows the one that took over")
            traffic.go_on(1.0)
            traffic.wait(lambda: state(node) == "ok", 20.0, "and it stays well")
        node.settle(30)
        engine = node.engine()
        came = [engine.load(prompt) for prompt in KNOWN]
        assert sum(map(bool, came)) >= len(KNOWN) // 2, "the replica had what was stored long before"
    finally:
        node.close()


def test_a_cluster_that_was_looked_at_before_the_promotion(tmp_path: Path, open_redis: Open) -> None:
    """The map of slots was fetched while the dead primary stood in it; then nobody calls but for its health."""
    with Cluster(tmp_path, replicas=1) as made:
        group = Group(made)
        backend = open_redis(**group.tier()["options"], deadline=2.0)
        keys = [make_key(number) for number in range(64)]
        assert all(outcome.ok for outcome in backend.put(keys, [make_memory(b"x" * 1000)] * len(keys)))
        group.kill()
        with pytest.raises(BackendError):
            backend.contains(keys)
        assert backend.health().state is HealthState.DOWN
        assert not group.promoted()
        until = time.monotonic() + PROMOTION
        while not group.promoted():
            assert time.monotonic() < until, "a replica takes over"
            time.sleep(0.05)
        until = time.monotonic() + 10.0
        while backend.health().state is not HealthState.OK:
            assert time.monotonic() < until, "healthy again"
            time.sleep(0.1)
        assert backend.put(keys[:1], [make_memory(b"x")])[0].ok
