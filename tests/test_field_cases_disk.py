"""Cases from the field: what a disk does to frames, on the real stack."""

from __future__ import annotations

import errno
import logging
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from fake_engine import CHUNK, FRAME, Request, prompts, tokens

from lmkv.errors import ConfigError
from lmkv.observe.log import RateLimited
from lmkv_backend_disk.names import frame_path

if TYPE_CHECKING:
    from collections.abc import Callable

    from fake_engine import FakeEngine, Node

    from lmkv.types import ChunkKey

HERE = Path(__file__).parent
KILLED = """
import os, signal, sys
from pathlib import Path
from fake_engine import Node, stack, tokens
folder, point = sys.argv[1:]
node = Node(stack(Path(folder), disk_options={"path": folder, "direct": "off"}))
engine = node.engine()
engine.store(tokens(8))
node.settle()
backend = node.manager.tier("disk").backend

def die():
    os.kill(os.getpid(), signal.SIGKILL)

def write(fd, view):
    os.pwrite(fd, view[:{"none": 0, "one": 1, "half": len(view) // 2, "all but one": len(view) - 1}[point]], 0)
    die()

if point == "unpublished":
    backend.folder.publish = lambda temp, key: die()
else:
    backend.direct.write = write
engine.store(tokens(4, 500))
node.settle()
"""


def key_of(here: Node, engine: FakeEngine, prompt: list[int], chunk: int) -> ChunkKey:
    chain = engine.cache.chain()
    chain.extend(prompt)
    digest = chain.digests[chunk]
    return next(key for key in here.manager.tier("disk").index if key.digest == digest)


def frames(folder: Path) -> list[Path]:
    return [path for path in (folder / "frames").rglob("*") if path.is_file() and path.name != "namespace.json"]


@pytest.mark.parametrize("point", ["none", "one", "half", "all but one", "unpublished"])
def test_a20_kill_while_writing(node: Callable[..., Node], tmp_path: Path, point: str) -> None:
    """The process is killed in the middle of a write: that frame is not there, others are, no temporary file stays."""
    child = subprocess.run(
        [sys.executable, "-c", KILLED, str(tmp_path), point],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(HERE), *filter(None, sys.path)])},
        capture_output=True,
        check=False,
    )
    assert child.returncode == -signal.SIGKILL, child.stderr.decode()
    left = list((tmp_path / "temp").iterdir())
    assert left
    here = node(tmp_path)
    engine = here.engine()
    assert engine.find(tokens(4, 500)) == 0
    assert engine.load(tokens(8)) == 8
    assert not any(path.exists() for path in left)
    assert here.manager.tier("disk").used == sum(path.stat().st_size for path in frames(tmp_path)) == 2 * FRAME


def flip(path: Path, at: int) -> None:
    with path.open("r+b") as file:
        file.seek(at, os.SEEK_SET if at >= 0 else os.SEEK_END)
        byte = file.read(1)[0]
        file.seek(at, os.SEEK_SET if at >= 0 else os.SEEK_END)
        file.write(bytes((byte ^ 4,)))


DAMAGE: dict[str, Callable[[Path], object]] = {
    "trailer byte": lambda path: flip(path, -60),
    "payload byte": lambda path: flip(path, 17),
    "cut": lambda path: os.truncate(path, path.stat().st_size - 1),
    "empty": lambda path: os.truncate(path, 0),
    "extra byte": lambda path: path.open("ab").write(b"x"),
    "pickle": lambda path: path.write_bytes(b"\x80\x04\x95" + b"\xff" * 8 + bytes(FRAME)),
}


@pytest.mark.parametrize("restart", [False, True])
@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning")
def test_a21_damaged_file(node: Callable[..., Node], tmp_path: Path, damage: str, restart: bool) -> None:
    """The middle one of 3 frames: a counted miss, set aside; its neighbours are fine, no page is written to."""
    here = node(tmp_path, ram=None)
    engine = here.engine()
    engine.store(tokens(12))
    here.settle()
    path = Path(frame_path(str(tmp_path), key_of(here, engine, tokens(12), 1)))
    if restart:
        here.close()
    DAMAGE[damage](path)
    if restart:
        here = node(tmp_path, ram=None)
        engine = here.engine()
    request = Request([engine], tokens(13)).queue().look_up().allocate().load()
    here.settle()
    assert request.computed == 4
    assert engine.untouched(request.ids[0][2:])
    assert here.counter("lmkv_corrupt_frames_total", tier="disk") == 1
    assert not path.exists()
    assert list((tmp_path / "damaged").iterdir())
    assert engine.find(tokens(12)) == 4
    request.run().store().finish()
    here.settle()
    assert engine.load(tokens(12)) == 12


def test_a22_restart(node: Callable[..., Node], tmp_path: Path) -> None:
    """10 of at most 12 frames survive a restart, and are used; of 5 more the 3 least recently used make room."""
    settings: dict[str, Any] = {"ram": None, "disk": 12 * FRAME}
    here = node(tmp_path, **settings)
    engine = here.engine()
    wanted = list(prompts(15))
    for prompt in wanted[:10]:
        engine.store(prompt)
        here.settle()
    here.close()
    here = node(tmp_path, **settings)
    engine = here.engine()
    assert here.manager.tier("disk").used == 10 * FRAME
    assert [engine.find(prompt) for prompt in wanted[:10]] == [CHUNK] * 10
    for prompt in wanted[10:]:
        engine.store(prompt)
        here.settle()
    assert len(frames(tmp_path)) == 12
    assert here.manager.tier("disk").used == 12 * FRAME
    assert [engine.find(prompt) for prompt in wanted] == [0] * 3 + [CHUNK] * 12


def test_a23_no_space(
    node: Callable[..., Node], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A full disk, three times: counted, nothing half-visible, requests served, one line of log; then all is well."""
    caplog.set_level(logging.WARNING, "lmkv")
    caplog.handler.addFilter(limit := RateLimited(3600.0))
    here = node(tmp_path)
    engine = here.engine()
    backend: Any = here.manager.tier("disk").backend
    write, left = backend.direct.write, [3]

    def full(fd: int, view: memoryview) -> None:
        if left[0]:
            left[0] -= 1
            os.pwrite(fd, bytes(view[:100]), 0) if not backend.direct.on else None
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        write(fd, view)

    monkeypatch.setattr(backend.direct, "write", full)
    wanted = list(prompts(5))
    for prompt in wanted:
        engine.store(prompt)
        here.settle()
        assert engine.load(prompt) == CHUNK, "requests are served"
    caplog.handler.removeFilter(limit)
    assert here.counter("lmkv_tier_operations_total", tier="disk", op="put", outcome="failed") == 3
    assert len(frames(tmp_path)) == 2
    assert list((tmp_path / "temp").iterdir()) == []
    lines = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert len([line for line in lines if f"[Errno {errno.ENOSPC}]" in line]) == 1, lines
    engine.cache.clear("ram")
    assert [engine.find(prompt) for prompt in wanted] == [0] * 3 + [CHUNK] * 2


@pytest.mark.parametrize("bad", ["missing parent", "file"])
def test_a25_bad_folder(node: Callable[..., Node], tmp_path: Path, bad: str) -> None:
    """The start stops, with path and errno."""
    folder = tmp_path / "place" / "frames"
    if bad == "file":
        folder = tmp_path / "place"
        folder.write_text("not a folder")
    with pytest.raises(ConfigError) as caught:
        node(folder)
    assert str(tmp_path / "place") in str(caught.value)
    assert f"Errno {errno.ENOENT if bad == 'missing parent' else errno.ENOTDIR}" in str(caught.value)


def test_a25_folder_vanishes(node: Callable[..., Node], tmp_path: Path) -> None:
    """Never healthy with a dead tier; and when the folder is back, so is the tier."""
    folder, away = tmp_path / "disk", tmp_path / "away"
    here = node(folder, disk_breaker={"failures": 2, "probe": "20ms"})
    engine = here.engine()
    wanted = list(prompts(12))
    engine.store(wanted[0])
    here.settle()
    shutil.move(folder, away)
    for prompt in wanted[1:5]:
        engine.store(prompt)
        here.settle()
        assert engine.load(prompt) == CHUNK, "requests are served"
    report = engine.cache.health()
    assert report.state != "ok"
    assert report.tiers["disk"]["state"] != "ok"
    assert str(folder) in str(report.tiers["disk"]["detail"])
    shutil.move(away, folder)
    until = time.monotonic() + 10
    number = 5
    while engine.cache.health().state != "ok":
        assert time.monotonic() < until
        time.sleep(0.03)
        engine.store(wanted[number % len(wanted)])
        here.settle()
        number += 1
    engine.cache.clear("ram")
    assert engine.load(wanted[0]) == CHUNK
