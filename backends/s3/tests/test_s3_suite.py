from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import pytest
from botocore.exceptions import ClientError
from s3_rig import client

from lmkv.specs import BackendContext
from lmkv.testing import BackendSuite
from lmkv_backend_s3.backend import S3Backend
from lmkv_backend_s3.names import Names
from lmkv_backend_s3.options import S3Options

if TYPE_CHECKING:
    from collections.abc import Callable

    from s3_place import Place

    from lmkv.backend import StorageBackendInterface
    from lmkv.types import ChunkKey

PARTS = {"multipart_size": "32KiB", "part_size": "5MiB", "range_size": "32KiB", "connections": 4}


class S3Suite(BackendSuite):
    where: ClassVar[str]
    more: ClassVar[dict[str, Any]] = {}
    scale = 100

    @pytest.fixture
    def make_backend(self, request: pytest.FixtureRequest) -> Callable[[], StorageBackendInterface]:
        self.place: Place = request.getfixturevalue(self.where)
        self.options = S3Options.model_validate(self.place.options(**self.more))
        return lambda: S3Backend(self.options, BackendContext(tier="far", deadline=60.0))

    def read_back(self, key: ChunkKey) -> bytes | None:
        s3 = client(self.place.server)
        try:
            name = Names(self.options.prefix).frame(key)
            body: bytes = s3.get_object(Bucket=self.options.bucket, Key=name)["Body"].read()
        except ClientError:
            return None
        finally:
            s3.close()
        return body


class TestJuice(S3Suite):
    where = "juice"


class TestJuiceInParts(S3Suite):
    """Ranges only of frames above those that the kit replaces under readers.

    When an object is being replaced this gateway sends bytes of the new one under the ETag of the old one: it looks at
    the file, then opens it. One GET gives one of them whole, several may not, and nothing in their answers tells. The
    checksum of the frame does.
    """

    where = "juice"
    more: ClassVar[dict[str, Any]] = {**PARTS, "range_size": "96KiB"}
    sizes = (1, 32767, 32768, 100_000, 1 << 20, (11 << 20) + 1)


@pytest.mark.slow
class TestMoto(S3Suite):
    where = "moto"


@pytest.mark.slow
class TestMotoInParts(S3Suite):
    where = "moto"
    more = PARTS
    sizes = (1, 32767, 32768, 100_000, 1 << 20, (11 << 20) + 1)
