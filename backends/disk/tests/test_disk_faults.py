"""Full, read-only, missing, vanished."""

from __future__ import annotations

import errno
import os
import resource
import shutil
import subprocess
from typing import TYPE_CHECKING

import pytest
from disk_rig import FRAME, files, get, put

from lmkv.errors import BackendError, ConfigError
from lmkv.specs import BackendContext
from lmkv.testing import FaultyBackend, make_key, make_memory, make_payload, no_space
from lmkv.types import HealthState, OutcomeKind
from lmkv_backend_disk.folder import DiskError
from lmkv_backend_disk.options import DiskOptions

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from conftest import Open

    from lmkv_backend_disk.backend import FolderBackend

# --- A23 -------------------------------------------------------------------------------------------------------------


def test_a23_no_space(open_disk: Open, tmp_path: Path, mount: Callable[..., None]) -> None:
    root = tmp_path / "small"
    mount(root, "size=256k")
    backend = open_disk(root)
    numbers = range(40)
    outcomes = backend.put([make_key(n) for n in numbers], [make_memory(make_payload(n, FRAME)) for n in numbers])
    stored = [n for n, o in zip(numbers, outcomes, strict=True) if o.ok]
    failed = [o.error for o in outcomes if not o.ok]
    assert 0 < len(stored) < len(numbers)
    for error in failed:
        assert isinstance(error, DiskError)
        assert (error.kind, error.errno, error.operation) == ("no-space", errno.ENOSPC, "put")
        assert f"[Errno {errno.ENOSPC}]" in str(error)
        assert str(root) in str(error)
    assert all(get(backend, n) == (n in stored) for n in numbers)
    assert files(root / "temp") == []
    assert sorted(f.key for f in backend.scan()) == sorted(make_key(n) for n in stored)
    backend.delete([make_key(n) for n in stored[:4]])
    put(backend, 99)
    assert get(backend, 99)


def test_a23_a_full_disk_keeps_the_old_frame(open_disk: Open, tmp_path: Path) -> None:
    backend = open_disk()
    put(backend, 1)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (FRAME + 4096, before[1]))
    try:
        memory = [make_memory(make_payload(7, size)) for size in (4 * FRAME, FRAME)]
        outcomes = list(backend.put([make_key(1), make_key(2)], memory))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert [o.kind for o in outcomes] == [OutcomeKind.FAILED, OutcomeKind.OK]
    assert isinstance(outcomes[0].error, DiskError)
    assert outcomes[0].error.kind == "no-space"
    assert get(backend, 1)
    assert files(tmp_path / "store" / "temp") == []


def test_a23_three_times_no_space_then_well(open_disk: Open) -> None:
    backend = FaultyBackend(open_disk())
    backend.script("put", no_space(), times=3)
    kinds = [backend.put([make_key(1)], [make_memory(make_payload(1, FRAME))])[0].kind for _ in range(4)]
    assert kinds == [OutcomeKind.FAILED] * 3 + [OutcomeKind.OK]
    assert get(backend, 1)  # type: ignore[arg-type]


# --- A25 -------------------------------------------------------------------------------------------------------------


def faults(path: Path, capacity: int | None = None, **options: object) -> list[str]:
    model = DiskOptions.model_validate({"path": path, **options})
    return model.check(BackendContext(tier="disk", capacity=capacity))


def test_a25_missing_parent(open_disk: Open, tmp_path: Path) -> None:
    path = tmp_path / "no" / "such" / "place"
    (fault,) = faults(path)
    assert str(path.parent) in fault
    with pytest.raises(ConfigError, match=rf"{path} cannot be used: \[Errno {errno.ENOENT}\]"):
        open_disk(path)
    assert list(tmp_path.iterdir()) == []
    assert faults(path, create_parents=True) == []
    assert list(tmp_path.iterdir()) == []
    put(open_disk(path, create_parents=True), 1)


def test_a25_path_is_a_file(open_disk: Open, tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("mine")
    for place in (path, path / "below"):
        assert "no directory" in faults(place)[0]
        with pytest.raises(ConfigError, match=rf"{place} cannot be used: \[Errno {errno.ENOTDIR}\]"):
            open_disk(place)
    assert path.read_text() == "mine"


def test_a25_read_only_folder(open_disk: Open, tmp_path: Path, mount: Callable[..., None]) -> None:
    root = tmp_path / "fixed"
    mount(root, "size=1m,ro")
    assert f"{root} is not writable" in faults(root)[0]
    with pytest.raises(ConfigError, match=rf"{root} cannot be used: \[Errno {errno.EROFS}\]"):
        open_disk(root)


def test_relative_path_is_refused() -> None:
    with pytest.raises(ValueError, match="relative"):
        DiskOptions.model_validate({"path": "cache"})
    with pytest.raises(ValueError, match="size"):
        DiskOptions.model_validate({"path": "/tmp", "size": "1GiB"})


def test_capacity_above_the_free_space_is_a_fault(open_disk: Open, tmp_path: Path, mount: Callable[..., None]) -> None:
    root = tmp_path / "small"
    mount(root, "size=1m")
    assert faults(root, capacity=1 << 19) == []
    assert "room for 0.00 GiB" in faults(root, capacity=1 << 30)[0]
    backend = open_disk(root)
    for number in range(48):
        put(backend, number)  # 768 KiB of it are ours already
    assert faults(root, capacity=800 * 1024) == []


# --- it goes, and comes back -----------------------------------------------------------------------------------------


def check_gone(backend: FolderBackend, root: Path) -> None:
    memory = make_memory(FRAME)
    for call in (
        lambda: backend.get([make_key(1)], [memory]),
        lambda: backend.put([make_key(2)], [memory]),
        lambda: backend.contains([make_key(1)]),
        lambda: backend.delete([make_key(1)]),
        backend.scan,
        backend.clear,
    ):
        with pytest.raises(BackendError, match=rf"{root}: \[Errno "):
            call()
    backend.touch([make_key(1)])
    health = backend.health()
    assert health.state is HealthState.DOWN
    assert str(root) in health.detail
    assert "Errno" in health.detail


def test_vanished_directory_comes_back(open_disk: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = tmp_path / "store"
    backend = open_disk()
    put(backend, 1)
    away = tmp_path / "away"
    root.rename(away)
    check_gone(backend, root)
    away.rename(root)
    assert get(backend, 1)
    shutil.rmtree(root)
    check_gone(backend, root)
    assert not root.exists()
    root.mkdir()
    assert not get(backend, 1)
    assert backend.health().state is HealthState.OK
    put(backend, 1)
    assert get(backend, 1)
    monkeypatch.setattr("lmkv_backend_disk.folder.HANDOVER_SECONDS", 0.1)
    with pytest.raises(ConfigError, match=f"owned by process {os.getpid()}"):
        open_disk()  # it was taken again
    backend.close()
    assert [frame.key for frame in open_disk().scan()] == [make_key(1)]


def test_unmounted_disk_comes_back(open_disk: Open, tmp_path: Path, mount: Callable[..., None]) -> None:
    root = tmp_path / "disk"
    mount(root, "size=1m")
    backend = open_disk(root)
    put(backend, 1)
    subprocess.run(["umount", "-l", str(root)], check=True)
    check_gone(backend, root)
    assert list(root.iterdir()) == []  # the bare mount point is somebody else's disk
    mount(root, "size=1m")
    assert not get(backend, 1)
    put(backend, 1)
    assert get(backend, 1)


def test_read_only_remount(open_disk: Open, tmp_path: Path, mount: Callable[..., None]) -> None:
    root = tmp_path / "disk"
    mount(root, "size=1m")
    backend = open_disk(root)
    put(backend, 1)
    backend.folder.close()  # a file open for writing forbids the remount; take the lock again when it is writable
    backend = open_disk(root)
    os.close(backend.folder._lock_fd)
    subprocess.run(["mount", "-o", "remount,ro", str(root)], check=True)
    backend.folder._lock_fd = os.open(root / "lock", os.O_RDONLY)
    with pytest.raises(DiskError, match=rf"\[Errno {errno.EROFS}\]") as caught:
        backend.put([make_key(2)], [make_memory(FRAME)])
    assert caught.value.kind == "read-only"
    assert get(backend, 1)
    assert backend.health().state is HealthState.DEGRADED
    subprocess.run(["mount", "-o", "remount,rw", str(root)], check=True)
    put(backend, 2)
    assert backend.health().state is HealthState.OK
