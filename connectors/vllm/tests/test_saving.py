"""What is saved of a request, and what must not be: pages that may still change, that are nobody's, or that failed."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from fake_vllm import CHUNK, PAGE, Request, truth

from lmkv.keys import KeyChain
from lmkv.service.protocol import Clear, Cleared
from lmkv_vllm.saving import Saves, frames_of

if TYPE_CHECKING:
    from fake_vllm import FakeVLLM


def tokens(count: int, start: int = 1) -> list[int]:
    return list(range(start, start + count))


def until(engine: FakeVLLM, request: Request, computed: int) -> None:
    while request.num_computed_tokens < computed:
        engine.step()
    assert request.num_computed_tokens == computed


class Broken:
    """A chain that cannot say its prefixes."""

    def __init__(self, chain: KeyChain) -> None:
        self._chain = chain

    def __getattr__(self, name: str) -> Any:
        if name == "prefixes":
            raise BufferError("no")
        return getattr(self._chain, name)


def test_one_failing_request_costs_only_its_own_saves(rig: Any) -> None:
    engine = rig.engine(budget=64)
    requests = [engine.add(Request(name, tokens(20, 100 * n))) for n, name in enumerate(("good", "bad", "other"), 1)]
    tracked = engine.scheduler._tracked["bad"]
    tracked.chain = Broken(tracked.chain)
    engine.run()
    for request in requests:
        assert request.output == truth(request.prompt_token_ids, 3)
    found = [engine.ask(request.prompt_token_ids).external for request in requests]
    assert found == [18, 0, 18]


def test_tokens_in_flight_are_not_saved(rig: Any) -> None:
    """Aborted while a step under way still computes its last tokens: what is saved ends before them."""
    engine = rig.engine()
    request = engine.add(Request("aborted", tokens(7), max_tokens=9))
    until(engine, request, 7)
    request.num_in_flight_tokens = 2
    engine.abort(request)
    engine.run()
    assert engine.ask(tokens(9)).external == 4
    other = engine.add(Request("other", tokens(7, 100), max_tokens=9))
    until(engine, other, 7)
    engine.abort(other)
    engine.run()
    assert engine.ask(tokens(9, 100)).external == 6


def test_last_page_may_be_written_again(rig: Any) -> None:
    """A draft that is rejected rewrites the page of the last decoded token: saved one page later, or at the end."""
    engine = rig.engine()
    engine.scheduler._geometry = replace(engine.scheduler._geometry, volatile_tail=True)
    request = engine.add(Request("decodes", tokens(8), max_tokens=7))
    until(engine, request, 8)
    tracked = engine.scheduler._tracked[request.request_id]
    assert tracked.saved == 2, "a prompt's pages do not change any more"
    until(engine, request, 12)
    assert tracked.saved == 2
    until(engine, request, 14)
    assert tracked.saved == 3
    engine.run()
    assert engine.ask([*tokens(8), *request.output]).external == 14


def test_pages_of_nobody_are_not_saved() -> None:
    """vLLM's null block stands for pages that were given up."""
    chain = KeyChain(CHUNK, PAGE)
    chain.extend(tokens(8))
    frames = frames_of(chain, 0, 8, tail=False)
    saves = Saves(1)
    assert saves.add(frames, [5, 6, 0, 7]) is None
    assert saves.add(frames, [5, 6, 7]) is None
    assert saves.add([], []) is None
    assert saves.youngest == 0
    assert saves.fence([5]) == 0
    save = saves.add(frames, [5, 6, 7, 8])
    assert save is not None
    assert saves.fence([5]) == saves.youngest == save.job


def fails(*_: Any, **__: Any) -> None:
    raise ValueError("no")


def test_all_pages_of_a_failed_load_are_reported(rig: Any) -> None:
    """The first frame of three cannot be copied: no page of any is taken for filled."""
    engine = rig.engine()
    engine.ask(tokens(13), max_tokens=1)
    worker = engine.workers[0]
    inner, plain = worker._gpu.inner, worker.bad_pages
    scatter, seen = inner.scatter, set()
    worker.bad_pages = lambda: (found := plain(), seen.update(found))[0]
    inner.scatter = fails
    request = engine.add(Request("again", tokens(13)))
    while request.status != "WAITING_FOR_REMOTE_KVS":
        engine.step()
    wanted = set(request.blocks[:6])
    engine.run()
    inner.scatter = scatter
    assert seen == wanted
    assert request.output == truth(tokens(13), 3)


def test_what_could_not_be_loaded_is_saved_again(rig: Any) -> None:
    """Lost between look-up and load: computed anew, and in the cache after that."""
    engine = rig.engine()
    engine.ask(tokens(13), max_tokens=1)
    inner = engine.workers[0]._gpu.inner
    scatter = inner.scatter
    inner.scatter = fails
    request = engine.add(Request("again", tokens(13), max_tokens=1))
    while not engine.failed and request.request_id not in engine.received:
        engine.step()
    inner.scatter = scatter
    client = engine.links[0].client
    assert isinstance(client.call(Clear()).result(10), Cleared)
    rig.nothing_held()
    assert rig.health().tiers["ram"]["frames"] == 0
    engine.run()
    assert request.output == truth(tokens(13), 1)
    assert engine.ask(tokens(13)).external == 12
