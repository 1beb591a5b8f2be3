"""CacheEngine on a real storage with a resident tier, in a thread or behind a socket."""

from __future__ import annotations

import threading
import time
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from lmkv.config import load_config
from lmkv.engine import CacheEngine, Hit, RetrieveItem, StoreItem, StoreResult, digests_of, frame_of, tail_of
from lmkv.engine import transfer as transfer_module
from lmkv.engine.lookup import NOTHING
from lmkv.errors import ClosedError, ConfigError, LmkvError
from lmkv.gpu import CopyJob, CPUConnector
from lmkv.keys import Extras, Namespace
from lmkv.layout import PageLayout, PageRun
from lmkv.plugins import PluginHost
from lmkv.service import LocalClient, ThreadHost
from lmkv.service.link import Connection, StorageClient
from lmkv.service.protocol import (
    Acquire,
    Clear,
    Cleared,
    Found,
    HealthReport,
    Loaded,
    Lookup,
    Move,
    Ok,
    Pin,
    Prefetch,
    Recode,
    Register,
    Release,
    Trim,
    Unpin,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from numpy.typing import NDArray

PAGE, CHUNK, PAGES = 2, 8, 200
RUN = 512
SENTINEL = 0xEE
LAYOUT = PageLayout("test", "uint8", PAGE, tuple(PageRun(i, 0, RUN, RUN) for i in range(3)))


def config_text(pool: str = "8MiB", tail: str = "pages") -> str:
    return (
        f"pool: {{size: {pool}, prefault: false, hugepages: 'off'}}\nchunk_tokens: {CHUNK}\ntail: {tail}\n"
        "tiers:\n  - {name: ram, backend: cpu, capacity: 100%}\n"
    )


def thread_host(**options: str) -> ThreadHost:
    return ThreadHost(load_config(config_text(**options), host=PluginHost.discover(), environ={}))


def namespace(shards: int = 1, model: str = "m") -> Namespace:
    return Namespace(model, "r", "uint8", (LAYOUT.describe(),) * shards, (LAYOUT.page_bytes,) * shards, CHUNK, PAGE)


class Pages:
    """The memory of a fake engine."""

    def __init__(self) -> None:
        self.buffers = [np.full((PAGES, RUN), SENTINEL, np.uint8) for _ in LAYOUT.runs]
        self.gpu = CPUConnector(LAYOUT, self.buffers)

    def compute(self, tokens: NDArray[Any], ids: NDArray[Any], salt: int = 0) -> None:
        """KV of a deterministic model: depends on all tokens up to the page, on the layer and the salt."""
        for at, page in enumerate(ids):
            prefix = tokens[: (at + 1) * PAGE]
            if len(prefix) == (at + 1) * PAGE:
                for layer, buffer in enumerate(self.buffers):
                    buffer[page] = np.random.default_rng([*prefix.tolist(), layer, salt]).integers(
                        0, 200, RUN, np.uint8
                    )

    def equal(self, mine: NDArray[Any], other: Pages, theirs: NDArray[Any]) -> bool:
        return all((a[mine] == b[theirs]).all() for a, b in zip(self.buffers, other.buffers, strict=True))

    def untouched(self, ids: NDArray[Any]) -> bool:
        return all((buffer[ids] == SENTINEL).all() for buffer in self.buffers)


@pytest.fixture
def host() -> Iterator[ThreadHost]:
    one = thread_host()
    yield one
    one.close()


@pytest.fixture
def pages() -> Pages:
    return Pages()


@pytest.fixture
def engine(host: ThreadHost, pages: Pages) -> Iterator[CacheEngine]:
    with CacheEngine(LocalClient(host), namespace(), gpu=pages.gpu) as one:
        yield one


def held(engine: CacheEngine) -> dict[str, int]:
    return {name: n for name, n in engine.health().holds.items() if n and name != "sessions"}


def ids(first: int, tokens: int) -> NDArray[np.int64]:
    return np.arange(first, first + -(-tokens // PAGE))


def tokens_of(n: int, seed: int = 1) -> NDArray[np.uint32]:
    return np.random.default_rng(seed).integers(0, 1 << 32, n, np.uint32)


class Meddler(StorageClient):
    """A client whose requests and replies a test can look at and change."""

    def __init__(self, inner: StorageClient) -> None:
        self.inner = inner
        self.seen: list[Any] = []
        self.change: Callable[[Any, Any], Any] = lambda _request, reply: reply
        self.link = _MeddledConnection(self)

    def connection(self) -> Connection:
        return self.link

    @property
    def welcome(self) -> Any:
        return self.inner.welcome

    @property
    def connected(self) -> bool:
        return self.inner.connected

    def on_reconnect(self, callback: Callable[[], None]) -> None:
        self.inner.on_reconnect(callback)

    def close(self) -> None:
        self.inner.close()


class _MeddledConnection(Connection):
    def __init__(self, client: Meddler) -> None:
        super().__init__()
        self.client = client
        self.inner = client.inner.connection()
        self.pool, self.welcome = self.inner.pool, self.inner.welcome
        self.whole = True

    def call(self, request: Any) -> Any:
        self.client.seen.append(request)
        answer: Future[Any] = Future()

        def done(future: Future[Any]) -> None:
            try:
                answer.set_result(self.client.change(request, future.result()))
            except LmkvError as e:
                answer.set_exception(e)

        self.inner.call(request).add_done_callback(done)
        return answer

    def send(self, message: Any) -> bool:
        self.client.seen.append(message)
        return self.inner.send(message)

    @property
    def alive(self) -> bool:
        return self.inner.alive

    def intact(self) -> bool:
        return self.whole


@pytest.fixture
def meddler(host: ThreadHost) -> Meddler:
    return Meddler(LocalClient(host))


# --- by tokens -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [1, 2, 7, 8, 9, 16, 23, 40])
def test_what_was_stored_comes_back(engine: CacheEngine, pages: Pages, n: int) -> None:
    tokens = tokens_of(n)
    whole = n - n % PAGE
    pages.compute(tokens, ids(0, n))
    assert engine.store(tokens, ids(0, n)).tolist() == [True] * whole + [False] * (n - whole)
    assert engine.lookup(tokens) == whole
    got = engine.retrieve(tokens, ids(100, n))
    assert got.dtype == np.bool_
    assert got.tolist() == [True] * whole + [False] * (n - whole)
    assert pages.equal(ids(0, whole), pages, ids(100, whole))
    assert pages.untouched(np.arange(100 + whole // PAGE, PAGES))
    assert held(engine) == {}


@pytest.mark.parametrize("same", [0, 1, 2, 5, 8, 11, 13, 16, 22])
def test_a_prompt_that_diverges_gets_every_page_before_it(engine: CacheEngine, pages: Pages, same: int) -> None:
    stored = tokens_of(23)
    pages.compute(stored, ids(0, 23))
    engine.store(stored, ids(0, 23))
    asked = np.concatenate([stored[:same], tokens_of(30, seed=2)])
    expected = same - same % PAGE
    assert engine.lookup(asked) == expected
    assert int(engine.retrieve(asked, ids(100, len(asked))).sum()) == expected
    assert pages.equal(ids(0, expected), pages, ids(100, expected))
    assert pages.untouched(np.arange(100 + expected // PAGE, PAGES))
    assert held(engine) == {}


@pytest.mark.parametrize("skip", [0, 2, 6, 8, 10, 16, 20, 22])
def test_masked_out_pages_are_not_touched(engine: CacheEngine, pages: Pages, skip: int) -> None:
    tokens = tokens_of(22)
    pages.compute(tokens, ids(0, 22))
    engine.store(tokens, ids(0, 22))
    mask = np.arange(22) >= skip
    assert engine.retrieve(tokens, ids(100, 22), mask=mask).tolist() == mask.tolist()
    assert pages.untouched(ids(100, skip))
    assert pages.equal(np.arange(skip // PAGE, 11), pages, np.arange(100 + skip // PAGE, 111))
    assert held(engine) == {}


def test_a_store_skips_what_is_masked_out(engine: CacheEngine, pages: Pages) -> None:
    tokens = tokens_of(24)
    pages.compute(tokens, ids(0, 24))
    mask = [False] * 10 + [True] * 14
    assert engine.store(tokens, ids(0, 24), mask=mask).tolist() == mask
    assert engine.lookup(tokens) == 0  # the first chunk is masked out
    assert engine.store(tokens, ids(0, 24)).all()
    assert engine.retrieve(tokens, ids(100, 24)).all()
    assert pages.equal(ids(0, 24), pages, ids(100, 24))
    assert not engine.store(tokens, ids(0, 24), mask=[False] * 24).any()
    assert not engine.retrieve(tokens, ids(100, 24), mask=[False] * 24).any()


def test_extras_keep_prompts_apart(engine: CacheEngine, pages: Pages) -> None:
    tokens = tokens_of(16)
    pages.compute(tokens, ids(0, 16))
    engine.store(tokens, ids(0, 16), extras=Extras(salt="x"))
    assert engine.lookup(tokens) == 0
    assert engine.lookup(tokens, Extras(adapter="x")) == 0
    assert engine.lookup(tokens, Extras(salt="x")) == 16


def test_tails_are_not_stored_where_that_is_configured(pages: Pages) -> None:
    host = thread_host(tail="none")
    with CacheEngine(LocalClient(host), namespace(), gpu=pages.gpu) as engine:
        tokens = tokens_of(22)
        pages.compute(tokens, ids(0, 22))
        assert engine.store(tokens, ids(0, 22)).tolist() == [True] * 16 + [False] * 6
        assert engine.lookup(tokens) == 16
        assert engine.lookup(tokens[:14]) == 14  # pages of a full chunk all the same
    host.close()


def test_lists_and_arrays_of_any_integer_do(engine: CacheEngine, pages: Pages) -> None:
    tokens = np.arange(16)
    pages.compute(tokens, ids(0, 16))
    assert engine.store(tokens.tolist(), list(range(8))).all()
    for kind in (np.int32, np.int64, np.uint32, np.uint64):
        assert engine.lookup(tokens.astype(kind)) == 16
    assert engine.retrieve(list(range(16)), np.arange(50, 58, dtype=np.int32), mask=[True] * 16).all()
    assert engine.lookup([]) == 0
    assert engine.store([], []).tolist() == []


@pytest.mark.parametrize(
    ("tokens", "page_ids", "mask", "says"),
    [
        ([1.5] * 8, range(4), None, "row of integers"),
        ([[1] * 8], range(4), None, "row of integers"),
        ([-1] * 8, range(4), None, "0 … 2\\*\\*32-1"),
        ([1 << 32] * 8, range(4), None, "0 … 2\\*\\*32-1"),
        (range(8), range(3), None, "3 page ids for 8 tokens of 2 per page: expected 4"),
        (range(9), range(3), None, "expected 4 or 5"),
        (range(8), range(5), None, "expected 4"),
        (range(8), [0, 1, 2, -3], None, "must not be negative"),
        (range(8), [0.0, 1, 2, 3], None, "row of integers"),
        (range(8), range(4), [True] * 7, "one bool for each of the 8 tokens"),
        (range(8), range(4), [1] * 8, "one bool"),
        (range(8), range(4), [True] * 4 + [False] * 4, "False for a prefix"),
        (range(8), range(4), [False, True] * 4, "False for a prefix"),
        (range(8), range(4), [False] * 3 + [True] * 5, "round it down to 2"),
    ],
)
def test_bad_input_is_refused_before_anything_happens(
    engine: CacheEngine, pages: Pages, *, tokens: Any, page_ids: Any, mask: Any, says: str
) -> None:
    for call in (engine.store, engine.retrieve):
        with pytest.raises(ConfigError, match=says) as e:
            call(list(tokens), list(page_ids), mask)
        assert e.value.kind == "input"
    assert pages.untouched(np.arange(PAGES))
    assert held(engine) == {}
    assert engine.clear() == {"ram": 0}


def test_page_ids_that_the_engine_has_not_are_a_failed_store(engine: CacheEngine, pages: Pages) -> None:
    tokens = tokens_of(16)
    pages.compute(tokens, ids(0, 16))
    bad = np.array([0, 1, 2, 3, 4, 5, 6, PAGES])
    assert engine.store(tokens, bad).tolist() == [True] * 8 + [False] * 8
    assert engine.lookup(tokens) == 8
    engine.store(tokens, ids(0, 16))
    assert engine.retrieve(tokens, bad).tolist() == [False] * 16  # one batch, and nothing of it was copied
    assert held(engine) == {}


def test_layout_and_shard_must_be_those_of_the_namespace(host: ThreadHost, pages: Pages) -> None:
    other = PageLayout("test", "uint8", PAGE, LAYOUT.runs, tags=(("order", "khd"),))
    with pytest.raises(ConfigError, match="page layout"):
        CacheEngine(LocalClient(host), namespace(), gpu=CPUConnector(other, pages.buffers))
    with pytest.raises(ConfigError, match="shard 1"):
        CacheEngine(LocalClient(host), namespace(), shard=1, gpu=pages.gpu)
    engine = CacheEngine(LocalClient(host), namespace())
    with pytest.raises(ConfigError, match="without a GPUConnector"):
        engine.retrieve(tokens_of(8), ids(0, 8))
    assert engine.lookup(tokens_of(8)) == 0
    engine.close()


def test_a_namespace_that_cannot_fit_is_refused_when_the_engine_is_made(pages: Pages) -> None:
    host = thread_host(pool="1MiB")
    with pytest.raises(ConfigError, match="takes"):
        CacheEngine(LocalClient(host), namespace(shards=300), gpu=pages.gpu)
    host.close()


# --- by key ----------------------------------------------------------------------------------------------------------


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


# --- the operator's methods ------------------------------------------------------------------------------------------


def test_each_method_sends_its_message(meddler: Meddler) -> None:
    answers = {Register: Ok(), Clear: Cleared({"ram": 2})}
    meddler.link.inner.call = lambda r: _done(answers.get(type(r), Ok(7)))  # type: ignore[method-assign]
    engine = CacheEngine(meddler, namespace())
    tokens = tokens_of(12)
    chain = engine.chain()
    chain.extend(tokens)
    name, digests = engine.namespace.id, digests_of(chain)
    meddler.seen.clear()
    assert engine.pin(tokens, 3.0) == 7
    assert engine.unpin(tokens) == 7
    assert engine.prefetch(tokens) == 7
    assert engine.move(tokens, "ram", "disk", keep=True) == 7
    assert engine.compress(tokens, "disk", "zlib") == 7
    assert engine.decompress(tokens, "disk") == 7
    assert engine.clear() == {"ram": 2}
    assert engine.clear("ram") == {"ram": 2}
    assert meddler.seen == [
        Pin(name, digests, 3.0),
        Unpin(name, digests),
        Prefetch(name, digests),
        Move(name, digests, "ram", "disk", keep=True),
        Recode(name, digests, "disk", "zlib"),
        Recode(name, digests, "disk", "identity"),
        Clear(name),
        Clear(name, "ram"),
    ]
    meddler.close()


def _done(reply: Any) -> Future[Any]:
    future: Future[Any] = Future()
    future.set_result(reply)
    return future


def test_the_operators_methods_work(engine: CacheEngine, pages: Pages) -> None:
    tokens = tokens_of(22)
    pages.compute(tokens, ids(0, 22))
    engine.store(tokens, ids(0, 22))
    assert engine.pin(tokens, 100) == 3
    assert engine.prefetch(tokens[:16]) == 2
    assert engine.unpin(tokens) == 3
    report = engine.health()
    assert isinstance(report, HealthReport)
    assert report.state == "ok"
    with pytest.raises(ConfigError, match="no tier 'dsik'"):
        engine.clear("dsik")
    assert engine.clear("ram") == {"ram": 3}
    assert engine.lookup(tokens) == 0


def test_without_a_service_everything_is_a_miss(pages: Pages) -> None:
    host = thread_host()
    engine = CacheEngine(LocalClient(host), namespace(), gpu=pages.gpu)
    tokens = tokens_of(16)
    host.close()
    host.close()
    chain = engine.chain()
    chain.extend(tokens)
    ticket = engine.begin_lookup(chain)
    assert ticket.poll() == NOTHING
    assert isinstance(ticket.error, ClosedError)
    assert engine.lookup(tokens) == 0
    assert not engine.store(tokens, ids(0, 16)).any()
    assert not engine.retrieve(tokens, ids(0, 16)).any()
    assert engine.health().state == "closed"
    with pytest.raises(ClosedError):
        engine.pin(tokens)
    with pytest.raises(ClosedError):
        LocalClient(host)
    engine.release(5)
    engine.close()


def test_a_storage_that_cannot_start_says_why() -> None:
    async def start(_config: Any) -> Any:
        raise ConfigError("no room")

    with pytest.raises(ConfigError, match="no room"):
        ThreadHost(None, start=start)  # type: ignore[arg-type]


def test_an_answer_of_another_kind_is_a_miss(meddler: Meddler) -> None:
    engine = CacheEngine(meddler, namespace())
    meddler.change = lambda _request, _reply: Ok()
    chain = engine.chain()
    chain.extend(tokens_of(8))
    ticket = engine.begin_lookup(chain)
    assert ticket.wait(10) == NOTHING
    assert ticket.error is not None
    meddler.change = lambda _request, _reply: Found(0, 1, tiers=(9,))
    hit = engine.begin_lookup(chain).wait(10)
    assert hit is not None
    assert hit.tiers == ("?",)
    engine.close()


def test_a_bad_page_number_reaches_no_memory(pages: Pages) -> None:
    with pytest.raises(ValueError, match="page ids"):
        pages.gpu.scatter([CopyJob(np.array([-1]), memoryview(bytearray(LAYOUT.page_bytes)), 1)])
