"""What each method must do."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import pytest

from lmkv.backend import ResidentBackend, StorageBackendInterface, WrapperBackend
from lmkv.errors import LmkvError
from lmkv.testing.material import OTHER_NAMESPACE, make_key, make_memory, make_payload
from lmkv.types import MISS, HealthState, OutcomeKind

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from lmkv.types import ChunkKey

FRAME = 8192
"""Bytes of the ordinary test frame."""


def bare(backend: StorageBackendInterface) -> StorageBackendInterface:
    """The author's backend, without our driver around it."""
    while isinstance(backend, WrapperBackend):
        backend = backend.inner
    return backend


def store(backend: StorageBackendInterface, keys: Sequence[ChunkKey], payloads: Sequence[bytes]) -> None:
    """Put frames; all of them must be taken."""
    outcomes = backend.put(keys, [make_memory(payload) for payload in payloads])
    assert [o.kind for o in outcomes] == [OutcomeKind.OK] * len(keys), list(outcomes)
    assert [o.nbytes for o in outcomes] == [len(payload) for payload in payloads]


def load(backend: StorageBackendInterface, key: ChunkKey, room: int = FRAME) -> bytes | None:
    """The frame under `key`, None on a miss; anything else fails the test, also what was said to be there and was not.

    See `MemoryObject.landed`.
    """
    memory = make_memory(room)
    said: list[bytes] = []
    memory.on_landed = lambda nbytes: said.append(bytes(memory.view[:nbytes]))
    (outcome,) = backend.get([key], [memory])
    if outcome.kind is OutcomeKind.MISS:
        return None
    assert outcome.ok, outcome
    found = bytes(memory.view[: outcome.nbytes])
    assert all(found.startswith(part) for part in said), "bytes have changed that had landed"
    return found


class ContractTests:
    """One call at a time."""

    sizes: ClassVar[tuple[int, ...]] = (1, 4095, 4096, 4097, 100_000, 1 << 20, (1 << 20) + 1)
    """Bytes of the frames that round trips are tried with; those above `max_frame_bytes` are left out."""
    scale: ClassVar[int] = 300
    """Frames in the big batch."""

    def read_back(self, key: ChunkKey) -> bytes | None:
        """Override if you can: the frame that the *store* has under `key`, read without your backend, or None."""
        raise NotImplementedError

    def test_capabilities_fit_the_class(self, backend: StorageBackendInterface) -> None:
        """A resident backend derives from `ResidentBackend`, any other from another base; the numbers make sense."""
        claims = backend.capabilities
        assert claims.resident == isinstance(bare(backend), ResidentBackend)
        assert claims.parallelism >= 1
        assert claims.max_frame_bytes is None or claims.max_frame_bytes > 0
        assert not (claims.resident and claims.persistent)

    def test_empty_batches(self, backend: StorageBackendInterface) -> None:
        """No keys, no outcomes, no error."""
        assert list(backend.contains([])) == []
        assert list(backend.get([], [])) == []
        assert list(backend.put([], [])) == []
        backend.delete([])
        backend.touch([])
        backend.set_aside([])

    def test_unknown_key_is_a_miss(self, backend: StorageBackendInterface) -> None:
        """A miss is a value."""
        assert list(backend.contains([make_key(1)])) == [False]
        assert list(backend.get([make_key(1)], [make_memory(FRAME)])) == [MISS]

    def test_round_trip(self, backend: StorageBackendInterface) -> None:
        """Frames of many sizes come back as they went in."""
        limit = backend.capabilities.max_frame_bytes
        for number, size in enumerate(self.sizes):
            if limit is None or size <= limit:
                payload = make_payload(number, size)
                store(backend, [make_key(number)], [payload])
                assert load(backend, make_key(number), size) == payload

    def test_frame_too_large(self, backend: StorageBackendInterface) -> None:
        """What exceeds `max_frame_bytes` is refused as a value and leaves what was there; with no limit it is taken."""
        limit = backend.capabilities.max_frame_bytes
        if limit is None:
            store(backend, [make_key(1)], [make_payload(1, 4 * max(self.sizes))])
            return
        payload = make_payload(1, min(limit, FRAME))
        store(backend, [make_key(1)], [payload])
        (outcome,) = backend.put([make_key(1)], [make_memory(limit + 1)])
        assert outcome.kind in {OutcomeKind.REJECTED, OutcomeKind.FAILED}
        assert load(backend, make_key(1)) == payload

    def test_the_store_has_it(self, backend: StorageBackendInterface) -> None:
        """What was put is in the store and not only in the backend's head, as far as the author's back door shows."""
        payload = make_payload(1, FRAME)
        store(backend, [make_key(1)], [payload])
        try:
            stored = self.read_back(make_key(1))
        except NotImplementedError:
            assert list(backend.contains([make_key(1)])) == [True]
            return
        assert stored == payload

    def test_one_outcome_per_key_in_order(self, backend: StorageBackendInterface) -> None:
        """A batch of present and absent keys, one of them twice."""
        here = {number: make_payload(number, FRAME) for number in (1, 3, 5)}
        store(backend, [make_key(n) for n in here], list(here.values()))
        asked = [5, 2, 1, 4, 3, 1]
        memory = [make_memory(FRAME) for _ in asked]
        outcomes = backend.get([make_key(n) for n in asked], memory)
        assert [o.ok for o in outcomes] == [n in here for n in asked]
        assert list(backend.contains([make_key(n) for n in asked])) == [n in here for n in asked]
        for number, target in zip(asked, memory, strict=True):
            assert number not in here or bytes(target.view) == here[number]

    def test_every_part_of_a_key_counts(self, backend: StorageBackendInterface) -> None:
        """Another namespace, another shard or another digest is another frame."""
        keys = [
            make_key(1),
            make_key(2),
            make_key(1, shard=1),
            make_key(1, shard=16),
            make_key(1, namespace=OTHER_NAMESPACE),
            make_key(1)._replace(digest=make_key(1).digest[:-1] + b"\0"),
            make_key(1)._replace(digest=b"\0" + make_key(1).digest[1:]),
        ]
        payloads = [make_payload(i, FRAME) for i in range(len(keys))]
        store(backend, keys, payloads)
        assert [load(backend, key) for key in keys] == payloads

    def test_put_replaces(self, backend: StorageBackendInterface) -> None:
        """The later frame is the one that is there, also if it is shorter or longer."""
        for number, size in enumerate((FRAME, FRAME // 2, FRAME)):
            payload = make_payload(number, size)
            store(backend, [make_key(1)], [payload])
            assert load(backend, make_key(1)) == payload

    def test_delete(self, backend: StorageBackendInterface) -> None:
        """Only what is named goes; an absent key is no error."""
        store(backend, [make_key(1), make_key(2)], [make_payload(1, FRAME), make_payload(2, FRAME)])
        for _ in range(2):
            backend.delete([make_key(1), make_key(99)])
            assert list(backend.contains([make_key(1), make_key(2)])) == [False, True]
        assert load(backend, make_key(1)) is None
        assert load(backend, make_key(2)) == make_payload(2, FRAME)
        store(backend, [make_key(1)], [make_payload(3, FRAME)])
        assert load(backend, make_key(1)) == make_payload(3, FRAME)

    def test_set_aside(self, backend: StorageBackendInterface) -> None:
        """A frame that was set aside is a miss, and can be stored again."""
        store(backend, [make_key(1), make_key(2)], [make_payload(1, FRAME), make_payload(2, FRAME)])
        backend.set_aside([make_key(1), make_key(99)])
        assert [load(backend, make_key(1)), load(backend, make_key(2))] == [None, make_payload(2, FRAME)]
        store(backend, [make_key(1)], [make_payload(1, FRAME)])
        assert load(backend, make_key(1)) == make_payload(1, FRAME)

    def test_hints_are_harmless(self, backend: StorageBackendInterface) -> None:
        """`touch` and `describe` change no frame, and an unknown key is no error."""
        store(backend, [make_key(1)], [make_payload(1, FRAME)])
        for text in ('{"model": "a/b"}', '{"model": "ä"}'):
            backend.describe(make_key(1).namespace, text)
        backend.describe(OTHER_NAMESPACE, "{}")
        backend.touch([make_key(1), make_key(2)])
        assert load(backend, make_key(1)) == make_payload(1, FRAME)
        assert list(backend.contains([make_key(2)])) == [False]

    def test_clear(self, backend: StorageBackendInterface) -> None:
        """Clears one namespace, then all."""
        if not backend.capabilities.scan and type(bare(backend)).clear is StorageBackendInterface.clear:
            pytest.skip("scan: not claimed, and clear is the default that needs it")
        keys = [make_key(1), make_key(1, shard=1), make_key(2, namespace=OTHER_NAMESPACE)]
        store(backend, keys, [make_payload(1, FRAME)] * 3)
        backend.clear(bytes(16))
        assert list(backend.contains(keys)) == [True, True, True]
        backend.clear(make_key(1).namespace)
        assert list(backend.contains(keys)) == [False, False, True]
        backend.clear()
        assert list(backend.contains(keys)) == [False, False, False]
        store(backend, keys[:1], [make_payload(4, FRAME)])
        assert load(backend, keys[0]) == make_payload(4, FRAME)

    def test_big_batch(self, backend: StorageBackendInterface) -> None:
        """Many frames in one call."""
        numbers = range(self.scale)
        keys = [make_key(n, shard=n % 3) for n in numbers]
        store(backend, keys, [make_payload(n, 4096) for n in numbers])
        memory = [make_memory(4096) for _ in numbers]
        assert all(o.ok and o.nbytes == 4096 for o in backend.get(keys, memory))
        assert all(bytes(m.view) == make_payload(n, 4096) for n, m in zip(numbers, memory, strict=True))
        assert all(backend.contains(keys))
        backend.delete(keys)
        assert not any(backend.contains(keys))

    def test_health(self, backend: StorageBackendInterface) -> None:
        """A working store says so."""
        assert backend.health().state is HealthState.OK

    def test_close(self, open_backend: Callable[[], StorageBackendInterface]) -> None:
        """`close` may be called twice; afterwards nothing is served, and nothing hangs."""
        backend = open_backend()
        store(backend, [make_key(1)], [make_payload(1, FRAME)])
        backend.close()
        backend.close()
        for call in (backend.get, backend.put):
            try:
                outcomes = call([make_key(1)], [make_memory(FRAME)])
            except (LmkvError, OSError):
                continue
            assert not any(o.ok for o in outcomes)
