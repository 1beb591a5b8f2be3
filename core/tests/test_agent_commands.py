"""What a controller asks of a node, over a real connection: done once, by chunk, with reasons, until cancelled."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from agent_rig import Controller, agent, agree, eventually, running
from storage_rig import FRAME, Client, Shelf, chain, namespace, storage

from lmkv.agent import client as agent_client
from lmkv.agent import fences
from lmkv.agent import jobs as agent_jobs
from lmkv.agent import messages as m
from lmkv.frame import parse_trailer
from lmkv.service import protocol as p

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from lmkv.storage.manager import StorageManager

KEYS = chain(range(16))
BLOB = b"".join(KEYS.digests)
ABSENT = bytes(32)


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agent_client, "RETRY_FIRST", 0.02)
    monkeypatch.setattr("lmkv.agent.commands.PAUSE_SECONDS", 0.01)
    monkeypatch.setattr(agent_jobs, "TELL_SECONDS", 0.02)


class Rig:
    """A node with four chunks in RAM and on a shelf, and its controller."""

    def __init__(self, manager: StorageManager, controller: Controller, one: Client) -> None:
        self.manager = manager
        self.controller = controller
        self.one = one
        self._jobs = 0

    async def do(self, command: m.Command) -> m.Progress:
        self._jobs += 1
        return await self.controller.do(f"job{self._jobs}", command)

    def there(self, tier: str) -> set[bytes]:
        return {key.digest for key in self.manager.tier(tier).index}


@asynccontextmanager
async def rig(shelf: Shelf | None = None, *, payload: Any = None, **settings: Any) -> AsyncIterator[Rig]:
    below = [(shelf or Shelf(), {"name": "shelf", "capacity": 100 * FRAME} | settings)]
    async with storage(below=below) as manager, running(Controller()) as controller:
        one = Client(manager, namespace())
        one.payload = payload or one.payload  # type: ignore[method-assign]
        one.store(one.frames(KEYS))
        await one.settled()
        async with agent(manager, controller.url):
            await eventually(lambda: controller.synced)
            yield Rig(manager, controller, one)


def test_pin_and_unpin() -> None:
    async def main() -> None:
        async with rig() as it:
            done = await it.do(m.PinChunks(it.one.space.id, BLOB + ABSENT, 60.0))
            assert (done.state, done.done, done.total) == (m.DONE, 4, 5)
            assert done.failed == {ABSENT.hex(): "it is not here"}
            assert len(it.manager.pinned) == 4
            done = await it.do(m.UnpinChunks(it.one.space.id, BLOB + ABSENT))
            assert (done.state, done.done, done.failed) == (m.DONE, 5, {})
            assert not it.manager.pinned
            done = await it.do(m.PinChunks(it.one.space.id, BLOB, -1.0))
            assert (done.state, done.error) == (
                m.FAILED,
                "a pin of -1 s: give a positive time, or none for one without end",
            )
            assert (await it.do(m.PinChunks(b"?" * 16, BLOB))).failed.keys() == {d.hex() for d in KEYS.digests}

    asyncio.run(main())


@pytest.mark.parametrize("tier", ["", "ram", "shelf"])
def test_drop(tier: str) -> None:
    async def main() -> None:
        async with rig() as it:
            done = await it.do(m.Drop(it.one.space.id, BLOB[:64] + ABSENT, tier))
            assert (done.state, done.done, done.failed) == (m.DONE, 3, {})
            for name in ("ram", "shelf"):
                left = it.there(name)
                assert left == (set(KEYS.digests[2:]) if tier in {"", name} else set(KEYS.digests)), name
            await eventually(lambda: agree(it.controller, it.manager))

    asyncio.run(main())


@pytest.mark.parametrize("end", ["nothing", "time", "fetch", "others"])
def test_a_drop_behind_a_fence(end: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who asked for it may have stood still since: the node says by its own clock whether it is too late."""

    async def main() -> None:
        async with rig() as it:
            space = it.one.space.id
            if end == "time":
                monkeypatch.setattr(fences, "FENCE_SECONDS", -1.0)
            fenced = await it.do(m.Fence(space, BLOB[:64]))
            assert (fenced.state, fenced.done, fenced.total) == (m.DONE, 2, 2)
            if end == "fetch":  # from nowhere, but it was begun
                await it.do(m.Fetch("127.0.0.1:1", space, BLOB[32:96], "ram"))
            dropped = BLOB[:96] if end == "others" else BLOB[:64]
            done = await it.do(m.Drop(space, dropped, "ram", fenced.counts["fence"]))
            if end == "nothing":
                assert (done.state, done.done, done.counts) == (m.DONE, 2, {})
                assert it.there("ram") == set(KEYS.digests[2:])
            else:
                assert (done.state, done.counts) == (m.FAILED, {"late": 1})
                assert "too late" in done.error
                assert it.there("ram") == set(KEYS.digests)
            unknown = await it.do(m.Drop(space, BLOB, "ram", 12345))
            assert unknown.counts == {"late": 1}

    asyncio.run(main())


def test_drop_waits_for_what_is_held_and_tells() -> None:
    async def main() -> None:
        async with rig() as it:
            found = await it.one.look_up(chain(range(8)))
            await it.controller.send(m.Do("d", m.Drop(it.one.space.id, BLOB, "ram")))
            told = it.controller.progress
            await eventually(lambda: any(each.done == 2 for each in told.get("d", ())))
            assert it.there("ram") == set(KEYS.digests[:2])
            assert all(each.state == m.RUNNING for each in told["d"])
            it.one.ask(p.Release(found.lease))
            assert (await it.controller.ended("d")).done == 4
            assert not it.there("ram")

    asyncio.run(main())


def test_a_cancelled_drop_leaves_what_was_held() -> None:
    async def main() -> None:
        async with rig() as it:
            found = await it.one.look_up(chain(range(8)))
            await it.controller.send(m.Do("d", m.Drop(it.one.space.id, BLOB, "ram")))
            await eventually(lambda: any(each.done == 2 for each in it.controller.progress.get("d", ())))
            await it.controller.send(m.Cancel("d"))
            ended = await it.controller.ended("d")
            assert (ended.state, ended.done) == (m.CANCELLED, 2)
            it.one.ask(p.Release(found.lease))
            await asyncio.sleep(0.05)
            assert it.there("ram") == set(KEYS.digests[:2])

    asyncio.run(main())


def test_drop_from_a_store_that_others_share_as_well() -> None:
    async def main() -> None:
        shelf = Shelf(shared=True)
        below = [(shelf, {"name": "store"})]
        async with storage(below=below) as manager, running(Controller()) as c, agent(manager, c.url):
            await eventually(lambda: c.synced)
            one = Client(manager, namespace())
            one.store(one.frames(KEYS))
            await one.settled()
            one.ask(p.Clear(tier="ram"))  # now nothing is known of it here
            assert len(shelf.frames) == 4
            assert (await c.do("all", m.Drop(one.space.id, BLOB))).done == 4
            assert len(shelf.frames) == 4, "without its name a shared store is left alone"
            assert (await c.do("half", m.Drop(one.space.id, BLOB[:64], "store"))).done == 2
            await eventually(lambda: {key.digest for key in shelf.frames} == set(KEYS.digests[2:]))

    asyncio.run(main())


@pytest.mark.parametrize("keep", [True, False])
def test_shift_between_tiers_and_again(*, keep: bool) -> None:
    async def main() -> None:
        async with rig(write="demote") as it:
            assert not it.there("shelf")
            command = m.Shift(it.one.space.id, BLOB + ABSENT, "ram", "shelf", keep)
            for _ in range(2):
                done = await it.do(command)
                assert (done.state, done.done, set(done.failed)) == (m.DONE, 4, {ABSENT.hex()})
                assert it.there("shelf") == set(KEYS.digests)
                assert it.there("ram") == (set(KEYS.digests) if keep else set())
            back = await it.do(m.Shift(it.one.space.id, BLOB, "shelf", "ram"))
            assert back.done == 4
            assert await it.one.load(await it.one.look_up(KEYS), KEYS) == [True] * 4

    asyncio.run(main())


def test_what_a_tier_does_not_take_is_told_by_chunk() -> None:
    async def main() -> None:
        async with rig(write="demote", capacity=2 * FRAME) as it:
            await it.do(m.PinChunks(it.one.space.id, BLOB))  # so that nothing makes room for another
            done = await it.do(m.Shift(it.one.space.id, BLOB, "ram", "shelf", keep=True))
            assert (done.state, done.done, len(done.failed)) == (m.DONE, 2, 2)
            assert set(done.failed.values()) == {"tier 'shelf' did not take it: no room, too much to do, or off"}

    asyncio.run(main())


def test_recode_and_back() -> None:
    async def main() -> None:
        shelf = Shelf()
        async with rig(shelf, payload=lambda digest, shard, length: np.zeros(length, np.uint8)) as it:
            done = await it.do(m.RecodeChunks(it.one.space.id, BLOB + ABSENT, "shelf", "zlib"))
            assert (done.state, done.done, set(done.failed)) == (m.DONE, 4, {ABSENT.hex()})
            assert {parse_trailer(frame).codec for frame in shelf.frames.values()} == {"zlib"}
            done = await it.do(m.RecodeChunks(it.one.space.id, BLOB, "shelf", "identity"))
            assert done.done == 4
            assert {parse_trailer(frame).codec for frame in shelf.frames.values()} == {"identity"}
            assert await it.one.load(await it.one.look_up(KEYS), KEYS) == [True] * 4

    asyncio.run(main())


def test_a41_clear_counts_by_tier_and_waits_for_what_is_held() -> None:
    async def main() -> None:
        async with rig() as it:
            found = await it.one.look_up(chain(range(4)))
            await it.controller.send(m.Do("c", m.ClearTier(tier="ram")))
            told = it.controller.progress
            await eventually(lambda: any(each.done == 3 for each in told.get("c", ())))
            it.one.ask(p.Release(found.lease))
            ended = await it.controller.ended("c")
            assert (ended.state, ended.done, ended.counts) == (m.DONE, 4, {"ram": 4})
            assert not it.there("ram")
            assert (await it.do(m.ClearTier())).counts == {"ram": 0, "shelf": 4}
            await eventually(lambda: agree(it.controller, it.manager))

    asyncio.run(main())


@pytest.mark.parametrize(
    ("command", "error"),
    [
        (m.Drop(b"n" * 16, BLOB, "rm"), "there is no tier 'rm'; tiers: ram, shelf"),
        (m.Shift(b"n" * 16, BLOB, "ram", "ram"), "source and target are both tier 'ram'"),
        (m.Shift(b"n" * 16, BLOB, "ram", "disk"), "there is no tier 'disk'; tiers: ram, shelf"),
        (m.RecodeChunks(b"n" * 16, BLOB, "ram", "zlib"), "tier 'ram' holds frames as the engine needs them"),
        (m.RecodeChunks(b"n" * 16, BLOB, "shelf", "zlob"), "zlob"),
        (m.ClearTier(b"n" * 16), "there is no namespace " + (b"n" * 16).hex()),
        (m.Fetch("127.0.0.1:1", b"n" * 16, BLOB, "ram"), "was not registered"),
        (m.Fetch("127.0.0.1:1", b"n" * 16, BLOB, "ram", 1.0, namespace().json()), "the JSON is of namespace"),
        (m.Fetch("127.0.0.1:1", namespace().id, chain(range(50, 54)).digests[0], "ram"), "talks to no peers"),
    ],
)
def test_what_cannot_be_done_at_all_says_why(command: m.Command, error: str) -> None:
    async def main() -> None:
        async with rig() as it:
            done = await it.do(command)
            assert done.state == m.FAILED
            assert error in done.error
            assert len(it.there("ram")) == len(it.there("shelf")) == 4

    asyncio.run(main())


def test_a_read_only_tier_is_neither_dropped_from_nor_moved_to() -> None:
    async def main() -> None:
        async with rig(write="never") as it:
            for command in (m.Drop(it.one.space.id, BLOB, "shelf"), m.Shift(it.one.space.id, BLOB, "ram", "shelf")):
                assert "tier 'shelf' is read-only" in (await it.do(command)).error

    asyncio.run(main())


def test_a_job_is_done_once_also_over_a_reconnect() -> None:
    async def main() -> None:
        async with rig() as it:
            command = m.Drop(it.one.space.id, BLOB[:32], "ram")
            first = await it.controller.do("j", command)
            assert await it.one.load(await it.one.look_up(KEYS), KEYS) == [True] * 4  # back in RAM
            await it.controller.stop()
            await eventually(lambda: not it.controller.connected)
            await it.controller.start()
            await eventually(lambda: it.controller.synced)
            assert await it.controller.do("j", command) == first
            assert it.there("ram") == set(KEYS.digests), "it was not dropped a second time"
            other = await it.controller.do("j", m.Drop(it.one.space.id, BLOB, "ram"))
            assert (other.state, other.error) == (m.FAILED, "a job of this name has another command")

    asyncio.run(main())


def test_a_job_goes_on_while_the_controller_is_away() -> None:
    async def main() -> None:
        async with rig() as it:
            found = await it.one.look_up(chain(range(8)))
            await it.controller.send(m.Do("d", m.Drop(it.one.space.id, BLOB, "ram")))
            await eventually(lambda: bool(it.controller.progress.get("d")))
            await it.controller.stop()
            await eventually(lambda: not it.controller.connected)
            it.one.ask(p.Release(found.lease))
            await eventually(lambda: not it.there("ram"))
            await it.controller.start()
            assert (await it.controller.ended("d")).done == 4

    asyncio.run(main())


def test_more_jobs_than_run_at_once_wait_their_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agent_jobs, "WAITING_MOST", 3)

    async def main() -> None:
        async with rig() as it:
            found = await it.one.look_up(chain(range(4)))
            drop = m.Drop(it.one.space.id, BLOB[:32], "ram")
            for number in range(agent_jobs.RUNNING_MOST):
                await it.controller.send(m.Do(f"held{number}", drop))
            for number in range(4):
                await it.controller.send(m.Do(f"more{number}", m.PinChunks(it.one.space.id, BLOB[32:])))
            refused = await it.controller.ended("more3")
            assert (refused.state, refused.error) == (m.FAILED, "3 jobs wait already: give it again later")
            await it.controller.send(m.Cancel("more0"))
            assert (await it.controller.ended("more0")).state == m.CANCELLED
            assert not it.manager.pinned
            it.one.ask(p.Release(found.lease))
            assert (await it.controller.ended("more2")).done == 3
            assert (await it.controller.do("more3", m.PinChunks(it.one.space.id, BLOB[32:]))).state == m.DONE
            await it.controller.send(m.Cancel("never seen"))
            assert (await it.controller.ended("never seen")).state == m.CANCELLED

    asyncio.run(main())
