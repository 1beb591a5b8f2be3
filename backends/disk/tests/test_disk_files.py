"""Names, damage, ownership, housekeeping."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from disk_rig import FRAME, files, put

from lmkv.errors import BackendError, ConfigError, FrameError
from lmkv.frame import Trailer, frame_bytes, seal, verify
from lmkv.keys import Namespace
from lmkv.memory import MemoryObject
from lmkv.testing import make_key, make_memory, make_payload
from lmkv.types import ChunkKey
from lmkv_backend_disk.folder import DAMAGED_KEPT
from lmkv_backend_disk.names import frame_path

if TYPE_CHECKING:
    from collections.abc import Callable

    from conftest import Open


# --- A5 --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", ["org/model/name", "org/model-SEP-name", "org%2Fmodel/name", "x" * 300, "modèle/имя", "../..", "", "a\0b"]
)
def test_a05_file_names(open_disk: Open, tmp_path: Path, name: str) -> None:
    layout = {"name": "t", "dtype": "u8", "page_tokens": 16, "runs": [16], "tags": []}
    namespace = Namespace(name, "r", "u8", (layout,), (16,), 16, 16)  # type: ignore[arg-type]
    key = ChunkKey(namespace.id, 0, make_key(1).digest)
    backend = open_disk()
    backend.describe(namespace.id, namespace.json())
    assert backend.put([key], [make_memory(make_payload(1, FRAME))])[0].ok
    target = make_memory(FRAME)
    assert backend.get([key], [target])[0].ok
    assert bytes(target.view) == make_payload(1, FRAME)
    described = tmp_path / "store" / "frames" / namespace.id.hex() / "namespace.json"
    assert Namespace.from_json(described.read_text()).model == name
    for path in files(tmp_path):
        assert path.resolve().is_relative_to(tmp_path / "store")
        assert all(len(os.fsencode(part)) <= 255 for part in path.relative_to(tmp_path).parts)


# --- A21 -------------------------------------------------------------------------------------------------------------


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


DAMAGE: dict[str, Callable[[Path], None]] = {
    "footer byte": lambda path: flip(path, -30),
    "first payload byte": lambda path: flip(path, 0),
    "payload byte": lambda path: flip(path, 5000),
    "cut one byte": lambda path: os.truncate(path, path.stat().st_size - 1),
    "cut one page": lambda path: os.truncate(path, path.stat().st_size - 4096),
    "empty": lambda path: os.truncate(path, 0),
    "one byte extra": lambda path: path.write_bytes(path.read_bytes() + b"x") and None,
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a21_damaged_file(open_disk: Open, tmp_path: Path, damage: str) -> None:
    backend = open_disk()
    keys = [make_key(n) for n in range(3)]
    nbytes = frame_bytes(FRAME, 0)
    frames = [make_memory(nbytes) for _ in keys]
    for number, (key, frame) in enumerate(zip(keys, frames, strict=True)):
        frame.view[:FRAME] = make_payload(number, FRAME)
        seal(frame.view, Trailer(key, b"", 1, (), "identity", FRAME, FRAME))
    assert all(o.ok for o in backend.put(keys, frames))
    DAMAGE[damage](tmp_path / frame_path("store", keys[1]))

    targets = [make_memory(nbytes) for _ in keys]
    outcomes = list(backend.get(keys, targets))
    for number in (0, 2):
        assert outcomes[number].ok
        verify(targets[number].view, keys[number])
        assert bytes(targets[number].view[:FRAME]) == make_payload(number, FRAME)
    if outcomes[1].ok:
        with pytest.raises(FrameError):
            verify(targets[1].view[: outcomes[1].nbytes], keys[1])
    else:
        assert isinstance(outcomes[1].error, FrameError)

    backend.set_aside(keys[1:2])
    assert list(backend.contains(keys)) == [True, False, True]
    assert len(files(tmp_path / "store" / "damaged")) == 1
    assert {frame.key for frame in backend.scan()} == {keys[0], keys[2]}


def test_only_a_few_damaged_frames_are_kept(open_disk: Open, tmp_path: Path) -> None:
    backend = open_disk()
    for number in range(DAMAGED_KEPT + 3):
        put(backend, number)
        backend.set_aside([make_key(number)])
    kept = [path.name for path in files(tmp_path / "store" / "damaged")]
    assert [name.split("-")[2] for name in kept] == [
        f"{make_key(n).digest.hex()}.0" for n in range(3, DAMAGED_KEPT + 3)
    ]


# --- ownership, durability, housekeeping -----------------------------------------------------------------------------


def test_one_owner(open_disk: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lmkv_backend_disk.folder.HANDOVER_SECONDS", 0.2)
    code = (
        "import sys, time; from lmkv_backend_disk.backend import create; from lmkv.specs import BackendContext;"
        "from lmkv_backend_disk.options import DiskOptions;"
        "b = create(DiskOptions(path=sys.argv[1]), BackendContext(tier='disk'));"
        "print('owner', flush=True); time.sleep(60)"
    )
    root = tmp_path / "store"
    with subprocess.Popen([sys.executable, "-c", code, str(root)], stdout=subprocess.PIPE) as owner:
        assert owner.stdout is not None
        assert owner.stdout.readline() == b"owner\n"
        leftover = root / "temp" / "1-1.part"
        leftover.write_text("the owner is writing this")
        with pytest.raises(ConfigError, match=rf"{root} is owned by process {owner.pid}") as caught:
            open_disk()
        assert caught.value.kind == "in-use"
        assert leftover.exists()
        owner.kill()
    backend = open_disk()
    assert not leftover.exists()
    assert (root / "lock").read_text() == f"{os.getpid()}\n"
    put(backend, 1)


def test_taken_over_from_one_that_is_closing(open_disk: Open, caplog: pytest.LogCaptureFixture) -> None:
    """An engine is started with an edited stack while the service of the stack before still writes what it owes."""
    before = open_disk()
    put(before, 1)
    ends = threading.Timer(0.5, before.close)
    ends.start()
    try:
        after = open_disk()
    finally:
        ends.join()
    assert list(after.contains([make_key(1)])) == [True]
    waiting = [record for record in caplog.records if "waiting for it to end" in record.getMessage()]
    assert len(waiting) == 1
    assert str(os.getpid()) in waiting[0].getMessage()


def test_fsync_publish_flushes_before_and_after_the_rename(open_disk: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []
    for name in ("fdatasync", "replace", "fsync"):
        real = getattr(os, name)
        monkeypatch.setattr(os, name, lambda *a, name=name, real=real: order.append(name) or real(*a))
    put(open_disk(fsync="publish"), 1)
    assert order[:2] == ["fdatasync", "replace"]
    assert set(order[2:]) <= {"replace", "fsync"}  # the first frame of a folder: renamed again when it has been made
    assert order[-1] == "fsync"


def test_fsync_publish_flushes_a_folder_that_was_there(open_disk: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    backend = open_disk(fsync="publish")
    put(backend, 1)
    flushed: list[str] = []
    real = os.fsync
    monkeypatch.setattr(os, "fsync", lambda fd: flushed.append(str(Path(f"/proc/self/fd/{fd}").readlink())) or real(fd))
    put(backend, 1)
    leaf = Path(frame_path("store", make_key(1))).parent
    assert [path for path in flushed if path.endswith(f"/{leaf}")]


def test_foreign_files_are_left_alone(open_disk: Open, tmp_path: Path) -> None:
    backend = open_disk()
    put(backend, 1)
    leaf = (tmp_path / frame_path("store", make_key(1))).parent
    strangers = [tmp_path / "store" / "temp" / "notes.txt", leaf / "README", leaf.parent / "zz", leaf / "ab.0"]
    for path in strangers:
        path.write_text("mine")
    backend.close()
    backend = open_disk()
    assert [frame.key for frame in backend.scan()] == [make_key(1)]
    backend.clear()
    assert list(backend.scan()) == []
    assert all(path.read_text() == "mine" for path in strangers)


def test_description_survives_a_clear(open_disk: Open, tmp_path: Path) -> None:
    backend = open_disk()
    key = make_key(1)
    backend.describe(key.namespace, json.dumps({"model": "a/b"}))
    put(backend, 1)
    backend.clear(key.namespace)
    backend.clear()
    path = tmp_path / "store" / "frames" / key.namespace.hex() / "namespace.json"
    assert json.loads(path.read_text()) == {"model": "a/b"}


def test_files_are_private(open_disk: Open, tmp_path: Path) -> None:
    put(open_disk(), 1)
    assert all(path.stat().st_mode & 0o077 == 0 for path in files(tmp_path / "store") if path.name != "namespace.json")
    assert (tmp_path / "store").stat().st_mode & 0o077 == 0


def test_memory_object_is_not_kept_after_an_error(open_disk: Open, tmp_path: Path) -> None:
    backend = open_disk()
    shutil.rmtree(tmp_path / "store")
    buffer = bytearray(FRAME)
    memory = MemoryObject.over(buffer)
    with pytest.raises(BackendError):
        backend.put([make_key(1), make_key(2)], [memory, memory])
    assert memory.count == 1
