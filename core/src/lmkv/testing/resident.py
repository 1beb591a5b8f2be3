"""What a resident backend promises: references instead of copies, and counts that add up."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lmkv.backend import ResidentBackend
from lmkv.testing.contract import FRAME
from lmkv.testing.material import make_key, make_memory, make_payload

if TYPE_CHECKING:
    from lmkv.backend import StorageBackendInterface


def resident(backend: StorageBackendInterface) -> ResidentBackend:
    """The backend as what it claims to be."""
    assert isinstance(backend, ResidentBackend)
    return backend


class ResidentTests:
    """`adopt` and `borrow`."""

    def test_keeps_the_very_object(self, backend: StorageBackendInterface) -> None:
        """Nothing is copied, neither on the way in nor on the way out."""
        memory = make_memory(make_payload(1, FRAME))
        assert [o.nbytes for o in resident(backend).adopt([make_key(1)], [memory])] == [FRAME]
        assert memory.count == 2
        borrowed, absent = resident(backend).borrow([make_key(1), make_key(2)])
        assert borrowed is memory
        assert absent is None
        assert memory.count == 3
        memory.release("get")

    def test_counts_add_up(self, backend: StorageBackendInterface) -> None:
        """One count per key that holds an object; given back by delete, replacement, clear and close."""
        first, second = make_memory(FRAME), make_memory(FRAME)
        keys = [make_key(1), make_key(2)]
        resident(backend).adopt(keys, [first, first])
        assert first.count == 3
        backend.delete([make_key(1), make_key(1), make_key(3)])
        assert first.count == 2
        resident(backend).adopt([make_key(2)], [second])
        assert (first.count, second.count) == (1, 2)
        resident(backend).adopt([make_key(2)], [second])
        assert second.count == 2
        resident(backend).adopt([make_key(1)], [first])
        backend.clear()
        assert (first.count, second.count) == (1, 1)
        resident(backend).adopt(keys, [first, second])
        backend.close()
        assert (first.count, second.count) == (1, 1)

    def test_a_borrower_outlives_the_entry(self, backend: StorageBackendInterface) -> None:
        """Who borrowed an object keeps it when the frame is deleted."""
        memory = make_memory(make_payload(1, FRAME))
        resident(backend).adopt([make_key(1)], [memory])
        (borrowed,) = resident(backend).borrow([make_key(1)])
        backend.delete([make_key(1)])
        memory.release("test")
        assert borrowed is not None
        assert borrowed.count == 1
        assert bytes(borrowed.view) == make_payload(1, FRAME)
        borrowed.release("get")
