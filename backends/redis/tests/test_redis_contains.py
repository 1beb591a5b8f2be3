"""Questions about many frames at once."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import redis
from proxy_rig import FaultProxy

from lmkv.testing import make_key, make_memory, make_payload

if TYPE_CHECKING:
    from conftest import Open
    from redis_rig import RedisServer


def test_contains_takes_one_round_trip(server: RedisServer, open_redis: Open) -> None:
    keys = [make_key(number) for number in range(512)]
    with FaultProxy(server.port) as proxy:
        backend = open_redis(url=f"redis://{proxy.address}")
        backend.put(keys[:400], [make_memory(make_payload(1, 100))] * 400)
        proxy.delay(0.5)
        begin = time.monotonic()
        assert list(backend.contains(keys)) == [True] * 400 + [False] * 112
        assert 1.0 <= time.monotonic() - begin < 2.0, "one second is one round trip"


def test_contains_tells_the_odd_ones_of_many(server: RedisServer, open_redis: Open) -> None:
    backend = open_redis(url=server.url)
    client = redis.Redis(unix_socket_path=server.unix)
    numbers = range(1, 401)
    memory = [make_memory(make_payload(number, 1000)) for number in numbers]
    assert all(outcome.ok for outcome in backend.put([make_key(number) for number in numbers], memory))
    names = {number: f"lmkv:f:{{{make_key(number)}}}" for number in numbers}
    client.hdel(names[30], "0")
    client.hdel(names[60], "h")
    client.hset(names[90], "1", b"a part too many")
    client.hset(names[120], "h", b"1 0123456789abcdef 1000 0")
    client.hset(names[150], "h", b"1 0123456789abcdef 100000 1000")
    client.hset(names[180], "h", b"1 0123456789ABCDEF 1000 16320")  # another writer's generation: any 16 characters
    client.hset(names[210], "h", b"1 0123456789abcdef 1000 16320\r\n:2")
    client.delete(names[240], names[241], names[400])
    client.close()
    odd = {30, 60, 90, 120, 150, 210, 240, 241, 400}
    found = backend.contains([make_key(number) for number in numbers])
    assert {number for number, there in zip(numbers, found, strict=True) if not there} == odd
