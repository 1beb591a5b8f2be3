"""What is remembered of who has what, between a look-up and the loads that follow it."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Sequence

    from lmkv_backend_p2p.sources import Holder

MOST: Final = 1 << 16
"""Chunks remembered at most; the oldest go first."""


class Places:
    """Chunk → the peers that have it. Thread-safe."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._known: OrderedDict[tuple[bytes, bytes], tuple[float, dict[str, float]]] = OrderedDict()
        self._lock = threading.Lock()

    def learn(self, namespace: bytes, digests: Sequence[bytes], holders: Sequence[Holder]) -> None:
        """What `holders` say now replaces what was known."""
        until = time.monotonic() + self._seconds
        with self._lock:
            for i, digest in enumerate(digests):
                where = {holder.address: holder.wait for holder in holders if holder.held[i]}
                self._known.pop((namespace, digest), None)
                if where:
                    self._known[namespace, digest] = (until, where)
            while len(self._known) > MOST:
                self._known.popitem(last=False)

    def of(self, namespace: bytes, digest: bytes) -> dict[str, float]:
        """Address → how busy it was, of every peer that is known to have it."""
        with self._lock:
            until, where = self._known.get((namespace, digest), (0.0, {}))
            return dict(where) if until > time.monotonic() else {}

    def gone(self, namespace: bytes, digest: bytes, address: str) -> None:
        """That peer does not have it after all."""
        with self._lock:
            _, where = self._known.get((namespace, digest), (0.0, {}))
            where.pop(address, None)
