"""The pool: one shared arena of host memory, cut into memory objects with owner counts."""

from __future__ import annotations

from lmkv.memory.object import Holding, MemoryObject
from lmkv.memory.pool import Pool

__all__ = ["Holding", "MemoryObject", "Pool"]
