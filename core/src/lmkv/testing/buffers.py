"""Whose memory is whose."""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING

import pytest

from lmkv.memory import MemoryObject
from lmkv.testing.contract import FRAME, load, store
from lmkv.testing.material import guard_bytes, make_key, make_memory, make_payload
from lmkv.types import OutcomeKind

if TYPE_CHECKING:
    from lmkv.backend import StorageBackendInterface


class BufferTests:
    """What a backend may do with the memory objects that it is lent."""

    @pytest.mark.parametrize("misaligned_by", [0, 1, 512])
    @pytest.mark.parametrize("nbytes", [FRAME, FRAME - 1])
    def test_any_buffer_will_do(self, backend: StorageBackendInterface, nbytes: int, misaligned_by: int) -> None:
        """Buffers that are not aligned, lengths that are odd; no byte outside a buffer is written."""
        payload = make_payload(1, nbytes)
        source = make_memory(payload, misaligned_by=misaligned_by)
        assert [o.nbytes for o in backend.put([make_key(1)], [source])] == [nbytes]
        target = make_memory(nbytes, misaligned_by=misaligned_by)
        assert [o.nbytes for o in backend.get([make_key(1)], [target])] == [nbytes]
        assert bytes(target.view) == payload
        assert set(guard_bytes(target)) == {0xA5}

    def test_room_to_spare(self, backend: StorageBackendInterface) -> None:
        """A buffer longer than the frame: the outcome says how much of it is the frame."""
        store(backend, [make_key(1)], [make_payload(1, FRAME)])
        target = make_memory(3 * FRAME)
        assert [o.nbytes for o in backend.get([make_key(1)], [target])] == [FRAME]
        assert bytes(target.view[:FRAME]) == make_payload(1, FRAME)
        assert set(guard_bytes(target)) == {0xA5}

    def test_no_room(self, backend: StorageBackendInterface) -> None:
        """A buffer too short for the frame fails that key only, and nothing is written outside it."""
        store(backend, [make_key(1), make_key(2)], [make_payload(1, FRAME), make_payload(2, FRAME)])
        targets = [make_memory(FRAME - 4096), make_memory(FRAME)]
        outcomes = backend.get([make_key(1), make_key(2)], targets)
        assert [o.kind for o in outcomes] == [OutcomeKind.FAILED, OutcomeKind.OK]
        assert isinstance(outcomes[0].error, Exception)
        assert bytes(targets[1].view) == make_payload(2, FRAME)
        assert set(guard_bytes(targets[0])) == {0xA5}

    def test_get_keeps_no_reference(self, backend: StorageBackendInterface) -> None:
        """A second load of the same key does not depend on the first one's buffer, which the caller can free."""
        store(backend, [make_key(1)], [make_payload(1, FRAME)])
        buffer = bytearray(FRAME)
        memory = MemoryObject.over(buffer)
        assert all(o.ok for o in backend.get([make_key(1)], [memory]))
        assert memory.count == 1
        memory.view[:] = bytes(FRAME)
        assert load(backend, make_key(1)) == make_payload(1, FRAME)
        del memory
        gc.collect()
        buffer.clear()

    def test_put_leaves_the_buffer_as_it_is(self, backend: StorageBackendInterface) -> None:
        """Other tiers read the same memory at the same time."""
        source = make_memory(make_payload(1, FRAME))
        backend.put([make_key(1)], [source])
        assert bytes(source.view) == make_payload(1, FRAME)
        assert set(guard_bytes(source)) == {0xA5}

    def test_one_buffer_under_many_keys(self, backend: StorageBackendInterface) -> None:
        """The same memory object several times in a batch."""
        source = make_memory(make_payload(1, FRAME))
        keys = [make_key(n) for n in range(4)]
        assert all(o.ok for o in backend.put(keys, [source] * 4))
        assert [load(backend, key) for key in keys] == [make_payload(1, FRAME)] * 4


class CopyTests:
    """What only a backend that copies can do."""

    def test_put_keeps_no_reference(self, backend: StorageBackendInterface) -> None:
        """The caller uses its buffer for something else right after `put`, and can free it."""
        buffer = bytearray(make_payload(1, FRAME))
        memory = MemoryObject.over(buffer)
        assert all(o.ok for o in backend.put([make_key(1)], [memory]))
        assert memory.count == 1
        memory.view[:] = bytes(FRAME)
        assert load(backend, make_key(1)) == make_payload(1, FRAME)
        del memory
        gc.collect()
        buffer.clear()  # BufferError: somebody still has a view of it
