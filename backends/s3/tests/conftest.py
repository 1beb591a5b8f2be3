from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Protocol

import pytest
from fake_s3 import FakeS3
from s3_rig import JuiceGateway, Moto, make_bucket

from lmkv.specs import BackendContext
from lmkv_backend_s3.backend import S3Backend
from lmkv_backend_s3.options import S3Options

if TYPE_CHECKING:
    from collections.abc import Iterator

    from s3_rig import S3Server

_prefixes = itertools.count()


class Open(Protocol):
    def __call__(self, server: S3Server | FakeS3, *, deadline: float = 30.0, **options: object) -> S3Backend: ...


class Place:
    """A server, with a bucket for all tests and a prefix for each."""

    def __init__(self, server: S3Server) -> None:
        self.server = server
        self.bucket = make_bucket(server)

    def options(self, **more: object) -> dict[str, object]:
        return {
            "endpoint": self.server.endpoint,
            "bucket": self.bucket,
            "prefix": f"test-{next(_prefixes)}/",
            "access_key": self.server.access_key,
            "secret_key": self.server.secret_key,
            **more,
        }


@pytest.fixture(scope="session")
def juice(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    with JuiceGateway(tmp_path_factory.mktemp("juice")) as server:
        yield Place(server)


@pytest.fixture(scope="session")
def moto(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    with Moto(tmp_path_factory.mktemp("moto")) as server:
        yield Place(server)


@pytest.fixture(params=["juice", "moto"])
def place(request: pytest.FixtureRequest) -> Place:
    found: Place = request.getfixturevalue(request.param)
    return found


@pytest.fixture
def fake() -> Iterator[FakeS3]:
    with FakeS3() as server:
        yield server


@pytest.fixture
def open_s3() -> Iterator[Open]:
    made: list[S3Backend] = []

    def make(server: Place | FakeS3, *, deadline: float = 30.0, **options: object) -> S3Backend:
        model = S3Options.model_validate(server.options(**options))
        made.append(S3Backend(model, BackendContext(tier="far", deadline=deadline)))
        return made[-1]

    yield make
    for backend in made:
        backend.close()
