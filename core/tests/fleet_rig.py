"""What tests of the fleet stand on: agents that tell what they have, controllers that share what they know."""

from __future__ import annotations

import asyncio
import contextlib
import time
from typing import TYPE_CHECKING, Any

from directory_rig import SPACE, Rig, blob, change
from msgspec.structs import replace

from lmkv.agent import messages as m
from lmkv.controller.fleet import Fleet
from lmkv.controller.memory_directory import MemoryDirectory
from lmkv.controller.redis_directory import RedisDirectory
from lmkv.controller.redis_roster import RedisRoster
from lmkv.controller.roster import MemoryRoster

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable

TIMEOUT = 30.0
TIERS = (m.TierFacts("ram", "cpu", 1 << 30, False, True), m.TierFacts("disk", "disk", 0, False, True))


class Clock:
    """Time that passes when it is told to."""

    now = 1000.0

    def __call__(self) -> float:
        return self.now


def register(name: str = "a", incarnation: int = 1, epoch: int = 1, **other: Any) -> m.Register:
    said = m.Register(m.VERSION, name, incarnation, epoch, {"peer": "127.0.0.1:7"}, (), TIERS, 5.0)
    return replace(said, **other)


class Agent:
    """The node's side of a connection: keeps what it has, tells it as an agent does."""

    def __init__(self, fleet: Fleet, name: str = "a", incarnation: int = 1, epoch: int = 0) -> None:
        self.fleet = fleet
        self.name = name
        self.incarnation = incarnation
        self.has: tuple[set[int], set[int]] = (set(), set())
        self.epoch = epoch
        self.sequence = 0
        self.sent: list[m.FromController] = []
        self.closed = 0
        self.talk = fleet.converse(self.sent.append, self.close)

    def close(self) -> None:
        self.closed += 1

    async def say(self, message: m.FromNode) -> tuple[m.FromController, ...]:
        """Through bytes, as it comes."""
        return await self.talk.receive(m.decode_from_node(m.encode(message)))

    async def join(self) -> m.FromController:
        heartbeat = min(5.0, self.fleet.roster.timeout / 10)
        (answer,) = await self.say(register(self.name, self.incarnation, self.epoch + 1, heartbeat=heartbeat))
        return answer

    def pages(self, most: int = 4) -> Iterable[m.Page]:
        """Of another epoch."""
        self.epoch += 1
        self.sequence = 0
        parts = [
            (tier, sorted(has)[at : at + most]) for tier, has in enumerate(self.has) for at in range(0, len(has), most)
        ]
        for number, (tier, part) in enumerate(parts or [(0, [])]):
            last = number >= len(parts) - 1
            yield m.Page(self.epoch, number, last, self.sequence, SPACE, tier, blob(part))

    async def tell_all(self) -> None:
        for page in self.pages():
            assert await self.say(page) == ()

    def events(self, tier: int, stored: Iterable[int] = (), removed: Iterable[int] = ()) -> m.Events:
        self.has[tier].update(stored)
        self.has[tier].difference_update(removed)
        self.sequence += 1
        return m.Events(self.epoch, self.sequence, (change(stored, removed, tier),))

    def beat(self) -> m.Heartbeat:
        return m.Heartbeat(self.sequence, (5, 6), 0.5)

    async def known(self, numbers: int = 40) -> tuple[set[int], set[int]]:
        """What the directory says that it has."""
        found: tuple[set[int], set[int]] = (set(), set())
        for number, places in enumerate(await self.fleet.directory.holders(SPACE, blob(range(numbers)))):
            for place in places:
                if place.node == self.name:
                    found[place.tier].add(number)
        return found


@contextlib.asynccontextmanager
async def fleets(
    rig: Rig, count: int = 1, timeout: float = TIMEOUT, clock: Callable[[], float] = time.monotonic
) -> Any:
    """Some that share what they know; they look for silent nodes only when told to."""
    made = []
    for _ in range(count):
        if rig.kind == "memory":
            made.append(Fleet(MemoryDirectory(), MemoryRoster(timeout, clock)))
        else:
            made.append(Fleet(RedisDirectory(rig.url), RedisRoster(rig.url, timeout)))
        await made[-1].roster.start()
    try:
        yield made
    finally:
        for fleet in made:
            await fleet.close()


def fleet_test(rig: Rig, test: Callable[..., Awaitable[None]], count: int = 1, **options: Any) -> None:
    async def body() -> None:
        async with fleets(rig, count, **options) as made:
            await test(*made)

    asyncio.run(body())
