"""Jobs on the disk: torn lines, damage, a full disk, and what is forgotten."""

from __future__ import annotations

import asyncio
import errno
import os
from typing import TYPE_CHECKING, Any

import pytest
from controller_rig import CHUNK, SECONDS, Controller, Nodes, digests, namespace, until

from lmkv.agent.messages import PinChunks
from lmkv.controller import file_journal, jobs, journal
from lmkv.controller.file_journal import FileJournal
from lmkv.controller.records import Ended, Errand, Failure, Plan, Started, Transfer, Worked, decode, encode
from lmkv.errors import ConfigError, ProtocolError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from pathlib import Path

    from lmkv.controller.records import Event

SPACE = bytes(range(16))
DIGEST = bytes(32)


def plan(key: str = "", *, chunks: int = 1) -> Plan:
    works = (
        Errand("a", PinChunks(SPACE, DIGEST * chunks, 1.5)),
        Transfer("a", "", "b", "ram", SPACE, DIGEST, remove=True),
    )
    return Plan("pin", "ops", 1.25, works, (Failure(SPACE, DIGEST, "", "lost"),), key, "f")


def run(path: Path, body: Callable[[FileJournal], Awaitable[Any]]) -> tuple[dict[str, list[Event]], Any]:
    """Open a journal, do something, close it."""

    async def life() -> Any:
        kept = FileJournal(path)
        found = await kept.open()
        try:
            return found, await body(kept)
        finally:
            await kept.close()

    return asyncio.run(life())  # type: ignore[no-any-return]


async def nothing(_: FileJournal) -> None:
    """Only open it."""


EVENTS: list[Event] = [
    plan("k"),
    Started(1, 2.5),
    Worked(0, (Failure(SPACE, DIGEST, "a", "not there"),), {"bytes": 7}, "why", cancelled=True),
    Ended("failed", 3.5, "x"),
]


def test_every_event_comes_back_as_it_was(tmp_path: Path) -> None:
    for event in EVENTS:
        assert decode(encode(event)) == event

    async def write(kept: FileJournal) -> str | None:
        assert await kept.begin("j1", plan("k")) is None
        for event in EVENTS[1:]:
            await kept.add("j1", event)
        return await kept.begin("j2", plan("k"))

    path = tmp_path / "deep" / "jobs"
    assert run(path, write)[1] == "j1", "the key is known"

    async def known(kept: FileJournal) -> tuple[Any, ...]:
        return await kept.begin("j3", plan("k")), await kept.find("k"), await kept.read("j1"), await kept.adopt(())

    assert run(path, known) == ({"j1": EVENTS}, ("j1", "j1", EVENTS, {}))


def test_a_line_that_was_not_finished_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "jobs"

    async def write(kept: FileJournal) -> None:
        await kept.begin("j1", plan())
        await kept.add("j1", Started(1, 2.0))

    run(path, write)
    whole = path.read_bytes()
    first = whole.index(b"\n") + 1
    for end in (len(whole) - 1, first + 5, first, first - 3, 1):
        path.write_bytes(whole[:end])
        found, _ = run(path, nothing)
        assert found == ({"j1": [plan()]} if end >= first else {}), end
        assert path.read_bytes() == whole[: first if end >= first else 0]


@pytest.mark.parametrize("line", [b"{}", b"[1,2]", b'["j1",{"type":"other"}]', b"\x80\x04\x95", b"[" * 5000, b""])
def test_a_damaged_line_stops_the_start_and_is_named(line: bytes, tmp_path: Path) -> None:
    path = tmp_path / "jobs"
    run(path, lambda kept: kept.begin("j1", plan()))
    before = path.read_bytes() + line + b"\n"
    path.write_bytes(before)
    with pytest.raises(ConfigError, match=r"line 2: .*move the file away"):
        run(path, nothing)
    assert path.read_bytes() == before, "it is left as it is"
    with pytest.raises(ProtocolError):
        decode(line)


def test_one_controller_has_it(tmp_path: Path) -> None:
    async def second(_: FileJournal) -> None:
        with pytest.raises(ConfigError, match="another controller has it"):
            await FileJournal(tmp_path / "jobs").open()

    run(tmp_path / "jobs", second)
    run(tmp_path / "jobs", nothing)


def test_old_jobs_are_forgotten_and_the_file_shrinks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_journal, "REWRITE_BYTES", 8_000)
    path = tmp_path / "jobs"

    async def write(kept: FileJournal) -> None:
        kept._rewrite_at = 8_000
        for number in range(80):
            await kept.begin(f"j{number}", plan())
            await kept.add(f"j{number}", Ended("done", float(number)))
            await kept.forget(f"j{number - 5}")

    run(path, write)
    assert path.stat().st_size < 16_000
    monkeypatch.setattr(file_journal, "KEPT_JOBS", 3)
    assert sorted(run(path, nothing)[0]) == ["j77", "j78", "j79"]
    monkeypatch.setattr(file_journal, "KEPT_CHUNKS", 2 * plan().total)
    assert sorted(run(path, nothing)[0]) == ["j78", "j79"]
    assert journal.KEPT_JOBS == 1000


def test_a_disk_that_is_full_stops_a_job_until_it_is_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    space = namespace()
    prompt = list(range(1, 4 * CHUNK + 1))
    full, fsync = True, os.fsync
    monkeypatch.setattr(jobs, "KEEP_SECONDS", 0.1)

    def maybe(fd: int) -> None:
        if full:
            raise OSError(errno.ENOSPC, "No space left on device")
        fsync(fd)

    with Controller(journal=tmp_path / "jobs") as controller, Nodes() as nodes:
        a = nodes.start("a", controller, space)
        a.store(digests(prompt, space), space)
        body = {"model": "m", "tokens": prompt, "node": "a"}
        monkeypatch.setattr(file_journal.os, "fsync", maybe)
        error = controller.post("pin", body, status=503, headers={"Idempotency-Key": "k"})["error"]
        assert "No space left" in error["message"]
        full = False
        a.before = lambda _job, _command: bool(_fill()) or True

        def _fill() -> None:
            nonlocal full
            full = len(a.commands) == 1

        job = controller.post("pin", body, params={"wait": 0}, status=202, headers={"Idempotency-Key": "k"})["id"]
        until(lambda: full, "it is begun, and then the disk is full")
        assert controller.get(f"/v1/jobs/{job}", params={"wait": 0.3})["state"] == "running"
        full = False
        assert controller.get(f"/v1/jobs/{job}", params={"wait": SECONDS})["state"] == "done"
    found, _ = run(tmp_path / "jobs", nothing)
    (events,) = found.values()
    assert [type(event).__name__ for event in events] == ["Plan", "Started", "Started", "Worked", "Ended"]
