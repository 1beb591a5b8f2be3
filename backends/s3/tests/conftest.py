from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from fake_s3 import FakeS3
from s3_place import Place
from s3_rig import JuiceGateway, Moto

from lmkv.specs import BackendContext
from lmkv_backend_s3.backend import S3Backend
from lmkv_backend_s3.options import S3Options

if TYPE_CHECKING:
    from collections.abc import Iterator

    from s3_place import Open


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
