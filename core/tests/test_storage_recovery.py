"""What a start takes into the index, the tier's books and the policy."""

from __future__ import annotations

import asyncio
import gc
from typing import TYPE_CHECKING, Any

import pytest
from storage_rig import Shelf, codecs

from lmkv.errors import BackendError
from lmkv.frame import Trailer, frame_bytes, seal
from lmkv.observe.metrics import Metrics
from lmkv.policy.leaf_first import LeafFirstLRU
from lmkv.policy.lru import LRU
from lmkv.specs import BulkPolicy
from lmkv.storage.index import Index
from lmkv.storage.inventory import TierSettings
from lmkv.storage.recovery import STEP, recover
from lmkv.storage.tier import Tier
from lmkv.types import ChunkKey, StoredFrame

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from lmkv.specs import EvictionPolicy

NAMESPACES = (b"n" * 16, b"m" * 16)
PAGES = 3
PAYLOAD = 3000


def digest(number: int) -> bytes:
    return number.to_bytes(32, "big")


def prefixes(number: int) -> tuple[bytes, ...]:
    return tuple(digest(number << 8 | page) for page in range(1, PAGES))


def stored(number: int) -> StoredFrame:
    """Frame `number` of a chain of 8; every second one is of the other namespace or shard."""
    key = ChunkKey(NAMESPACES[number // 8 % 2], number // 16 % 2, digest(number))
    parent = digest(number - 1) if number % 8 else b""
    memory = bytearray(frame_bytes(PAYLOAD, PAGES - 1))
    seal(memoryview(memory), Trailer(key, parent, PAGES, prefixes(number), "identity", PAYLOAD, PAYLOAD))
    return StoredFrame(key, len(memory), bytes(memory[-400:]), float(number))


class Listed(Shelf):
    """Lists what it is told to, and says whether the collector was off meanwhile."""

    def __init__(self, frames: Iterable[StoredFrame], error: Exception | None = None) -> None:
        super().__init__()
        self.listed = list(frames)
        self.error = error
        self.collecting = True

    def scan(self) -> Iterator[StoredFrame]:
        self.collecting = gc.isenabled()
        if self.error is not None:
            raise self.error
        yield from self.listed


class OneByOne:
    """A policy by somebody who knows no `add_all`."""

    def __init__(self) -> None:
        self.inner = LeafFirstLRU()

    def add(self, key: ChunkKey, parent: bytes | None) -> None:
        self.inner.add(key, parent)

    def touch(self, key: ChunkKey) -> None:
        self.inner.touch(key)

    def remove(self, key: ChunkKey) -> None:
        self.inner.remove(key)

    def victims(self, nbytes: int, size: Any, free: Callable[[ChunkKey], bool]) -> Iterable[ChunkKey]:
        return self.inner.victims(nbytes, size, free)


def start(backend: Listed, policy: EvictionPolicy | None) -> tuple[Tier, Index, list[ChunkKey]]:
    async def body() -> tuple[Tier, Index, list[ChunkKey]]:
        settings = TierSettings(name="shelf", capacity=None if policy is None else 1 << 40)
        tier, index = Tier(1, settings, backend, policy, codecs, Metrics()), Index()
        try:
            return tier, index, await recover(tier, index)
        finally:
            tier.close(1.0)

    return asyncio.run(body())


COUNT = STEP + 100


@pytest.fixture(scope="module")
def frames() -> list[StoredFrame]:
    return [stored(number) for number in range(COUNT)]


@pytest.mark.parametrize("policy", [LeafFirstLRU, LRU, OneByOne, None])
def test_everything_found_is_known(frames: list[StoredFrame], policy: Any) -> None:
    tier, index, damaged = start(Listed(frames), None if policy is None else policy())
    assert damaged == []
    assert tier.index == {frame.key: frame.nbytes for frame in frames}
    assert tier.used == sum(frame.nbytes for frame in frames)
    for number, frame in enumerate(frames):
        entry = index.entry(frame.key)
        assert entry is not None
        assert (entry.pages, entry.prefixes) == (PAGES, prefixes(number))
        assert entry.parent == (digest(number - 1) if number % 8 else b"")
        shard = entry.shards[frame.key.shard]
        assert (shard.key, shard.tiers, shard.nbytes, shard.present) == (frame.key, 2, frame_bytes(PAYLOAD, 2), True)


@pytest.mark.parametrize("policy", [LeafFirstLRU, OneByOne])
def test_the_order_of_last_use_decides_who_goes(frames: list[StoredFrame], policy: Any) -> None:
    assert isinstance(policy(), BulkPolicy) == (policy is LeafFirstLRU)
    order = [frame for first in range(0, COUNT - 8, 8) for frame in reversed(frames[first : first + 8])]
    tier, _, _ = start(Listed(order), policy())
    victims = list(tier.victims(20 * frames[0].nbytes, lambda _: True))
    assert victims == [frame.key for frame in order[:20]], "of each chain the end first, of the chains the oldest"


def test_damaged_and_misplaced_frames_are_told_and_not_counted(frames: list[StoredFrame]) -> None:
    some = list(frames[:8])
    some[1] = some[1]._replace(trailer=b"\x80" + some[1].trailer[:-60] + bytes(60))
    some[3] = some[3]._replace(trailer=b"")
    some[4] = some[4]._replace(trailer=some[5].trailer)
    some[6] = some[6]._replace(nbytes=some[6].nbytes - 1)
    tier, index, damaged = start(Listed(some), LeafFirstLRU())
    assert damaged == [frames[number].key for number in (1, 3, 4, 6)]
    assert list(tier.index) == [frames[number].key for number in (0, 2, 5, 7)]
    assert tier.used == 4 * frames[0].nbytes
    assert all((index.entry(frames[number].key) is None) == (number in {1, 3, 4, 6}) for number in range(8))


@pytest.mark.parametrize("on", [True, False])
@pytest.mark.parametrize("error", [None, BackendError("ill")])
def test_the_collector_is_as_it_was(frames: list[StoredFrame], on: bool, error: Exception | None) -> None:
    backend = Listed(frames[:8], error)
    before = gc.isenabled()
    (gc.enable if on else gc.disable)()
    try:
        if error is None:
            start(backend, LeafFirstLRU())
        else:
            with pytest.raises(BackendError):
                start(backend, LeafFirstLRU())
        assert gc.isenabled() == on
        assert not backend.collecting
    finally:
        (gc.enable if before else gc.disable)()
