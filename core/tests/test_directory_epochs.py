"""Epochs, gaps and what comes twice: the directory comes right, whatever gets lost on the way."""

from __future__ import annotations

import asyncio
import random
from typing import TYPE_CHECKING

import pytest
from directory_rig import Rig, both, change, redis_server, rigs
from fleet_rig import TIMEOUT, Agent, fleet_test
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from lmkv.agent import messages as m
from lmkv.controller.fleet import Fleet
from lmkv.controller.memory_directory import MemoryDirectory
from lmkv.controller.roster import MemoryRoster
from lmkv.errors import BackendError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from redis_rig import RedisServer


@pytest.fixture(scope="module")
def server() -> Iterator[RedisServer]:
    with redis_server() as made:
        yield made


@pytest.fixture
def rig(request: pytest.FixtureRequest) -> Rig:
    return rigs(lambda: request.getfixturevalue("server"), request.param)


def test_a_gap_asks_once_and_nothing_counts_until_the_next_epoch() -> None:
    async def test(fleet: Fleet) -> None:
        agent = Agent(fleet)
        agent.has[0].update(range(5))
        await agent.join()
        await agent.tell_all()
        agent.events(0, [20])  # lost on the way
        (answer,) = await agent.say(agent.events(0, [21]))
        assert answer == m.Resync("events 1 to 1 did not come")
        assert await agent.say(agent.events(0, [22])) == ()
        assert await agent.say(agent.beat()) == ()
        assert not (await fleet.node("a")).synced
        assert await agent.known() == (set(range(5)), set())
        await agent.tell_all()
        assert await agent.known() == agent.has
        assert fleet.counts["gaps"] == fleet.counts["resyncs"] == 1

    fleet_test(Rig("memory"), test)


def test_what_comes_twice_or_late_changes_nothing() -> None:
    async def test(fleet: Fleet) -> None:
        agent = Agent(fleet)
        agent.has[0].update(range(9))
        await agent.join()
        first = list(agent.pages())
        stale = m.Events(agent.epoch, 1, (change(range(30, 40)),))
        for page in (first[0], first[0], first[1], first[1], first[0], first[2], first[2], first[1]):
            assert await agent.say(page) == ()
        assert await agent.known() == agent.has
        stored, removed = agent.events(0, [12]), agent.events(0, removed=[12])
        for events in (stored, removed, stored, removed, stored):
            assert await agent.say(events) == ()
        assert await agent.known() == agent.has
        await agent.tell_all()
        for late in (stale, *first):
            assert await agent.say(late) == ()
        assert await agent.known() == agent.has
        assert fleet.counts["gaps"] == 0

    fleet_test(Rig("memory"), test)


def test_gaps_in_pages_and_what_a_heartbeat_tells() -> None:
    async def test(fleet: Fleet) -> None:
        agent = Agent(fleet)
        agent.has[0].update(range(12))
        await agent.join()
        first, _, third = agent.pages()
        assert await agent.say(first) == ()
        assert await agent.say(third) == (m.Resync("page 1 did not come"),)
        await agent.tell_all()
        agent.events(0, [30])  # lost
        assert await agent.say(agent.beat()) == (m.Resync("events 1 to 1 did not come"),)
        await agent.tell_all()
        _, second, *_ = agent.pages()  # the first is lost
        assert await agent.say(second) == (m.Resync("page 0 did not come"),)
        await agent.tell_all()
        assert await agent.known() == agent.has
        agent.epoch += 1
        early = await agent.say(agent.events(0, [31]))
        assert early == (m.Resync(f"events of epoch {agent.epoch}, whose beginning did not come"),)
        first, *others = agent.pages()
        assert await agent.say(first) == ()
        agent.events(1, [1])  # lost between pages
        (answer,) = await agent.say(replace(others[0], sequence=1))
        assert answer == m.Resync("events 1 to 1 did not come")
        await agent.tell_all()
        assert await agent.known() == agent.has

    fleet_test(Rig("memory"), test)


async def lossy(agent: Agent, chance: random.Random) -> list[m.FromController]:
    """Some time on a bad line: messages get lost or come twice, epochs break off. Returns what was never answered."""
    inbox: list[m.FromController] = [await agent.join()]

    async def through(message: m.FromNode) -> None:
        for _ in range(chance.choice([0, 1, 1, 1, 1, 1, 1, 2])):
            inbox.extend(await agent.say(message))

    for _ in range(40):
        tier, some = chance.randrange(2), chance.sample(range(40), 5)
        await through(agent.events(tier, some[:3], some[3:]))
        if chance.random() < 0.2:
            await through(agent.beat())
        if inbox:
            inbox.clear()
            for page in agent.pages():
                await through(page)
                if chance.random() < 0.2:
                    break
    return inbox


@both
@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seed=st.integers(0, 1 << 30))
def test_whatever_is_lost_or_doubled_the_directory_comes_right(rig: Rig, seed: int) -> None:
    async def test(fleet: Fleet) -> None:
        agent = Agent(fleet, incarnation=seed)
        inbox = await lossy(agent, random.Random(seed))
        inbox += await agent.say(agent.beat())
        # An epoch that broke off is gone on with by nobody but another one.
        if inbox or not (await fleet.node("a")).synced:
            await agent.tell_all()
        assert await agent.known() == agent.has

    fleet_test(rig, test)


def test_a_doubled_page_hides_no_missing_one_and_begins_no_epoch_again() -> None:
    async def test(fleet: Fleet) -> None:
        agent = Agent(fleet)
        agent.has[0].update(range(12))
        await agent.join()
        first, _, third = agent.pages()
        assert await agent.say(first) == ()
        assert await agent.say(first) == ()
        assert await agent.say(third) == (m.Resync("page 1 did not come"),)
        (whole,) = agent.pages(most=12)
        assert await agent.say(whole) == ()
        agent.events(0, removed=[3])  # lost
        assert await agent.say(agent.beat()) == (m.Resync("events 1 to 1 did not come"),)
        assert await agent.say(whole) == ()
        assert not (await fleet.node("a")).synced
        await agent.tell_all()
        assert await agent.known() == agent.has

    fleet_test(Rig("memory"), test)


class Moody(MemoryDirectory):
    """Is away now and then."""

    away = False

    async def begin(self, node: str) -> None:
        if self.away:
            raise BackendError("away")
        await super().begin(node)

    async def apply(self, node: str, changes: Sequence[m.Change]) -> None:
        if self.away:
            raise BackendError("away")
        await super().apply(node, changes)


def test_a_directory_that_is_away_is_asked_for_with_each_heartbeat_until_it_is_back() -> None:
    async def test() -> None:
        directory = Moody()
        fleet = Fleet(directory, MemoryRoster(TIMEOUT))
        agent = Agent(fleet)
        agent.has[0].update(range(3))
        await agent.join()
        await agent.tell_all()
        directory.away = True
        for number in (5, 6, 7):
            assert await agent.say(agent.events(0, [number])) == (), "nothing is asked for by each message"
        resync = (m.Resync("the controller's directory was away"),)
        for _ in range(3):
            assert await agent.say(agent.beat()) == resync
            assert await agent.say(agent.beat()) == (), "an epoch is on its way"
            for page in agent.pages():
                assert await agent.say(page) == ()
        directory.away = False
        assert await agent.say(agent.beat()) == resync
        await agent.tell_all()
        assert await agent.known() == agent.has
        assert await agent.say(agent.beat()) == ()
        await fleet.close()

    asyncio.run(test())


def test_a_name_that_two_nodes_have_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    async def test(fleet: Fleet) -> None:
        one, two = Agent(fleet, incarnation=1), Agent(fleet, incarnation=2)
        await one.join()
        assert "same name" not in caplog.text
        await two.join()
        assert "node a: another process has taken its place; do two nodes have the same name?" in caplog.text

    fleet_test(Rig("memory"), test)
