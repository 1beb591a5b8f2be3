"""Controllers that share a directory in a real Redis: either may go, and the Redis may, too."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Any

import pytest
from directory_rig import SPACE, Rig, blob, change, redis_server, rigs
from fleet_rig import Agent, fleet_test, fleets
from redis_rig import RedisServer, has_tls

from lmkv.agent import messages as m
from lmkv.controller.directory import Directory, Place
from lmkv.controller.fleet import Fleet
from lmkv.controller.redis_directory import RedisDirectory
from lmkv.controller.redis_link import Link
from lmkv.controller.redis_roster import RedisRoster
from lmkv.errors import BackendError, ClosedError, ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

SECRET = "s3cret-w0rd"


@pytest.fixture(scope="module")
def server() -> Iterator[RedisServer]:
    with redis_server() as made:
        yield made


@pytest.fixture
def rig(server: RedisServer) -> Rig:
    return rigs(lambda: server, "redis")


async def until(true: Callable[[], bool]) -> None:
    end = time.monotonic() + 20
    while not true():
        assert time.monotonic() < end
        await asyncio.sleep(0.01)


def test_either_controller_knows_what_any_node_told_the_other(rig: Rig) -> None:
    async def test(one: Fleet, two: Fleet) -> None:
        first, second = Agent(one, "a"), Agent(two, "b")
        for agent, has in ((first, range(6)), (second, range(3, 12))):
            agent.has[0].update(has)
            await agent.join()
            await agent.tell_all()
        for fleet in (one, two):
            assert list(await fleet.nodes()) == ["a", "b"]
            found = await fleet.directory.lookup(SPACE, blob(range(12)))
            assert [(hit.node, hit.leading, hit.total) for hit in found.nodes()] == [("a", 6, 6), ("b", 0, 9)]
        await first.say(first.events(0, removed=range(6)))
        assert (await two.directory.holders(SPACE, blob([0, 3]))) == [(), (Place("b", 0),)]

    fleet_test(rig, test, count=2)


def test_a_command_reaches_a_node_of_the_other_controller_and_its_progress_both(rig: Rig) -> None:
    async def test(one: Fleet, two: Fleet) -> None:
        heard: dict[str, list[Any]] = {"one": [], "two": []}
        one.listen(lambda node, progress: heard["one"].append((node, progress)))
        two.listen(lambda node, progress: heard["two"].append((node, progress)))
        agent = Agent(one)
        await agent.join()
        command = m.Do("job", m.Drop(SPACE, blob([1]), "ram"))
        await two.send("a", command)
        await until(lambda: bool(agent.sent))
        assert agent.sent == [command]
        said = m.Progress("job", 1, 1, state=m.DONE)
        await agent.say(said)
        await until(lambda: bool(heard["two"]))
        assert heard == {"one": [("a", said)], "two": [("a", said)]}

    fleet_test(rig, test, count=2)


def test_the_controller_that_is_left_serves_and_carries_out(rig: Rig) -> None:
    async def test(one: Fleet, two: Fleet) -> None:
        agent = Agent(one)
        agent.has[0].update(range(6))
        await agent.join()
        await agent.tell_all()
        await one.close()  # as a kill does, this tells nobody
        assert (await two.directory.lookup(SPACE, blob(range(6)))).nodes()[0].leading == 6
        with pytest.raises(ClosedError) as raised:
            await two.send("a", m.Cancel("job"))
        assert raised.value.kind == "away"
        again = Agent(two, epoch=agent.epoch)
        again.has[0].update(range(3, 9))
        await again.join()
        assert await again.known() == agent.has
        await two.send("a", m.Cancel("job"))
        assert again.sent == [m.Cancel("job")]
        await again.tell_all()
        assert await again.known() == again.has
        await again.say(again.events(1, [20]))
        assert await again.known() == again.has

    fleet_test(rig, test, count=2)


def test_a_connection_that_has_moved_to_the_other_controller_changes_nothing_more(rig: Rig) -> None:
    async def test(one: Fleet, two: Fleet) -> None:
        before = Agent(one)
        before.has[0].update(range(6))
        await before.join()
        await before.tell_all()
        after = Agent(two, epoch=before.epoch)
        after.has[0].update(range(10, 14))
        await after.join()
        pages = list(after.pages(most=2))
        await after.say(pages[0])
        # The old one still talks, for its controller has not heard of the new one: it may, but only in the old epoch.
        await before.say(before.events(0, [30]))
        await after.say(pages[1])
        assert await after.known() == ({10, 11, 12, 13}, set())
        late = before.events(0, [31])
        assert await before.say(late) == ()
        with pytest.raises(ClosedError):
            await before.say(before.beat())
        assert await after.known() == ({10, 11, 12, 13}, set())
        await before.talk.ended()
        assert (await two.node("a")).connected

    fleet_test(rig, test, count=2)


def test_of_two_resyncs_of_a_node_the_later_one_counts(rig: Rig) -> None:
    async def test(one: Directory) -> None:
        two = rig.make()
        await one.apply("a", [change([0])])
        await one.begin("a")
        await one.page("a", SPACE, 0, blob([1]))
        await two.begin("a")
        await two.page("a", SPACE, 0, blob([2]))
        with pytest.raises(BackendError, match="node a has been dropped"):
            await one.page("a", SPACE, 0, blob([3]))
        assert not await one.end("a")
        place = (Place("a", 0),)
        assert await one.holders(SPACE, blob(range(4))) == [place, (), place, ()]
        assert await two.end("a")
        assert await one.holders(SPACE, blob(range(4))) == [(), (), place, ()]

    rig.run(test)


def test_a_late_end_of_a_resync_leaves_the_other_alone(rig: Rig) -> None:
    async def test(one: Directory) -> None:
        two = rig.make()
        await one.begin("a")
        await two.begin("a")
        assert not await one.end("a")
        await two.page("a", SPACE, 0, blob([2]))
        assert await two.end("a")
        assert await one.holders(SPACE, blob([2])) == [(Place("a", 0),)]

    rig.run(test)


def test_a_drop_by_another_controller_is_noticed_and_made_good(rig: Rig) -> None:
    async def test(one: Fleet, two: Fleet) -> None:
        agent = Agent(one)
        agent.has[0].update(range(6))
        await agent.join()
        await agent.tell_all()
        await two.directory.drop("a")
        assert await agent.known() == (set(), set())
        assert await agent.say(agent.events(0, [7])) == ()
        assert await agent.say(agent.beat()) == (m.Resync("the controller's directory was away"),)
        pages = list(agent.pages())
        await agent.say(pages[0])
        await two.directory.drop("a")
        (answer,) = await agent.say(pages[1]) or await agent.say(agent.beat())
        assert isinstance(answer, m.Resync)
        await agent.tell_all()
        assert await agent.known() == agent.has

    fleet_test(rig, test, count=2)


def test_while_the_redis_is_away_nothing_is_lost_for_good(tmp_path: Path) -> None:
    async def test(server: RedisServer, fleet: Fleet) -> None:
        agent = Agent(fleet)
        agent.has[0].update(range(6))
        await agent.join()
        await agent.tell_all()
        server.kill()
        put_off = time.monotonic()
        assert await agent.say(agent.events(0, [7])) == ()
        with pytest.raises(BackendError, match="the controller's Redis"):
            await fleet.directory.lookup(SPACE, blob([1]))
        assert await agent.say(agent.beat()) == ()
        server.start()  # without anything that it knew
        await until(lambda: time.monotonic() > put_off + 0.5)
        with pytest.raises(ClosedError):
            await agent.say(agent.beat())
        again = Agent(fleet, epoch=agent.epoch)
        again.has[0].update(agent.has[0])
        await again.join()
        await again.tell_all()
        assert await again.known() == agent.has

    async def body() -> None:
        with RedisServer(tmp_path) as server:
            async with fleets(Rig("redis", server.url), timeout=1.0) as (fleet,):
                await test(server, fleet)

    asyncio.run(body())


def test_entries_expire_and_nodes_tell_anew_before_that(rig: Rig, server: RedisServer) -> None:
    async def test() -> None:
        directory = RedisDirectory(rig.url, keep=3)
        assert directory.refresh == 1.0
        fleet = Fleet(directory, RedisRoster(rig.url, 30.0))
        agent = Agent(fleet)
        agent.has[0].add(1)
        await agent.join()
        await agent.tell_all()
        (key,) = [key for key in server.cli("--no-raw", "KEYS", "lmkv:fleet:d:*").splitlines() if key]
        assert "lmkv:fleet:d:" in key
        assert (
            0 < int(server.cli("EVAL", "return redis.call('TTL', redis.call('KEYS', 'lmkv:fleet:d:*')[1])", "0")) <= 3
        )
        assert await agent.say(agent.beat()) == ()
        await asyncio.sleep(1.05)
        (answer,) = await agent.say(agent.beat())
        assert answer == m.Resync("what is known of the node is read anew now and then")
        assert await agent.say(agent.events(0, [2])) == (), "what it told still holds"
        assert await agent.known() == agent.has
        assert await agent.say(agent.beat()) == (), "asked once"
        await fleet.close()

    asyncio.run(test())


def test_sets_do_not_fill_up_with_places_that_have_gone(rig: Rig, server: RedisServer) -> None:
    async def test(directory: Any) -> None:
        for _ in range(40):
            await directory.begin("a")
            await directory.page("a", SPACE, 0, blob([1]))
            await directory.end("a")
        count = server.cli("EVAL", "return redis.call('SCARD', redis.call('KEYS', 'lmkv:fleet:d:*')[1])", "0")
        assert int(count) <= 9
        assert int(server.cli("HLEN", "lmkv:fleet:place")) == 1
        assert await directory.holders(SPACE, blob([1])) == [(Place("a", 0),)]

    rig.run(test)


def test_a_lookup_takes_one_round_trip_or_two(rig: Rig, server: RedisServer) -> None:
    async def test(directory: Any) -> None:
        await directory.apply("a", [change(range(512))])
        await directory.lookup(SPACE, blob(range(512)))

        def calls() -> int:
            stats = server.facts("commandstats")
            names = ("cmdstat_evalsha", "cmdstat_multi", "cmdstat_exists", "cmdstat_hgetall")
            return sum(int(stats[name].split("calls=")[1].split(",")[0]) for name in names if name in stats)

        before = calls()
        await directory.lookup(SPACE, blob(range(512)))
        assert calls() - before == 1
        before = calls()
        await directory.apply("b", [change([1])])
        told = calls() - before
        await directory.lookup(SPACE, blob(range(512)))
        assert calls() - before - told == 3, "the script, and the names of places in a transaction"

    rig.run(test)


def test_a_password_and_tls_work_and_the_password_is_shown_nowhere(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    if not has_tls():
        pytest.skip("this redis-server is built without TLS")
    with RedisServer(tmp_path, tls=True, password=SECRET) as server:
        assert server.certificates is not None
        url = f"{server.url}?ssl_ca_certs={server.certificates.ca}"

        async def test(directory: Any) -> None:
            await directory.apply("a", [change([1])])
            assert await directory.holders(SPACE, blob([1])) == [(Place("a", 0),)]
            wrong = RedisDirectory(url.replace(SECRET, SECRET + "x"))
            with pytest.raises(BackendError) as raised:
                await wrong.lookup(SPACE, blob([1]))
            assert SECRET not in str(raised.value)
            await wrong.close()

        Rig("redis", url).run(test)
    assert SECRET not in caplog.text


@pytest.mark.parametrize(
    "url",
    [
        f"http://user:{SECRET}@host",
        f"redis:/{SECRET}",
        f"redis://:{SECRET}@host:port/0",
        f"redis://:{SECRET}@host:1/zero",
        f"redis://:{SECRET}/@host:1/0",
        f"redis://:@{SECRET}/@host:1/0",
        f"redis://host:1/0?password={SECRET}&port=none",
        f"unix:///run/redis.sock?db={SECRET}",
        f"unix://{SECRET}",
        "",
    ],
)
def test_a_wrong_url_is_refused_without_repeating_what_may_be_a_password(url: str) -> None:
    with pytest.raises(ConfigError, match="no URL of a Redis") as raised:
        Link(url)
    assert SECRET not in str(raised.value)
    assert SECRET not in repr(raised.value.__cause__)
