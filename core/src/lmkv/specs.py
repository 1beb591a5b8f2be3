"""What the hooks return: frozen descriptions with a lazy `load`, so that listing plugins imports no client library."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from pydantic import BaseModel

    from lmkv.backend import StorageBackendInterface
    from lmkv.types import ChunkKey

API: Final = 1
"""The plugin contract's number. A spec of another number is reported and not used."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BackendContext:
    """What the core tells a backend when it builds it."""

    tier: str
    """Name of the tier in the YAML file, for messages."""
    capacity: int | None = None
    """Bytes that the core will keep in it at most; None where the store limits itself."""
    ranks: int = 1
    """Engine ranks that this node serves."""
    deadline: float = 2.0
    """Seconds that the tier waits for a batch. No call should keep its thread much longer: use it as time limit."""


class BackendFactory(Protocol):
    """Builds a backend; may do I/O, may raise `ConfigError` or `BackendError`."""

    def __call__(self, options: BaseModel, context: BackendContext) -> StorageBackendInterface:
        """`options` is an instance of the spec's options model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BackendSpec:
    """A backend that a distribution offers.

    `options` returns the pydantic model of the tier's `options:` mapping and must import nothing heavy; `load`
    returns the factory (usually the backend's class) and may import the client library.
    """

    name: str
    summary: str
    options: Callable[[], type[BaseModel]]
    load: Callable[[], BackendFactory]
    api: int = API


class Codec(Protocol):
    """Turns payloads into smaller (or sealed) ones and back. Thread-safe; releases the GIL in its work."""

    name: str
    lossless: bool

    def encode(self, raw: memoryview) -> bytes | memoryview:
        """The encoded payload, in any length."""

    def decode(self, encoded: memoryview, into: memoryview) -> None:
        """Fill `into` (exactly the raw length) or raise `FrameError`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CodecSpec:
    """A codec that a distribution offers; `load` returns a callable that makes one."""

    name: str
    summary: str
    load: Callable[[], Callable[[], Codec]]
    api: int = API


class EvictionPolicy(Protocol):
    """Chooses victims of one tier. Lives on the storage loop; no call may block or do I/O.

    Entries are keyed by `ChunkKey`. `parent` is the digest of the preceding chunk in the same namespace, or None.
    """

    def add(self, key: ChunkKey, parent: bytes | None) -> None:
        """`key` was stored; it becomes the most recently used."""

    def touch(self, key: ChunkKey) -> None:
        """`key` was used."""

    def remove(self, key: ChunkKey) -> None:
        """`key` has gone (evicted, deleted, failed). Unknown keys are ignored."""

    def victims(
        self, nbytes: int, size: Callable[[ChunkKey], int], free: Callable[[ChunkKey], bool]
    ) -> Iterable[ChunkKey]:
        """Keys to evict, in order, until `nbytes` are covered; only keys for which `free(key)` holds.

        May give fewer. Does not change the policy's own state; the tier calls `remove` for what it evicts.
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicySpec:
    """An eviction policy that a distribution offers; `load` returns a callable that makes one."""

    name: str
    summary: str
    load: Callable[[], Callable[[], EvictionPolicy]]
    api: int = API
