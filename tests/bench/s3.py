"""The S3 tier with 32 MiB frames, sealed and verified, against what boto3 does best with the same server.

The recipes were chosen among several on these servers (docs/adr/0091): one GET for each frame, four at once, read by
`readinto` from the raw stream into memory that is there already; one PUT of the memory itself with an unsigned
payload, four at once. Ranges, more threads, `Body.read()`, signed payloads and multipart were all slower here.
"""

from __future__ import annotations

import asyncio
import io
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import boto3
from botocore.config import Config
from s3_rig import REGION, JuiceGateway, Moto, make_bucket
from tests.bench.frames import make_frames
from tests.bench.harness import Row, against, interleaved, seconds

from lmkv.codec.identity import IdentityCodec
from lmkv.observe.metrics import Metrics
from lmkv.specs import BackendContext
from lmkv.storage.driver import RUNNING, STORE
from lmkv.storage.inventory import TierSettings
from lmkv.storage.tier import Tier
from lmkv_backend_s3.backend import S3Backend
from lmkv_backend_s3.options import S3Options

if TYPE_CHECKING:
    from collections.abc import Callable

    from s3_rig import S3Server


PAYLOAD = 32 << 20
FRAMES = 8
PAGES = 16
THREADS = 4
PUT_ROUNDS, GET_ROUNDS = 15, 21
"""A neighbour's load moves single rounds by half: many of them."""
GIGABYTES = FRAMES * PAYLOAD / 1e9
HERE: dict[str, Any] = {"range_size": "64MiB", "sign_payload": "never", "addressing": "path"}
"""What suits a server on the same machine: one request moves a frame as fast as several, and there is no TLS."""


class Store:
    """A tier on a bucket, frames for it, and the recipes beside it."""

    def __init__(self, server: S3Server) -> None:
        self.bucket = make_bucket(server)
        where = {"bucket": self.bucket, "endpoint": server.endpoint, "region": REGION}
        keys = {"access_key": server.access_key, "secret_key": server.secret_key}
        options = S3Options.model_validate({**where, **keys, **HERE})
        backend = S3Backend(options, BackendContext(tier="s3", deadline=600.0))
        settings = TierSettings(name="s3", capacity=None, deadline=600.0, threads=THREADS, queue_bytes=1 << 40)
        self.tier = Tier(0, settings, backend, None, lambda _: IdentityCodec(), Metrics())
        self.boto = boto3.client(
            "s3",
            endpoint_url=server.endpoint,
            region_name=REGION,
            aws_access_key_id=server.access_key,
            aws_secret_access_key=server.secret_key,
            config=Config(
                s3={"addressing_style": "path", "payload_signing_enabled": False},
                request_checksum_calculation="when_required",
                response_checksum_validation="when_required",
                max_pool_connections=THREADS,
            ),
        )
        self.frames = make_frames(FRAMES, PAYLOAD, PAGES)
        _, self.trailers, self.objects = self.frames
        self.threads = ThreadPoolExecutor(THREADS)

    def close(self) -> None:
        """Of tier and client."""
        self.threads.shutdown()
        self.tier.close(5.0)
        self.boto.close()

    # --- ours ---

    def put(self, _: int) -> float:
        """Each frame by a call of its own, as stores come; sealed on the way. GB/s."""
        return GIGABYTES / seconds(lambda: asyncio.run(self._put()))

    async def _put(self) -> None:
        done = await asyncio.gather(*[self.tier.put([item], priority=STORE) for item in self.frames.unsealed()])
        assert all(outcomes[0].ok for outcomes in done), done

    def get(self, _: int) -> float:
        """Each frame by a call of its own, as loads of large frames are; verified. GB/s."""
        return GIGABYTES / seconds(lambda: asyncio.run(self._get()))

    async def _get(self) -> None:
        pairs = zip(self.trailers, self.objects, strict=True)
        done = await asyncio.gather(*[self.tier.get([t.key], [o], priority=RUNNING) for t, o in pairs])
        assert all(results[0].outcome.ok for results in done), done

    # --- boto3's ---

    def _write(self, number: int) -> None:
        with View(self.objects[number].view) as body:
            self.boto.put_object(Bucket=self.bucket, Key=f"boto/{number}", Body=body)

    def _read(self, number: int) -> None:
        view = self.objects[number].view
        body = self.boto.get_object(Bucket=self.bucket, Key=f"boto/{number}")["Body"]
        file = body._raw_stream._fp
        done = 0
        while done < len(view):
            count = file.readinto(view[done:])
            assert count, "cut short"
            done += count
        body._raw_stream.release_conn()

    def _all(self, work: Callable[[int], None]) -> None:
        list(self.threads.map(work, range(FRAMES)))

    def boto_put(self, _: int) -> float:
        """GB/s."""
        return GIGABYTES / seconds(lambda: self._all(self._write))

    def boto_get(self, _: int) -> float:
        """GB/s."""
        return GIGABYTES / seconds(lambda: self._all(self._read))


class View(io.RawIOBase):
    """Memory as a file that gives boto3 a MiB at a time, without a copy, whatever little it asks for."""

    def __init__(self, view: memoryview) -> None:
        self._view = view
        self._at = 0

    def read(self, size: int = -1) -> Any:
        """At least a MiB."""
        end = len(self._view) if size < 0 else self._at + max(size, 1 << 20)
        piece = self._view[self._at : end]
        self._at += len(piece)
        return piece

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """As of files."""
        self._at = offset + (0, self._at, len(self._view))[whence]
        return self._at

    def tell(self) -> int:
        """As of files."""
        return self._at

    def seekable(self) -> bool:
        """It is."""
        return True


def s3() -> list[Row]:
    """Both servers."""
    rows = []
    # Memory of the machine, where there is some, so that the servers' disk decides nothing.
    shared = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=shared if shared.is_dir() else None) as folder:
        for name, made in (("JuiceFS gateway", JuiceGateway), ("moto", Moto)):
            with made(Path(folder) / name.partition(" ")[0]) as server:
                store = Store(server)
                try:
                    puts = interleaved(store.put, store.boto_put, PUT_ROUNDS)
                    gets = interleaved(store.get, store.boto_get, GET_ROUNDS)
                finally:
                    store.close()
            rows += [
                against(f"s3 put, 32 MiB frames, {name}", "GB/s", puts, at_least=0.9),
                against(f"s3 get, 32 MiB frames, {name}", "GB/s", gets, at_least=0.9),
            ]
    return rows
