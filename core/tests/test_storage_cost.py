"""The cost model: what it finds in series of calls whose cost is known."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import pytest

from lmkv.storage.cost import FAR, KEPT, LEAST, Cost

if TYPE_CHECKING:
    from collections.abc import Sequence

MIB = 1 << 20


class Store:
    """Takes as long as it says, give or take a few percent."""

    def __init__(self, latency: float, bandwidth: float, crowd: float = 0.0) -> None:
        self.latency = latency
        self.alone = 1 / bandwidth
        self.crowd = crowd * self.alone
        self._random = random.Random(7)

    def seconds(self, nbytes: int, company: float = 1.0) -> float:
        return self.latency + nbytes * (self.alone + (company - 1) * self.crowd)

    def tell(self, cost: Cost, sizes: Sequence[int], company: Sequence[float] = (1.0,), *, at: float = 0.0,
             count: int = KEPT, every: float = 0.01) -> None:  # fmt: skip
        for i in range(count):
            nbytes, others = self._random.choice(sizes), self._random.choice(company)
            cost.note(nbytes, self.seconds(nbytes, others) * self._random.gauss(1, 0.03), others, at + i * every)


def close(found: float | None, right: float, by: float = 0.15) -> bool:
    return found is not None and abs(found - right) <= by * right


@pytest.mark.parametrize("latency", [0.0, 0.001, 0.05])
@pytest.mark.parametrize("bandwidth", [5e7, 1e9])
@pytest.mark.parametrize("crowd", [0.0, 1.0])
def test_latency_bandwidth_and_company_are_found(latency: float, bandwidth: float, crowd: float) -> None:
    store, cost = Store(latency, bandwidth, crowd), Cost()
    store.tell(cost, [MIB, 4 * MIB, 16 * MIB], [1, 2, 3, 4])
    for nbytes in (MIB, 8 * MIB, 32 * MIB):
        for company in (1, 4):
            assert close(cost.seconds(nbytes, company), store.seconds(nbytes, company))
    threads = 4
    assert close(cost.bandwidth(threads), threads * bandwidth / (1 + crowd * (threads - 1)), 0.3)
    assert abs(cost.latency() - latency) < 0.15 * latency + 0.002
    assert close(cost.drain(40, 40 * 4 * MIB, threads), 10 * store.seconds(4 * MIB, threads))


def test_nothing_is_known_at_first() -> None:
    cost = Cost()
    for _ in range(LEAST - 1):
        cost.note(MIB, 0.01, 1, 0)
    assert not cost.known
    assert cost.seconds(MIB) is None
    assert cost.drain(3, MIB, 2) is None
    assert cost.drain(0, 0, 2) == 0
    assert cost.bandwidth(4) == 0
    cost.note(MIB, 0.01, 1, 0)
    assert close(cost.seconds(MIB), 0.01)
    assert Cost().measured_at == float("-inf")


def test_frames_of_one_size_are_told_right() -> None:
    store, cost = Store(0.02, 1e9), Cost()
    store.tell(cost, [8 * MIB])
    assert close(cost.seconds(8 * MIB), store.seconds(8 * MIB))


def test_a_change_is_followed_within_a_few_calls() -> None:
    before, after, cost = Store(0.002, 2e9), Store(0.1, 1e8), Cost()
    before.tell(cost, [MIB, 8 * MIB])
    after.tell(cost, [MIB, 8 * MIB], at=1, count=2)
    assert close(cost.seconds(8 * MIB), before.seconds(8 * MIB)), "two slow calls are no change yet"
    after.tell(cost, [MIB, 8 * MIB], at=2, count=12)
    assert close(cost.seconds(8 * MIB), after.seconds(8 * MIB))


def test_one_call_says_it_all_when_the_others_are_old() -> None:
    """A tier that is not used is tried once a minute: what that shows must count."""
    before, after, cost = Store(0.1, 1e7), Store(0.001, 1e9), Cost()
    before.tell(cost, [8 * MIB])
    after.tell(cost, [8 * MIB], at=61, count=1)
    found = cost.seconds(8 * MIB)
    assert found is not None
    assert found < 2 * after.seconds(8 * MIB)


@pytest.mark.parametrize("factor", [FAR * 2, 1000.0, 0.01])
def test_outliers_do_not_count(factor: float) -> None:
    store, cost = Store(0.01, 1e9), Cost()
    store.tell(cost, [MIB, 8 * MIB], count=30)
    cost.note(MIB, store.seconds(MIB) * factor, 1, 1.0)
    store.tell(cost, [MIB, 8 * MIB], count=2, at=1.1)
    cost.note(8 * MIB, store.seconds(8 * MIB) * factor, 1, 1.2)
    assert close(cost.seconds(8 * MIB), store.seconds(8 * MIB))


def test_what_moved_nothing_says_nothing() -> None:
    cost = Cost(least=1)
    cost.note(0, 0.5, 1, 0)
    cost.note(MIB, 0.0, 1, 0)
    assert not cost.known


def test_no_series_breaks_it() -> None:
    numbers = random.Random(3)
    for _ in range(200):
        cost = Cost()
        for i in range(numbers.randint(1, KEPT)):
            cost.note(
                int(10 ** numbers.uniform(0, 12)),
                10 ** numbers.uniform(-7, 3),
                numbers.uniform(1, 9),
                i * numbers.random(),
            )
        for nbytes in (0, 1, 1 << 40):
            found = cost.seconds(nbytes, 3)
            assert found is None or 0 <= found < float("inf")
        assert 0 <= cost.bandwidth(4) < float("inf")
