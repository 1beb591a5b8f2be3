"""The disk tier with 32 MiB frames, checksums on, against raw loops that write and read the same files."""

from __future__ import annotations

import asyncio
import os
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

from tests.bench.frames import make_frames
from tests.bench.harness import Row, against, interleaved, seconds

from lmkv.codec.identity import IdentityCodec
from lmkv.observe.metrics import Metrics
from lmkv.policy.lru import LRU
from lmkv.specs import BackendContext
from lmkv.storage.driver import RUNNING, STORE
from lmkv.storage.inventory import TierSettings
from lmkv.storage.tier import Tier
from lmkv_backend_disk.backend import create
from lmkv_backend_disk.options import DiskOptions

if TYPE_CHECKING:
    from collections.abc import Callable


PAYLOAD = 32 << 20
FRAMES = 8
PAGES = 16
THREADS = 4
ROUNDS = 7
GIGABYTES = FRAMES * PAYLOAD / 1e9


class Disk:
    """A tier on a folder of the working tree's file system, frames for it, and the raw loops beside it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        backend = create(DiskOptions(path=folder / "tier"), BackendContext(tier="disk"))
        settings = TierSettings(name="disk", capacity=1 << 40, deadline=600.0, threads=THREADS, queue_bytes=1 << 40)
        self.tier = Tier(0, settings, backend, LRU(), lambda _: IdentityCodec(), Metrics())
        self.direct = backend.direct.on
        self.frames = make_frames(FRAMES, PAYLOAD, PAGES)
        _, self.trailers, self.objects = self.frames
        self.threads = ThreadPoolExecutor(THREADS)

    def close(self) -> None:
        """Of tier and pool."""
        self.threads.shutdown()
        self.tier.close(5.0)

    # --- ours ---

    def put(self, _: int) -> float:
        """Each frame by a call of its own, as stores come; sealed on the way. GB/s."""
        for path in (self.folder / "tier" / "frames").rglob("*.0"):
            path.unlink()
        for trailer in self.trailers:
            self.tier.forget(trailer.key)
        return GIGABYTES / seconds(lambda: asyncio.run(self._put()))

    async def _put(self) -> None:
        done = await asyncio.gather(*[self.tier.put([item], priority=STORE) for item in self.frames.unsealed()])
        assert all(outcomes[0].ok for outcomes in done), done

    def get(self, _: int) -> float:
        """Each frame by a call of its own, as loads of large frames are; verified. GB/s."""
        self._forget_pages(self.folder / "tier" / "frames")
        return GIGABYTES / seconds(lambda: asyncio.run(self._get()))

    async def _get(self) -> None:
        pairs = zip(self.trailers, self.objects, strict=True)
        done = await asyncio.gather(*[self.tier.get([t.key], [o], priority=RUNNING) for t, o in pairs])
        assert all(results[0].outcome.ok for results in done), done

    # --- the raw loops ---

    def _path(self, number: int) -> Path:
        return self.folder / "raw" / f"{number}.frame"

    def _flags(self) -> int:
        return os.O_DIRECT if self.direct else 0

    def _write(self, number: int) -> None:
        fd = os.open(self._path(number), os.O_WRONLY | os.O_CREAT | os.O_EXCL | self._flags(), 0o600)
        try:
            assert os.pwrite(fd, self.objects[number].view, 0) == self.objects[number].nbytes
        finally:
            os.close(fd)

    def _read(self, number: int) -> None:
        fd = os.open(self._path(number), os.O_RDONLY | self._flags())
        try:
            assert os.preadv(fd, [self.objects[number].view], 0) == self.objects[number].nbytes
        finally:
            os.close(fd)

    def _all(self, work: Callable[[int], None]) -> None:
        list(self.threads.map(work, range(FRAMES)))

    def raw_write(self, _: int) -> float:
        """GB/s."""
        (self.folder / "raw").mkdir(exist_ok=True)
        for path in (self.folder / "raw").iterdir():
            path.unlink()
        return GIGABYTES / seconds(lambda: self._all(self._write))

    def raw_read(self, _: int) -> float:
        """GB/s."""
        self._forget_pages(self.folder / "raw")
        return GIGABYTES / seconds(lambda: self._all(self._read))

    def _forget_pages(self, folder: Path) -> None:
        """Nothing of these files is in the page cache."""
        for path in folder.rglob("*"):
            if path.is_file():
                fd = os.open(path, os.O_RDONLY)
                os.fsync(fd)
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
                os.close(fd)


def disk() -> list[Row]:
    """Writes and cold reads."""
    build = Path(__file__).resolve().parents[2] / "build"
    build.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=build) as folder:
        bench = Disk(Path(folder))
        try:
            writes = interleaved(bench.put, bench.raw_write, ROUNDS)
            reads = interleaved(bench.get, bench.raw_read, ROUNDS)
        finally:
            bench.close()
    return [
        against("disk write, 32 MiB frames", "GB/s", writes, at_least=0.9),
        against("disk cold read, 32 MiB frames", "GB/s", reads, at_least=0.9),
    ]
