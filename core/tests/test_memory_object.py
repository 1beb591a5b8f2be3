from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest

from lmkv.memory import MemoryObject, Pool

if TYPE_CHECKING:
    from collections.abc import Iterator

MiB = 1 << 20


@pytest.fixture
def pool() -> Iterator[Pool]:
    pool = Pool.create(MiB, prefault=False, trace=True)
    yield pool
    pool.close()


def allocate(pool: Pool, nbytes: int, owner: str = "put") -> MemoryObject:
    obj = pool.allocate(nbytes, owner)
    assert obj is not None
    return obj


def test_the_view_has_exactly_the_bytes_asked_for_and_the_pool_sees_them(pool: Pool) -> None:
    first, second = allocate(pool, 5000), allocate(pool, 1)
    assert (first.nbytes, first.view.nbytes, first.view.format) == (5000, 5000, "B")
    assert first.offset % 4096 == second.offset % 4096 == 0
    assert first.view is first.view
    first.view[:] = b"x" * 5000
    second.view[0] = ord("y")
    assert bytes(pool.view[first.offset : first.offset + 5001]) == b"x" * 5000 + b"\0"
    assert pool.view[second.offset] == ord("y")
    assert pool.free_bytes == MiB - 3 * 4096


def test_the_last_release_frees_and_no_count_goes_below_zero(pool: Pool) -> None:
    obj = allocate(pool, 4096)
    obj.retain("ram")
    obj.release("put")
    assert pool.free_bytes == MiB - 4096
    obj.release("ram")
    assert (pool.free_bytes, pool.largest_free, obj.count) == (MiB, MiB, 0)
    with pytest.raises(RuntimeError, match="'ram' after the last release"):
        obj.release("ram")
    with pytest.raises(RuntimeError, match="after the last release"):
        obj.retain("load")
    with pytest.raises(RuntimeError, match="freed memory"):
        _ = obj.view
    assert pool.free_bytes == MiB


def test_what_nobody_holds_is_not_shortened(pool: Pool) -> None:
    """Its end would be given back a second time, and then to two at once."""
    obj = pool.allocate(3 * 4096, "test")
    assert obj is not None
    obj.release("test")
    with pytest.raises(RuntimeError, match="after the last release"):
        obj.shorten(4096)
    assert pool.free_bytes == pool.nbytes


def test_the_trace_names_who_holds_what(pool: Pool) -> None:
    one, two = allocate(pool, 100), allocate(pool, 5000, "load")
    one.retain("ram")
    one.retain("ram")
    assert [h.owners for h in pool.holders()] == [{"put": 1, "ram": 2}, {"load": 1}]
    assert [(h.offset, h.nbytes) for h in pool.holders()] == [(one.offset, 100), (two.offset, 5000)]
    one.release("put")
    with pytest.raises(RuntimeError, match="'put', who holds no count"):
        one.release("put")
    for obj, owner in ((one, "ram"), (one, "ram"), (two, "load")):
        obj.release(owner)
    assert pool.holders() == []


def test_without_a_trace_the_counts_are_still_checked() -> None:
    pool = Pool.create(MiB, prefault=False)
    obj = allocate(pool, 4096)
    assert pool.holders() == []
    obj.retain("a")
    obj.release("b")
    obj.release("c")
    with pytest.raises(RuntimeError, match="after the last release"):
        obj.release("put")
    pool.close()


def test_over_a_buffer_of_ones_own() -> None:
    buffer = np.zeros(9, np.uint16)
    obj = MemoryObject.over(buffer)
    obj.view[:] = bytes(range(18))
    obj.retain("kit")
    obj.release("put")
    obj.release("kit")
    assert buffer.view(np.uint8).tolist() == list(range(18))
    with pytest.raises(RuntimeError, match="after the last release"):
        obj.release("kit")
    with pytest.raises(ValueError, match="writable"):
        MemoryObject.over(b"constant")
