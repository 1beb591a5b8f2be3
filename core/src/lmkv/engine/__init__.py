"""CacheEngine: store, retrieve and look up KV pages, by key (connectors) and by tokens (library use)."""

from __future__ import annotations

from lmkv.engine.cache import CacheEngine
from lmkv.engine.frames import digests_of, frame_of, tail_of
from lmkv.engine.lookup import Hit, LookupTicket
from lmkv.engine.transfer import RetrieveItem, StoreItem, StoreResult

__all__ = [
    "CacheEngine",
    "Hit",
    "LookupTicket",
    "RetrieveItem",
    "StoreItem",
    "StoreResult",
    "digests_of",
    "frame_of",
    "tail_of",
]
