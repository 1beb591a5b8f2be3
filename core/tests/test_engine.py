"""CacheEngine by tokens, and the operator's methods, on a real storage with a resident tier."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any

import numpy as np
import pytest
from engine_rig import (
    LAYOUT,
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

from lmkv.engine import CacheEngine, digests_of
from lmkv.engine.lookup import NOTHING
from lmkv.errors import ClosedError, ConfigError
from lmkv.gpu import CopyJob, CPUConnector
from lmkv.keys import Extras
from lmkv.layout import PageLayout
from lmkv.service import LocalClient, ThreadHost
from lmkv.service.protocol import (
    Clear,
    Cleared,
    Found,
    HealthReport,
    Move,
    Ok,
    Pin,
    Prefetch,
    Recode,
    Register,
    Unpin,
)

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
