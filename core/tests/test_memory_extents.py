from __future__ import annotations

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from lmkv.memory.extents import Extents

PAGE = 4096


def check(extents: Extents, live: dict[int, int]) -> None:
    """No overlap, no lost byte, no two free neighbours."""
    parts = sorted([(s, n, "live") for s, n in live.items()] + [(s, n, "free") for s, n in extents])
    at, before = 0, ""
    for start, length, state in parts:
        assert start == at
        assert length > 0
        assert not before == state == "free"
        at, before = start + length, state
    assert at == extents.nbytes
    free = [n for _, n in extents]
    assert extents.free_bytes == sum(free)
    assert extents.largest == max(free, default=0)


@settings(max_examples=200, deadline=None)
@given(
    pages=st.integers(1, 64),
    steps=st.lists(st.tuples(st.booleans(), st.integers(1, 12), st.integers(0, 1 << 30)), max_size=120),
)
def test_random_takes_and_gives_keep_every_byte(pages: int, steps: list[tuple[bool, int, int]]) -> None:
    extents = Extents(pages * PAGE)
    live: dict[int, int] = {}
    for take, want, which in steps:
        if take or not live:
            start = extents.take(want * PAGE)
            if start < 0:
                assert extents.largest < want * PAGE
            else:
                live[start] = want * PAGE
        else:
            start = sorted(live)[which % len(live)]
            extents.give(start, live.pop(start))
        check(extents, live)
    for start, length in live.items():
        extents.give(start, length)
    assert list(extents) == [(0, pages * PAGE)]


@settings(max_examples=200, deadline=None)
@given(
    holes=st.lists(st.integers(1, 12), min_size=1, max_size=8),
    want=st.integers(1, 5),
    most=st.integers(1, 20),
)
def test_runs_lie_where_single_takes_would(holes: list[int], want: int, most: int) -> None:
    """Among free extents of any lengths, each followed by a page that is taken."""
    singly, runs = Extents(sum(holes) * PAGE + len(holes) * PAGE), Extents(sum(holes) * PAGE + len(holes) * PAGE)
    for extents in (singly, runs):
        starts = [(extents.take(n * PAGE), extents.take(PAGE)) for n in holes]
        for (start, _), n in zip(starts, holes, strict=True):
            extents.give(start, n * PAGE)
    found: list[int] = []
    while len(found) < most:
        start, count = runs.take_run(want * PAGE, most - len(found))
        if not count:
            assert start == -1
            break
        found += [start + i * want * PAGE for i in range(count)]
    singles = [singly.take(want * PAGE) for _ in range(most)]
    assert found == [start for start in singles if start >= 0]
    assert list(runs) == list(singly)


def test_best_fit_takes_the_smallest_hole_that_holds_it() -> None:
    extents = Extents(10 * PAGE)
    starts = [extents.take(n * PAGE) for n in (3, 1, 2, 1, 3)]
    assert extents.take(PAGE) < 0
    for i, n in ((0, 3), (2, 2), (4, 3)):
        extents.give(starts[i], n * PAGE)
    assert extents.take(2 * PAGE) == starts[2]
    assert extents.take(PAGE) in (starts[0], starts[4])


def test_one_size_never_fragments() -> None:
    extents = Extents(1000 * PAGE)
    draw = random.Random(7)
    live = [extents.take(10 * PAGE) for _ in range(100)]
    for _ in range(5000):
        extents.give(live.pop(draw.randrange(len(live))), 10 * PAGE)
        if draw.random() < 0.5 and len(live) > 50:
            extents.give(live.pop(draw.randrange(len(live))), 10 * PAGE)
        while (start := extents.take(10 * PAGE)) >= 0 and draw.random() < 0.9:
            live.append(start)
        if start >= 0:
            live.append(start)
        assert extents.free_bytes % (10 * PAGE) == 0
    assert len(live) + extents.free_bytes // (10 * PAGE) == 100


def test_an_empty_arena_gives_nothing() -> None:
    extents = Extents(0)
    assert (extents.take(1), extents.free_bytes, extents.largest, list(extents)) == (-1, 0, 0, [])
