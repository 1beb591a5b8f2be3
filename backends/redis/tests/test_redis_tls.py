"""TLS to sentinels and to the nodes of a cluster, all of which ask for a client's certificate."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias

import pytest
from redis_rig import Cluster, Sentinels, has_tls
from server_rig import make_certificates

from lmkv.errors import ConfigError
from lmkv.testing import make_key, make_memory, make_payload
from lmkv.types import HealthState

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from conftest import Open

pytestmark = pytest.mark.slow

Group: TypeAlias = "Sentinels | Cluster"


@pytest.fixture(params=[Sentinels, Cluster])
def group(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Group]:
    if not has_tls():
        pytest.skip("this redis-server is built without TLS")
    with request.param(tmp_path / "group", tls=True) as made:
        yield made


def way(group: Group) -> dict[str, Any]:
    where = [f"{host}:{port}" for host, port in group.addresses]
    return {"sentinels": where, "service": group.name} if isinstance(group, Sentinels) else {"cluster": where}


def refusal(open_redis: Open, options: dict[str, Any]) -> str:
    """Why there is no store, at the start or when the health is asked; empty where there is one."""
    try:
        backend = open_redis(**options, deadline=3.0)
    except ConfigError as refused:
        return str(refused)
    health = backend.health()
    backend.close()
    return "" if health.state is HealthState.OK else health.detail


def test_certificates(group: Group, tmp_path: Path, open_redis: Open) -> None:
    """Of both sides are looked at, by everyone on the way; what does not fit is never a tier that seems well."""
    other, ours = make_certificates(tmp_path / "other"), group.certificates
    assert ours is not None
    client = {"cert": ours.client_cert, "key": ours.client_key}
    wrong: list[dict[str, Any]] = [
        {"tls": {"ca": other.ca, **client}},
        {"tls": {"ca": ours.ca}},
        {"tls": {"ca": ours.ca, "cert": other.client_cert, "key": other.client_key}},
        {},
    ]
    for tls in wrong:
        said = refusal(open_redis, way(group) | tls)
        assert said, tls
        assert tls is not wrong[0] or "not trusted: check tls.ca" in said
        assert tls not in wrong[1:3] or "tls.cert" in said
    backend = open_redis(**way(group), tls={"ca": ours.ca, **client})
    assert backend.health().state is HealthState.OK
    keys = [make_key(number) for number in range(8)]
    payloads = [make_payload(number, 100_000) for number in range(8)]
    assert all(outcome.ok for outcome in backend.put(keys, [make_memory(payload) for payload in payloads]))
    into = [make_memory(100_000) for _ in keys]
    assert all(outcome.ok for outcome in backend.get(keys, into))
    assert [bytes(memory.view) for memory in into] == payloads
