"""The cost model: what it finds in series of calls whose cost is known."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import pytest

from lmkv.storage.cost import FAR, KEPT, LEAST, Cost, Window

if TYPE_CHECKING:
    from collections.abc import Sequence

MIB = 1 << 20


class Store:
    """Takes as long as it says, give or take a few percent. Calls take turns for the part `shared` of the bandwidth."""

    def __init__(self, latency: float, bandwidth: float, shared: float = 0.0) -> None:
        self.latency = latency
        self.own = (1 - shared) / bandwidth
        self.shared = shared / bandwidth
        self._random = random.Random(7)
        self._now = 0.0

    def seconds(self, nbytes: int, company: int = 1) -> float:
        return self.latency + nbytes * (self.own + company * self.shared)

    def tell(self, cost: Cost, sizes: Sequence[int], company: Sequence[int] = (1,), *, at: float = 0.0,
             windows: int = KEPT) -> None:  # fmt: skip
        self._now = max(self._now, at)
        for _ in range(windows):
            nbytes, others = self._random.choice(sizes), self._random.choice(company)
            noise = self._random.gauss(1, 0.03)
            begin = self._now
            for turn in range(others):  # the link serves one after the other
                alone = self.latency + nbytes * (self.own + (turn + 1) * self.shared)
                self._now = max(self._now, begin + alone * noise)
                cost.note(nbytes, begin, begin + alone * noise)


def close(found: float | None, right: float, by: float = 0.15) -> bool:
    return found is not None and abs(found - right) <= by * right


@pytest.mark.parametrize("latency", [0.0, 0.001, 0.05])
@pytest.mark.parametrize("bandwidth", [5e7, 1e9])
@pytest.mark.parametrize("shared", [0.0, 0.5, 1.0])
def test_latency_and_bandwidth_are_found(latency: float, bandwidth: float, shared: float) -> None:
    store, cost = Store(latency, bandwidth, shared), Cost()
    store.tell(cost, [MIB, 4 * MIB, 16 * MIB], [1, 2, 3, 4])
    for nbytes in (MIB, 8 * MIB, 32 * MIB):
        assert close(cost.seconds(nbytes), store.seconds(nbytes))
    threads = 4
    by = 0.4 if 0 < shared < 1 else 0.2  # how much company a call had on its own way is a guess
    assert close(cost.drain(threads, threads * 8 * MIB, threads), store.seconds(8 * MIB, threads), by)
    assert close(cost.bandwidth(threads), 1 / (store.own / threads + store.shared), 0.6)
    assert abs(cost.latency() - latency) < 0.15 * latency + 0.002


def test_calls_of_which_none_was_ever_alone() -> None:
    """There is always something under way: windows begin and end in the middle of calls."""
    cost, now = Cost(), 0.0
    free = [0.0] * 4
    link = 0.0
    for _ in range(200):
        now = min(free)
        link = max(link, now + 0.01) + 0.02
        free[free.index(now)] = link
        cost.note(MIB, now, link)
    assert close(cost.drain(100, 100 * MIB, 4), 100 * 0.02, 0.2)


def test_nothing_is_known_at_first() -> None:
    cost = Cost()
    for i in range(LEAST - 1):
        cost.note(MIB, i, i + 0.01)
    assert not cost.known
    assert cost.seconds(MIB) is None
    assert cost.drain(3, MIB, 2) is None
    assert cost.drain(0, 0, 2) == 0
    assert cost.bandwidth(4) == 0
    assert cost.latency() == 0
    cost.note(MIB, 10, 10.01)
    assert close(cost.seconds(MIB), 0.01)
    assert cost.measured_at == 10.01
    assert Cost().measured_at == float("-inf")


def test_frames_of_one_size_are_told_right() -> None:
    store, cost = Store(0.02, 1e9), Cost()
    store.tell(cost, [8 * MIB])
    assert close(cost.seconds(8 * MIB), store.seconds(8 * MIB))


def test_a_change_is_followed_within_a_few_calls() -> None:
    before, after, cost = Store(0.002, 2e9), Store(0.1, 1e8), Cost()
    before.tell(cost, [MIB, 8 * MIB])
    after.tell(cost, [MIB, 8 * MIB], at=1, windows=2)
    assert close(cost.seconds(8 * MIB), before.seconds(8 * MIB)), "two slow calls are no change yet"
    after.tell(cost, [MIB, 8 * MIB], at=2, windows=12)
    assert close(cost.seconds(8 * MIB), after.seconds(8 * MIB))


def test_one_call_says_it_all_when_the_others_are_old() -> None:
    """A tier that is not used is tried once a minute: what that shows must count."""
    before, after, cost = Store(0.1, 1e7), Store(0.001, 1e9), Cost()
    before.tell(cost, [8 * MIB])
    after.tell(cost, [8 * MIB], at=cost.measured_at + 60, windows=1)
    found = cost.seconds(8 * MIB)
    assert found is not None
    assert found < 2 * after.seconds(8 * MIB)


@pytest.mark.parametrize("factor", [FAR * 2, 100.0, 0.01])
def test_outliers_do_not_count(factor: float) -> None:
    store, cost = Store(0.01, 1e9), Cost()
    store.tell(cost, [MIB, 8 * MIB], windows=30)
    cost.note(MIB, 1.0, 1.0 + store.seconds(MIB) * factor)
    store.tell(cost, [MIB, 8 * MIB], windows=2, at=3.0)
    cost.note(8 * MIB, 3.1, 3.1 + store.seconds(8 * MIB) * factor)
    assert close(cost.seconds(8 * MIB), store.seconds(8 * MIB))


def test_what_moved_nothing_says_nothing() -> None:
    cost = Cost(least=1)
    cost.note(0, 0, 0.5)
    cost.note(MIB, 1, 1)
    assert not cost.known


def test_no_series_breaks_it() -> None:
    numbers = random.Random(3)
    for _ in range(200):
        cost, now = Cost(), 0.0
        for _ in range(numbers.randint(1, KEPT)):
            now += numbers.random()
            cost.note(int(10 ** numbers.uniform(0, 12)), now - 10 ** numbers.uniform(-7, 3), now)
        for nbytes in (0, 1, 1 << 40):
            found = cost.seconds(nbytes)
            assert found is None or 0 <= found < float("inf")
        assert 0 <= cost.bandwidth(4) < float("inf")
        assert 0 <= (cost.drain(9, 9 * MIB, 4) or 0) < float("inf")


def test_what_a_call_did_in_the_window_before_is_not_counted_twice() -> None:
    window = Window(floor=10.0)
    window.add(MIB, 9.0, 11.0)
    assert (window.begin, window.seconds, window.busy) == (10.0, 1.0, 1.0)
