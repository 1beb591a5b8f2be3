"""A tier of other nodes on real nodes: found through a list, and through a real controller."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from typing import TYPE_CHECKING, Any

import pytest
from controller_rig import Controller
from fake_engine import CHUNK, FRAME, Shape, prompts, tokens
from p2p_rig import DEADLINE, PROBE, SLACK, Fleet, Member, far, place, serve, stack, until
from server_rig import HOST

from lmkv.cli import check
from lmkv.errors import ConfigError
from lmkv.storage.verbs import Verbs

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

PROMPT = tokens(3 * CHUNK + 1)
READ, OPERATE = "a-token-that-may-read-0123456789", "a-token-that-may-operate-0123456789"
BIG = Shape(slot=4096)


@pytest.fixture
def fleet() -> Iterator[Fleet]:
    with Fleet() as made:
        yield made


@pytest.fixture
def tokens_file(tmp_path: Path) -> Path:
    file = tmp_path / "tokens"
    file.write_text(f"p2p read {READ}\nagents operate {OPERATE}\n")
    return file


def agent(controller: Controller, **more: Any) -> dict[str, Any]:
    """The section of a node that tells the controller what it has."""
    return {"controller": {"url": controller.url.replace("http", "ws", 1), "heartbeat": "200ms", **more}}


def found(node: Member, prompt: list[int], count: int) -> None:
    until(lambda: node.llm.find(prompt) == count, f"{count} tokens are found")


def calls(node: Member, op: str, outcome: str) -> float:
    return node.counter("lmkv_tier_operations_total", tier="far", op=op, outcome=outcome)


def test_what_one_node_has_computed_another_loads(fleet: Fleet) -> None:
    """Chunks and the tail; from then on they lie in the other's RAM, whatever becomes of the first."""
    a = fleet.node("a")
    b = fleet.node("b", far(peers=[a.address]))
    prompt = tokens(3 * CHUNK + 2)
    a.llm.store(prompt)
    assert b.llm.find(prompt) == len(prompt)
    assert serve(b.llm, [*prompt, 0])[0] == len(prompt)
    b.settle()
    until(lambda: b.pulled() == a.served() == 4 * FRAME, "who serves counts it once all is sent")
    assert calls(b, "get", "ok") == 4
    a.close()
    assert b.llm.load(prompt) == len(prompt)
    assert b.pulled() == 4 * FRAME
    assert calls(b, "put", "ok") == 0


def test_the_directory_says_who_has_it(fleet: Fleet, tokens_file: Path) -> None:
    with Controller(tokens=tokens_file) as controller:
        a = fleet.node("a", **agent(controller, token=OPERATE))
        b = fleet.node("b", far(controller=controller.url, token=READ), **agent(controller, token=OPERATE))
        assert b.llm.find(PROMPT) == 0
        assert b.far["state"] == "ok", "a namespace that nobody has told of is no fault"
        a.llm.store(PROMPT)
        found(b, PROMPT, 3 * CHUNK)
        assert b.llm.load(PROMPT) == 3 * CHUNK
        b.settle()
        c = fleet.node("c", far(controller=controller.url, token=READ))
        a.close()
        found(c, PROMPT, 3 * CHUNK)
        assert c.llm.load(PROMPT) == 3 * CHUNK, "b has it now"
        until(lambda: b.served() == 3 * FRAME, "who serves counts it once all is sent")


def test_a_node_is_no_peer_of_its_own(fleet: Fleet) -> None:
    """One list for all nodes, and peers in it under two names."""
    addresses = [place(), place()]
    peers = [*addresses, *addresses, *(each.replace(HOST, "localhost") for each in addresses)]
    a = fleet.node("a", far(peers=peers), listen=addresses[0])
    assert a.llm.find(PROMPT) == 0, "alone"
    b = fleet.node("b", far(peers=peers), listen=addresses[1])
    for one, other, prompt in ((a, b, PROMPT), (b, a, tokens(2 * CHUNK, 500))):
        one.llm.store(prompt)
        count = len(prompt) // CHUNK * CHUNK
        found(other, prompt, count)
        assert other.llm.load(prompt) == count
        other.settle()
        until(lambda: other.pulled() == one.served() == count // CHUNK * FRAME, "who serves counts it once all is sent")  # noqa: B023  at once


@pytest.mark.parametrize("way", ["list", "controller"])
@pytest.mark.parametrize("below", [True, False])
def test_what_lies_below_the_peers_ram(fleet: Fleet, tmp_path: Path, way: str, *, below: bool) -> None:
    disk = {"name": "disk", "backend": "disk", "capacity": 64 * FRAME, "options": {"path": str(tmp_path / "disk")}}
    with Controller() if way == "controller" else contextlib.nullcontext() as controller:
        groups = {} if controller is None else agent(controller)
        a = fleet.node("a", disk, ram=3, **groups)
        a.llm.store(PROMPT)
        a.settle()
        a.llm.store(tokens(3 * CHUNK, 500))  # nothing of the first is left in RAM
        a.settle()
        where = {"peers": [a.address]} if controller is None else {"controller": controller.url}
        b = fleet.node("b", far(**where, below=below, deadline="5s"))
        found(b, tokens(3 * CHUNK, 500), 3 * CHUNK)
        found(b, PROMPT, 3 * CHUNK if below else 0)
        assert b.llm.load(PROMPT) == (3 * CHUNK if below else 0)
        assert calls(b, "get", "miss") == 0


def test_a_long_prompt_comes_from_all_who_have_it(fleet: Fleet) -> None:
    """Several batches at a time, each from the peer that fewest bytes are under way from."""
    have = [fleet.node(name, shape=BIG, ram=128, peer={"bandwidth": "8MiB"}) for name in ("a", "c")]
    prompt = tokens(96 * CHUNK)
    for each in have:
        each.llm.store(prompt)
    b = fleet.node("b", far(peers=[each.address for each in have], deadline="20s"), shape=BIG, ram=128)
    assert b.llm.load(prompt) == len(prompt)
    until(lambda: all(each.served() >= 32 * BIG.frame for each in have), "who serves counts it once all is sent")


def test_what_it_costs_is_measured(fleet: Fleet) -> None:
    """As of any tier: so what would be loaded later than computed can be withheld."""
    a = fleet.node("a", ram=128)
    b = fleet.node("b", far(peers=[a.address]), ram=None)
    wanted = list(prompts(16, 2 * CHUNK))
    for prompt in wanted:
        a.llm.store(prompt)
    for prompt in wanted:
        assert b.llm.load(prompt) == len(prompt)
        b.settle()
    assert b.far["load_bytes_per_second"] > 0
    assert b.far["load_latency_seconds"] > 0


def test_who_has_most_is_asked(fleet: Fleet) -> None:
    a, c = fleet.node("a"), fleet.node("c")
    a.llm.store(PROMPT[: 2 * CHUNK])
    c.llm.store(PROMPT)
    b = fleet.node("b", far(peers=[a.address, c.address]))
    assert b.llm.load(PROMPT) == 3 * CHUNK
    until(lambda: c.served() == 3 * FRAME, "who serves counts it once all is sent")
    assert a.served() == 0


def test_the_tier_is_ill_while_the_controller_is_away(fleet: Fleet) -> None:
    address = place()
    b = fleet.node("b", far(controller=f"http://{address}"))
    until(lambda: b.far["state"] == "down", "nobody can say where anything is")
    assert "controller" in b.far["detail"]
    begin = time.monotonic()
    assert serve(b.llm, PROMPT)[0] == 0
    assert time.monotonic() - begin < DEADLINE
    with Controller(port=int(address.rpartition(":")[2])) as controller:
        until(lambda: b.far["state"] == "ok", "it is back", 10 + PROBE)
        a = fleet.node("a", **agent(controller))
        a.llm.store(PROMPT)
        b.on_loop(lambda: None)
        a.llm.store(tokens(CHUNK, 500))
        found(b, tokens(CHUNK, 500), CHUNK)
        assert b.llm.load(tokens(CHUNK, 500)) == CHUNK


def test_a_wrong_token_is_named_and_not_shown(fleet: Fleet, tokens_file: Path) -> None:
    with Controller(tokens=tokens_file) as controller:
        b = fleet.node("b", far(controller=controller.url, token="a-wrong-one-of-mine-0123456789"))
        until(lambda: b.far["state"] == "down", "it may not ask")
        assert "options.token" in b.far["detail"]
        assert "a-wrong-one" not in str(b.on_loop(b.manager.health))


def test_a_controller_that_says_nothing_costs_a_deadline_and_then_nothing(fleet: Fleet) -> None:
    with socket.create_server((HOST, 0)) as silent:
        b = fleet.node("b", far(controller=f"http://{HOST}:{silent.getsockname()[1]}"))
        waited = [serve(b.llm, tokens(CHUNK + 1, 100 * n))[1] for n in range(1, 9)]
        assert max(waited) < DEADLINE + SLACK
        assert min(waited) < DEADLINE / 2
        assert b.far["state"] == "down"


def test_nothing_is_written_or_removed_there(fleet: Fleet) -> None:
    a = fleet.node("a")
    b = fleet.node("b", far(peers=[a.address]))
    a.llm.store(PROMPT)
    assert b.llm.load(PROMPT) == 3 * CHUNK
    b.settle()
    b.llm.store(tokens(CHUNK, 500))
    b.settle()
    assert a.llm.find(tokens(CHUNK, 500)) == 0
    with pytest.raises(ConfigError, match="read-only"):
        b.on_loop(lambda: Verbs(b.manager).clear(None, "far"))
    b.on_loop(lambda: Verbs(b.manager).clear(None, None))
    tier = b.manager.stack.tiers[-1]
    keys = [entry.key(0) for known in a.manager.index.namespaces.values() for entry in known.entries.values()]
    b.on_loop(lambda: tier.delete(keys))
    b.on_loop(lambda: tier.set_aside(keys))
    b.settle()
    assert a.llm.load(PROMPT) == 3 * CHUNK
    assert b.llm.load(PROMPT) == 3 * CHUNK


def test_a_busy_peer_promises_nothing(fleet: Fleet) -> None:
    """It has served more than it may for seconds: who would have to wait longer than he may is not sent to it."""
    a = fleet.node("a", shape=BIG, peer={"bandwidth": "64KiB"})
    b = fleet.node("b", far(peers=[a.address], deadline="3s"), shape=BIG)
    prompt = tokens(16 * CHUNK)
    a.llm.store(prompt)
    assert b.llm.find(prompt) == len(prompt)
    serve(b.llm, [*prompt, 0])
    c = fleet.node("c", far(peers=[a.address], deadline="3s"), shape=BIG)
    begin = time.monotonic()
    assert c.llm.find(prompt) == 0
    assert time.monotonic() - begin < 3
    assert c.far["state"] == "ok"


def test_many_at_once_from_two_that_come_and_go(fleet: Fleet) -> None:
    """Eight threads ask for prompts while one of two peers restarts: all right, whatever came."""
    address = place()
    wanted = list(prompts(8, 2 * CHUNK))

    def start() -> Member:
        made = fleet.node("a", listen=address)
        for prompt in wanted:
            made.llm.store(prompt)
        return made

    a, c = start(), fleet.node("c")
    for prompt in wanted[:4]:
        c.llm.store(prompt)
    b = fleet.node("b", far(peers=[address, c.address]), ram=None)
    engines = [b.engine() for _ in range(8)]
    over = threading.Event()

    def work(number: int) -> int:
        came = 0
        while not over.is_set():
            came += serve(engines[number], [*wanted[number], 0])[0]
        return came

    running = [b.threads.submit(work, number) for number in range(4)]
    try:
        for _ in range(2):
            time.sleep(0.2)
            a.host.close()  # with what it lends
            time.sleep(0.2)
            a = start()
        until(lambda: all(b.llm.find(prompt) == 2 * CHUNK for prompt in wanted), "all is there again")
    finally:
        over.set()
    assert all(future.result(20) > 0 for future in running)


def test_peers_off_loopback_need_a_key() -> None:
    with pytest.raises(ConfigError, match=r"10\.0\.0\.7:7000.*peer\.key"):
        Member(stack(far(peers=["10.0.0.7:7000"])))


def test_a_tier_of_other_nodes_is_written_never() -> None:
    with pytest.raises(ConfigError, match=r"'far' only reads: set its `write: never`"):
        Member(stack(far(peers=["127.0.0.1:7000"], write="through")))


@pytest.mark.parametrize("way", ["list", "controller"])
def test_lmkv_check(fleet: Fleet, tmp_path: Path, capsys: pytest.CaptureFixture[str], way: str) -> None:
    """Without a service: says whether somebody is there, reads and writes nothing."""
    a = fleet.node("a")
    with Controller() as controller:
        where = f"peers: ['{a.address}']" if way == "list" else f"controller: '{controller.url}'"
        file = tmp_path / "stack.yaml"

        def said(options: str, code: int) -> str:
            file.write_text(
                "pool: {size: 64MiB, prefault: false, hugepages: off}\ntiers:\n- {backend: cpu, capacity: 100%}\n"
                f"- {{name: far, backend: p2p, write: never, options: {{{options}}}}}\n"
            )
            assert check.run(str(file), show=False, offline=False) == code
            return capsys.readouterr().out

        assert "only reads" in said(where, 0)
        gone = place()
        assert gone in said(where.replace(a.address, gone).replace(controller.url, f"http://{gone}"), 1)
