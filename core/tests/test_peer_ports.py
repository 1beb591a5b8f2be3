"""Ports that are worked out: all different, the same at every start, and a taken one is named."""

from __future__ import annotations

import itertools
import json
import socket
import subprocess
import sys
from typing import cast

import pytest

from lmkv.errors import ConfigError
from lmkv.peer.ports import BASE, BLOCK, RANKS, ROLES, ROW, Ports, Rank, Role, listen

GRID = [Rank(*place) for place in itertools.product(range(2), range(2), range(4))]
CHILD = """
import itertools, json
from lmkv.peer.ports import ROLES, Ports, Rank
ports = Ports(tensor_parallel=4)
grid = itertools.product(range(2), range(2), range(4))
print(json.dumps([ports.port(role, Rank(*place)) for place in grid for role in ROLES]))
"""


def test_a35_ports() -> None:
    ports = Ports(tensor_parallel=4)
    derived = [ports.port(role, rank) for rank in GRID for role in ROLES]
    assert len(set(derived)) == 2 * 2 * 4 * len(ROLES)
    for seed in ("0", "1"):
        done = subprocess.run(
            [sys.executable, "-c", CHILD], env={"PYTHONHASHSEED": seed}, capture_output=True, text=True, check=True
        )
        assert json.loads(done.stdout) == derived, "another start has other ports"
    assert ports.port("peer") == 17000
    assert ports.port("proxy", Rank(1, 1, 3)) == 17000 + 256 + 7 * 16 + 5, "a port that deployments rely on has moved"


def test_a35_taken_port_names_port_role_and_rank() -> None:
    rank = Rank(1, 0, 3)
    with listen("127.0.0.1", 0, "peer", rank) as first:
        port = first.getsockname()[1]
        with pytest.raises(ConfigError) as caught:
            listen("127.0.0.1", port, "peer", rank)
        text = str(caught.value)
        assert f"port {port} on 127.0.0.1 for role peer (instance 1, DP rank 0, TP rank 3) is taken" in text
        assert "choose another" in text
    with listen("127.0.0.1", port, "peer", rank), socket.create_connection(("127.0.0.1", port)):
        pass


def test_instances_of_several_sizes_do_not_meet() -> None:
    small = {Ports(tensor_parallel=2).port(role, Rank(0, dp, tp)) for role in ROLES for dp in range(8) for tp in (0, 1)}
    large = {Ports(tensor_parallel=16).port(role, Rank(1, 0, tp)) for role in ROLES for tp in range(16)}
    assert not small & large
    assert max(large) < 32768, "in the range that Linux gives to outgoing connections"
    assert len(ROLES) <= ROW


@pytest.mark.parametrize(
    ("ports", "role", "rank", "part"),
    [
        (Ports(), "pear", Rank(), "no role 'pear'"),
        (Ports(tensor_parallel=4), "peer", Rank(0, 0, 4), "no such rank with TP size 4"),
        (Ports(), "peer", Rank(0, -1, 0), "no such rank"),
        (Ports(tensor_parallel=8), "peer", Rank(0, 2, 0), f"ports for {RANKS} ranks"),
        (Ports(base=65536 - BLOCK), "peer", Rank(1), "ports for 1 instances"),
    ],
)
def test_ranks_without_a_port(ports: Ports, role: str, rank: Rank, part: str) -> None:
    with pytest.raises(ConfigError, match=part):
        ports.port(cast("Role", role), rank)


@pytest.mark.parametrize("values", [{"base": 0}, {"base": 65536}, {"tensor_parallel": 0}, {"tensor_parallel": 17}])
def test_ranges(values: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match="must be from 1 to"):
        Ports(**values)
    assert Ports(base=65536 - BLOCK).port("engine", Rank(0, 15, 0)) < 65536


@pytest.mark.parametrize("host", ["192.0.2.1", "no-such-host.invalid", "a" * 70 + ".example"])
def test_addresses_that_are_not_here(host: str) -> None:
    with pytest.raises(ConfigError, match=f"port {BASE} on {host} for role proxy .* cannot be used"):
        listen(host, BASE, "proxy")


def test_answers_are_not_held_back() -> None:
    with listen("127.0.0.1", 0, "controller") as sock:
        assert sock.proto == socket.IPPROTO_TCP, "without it asyncio leaves Nagle's delay on: 40 ms for each answer"
