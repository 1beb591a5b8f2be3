"""Real S3 servers for tests.

    with JuiceGateway(tmp_path) as server:
        bucket = make_bucket(server)

`JuiceGateway` is a MinIO front end: it checks signatures. `Moto` has the widest API, and checks none.
"""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
import tempfile
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from typing import TYPE_CHECKING, Any

from server_rig import HOST, ROOT, Server, free_port, program

if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Self

REGION = "us-east-1"
_numbers = itertools.count()


class S3Server(Server):
    """Something that speaks S3 at `endpoint`."""

    access_key = "lmkv-tests"
    secret_key = "only-for-the-loopback"

    @property
    def endpoint(self) -> str:
        """The address for `endpoint_url`."""
        return f"http://{HOST}:{self.port}"

    def answers(self) -> bool:
        """Any HTTP answer."""
        connection = HTTPConnection(HOST, self.port, timeout=2.0)
        try:
            connection.request("GET", self.alive_at)
            return connection.getresponse().status < 500
        except HTTPException:
            return False
        finally:
            connection.close()

    alive_at = "/"


class JuiceGateway(S3Server):
    """The JuiceFS gateway over a folder: real signatures, real errors.

    Its gaps: `If-None-Match` on PUT is ignored, user metadata dropped, DeleteObjects wants Content-MD5, trailing
    checksums (aws-chunked) are rejected.
    """

    alive_at = "/minio/health/live"

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, free_port())
        self._metrics = free_port()

    def command(self) -> list[str | Path]:
        """The gateway, which reports to nobody."""
        quiet = ["--no-usage-report", "--no-banner", "--no-bgjob", "--multi-buckets", "--keep-etag"]
        cache = ["--cache-dir", "memory", "--cache-size", "0", "--metrics", f"{HOST}:{self._metrics}"]
        log = ["--log", self.folder / "gateway.log"]
        return [self._binary, "gateway", *quiet, *cache, *log, self._meta, f"{HOST}:{self.port}"]

    def environ(self) -> Mapping[str, str]:
        """The keys."""
        return {"MINIO_ROOT_USER": self.access_key, "MINIO_ROOT_PASSWORD": self.secret_key}

    def start(self) -> Self:
        """Format the folder the first time."""
        if not (self.folder / "meta.db").exists():
            keep = ["--storage", "file", "--bucket", f"{self.folder / 'data'}/", "--trash-days", "0"]
            subprocess.run(
                [self._binary, "format", *keep, "--block-size", "32M", "--compress", "none", self._meta, "lmkv"],
                capture_output=True,
                check=True,
                timeout=60,
            )
        return super().start()

    @property
    def _binary(self) -> Path:
        return program("juicefs", Path(sys.executable).parent, ROOT / ".venv" / "bin")

    @property
    def _meta(self) -> str:
        return f"sqlite3://{self.folder / 'meta.db'}"


class Moto(S3Server):
    """moto in server mode, in a process of its own; keeps everything in memory and accepts every signature."""

    alive_at = "/moto-api/"

    def __init__(self, folder: Path | None = None) -> None:
        super().__init__(folder or Path(tempfile.mkdtemp(prefix="lmkv-moto-")), free_port())

    def command(self) -> list[str | Path]:
        """With this Python."""
        return [sys.executable, "-m", "moto.server", "-H", HOST, "-p", str(self.port)]

    def environ(self) -> Mapping[str, str]:
        """Nothing of the test's own Python."""
        return {"PYTHONPATH": "", "PYTHONWARNINGS": "ignore"}


def client(server: S3Server, **settings: Any) -> Any:
    """A plain boto3 client: the back door."""
    import boto3
    from botocore.config import Config

    return boto3.client(
        "s3",
        endpoint_url=server.endpoint,
        region_name=REGION,
        aws_access_key_id=server.access_key,
        aws_secret_access_key=server.secret_key,
        config=Config(
            s3={"addressing_style": "path"},
            request_checksum_calculation="when_required",
            response_checksum_validation="when_required",
            **settings,
        ),
    )


def make_bucket(server: S3Server, name: str | None = None) -> str:
    """A new bucket; its name."""
    name = name or f"lmkv-{os.getpid()}-{next(_numbers)}"
    made = client(server)
    try:
        made.create_bucket(Bucket=name)
    finally:
        made.close()
    return name
