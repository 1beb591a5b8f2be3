"""A real server and a place on it for each test."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Protocol

from s3_rig import make_bucket

if TYPE_CHECKING:
    from fake_s3 import FakeS3
    from s3_rig import S3Server

    from lmkv_backend_s3.backend import S3Backend

_prefixes = itertools.count()


class Open(Protocol):
    def __call__(self, server: Place | FakeS3, *, deadline: float = 30.0, **options: object) -> S3Backend: ...


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
