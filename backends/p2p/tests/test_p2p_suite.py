"""The conformance kit, as far as a backend can pass it that only reads."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from fake_peers import FakePeers, Stocked, make

from lmkv.testing import BackendSuite

if TYPE_CHECKING:
    from collections.abc import Callable

    from lmkv.backend import StorageBackendInterface
    from lmkv.types import ChunkKey

ADDRESSES = ["127.0.0.1:7001", "127.0.0.1:7002"]


class TestP2PSuite(BackendSuite):
    """Frames are put into one of two peers behind the backend's back."""

    @pytest.fixture
    def make_backend(self, peers: FakePeers) -> Callable[[], StorageBackendInterface]:
        self.frames = peers.link(ADDRESSES[0]).frames
        return lambda: Stocked(make(peers, peers=ADDRESSES, deadline=20.0), self.frames)

    def read_back(self, key: ChunkKey) -> bytes | None:
        return self.frames.get(key)
