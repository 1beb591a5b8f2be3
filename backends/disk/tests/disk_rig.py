"""What the disk backend's tests do again and again."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lmkv.testing import make_key, make_memory, make_payload
from lmkv.types import OutcomeKind

if TYPE_CHECKING:
    from pathlib import Path

    from lmkv_backend_disk.backend import FolderBackend

FRAME = 16384


def put(backend: FolderBackend, number: int, nbytes: int = FRAME) -> None:
    (outcome,) = backend.put([make_key(number)], [make_memory(make_payload(number, nbytes))])
    assert outcome.ok, outcome


def get(backend: FolderBackend, number: int, nbytes: int = FRAME) -> bool:
    memory = make_memory(nbytes)
    (outcome,) = backend.get([make_key(number)], [memory])
    assert outcome.kind in {OutcomeKind.OK, OutcomeKind.MISS}, outcome
    assert not outcome.ok or bytes(memory.view) == make_payload(number, nbytes)
    return outcome.ok


def files(root: Path) -> list[Path]:
    return sorted(path for path in root.rglob("*") if path.is_file())
