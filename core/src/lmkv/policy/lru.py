"""Least recently used first."""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from lmkv.types import ChunkKey


class LRU:
    """Evicts what was used longest ago. All calls O(1); `victims` O(victims + entries passed over as not free)."""

    def __init__(self) -> None:
        self._keys: OrderedDict[ChunkKey, None] = OrderedDict()

    def add(self, key: ChunkKey, parent: bytes | None) -> None:  # noqa: ARG002  the policy does not care for order in a prompt
        """`key` was stored; it becomes the most recently used."""
        self._keys[key] = None
        self._keys.move_to_end(key)

    def add_all(self, parents: Mapping[ChunkKey, bytes | None]) -> None:
        """As `add` for each in turn."""
        for key in parents:
            self.add(key, None)

    def touch(self, key: ChunkKey) -> None:
        """`key` was used. Unknown keys are ignored."""
        if key in self._keys:
            self._keys.move_to_end(key)

    def remove(self, key: ChunkKey) -> None:
        """`key` has gone. Unknown keys are ignored."""
        self._keys.pop(key, None)

    def victims(
        self, nbytes: int, size: Callable[[ChunkKey], int], free: Callable[[ChunkKey], bool]
    ) -> Iterator[ChunkKey]:
        """Keys to evict, in order, until `nbytes` are covered; each is looked for when it is taken."""
        if nbytes <= 0:
            return
        for key in self._keys:
            if free(key):
                yield key
                nbytes -= size(key)
                if nbytes <= 0:
                    return
