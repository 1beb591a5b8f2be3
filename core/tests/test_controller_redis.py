"""Several controllers over one Redis: any of them answers for all nodes, and any may die."""

from __future__ import annotations

import asyncio
import threading
from typing import TYPE_CHECKING, Any

import pytest
from controller_process import ControllerProcess
from controller_rig import CHUNK, SECONDS, Controller, Nodes, digests, namespace, until
from redis_rig import RedisServer

from lmkv.agent import messages
from lmkv.controller.records import Ended, Plan, Started
from lmkv.controller.redis_journal import RedisJournal
from lmkv.errors import ClosedError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from lmkv.agent import messages as m

SPACE = namespace()
PROMPT = list(range(1, 300 * CHUNK + 1))
CHUNKS = digests(PROMPT, SPACE)
ASKED: dict[str, Any] = {"model": "m", "tokens": PROMPT}
MOVE = {**ASKED, "source": {"node": "a"}, "target": {"node": "b", "tier": "disk"}}


@pytest.fixture(scope="module")
def redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    with RedisServer(tmp_path_factory.mktemp("redis")) as server:
        yield server


@pytest.fixture(autouse=True)
def _empty(redis: RedisServer) -> None:
    redis.cli("FLUSHALL")


def test_one_of_two_controllers_is_killed(redis: RedisServer, tmp_path: Path) -> None:
    with (
        ControllerProcess(tmp_path, "--directory", redis.url) as first,
        Controller(directory=redis.url, node_timeout=15.0) as second,
        Nodes() as nodes,
    ):
        a, b = (nodes.start(name, first, SPACE) for name in "ab")  # type: ignore[arg-type]
        a.store(CHUNKS, SPACE)
        until(lambda: second.post("lookup", ASKED)["nodes"], "the other one knows what the first was told")
        assert [n["node"] for n in second.get("/v1/nodes")["nodes"]] == ["a", "b"]
        done = second.post("copy", MOVE, headers={"Idempotency-Key": "k"})
        assert (done["state"], done["done"]) == ("done", len(CHUNKS)), "for nodes that are connected to the first"
        assert b.tiers[1].of(SPACE.id) == set(CHUNKS)
        assert first.post("copy", MOVE, headers={"Idempotency-Key": "k"})["id"] == done["id"]
        assert first.get(f"/v1/jobs/{done['id']}") == done
        for node in (a, b):
            node.urls.append(second.url)
        first.kill()
        until(lambda: a.connected and b.connected, "the nodes have found the second")
        until(
            lambda: all(n["state"] == "connected" and n["synced"] for n in second.get("/v1/nodes")["nodes"]), "all told"
        )
        (one, other) = second.post("lookup", ASKED)["nodes"]
        assert one["hit_tokens"] == other["hit_tokens"] == len(PROMPT)
        b.evict(CHUNKS, SPACE, "disk")
        until(lambda: len(second.post("lookup", ASKED)["nodes"]) == 1, "and it hears what happens from now on")
        assert second.get(f"/v1/jobs/{done['id']}") == done
        assert second.post("move", MOVE)["state"] == "done"
        assert not nodes.lost


def test_a_job_has_one_owner(redis: RedisServer) -> None:
    plan = Plan("pin", "ops", 1.0, (), key="k")

    async def body() -> None:
        first, second = RedisJournal(redis.url), RedisJournal(redis.url)
        for _ in range(2):  # every script may run twice
            assert await first.begin("j1", plan) is None
            await first.add("j1", Started(1, 2.0))
        assert await second.begin("j2", plan) == "j1"
        assert await second.find("k") == "j1"
        assert await second.adopt(()) == {}
        with pytest.raises(ClosedError, match="another controller"):
            await second.add("j1", Started(2, 3.0))
        redis.cli("DEL", "lmkv:fleet:jobs:owner:j1")  # its lease ends
        assert await second.adopt(()) == {"j1": [plan, Started(1, 2.0)]}
        await second.add("j1", Started(2, 3.0))
        with pytest.raises(ClosedError, match="another controller"):
            await first.add("j1", Ended("done", 4.0))
        await first.ask_cancel("j1")
        assert await first.keep(("j1",)) == {"j1"}, "whoever runs it looks there"
        assert await second.keep(("j1",)) == {"j1"}
        for _ in range(2):
            await second.add("j1", Ended("cancelled", 5.0))
        assert await second.keep(("j1",)) == set()
        assert await first.adopt(()) == {}
        assert await first.recent(5) == ["j1"]
        assert await first.read("j1") == [plan, Started(1, 2.0), Started(2, 3.0), Ended("cancelled", 5.0)]
        await first.close()
        await second.close()

    asyncio.run(body())


@pytest.mark.slow
def test_the_other_one_goes_on_with_the_jobs_of_a_killed_one(redis: RedisServer, tmp_path: Path) -> None:
    with (
        ControllerProcess(tmp_path, "--directory", redis.url) as first,
        Controller(directory=redis.url, node_timeout=15.0) as second,
        Nodes() as nodes,
    ):
        a, b = (nodes.start(name, first, SPACE) for name in "ab")  # type: ignore[arg-type]
        a.store(CHUNKS, SPACE)
        for node in (a, b):
            node.urls.append(second.url)
        killed = threading.Event()

        def kill(job: str, _: m.Command) -> bool:
            if ".1." in job and not killed.is_set():
                first.kill()
                killed.set()
            return True

        a.before = kill
        job = first.post("move", MOVE, wait=0)["id"]
        assert killed.wait(SECONDS)
        assert second.get(f"/v1/jobs/{job}")["state"] == "running"
        ended = second.get(f"/v1/jobs/{job}", params={"wait": SECONDS})
        assert (ended["state"], ended["done"]) == ("done", len(CHUNKS))
        assert nodes.where(CHUNKS[-1]) == {"b"}
        assert not nodes.lost


@pytest.mark.slow
def test_a_job_is_cancelled_through_the_other_controller(redis: RedisServer) -> None:
    with Controller(directory=redis.url) as first, Controller(directory=redis.url) as second, Nodes() as nodes:
        a, _ = (nodes.start(name, first, SPACE) for name in "ab")
        a.store(CHUNKS, SPACE)
        a.before = lambda _job, _command: False  # never done
        job = first.post("move", {**MOVE, "source": {"node": "a", "tier": "ram"}}, params={"wait": 0}, status=202)["id"]
        until(lambda: first.get(f"/v1/jobs/{job}")["state"] == "running", "it has the chunks to itself")
        waiting = second.post("move", MOVE, params={"wait": 0}, status=202)["id"]
        assert second.get(f"/v1/jobs/{waiting}", params={"wait": 1})["state"] == "waiting", "one at a time"
        second.client.delete(f"/v1/jobs/{waiting}").raise_for_status()
        assert second.get(f"/v1/jobs/{waiting}", params={"wait": SECONDS})["state"] == "cancelled"
        second.client.delete(f"/v1/jobs/{job}").raise_for_status()
        until(lambda: a._cancelled, "the node hears of it")


@pytest.mark.parametrize("kind", [messages.Fetch, messages.Fence])
def test_who_has_lost_a_job_takes_nothing_away(redis: RedisServer, kind: type) -> None:
    """It stood still while another one went on with the job: what lies at the source may have been brought back."""
    with Controller(directory=redis.url) as controller, Nodes() as nodes:
        a, b = (nodes.start(name, controller, SPACE) for name in "ab")
        a.store(CHUNKS[:4], SPACE)

        def lose(job: str, command: m.Command) -> bool:
            if isinstance(command, kind):
                redis.cli("SET", f"lmkv:fleet:jobs:owner:{job.partition('.')[0]}", "another", "PX", "60000")
            return True

        a.after = b.after = lose
        moved = {**MOVE, "tokens": PROMPT[: 4 * CHUNK]}
        job = controller.post("move", moved, params={"wait": 0}, status=202)["id"]
        until(lambda: job not in controller.server.parts.jobs._tasks, "it gives up")
        assert a.tiers[0].of(SPACE.id) == set(CHUNKS[:4])
        assert not [command for _, command in a.commands if isinstance(command, messages.Drop)]


def test_without_its_redis_the_controller_says_so(tmp_path: Path) -> None:
    with RedisServer(tmp_path) as redis, Controller(directory=redis.url) as controller:
        assert controller.get("/v1/health")["state"] == "ok"
        redis.kill()
        for answer in (controller.client.get("/v1/nodes"), controller.client.post("/v1/lookup", json=ASKED)):
            assert answer.status_code == 503
            assert "redis://" in answer.json()["error"]["message"]
        assert controller.get("/v1/health", status=503)["state"] == "degraded"
        redis.start()
        until(lambda: controller.client.get("/v1/nodes").status_code == 200, "it is back")
