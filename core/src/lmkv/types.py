"""Small frozen values that every layer shares: keys, outcomes, capabilities, health."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Final, NamedTuple

DIGEST_BYTES: Final = 32
NAMESPACE_BYTES: Final = 16
ALIGNMENT: Final = 4096
"""Bytes. Every memory object starts and ends on this boundary, so that direct I/O needs no bounce buffer."""


class ChunkKey(NamedTuple):
    """Names the frame of one chunk (or tail) shard. Printed as hexadecimal only."""

    namespace: bytes
    """16 bytes: fingerprint of everything but the tokens."""
    shard: int
    """Rank of the part, 0-based, below the namespace's number of shards."""
    digest: bytes
    """32 bytes: chain value of the token prefix that ends with this chunk."""

    def __str__(self) -> str:
        """`<namespace>/<shard>/<digest>` in hexadecimal; safe as a path, a Redis key part or an S3 key part."""
        return f"{self.namespace.hex()}/{self.shard:x}/{self.digest.hex()}"


class OutcomeKind(enum.Enum):
    """What became of one key in a batch."""

    OK = "ok"
    MISS = "miss"
    REJECTED = "rejected"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result for one key of a batch: `OK(nbytes)`, `MISS`, `REJECTED` or `FAILED(error)`."""

    kind: OutcomeKind
    nbytes: int = 0
    """Bytes of the frame that was read or written; 0 unless OK."""
    error: BaseException | None = field(default=None, compare=False)

    @property
    def ok(self) -> bool:
        """True only for `OK`."""
        return self.kind is OutcomeKind.OK


MISS: Final = Outcome(OutcomeKind.MISS)
REJECTED: Final = Outcome(OutcomeKind.REJECTED)


@lru_cache(maxsize=64)  # frames have few sizes, and a look into the cache costs a tenth of a new one
def OK(nbytes: int) -> Outcome:  # noqa: N802  reads like the constants beside it
    """The frame of `nbytes` bytes was read or written whole."""
    return Outcome(OutcomeKind.OK, nbytes)


def FAILED(error: BaseException) -> Outcome:  # noqa: N802  reads like the constants beside it
    """This key failed with `error`; says nothing about the other keys of the batch."""
    return Outcome(OutcomeKind.FAILED, 0, error)


AT_ONCE: Final = 32
"""Chunks, at most, that a client acquires at once."""
AT_ONCE_SHARE: Final = 4
"""They are no more than such a part of the pool."""


class MissReason(enum.Enum):
    """Why a look-up or a load did not give a chunk. Every miss is counted under exactly one of them."""

    NEVER_STORED = "never_stored"
    EVICTED = "evicted"
    EXPIRED = "expired"
    NAMESPACE = "namespace"
    CORRUPT = "corrupt"
    UNREADABLE = "unreadable"
    """The frame is there, but the codec or the key to read it is not here."""
    DEADLINE = "deadline"
    TIER_OPEN = "tier_open"
    FAILED = "failed"
    NOT_ALL_SHARDS = "not_all_shards"
    NO_ROOM = "no_room"


@dataclass(frozen=True, slots=True, kw_only=True)
class Capabilities:
    """What a backend claims. Every field defaults to *no*; the conformance suite tests what is claimed."""

    resident: bool = False
    """Keeps references to memory objects of the pool (`ResidentBackend`); loads need no copy and no verification."""
    persistent: bool = False
    """Frames outlive the process."""
    shared: bool = False
    """Others read and write the same store: the core keeps no index of it and asks `contains`."""
    scan: bool = False
    """`scan` lists everything stored; needed to rebuild the index after a restart."""
    device_memory: bool = False
    """`get` and `put` take objects in device memory."""
    registered_memory: bool = False
    """Wants `attach(pool)` once before use, to register the arena for DMA."""
    native_expiry: bool = False
    """The store expires frames by itself."""
    read_only: bool = False
    """Only reads: a tier of it has `write: never`."""
    max_frame_bytes: int | None = None
    """Frames above this are refused when the stack starts; None: no limit."""
    batched_contains: bool = False
    """`contains` asks for any number of keys in one round trip: a few keys more cost nothing."""
    parallelism: int = 4
    """Calls that may run at once: the number of the driver's threads."""


class HealthState(enum.Enum):
    """How well a tier does."""

    OK = "ok"
    DEGRADED = "degraded"
    DOWN = "down"


@dataclass(frozen=True, slots=True)
class Health:
    """A state and one sentence for people: what is wrong and what to do. Never a secret."""

    state: HealthState
    detail: str = ""


class StoredFrame(NamedTuple):
    """One entry of `StorageBackendInterface.scan`."""

    key: ChunkKey
    nbytes: int
    """Bytes that the frame takes in the store."""
    trailer: bytes
    """The last bytes of the frame, with at least its whole trailer (`lmkv.backend.trailer_bytes` tells its length).

    Of one that is given less the core reads the whole frame at the start."""
    last_used: float
    """Seconds since the epoch of the last write or touch; orders frames for eviction after a restart."""
