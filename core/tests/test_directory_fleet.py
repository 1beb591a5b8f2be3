"""The fleet: who is registered, who is silent, who is refused; in memory and over a real Redis."""

from __future__ import annotations

import asyncio
import math
import time
from typing import TYPE_CHECKING

import pytest
from directory_rig import SPACE, Rig, blob, both, change, redis_server, rigs
from fleet_rig import TIERS, TIMEOUT, Agent, Clock, fleet_test, register
from msgspec.structs import replace
from storage_rig import namespace

from lmkv.agent import messages as m
from lmkv.controller.directory import Place
from lmkv.controller.fleet import Fleet, UnknownNodeError
from lmkv.controller.memory_directory import MemoryDirectory
from lmkv.controller.redis_roster import RedisRoster
from lmkv.controller.roster import MemoryRoster, NodeRecord
from lmkv.errors import ClosedError, ProtocolError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from redis_rig import RedisServer

HOUR = 3600.0


@pytest.fixture(scope="module")
def server() -> Iterator[RedisServer]:
    with redis_server() as made:
        yield made


@pytest.fixture
def rig(request: pytest.FixtureRequest) -> Rig:
    return rigs(lambda: request.getfixturevalue("server"), request.param)


@both
def test_a_node_registers_and_tells_what_it_has(rig: Rig) -> None:
    async def test(fleet: Fleet) -> None:
        agent = Agent(fleet)
        agent.has[0].update(range(9))
        agent.has[1].update([2, 30])
        assert await agent.join() == m.Accepted(TIMEOUT)
        record = await fleet.node("a")
        assert (record.connected, record.synced, record.tiers) == (True, False, TIERS)
        await agent.tell_all()
        assert await agent.known() == agent.has
        assert (await fleet.node("a")).synced
        assert await agent.say(agent.events(1, [7, 8], [30])) == ()
        assert await agent.known() == agent.has
        assert await agent.say(agent.beat()) == ()
        record = await fleet.node("a")
        assert (record.used, record.load, record.endpoints) == ((5, 6), 0.5, {"peer": "127.0.0.1:7"})
        await agent.talk.ended()
        record = await fleet.node("a")
        assert not record.connected
        assert await agent.known() == agent.has, "it has its time-out to come back"

    fleet_test(rig, test)


@both
def test_an_empty_node_has_nothing(rig: Rig) -> None:
    async def test(fleet: Fleet) -> None:
        agent = Agent(fleet)
        await agent.join()
        await agent.say(m.Page(1, 0, True, 0, b"", 0, b""))
        assert (await fleet.node("a")).synced
        assert await agent.known() == (set(), set())

    fleet_test(rig, test)


def test_a38_a_heartbeat_that_is_slower_than_the_time_out_is_refused() -> None:
    async def test(fleet: Fleet) -> None:
        for wrong in (40.0, TIMEOUT, 0.0, -1.0, math.nan, math.inf):
            agent = Agent(fleet)
            (answer,) = await agent.say(register(heartbeat=wrong))
            assert isinstance(answer, m.Refused)
            assert answer.kind == "heartbeat"
            assert f"every {wrong:g} s" in answer.message
            assert "after 30 s" in answer.message
            assert agent.talk.refused
        assert await fleet.nodes() == {}

    fleet_test(Rig("memory"), test)


def test_a38_a_node_without_traffic_stays_and_a_silent_one_goes() -> None:
    clock = Clock()

    async def test(fleet: Fleet) -> None:
        quiet, silent = Agent(fleet, "quiet"), Agent(fleet, "silent")
        for agent in (quiet, silent):
            agent.has[0].add(1)
            await agent.join()
            await agent.tell_all()
        begin = clock.now
        while clock.now < begin + 2 * HOUR:
            clock.now += 5.0
            assert await quiet.say(quiet.beat()) == ()
            dropped = await fleet.tick()
            assert dropped == (["silent"] if clock.now == begin + 35.0 else [])
        assert list(await fleet.nodes()) == ["quiet"]
        assert await fleet.directory.holders(SPACE, blob([1])) == [(Place("quiet", 0),)]
        assert (silent.closed, quiet.closed) == (1, 0)
        with pytest.raises(ClosedError, match="was dropped"):
            await silent.say(silent.beat())

    fleet_test(Rig("memory"), test, clock=clock)


def test_a38_a_silent_node_goes_by_the_clock_of_the_shared_store(server: RedisServer) -> None:
    async def test(fleet: Fleet, other: Fleet) -> None:
        agent, lives = Agent(fleet), Agent(fleet, "b")
        for each in (agent, lives):
            each.has[0].add(1)
            await each.join()
            await each.tell_all()
        assert await other.tick() == []
        until = time.monotonic() + 20
        while not (dropped := await other.tick()):
            assert time.monotonic() < until
            await lives.say(lives.beat())
            await asyncio.sleep(0.05)
        assert dropped == ["a"]
        assert await fleet.tick() == []
        assert list(await fleet.nodes()) == ["b"]
        assert await fleet.directory.holders(SPACE, blob([1])) == [(Place("b", 0),)]
        with pytest.raises(ClosedError):
            await agent.say(agent.beat())

    fleet_test(rigs(lambda: server, "redis"), test, count=2, timeout=0.8)


@both
def test_a29_a_node_that_restarts_between_two_heartbeats_is_known_as_another(rig: Rig) -> None:
    async def test(fleet: Fleet) -> None:
        before = Agent(fleet, incarnation=1)
        before.has[0].update(range(8))
        before.has[1].update([3])
        await before.join()
        await before.tell_all()
        after = Agent(fleet, incarnation=2)
        after.has[1].update([3])
        assert isinstance(await after.join(), m.Accepted)
        assert await after.known() == (set(), set()), "what was in its RAM is promised no more, at once"
        assert before.closed
        with pytest.raises(ClosedError, match="another connection"):
            await before.say(before.events(0, [9]))
        await before.talk.ended()
        assert (await fleet.node("a")).connected
        await after.tell_all()
        assert await after.known() == after.has
        await after.say(after.events(0, [1]))
        assert await after.known() == ({1}, {3})

    fleet_test(rig, test)


@both
def test_a_node_that_connects_again_keeps_what_it_had(rig: Rig) -> None:
    async def test(fleet: Fleet) -> None:
        before = Agent(fleet)
        before.has[0].update(range(8))
        await before.join()
        await before.tell_all()
        await before.talk.ended()
        after = Agent(fleet, epoch=before.epoch)
        after.has[0].update(range(4, 10))
        await after.join()
        assert await after.known() == before.has
        await after.tell_all()
        assert await after.known() == after.has

    fleet_test(rig, test)


def test_an_agent_that_breaks_the_protocol_is_sent_away() -> None:
    async def test(fleet: Fleet) -> None:
        stranger = Agent(fleet)
        for early in (stranger.beat(), stranger.events(0, [1]), m.Progress("job", 0, 0)):
            with pytest.raises(ProtocolError, match="before the node has registered"):
                await stranger.say(early)
        await stranger.talk.ended()
        agent = Agent(fleet)
        await agent.join()
        await agent.tell_all()
        wrong = (
            register(),
            m.Events(1, 1, (change([1], tier=2),)),
            m.Events(1, 1, (change([1], tier=-1),)),
            m.Events(1, 1, (change([1], space=b"short"),)),
            m.Page(2, 0, True, 0, SPACE, 7, blob([1])),
            m.Heartbeat(0, (1, 2, 3), 0.0),
            m.Heartbeat(0, (1, 2), math.nan),
            m.Namespaces(('{"no": "namespace"}',)),
            m.Namespaces(tuple(namespace(model=str(i)).json() for i in range(1025))),
        )
        for message in wrong:
            with pytest.raises(ProtocolError):
                await agent.say(message)
        assert await agent.known() == (set(), set())

    fleet_test(Rig("memory"), test)


def test_nodes_that_cannot_be_taken_are_refused_with_a_reason() -> None:
    async def test(fleet: Fleet) -> None:
        twins = (TIERS[0], TIERS[0])
        for kind, wrong in (
            ("version", {"version": m.VERSION + 1}),
            ("name", {"name": ""}),
            ("name", {"name": "line\nbreak"}),
            ("name", {"name": "n" * 200}),
            ("name", {"tiers": twins}),
            ("limit", {"endpoints": {str(i): "x" for i in range(20)}}),
            ("limit", {"epoch": -1}),
        ):
            agent = Agent(fleet)
            (answer,) = await agent.say(register(**wrong))
            assert isinstance(answer, m.Refused), wrong
            assert (answer.kind, agent.talk.refused) == (kind, True)
        with pytest.raises(ProtocolError):
            await Agent(fleet).say(register(namespaces=("{}",)))
        assert await fleet.nodes() == {}

    fleet_test(Rig("memory"), test)


@both
def test_namespaces_are_those_of_registered_nodes(rig: Rig) -> None:
    one, two, three = (namespace(model=model) for model in ("one", "two", "three"))
    clock = Clock()

    async def test(fleet: Fleet) -> None:
        agent, other = Agent(fleet), Agent(fleet, "b")
        await agent.say(register(namespaces=(one.json(),)))
        await other.say(register("b", namespaces=(two.json(),)))
        assert await agent.say(m.Namespaces((two.json(), three.json()))) == ()
        assert await fleet.namespaces() == {each.id: each for each in (one, two, three)}
        assert set((await fleet.node("a")).namespaces) == {one.id, two.id, three.id}
        again = Agent(fleet, incarnation=2)
        await again.join()
        clock.now += TIMEOUT / 2
        await other.say(other.beat())
        assert await fleet.namespaces() == {two.id: two}

    fleet_test(rig, test, clock=clock)


def test_a41_a_clear_shows_in_the_directory_and_an_unknown_node_is_an_error() -> None:
    old, new = (namespace(model=f"weights of {day}").id for day in ("monday", "tuesday"))

    async def test(fleet: Fleet) -> None:
        agent = Agent(fleet)
        await agent.join()
        await agent.say(m.Page(1, 0, False, 0, old, 0, blob(range(6))))
        await agent.say(m.Page(1, 1, True, 0, old, 1, blob(range(4))))
        lookup = fleet.directory.lookup
        assert (await lookup(new, blob(range(6)))).holdings == ()
        cleared = (m.Change(old, 0, b"", blob([0, 1, 2, 4, 5])), m.Change(old, 1, b"", blob(range(4))))
        await agent.say(m.Events(1, 1, cleared))
        held = await lookup(old, blob(range(6)))
        assert [(each.place.tier, each.bitmap) for each in held.holdings] == [(0, b"\x08")]
        await agent.say(m.Events(1, 2, (m.Change(old, 0, b"", blob([3])),)))
        assert (await lookup(old, blob(range(6)))).holdings == ()
        await agent.say(m.Events(1, 3, (m.Change(new, 0, blob([1]), b""), m.Change(old, 0, blob([2]), b""))))
        assert await fleet.directory.holders(new, blob([1, 2])) == [(Place("a", 0),), ()]
        assert await fleet.directory.holders(old, blob([1, 2])) == [(), (Place("a", 0),)]
        with pytest.raises(UnknownNodeError, match=r"no node 'z' is registered; there are: a$"):
            await fleet.send("z", m.Do("job", m.ClearTier()))

    fleet_test(Rig("memory"), test)


def test_commands_reach_a_node_and_its_progress_everybody() -> None:
    async def test(fleet: Fleet) -> None:
        heard: list[tuple[str, m.Progress]] = []
        fleet.listen(lambda node, progress: heard.append((node, progress)))
        with pytest.raises(UnknownNodeError, match="none is registered"):
            await fleet.send("a", m.Cancel("job"))
        agent = Agent(fleet)
        await agent.join()
        command = m.Do("job", m.PinChunks(SPACE, blob([1])))
        await fleet.send("a", command)
        assert agent.sent == [command]
        said = m.Progress("job", 1, 1, state=m.DONE)
        assert await agent.say(said) == ()
        assert heard == [("a", said)]
        await agent.talk.ended()
        with pytest.raises(ClosedError, match="not connected") as raised:
            await fleet.send("a", command)
        assert raised.value.kind == "away"

    fleet_test(Rig("memory"), test)


def test_silent_nodes_are_looked_for_without_being_asked() -> None:
    async def test() -> None:
        fleet = Fleet(MemoryDirectory(), MemoryRoster(0.3))
        await fleet.start()
        agent = Agent(fleet)
        await agent.join()
        until = time.monotonic() + 20
        while await fleet.nodes():
            assert time.monotonic() < until
            await asyncio.sleep(0.02)
        assert agent.closed == 1
        await fleet.close()
        await fleet.close()

    asyncio.run(test())


@both
def test_a_record_changes_only_in_the_name_of_its_connection(rig: Rig) -> None:
    clock = Clock()

    async def test(fleet: Fleet) -> None:
        roster = fleet.roster
        first, second = (
            NodeRecord("a", 1, {}, TIERS, (), 5.0, roster.controller, connection) for connection in ("first", "second")
        )
        assert await roster.register(first, {}) is None
        assert await roster.seen(first)
        assert await roster.register(second, {}) == first
        if isinstance(roster, RedisRoster):
            roster._put_off.clear()  # so that it asks
        assert not await roster.seen(first)
        assert not await roster.update(replace(first, load=1.0))
        assert await roster.update(replace(second, load=0.5))
        assert await roster.nodes() == {"a": replace(second, load=0.5)}
        assert not await roster.remove(replace(second, load=0.5)), "it lives"
        assert not await roster.remove(first)
        assert list(await roster.nodes()) == ["a"]

    fleet_test(rig, test, clock=clock)
