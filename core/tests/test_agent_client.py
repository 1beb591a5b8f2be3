"""The agent and its controller: what is told, and what happens when one of them is away."""

from __future__ import annotations

import asyncio
import logging
import random
import ssl
from typing import TYPE_CHECKING

import pytest
from agent_rig import Controller, agent, agree, eventually, running
from server_rig import make_certificates
from storage_rig import FRAME, Client, Shelf, chain, namespace, storage
from websockets.asyncio.client import ClientConnection

from lmkv.agent import client as agent_client
from lmkv.agent import messages as m
from lmkv.agent import outbox
from lmkv.agent.client import check_heartbeat
from lmkv.errors import ConfigError
from lmkv.service import protocol as p

if TYPE_CHECKING:
    from pathlib import Path

    from lmkv.storage.manager import StorageManager


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tries follow one another quickly."""
    monkeypatch.setattr(agent_client, "RETRY_FIRST", 0.02)
    monkeypatch.setattr(agent_client, "RETRY_MOST", 0.1)


def shelf() -> tuple[Shelf, dict[str, int]]:
    return Shelf(), {"capacity": 100 * FRAME}


def churn(one: Client, rounds: int, seed: int) -> None:
    """Stores and clears of chunks that push each other out."""
    rng = random.Random(seed)
    for _ in range(rounds):
        start = rng.randrange(40)
        one.store(one.frames(chain(range(start, start + 4 * rng.randrange(1, 4)))))
        if rng.random() < 0.05:
            one.ask(p.Clear(one.space.id))


def test_what_is_there_and_what_comes_and_goes_is_told() -> None:
    async def main() -> None:
        async with storage(below=[shelf()]) as manager, running(Controller()) as controller:
            one = Client(manager, namespace())
            one.store(one.frames(chain(range(12))))
            await one.settled()
            async with agent(manager, controller.url) as it:
                await eventually(lambda: agree(controller, manager))
                assert it.connected
                assert sum(map(len, controller.known.values())) == 6, "three chunks in two tiers"
                (register,) = controller.registered
                assert (register.node, register.namespaces) == ("n1", (one.space.json(),))
                assert [(t.name, t.capacity, t.shared) for t in register.tiers] == [
                    ("ram", 8 * FRAME, False),
                    ("shelf1", 100 * FRAME, False),
                ]
                other = Client(manager, namespace(model="other"))
                churn(one, 20, 1)
                churn(other, 20, 2)
                await one.settled()
                await eventually(lambda: agree(controller, manager))
                assert other.space.json() in controller.jsons
                assert manager.metrics.snapshot()["lmkv_agent_connected"] == 1
                one.ask(p.Clear())
                await eventually(lambda: agree(controller, manager))
                assert not any(controller.known.values())
                assert len(controller.epochs) == 1

    asyncio.run(main())


def noted(manager: StorageManager) -> object:
    return manager.stack.tiers[0].changed


def test_nothing_is_noted_while_nobody_listens() -> None:
    async def main() -> None:
        async with storage() as manager, running(Controller()) as controller:
            assert noted(manager) is None
            async with agent(manager, controller.url):
                await eventually(lambda: controller.synced)
                assert noted(manager) is not None
                await controller.stop()
                await eventually(lambda: noted(manager) is None)

    asyncio.run(main())


def test_shared_tiers_are_listed_but_not_told_of() -> None:
    async def main() -> None:
        async with (
            storage(below=[(Shelf(shared=True), {})]) as manager,
            running(Controller()) as controller,
            agent(manager, controller.url),
        ):
            one = Client(manager, namespace())
            await eventually(lambda: controller.synced)
            one.store(one.frames(chain(range(8))))
            await one.settled()
            await eventually(lambda: agree(controller, manager))
            assert {tier for _, tier in controller.known} == {0}
            assert [t.shared for t in controller.registered[0].tiers] == [False, True]

    asyncio.run(main())


@pytest.mark.parametrize("lost", [1, 3])
def test_lost_events_are_made_good_by_another_epoch(lost: int) -> None:
    async def main() -> None:
        async with storage(below=[shelf()]) as manager, running(Controller()) as controller:
            one = Client(manager, namespace())
            async with agent(manager, controller.url):
                await eventually(lambda: controller.synced)
                controller.lose_next = lost
                churn(one, 30, 3)
                await eventually(lambda: controller.lose_next < lost)
                controller.lose_next = 0
                await one.settled()
                await eventually(lambda: agree(controller, manager))
                assert len(controller.epochs) == 2, "the gap was found by the next events or the next heartbeat"
                assert manager.metrics.snapshot()["lmkv_agent_resyncs_total"] == 1

    asyncio.run(main())


def test_events_during_a_resync_are_not_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lmkv.agent.tap.STEP", 3)  # many small pages
    monkeypatch.setattr("lmkv.agent.tap.PERIOD", 0.001)
    send = ClientConnection.send

    async def slowly(connection: ClientConnection, body: bytes) -> None:
        await asyncio.sleep(0.002)
        await send(connection, body)

    async def main() -> None:
        monkeypatch.setattr(ClientConnection, "send", slowly)
        async with storage(ram=40 * FRAME, below=[shelf()]) as manager, running(Controller()) as controller:
            one = Client(manager, namespace())
            async with agent(manager, controller.url):
                for seed in range(8):
                    churn(one, 40, seed)
                    await eventually(lambda: agree(controller, manager))
                    await controller.send(m.Resync("the test wants it"))
                    controller.synced = False
                    pages = len(controller.epochs)
                    await eventually(lambda pages=pages: len(controller.epochs) > pages)  # type: ignore[misc]
                    if seed % 2:
                        one.ask(p.Clear())  # what later pages would have named has gone meanwhile
                    for more in range(5):
                        churn(one, 2, 100 * seed + more)
                        await asyncio.sleep(0.003)
                    await eventually(lambda: agree(controller, manager))
                assert len(controller.epochs) >= 8

    asyncio.run(main())


def test_the_controller_is_killed_and_comes_back() -> None:
    async def main() -> None:
        async with storage(below=[shelf()]) as manager, running(Controller()) as controller:
            one = Client(manager, namespace())
            async with agent(manager, controller.url) as it:
                churn(one, 10, 1)
                await eventually(lambda: agree(controller, manager))
                await controller.stop()
                await eventually(lambda: not it.connected)
                one.store(one.frames(chain(range(100, 108))))  # everything local goes on
                assert (await one.look_up(chain(range(100, 108)), hold=False)).chunks == 2
                assert controller.url in it.fault
                again = Controller()
                again.port = controller.port
                async with running(again):
                    await eventually(lambda: agree(again, manager))
                    assert again.epochs[0] > controller.epochs[0]
                    assert again.registered[0].incarnation == controller.registered[0].incarnation

    asyncio.run(main())


def test_controllers_that_do_not_answer_are_told_of_once(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        async with storage() as manager, agent(manager, "ws://127.0.0.1:1", "ws://127.0.0.1:2") as it:
            tries: list[str] = []

            def tried() -> bool:
                if tries[-1:] != [it.fault]:
                    tries.append(it.fault)
                return len(tries) > 6

            await eventually(tried)

    asyncio.run(main())
    assert caplog.text.count("no controller") == 2


def test_the_next_controller_is_tried() -> None:
    async def main() -> None:
        async with storage() as manager, running(Controller()) as one, running(Controller()) as two:
            nobody = "ws://127.0.0.1:1"
            async with agent(manager, nobody, one.url, two.url) as it:
                await eventually(lambda: one.synced)
                assert not two.registered
                await one.stop()
                await eventually(lambda: two.synced)
                assert it.connected

    asyncio.run(main())


def test_a_controller_that_does_not_read_costs_bounded_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outbox, "MOST", 40)
    monkeypatch.setattr(agent_client, "AGAIN_MOST", 0.05)
    send = ClientConnection.send

    async def main() -> None:
        gate = asyncio.Event()
        gate.set()

        async def through(connection: ClientConnection, body: bytes) -> None:
            """As over a socket whose buffers are full, which takes megabytes to bring about."""
            await gate.wait()
            await send(connection, body)

        monkeypatch.setattr(ClientConnection, "send", through)
        async with storage(ram=400 * FRAME) as manager, running(Controller()) as controller:
            one = Client(manager, namespace())
            async with agent(manager, controller.url) as it:
                await eventually(lambda: controller.synced)
                gate.clear()
                for start in range(300):
                    one.store(one.frames(chain(range(start * 1000, start * 1000 + 4))))
                    if start % 20 == 0:
                        await asyncio.sleep(0.06)
                        assert it._outbox._count <= 40
                assert it._outbox.stale == "more changes than the controller took"
                gate.set()
                await eventually(lambda: agree(controller, manager))
                assert len(controller.known[one.space.id, 0]) == 300
                assert len(controller.epochs) > 1

    asyncio.run(main())


def test_a38_heartbeat_and_timeout_are_checked_against_each_other(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(ConfigError, match=r"every 40 s.*after 30 s of silence: set controller.heartbeat"):
        check_heartbeat(40.0, 30.0)
    check_heartbeat(29.0, 30.0)

    async def main() -> None:
        async with storage() as manager, running(Controller(timeout=0.1)) as controller:
            async with agent(manager, controller.url, heartbeat=0.5) as it:
                await eventually(lambda: "every 0.5 s" in it.fault)
                assert "after 0.1 s" in it.fault
                assert not it.connected
            assert "every 0.5 s" in caplog.text

    asyncio.run(main())


def test_a38_heartbeats_come_without_traffic_from_the_registration_on() -> None:
    async def main() -> None:
        async with (
            storage() as manager,
            running(Controller()) as controller,
            agent(manager, controller.url, heartbeat=0.05),
        ):
            await eventually(lambda: len(controller.beats) >= 5)
            assert len(controller.registered) == 1

    asyncio.run(main())


def test_a_refusal_is_told_and_tried_again() -> None:
    async def main() -> None:
        controller = Controller(refuse=m.Refused("version", "this controller speaks version 9"))
        async with storage() as manager, running(controller), agent(manager, controller.url) as it:
            await eventually(lambda: "speaks version 9" in it.fault)
            controller.refuse = None
            await eventually(lambda: it.connected)

    asyncio.run(main())


def test_a_wrong_token_is_named_and_never_shown(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "lmkv")

    async def main() -> None:
        async with storage() as manager, running(Controller(token="right-4711")) as controller:
            async with agent(manager, controller.url, token="wrong-4712") as it:
                await eventually(lambda: "check controller.token" in it.fault)
            async with agent(manager, controller.url, token="right-4711") as it:
                await eventually(lambda: it.connected)
                assert "4711" not in repr(it._config)

    asyncio.run(main())
    assert "4711" not in caplog.text
    assert "4712" not in caplog.text


@pytest.mark.parametrize("body", [b"\x80\x04\x95", b"", "text", m.encode(m.Accepted(5.0)), b"\xff" * 100])
def test_a43_what_no_controller_says_ends_the_connection(body: bytes | str) -> None:
    async def main() -> None:
        async with storage() as manager, running(Controller()) as controller, agent(manager, controller.url):
            await eventually(lambda: controller.synced)
            assert controller._connection is not None
            await controller._connection.send(body)
            await eventually(lambda: len(controller.registered) == 2)

    asyncio.run(main())


def test_a_namespace_found_on_disk_is_told_when_it_is_declared() -> None:
    async def main() -> None:
        disk = Shelf()
        below = [(disk, {"capacity": 100 * FRAME})]
        async with storage(below=below) as manager:
            one = Client(manager, namespace(2))
            one.store(one.frames(chain(range(12))), shards=(0, 1))
            await one.settled()
        async with (
            storage(below=below) as manager,
            running(Controller()) as controller,
            agent(manager, controller.url),
        ):
            await eventually(lambda: controller.synced)
            assert not controller.known, "nobody has said how many shards make a chunk"
            Client(manager, namespace(2))
            await eventually(lambda: bool(controller.known) and agree(controller, manager))
            assert {tier for _, tier in controller.known} == {1}

    asyncio.run(main())


def test_a_chunk_counts_with_its_last_shard_and_no_more_without_its_first() -> None:
    async def main() -> None:
        async with storage() as manager, running(Controller()) as controller, agent(manager, controller.url):
            one = Client(manager, namespace(2))
            frames = one.frames(chain(range(4)))
            one.store(frames, shards=(1,))
            await eventually(lambda: controller.synced)
            await asyncio.sleep(0.15)
            assert not any(controller.known.values())
            one.store(frames, shards=(0,))
            await eventually(lambda: controller.known.get((one.space.id, 0)) == {frames[0].digest})
            tier = manager.stack.tiers[0]
            tier.disown(next(iter(tier.index)))
            await eventually(lambda: not any(controller.known.values()))

    asyncio.run(main())


def test_over_tls_the_controller_has_to_be_the_right_one(tmp_path: Path) -> None:
    ours, others = make_certificates(tmp_path / "ours"), make_certificates(tmp_path / "others")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(ours.cert, ours.key)

    async def main() -> None:
        async with storage() as manager, running(Controller(token="t-4711"), ssl=context) as controller:
            url = controller.url.replace("ws:", "wss:")
            async with agent(manager, url, ca=str(others.ca), token="t-4711") as it:
                await eventually(lambda: "certificate" in it.fault.lower())
                assert not controller.registered
            async with agent(manager, url, ca=str(tmp_path / "none.pem"), token="t-4711") as it:
                await eventually(lambda: "controller.ca" in it.fault)
            async with agent(manager, url, ca=str(ours.ca), token="t-4711"):
                await eventually(lambda: controller.synced)

    asyncio.run(main())
