"""Prefill on one node, decode on another, under a fake vLLM that checks every byte it reads."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pytest
from fake_vllm import CHUNK, Request, truth

from lmkv.peer import messages as m
from lmkv.service import LocalClient
from lmkv.service.protocol import Clear
from lmkv_vllm import transfers
from lmkv_vllm.guard import INCIDENTS
from lmkv_vllm.settings import Settings
from lmkv_vllm.transfers import read_params, transfer_of

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from conftest import Rig
    from fake_vllm import FakeVLLM

PEER = {"listen": "127.0.0.1:0", "transports": ["tcp"], "sockets": 1}
PATIENT = Settings(lookup_deadline=10.0, transfer_deadline=30.0)


def tokens(count: int, start: int = 1) -> list[int]:
    return list(range(start, start + count))


def until(true: Callable[[], Any], seconds: float = 20.0) -> None:
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, "it does not come true"
        time.sleep(0.005)


class Pair:
    """Two nodes with an engine each."""

    def __init__(self, rig: Rig, peer: dict[str, Any] | None = None, **arguments: Any) -> None:
        self.hosts = [
            rig.host(peer=PEER | {"node": name} | (peer or {}), ranks=arguments.get("ranks", 1))
            for name in ("left", "right")
        ]
        arguments = {"settings": PATIENT, **arguments}
        self.prefill: FakeVLLM = rig.engine(self.hosts[0], **arguments)
        self.decode: FakeVLLM = rig.engine(self.hosts[1], **arguments)
        peer_node = self.hosts[1].storage.peer
        assert peer_node is not None
        self.to = peer_node.address
        self.incoming = peer_node.incoming

    def first(self, prompt: list[int], name: str = "t", *, admit: bool = True) -> Request:
        """The request as the prefill engine gets it, when there is room for it."""
        if admit:
            self.admit(prompt, name)
        params = {"lmkv": {"transfer": name, "to": self.to}}
        return Request(f"{name}-first", prompt, max_tokens=1, kv_transfer_params=params)

    @staticmethod
    def then(request: Request, name: str = "") -> Request:
        """The same as the decode engine gets it."""
        name = name or request.request_id.removesuffix("-first") + "-then"
        return Request(name, request.prompt_token_ids, kv_transfer_params=request.answered)

    def state(self, name: str = "t") -> m.TransferState:
        return self.hosts[1].run(_call(lambda: self.incoming.state(name)), 10)

    def admitted(self) -> int:
        return self.hosts[1].run(_call(lambda: self.incoming.admitted), 10)

    def room(self, prompt: list[int], name: str) -> m.Admitted | m.NoRoom:
        """As the proxy does."""
        asked = m.Admit(name, len(prompt), model="fake")
        return self.hosts[1].run(_call(lambda: self.incoming.admit(asked)), 10)

    def admit(self, prompt: list[int], name: str = "t") -> None:
        assert isinstance(self.room(prompt, name), m.Admitted)


async def _call(work: Callable[[], Any]) -> Any:
    return work()


def run(engine: FakeVLLM, *requests: Request) -> None:
    engine.run(requests, limit=1_000_000)


def steps(engine: FakeVLLM, *requests: Request) -> None:
    """Until all is done but the saves."""
    for request in requests:
        engine.add(request)
    while engine.requests or engine.finished_ids:
        engine.step()


def hold_saves(engine: FakeVLLM, rank: int = 0) -> threading.Event:
    """A worker does no save before the event is set."""
    gate = threading.Event()

    def wait() -> None:
        gate.wait(30)

    engine.workers[rank]._save_lane.submit(wait)
    return gate


@pytest.fixture
def pair(rig: Rig) -> Pair:
    return Pair(rig)


def test_what_prefill_computes_decode_loads(pair: Pair) -> None:
    """All but the page of the last token comes from the other node, the begun chunk's pages too."""
    first = pair.first(tokens(23))
    run(pair.prefill, first)
    assert first.answered == {"lmkv": {"transfer": "t", "node": "left", "tokens": 22}}
    then = pair.then(first)
    run(pair.decode, then)
    assert then.external == 22
    assert then.output == truth(tokens(23), 3)
    assert then.output[0] == first.output[0]
    assert pair.state() == m.TransferState("complete", 22, 6)
    assert then.answered is None


def test_chunks_go_while_the_rest_is_computed(rig: Rig) -> None:
    pair = Pair(rig, budget=CHUNK)
    first = pair.prefill.add(pair.first(tokens(33)))
    for computed in (4, 8, 12):
        while first.num_computed_tokens < computed:
            pair.prefill.step()
        until(lambda chunks=computed // CHUNK: pair.state().frames >= chunks)
        assert pair.state().state == "open"
    run(pair.prefill)
    then = pair.then(first)
    run(pair.decode, then)
    assert (then.external, then.output) == (32, truth(tokens(33), 3))


def test_what_the_prefill_node_has_already_goes_too(pair: Pair) -> None:
    pair.prefill.ask(tokens(16))
    before = pair.prefill.computed
    first = pair.first(tokens(25))
    run(pair.prefill, first)
    assert pair.prefill.computed - before == 9
    then = pair.then(first)
    run(pair.decode, then)
    assert (then.external, then.output) == (24, truth(tokens(25), 3))


def test_a_tail_that_lies_in_a_longer_frame_goes_with_it(pair: Pair) -> None:
    """The prefill node has the prompt's last chunk whole, from a longer prompt."""
    pair.prefill.ask(tokens(20))
    first = pair.first(tokens(15))
    run(pair.prefill, first)
    then = pair.then(first)
    run(pair.decode, then)
    assert (then.external, then.output) == (14, truth(tokens(15), 3))


@pytest.mark.slow
def test_a_save_that_comes_late_goes_all_the_same(pair: Pair) -> None:
    """However busy the prefill engine is: a transfer does not end while a worker has not come to its last save."""
    gate = hold_saves(pair.prefill)
    first = pair.first(tokens(23))
    steps(pair.prefill, first)
    time.sleep(2.5)
    assert pair.state().state == "open"
    gate.set()
    then = pair.then(first)
    run(pair.decode, then)
    assert (then.external, then.output) == (22, truth(tokens(23), 3))
    assert pair.state() == m.TransferState("complete", 22, 6)


@pytest.mark.parametrize("way", ["backlog", "fence", "room", "copy"])
def test_a_save_that_is_dropped_is_not_waited_for(rig: Rig, monkeypatch: pytest.MonkeyPatch, way: str) -> None:
    """Its node knows at once: the transfer ends with what there is, long before its time is over."""
    pair = Pair(
        rig,
        settings=Settings(
            lookup_deadline=10.0, transfer_deadline=60.0, save_backlog=1 if way == "backlog" else 9, fence_deadline=0.0
        ),
    )
    worker = pair.prefill.workers[0]
    gate = hold_saves(pair.prefill)
    first = pair.first(tokens(15))
    steps(pair.prefill, first)
    assert len(worker._saves) == (1 if way == "backlog" else 2)
    if way == "fence":
        worker.settle(1_000)
    elif way == "room":
        room = pair.hosts[0].storage.manager.stack.room
        monkeypatch.setattr(room, "for_stores", lambda sizes: [None for _ in sizes])
    elif way == "copy":
        monkeypatch.setattr(worker._gpu, "inner", None)
    gate.set()
    run(pair.prefill)
    until(lambda: pair.state().state == "complete")
    then = pair.then(first)
    run(pair.decode, then)
    assert then.external == (12 if way == "backlog" else 0)
    assert then.output == truth(tokens(15), 3)


def test_a_save_of_which_another_rank_drops_its_part(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    pair = Pair(rig, ranks=2)
    monkeypatch.setattr(pair.prefill.workers[1]._gpu, "inner", None)
    first = pair.first(tokens(23))
    run(pair.prefill, first)
    until(lambda: pair.state() == m.TransferState("complete", 0, 0))
    then = pair.then(first)
    run(pair.decode, then)
    assert (then.external, then.output) == (0, truth(tokens(23), 3))


def test_a_tail_that_lies_in_a_frame_of_just_now_goes_with_it(pair: Pair) -> None:
    """Nobody had it when the request was looked up; a longer one was stored before its tail was."""
    gate = hold_saves(pair.prefill)
    first, longer = pair.first(tokens(15)), Request("longer", tokens(20), max_tokens=1)
    pair.prefill.add(longer)
    steps(pair.prefill, first)
    gate.set()
    run(pair.prefill)
    then = pair.then(first)
    run(pair.decode, then)
    assert (then.external, then.output) == (14, truth(tokens(15), 3))


def test_with_ranks(rig: Rig) -> None:
    pair = Pair(rig, ranks=2)
    first = pair.first(tokens(23))
    run(pair.prefill, first)
    then = pair.then(first)
    run(pair.decode, then)
    assert (then.external, then.output) == (22, truth(tokens(23), 3))


def test_preempted_prefill(rig: Rig) -> None:
    """Too few blocks for both: one is computed twice and told twice."""
    pair = Pair(rig, blocks=17, budget=8)
    firsts = [pair.first(tokens(21, start), f"t{start}") for start in (1, 60)]
    run(pair.prefill, *firsts)
    thens = [pair.then(first) for first in firsts]
    run(pair.decode, *thens)
    assert [then.output for then in thens] == [truth(first.prompt_token_ids, 3) for first in firsts]
    assert all(then.external for then in thens)


def test_the_same_request_twice(pair: Pair) -> None:
    """At both: as if it were one; nothing is held for the second."""
    run(pair.prefill, pair.first(tokens(18)))
    first = pair.first(tokens(18), admit=False)
    run(pair.prefill, first)
    thens = [pair.then(first, name) for name in ("one", "two")]
    run(pair.decode, *thens)
    assert [then.output for then in thens] == [truth(tokens(18), 3)] * 2
    assert [then.external for then in thens] == [16, 16]


def test_a36_three_requests_larger_than_the_room(rig: Rig) -> None:
    """There is room for one at a time; all of them finish, each with all that was computed for it."""
    pair = Pair(rig, peer={"admission": "40KiB"})
    waiting = {f"t{start}": tokens(29, start) for start in (1, 60, 120)}
    firsts: list[Request] = []
    thens: list[Request] = []
    most = 0
    end = time.monotonic() + 30
    while len(thens) < 3 or not all(then.status.startswith("FINISHED") for then in thens):
        assert time.monotonic() < end, "they do not finish"
        for name, prompt in list(waiting.items()):
            if isinstance(pair.room(prompt, name), m.Admitted):
                firsts.append(pair.prefill.add(pair.first(waiting.pop(name), name)))
        most = max(most, pair.admitted())
        pair.prefill.step()
        over = [first for first in firsts[len(thens) :] if first.status.startswith("FINISHED")]
        thens += [pair.decode.add(pair.then(first)) for first in over]
        pair.decode.step()
    assert most < 2 * (20 << 10), "two of them had room at a time"
    assert [then.external for then in thens] == [28] * 3
    assert [then.output for then in thens] == [truth(then.prompt_token_ids, 3) for then in thens]
    assert pair.admitted() == 0


def test_a37_prefill_dies_half_way(rig: Rig) -> None:
    """What has come is used, the rest is computed; the room that was set aside is free again."""
    pair = Pair(rig, budget=CHUNK)
    first = pair.prefill.add(pair.first(tokens(33)))
    while first.num_computed_tokens < 12:
        pair.prefill.step()
    until(lambda: pair.state().frames >= 2)
    then = Request("then", tokens(33), kv_transfer_params={"lmkv": {"transfer": "t", "node": "left", "tokens": 32}})
    pair.decode.add(then)
    for _ in range(5):
        pair.decode.step()
    assert pair.decode.computed == 0, "it waits"
    rig.engines.remove(pair.prefill)
    rig.hosts.remove(pair.hosts[0])
    pair.hosts[0].close()
    pair.prefill.close()
    run(pair.decode)
    assert 8 <= then.external < 32
    assert then.output == truth(tokens(33), 3)
    assert pair.state().state in {"failed", "aborted"}
    assert pair.admitted() == 0


def test_the_prefill_engine_goes_and_its_node_stays(rig: Rig) -> None:
    pair = Pair(rig, budget=CHUNK)
    first = pair.prefill.add(pair.first(tokens(33)))
    while first.num_computed_tokens < 12:
        pair.prefill.step()
    until(lambda: pair.state().frames >= 2)
    rig.engines.remove(pair.prefill)
    for link in pair.prefill.links:  # as if it had been killed
        link.close()
    until(lambda: pair.state().state == "aborted")
    pair.prefill.close()
    assert pair.admitted() == 0


def test_abort_while_it_is_prefilled(rig: Rig) -> None:
    pair = Pair(rig, budget=CHUNK)
    first = pair.prefill.add(pair.first(tokens(33)))
    while first.num_computed_tokens < 12:
        pair.prefill.step()
    until(lambda: pair.state().frames >= 2)
    pair.prefill.abort(first)
    until(lambda: pair.state().state == "aborted")
    run(pair.prefill)
    assert pair.admitted() == 0


def test_abort_while_it_is_waited_for(rig: Rig) -> None:
    """Neither is anything kept for it, nor does the other node push more."""
    pair = Pair(rig, budget=CHUNK)
    first = pair.prefill.add(pair.first(tokens(33)))
    while first.num_computed_tokens < 12:
        pair.prefill.step()
    until(lambda: pair.state().frames >= 2)
    params = {"lmkv": {"transfer": "t", "node": "left", "tokens": 32}}
    then = pair.decode.add(Request("then", tokens(33), kv_transfer_params=params))
    pair.decode.step()
    pair.decode.abort(then)
    until(lambda: pair.state().state == "aborted")
    assert pair.admitted() == 0
    run(pair.decode)
    run(pair.prefill)
    rig.nothing_held()


def test_the_decode_engine_goes(rig: Rig) -> None:
    """What was kept for it is free; the prefill engine goes on undisturbed."""
    pair = Pair(rig, budget=CHUNK)
    first = pair.prefill.add(pair.first(tokens(33)))
    while first.num_computed_tokens < 12:
        pair.prefill.step()
    until(lambda: pair.state().frames >= 2)
    params = {"lmkv": {"transfer": "t", "node": "left", "tokens": 32}}
    pair.decode.add(Request("then", tokens(33), kv_transfer_params=params))
    pair.decode.step()
    rig.engines.remove(pair.decode)
    for link in pair.decode.links:  # as if it had been killed
        link.close()
    until(lambda: pair.state().state == "aborted")
    pair.decode.close()
    run(pair.prefill)
    assert first.output == truth(tokens(33), 1)
    assert pair.admitted() == 0


def test_an_engine_that_only_waits_leaves_its_core_to_others(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """One step, and the transfer has ended; it is not asked for a thousand times a second."""
    monkeypatch.setattr(transfers, "PAUSE", 20.0)
    pair.admit(tokens(20))
    params = {"lmkv": {"transfer": "t", "node": "left", "tokens": 18}}
    then = pair.decode.add(Request("then", tokens(20), kv_transfer_params=params))
    waits = pair.decode.scheduler._tracked["then"].transfer
    assert waits is not None
    assert waits.waits(time.monotonic())
    with ThreadPoolExecutor(1) as crew:
        step = crew.submit(pair.decode.step)
        time.sleep(0.1)
        assert not step.done()
        pair.hosts[1].run(_call(lambda: pair.incoming.finish("t", "complete")), 10)
        step.result(15)
    assert not waits.waits(time.monotonic())
    run(pair.decode)
    assert then.output == truth(tokens(20), 3)


def test_waiting_ends(rig: Rig) -> None:
    """Something was admitted, and never comes."""
    pair = Pair(rig, settings=Settings(lookup_deadline=10.0, transfer_deadline=0.2))
    pair.admit(tokens(20))
    params = {"lmkv": {"transfer": "t", "node": "left", "tokens": 18}}
    then = Request("then", tokens(20), kv_transfer_params=params)
    begun = time.monotonic()
    run(pair.decode, then)
    assert time.monotonic() - begun >= 0.2
    assert then.output == truth(tokens(20), 3)
    until(lambda: pair.admitted() == 0)


def test_unknown_transfer_is_not_waited_for(pair: Pair) -> None:
    params = {"lmkv": {"transfer": "never", "node": "left", "tokens": 18}}
    then = Request("then", tokens(20), kv_transfer_params=params)
    run(pair.decode, then)
    assert then.output == truth(tokens(20), 3)


def test_engines_that_do_not_fit(rig: Rig, caplog: pytest.LogCaptureFixture) -> None:
    """World sizes differ: refused at the handshake, with both values; decode computes all itself."""
    pair = Pair(rig)
    other = rig.host(peer=PEER | {"node": "odd"}, ranks=2)
    prefill = rig.engine(other, ranks=2, settings=PATIENT)
    first = pair.first(tokens(20))
    run(prefill, first)
    assert first.output == truth(tokens(20), 1)
    until(lambda: pair.state().state == "failed")
    assert "world size (shards): 2 there, 1 here" in caplog.text
    then = pair.then(first)
    run(pair.decode, then)
    assert (then.external, then.output) == (0, truth(tokens(20), 3))


def test_without_a_peer_port(rig: Rig) -> None:
    """A node that has nothing to do with others says so, and computes."""
    engine = rig.engine(settings=PATIENT)
    before = INCIDENTS.counts.get("transfer", 0)
    for params in ({"transfer": "t", "to": "127.0.0.1:9"}, {"transfer": "t", "node": "n", "tokens": 8}):
        request = Request(str(params), tokens(12), kv_transfer_params={"lmkv": params})
        run(engine, request)
        assert request.output == truth(tokens(12), 3)
        assert request.answered is None
    assert INCIDENTS.counts["transfer"] > before


def test_a_reset_ends_it(rig: Rig) -> None:
    """Weights may have changed: what was computed before is not pushed any more."""
    pair = Pair(rig, budget=CHUNK)
    first = pair.prefill.add(pair.first(tokens(33)))
    while first.num_computed_tokens < 12:
        pair.prefill.step()
    pair.prefill.scheduler.reset()
    until(lambda: pair.state().state in {"aborted", "unknown"})
    run(pair.prefill)
    assert first.answered is None


NONSENSE: list[Any] = [
    None, 7, "x", [], {}, {"transfer": "t"}, {"transfer": "t", "to": 9}, {"transfer": "", "to": "127.0.0.1:9"},
    {"transfer": "t" * 129, "to": "127.0.0.1:9"}, {"transfer": "\n", "to": "127.0.0.1:9"},
    {"transfer": "ü", "to": "127.0.0.1:9"}, {"transfer": ["t"], "to": "127.0.0.1:9"},
    {"transfer": "t", "to": "127.0.0.1:9", "more": 1}, {"transfer": "t", "to": "x" * 10_000_000},
    {"transfer": "t", "node": "n", "tokens": -1}, {"transfer": "t", "node": "n", "tokens": True},
    {"transfer": "t", "node": "n", "tokens": 1 << 70}, {"transfer": "t", "node": None, "tokens": 3},
    {"transfer": "t", "node": "n", "tokens": float("nan")}, {1: 2, None: 3}, {"to": {"to": {"to": {}}}},
]  # fmt: skip


@pytest.mark.parametrize("params", NONSENSE, ids=lambda params: repr(params)[:40])
def test_a43_senseless_params(rig: Rig, params: Any) -> None:
    """It is a request like any other, and a line says what was wrong."""
    with pytest.raises(ValueError, match="lmkv") as caught:
        read_params(params)
    assert len(str(caught.value)) < 400
    engine = rig.engine()
    before = INCIDENTS.counts.get("kv_transfer_params", 0)
    request = Request("odd", tokens(9), kv_transfer_params={"lmkv": params})
    run(engine, request)
    assert request.output == truth(tokens(9), 3)
    assert request.answered is None
    assert INCIDENTS.counts["kv_transfer_params"] == before + 1


@pytest.mark.parametrize("to", ["nonsense", "127.0.0.1:99999", "127.0.0.1:1", "203.0.113.7:80"])
def test_where_nobody_listens(pair: Pair, to: str) -> None:
    """Nor does it connect to just anywhere: off loopback only with a key, which both have to prove."""
    request = pair.first(tokens(12), admit=False)
    request.kv_transfer_params = {"lmkv": {"transfer": "t", "to": to}}
    run(pair.prefill, request)
    assert request.output == truth(tokens(12), 1)
    outgoing = pair.hosts[0].storage.peer.outgoing  # type: ignore[union-attr]
    until(lambda: pair.hosts[0].run(_call(lambda: outgoing.state("t").state), 10) == "failed")


def test_params_of_others_are_left_alone() -> None:
    """As under vLLM's MultiConnector."""
    request = Request("r", tokens(4), kv_transfer_params={"do_remote_prefill": True})
    engine: Any = None
    assert transfer_of(request, engine, 1.0) is None


def test_what_only_the_prefill_engine_itself_has(rig: Rig) -> None:
    """Its own prefix cache has the prompt, its node no longer: it is saved again, and goes."""
    pair = Pair(rig, caching=True)
    pair.prefill.ask(tokens(16), max_tokens=1)
    client = LocalClient(pair.hosts[0], "test")
    client.call(Clear()).result(10)
    client.close()
    before = pair.prefill.computed
    first = pair.first(tokens(23))
    run(pair.prefill, first)
    assert pair.prefill.computed - before <= 23 - 14
    then = pair.then(first)
    run(pair.decode, then)
    assert (then.external, then.output) == (22, truth(tokens(23), 3))


def test_what_lies_on_the_prefill_nodes_disk_only(rig: Rig, tmp_path: Path) -> None:
    tiers = [
        {"name": "ram", "backend": "cpu", "capacity": "4MiB"},
        {"name": "disk", "backend": "disk", "capacity": "8MiB", "options": {"path": str(tmp_path)}},
    ]
    left = rig.host(peer=PEER | {"node": "left"}, tiers=tiers, offer={"mode": "always"})
    pair = Pair(rig)
    pair.hosts[0] = left
    pair.prefill = rig.engine(left, settings=PATIENT)
    pair.prefill.ask(tokens(16), max_tokens=1)
    rig.quiet(left)
    client = LocalClient(left, "test")
    client.call(Clear(None, "ram")).result(10)
    client.close()
    first = pair.first(tokens(23))
    run(pair.prefill, first)
    assert first.external == 16
    then = pair.then(first)
    run(pair.decode, then)
    assert (then.external, then.output) == (22, truth(tokens(23), 3))
