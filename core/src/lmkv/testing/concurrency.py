"""Calls from several threads at once."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from lmkv.testing.contract import FRAME, load, store
from lmkv.testing.material import make_key, make_memory, make_payload
from lmkv.types import OutcomeKind

if TYPE_CHECKING:
    from lmkv.backend import StorageBackendInterface

ROUNDS = 20


def threads_for(backend: StorageBackendInterface) -> int:
    """More callers than the backend claims to serve at once."""
    return min(8, 2 * backend.capabilities.parallelism)


class ConcurrencyTests:
    """Thread-safety and atomicity."""

    def test_threads_with_keys_of_their_own(self, backend: StorageBackendInterface) -> None:
        """Callers do not disturb each other."""
        threads = threads_for(backend)

        def work(thread: int) -> None:
            for turn in range(ROUNDS):
                keys = [make_key(thread * 1000 + i) for i in range(3)]
                payloads = [make_payload(thread * 1000 + turn * 10 + i, FRAME) for i in range(3)]
                store(backend, keys, payloads)
                assert [load(backend, key) for key in keys] == payloads
                backend.delete(keys[1:])
                assert list(backend.contains(keys)) == [True, False, False]

        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(work, range(threads)))

    def test_replace_is_atomic(self, backend: StorageBackendInterface) -> None:
        """Readers of a key that is being rewritten see one of the frames whole, and never nothing."""
        threads = threads_for(backend)
        payloads = [make_payload(n, 64 * 1024) for n in range(threads)]
        store(backend, [make_key(1)], payloads[:1])
        losing = backend.capabilities.shared or backend.capabilities.native_expiry

        def write(thread: int) -> None:
            for _ in range(ROUNDS):
                backend.put([make_key(1)], [make_memory(payloads[thread])])

        def read(thread: int) -> None:
            memory = make_memory(64 * 1024)
            for _ in range(ROUNDS):
                (outcome,) = backend.get([make_key(1)], [memory])
                if outcome.ok:
                    assert bytes(memory.view) in payloads, f"reader {thread} got a mixture"
                else:
                    assert losing, f"reader {thread} got {outcome}"

        with ThreadPoolExecutor(threads) as pool:
            half = threads // 2 or 1
            running = [pool.submit(write, t) for t in range(half)] + [pool.submit(read, t) for t in range(half)]
            for future in running:
                future.result()

    def test_delete_under_readers(self, backend: StorageBackendInterface) -> None:
        """A reader of a key that comes and goes gets the whole frame or a miss; never another frame, never a piece."""
        threads = threads_for(backend)
        payload = make_payload(1, FRAME)

        def come_and_go() -> None:
            for _ in range(ROUNDS):
                store(backend, [make_key(1)], [payload])
                backend.delete([make_key(1)])

        def read() -> None:
            memory = make_memory(FRAME)
            for _ in range(ROUNDS):
                (outcome,) = backend.get([make_key(1)], [memory])
                assert outcome.kind in {OutcomeKind.OK, OutcomeKind.MISS}, outcome
                assert not outcome.ok or bytes(memory.view) == payload

        with ThreadPoolExecutor(threads + 1) as pool:
            running = [pool.submit(come_and_go)] + [pool.submit(read) for _ in range(threads)]
            for future in running:
                future.result()
