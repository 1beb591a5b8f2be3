"""What a directory does, in memory and in a real Redis alike."""

from __future__ import annotations

import asyncio
import random
from typing import TYPE_CHECKING, Any

import pytest
from directory_rig import OTHER, SPACE, Model, Rig, blob, both, change, digest, redis_server, rigs
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lmkv.controller.directory import Directory, Holding, NodeHits, Place, Placement
from lmkv.errors import ProtocolError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from redis_rig import RedisServer


@pytest.fixture(scope="module")
def server() -> Iterator[RedisServer]:
    with redis_server() as made:
        yield made


@pytest.fixture
def rig(request: pytest.FixtureRequest) -> Rig:
    return rigs(lambda: request.getfixturevalue("server"), request.param)


@both
def test_a_prefix_is_found_by_node_and_tier(rig: Rig) -> None:
    async def test(directory: Directory) -> None:
        await directory.apply("a", [change(range(6)), change(range(6, 9), tier=1)])
        await directory.apply("b", [change([0, 1, 3])])
        await directory.apply("c", [change([5])])
        found = await directory.lookup(SPACE, blob(range(10)))
        assert found == Placement(
            10,
            (
                Holding(Place("a", 0), 6, bytes([0b111111, 0])),
                Holding(Place("a", 1), 0, bytes([0b11000000, 1])),
                Holding(Place("b", 0), 2, bytes([0b1011, 0])),
                Holding(Place("c", 0), 0, bytes([0b100000, 0])),
            ),
        )
        assert [(hit.node, hit.leading, hit.total) for hit in found.nodes()] == [("a", 9, 9), ("b", 2, 3), ("c", 0, 1)]
        assert await directory.lookup(SPACE, b"") == Placement(0, ())
        assert await directory.lookup(OTHER, blob(range(10))) == Placement(10, ())

    rig.run(test)


@both
def test_holders_are_told_for_each_digest(rig: Rig) -> None:
    async def test(directory: Directory) -> None:
        await directory.apply("b", [change([1, 2], tier=2)])
        await directory.apply("a", [change([2, 3]), change([2], tier=1)])
        one, two, three = Place("b", 2), Place("a", 0), Place("a", 1)
        assert await directory.holders(SPACE, blob([0, 1, 2, 3])) == [(), (one,), (two, three, one), (two,)]
        assert await directory.holders(OTHER, blob([1])) == [()]

    rig.run(test)


@both
def test_what_is_removed_is_gone_from_that_tier_only(rig: Rig) -> None:
    async def test(directory: Directory) -> None:
        await directory.apply("a", [change(range(4)), change(range(4), tier=1), change(range(4), space=OTHER)])
        await directory.apply("a", [change(removed=[1, 2, 77])])
        places = Place("a", 0), Place("a", 1)
        assert await directory.holders(SPACE, blob(range(4))) == [places, places[1:], places[1:], places]
        assert await directory.holders(OTHER, blob([1])) == [places[:1]]
        # Twice the same, and both at once: it is there.
        await directory.apply("a", [change([5, 5, 6], removed=[6]), change([5])])
        assert await directory.holders(SPACE, blob([5, 6])) == [places[:1], places[:1]]

    rig.run(test)


@both
def test_a_resync_ends_what_it_did_not_name(rig: Rig) -> None:
    async def test(directory: Directory) -> None:
        await directory.apply("a", [change(range(6))])
        await directory.apply("b", [change(range(6))])
        await directory.begin("a")
        await directory.page("a", SPACE, 0, blob([0, 1, 2]))
        a, b = Place("a", 0), Place("b", 0)
        assert await directory.holders(SPACE, blob([0, 5])) == [(a, b), (a, b)], "until its end the old holds"
        await directory.apply("a", [change([9], removed=[1, 5])])
        assert await directory.holders(SPACE, blob([1, 5, 9])) == [(b,), (b,), (a,)]
        assert await directory.end("a")
        assert await directory.holders(SPACE, blob(range(6))) == [(a, b), (b,), (a, b), (b,), (b,), (b,)]
        assert not await directory.end("a"), "nothing had begun"

    rig.run(test)


@both
def test_a_resync_that_begins_again_forgets_the_first(rig: Rig) -> None:
    async def test(directory: Directory) -> None:
        await directory.begin("a")
        await directory.page("a", SPACE, 0, blob([0, 1]))
        await directory.begin("a")
        await directory.page("a", SPACE, 0, blob([2]))
        await directory.end("a")
        assert await directory.holders(SPACE, blob([0, 1, 2])) == [(), (), (Place("a", 0),)]

    rig.run(test)


@both
def test_a_dropped_node_is_nowhere(rig: Rig) -> None:
    async def test(directory: Directory) -> None:
        await directory.apply("a", [change(range(3000)), change(range(5), space=OTHER)])
        await directory.apply("b", [change(range(10))])
        await directory.begin("a")
        await directory.page("a", SPACE, 1, blob([1]))
        await directory.drop("a")
        await directory.drop("never heard of")
        assert {hit.node for hit in (await directory.lookup(SPACE, blob(range(3000)))).nodes()} == {"b"}
        assert not await directory.end("a")
        await directory.begin("a")
        await directory.page("a", SPACE, 0, blob([2]))
        assert await directory.end("a")
        assert await directory.holders(SPACE, blob([1, 2])) == [(Place("b", 0),), (Place("a", 0), Place("b", 0))]

    rig.run(test)


@both
def test_what_is_no_digest_is_refused(rig: Rig) -> None:
    async def test(directory: Directory) -> None:
        for namespace, digests in ((SPACE, b"short"), (b"", digest(1)), (SPACE * 2, digest(1))):
            for call in (directory.lookup, directory.holders):
                with pytest.raises(ProtocolError, match="each digest 32"):
                    await call(namespace, digests)
        await directory.apply("a", [])
        await directory.begin("a")
        with pytest.raises(ProtocolError):
            await directory.page("a", SPACE, 0, b"short")

    rig.run(test)


@both
def test_many_digests_at_once(rig: Rig) -> None:
    async def test(directory: Directory) -> None:
        await directory.apply("a", [change(range(5000)), change(range(2000, 4000), tier=1)])
        await directory.apply("a", [change(removed=range(1500, 5000))])
        found = await directory.lookup(SPACE, blob(range(5000)))
        assert [(each.place.tier, each.leading) for each in found.holdings] == [(0, 1500), (1, 0)]
        hits = found.nodes()
        assert hits == (NodeHits("a", 1500, 3500, found.holdings),)

    rig.run(test)


steps = st.lists(
    st.tuples(
        st.sampled_from(["apply"] * 6 + ["begin", "page", "page", "end", "drop"]),
        st.sampled_from("abc"),
        st.integers(0, 1),
        st.sets(st.integers(0, 12), max_size=8),
        st.sets(st.integers(0, 12), max_size=5),
        st.sampled_from([SPACE, SPACE, OTHER]),
    ),
    max_size=30,
)


async def tell(directory: Directory, model: Model, step: Any) -> None:
    """One step, to both."""
    what, node, tier, stored, removed, space = step
    if what == "apply":
        said = change(stored, removed - stored, tier, space)
        await directory.apply(node, [said])
        model.apply(node, said, stored, removed - stored)
    elif what == "begin":
        await directory.begin(node)
        model.fresh[node] = {}
    elif what == "page" and node in model.fresh:
        await directory.page(node, space, tier, blob(stored))
        model.apply(node, change(tier=tier, space=space), stored, ())
    elif what == "end":
        assert await directory.end(node) == (node in model.fresh)
        model.end(node)
    elif what == "drop":
        await directory.drop(node)
        model.drop(node)


async def compare(directory: Directory, model: Model) -> None:
    """Both know the same."""
    for space in (SPACE, OTHER):
        want = [model.holders(space, number) for number in range(14)]
        assert await directory.holders(space, blob(range(14))) == want
        found = await directory.lookup(space, blob(range(14)))
        told = {(each.place, i) for each in found.holdings for i in range(14) if each.bitmap[i // 8] >> i % 8 & 1}
        assert told == {(place, i) for i, places in enumerate(want) for place in places}
        for each in found.holdings:
            assert each.leading == next(i for i in range(15) if i == 14 or each.place not in want[i])


@both
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(steps=steps)
def test_any_order_of_all_that_can_be_told(rig: Rig, steps: list[Any]) -> None:
    async def test(directory: Directory) -> None:
        model = Model()
        for node in "abc":  # with a Redis: what the example before has left
            await directory.drop(node)
        for step in steps:
            await tell(directory, model, step)
        await compare(directory, model)

    rig.run(test)


@both
def test_nodes_that_tell_at_the_same_time(rig: Rig) -> None:
    """Steps of one node's changes come between those of another's; look-ups come between them all."""
    numbers = random.Random(3)
    wanted = {node: {number for number in range(6000) if numbers.random() < 0.5} for node in "abcdef"}

    async def test(directory: Directory) -> None:
        async def say(node: str) -> None:
            await directory.apply(node, [change(range(6000))])
            await directory.begin(node)
            for start in range(0, 6000, 1500):
                await directory.page(node, SPACE, 0, blob(n for n in wanted[node] if start <= n < start + 1500))
            await directory.end(node)

        async def look() -> None:
            for _ in range(20):
                for hit in (await directory.lookup(SPACE, blob(range(6000)))).nodes():
                    assert hit.total <= 6000

        await asyncio.gather(*(say(node) for node in wanted), look(), directory.drop("z"))
        await directory.drop("f")
        del wanted["f"]
        holders = await directory.holders(SPACE, blob(range(6000)))
        for number, places in enumerate(holders):
            assert {place.node for place in places} == {node for node in wanted if number in wanted[node]}
        if rig.kind == "memory":
            assert (await directory.size()).entries == len(set().union(*wanted.values()))

    rig.run(test)
