"""Killed, started again: what is there, in which order, and what has been cleared away."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from typing import TYPE_CHECKING

import pytest

from lmkv.testing import make_key, make_memory, make_payload

if TYPE_CHECKING:
    from pathlib import Path

    from conftest import Open

    from lmkv_backend_disk.backend import FolderBackend

FRAME = 16384

VICTIM = """
import os, signal, sys
from lmkv.specs import BackendContext
from lmkv.testing import make_key, make_memory, make_payload
from lmkv_backend_disk.backend import create
from lmkv_backend_disk.options import DiskOptions

root, io, point, frame = sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4])
backend = create(DiskOptions(path=root, io=io), BackendContext(tier="disk"))
assert backend.put([make_key(1)], [make_memory(make_payload(1, frame))])[0].ok

def die(*args):
    os.kill(os.getpid(), signal.SIGKILL)

if point == "publish":
    os.replace = die
elif point == "published":
    replace = os.replace
    os.replace = lambda *a: (replace(*a), die())
elif point == "log":
    write = os.write
    os.write = lambda fd, data: (write(fd, data[: len(data) // 2]), die())
else:
    pwrite = os.pwrite
    os.pwrite = lambda fd, data, at: (os.set_blocking(fd, True), pwrite(fd, bytes(data[: int(point)]), at), die())
# not aligned, so through the page cache, where any number of bytes can be written
memory = make_memory(make_payload(2, frame), misaligned_by=1)
backend.put([make_key(2)], [memory])
"""


def get(backend: FolderBackend, number: int) -> bool:
    memory = make_memory(FRAME)
    (outcome,) = backend.get([make_key(number)], [memory])
    assert not outcome.ok or bytes(memory.view) == make_payload(number, FRAME)
    return outcome.ok


def put(backend: FolderBackend, number: int) -> None:
    assert backend.put([make_key(number)], [make_memory(make_payload(number, FRAME))])[0].ok


POINTS = ["0", "1", str(FRAME // 2), str(FRAME - 1), str(FRAME), "publish", "published", "log"]


@pytest.mark.parametrize(
    ("io", "point"), [("threads", p) for p in POINTS] + [("aiofiles", p) for p in ("publish", "published", "log")]
)
def test_a20_kill_while_writing(open_disk: Open, tmp_path: Path, io: str, point: str) -> None:
    root = tmp_path / "store"
    victim = subprocess.run(
        [sys.executable, "-c", VICTIM, str(root), io, point, str(FRAME)], check=False, capture_output=True
    )
    assert victim.returncode == -signal.SIGKILL, victim.stderr.decode()
    visible = point in {"published", "log"}
    assert len(list((root / "temp").iterdir())) == (not visible)

    backend = open_disk()
    assert list((root / "temp").iterdir()) == []
    frames = list(backend.scan())
    assert [frame.key for frame in frames] == [make_key(1), make_key(2)][: 1 + visible]
    assert sum(frame.nbytes for frame in frames) == FRAME * (1 + visible)
    assert all(make_payload(n, FRAME).endswith(f.trailer) and f.trailer for n, f in enumerate(frames, 1))
    assert get(backend, 1)
    assert get(backend, 2) == visible
    put(backend, 2)
    assert get(backend, 2)


def test_a20_killed_at_any_moment(open_disk: Open, tmp_path: Path) -> None:
    root = tmp_path / "store"
    code = VICTIM.split("def die", maxsplit=1)[0] + (
        "\nn = 1\nprint(flush=True)\nwhile True:\n    n += 1\n"
        "    backend.put([make_key(n)], [make_memory(make_payload(n, frame))])\n"
    )
    for delay in (0.0, 0.03, 0.1):
        with subprocess.Popen(
            [sys.executable, "-c", code, str(root), "threads", "", str(FRAME)], stdout=subprocess.PIPE
        ) as victim:
            assert victim.stdout is not None
            victim.stdout.readline()
            time.sleep(delay)
            victim.kill()
        backend = open_disk()
        frames = list(backend.scan())
        numbers = range(1, len(frames) + 1)
        assert {frame.key for frame in frames} == {make_key(n) for n in numbers}
        assert all(get(backend, n) for n in numbers)
        assert list((root / "temp").iterdir()) == []
        backend.close()


def test_a22_restart(open_disk: Open) -> None:
    backend = open_disk()
    for number in range(10):
        put(backend, number)
        time.sleep(0.01)
    backend.touch([make_key(n) for n in (3, 1)])
    backend.close()
    backend = open_disk()
    frames = list(backend.scan())
    order = [0, 2, 4, 5, 6, 7, 8, 9]
    assert [frame.key for frame in frames][:8] == [make_key(n) for n in order]
    assert {frame.key for frame in frames[8:]} == {make_key(1), make_key(3)}
    assert sum(frame.nbytes for frame in frames) == 10 * FRAME
    assert all(get(backend, n) for n in range(10))
