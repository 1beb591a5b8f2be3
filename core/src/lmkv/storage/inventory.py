"""What one tier holds, and how much it may hold: sizes, capacity, order of eviction. No I/O."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from lmkv.specs import BulkPolicy
from lmkv.storage.coding import IDENTITY

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from lmkv.specs import EvictionPolicy
    from lmkv.types import ChunkKey


@dataclass(frozen=True, slots=True, kw_only=True)
class TierSettings:
    """What the configuration says about a tier; sizes in bytes, times in seconds."""

    name: str
    capacity: int | None
    """None: the store limits itself."""
    write: Literal["through", "demote", "never"] = "through"
    read: Literal["promote", "direct"] = "promote"
    codec: str = IDENTITY
    deadline: float = 2.0
    threads: int = 4
    queue_calls: int = 64
    queue_bytes: int = 1 << 30
    queue_seconds: float = 10.0
    failures: int = 5
    probe: float = 5.0


class Inventory:
    """The books of one tier. Lives on the storage loop.

    Attributes:
        index: bytes of each stored frame, for tiers that this node owns alone; empty for shared stores.
        used: bytes in `index` and in puts under way.
        unreadable: those in `index` whose codec or key is not here: kept until room is needed or a put replaces them.
        changed: keys that came or went since somebody emptied it, in order; None: nobody wants to know.
    """

    def __init__(self, settings: TierSettings, policy: EvictionPolicy | None, largest: int | None) -> None:
        self.settings = settings
        self.policy = policy
        self._bulk = policy if isinstance(policy, BulkPolicy) else None
        self.index: dict[ChunkKey, int] = {}
        self.used = 0
        self.unreadable: set[ChunkKey] = set()
        self.changed: dict[ChunkKey, int] | None = None
        self._largest = largest
        self._pending: dict[ChunkKey, int] = {}
        self._dying: dict[ChunkKey, int] = {}

    @property
    def capacity(self) -> int | None:
        """Bytes that the tier may hold, or None."""
        return self.settings.capacity

    def takes(self, key: ChunkKey, nbytes: int, *, replace: bool = False) -> bool:
        """Whether a put of a frame of at most `nbytes` makes sense now: not there, not under way, not too large."""
        limit = self._largest
        if limit is not None and nbytes > limit:
            return False
        if self.capacity is not None and nbytes > self.capacity:
            return False
        there = key in self.index and key not in self.unreadable
        return (replace or not there) and key not in self._pending and key not in self._dying

    def record(self, key: ChunkKey, nbytes: int, parent: bytes) -> None:
        """`key` is stored with `nbytes`: count it and give it to the policy."""
        self.used += nbytes - self.index.get(key, 0)
        self.index[key] = nbytes
        self.unreadable.discard(key)
        if self.changed is not None:
            self.changed[key] = 0
        if self.policy is not None:
            self.policy.add(key, parent or None)

    def record_all(self, sizes: Mapping[ChunkKey, int], parents: Mapping[ChunkKey, bytes | None]) -> None:
        """As `record` for each in turn: what is stored together, or found at a start, least recently used first."""
        self.used += sum(sizes.values()) - sum(self.index[key] for key in sizes.keys() & self.index.keys())
        self.index.update(sizes)
        if self.unreadable:
            self.unreadable.difference_update(sizes)
        if self.changed is not None:
            self.changed.update(sizes)
        if self._bulk is not None:
            self._bulk.add_all(parents)
        elif self.policy is not None:
            for key, parent in parents.items():
                self.policy.add(key, parent)

    def forget(self, key: ChunkKey) -> int:
        """`key` is no longer stored (or no longer ours to count); returns its bytes."""
        nbytes = self.index.pop(key, 0)
        self.used -= nbytes
        self.unreadable.discard(key)
        if self.changed is not None:
            self.changed[key] = 0
        if self.policy is not None:
            self.policy.remove(key)
        return nbytes

    def disown(self, key: ChunkKey) -> None:
        """`key` is stored and counted, but cannot be read here."""
        if key in self.index:
            self.unreadable.add(key)
            if self.changed is not None:
                self.changed[key] = 0

    def offers(self, key: ChunkKey) -> bool:
        """`key` is stored and can be read here, as far as is known."""
        return key in self.index and key not in self.unreadable

    def touch(self, keys: Sequence[ChunkKey]) -> None:
        """These frames were used."""
        policy = self.policy
        if policy is not None:
            for key in keys:
                policy.touch(key)

    def victims(self, nbytes: int, free: Callable[[ChunkKey], bool]) -> Iterable[ChunkKey]:
        """Keys whose eviction frees `nbytes`, as far as there are any that `free` allows; found as they are taken."""
        if self.policy is None or nbytes <= 0:
            return ()
        return self.policy.victims(nbytes, self.index.__getitem__, free)

    def shortfall(self, nbytes: int) -> int:
        """Bytes that must go before `nbytes` more fit; 0 or less: they fit."""
        return 0 if self.capacity is None else self.used + nbytes - self.capacity
