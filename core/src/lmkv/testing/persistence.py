"""What `persistent` and `scan` promise."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import pytest

from lmkv.testing.contract import FRAME, load, store
from lmkv.testing.material import OTHER_NAMESPACE, make_key, make_payload

if TYPE_CHECKING:
    from collections.abc import Callable

    from lmkv.backend import StorageBackendInterface


class PersistenceTests:
    """Frames that outlive the process, and the list of them."""

    def test_reopen(self, open_backend: Callable[[], StorageBackendInterface]) -> None:
        """What was stored, and not deleted, is there for the next process."""
        backend = open_backend()
        if not backend.capabilities.persistent:
            pytest.skip("persistent: not claimed")
        keys = [make_key(1), make_key(2, shard=3), make_key(3, namespace=OTHER_NAMESPACE)]
        store(backend, keys, [make_payload(n, FRAME) for n in range(3)])
        backend.delete(keys[1:2])
        backend.close()
        backend = open_backend()
        expected = [make_payload(0, FRAME), None, make_payload(2, FRAME)]
        assert [load(backend, key) for key in keys] == expected
        if backend.capabilities.scan:
            assert {frame.key for frame in backend.scan()} == {keys[0], keys[2]}

    def test_scan(self, backend: StorageBackendInterface) -> None:
        """Lists every frame once, with its size and with its end."""
        if not backend.capabilities.scan:
            pytest.skip("scan: not claimed")
        assert list(backend.scan()) == []
        sizes = (FRAME, 4096, 100, FRAME + 1)
        keys = [make_key(n, shard=n) for n in range(len(sizes))]
        payloads = [make_payload(n, size) for n, size in enumerate(sizes)]
        began = time.time()
        store(backend, keys, payloads)
        store(backend, keys[:1], payloads[:1])
        backend.delete([make_key(1, shard=1)])
        del keys[1], payloads[1]
        found = {frame.key: frame for frame in backend.scan()}
        assert sorted(found) == sorted(keys)
        assert len(list(backend.scan())) == len(keys)
        for key, payload in zip(keys, payloads, strict=True):
            frame = found[key]
            assert frame.nbytes >= len(payload)
            assert payload.endswith(frame.trailer)
            assert not frame.trailer or len(frame.trailer) >= min(4096, len(payload))
            assert began - 60 < frame.last_used < time.time() + 60

    def test_scan_order(self, open_backend: Callable[[], StorageBackendInterface]) -> None:
        """Least recently used first, also after a restart; a touch counts as a use."""
        backend = open_backend()
        if not (backend.capabilities.scan and backend.capabilities.persistent):
            pytest.skip("scan and persistent: not both claimed")
        keys = [make_key(n) for n in range(4)]
        for key in keys:
            store(backend, [key], [make_payload(1, FRAME)])
            time.sleep(0.02)  # stores keep times in steps of some milliseconds
        backend.touch(keys[:1])
        backend.close()
        frames = list(open_backend().scan())
        assert [frame.key for frame in frames] == [*keys[1:], keys[0]]
        assert [frame.last_used for frame in frames] == sorted(frame.last_used for frame in frames)
