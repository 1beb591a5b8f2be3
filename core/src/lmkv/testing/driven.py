"""A backend behind a tier's driver, for blocking callers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lmkv.backend import WrapperBackend
from lmkv.storage.driver import Driver, wait_for

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from lmkv.backend import StorageBackendInterface
    from lmkv.memory import MemoryObject
    from lmkv.types import ChunkKey, Health, Outcome, StoredFrame


class DrivenBackend(WrapperBackend):
    """Every call runs in a thread of a driver, as in a tier."""

    def __init__(self, inner: StorageBackendInterface) -> None:
        super().__init__(inner)
        self._driver = Driver("kit", threads=inner.capabilities.parallelism, max_calls=1024, max_bytes=1 << 40)

    def contains(self, keys: Sequence[ChunkKey]) -> Sequence[bool]:
        """In a driver thread."""
        return self._run(lambda: self.inner.contains(keys))  # type: ignore[no-any-return]

    def get(self, keys: Sequence[ChunkKey], into: Sequence[MemoryObject]) -> Sequence[Outcome]:
        """In a driver thread."""
        return self._run(lambda: self.inner.get(keys, into), into)  # type: ignore[no-any-return]

    def put(self, keys: Sequence[ChunkKey], objects: Sequence[MemoryObject]) -> Sequence[Outcome]:
        """In a driver thread."""
        return self._run(lambda: self.inner.put(keys, objects), objects)  # type: ignore[no-any-return]

    def delete(self, keys: Sequence[ChunkKey]) -> None:
        """In a driver thread."""
        self._run(lambda: self.inner.delete(keys))

    def scan(self) -> Iterator[StoredFrame]:
        """In a driver thread, to its end."""
        return self._run(lambda: iter(list(self.inner.scan())))  # type: ignore[no-any-return]

    def touch(self, keys: Sequence[ChunkKey]) -> None:
        """In a driver thread."""
        self._run(lambda: self.inner.touch(keys))

    def describe(self, namespace: bytes, text: str) -> None:
        """In a driver thread."""
        self._run(lambda: self.inner.describe(namespace, text))

    def forget(self, namespace: bytes) -> None:
        """In a driver thread."""
        self._run(lambda: self.inner.forget(namespace))

    def set_aside(self, keys: Sequence[ChunkKey]) -> None:
        """In a driver thread."""
        self._run(lambda: self.inner.set_aside(keys))

    def clear(self, namespace: bytes | None = None) -> None:
        """In a driver thread."""
        self._run(lambda: self.inner.clear(namespace))

    def health(self) -> Health:
        """In a driver thread."""
        return self._run(self.inner.health)  # type: ignore[no-any-return]

    def close(self) -> None:
        """As a tier does: first the driver, then the backend."""
        assert self._driver.close(30.0), "a call still runs in the backend 30 s after the driver was closed"
        self.inner.close()

    def _run(self, work: Callable[[], Any], objects: Sequence[MemoryObject] = ()) -> Any:
        return wait_for(self._driver, work, objects)
