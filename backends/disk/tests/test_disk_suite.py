from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from lmkv.specs import BackendContext
from lmkv.testing import BackendSuite
from lmkv_backend_disk.backend import create
from lmkv_backend_disk.names import frame_path
from lmkv_backend_disk.options import DiskOptions

if TYPE_CHECKING:
    from collections.abc import Callable

    from lmkv.backend import StorageBackendInterface
    from lmkv.types import ChunkKey


class DiskSuite(BackendSuite):
    io = "threads"
    fsync = "never"
    direct = "auto"

    @pytest.fixture
    def make_backend(self, tmp_path: Path) -> Callable[[], StorageBackendInterface]:
        self.root = tmp_path / "frames here"
        options = DiskOptions.model_validate(
            {"path": self.root, "io": self.io, "fsync": self.fsync, "direct": self.direct}
        )
        return lambda: create(options, BackendContext(tier="disk"))

    def read_back(self, key: ChunkKey) -> bytes | None:
        return Path(frame_path(str(self.root), key)).read_bytes()


class TestThreads(DiskSuite):
    pass


class TestAiofiles(DiskSuite):
    io = "aiofiles"
    fsync = "publish"


class TestBuffered(DiskSuite):
    direct = "off"
