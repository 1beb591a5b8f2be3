from __future__ import annotations

import random
from itertools import count, islice
from typing import TYPE_CHECKING

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lmkv import builtin
from lmkv.policy.leaf_first import WALK, LeafFirstLRU
from lmkv.policy.lru import LRU
from lmkv.specs import BulkPolicy
from lmkv.types import ChunkKey

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from lmkv.specs import EvictionPolicy

NAMESPACES = (b"n" * 16, b"m" * 16)


def key(number: int, shard: int = 0, namespace: int = 0) -> ChunkKey:
    return ChunkKey(NAMESPACES[namespace], shard, number.to_bytes(32, "big"))


def always(_: ChunkKey) -> bool:
    return True


def one(_: ChunkKey) -> int:
    return 1


class Model:
    """What the policies must do, written so that it is plainly right and slow."""

    def __init__(self, *, leaf_first: bool) -> None:
        self.leaf_first = leaf_first
        self.clock = count()
        self.used: dict[ChunkKey, int] = {}
        self.parents: dict[ChunkKey, bytes | None] = {}

    def add(self, key: ChunkKey, parent: bytes | None) -> None:
        self.used[key] = next(self.clock)
        self.parents[key] = None if parent is not None and self._closes(key, parent) else parent

    def _closes(self, key: ChunkKey, parent: bytes | None) -> bool:
        """`parent` continues `key`, over however many."""
        while parent is not None:
            above = ChunkKey(key.namespace, key.shard, parent)
            if above == key:
                return True
            parent = self.parents.get(above)
        return False

    def touch(self, key: ChunkKey) -> None:
        if key in self.used:
            self.used[key] = next(self.clock)

    def remove(self, key: ChunkKey) -> None:
        self.used.pop(key, None)
        self.parents.pop(key, None)

    def victims(
        self, nbytes: int, size: Callable[[ChunkKey], int], free: Callable[[ChunkKey], bool]
    ) -> Sequence[ChunkKey]:
        left, chosen = dict(self.used), []
        while nbytes > 0:
            parents = {ChunkKey(each.namespace, each.shard, self.parents[each] or b"") for each in left}
            candidates = [each for each in left if free(each) and not (self.leaf_first and each in parents)]
            if not candidates:
                break
            victim = min(candidates, key=lambda each: left[each])
            del left[victim]
            chosen.append(victim)
            nbytes -= size(victim)
        return chosen


# A forest: the parent of entry n is entry n // 2 (none for 0 and 1), so that branches and long chains both come up.
def parent_of(each: ChunkKey) -> bytes | None:
    number = int.from_bytes(each.digest, "big")
    return (number // 2).to_bytes(32, "big") if number > 1 else None


numbers = st.integers(1, 24)
keys = st.builds(key, numbers, st.integers(0, 1), st.integers(0, 1))
steps = st.lists(
    st.one_of(
        st.tuples(st.just("add"), keys),
        st.tuples(st.just("add_all"), st.lists(keys, unique=True)),
        st.tuples(st.just("touch"), keys),
        st.tuples(st.just("remove"), keys),
        st.tuples(st.just("evict"), st.integers(0, 30), st.frozensets(keys, max_size=6)),
        st.tuples(st.just("ask"), st.integers(0, 30), st.frozensets(keys, max_size=6)),
    ),
    max_size=120,
)


@pytest.mark.parametrize(("policy", "leaf_first"), [(LRU, False), (LeafFirstLRU, True)])
@given(steps=steps)
@settings(max_examples=150, deadline=None)
def test_same_victims_as_the_plain_model(policy: type, leaf_first: bool, steps: list[tuple]) -> None:
    real, model = policy(), Model(leaf_first=leaf_first)
    assert isinstance(real, BulkPolicy)

    def size(each: ChunkKey) -> int:
        return each.digest[-1] % 3 + 1

    for step in steps:
        if step[0] in ("evict", "ask"):
            _, nbytes, held = step
            victims = list(real.victims(nbytes, size, lambda each, held=held: each not in held))
            assert victims == model.victims(nbytes, size, lambda each, held=held: each not in held)
            for each in victims if step[0] == "evict" else ():
                real.remove(each)
                model.remove(each)
        elif step[0] == "add":
            real.add(step[1], parent_of(step[1]))
            model.add(step[1], parent_of(step[1]))
        elif step[0] == "add_all":
            real.add_all({each: parent_of(each) for each in step[1]})
            for each in step[1]:
                model.add(each, parent_of(each))
        else:
            getattr(real, step[0])(step[1])
            getattr(model, step[0])(step[1])
    everything = list(real.victims(1 << 30, size, always))
    assert everything == model.victims(1 << 30, size, always)
    assert len(everything) == len(model.used)
    if leaf_first:
        parents = {ChunkKey(each.namespace, each.shard, model.parents[each] or b"") for each in model.used}
        assert real._leaves == len(model.used.keys() - parents)
    for each in everything:
        real.remove(each)
    assert not getattr(real, "_entries", ())


wild = st.lists(
    st.one_of(
        st.tuples(st.just("add"), st.integers(0, 7), st.integers(0, 7)),
        st.tuples(st.just("remove"), st.integers(0, 7), st.just(0)),
        st.tuples(st.just("touch"), st.integers(0, 7), st.just(0)),
    ),
    max_size=60,
)


@given(steps=wild)
@settings(max_examples=300, deadline=None)
def test_who_names_each_other_as_parents_keeps_nothing_cached_for_ever(steps: list[tuple[str, int, int]]) -> None:
    """No hash chain does; a peer may. Whenever nothing is held, everything can go, in the order of the model."""
    real, model = LeafFirstLRU(), Model(leaf_first=True)
    for what, number, parent in steps:
        for policy in (real, model):
            if what == "add":
                policy.add(key(number), key(parent).digest)
            else:
                getattr(policy, what)(key(number))
        everything = list(real.victims(1 << 30, one, always))
        assert set(everything) == set(model.used)
        assert everything == model.victims(1 << 30, one, always)
    for each in list(model.used):
        real.remove(each)
    assert not real._entries


def test_a_ring_beside_other_leaves_goes_when_its_time_has_come() -> None:
    policy = LeafFirstLRU()
    for number in range(5):
        policy.add(key(number), key((number + 1) % 5).digest)
    policy.add(key(9), None)
    assert list(policy.victims(5, one, always)) == [key(n) for n in range(5)]


@pytest.mark.parametrize("seed", range(3))
def test_a_chain_that_comes_in_any_order_is_evicted_from_its_end(seed: int) -> None:
    numbers = list(range(WALK))
    random.Random(seed).shuffle(numbers)
    policy = LeafFirstLRU()
    for number in numbers:
        policy.add(key(number), key(number - 1).digest if number else None)
    assert list(policy.victims(WALK, one, always)) == [key(n) for n in range(WALK - 1, -1, -1)]


def test_a_gap_under_a_chain_without_end_costs_no_more_than_a_bounded_walk() -> None:
    """Its order is lost, and nothing else: a peer that makes such chains keeps nobody waiting."""
    policy = LeafFirstLRU()
    chain(policy, *range(2 * WALK))
    policy.add(key(9001), key(9000).digest)
    policy.add(key(9000), key(2 * WALK - 1).digest)
    assert policy._entries[key(9000)].parent is None
    policy.add(key(9002), key(2 * WALK - 1).digest)  # what nothing continues yet needs no walk
    assert policy._entries[key(9002)].parent is policy._entries[key(2 * WALK - 1)]
    assert len(list(policy.victims(9000, one, always))) == 2 * WALK + 3


def chain(policy: EvictionPolicy, *numbers: int, shard: int = 0) -> None:
    for previous, number in zip((None, *numbers), numbers, strict=False):
        policy.add(key(number, shard), None if previous is None else key(previous).digest)


def test_leaf_then_its_parent_in_one_call() -> None:
    policy = LeafFirstLRU()
    chain(policy, 1, 2, 3)
    assert list(policy.victims(2, one, always)) == [key(3), key(2)]


def test_parent_waits_for_every_continuation() -> None:
    policy = LeafFirstLRU()
    chain(policy, 1, 2)
    policy.add(key(3), key(1).digest)
    assert list(policy.victims(3, one, lambda each: each != key(3))) == [key(2)]


def test_continuations_of_another_shard_do_not_count() -> None:
    policy = LeafFirstLRU()
    policy.add(key(1, shard=0), None)
    policy.add(key(2, shard=1), key(1).digest)
    assert list(policy.victims(1, one, always)) == [key(1, shard=0)]


def test_an_entry_given_another_parent_frees_the_old_one() -> None:
    policy = LeafFirstLRU()
    chain(policy, 1, 2)
    policy.add(key(3), None)
    policy.add(key(2), key(3).digest)
    assert list(policy.victims(3, one, always)) == [key(1), key(2), key(3)]


@pytest.mark.parametrize("policy", [LRU, LeafFirstLRU])
def test_a_failing_callback_leaves_the_policy_whole(policy: type) -> None:
    real = policy()
    chain(real, 1, 2, 3)
    real.add(key(9), None)

    def fail(_: ChunkKey) -> bool:
        raise RuntimeError

    before = list(real.victims(9, one, always))
    with pytest.raises(RuntimeError):
        list(real.victims(9, one, fail))
    assert list(real.victims(9, one, always)) == before


@pytest.mark.parametrize("policy", [LRU, LeafFirstLRU])
def test_victims_are_found_as_they_are_taken(policy: type) -> None:
    real = policy()
    for number in range(5000):
        real.add(key(number), None)
    asked: list[ChunkKey] = []

    def free(candidate: ChunkKey) -> bool:
        asked.append(candidate)
        return True

    assert list(islice(real.victims(1 << 30, one, free), 256)) == [key(number) for number in range(256)]
    assert len(asked) == 256
    assert list(real.victims(3, one, always)) == [key(0), key(1), key(2)], "what was looked at is still there"


def test_endless_touching_and_replacing_keeps_the_heap_small() -> None:
    policy = LeafFirstLRU()
    for number in range(5000):
        policy.add(key(number), None)
        policy.touch(key(number))
        policy.remove(key(max(number - 10, 0)))
    assert len(policy._heap) < 100


def test_a_long_chain_leaves_no_heap_to_search() -> None:
    policy = LeafFirstLRU()
    chain(policy, *range(5000))
    assert len(policy._heap) < 100
    assert policy._leaves == 1
    assert list(policy.victims(1, one, always)) == [key(4999)]


def test_the_cores_policies_are_offered_by_its_hook() -> None:
    made = {spec.name: spec.load()() for spec in builtin.lmkv_policies()}
    assert {name: type(each) for name, each in made.items()} == {"lru": LRU, "leaf-first-lru": LeafFirstLRU}
