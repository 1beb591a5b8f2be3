from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import pytest

from lmkv.backend import StorageBackendInterface
from lmkv.errors import BackendError
from lmkv.testing import (
    FaultyBackend,
    corrupts,
    fails,
    hangs,
    make_key,
    make_memory,
    make_payload,
    misses,
    no_space,
    raises,
    rejects,
    short,
    slow,
)
from lmkv.types import FAILED, MISS, OK, REJECTED, ChunkKey, Outcome, OutcomeKind

if TYPE_CHECKING:
    from collections.abc import Sequence

    from lmkv.memory import MemoryObject

FRAME = 4096


class Shelf(StorageBackendInterface):
    def __init__(self) -> None:
        self.frames: dict[ChunkKey, bytes] = {}

    def contains(self, keys: Sequence[ChunkKey]) -> Sequence[bool]:
        return [key in self.frames for key in keys]

    def get(self, keys: Sequence[ChunkKey], into: Sequence[MemoryObject]) -> Sequence[Outcome]:
        outcomes = []
        for key, memory in zip(keys, into, strict=True):
            frame = self.frames.get(key)
            if frame is not None:
                memory.view[: len(frame)] = frame
            outcomes.append(MISS if frame is None else OK(len(frame)))
        return outcomes

    def put(self, keys: Sequence[ChunkKey], objects: Sequence[MemoryObject]) -> Sequence[Outcome]:
        self.frames.update(zip(keys, (bytes(memory.view) for memory in objects), strict=True))
        return [OK(memory.nbytes) for memory in objects]

    def delete(self, keys: Sequence[ChunkKey]) -> None:
        for key in keys:
            self.frames.pop(key, None)


@pytest.fixture
def backend() -> FaultyBackend:
    faulty = FaultyBackend(Shelf())
    faulty.put([make_key(1)], [make_memory(make_payload(1, FRAME))])
    return faulty


def get(backend: FaultyBackend) -> tuple[Outcome, bytes]:
    memory = make_memory(FRAME)
    (outcome,) = backend.get([make_key(1)], [memory])
    return outcome, bytes(memory.view)


def test_faults_come_in_turn_and_end(backend: FaultyBackend) -> None:
    backend.script("get", misses(), times=2)
    backend.script("get", fails(OSError("broken")))
    kinds = [get(backend)[0].kind for _ in range(4)]
    assert kinds == [OutcomeKind.MISS, OutcomeKind.MISS, OutcomeKind.FAILED, OutcomeKind.OK]
    assert backend.calls == {"put": 1, "get": 4}


def test_a_fault_for_ever_ends_when_healed(backend: FaultyBackend) -> None:
    backend.script("put", no_space(), times=None)
    memory = make_memory(FRAME)
    for _ in range(5):
        (outcome,) = backend.put([make_key(2)], [memory])
        assert isinstance(outcome.error, BackendError)
        assert outcome.error.kind == "no-space"
    assert list(backend.contains([make_key(2)])) == [False]
    backend.heal()
    assert backend.put([make_key(2)], [memory])[0].ok


def test_each_kind_of_fault(backend: FaultyBackend) -> None:
    backend.script("get", short(5))
    assert get(backend)[0].nbytes == FRAME - 5
    backend.script("get", corrupts(7))
    outcome, data = get(backend)
    expected = bytearray(make_payload(1, FRAME))
    expected[7] ^= 0xFF
    assert outcome.ok
    assert data == bytes(expected)
    backend.script("put", rejects())
    assert list(backend.put([make_key(3)], [make_memory(FRAME)])) == [REJECTED]
    backend.script("get", slow(0.01))
    assert get(backend)[0].ok
    backend.script("contains", misses())
    assert list(backend.contains([make_key(1)])) == [False]
    for operation, call in (
        ("scan", backend.scan),
        ("health", backend.health),
        ("clear", backend.clear),
        ("delete", lambda: backend.delete([make_key(1)])),
        ("touch", lambda: backend.touch([make_key(1)])),
        ("set_aside", lambda: backend.set_aside([make_key(1)])),
        ("describe", lambda: backend.describe(bytes(16), "{}")),
    ):
        backend.script(operation, raises(BackendError("ill")))
        with pytest.raises(BackendError, match="ill"):
            call()
        call()
    assert FAILED(ValueError()).kind is OutcomeKind.FAILED


def test_a_hanging_call_goes_on_when_it_may(backend: FaultyBackend) -> None:
    go = threading.Event()
    backend.script("get", hangs(go))
    result: list[Outcome] = []
    thread = threading.Thread(target=lambda: result.append(get(backend)[0]))
    thread.start()
    assert get(backend)[0].ok  # another caller is not held up
    assert result == []
    go.set()
    thread.join(10)
    assert result[0].ok
