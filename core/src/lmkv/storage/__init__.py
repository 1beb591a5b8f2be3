"""The stack of tiers: index, promises, drivers, eviction. One asyncio loop, one writer."""

from __future__ import annotations

from lmkv.storage.manager import StorageManager

__all__ = ["StorageManager"]
