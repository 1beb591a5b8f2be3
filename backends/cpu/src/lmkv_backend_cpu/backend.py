"""Host memory: a mapping from keys to memory objects of the pool, each with one owner count of ours."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lmkv.backend import ResidentBackend
from lmkv.errors import ClosedError
from lmkv.types import OK, Capabilities, ChunkKey, Health, HealthState, Outcome

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pydantic import BaseModel

    from lmkv.memory import MemoryObject
    from lmkv.specs import BackendContext


class CpuBackend(ResidentBackend):
    """Keeps frames where they are. Runs on the storage loop only, so it has no lock; a call is a few dict operations.

    The owner word of its counts is the tier's name, so that the pool's trace shows which tier holds an object.
    """

    capabilities = Capabilities(resident=True)

    def __init__(self, options: BaseModel, context: BackendContext) -> None:
        del options  # nothing to set yet
        self._tier = context.tier
        self._held: dict[ChunkKey, MemoryObject] = {}
        self._closed = False

    def contains(self, keys: Sequence[ChunkKey]) -> Sequence[bool]:
        """Exact, there is no false *no*."""
        return [key in self._held for key in keys]

    def adopt(self, keys: Sequence[ChunkKey], objects: Sequence[MemoryObject]) -> Sequence[Outcome]:
        """Keep `objects` under `keys`; never refuses, the pool's size and the tier's capacity are the limits."""
        self._check_open("adopt")
        outcomes: list[Outcome] = []
        for key, memory in zip(keys, objects, strict=True):
            memory.retain(self._tier)  # before the old one is released: it may be the same object
            old = self._held.pop(key, None)
            self._held[key] = memory
            if old is not None:
                old.release(self._tier)
            outcomes.append(OK(memory.nbytes))
        return outcomes

    def borrow(self, keys: Sequence[ChunkKey]) -> Sequence[MemoryObject | None]:
        """The objects themselves, each with one more count, which the caller gives back under the word ``get``."""
        self._check_open("borrow")
        found = [self._held.get(key) for key in keys]
        for memory in found:
            if memory is not None:
                memory.retain("get")
        return found

    def delete(self, keys: Sequence[ChunkKey]) -> None:
        """Give the counts back; whoever else holds the memory keeps it."""
        for key in keys:
            memory = self._held.pop(key, None)
            if memory is not None:
                memory.release(self._tier)

    def clear(self, namespace: bytes | None = None) -> None:
        """Delete everything (of one namespace)."""
        self.delete([key for key in self._held if namespace is None or key.namespace == namespace])

    def health(self) -> Health:
        """Always well until closed."""
        if self._closed:
            return Health(HealthState.DOWN, "closed")
        return Health(HealthState.OK)

    def close(self) -> None:
        """Give every count back. Idempotent."""
        self._closed = True
        self.clear()

    def _check_open(self, operation: str) -> None:
        if self._closed:
            raise ClosedError(f"{operation} after close")
