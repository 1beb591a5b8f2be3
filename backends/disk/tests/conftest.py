from __future__ import annotations

import os
import subprocess
from typing import TYPE_CHECKING, Protocol

import pytest

from lmkv.specs import BackendContext
from lmkv_backend_disk.backend import create
from lmkv_backend_disk.options import DiskOptions

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from lmkv_backend_disk.backend import FolderBackend


class Open(Protocol):
    def __call__(self, path: Path | None = None, **options: object) -> FolderBackend: ...


@pytest.fixture(params=["threads", "aiofiles"])
def io(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def open_disk(tmp_path: Path, io: str) -> Iterator[Open]:
    made: list[FolderBackend] = []

    def make(path: Path | None = None, **options: object) -> FolderBackend:
        model = DiskOptions.model_validate({"path": path or tmp_path / "store", "io": io, **options})
        backend = create(model, BackendContext(tier="disk"))
        made.append(backend)
        return made[-1]

    yield make
    for backend in made:
        backend.close()


@pytest.fixture
def mount(tmp_path: Path) -> Iterator[Callable[..., None]]:
    """Mounts a tmpfs on a folder, with mount options; skips where that is not allowed."""
    mounted: list[Path] = []

    def make(folder: Path, options: str) -> None:
        folder.mkdir(exist_ok=True)
        command = ["mount", "-t", "tmpfs", "-o", options, "lmkv-test", str(folder)]
        try:
            subprocess.run(command, check=True, capture_output=True)
        except (OSError, subprocess.CalledProcessError) as e:
            pytest.skip(f"needs the right to mount a tmpfs (uid {os.getuid()}): {e}")
        mounted.append(folder)

    yield make
    for folder in mounted:
        subprocess.run(["umount", "-l", str(folder)], check=False, capture_output=True)
