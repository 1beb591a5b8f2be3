"""Killed, started again: what is there, in which order, and what has been cleared away."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from typing import TYPE_CHECKING

import pytest

from lmkv.frame import Trailer, frame_bytes, parse_trailer, seal
from lmkv.specs import BackendContext
from lmkv.testing import make_key, make_memory, make_payload
from lmkv_backend_disk import listing
from lmkv_backend_disk.backend import create
from lmkv_backend_disk.names import frame_path
from lmkv_backend_disk.options import DiskOptions
from lmkv_backend_disk.trailers import GENERATION_BYTES, Tail, TrailerLog, generation_bytes, pack_identity

if TYPE_CHECKING:
    from collections.abc import Callable
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


def copy_the_folder(root: Path) -> None:
    shutil.copytree(root, root.parent / "copy")
    shutil.rmtree(root)
    (root.parent / "copy").rename(root)


def put_a_folder_there(root: Path) -> None:
    (root / "trailers").unlink()
    (root / "trailers").mkdir()


def rewrite(path: Path, change: Callable[[bytes], bytes]) -> None:
    path.write_bytes(change(path.read_bytes()))


LOG_FAULTS: dict[str, Callable[[Path], None]] = {
    "gone": lambda root: (root / "trailers").unlink(),
    "empty": lambda root: rewrite(root / "trailers", lambda data: b""),
    "cut": lambda root: rewrite(root / "trailers", lambda data: data[: len(data) // 2 + 7]),
    "bytes flipped": lambda root: rewrite(
        root / "trailers", lambda data: bytes(b ^ 1 if i % 5000 == 40 else b for i, b in enumerate(data))
    ),
    "noise behind": lambda root: rewrite(root / "trailers", lambda data: data + b"lmkvtrl1" + os.urandom(9000)),
    "noise before": lambda root: rewrite(root / "trailers", lambda data: b"lmkvtrl1" * 20 + data),
    "a folder": put_a_folder_there,
    "of another folder": copy_the_folder,
    "cut while compacting": lambda root: rewrite(root / "trailers", lambda data: data[: len(data) // 8]),
}


@pytest.mark.parametrize("fault", LOG_FAULTS)
@pytest.mark.parametrize("io", ["threads"])
def test_a_scan_does_not_depend_on_the_trailer_log(open_disk: Open, tmp_path: Path, fault: str) -> None:
    backend = open_disk()
    for number in range(8):
        put(backend, number)
    backend.close()
    LOG_FAULTS[fault](tmp_path / "store")
    for _ in range(2):
        backend = open_disk()
        frames = {frame.key: frame.trailer for frame in backend.scan()}
        assert frames == {make_key(n): make_payload(n, FRAME)[-4096:] for n in range(8)}
        backend.close()


@pytest.mark.parametrize("io", ["threads"])
def test_a_frame_replaced_by_other_hands_is_read_anew(open_disk: Open, tmp_path: Path) -> None:
    backend = open_disk()
    put(backend, 1)
    path = tmp_path / frame_path("store", make_key(1))
    other = path.with_suffix(".other")
    other.write_bytes(make_payload(2, FRAME))
    other.rename(path)
    (frame,) = backend.scan()
    assert frame.trailer == make_payload(2, FRAME)[-4096:]


@pytest.mark.parametrize("io", ["threads"])
def test_the_trailer_log_is_compacted(open_disk: Open, tmp_path: Path) -> None:
    log = tmp_path / "store" / "trailers"
    backend = open_disk()
    for number in range(200):
        put(backend, number % 4)
    size = log.stat().st_size
    assert len(list(backend.scan())) == 4
    assert log.stat().st_size < size / 20
    put(backend, 5)
    backend.close()
    backend = open_disk()
    assert {f.trailer for f in backend.scan()} == {make_payload(n, FRAME)[-4096:] for n in (0, 1, 2, 3, 5)}


def test_the_trailer_log_is_bounded(tmp_path: Path) -> None:
    assert GENERATION_BYTES <= 1 << 28
    assert [generation_bytes(c) for c in (None, 1 << 50, 1 << 30, 100)] == [
        GENERATION_BYTES,
        GENERATION_BYTES,
        1 << 23,
        0,
    ]
    log = TrailerLog(str(tmp_path), limit=1 << 16)
    tails = [Tail(pack_identity(make_key(n), FRAME, n), make_payload(n, 1096)) for n in range(300)]

    def check(*, least: int) -> None:
        assert sum(path.stat().st_size for path in tmp_path.iterdir()) <= 2 << 16
        known, _ = log.read()
        assert len(known) > least
        assert all(known[tail.identity] == tail.data for tail in tails[-len(known) :])

    for tail in tails:
        log.append([tail])
    check(least=50)
    log.append(tails[-40:])
    check(least=39)
    log.append(Tail(tail.identity, tail.data * 100) for tail in tails)  # no record of these has room
    check(least=39)
    log.rewrite(tails[-50:])
    check(least=49)
    log.close()


def test_a_log_has_no_room_in_a_tiny_tier(tmp_path: Path) -> None:
    options = DiskOptions(path=tmp_path / "store")
    for _ in range(2):
        backend = create(options, BackendContext(tier="disk", capacity=20 * FRAME))
        for number in range(4):
            put(backend, number)
        assert {f.trailer for f in backend.scan()} == {make_payload(n, FRAME)[-4096:] for n in range(4)}
        backend.close()
    assert sum(path.stat().st_size for path in (tmp_path / "store").glob("trailers*")) <= 20 * FRAME // 64


@pytest.mark.parametrize("pages", [1, 16, 128])
@pytest.mark.parametrize("payload", [1, 5000, 8192 - 400])
def test_a_scan_gives_the_whole_trailer_and_nothing_more(
    open_disk: Open, tmp_path: Path, pages: int, payload: int
) -> None:
    key = make_key(1)
    prefixes = tuple(bytes((n,)) * 32 for n in range(pages - 1))
    trailer = Trailer(key, b"", pages, prefixes, "identity", payload, payload)
    memory = make_memory(frame_bytes(payload, pages - 1))
    memory.view[:payload] = make_payload(1, payload)
    seal(memory.view, trailer)
    backend = open_disk()
    assert backend.put([key], [memory])[0].ok
    for _ in range(2):
        (frame,) = backend.scan()
        assert parse_trailer(frame.trailer) == trailer
        assert len(frame.trailer) == 112 + len("identity") + 32 * (pages - 1) + 48
        (tmp_path / "store" / "trailers").unlink()
        backend.close()
        backend = open_disk()


@pytest.mark.parametrize("cold", [False, True])
def test_a_scan_uses_threads_only_where_it_waits(open_disk: Open, monkeypatch: pytest.MonkeyPatch, cold: bool) -> None:
    """On warm folders threads wait for each other and nothing else."""
    backend = open_disk()
    keys = [make_key(number) for number in range(60)]
    assert all(outcome.ok for outcome in backend.put(keys, [make_memory(make_payload(1, 4096))] * len(keys)))
    seen: list[int] = []
    work = listing._list

    def watched(place: tuple[bytes, str]) -> object:
        seen.append(threading.get_ident())
        if cold:
            time.sleep(0.02)
        return work(place)

    monkeypatch.setattr(listing, "_list", watched)
    monkeypatch.setattr(listing, "PATIENCE", 0.1 if cold else 60.0)  # a machine may be too busy to list anything
    assert {frame.key for frame in backend.scan()} == set(keys)
    assert seen[0] == threading.get_ident()
    assert (len(set(seen)) > 2) == cold
