"""What is told while bytes still arrive: from backends to tiers, from transports to the objects of a pull."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st
from storage_rig import Shelf

from lmkv.codec.identity import IdentityCodec
from lmkv.frame import Trailer, frame_bytes, seal
from lmkv.memory import MemoryObject
from lmkv.observe.metrics import Metrics
from lmkv.peer.landing import Landing
from lmkv.storage.driver import RUNNING
from lmkv.storage.inventory import TierSettings
from lmkv.storage.tier import GetResult, Tier
from lmkv.types import ChunkKey, MissReason

if TYPE_CHECKING:
    from collections.abc import Sequence

    from lmkv.types import Outcome

TRAILER = Trailer(ChunkKey(b"n" * 16, 0, b"d" * 32), b"", 1, (), "identity", 10_000, 10_000)
NBYTES = frame_bytes(10_000, 0)


class Teller(Shelf):
    """Says that half of a frame has come, and then lets some of it change."""

    def __init__(self, *, early: int = 0, late: int = 0) -> None:
        super().__init__()
        self.early, self.late = early, late

    def get(self, keys: Sequence[ChunkKey], into: Sequence[MemoryObject]) -> Sequence[Outcome]:
        outcomes = super().get(keys, into)
        into[0].landed(NBYTES // 2)
        into[0].view[0] ^= self.early
        into[0].view[9_999] ^= self.late
        return outcomes


def load(backend: Teller) -> tuple[GetResult, MemoryObject]:
    frame = MemoryObject.over(bytearray(NBYTES))
    seal(frame.view, TRAILER)
    backend.frames[TRAILER.key] = bytes(frame.view)
    tier = Tier(1, TierSettings(name="low", capacity=None), backend, None, lambda _: IdentityCodec(), Metrics())
    target = MemoryObject.over(bytearray(NBYTES + 4096))

    async def get() -> GetResult:
        return (await tier.get([TRAILER.key], [target], priority=RUNNING))[0]

    try:
        return asyncio.run(get()), target
    finally:
        tier.close(5.0)


def test_a_tier_looks_at_what_has_landed_at_once_and_never_again() -> None:
    found, target = load(Teller(early=1))
    assert found.trailer == TRAILER
    assert target.on_landed is None


@pytest.mark.parametrize("backend", [Teller(late=1), Teller(early=1, late=1)])
def test_a_tier_looks_at_the_rest_when_all_of_it_is_there(backend: Teller) -> None:
    found, target = load(backend)
    assert found.reason is MissReason.CORRUPT
    assert target.on_landed is None


def test_nobody_has_to_listen() -> None:
    MemoryObject.over(bytearray(1)).landed(1)


@given(st.lists(st.integers(1, 50), min_size=1, max_size=6), st.data())
def test_objects_of_a_call_hear_of_their_own_bytes(sizes: list[int], data: st.DataObject) -> None:
    objects = [MemoryObject.over(bytearray(60)) for _ in sizes]
    heard: list[list[int]] = [[] for _ in sizes]
    for obj, list_ in zip(objects, heard, strict=True):
        obj.on_landed = list_.append
    landing = Landing(objects, sizes)
    total = sum(sizes)
    for step in sorted(data.draw(st.lists(st.integers(1, total), max_size=5))):
        landing(step)
        before = 0
        for size, numbers in zip(sizes, heard, strict=True):
            assert max(numbers, default=0) == min(size, max(0, step - before))
            before += size
    landing(total)
    assert [max(numbers) for numbers in heard] == sizes
