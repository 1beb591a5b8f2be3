"""From whom is read, and what becomes of a load when a peer fails."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import pytest
from fake_peers import FakeLink, FakePeers, make

from lmkv.errors import BackendError, ClosedError
from lmkv.testing.material import OTHER_NAMESPACE, make_key, make_memory, make_payload
from lmkv.types import MISS, HealthState
from lmkv_backend_p2p.places import Places
from lmkv_backend_p2p.resting import Resting
from lmkv_backend_p2p.share import Shares
from lmkv_backend_p2p.sources import Holder

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from lmkv.types import ChunkKey
    from lmkv_backend_p2p.backend import P2PBackend

A, B = "127.0.0.1:7001", "127.0.0.1:7002"
KEYS = [make_key(n) for n in range(4)]
FRAMES = {key: make_payload(n, 100 + n) for n, key in enumerate(KEYS)}


def until(true: Callable[[], bool]) -> None:
    end = time.monotonic() + 20
    while not true():
        assert time.monotonic() < end
        time.sleep(0.005)


@pytest.fixture
def a(peers: FakePeers) -> FakeLink:
    return peers.link(A)


@pytest.fixture
def b(peers: FakePeers) -> FakeLink:
    return peers.link(B)


def read(backend: P2PBackend, keys: Sequence[ChunkKey]) -> list[bool]:
    """Which keys came; every byte is looked at."""
    into = [make_memory(200) for _ in keys]
    outcomes = backend.get(keys, into)
    for key, outcome, target in zip(keys, outcomes, into, strict=True):
        assert outcome.ok or outcome == MISS
        assert not outcome.ok or bytes(target.view[: outcome.nbytes]) == FRAMES[key]
    return [outcome.ok for outcome in outcomes]


def both(peers: FakePeers, **more: Any) -> P2PBackend:
    return make(peers, peers=[A, B], rest="50ms", **more)


def test_from_the_one_that_has_most(peers: FakePeers, a: FakeLink, b: FakeLink) -> None:
    a.frames |= {key: FRAMES[key] for key in KEYS[:2]}
    b.frames |= FRAMES
    assert all(read(both(peers), KEYS))
    assert (a.pulled, b.pulled) == ([], KEYS)


def test_what_one_has_not_comes_from_the_other(peers: FakePeers, a: FakeLink, b: FakeLink) -> None:
    a.frames |= {key: FRAMES[key] for key in KEYS[:3]}
    b.frames[KEYS[3]] = FRAMES[KEYS[3]]
    assert all(read(both(peers), KEYS))
    assert (a.pulled, b.pulled) == (KEYS[:3], KEYS[3:])


def test_from_the_less_busy_of_equals_and_not_from_one_that_is_too_busy(
    peers: FakePeers, a: FakeLink, b: FakeLink
) -> None:
    for one in (a, b):
        one.frames |= FRAMES
    a.wait, b.wait = 0.3, 0.1
    assert all(read(both(peers), KEYS))
    assert (a.pulled, b.pulled) == ([], KEYS)
    b.wait = 60.0
    backend = both(peers)
    assert all(read(backend, KEYS))
    assert a.pulled == KEYS
    a.wait = 60.0
    assert not any(backend.contains(KEYS))


@pytest.mark.parametrize("fault", ["down", "silent", "lost"])
def test_one_that_fails_is_replaced_by_one_that_has_it(peers: FakePeers, a: FakeLink, b: FakeLink, fault: str) -> None:
    for one in (a, b):
        one.frames |= FRAMES
    backend = both(peers, deadline=1.0)
    assert all(backend.contains(KEYS))
    setattr(a, fault, True)
    begin = time.monotonic()
    assert all(read(backend, KEYS))
    assert time.monotonic() - begin < 5
    assert b.pulled == KEYS


@pytest.mark.parametrize("fault", ["down", "silent", "lost"])
def test_what_nobody_gives_is_a_miss(peers: FakePeers, a: FakeLink, fault: str) -> None:
    a.frames |= FRAMES
    backend = both(peers, deadline=0.5)
    assert all(backend.contains(KEYS))
    setattr(a, fault, True)
    begin = time.monotonic()
    assert not any(read(backend, KEYS))
    assert time.monotonic() - begin < 5


def test_one_that_failed_is_asked_in_the_background_before_anybody_waits_for_it(
    peers: FakePeers, a: FakeLink, b: FakeLink, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lmkv_backend_p2p.resting.ASK_SECONDS", 1.0)
    for one in (a, b):
        one.frames |= FRAMES
    backend = both(peers, deadline=1.0)
    a.silent = True
    assert all(backend.contains(KEYS)), "the other one says so"
    time.sleep(0.1)
    for _ in range(3):
        begin = time.monotonic()
        assert all(backend.contains(KEYS))
        assert time.monotonic() - begin < 0.8
    a.silent = False
    b.frames.clear()
    until(lambda: all(backend.contains(KEYS)))


def test_the_tier_is_ill_only_when_nobody_can_say_anything(peers: FakePeers, a: FakeLink, b: FakeLink) -> None:
    backend = both(peers)
    a.down = True
    assert not any(backend.contains(KEYS))
    assert backend.health().state is HealthState.OK
    b.down = True
    for _ in range(2):
        with pytest.raises(BackendError, match="no peer answers"):
            backend.contains(KEYS)
    with pytest.raises(BackendError):
        backend.get(KEYS, [make_memory(200)] * len(KEYS))
    assert backend.health().state is HealthState.DOWN
    b.down = False
    assert backend.health().state is HealthState.OK
    assert not any(backend.contains(KEYS)), "it was asked for its health, and may be asked at once"


def test_what_is_known_is_read_although_nobody_can_say_where_the_rest_is(
    peers: FakePeers, a: FakeLink, monkeypatch: pytest.MonkeyPatch
) -> None:
    a.frames |= FRAMES
    backend = both(peers)
    assert all(backend.contains(KEYS[:2]))

    def away(*_: object) -> list[Holder]:
        raise BackendError("away")

    monkeypatch.setattr(backend._source, "holders", away)
    assert read(backend, KEYS) == [True, True, False, False]
    with pytest.raises(BackendError, match="away"):
        read(backend, KEYS[2:])


def test_nobody_gets_the_memory_back_while_bytes_may_come(
    peers: FakePeers, a: FakeLink, b: FakeLink, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second of two pulls cannot be begun: the first is waited for before that is told."""
    a.frames[KEYS[0]], b.frames[KEYS[1]] = FRAMES[KEYS[0]], FRAMES[KEYS[1]]
    backend = both(peers, deadline=20.0)
    assert all(backend.contains(KEYS[:2]))
    a.pause = 0.3
    submit, begun = peers.submit, []

    def once(coroutine: Any) -> Any:
        if begun:
            coroutine.close()
            raise ClosedError("the links to peers are closed")
        begun.append(coroutine)
        return submit(coroutine)

    monkeypatch.setattr(peers, "submit", once)
    with pytest.raises(ClosedError):
        read(backend, KEYS[:2])
    assert a.pulled == KEYS[:1]


def test_keys_of_two_namespaces_and_the_same_key_twice(peers: FakePeers, a: FakeLink) -> None:
    other = make_key(1, namespace=OTHER_NAMESPACE)
    FRAMES[other] = make_payload(9, 150)
    a.frames |= FRAMES
    backend = both(peers)
    assert list(backend.contains([KEYS[0], other, KEYS[0]])) == [True] * 3
    assert read(backend, [KEYS[0], other, KEYS[0]]) == [True] * 3
    del FRAMES[other]


def test_before_the_links_are_there_nothing_is_found() -> None:
    backend = make(None, peers=[A])
    assert not any(backend.contains(KEYS))
    assert not any(read(backend, KEYS))
    assert backend.health().state is HealthState.DOWN
    backend.close()


def test_batches_that_run_at_a_time_come_from_different_peers() -> None:
    shares = Shares()
    sizes = [10] * 4
    where = {i: {A: 0.0, B: 0.0} for i in range(4)}
    first = shares.begin([0, 1], sizes, where)
    second = shares.begin([2], sizes, where)
    third = shares.begin([3], sizes, where)
    assert [first, second, third] == [{A: [0, 1]}, {B: [2]}, {B: [3]}]
    for plan in (first, second, third):
        shares.end(plan, sizes)
    assert shares.begin([0], sizes, where) == {A: [0]}
    assert shares.begin([], sizes, where) == shares.begin([1], sizes, {1: {}}) == {}


def test_places_are_forgotten_in_time_and_in_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lmkv_backend_p2p.places.MOST", 2)
    places = Places(0.05)
    digests = [key.digest for key in KEYS[:3]]
    places.learn(b"n", digests, [Holder(A, [True, True, True], 0.0), Holder(B, [False, True, True], 1.0)])
    assert [places.of(b"n", digest) for digest in digests] == [{}, {A: 0.0, B: 1.0}, {A: 0.0, B: 1.0}]
    places.gone(b"n", digests[1], A)
    assert places.of(b"n", digests[1]) == {B: 1.0}
    places.learn(b"n", digests[1:2], [])
    assert places.of(b"n", digests[1]) == {}
    until(lambda: not places.of(b"n", digests[2]))


def test_a_peer_rests_and_is_asked_once(peers: FakePeers, a: FakeLink) -> None:
    resting = Resting(0.05, lambda address, _: peers.submit(peers.link(address).has(b"", [], time.monotonic() + 1)))
    assert resting.well(A)
    a.down = True
    resting.failed(A, "a reason")
    assert not resting.well(A)
    assert a.asked == 0
    time.sleep(0.06)
    assert not resting.well(A)
    until(lambda: a.asked == 1)
    a.down = False
    until(lambda: resting.well(A))
    assert a.asked == 2
