"""What has landed of a call that fills several objects."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from lmkv.memory import MemoryObject


class Landing:
    """A `Landed` that tells each of the objects which a call fills one after the other how far it is."""

    def __init__(self, objects: Sequence[MemoryObject], sizes: Sequence[int]) -> None:
        self._left = list(zip(objects, sizes, strict=True))[::-1]
        self._before = 0

    def __call__(self, nbytes: int) -> None:
        """So many bytes of all of them, in order."""
        while self._left:
            obj, size = self._left[-1]
            obj.landed(min(size, nbytes - self._before))
            if nbytes - self._before < size:
                return
            self._before += size
            self._left.pop()
