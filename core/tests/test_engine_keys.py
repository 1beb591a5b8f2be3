"""CacheEngine by key, as connectors use it: frames, look-ups, leases, what goes wrong in between."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from engine_rig import (
    CHUNK,
    PAGE,
    PAGES,
    Meddler,
    Pages,
    held,
    ids,
    namespace,
    thread_host,
    tokens_of,
)

from lmkv.engine import CacheEngine, Hit, RetrieveItem, StoreItem, StoreResult, digests_of, frame_of, tail_of
from lmkv.engine import transfer as transfer_module
from lmkv.engine.lookup import NOTHING
from lmkv.service import LocalClient, ThreadHost
from lmkv.service.protocol import (
    Acquire,
    Loaded,
    Lookup,
    Release,
    Trim,
)

if TYPE_CHECKING:
    from numpy.typing import NDArray


def items(engine: CacheEngine, tokens: NDArray[Any], first: int = 0) -> list[StoreItem]:
    chain = engine.chain()
    chain.extend(tokens)
    per = CHUNK // PAGE
    found = [
        StoreItem(frame_of(chain, i), np.arange(first + i * per, first + (i + 1) * per))
        for i in range(len(chain.digests))
    ]
    tail = tail_of(chain)
    at = first + len(found) * per
    return found if tail is None else [*found, StoreItem(tail, np.arange(at, at + tail.pages))]


def test_frames_are_stored_once(engine: CacheEngine, pages: Pages) -> None:
    tokens = tokens_of(22)
    pages.compute(tokens, ids(0, 22))
    assert engine.store_frames(items(engine, tokens)) == [StoreResult.STORED] * 3
    assert engine.store_frames(items(engine, tokens)) == [StoreResult.PRESENT] * 3
    longer = tokens_of(40)
    longer[:22] = tokens
    pages.compute(longer, ids(0, 40))
    assert engine.store_frames(items(engine, longer)) == [StoreResult.PRESENT] * 2 + [StoreResult.STORED] * 3


def test_only_the_frame_that_could_not_be_copied_is_lost(engine: CacheEngine, pages: Pages) -> None:
    """Also where others of the batch are there already: no frame is committed in the place of another."""
    tokens = tokens_of(40)
    pages.compute(tokens, ids(0, 40))
    engine.store(tokens[:8], ids(0, 8))
    wanted = items(engine, tokens)
    wanted[2] = StoreItem(wanted[2].frame, np.full(4, PAGES + 5))
    wanted[4] = StoreItem(wanted[4].frame, np.arange(3))
    assert [r.value for r in engine.store_frames(wanted)] == ["present", "stored", "failed", "stored", "failed"]
    assert engine.lookup(tokens) == 16
    engine.store(tokens, ids(0, 40))
    assert engine.retrieve(tokens, ids(100, 40)).all()
    assert pages.equal(ids(0, 40), pages, ids(100, 40))
    assert held(engine) == {}


def test_a_store_larger_than_the_pool_goes_in_batches(pages: Pages, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfer_module, "FRAMES_PER_RESERVE", 3)
    host = thread_host(pool="1MiB")
    with CacheEngine(LocalClient(host), namespace(), gpu=pages.gpu) as engine:
        wanted = [StoreItem(item.frame, item.pages % PAGES) for item in items(engine, tokens_of(1600))]
        results = engine.store_frames(wanted)
        assert {StoreResult.STORED} <= set(results) <= {StoreResult.STORED, StoreResult.REJECTED}
        assert results.count(StoreResult.STORED) > 50
        assert held(engine) == {}
    host.close()


def test_a_copy_that_is_interrupted_gives_its_memory_back(
    engine: CacheEngine, pages: Pages, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(jobs: Any, **_: Any) -> None:
        raise KeyboardInterrupt

    tokens = tokens_of(16)
    with monkeypatch.context() as patch:
        patch.setattr(pages.gpu, "gather", interrupted)
        with pytest.raises(KeyboardInterrupt):
            engine.store(tokens, ids(0, 16))
    assert held(engine) == {}
    engine.store(tokens, ids(0, 16))
    with monkeypatch.context() as patch:
        patch.setattr(pages.gpu, "scatter", interrupted)
        with pytest.raises(KeyboardInterrupt):
            engine.retrieve(tokens, ids(0, 16))
    assert held(engine) == {}


def test_a_look_up_costs_one_poll(engine: CacheEngine, pages: Pages) -> None:
    tokens = tokens_of(30)
    pages.compute(tokens, ids(0, 30))
    engine.store(tokens, ids(0, 30))
    chain = engine.chain()
    chain.extend(tokens)
    ticket = engine.begin_lookup(chain)
    hit = ticket.wait(10)
    assert hit == ticket.poll()
    assert isinstance(hit, Hit)
    assert (hit.chunks, hit.pages, hit.tokens, hit.tiers) == (3, 3, 30, ("ram",) * 4)
    tail = tail_of(chain)
    assert tail is not None
    assert hit.frame == tail.digest
    assert held(engine)["leases"] == 1
    engine.release(hit.lease)
    engine.release(hit.lease)
    assert held(engine) == {}
    assert digests_of(chain) == b"".join(chain.digests) + tail.digest


def stopped_loop(host: ThreadHost) -> threading.Event:
    """Holds the storage loop until the event is set."""
    go, stopped = threading.Event(), threading.Event()

    def stop() -> None:
        stopped.set()
        go.wait(20)

    host.loop.call_soon_threadsafe(stop)
    assert stopped.wait(20)
    return go


@pytest.mark.parametrize("extended", [False, True])
def test_a15_a_look_up_that_is_cancelled_holds_nothing(
    host: ThreadHost, engine: CacheEngine, pages: Pages, *, extended: bool
) -> None:
    """Before the answer, after it, twice: with and without a second question for the pages of a chunk."""
    tokens = tokens_of(30)
    pages.compute(tokens, ids(0, 30))
    engine.store(tokens, ids(0, 30))
    chain = engine.chain()
    chain.extend(np.concatenate([tokens[:20], tokens_of(20, seed=9)]) if extended else tokens)
    go = stopped_loop(host)
    early = engine.begin_lookup(chain)
    assert early.poll() is None
    assert early.wait(0.001) is None
    early.cancel()
    early.cancel()
    assert early.poll() is NOTHING
    go.set()
    late = engine.begin_lookup(chain)
    hit = late.wait(10)
    assert hit is not None
    assert hit.tokens == (20 if extended else 30)
    late.cancel()
    late.cancel()
    assert late.poll() is NOTHING
    assert held(engine) == {}


def test_a_chain_may_grow_while_it_is_looked_up(host: ThreadHost, engine: CacheEngine, pages: Pages) -> None:
    tokens = tokens_of(20)
    pages.compute(tokens, ids(0, 20))
    engine.store(tokens, ids(0, 20))
    chain = engine.chain()
    chain.extend(tokens)
    go = stopped_loop(host)
    ticket = engine.begin_lookup(chain)
    chain.extend(tokens_of(100, seed=3))
    go.set()
    hit = ticket.wait(10)
    assert hit is not None
    assert hit.tokens == 20
    ticket.cancel()


def test_a16_partial_use(meddler: Meddler, pages: Pages) -> None:
    """What the engine does not need of a hit is let go of at once."""
    with CacheEngine(meddler, namespace(), gpu=pages.gpu) as engine:
        tokens = tokens_of(32)
        pages.compute(tokens, ids(0, 32))
        engine.store(tokens, ids(0, 32))
        meddler.seen.clear()
        assert engine.retrieve(tokens, ids(100, 32), mask=[False] * 16 + [True] * 16).sum() == 16
        lookup, trim, acquire, *_, release = meddler.seen
        assert isinstance(lookup, Lookup)
        assert (trim, release) == (Trim(acquire.lease, 2), Release(acquire.lease))
        assert (acquire.first, acquire.count) == (2, 2)
        assert held(engine) == {}


@pytest.mark.parametrize("broken", ["absent", "short", "long", "outside", "missing"])
def test_a12_middle_chunk_fails(meddler: Meddler, pages: Pages, broken: str) -> None:
    """The chunk before it is good, it and all after it are not, and nothing stays held."""

    def change(request: Any, reply: Any) -> Any:
        if not isinstance(request, Acquire):
            return reply
        offsets, lengths = list(reply.offsets), list(reply.lengths)
        if broken == "absent":
            offsets[1] = -1
        elif broken == "outside":
            offsets[1] = len(meddler.link.pool.view) - lengths[1] + 1
        elif broken == "missing":
            del offsets[1:], lengths[1:]
        else:
            lengths[1] += 1 if broken == "long" else -1
        return Loaded(reply.hold, tuple(offsets), tuple(lengths), reply.reasons)

    with CacheEngine(meddler, namespace(), gpu=pages.gpu) as engine:
        tokens = tokens_of(24)
        pages.compute(tokens, ids(0, 24))
        engine.store(tokens, ids(0, 24))
        meddler.change = change
        assert engine.retrieve(tokens, ids(100, 24)).tolist() == [True] * 8 + [False] * 16
        assert pages.equal(ids(0, 8), pages, ids(100, 8))
        assert pages.untouched(np.arange(104, PAGES))
        assert held(engine) == {}


def test_many_frames_come_in_several_acquires(meddler: Meddler, pages: Pages, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfer_module, "FRAMES_PER_ACQUIRE", 3)
    with CacheEngine(meddler, namespace(), gpu=pages.gpu) as engine:
        tokens = tokens_of(190)
        pages.compute(tokens, ids(0, 190))
        engine.store(tokens, ids(0, 190))
        other = Pages()
        with CacheEngine(Meddler(meddler.inner), namespace(), gpu=other.gpu) as second:
            assert second.retrieve(tokens, ids(0, 190)).all()
            assert other.equal(ids(0, 190), pages, ids(0, 190))
            asked = [m for m in second.client.seen if isinstance(m, Acquire)]  # type: ignore[attr-defined]
            assert [(a.first, a.count) for a in asked][-1] == (21, 3)
            assert held(second) == {}


def test_a_copy_after_which_the_session_has_ended_counts_as_failed(meddler: Meddler, pages: Pages) -> None:
    with CacheEngine(meddler, namespace(), gpu=pages.gpu) as engine:
        tokens = tokens_of(24)
        pages.compute(tokens, ids(0, 24))
        engine.store(tokens, ids(0, 24))
        meddler.link.whole = False
        assert not engine.retrieve(tokens, ids(100, 24)).any()
        assert held(engine) == {}


def test_answers_that_come_too_late_hold_nothing(host: ThreadHost, engine: CacheEngine, pages: Pages) -> None:
    tokens = tokens_of(24)
    pages.compute(tokens, ids(0, 24))
    engine.store(tokens, ids(0, 24))
    chain = engine.chain()
    chain.extend(tokens)
    hit = engine.begin_lookup(chain).wait(10)
    assert hit is not None
    go = stopped_loop(host)
    wanted = [RetrieveItem(i, 4, np.arange(100 + i * 4, 104 + i * 4)) for i in range(3)]
    assert engine.retrieve_frames(hit.lease, wanted, timeout=0.01) == [False] * 3
    go.set()
    engine.release(hit.lease)
    assert pages.untouched(np.arange(100, PAGES))
    until = time.monotonic() + 20
    while held(engine):  # the answer comes after this question
        assert time.monotonic() < until


def test_a_lease_that_has_ended_gives_nothing(engine: CacheEngine, pages: Pages) -> None:
    tokens = tokens_of(16)
    pages.compute(tokens, ids(0, 16))
    engine.store(tokens, ids(0, 16))
    chain = engine.chain()
    chain.extend(tokens)
    hit = engine.begin_lookup(chain).wait(10)
    assert hit is not None
    engine.release(hit.lease)
    assert engine.retrieve_frames(hit.lease, [RetrieveItem(0, 4, ids(100, 8))]) == [False]
    assert engine.retrieve_frames(0, [RetrieveItem(0, 4, ids(100, 8))]) == [False]
    assert pages.untouched(ids(100, 16))


def test_a_lease_of_an_earlier_service_means_nothing_to_the_next(pages: Pages) -> None:
    leases = []
    for _ in range(2):
        host = thread_host()
        with CacheEngine(LocalClient(host), namespace(), gpu=pages.gpu) as engine:
            tokens = tokens_of(16, seed=len(leases))
            pages.compute(tokens, ids(0, 16))
            engine.store(tokens, ids(0, 16))
            chain = engine.chain()
            chain.extend(tokens)
            hit = engine.begin_lookup(chain).wait(10)
            assert hit is not None
            if leases:
                assert engine.retrieve_frames(leases[0], [RetrieveItem(0, 4, ids(100, 8))]) == [False]
            leases.append(hit.lease)
        host.close()


def test_a13_ranks_disagree(host: ThreadHost) -> None:
    """Two shards: what one of them has alone is not found."""
    ranks = [Pages(), Pages()]
    engines = [
        CacheEngine(LocalClient(host, f"rank {r}"), namespace(shards=2), shard=r, gpu=ranks[r].gpu) for r in range(2)
    ]
    tokens = tokens_of(24)
    for rank, n in ((0, 24), (1, 16)):
        ranks[rank].compute(tokens, ids(0, 24), salt=rank)
        assert engines[rank].store(tokens[:n], ids(0, n)).all()
    assert [e.lookup(tokens) for e in engines] == [16, 16]
    for rank in range(2):
        assert engines[rank].retrieve(tokens, ids(100, 24)).sum() == 16
        assert ranks[rank].equal(ids(0, 16), ranks[rank], ids(100, 16))
    assert not ranks[0].equal(ids(0, 16), ranks[1], ids(0, 16))
    assert held(engines[0]) == {}
    for engine in engines:
        engine.close()
