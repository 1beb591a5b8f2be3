"""Namespaces come with their clients, and go when nothing of them is left."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from storage_rig import FRAME, Client, Shelf, chain, namespace, storage

from lmkv.service import protocol as p
from lmkv.specs import BackendContext
from lmkv_backend_disk.backend import create
from lmkv_backend_disk.options import DiskOptions

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from lmkv.storage.manager import StorageManager


class Clock:
    """Goes when it is told to."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


async def eventually(condition: Callable[[], bool]) -> None:
    for _ in range(1000):
        if condition():
            return
        await asyncio.sleep(0.005)
    raise AssertionError


async def pass_over(manager: StorageManager, clock: Clock) -> None:
    """Long enough for whatever waits; housekeeping looks before and after."""
    for _ in range(2):
        manager._tidy()
        clock.now += 1000
    manager._tidy()


def test_a_namespace_that_was_cleared_and_left_is_forgotten() -> None:
    async def main() -> None:
        clock, shelf = Clock(), Shelf()
        async with storage(clock=clock, below=[(shelf, {"capacity": 400 * FRAME})]) as manager:
            stays = Client(manager, namespace(model="stays"))
            for number in range(30):
                client = Client(manager, namespace(model=f"m{number}"))
                client.store(client.frames(chain(range(4))))
                await client.settled()
                client.ask(p.Clear(client.space.id))
                if number % 2:
                    client.ask(p.Unregister(client.space.id))
                else:
                    client.session.close()
            manager._tidy()
            assert len(manager.index.namespaces) == 31, "something of it may still be on its way"
            await pass_over(manager, clock)
            assert list(manager.index.namespaces) == [stays.space.id]
            again = Client(manager, namespace(model="m3"))
            again.store(again.frames(chain(range(4))))
            await again.settled()
            assert (await again.look_up(chain(range(4)), hold=False)).chunks == 1

    asyncio.run(main())


def test_a_namespace_with_frames_or_with_another_client_stays() -> None:
    async def main() -> None:
        clock = Clock()
        async with storage(clock=clock) as manager:
            stores, two, one = (Client(manager, namespace(model=name)) for name in ("stores", "shared", "shared"))
            stores.store(stores.frames(chain(range(4))))
            stores.session.close()
            one.ask(p.Unregister(one.space.id))
            one.ask(p.Unregister(one.space.id))
            one.session.close()
            await pass_over(manager, clock)
            assert set(manager.index.namespaces) == {stores.space.id, two.space.id}
            assert manager.index.namespaces[two.space.id].clients == 1
            two.ask(p.Register(two.space.json()))
            two.ask(p.Unregister(two.space.id))
            await pass_over(manager, clock)
            assert set(manager.index.namespaces) == {stores.space.id}

    asyncio.run(main())


def test_folders_of_forgotten_namespaces_go(tmp_path: Path) -> None:
    """Of the first one a frame is left; what another owner left empty goes at its next start."""

    async def main() -> None:
        clock = Clock()
        frames = tmp_path / "disk" / "frames"
        disk = create(DiskOptions(path=tmp_path / "disk"), BackendContext(tier="disk"))
        async with storage(clock=clock, below=[(disk, {"name": "disk", "capacity": 400 * FRAME})]) as manager:
            clients = [Client(manager, namespace(model=f"m{number}")) for number in range(4)]
            for client in clients:
                for first in range(8):
                    client.store(client.frames(chain([first, 1, 2, 3])))
                await client.settled()
            for client in clients[1:]:
                client.ask(p.Clear(client.space.id))
            for client in clients[:3]:
                client.session.close()
            await eventually(lambda: sum(1 for path in frames.rglob("*") if path.name.endswith(".0")) == 8)
            await pass_over(manager, clock)
            kept = {clients[0].space.id.hex(), clients[3].space.id.hex()}
            await eventually(lambda: {path.name for path in frames.iterdir()} == kept)
        (frames / clients[1].space.id.hex() / "00").mkdir(parents=True)
        create(DiskOptions(path=tmp_path / "disk"), BackendContext(tier="disk")).close()
        assert [path.name for path in frames.iterdir()] == [clients[0].space.id.hex()]
        assert len(list(frames.rglob("*.0"))) == 8

    asyncio.run(main())
