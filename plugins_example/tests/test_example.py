from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from lmkv.errors import ConfigError
from lmkv.specs import BackendContext
from lmkv.testing import BackendSuite, make_key, make_memory
from lmkv_backend_example.backend import ExampleBackend
from lmkv_backend_example.options import ExampleOptions

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from lmkv.types import ChunkKey


class TestExample(BackendSuite):
    @pytest.fixture
    def make_backend(self, tmp_path: Path) -> Callable[[], ExampleBackend]:
        self.folder = tmp_path
        return lambda: ExampleBackend(ExampleOptions(path=tmp_path), BackendContext(tier="mine"))

    def read_back(self, key: ChunkKey) -> bytes | None:
        (path,) = self.folder.glob(f"*{key.digest.hex()}*")
        return path.read_bytes()


def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"{tmp_path}/none is no folder"):
        ExampleBackend(ExampleOptions(path=tmp_path / "none"), BackendContext(tier="mine"))


def test_what_a_killed_process_left_is_cleared(tmp_path: Path) -> None:
    (tmp_path / "x.0.part").write_text("half")
    backend = ExampleBackend(ExampleOptions(path=tmp_path), BackendContext(tier="mine"))
    assert list(tmp_path.iterdir()) == []
    assert backend.put([make_key(1)], [make_memory(4096)])[0].ok
    backend.close()
