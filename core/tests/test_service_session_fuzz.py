"""A43 for the real session: well-formed requests with senseless contents are refused, and nothing stays held."""

from __future__ import annotations

import random
from typing import Any

import pytest

from lmkv.config import load_config
from lmkv.errors import LmkvError
from lmkv.keys import Namespace
from lmkv.layout import PageLayout, PageRun
from lmkv.plugins import PluginHost
from lmkv.service import LocalClient, ThreadHost
from lmkv.service import protocol as p

LAYOUT = PageLayout("test", "uint8", 2, (PageRun(0, 0, 64, 64),))
NAMESPACE = Namespace("m", "r", "uint8", (LAYOUT.describe(),) * 2, (LAYOUT.page_bytes,) * 2, 8, 2)
CONFIG = (
    "pool: {size: 1MiB, prefault: false, hugepages: 'off'}\nchunk_tokens: 8\npeer: {listen: '127.0.0.1:0'}\n"
    "tiers:\n  - {name: ram, backend: cpu, capacity: 100%}\n"
)


def number(rng: random.Random, known: list[int]) -> int:
    return rng.choice([0, 1, 2, -1, 3, 1 << 20, (1 << 63) - 1, -(1 << 63), (1 << 64) - 1, *known[-8:], *known[-8:]])


def digest(rng: random.Random) -> bytes:
    return bytes([rng.randrange(6)]) * 32


def blob(rng: random.Random) -> bytes:
    data = b"".join(digest(rng) for _ in range(rng.randrange(5)))
    return data[: rng.choice([len(data)] * 6 + [7, 31])]


def frame(rng: random.Random) -> p.NewFrame:
    pages = rng.choice([1, 2, 4, 4, 4, 4, 0, -1, 5, 1 << 40, (1 << 64) - 1])
    prefixes = b"".join(digest(rng) for _ in range(min(max(pages - 1, 0), 5)))
    return p.NewFrame(
        rng.choice([digest(rng)] * 8 + [b"", b"short"]), rng.choice([b"", digest(rng), b"x"]), pages, prefixes
    )


def request(rng: random.Random, known: list[int]) -> Any:
    name = rng.choice([NAMESPACE.id] * 9 + [b"", b"n" * 16])
    shard = rng.choice([0, 0, 1, 1, 2, -1, 1 << 62])
    makers: list[Any] = [
        lambda: p.Register(rng.choice([NAMESPACE.json(), "", "{}", "[" * 500, "null", "\x00"])),
        lambda: p.Unregister(name) if rng.random() < 0.1 else p.GetHealth(),
        lambda: p.Lookup(name, blob(rng), blob(rng), rng.random() < 0.8),
        lambda: p.Extend(number(rng, known), name, number(rng, known), blob(rng), rng.random() < 0.8),
        lambda: p.Trim(number(rng, known), number(rng, known)),
        lambda: p.Release(number(rng, known)),
        lambda: p.Acquire(
            number(rng, known), shard, rng.choice([0, 0, 1, -5, 1 << 62]), rng.choice([0, 1, 3, -1, 1 << 62])
        ),
        lambda: p.Done(number(rng, known)),
        lambda: p.Reserve(name, shard, tuple(frame(rng) for _ in range(rng.randrange(4)))),
        lambda: p.Commit(number(rng, known), tuple(number(rng, known) for _ in range(rng.randrange(3)))),
        lambda: p.Abort(number(rng, known)),
        lambda: p.Pin(name, blob(rng), rng.choice([None, 1.0, -1.0, float("nan"), float("inf"), 1e308])),
        lambda: p.Unpin(name, blob(rng)),
        lambda: p.Prefetch(name, blob(rng)),
        lambda: p.Move(name, blob(rng), rng.choice(["ram", "", "x"]), rng.choice(["ram", "y"]), rng.random() < 0.5),
        lambda: p.Recode(name, blob(rng), rng.choice(["ram", "z"]), rng.choice(["identity", "zlib", "w"])),
        lambda: (
            p.Clear(rng.choice([name, None]), rng.choice([None, "ram", "q"])) if rng.random() < 0.1 else p.GetHealth()
        ),
        lambda: p.Observe(
            {rng.choice(["x", "", "lmkv_misses_total|reason=a|", "a|b=c"]): rng.choice([1.0, -1, 1e300])}
        ),
    ]
    transfer = rng.choice(["a", "b", "", "x" * 200, "\n", "\udcff"])
    peer = rng.choice(["127.0.0.1:1", "127.0.0.1:9", "", "x", "127.0.0.1:99999", "10.1.1.1:5", "[::1]:0"])
    makers += [
        lambda: p.Transfer(transfer, peer, name, blob(rng), rng.choice([0, 8, -1, 1 << 62]), rng.random() < 0.5),
        lambda: p.AwaitTransfer(transfer, rng.choice([0.0, -1.0, 0.01, float("nan")])),
        lambda: p.EndTransfer(transfer),
    ]
    return rng.choice(makers)()


ONE_WAY = (p.Unregister, p.Trim, p.Release, p.Done, p.Commit, p.Abort, p.Observe, p.EndTransfer)


@pytest.mark.parametrize("seed", range(3))
def test_a43_senseless_requests(seed: int, caplog: pytest.LogCaptureFixture) -> None:
    rng = random.Random(seed)
    host = ThreadHost(load_config(CONFIG, host=PluginHost.discover(), environ={}))
    watcher = LocalClient(host)
    watcher.call(p.Register(NAMESPACE.json())).result(20)
    known: list[int] = []
    for _ in range(8):
        client = LocalClient(host)
        for _ in range(200):
            message = request(rng, known)
            if isinstance(message, ONE_WAY):
                client.send(message)
                continue
            future = client.call(message)
            error = future.exception(20)
            if error is not None:
                assert isinstance(error, LmkvError)
                assert error.kind != "internal", message
                continue
            numbers = [getattr(future.result(), field, 0) for field in ("lease", "hold", "reservation")]
            known += [n for n in numbers if n]
        client.close()
        report = watcher.call(p.GetHealth()).result(20)
        assert isinstance(report, p.HealthReport)
        held = {name: n for name, n in report.holds.items() if n}
        assert held == {"sessions": 1}
    faults = [r.getMessage() for r in caplog.records if r.levelname == "ERROR"]
    assert faults == []
    watcher.call(p.Clear()).result(20)
    assert host.storage.pool.free_bytes == host.storage.pool.nbytes
    watcher.close()
    host.close()
