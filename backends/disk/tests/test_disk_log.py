"""The scan and the log that makes it quick: it counts only where it is right, and it is bounded."""

from __future__ import annotations

import contextlib
import os
import shutil
import threading
import time
from operator import itemgetter
from typing import TYPE_CHECKING

import pytest
from disk_rig import FRAME, put

from lmkv.errors import FrameError
from lmkv.frame import Trailer, frame_bytes, parse_trailer, seal, verify
from lmkv.specs import BackendContext
from lmkv.testing import make_key, make_memory, make_payload
from lmkv.types import ChunkKey, StoredFrame
from lmkv_backend_disk import listing
from lmkv_backend_disk.backend import create
from lmkv_backend_disk.names import frame_path
from lmkv_backend_disk.options import DiskOptions
from lmkv_backend_disk.trailers import GENERATION_BYTES, TrailerLog, generation_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from conftest import Open

    from lmkv_backend_disk.backend import FolderBackend
    from lmkv_backend_disk.trailers import Tail


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
    "noise behind": lambda root: rewrite(root / "trailers", lambda data: data + b"lmkvtrl2" + os.urandom(9000)),
    "noise before": lambda root: rewrite(root / "trailers", lambda data: b"lmkvtrl2" * 20 + data),
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


def scanned(backend: FolderBackend, monkeypatch: pytest.MonkeyPatch) -> tuple[list[StoredFrame], int]:
    """What a scan gives, and how many files it looked at beyond their names."""
    strays = 0
    parse = listing.parse

    def counted(namespace: bytes, name: str) -> ChunkKey | None:
        nonlocal strays
        strays += 1
        return parse(namespace, name)

    with monkeypatch.context() as patch:
        patch.setattr(listing, "parse", counted)
        return list(backend.scan()), strays


def test_a_scan_looks_only_at_files_that_the_log_does_not_know(
    open_disk: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = open_disk()
    for number in range(8):
        put(backend, number)
    backend.close()
    first = tmp_path / frame_path("store", make_key(0))
    first.with_suffix(".copy").write_bytes(first.read_bytes())
    first.with_suffix(".copy").rename(first)  # another inode
    (tmp_path / frame_path("store", make_key(1))).unlink()
    backend = open_disk()
    frames, strays = scanned(backend, monkeypatch)
    assert {f.key: f.trailer for f in frames} == {
        make_key(n): make_payload(n, FRAME)[-4096:] for n in (0, *range(2, 8))
    }
    assert strays == 1
    assert scanned(backend, monkeypatch) == (frames, 0)
    (tmp_path / "store" / "trailers").unlink()
    again, strays = scanned(backend, monkeypatch)
    assert strays == 7
    assert {f[:3] for f in again} == {f[:3] for f in frames}


class Elsewhere:
    """An entry of a folder, listed with another inode than its file has."""

    def __init__(self, entry: os.DirEntry[str]) -> None:
        self.name, self.is_file, self.stat = entry.name, entry.is_file, entry.stat
        self.inode = lambda: entry.inode() + (1 << 40)


@pytest.mark.parametrize("io", ["threads"])
def test_inodes_that_are_listed_otherwise_cost_a_stat_only(open_disk: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stacked file systems do so."""
    backend = open_disk()
    for number in range(4):
        put(backend, number)
    opened: list[ChunkKey] = []
    scandir, tail = os.scandir, listing._tail

    @contextlib.contextmanager
    def stacked(folder: int) -> Iterator[Iterator[Elsewhere]]:
        with scandir(folder) as entries:
            yield map(Elsewhere, entries)

    def watched(root: str, key: ChunkKey, nbytes: int) -> bytes | None:
        opened.append(key)
        return tail(root, key, nbytes)

    monkeypatch.setattr("lmkv_backend_disk.listing.os.scandir", stacked)
    monkeypatch.setattr(listing, "_tail", watched)
    frames, strays = scanned(backend, monkeypatch)
    assert (strays, opened) == (4, [])
    assert {f.key: f.trailer for f in frames} == {make_key(n): make_payload(n, FRAME)[-4096:] for n in range(4)}


@pytest.mark.parametrize("io", ["threads"])
@pytest.mark.parametrize("log", ["kept", "lost", "killed"])
def test_the_order_of_use_survives(open_disk: Open, tmp_path: Path, log: str) -> None:
    """Of all uses after an orderly end, and where the files' times have to do; of those a minute old after a kill."""
    backend = open_disk()
    for number in range(6):
        put(backend, number)
        time.sleep(0.02)
    for number in (4, 0, 2, 0):  # all but the first are written later
        backend.touch([make_key(number), make_key(77)])
        time.sleep(0.02)
    if log == "killed":
        backend.folder.trailers.reopen()  # forgets what was not written
    backend.close()
    if log == "lost":
        for path in (tmp_path / "store").glob("trailers*"):
            path.unlink()
    for _ in range(2):
        backend = open_disk()
        order = [0, 1, 2, 3, 5, 4] if log == "killed" else [1, 3, 5, 4, 2, 0]
        assert [frame.key for frame in backend.scan()] == [make_key(n) for n in order]
        backend.close()


@pytest.mark.parametrize("io", ["threads"])
def test_uses_survive_compaction_and_are_few(open_disk: Open, tmp_path: Path) -> None:
    log, uses = tmp_path / "store" / "trailers", tmp_path / "store" / "trailers.uses"
    backend = open_disk()
    for _ in range(50):
        for number in range(3):
            put(backend, number)
    backend.touch([make_key(1)])
    size = uses.stat().st_size
    for _ in range(200):
        backend.touch([make_key(0)])
    assert uses.stat().st_size == size, "within a minute none is written again"
    order = [make_key(n) for n in (2, 1, 0)]
    before = log.stat().st_size
    assert [frame.key for frame in backend.scan()] == order
    assert log.stat().st_size < before / 10
    assert not uses.exists(), "each record has its last use in itself"
    assert [frame.key for frame in backend.scan()] == order
    put(backend, 1)
    assert [frame.key for frame in backend.scan()] == [make_key(n) for n in (2, 0, 1)]


@pytest.mark.parametrize("io", ["threads"])
def test_a_file_changed_in_place_is_found_by_its_load(open_disk: Open, tmp_path: Path) -> None:
    """The scan lists it as it was, and does not look at its length. What is read does not verify."""
    backend = open_disk()
    nbytes = frame_bytes(FRAME, 0)
    frame = make_memory(nbytes)
    frame.view[:FRAME] = make_payload(1, FRAME)
    seal(frame.view, Trailer(make_key(1), b"", 1, (), "identity", FRAME, FRAME))
    assert backend.put([make_key(1)], [frame])[0].ok
    os.truncate(tmp_path / frame_path("store", make_key(1)), nbytes - 4096)
    (stored,) = backend.scan()
    assert stored.nbytes == nbytes
    target = make_memory(nbytes)
    (outcome,) = backend.get([make_key(1)], [target])
    assert outcome.nbytes == nbytes - 4096
    with pytest.raises(FrameError):
        verify(target.view[: outcome.nbytes], make_key(1))


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


def test_the_trailer_log_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert GENERATION_BYTES <= 1 << 28
    assert [generation_bytes(c) for c in (None, 1 << 50, 1 << 30, 100)] == [
        GENERATION_BYTES,
        GENERATION_BYTES,
        1 << 23,
        0,
    ]
    log = TrailerLog(str(tmp_path), limit=1 << 16)
    tails = [(n + 1, StoredFrame(make_key(n), FRAME, make_payload(n, 1096), n)) for n in range(300)]

    def check(*, least: int) -> None:
        assert sum(path.stat().st_size for path in tmp_path.iterdir()) <= 2 << 16
        known = [tail for names in log.read()[0].values() for tail in names.values()]
        assert len(known) > least
        assert sorted(known, key=itemgetter(0)) == tails[-len(known) :]

    for tail in tails:
        log.append([tail])
    check(least=50)
    log.append(tails[-40:])
    check(least=39)
    big = make_payload(0, 1 << 16)
    log.append((inode, frame._replace(trailer=big)) for inode, frame in tails)  # no record of these has room
    check(least=39)
    log.rewrite(tails[-50:])
    check(least=49)
    monkeypatch.setattr("lmkv_backend_disk.trailers.USE_SECONDS", 0.0)
    for _ in range(20):
        for _, frame in tails:
            log.use([frame.key])
    uses = list(tmp_path.glob("trailers.uses*"))
    assert len(uses) == 2
    assert sum(path.stat().st_size for path in uses) <= 2 << 12
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) <= 2 << 16
    known = [tail for names in log.read()[0].values() for tail in names.values()]
    assert [frame[:3] for _, frame in known] == [frame[:3] for _, frame in tails[-50:]], "uses drive out no trailer"
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

    def watched(place: tuple[bytes, str, dict[str, Tail]]) -> object:
        seen.append(threading.get_ident())
        if cold:
            time.sleep(0.02)
        return work(place)

    monkeypatch.setattr(listing, "_list", watched)
    monkeypatch.setattr(listing, "PATIENCE", 0.1 if cold else 60.0)  # a machine may be too busy to list anything
    assert {frame.key for frame in backend.scan()} == set(keys)
    assert seen[0] == threading.get_ident()
    assert (len(set(seen)) > 2) == cold
