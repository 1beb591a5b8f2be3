"""A tier may fail in every way there is: the engine notices misses, and nothing else."""

from __future__ import annotations

import statistics
import threading
import time
from typing import TYPE_CHECKING, Any

import pytest
from fake_engine import CHUNK, FRAME
from fault_rig import (
    BYTES,
    CALLS,
    DEADLINE,
    PROBE,
    DiskStore,
    RedisStore,
    S3Store,
    Traffic,
    descriptors,
    fill,
    lines,
    prompts,
    start,
    state,
)

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from fault_rig import Lines, Store, Visit

STORES: dict[str, Any] = {"disk": DiskStore, "redis": RedisStore, "s3": S3Store}
SLACK = 2.0
"""Two busy cores are in no hurry."""


QUICK = {"silent", "late", "garbage", "refused", "emptied", "slow"}
"""S3 is the slowest to start and to answer: its other faults are left to `make test-all`."""


def cases(*kinds: str) -> list[Any]:
    found = [(name, fault) for name, kind in STORES.items() for each in kinds for fault in getattr(kind, each)]
    return [
        pytest.param(name, fault, marks=[pytest.mark.slow] if name == "s3" and fault not in QUICK else [])
        for name, fault in found
    ]


@pytest.fixture
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Store]:
    made = STORES[request.param](tmp_path / "far")
    try:
        yield made
    finally:
        made.heal()
        made.close()


@pytest.fixture
def log() -> Iterator[Lines]:
    with lines() as made:
        yield made


def most(visits: list[Visit]) -> float:
    """The longest wait but one: on two busy cores one may be bad luck."""
    return sorted([0.0, *(visit.waited for visit in visits)])[-2]


@pytest.mark.parametrize(("store", "fault"), cases("hangs", "fails"), indirect=["store"])
def test_down_and_up_again(store: Store, fault: str, log: Lines) -> None:
    """Right bytes always; each request waits a deadline at most; then nobody waits; then all is as before."""
    node = start(store)
    try:
        fill(node)
        threads, files = threading.active_count(), descriptors()
        with Traffic(node) as traffic:
            healthy = traffic.go_on(0.4)
            assert any(visit.came for visit in healthy)
            log.lines.clear()

            begin = time.monotonic()
            store.begin(fault)
            traffic.wait(lambda: state(node) != "ok", 3 * DEADLINE + SLACK, "the tier counts as ill")
            turned_off = time.monotonic()
            traffic.go_on(DEADLINE)  # calls that were under way may go on trying until then
            touched = store.touched()
            traffic.go_on(0.4)
            if fault != "no space":  # it is still read from
                assert store.touched() - touched < 12, "nothing goes to a tier that is off but questions how it is"
            off = traffic.since(turned_off)
            assert len(off) > 10
            assert statistics.median(visit.waited for visit in off) < DEADLINE / 10
            assert most(off) < DEADLINE / 2, "nobody waits for a tier that is off"
            assert max(visit.waited for visit in traffic.since(begin)) < 2 * DEADLINE + SLACK
            assert max(calls for calls, _ in traffic.queues) <= CALLS
            assert max(nbytes for _, nbytes in traffic.queues) <= BYTES
            assert threading.active_count() <= threads + 48
            assert descriptors() <= files + 64
            assert len(log.lines) <= 6, log.lines

            store.heal()
            took = traffic.wait(lambda: state(node) == "ok", PROBE + DEADLINE + SLACK, "the tier is well again")
            assert took < PROBE + DEADLINE + SLACK
            before = node.counter("lmkv_tier_operations_total", tier="far", op="put", outcome="ok")
            traffic.wait(
                lambda: node.counter("lmkv_tier_operations_total", tier="far", op="put", outcome="ok") > before,
                PROBE + DEADLINE + SLACK,
                "the tier takes stores",
            )
            traffic.wait(lambda: any(v.came for v in traffic.since(time.monotonic() - 0.2)), SLACK, "hits")
    finally:
        store.heal()
        node.close()


@pytest.mark.parametrize(("store", "fault"), cases("lies"), indirect=["store"])
def test_lies(store: Store, fault: str, log: Lines) -> None:
    """Frames that are wrong, cut or not there: computed anew, stored anew, never taken for right."""
    node = start(store)
    try:
        fill(node)
        # Two requests at a time, with breath between them: what one waits for is the tier, not the work of the others.
        with Traffic(node, threads=2, pause=0.02) as traffic:
            log.lines.clear()
            store.begin(fault)
            ill = traffic.go_on(1.0)
            assert ill
            assert most(ill) < DEADLINE / 2
            assert node.counter("lmkv_tier_operations_total", tier="far", op="get", outcome="deadline") == 0
            assert len(log.lines) <= 6, log.lines
            store.heal()
            traffic.wait(
                lambda: any(v.came >= 2 * CHUNK for v in traffic.since(time.monotonic() - 0.5)),
                PROBE + DEADLINE + SLACK,
                "hits again",
            )
    finally:
        store.heal()
        node.close()


@pytest.mark.parametrize(("store", "fault"), cases("slows"), indirect=["store"])
def test_slow_is_not_down(store: Store, fault: str) -> None:
    node = start(store)
    try:
        fill(node)
        with Traffic(node) as traffic:
            store.begin(fault)
            visits = traffic.go_on(1.5)
            assert any(visit.came for visit in visits)
            assert state(node) == "ok"
            assert max(visit.waited for visit in visits) < 2 * DEADLINE + SLACK
    finally:
        store.heal()
        node.close()


@pytest.mark.parametrize(("store", "fault"), cases("hangs", "fails", "slows"), indirect=["store"])
def test_a42_close_in_every_state(store: Store, fault: str) -> None:
    """100 writes wait and the store is ill: close(2 s) returns in time, and again at once."""
    node = start(store, ram=128 * 1024, queue={"calls": 128, "bytes": 1 << 20}, threads=1, deadline="30s")
    try:
        engine = node.engine()
        engine.store(next(iter(prompts(1))))
        node.settle()
        store.begin(fault)
        for prompt in prompts(100):
            engine.store([token + 500 for token in prompt])
        begin = time.monotonic()
        node.host.close(2.0)
        assert time.monotonic() - begin < 2.0 + SLACK
        node.host.close(2.0)
        assert time.monotonic() - begin < 2.0 + SLACK
    finally:
        store.heal()
        node.close()


@pytest.mark.parametrize(
    ("store", "fault"), [("disk", "hangs"), ("redis", "silent"), ("s3", "silent")], indirect=["store"]
)
def test_queues_are_bounded(store: Store, fault: str) -> None:
    """Stores that the tier cannot take are dropped and counted; those above it go on as if it were not there."""
    tier = {
        "queue": {"calls": 20, "bytes": 12 * FRAME},
        "deadline": "20s",
        "breaker": {"failures": 1000, "probe": "1s"},
    }
    node = start(store, ram=64 * FRAME, **tier)
    try:
        engine = node.engine()
        far = node.manager.tier("far")
        free = node.counter("lmkv_pool_free_bytes")
        store.begin(fault)
        took: list[float] = []
        for prompt in prompts(300):
            begin = time.monotonic()
            assert engine.store(prompt) == CHUNK
            took.append(time.monotonic() - begin)
            calls, nbytes = far.queue()
            assert calls <= 20
            assert nbytes <= 12 * FRAME
            assert engine.load(prompt) == CHUNK, "from RAM"
        assert statistics.median(took) < 0.1
        names = ("lmkv_tier_dropped_writes_total", "lmkv_tier_rejected_total")
        dropped = sum(node.counter(name, tier="far") + node.counter(name, tier="far", op="put") for name in names)
        assert dropped >= 200
        store.heal()
        node.settle(30)
        engine.cache.clear()
        node.settle(30)
        until = time.monotonic() + SLACK
        while node.on_loop(node.manager.gauge) or node.counter("lmkv_pool_free_bytes") < free:
            assert time.monotonic() < until, "all memory is free again"
            time.sleep(0.02)
    finally:
        store.heal()
        node.close()
