"""What the storage does for itself: its start, and the housekeeping that must not end."""

from __future__ import annotations

import asyncio
import threading
from typing import TYPE_CHECKING

from storage_rig import Client, Shelf, chain, namespace, storage

from lmkv.backend import WrapperBackend
from lmkv.config import load_config
from lmkv.observe.metrics import Metrics
from lmkv.plugins import PluginHost
from lmkv.storage.manager import StorageManager
from lmkv.types import Capabilities

if TYPE_CHECKING:
    import pytest

    from lmkv.memory import Pool


def test_one_fault_does_not_end_the_housekeeping(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario() -> None:
        async with storage(below=[(Shelf(shared=True), {})], lease_seconds=0.2) as manager:
            client = Client(manager, namespace())
            keys = chain(range(64))
            client.store(client.frames(keys))
            assert (await client.look_up(keys)).chunks
            tidy = manager.stack.tiers[1].tidy
            faults = [RuntimeError("tidy is broken"), RuntimeError("tidy is broken")]
            manager.stack.tiers[1].tidy = lambda: _raise(faults) if faults else tidy()  # type: ignore[method-assign]
            for _ in range(200):
                await asyncio.sleep(0.02)
                if not faults and not manager.holds()["leases"]:
                    break
            assert not faults
            assert manager.holds()["leases"] == 0

    asyncio.run(scenario())
    assert "housekeeping failed" in caplog.text


def _raise(faults: list[RuntimeError]) -> None:
    raise faults.pop()


def test_the_pin_of_a_lost_chunk_is_let_go() -> None:
    async def scenario() -> None:
        async with storage(lease_seconds=0.2) as manager:
            client = Client(manager, namespace())
            keys = chain(range(16))
            client.store(client.frames(keys))
            entry = manager.index.namespace(client.space.id).entries[keys.digests[0]]
            manager.pin(entry, None)
            manager.stack.remove(entry)
            await asyncio.sleep(0.3)
            assert not manager.pinned

    asyncio.run(scenario())


class Registered(WrapperBackend):
    """Wants to see the pool."""

    capabilities = Capabilities(shared=True, registered_memory=True)
    pools: list[Pool]

    def attach(self, pool: Pool) -> None:
        self.pools.append(pool)


def test_a_backend_sees_the_pool_before_it_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = Registered(Shelf(shared=True))
    backend.pools = []
    host = PluginHost.discover()
    monkeypatch.setattr(host, "load_backend", lambda _: lambda *_: backend)
    config = load_config({"pool": {"size": "8MiB"}, "tiers": [{"backend": "cpu"}]}, environ={}, host=host)

    async def scenario() -> None:
        manager = await StorageManager.start(config, host, Metrics())
        assert backend.pools == [manager.pool]
        await manager.close(1.0)

    asyncio.run(scenario())


def test_a_backend_in_which_a_call_hangs_is_closed_when_that_returns() -> None:
    release, closed = threading.Event(), threading.Event()
    shelf = Shelf(shared=True)
    shelf.on_put = lambda _: release.wait(30) and None
    shelf.close = closed.set  # type: ignore[method-assign]

    async def scenario() -> None:
        async with storage(below=[(shelf, {"deadline": 30.0})]) as manager:
            client = Client(manager, namespace())
            client.store(client.frames(chain(range(16))))
            while not shelf.calls:  # noqa: ASYNC110  another thread fills it
                await asyncio.sleep(0.01)
            await manager.close(0.3)
            assert not closed.is_set()

    try:
        asyncio.run(scenario())
    finally:
        release.set()
    assert closed.wait(10)
