"""The contract of a storage backend: moves frames by key, and does nothing else.

A backend does not retry, time out, count, check sums, compress, evict or log payloads: its tier does.
Authors derive from one of

* `StorageBackendInterface` for blocking clients (they release the GIL in their I/O; calls come from several threads),
* `AsyncBackend` for coroutines (aiofiles, redis.asyncio, …), run on one loop thread of its own,
* `ResidentBackend` for host memory, which keeps references to memory objects instead of copying,
* `WrapperBackend` to change one thing about another backend.
"""

from __future__ import annotations

import asyncio
import threading
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, TypeVar

from lmkv.frame import trailer_bytes
from lmkv.types import OK, Capabilities, ChunkKey, Health, HealthState, Outcome, StoredFrame

if TYPE_CHECKING:
    from collections.abc import Coroutine, Iterator, Sequence

    from lmkv.memory import MemoryObject, Pool

T = TypeVar("T")


class StorageBackendInterface(ABC):
    """Moves frames by key. Blocking, batched, thread-safe; releases the GIL in its I/O.

    Outcomes: one per key, in order. A miss and a refusal are values. `FAILED` is about that key only. An exception
    means that the whole tier is ill: raise `BackendError` (or let an `OSError` through); every key then counts as
    failed.

    Buffers: the caller owns every memory object. `get` fills memory that the tier allocated; `put` may not keep a
    reference after it returned. On anything but OK a buffer's content is undefined and the tier throws it away.
    """

    capabilities: Capabilities = Capabilities()

    @abstractmethod
    def contains(self, keys: Sequence[ChunkKey]) -> Sequence[bool]:
        """Which of `keys` are stored. A false *no* is allowed; a *yes* is only a hint, loads verify."""

    @abstractmethod
    def get(self, keys: Sequence[ChunkKey], into: Sequence[MemoryObject]) -> Sequence[Outcome]:
        """Read frames into `into[i].view`, from its first byte on; `into[i].landed` may be told how far it is.

        Returns `OK(nbytes)` with the length of the stored frame, `MISS`, or `FAILED` when the stored frame is
        longer than the buffer or shorter than the store says it is.
        """

    @abstractmethod
    def put(self, keys: Sequence[ChunkKey], objects: Sequence[MemoryObject]) -> Sequence[Outcome]:
        """Write the whole of `objects[i].view` under `keys[i]`.

        Advisory and atomic: after `OK` the frame is there whole; otherwise the old value, or nothing, is.
        """

    @abstractmethod
    def delete(self, keys: Sequence[ChunkKey]) -> None:
        """Remove frames. Idempotent: an absent key is no error."""

    def scan(self) -> Iterator[StoredFrame]:
        """Everything stored, oldest use first. Only called when `capabilities.scan`."""
        return iter(())

    def touch(self, keys: Sequence[ChunkKey]) -> None:  # noqa: B027  a default, not a duty
        """Hint that `keys` were used, for stores that remember it over a restart. Default: nothing."""

    def describe(self, namespace: bytes, text: str) -> None:  # noqa: B027  a default, not a duty
        """Keep `text` (the namespace's canonical JSON) beside the frames, for people. Default: nothing."""

    def forget(self, namespace: bytes) -> None:  # noqa: B027  a default, not a duty
        """Nobody uses a namespace, and it has no frames: what else is kept for it may go. Default: nothing."""

    def set_aside(self, keys: Sequence[ChunkKey]) -> None:
        """The tier found these frames damaged: take them out of the way. Default: delete them."""
        self.delete(keys)

    def clear(self, namespace: bytes | None = None) -> None:
        """Remove every frame (of one namespace). Default: delete what `scan` lists."""
        self.delete([f.key for f in self.scan() if namespace is None or f.key.namespace == namespace])

    def attach(self, pool: Pool) -> None:  # noqa: B027  a default, not a duty
        """Called once before use when `capabilities.registered_memory`."""

    def health(self) -> Health:
        """A quick look at whether the store can be used now; may do one small I/O."""
        return Health(HealthState.OK)

    def close(self) -> None:  # noqa: B027  a default, not a duty
        """Give back every resource. Idempotent. Default: nothing."""


class ResidentBackend(StorageBackendInterface):
    """Keeps memory objects of the pool by reference: nothing is copied on store, load or promotion.

    `adopt` takes one owner count of each object, `delete` and `close` give it back; `borrow` adds a count for the
    caller, who releases it. Called on the storage loop only, and must not block.
    """

    capabilities = Capabilities(resident=True)

    @abstractmethod
    def adopt(self, keys: Sequence[ChunkKey], objects: Sequence[MemoryObject]) -> Sequence[Outcome]:
        """Keep `objects` under `keys`; an object that was there under the key is released."""

    @abstractmethod
    def borrow(self, keys: Sequence[ChunkKey]) -> Sequence[MemoryObject | None]:
        """The objects under `keys`, each retained for the caller; None where absent."""

    def put(self, keys: Sequence[ChunkKey], objects: Sequence[MemoryObject]) -> Sequence[Outcome]:
        """`put` of a resident backend is `adopt`."""
        return self.adopt(keys, objects)

    def get(self, keys: Sequence[ChunkKey], into: Sequence[MemoryObject]) -> Sequence[Outcome]:
        """Copy out, for callers that insist on their own memory; the core borrows instead."""
        from lmkv.types import FAILED, MISS  # noqa: PLC0415  only this default needs them

        outcomes: list[Outcome] = []
        for held, target in zip(self.borrow(keys), into, strict=True):
            if held is None:
                outcomes.append(MISS)
                continue
            try:
                if held.nbytes > target.nbytes:
                    outcomes.append(FAILED(ValueError(f"frame of {held.nbytes} bytes, buffer of {target.nbytes}")))
                    continue
                target.view[: held.nbytes] = held.view
                outcomes.append(OK(held.nbytes))
            finally:
                held.release("get")
        return outcomes


class AsyncBackend(StorageBackendInterface):
    """Lets an author write coroutines; runs them on one loop thread of its own and *is* the blocking contract.

    Override the `a…` methods. They all run on the same loop, so they need no locks; they must not block it. The
    blocking methods may be called from any thread but the loop's.
    """

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._stopped = False
        self._thread = threading.Thread(target=self._loop.run_forever, name=f"lmkv-{type(self).__name__}", daemon=True)
        self._thread.start()

    def run(self, coroutine: Coroutine[object, object, T]) -> T:
        """Run one coroutine on the backend's loop and wait for its result."""
        if self._stopped:
            coroutine.close()
            from lmkv.errors import ClosedError  # noqa: PLC0415  rare path

            msg = f"{type(self).__name__} is closed"
            raise ClosedError(msg)
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()

    @abstractmethod
    async def acontains(self, keys: Sequence[ChunkKey]) -> Sequence[bool]:
        """See `contains`."""

    @abstractmethod
    async def aget(self, keys: Sequence[ChunkKey], into: Sequence[MemoryObject]) -> Sequence[Outcome]:
        """See `get`."""

    @abstractmethod
    async def aput(self, keys: Sequence[ChunkKey], objects: Sequence[MemoryObject]) -> Sequence[Outcome]:
        """See `put`."""

    @abstractmethod
    async def adelete(self, keys: Sequence[ChunkKey]) -> None:
        """See `delete`."""

    async def aclose(self) -> None:
        """Give back what the coroutines hold; the loop stops afterwards."""

    def contains(self, keys: Sequence[ChunkKey]) -> Sequence[bool]:
        """Blocking form of `acontains`."""
        return self.run(self.acontains(keys))

    def get(self, keys: Sequence[ChunkKey], into: Sequence[MemoryObject]) -> Sequence[Outcome]:
        """Blocking form of `aget`."""
        return self.run(self.aget(keys, into))

    def put(self, keys: Sequence[ChunkKey], objects: Sequence[MemoryObject]) -> Sequence[Outcome]:
        """Blocking form of `aput`."""
        return self.run(self.aput(keys, objects))

    def delete(self, keys: Sequence[ChunkKey]) -> None:
        """Blocking form of `adelete`."""
        self.run(self.adelete(keys))

    def close(self) -> None:
        """Run `aclose`, stop the loop, join its thread. Idempotent."""
        if self._stopped:
            return
        try:
            self.run(self.aclose())
        finally:
            self._stopped = True
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()


class WrapperBackend(StorageBackendInterface):
    """Passes every call on to `inner`; derive from it to change one thing."""

    def __init__(self, inner: StorageBackendInterface) -> None:
        self.inner = inner

    @property
    def capabilities(self) -> Capabilities:  # type: ignore[override]
        """Those of `inner`."""
        return self.inner.capabilities

    def contains(self, keys: Sequence[ChunkKey]) -> Sequence[bool]:
        """Of `inner`."""
        return self.inner.contains(keys)

    def get(self, keys: Sequence[ChunkKey], into: Sequence[MemoryObject]) -> Sequence[Outcome]:
        """Of `inner`."""
        return self.inner.get(keys, into)

    def put(self, keys: Sequence[ChunkKey], objects: Sequence[MemoryObject]) -> Sequence[Outcome]:
        """Of `inner`."""
        return self.inner.put(keys, objects)

    def delete(self, keys: Sequence[ChunkKey]) -> None:
        """Of `inner`."""
        self.inner.delete(keys)

    def scan(self) -> Iterator[StoredFrame]:
        """Of `inner`."""
        return self.inner.scan()

    def touch(self, keys: Sequence[ChunkKey]) -> None:
        """Of `inner`."""
        self.inner.touch(keys)

    def describe(self, namespace: bytes, text: str) -> None:
        """Of `inner`."""
        self.inner.describe(namespace, text)

    def forget(self, namespace: bytes) -> None:
        """Of `inner`."""
        self.inner.forget(namespace)

    def set_aside(self, keys: Sequence[ChunkKey]) -> None:
        """Of `inner`."""
        self.inner.set_aside(keys)

    def clear(self, namespace: bytes | None = None) -> None:
        """Of `inner`."""
        self.inner.clear(namespace)

    def attach(self, pool: Pool) -> None:
        """Of `inner`."""
        self.inner.attach(pool)

    def health(self) -> Health:
        """Of `inner`."""
        return self.inner.health()

    def close(self) -> None:
        """Of `inner`."""
        self.inner.close()


__all__ = [
    "AsyncBackend",
    "ResidentBackend",
    "StorageBackendInterface",
    "WrapperBackend",
    "trailer_bytes",
]
