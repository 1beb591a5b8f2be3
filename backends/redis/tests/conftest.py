"""What the tests of this backend share: a server, backends on it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

import pytest
from redis_rig import RedisServer

from lmkv.specs import BackendContext
from lmkv_backend_redis.backend import RedisBackend
from lmkv_backend_redis.options import RedisOptions

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


class Open(Protocol):
    """Makes a backend, which is closed at the end."""

    def __call__(self, *, deadline: float = ..., **options: Any) -> RedisBackend: ...


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RedisServer]:
    with RedisServer(tmp_path / "redis") as made:
        yield made


@pytest.fixture
def open_redis() -> Iterator[Open]:
    made: list[RedisBackend] = []

    def make(*, deadline: float = 20.0, **options: Any) -> RedisBackend:
        chosen = RedisOptions.model_validate({"part_bytes": 16384, **options})
        made.append(RedisBackend(chosen, BackendContext(tier="far", deadline=deadline)))
        return made[-1]

    yield make
    for backend in made:
        backend.close()
