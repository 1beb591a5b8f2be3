"""A start on a folder with 100 000 frames: the disk backend's scan and the core's indexing, page cache warm."""

from __future__ import annotations

import asyncio
import mmap
import random
import tempfile
from pathlib import Path

from tests.bench.harness import Row, absolute, seconds

from lmkv.codec.identity import IdentityCodec
from lmkv.frame import Trailer, frame_bytes, seal
from lmkv.memory import MemoryObject
from lmkv.observe.metrics import Metrics
from lmkv.policy.leaf_first import LeafFirstLRU
from lmkv.specs import BackendContext
from lmkv.storage.index import Index
from lmkv.storage.inventory import TierSettings
from lmkv.storage.recovery import recover
from lmkv.storage.tier import Tier
from lmkv.types import ChunkKey
from lmkv_backend_disk.backend import create
from lmkv_backend_disk.options import DiskOptions

FRAMES = 100_000
PAGES = 16
PAYLOAD = 4096
ROUNDS = 5


class Start:
    """A folder of small frames in chains of 1 to 64, stored by the backend, its log of trailers with them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        backend = create(DiskOptions(path=folder, direct="off"), BackendContext(tier="disk"))
        buffer = memoryview(mmap.mmap(-1, frame_bytes(PAYLOAD, PAGES - 1)))
        frame = MemoryObject.over(buffer)
        dice = random.Random(0)
        parent, left = b"", 0
        for _ in range(FRAMES):
            if not left:
                parent, left = b"", dice.choice([1, 2, 4, 8, 16, 32, 64])
            key = ChunkKey(bytes(range(16)), 0, dice.randbytes(32))
            prefixes = tuple(dice.randbytes(32) for _ in range(PAGES - 1))
            seal(buffer, Trailer(key, parent, PAGES, prefixes, "identity", PAYLOAD, PAYLOAD))
            (outcome,) = backend.put([key], [frame])
            assert outcome.ok, outcome
            parent, left = key.digest, left - 1
        backend.close()

    def once(self) -> float:
        """Seconds until everything is in the index."""
        backend = create(DiskOptions(path=self.folder), BackendContext(tier="disk"))
        settings = TierSettings(name="disk", capacity=1 << 40)
        tier = Tier(0, settings, backend, LeafFirstLRU(), lambda _: IdentityCodec(), Metrics())
        index = Index()
        try:
            taken = seconds(lambda: asyncio.run(recover(tier, index)))
            assert len(tier.index) == FRAMES, len(tier.index)
        finally:
            tier.close(5.0)
        return taken

    def without_log(self) -> float:
        """As `once`, after somebody has deleted the log: every frame is opened for its trailer."""
        (self.folder / "trailers").unlink()
        return self.once()


def restart() -> list[Row]:
    """With the log of trailers, and without."""
    build = Path(__file__).resolve().parents[2] / "build"
    build.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=build) as folder:
        start = Start(Path(folder) / "tier")
        start.once()
        quick = [start.once() for _ in range(ROUNDS)]
        lost = [start.without_log() for _ in range(3)]
    return [
        absolute("start with 100 000 frames on disk", "s", quick, at_most=2.0),
        absolute("the same, its log of trailers lost", "s", lost, at_most=10.0),
    ]
