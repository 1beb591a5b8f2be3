"""The Redis tier with 32 MiB frames, sealed and verified, against a bare socket client and against redis-py alone.

The bare client speaks the protocol itself on one connection and knows what our backend knows: `sendmsg` from and
`recv_into` to memory that is there already. It tries every recipe (whole values; values in parts, all asked for at
once or a few ahead), and the best of the run is the reference. All keys are new: a cache stores what is not there, and
a server that overwrites a value in place re-uses warm memory, which nobody has in practice.
"""

from __future__ import annotations

import asyncio
import socket
import statistics
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import redis as redis_py
from proxy_rig import FaultProxy
from redis_rig import HOST, RedisServer
from tests.bench.frames import make_frames
from tests.bench.harness import Row, absolute, against, seconds
from tests.bench.stack import Pages, chain, client, store_items

from lmkv.codec.identity import IdentityCodec
from lmkv.engine import StoreResult
from lmkv.observe.metrics import Metrics
from lmkv.specs import BackendContext
from lmkv.storage.driver import RUNNING, STORE
from lmkv.storage.inventory import TierSettings
from lmkv.storage.tier import Tier
from lmkv_backend_redis.backend import RedisBackend
from lmkv_backend_redis.options import RedisOptions

if TYPE_CHECKING:
    from collections.abc import Callable

    from lmkv.engine.lookup import Hit

PAYLOAD = 32 << 20
FRAMES = 8
PAGES = 16
THREADS = 4
ROUNDS = 9
GIGABYTES = FRAMES * PAYLOAD / 1e9
PARTS = {"1 MiB": (1 << 20) - 64, "4 MiB": (4 << 20) - 64}
AHEAD = 3
CHUNKS = 512
DELAY = 0.25
"""Seconds there, and again back: so long that nothing else counts."""


class Bare:
    """A client that can do what the measurement needs, and nothing else."""

    def __init__(self, port: int) -> None:
        self.sock = socket.create_connection((HOST, port))
        self.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.head = bytearray(64)

    def send(self, *arguments: bytes | memoryview) -> None:
        buffers: list[bytes | memoryview] = [b"*%d\r\n" % len(arguments)]
        for argument in arguments:
            buffers += (b"$%d\r\n" % len(argument), argument, b"\r\n")
        small = b"".join(b for b in buffers if not isinstance(b, memoryview))
        if len(small) == sum(map(len, buffers)):
            buffers = [small]
        left = [memoryview(b) for b in buffers]
        while left:
            sent = self.sock.sendmsg(left)
            while left and sent >= len(left[0]):
                sent -= len(left.pop(0))
            if sent:
                left[0] = left[0][sent:]

    def line(self) -> bytes:
        """A short reply, whole in one packet as they are here; no byte more."""
        done = 0
        while self.head[done - 2 : done] != b"\r\n":
            done += self.sock.recv_into(memoryview(self.head)[done:], 1)
        return bytes(self.head[: done - 2])

    def bulk(self, view: memoryview) -> None:
        assert self.line() == b"$%d" % len(view)
        done = 0
        while done < len(view):
            done += self.sock.recv_into(view[done:])
        assert self.line() == b""

    def put(self, items: list[tuple[bytes, memoryview]]) -> None:
        for name, view in items:
            self.send(b"SET", name, view)
        for _ in items:
            assert self.line() == b"+OK"

    def get(self, items: list[tuple[bytes, memoryview]], ahead: int) -> None:
        sent = 0
        for number, (_, view) in enumerate(items):
            while sent < min(len(items), number + ahead):
                self.send(b"GET", items[sent][0])
                sent += 1
            self.bulk(view)


class Bench:
    """A stock server, a tier on it, frames, and the other clients."""

    def __init__(self, server: RedisServer) -> None:
        self.server = server
        options = RedisOptions.model_validate({"url": server.url, "connections": THREADS})
        backend = RedisBackend(options, BackendContext(tier="redis", deadline=600.0))
        settings = TierSettings(name="redis", capacity=None, deadline=600.0, threads=THREADS, queue_bytes=1 << 40)
        self.tier = Tier(0, settings, backend, None, lambda _: IdentityCodec(), Metrics())
        self.bare = Bare(server.port)
        self.plain = redis_py.Redis(port=server.port)
        self.frames = make_frames(FRAMES, PAYLOAD, PAGES)
        _, self.trailers, self.objects = self.frames
        self.copies = [bytes(made.view) for made in self.objects]

    def close(self) -> None:
        """Of all clients."""
        self.tier.close(5.0)
        self.bare.sock.close()
        self.plain.close()

    def empty(self) -> None:
        """No keys; their memory is the allocator's again, which keeps it as in a store that evicts."""
        keys = self.plain.keys("*")
        if keys:
            self.plain.unlink(*keys)
        while int(self.plain.info("memory")["lazyfree_pending_objects"]):
            time.sleep(0.01)

    # --- ours ---

    def put(self) -> None:
        """Each frame by a call of its own, as stores come; sealed on the way."""
        asyncio.run(self._put())

    async def _put(self) -> None:
        done = await asyncio.gather(*[self.tier.put([item], priority=STORE) for item in self.frames.unsealed()])
        assert all(outcomes[0].ok for outcomes in done), done

    def get(self) -> None:
        """Each frame by a call of its own, as loads of large frames are; verified."""
        asyncio.run(self._get())

    async def _get(self) -> None:
        pairs = zip(self.trailers, self.objects, strict=True)
        done = await asyncio.gather(*[self.tier.get([t.key], [o], priority=RUNNING) for t, o in pairs])
        assert all(results[0].outcome.ok for results in done), done

    # --- the others ---

    def items(self, part: int) -> list[list[tuple[bytes, memoryview]]]:
        """Names and memory of the parts of each frame."""
        return [
            [(b"bare:%d:%d" % (i, at), o.view[at : at + part]) for at in range(0, o.nbytes, part)]
            for i, o in enumerate(self.objects)
        ]

    def bare_put(self, part: int) -> None:
        for frame in self.items(part):
            self.bare.put(frame)

    def bare_get(self, part: int, ahead: int) -> None:
        for frame in self.items(part):
            self.bare.get(frame, ahead)

    def plain_put(self) -> None:
        for number, copy in enumerate(self.copies):
            assert self.plain.set(f"plain:{number}", copy)

    def plain_get(self) -> None:
        for number, copy in enumerate(self.copies):
            assert len(self.plain.get(f"plain:{number}") or b"") == len(copy)

    def recipes(self) -> dict[str, tuple[Callable[[], None], Callable[[], None]]]:
        """Put and get of each client."""
        whole = len(self.copies[0])
        found: dict[str, tuple[Callable[[], None], Callable[[], None]]] = {
            "ours": (self.put, self.get),
            "redis-py": (self.plain_put, self.plain_get),
            "bare, whole": (lambda: self.bare_put(whole), lambda: self.bare_get(whole, 1)),
        }
        for name, part in PARTS.items():
            found[f"bare, {name}"] = (lambda p=part: self.bare_put(p), lambda p=part: self.bare_get(p, AHEAD))
        part = PARTS["1 MiB"]
        found["bare, 1 MiB, all at once"] = (lambda: self.bare_put(part), lambda: self.bare_get(part, 1 << 20))
        return found


def redis() -> list[Row]:
    """Puts and gets of every client in turn."""
    with tempfile.TemporaryDirectory() as folder, RedisServer(Path(folder)) as server:
        bench = Bench(server)
        try:
            puts, gets = _measure(bench)
        finally:
            bench.close()
    rows = []
    for work, found in (("put", puts), ("get", gets)):
        best = max((name for name in found if name.startswith("bare")), key=lambda name: statistics.median(found[name]))
        title = f"redis {work}, 32 MiB frames"
        rows += [
            against(f"{title}, {best}", "GB/s", list(zip(found["ours"], found[best], strict=True)), at_least=0.85),
            against(
                f"{title}, redis-py", "GB/s", list(zip(found["ours"], found["redis-py"], strict=True)), at_least=1.5
            ),
        ]
    return rows


def _measure(bench: Bench) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """GB/s of each recipe in each round; the order turns, the first round warms up."""
    recipes = bench.recipes()
    puts: dict[str, list[float]] = {name: [] for name in recipes}
    gets: dict[str, list[float]] = {name: [] for name in recipes}
    names = list(recipes)
    for number in range(-1, ROUNDS):
        turn = number % len(names)
        for name in names[turn:] + names[:turn]:
            bench.empty()
            put, get = recipes[name]
            wrote, read = GIGABYTES / seconds(put), GIGABYTES / seconds(get)
            if number >= 0:
                puts[name].append(wrote)
                gets[name].append(read)
    return puts, gets


def lookup() -> list[Row]:
    """512 chunks that only the Redis has, asked as an engine asks; and again over a slow line, to count round trips."""
    pages = Pages(layers=1, run=64, pages=1024)
    keys = chain(CHUNKS, 1)
    with (
        tempfile.TemporaryDirectory() as folder,
        RedisServer(Path(folder)) as server,
        FaultProxy(server.port) as proxy,
    ):
        direct = {"name": "far", "backend": "redis", "read": "direct", "options": {"url": server.url}}
        slow = direct | {"options": {"url": f"redis://{proxy.address}"}, "deadline": "1m"}
        patient = direct | {"queue": {"calls": 2 * CHUNKS, "seconds": "1h"}, "deadline": "1m"}
        with client(through_socket=False, pool=64 << 20, tiers=[_RAM, patient]) as link:
            engine = pages.engine(link)
            ids = pages.scattered(1) * len(keys.digests)
            assert set(engine.store_frames(store_items(keys, ids))) == {StoreResult.STORED}
            while int(server.cli("DBSIZE")) < CHUNKS + 1:  # one describes the namespace
                time.sleep(0.1)
        near = _lookups(pages, keys, direct, 21)
        far = _lookups(pages, keys, slow, 5, lambda: proxy.delay(DELAY), pause=8 * DELAY)
    trips = [float(there / 1e3 // (2 * DELAY)) for there in far]
    return [
        absolute("look-up of 512 chunks in redis only", "ms", near, at_most=10),
        absolute("look-up of 512 chunks in redis only, round trips", "", trips, at_most=2),
    ]


_RAM = {"name": "ram", "backend": "cpu", "capacity": "100%"}


def _lookups(
    pages: Pages,
    keys: Any,
    tier: dict[str, Any],
    rounds: int,
    then: Callable[[], None] = lambda: None,
    *,
    pause: float = 0.3,
) -> list[float]:
    """Milliseconds of each look-up; the first, which connects, is left out."""
    took = []
    with client(through_socket=True, pool=64 << 20, tiers=[_RAM, tier]) as link:
        engine = pages.engine(link)
        then()
        for _ in range(rounds + 1):
            hits: list[Hit | None] = []
            took.append(seconds(lambda found=hits: found.append(engine.begin_lookup(keys).wait(30.0))) * 1e3)
            (hit,) = hits
            assert hit is not None
            assert hit.chunks == len(keys.digests)
            engine.release(hit.lease)
            time.sleep(pause)  # what it has begun to load comes to its end
    return took[1:]
