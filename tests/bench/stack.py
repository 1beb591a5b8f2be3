"""The real stack under a measurement: in a thread of this process, or as a service of its own behind its socket."""

from __future__ import annotations

import tempfile
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from lmkv.config import load_config
from lmkv.engine import CacheEngine, RetrieveItem, StoreItem, frame_of
from lmkv.gpu import CPUConnector
from lmkv.keys import KeyChain, Namespace
from lmkv.layout import PageLayout, PageRun
from lmkv.plugins import PluginHost
from lmkv.service import LocalClient, ThreadHost
from lmkv.service.spawn import connect_or_start

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

    from lmkv.service.link import StorageClient

CHUNK_TOKENS = 256
PAGE_TOKENS = 16
CHUNK_PAGES = CHUNK_TOKENS // PAGE_TOKENS


@contextmanager
def client(*, through_socket: bool, pool: int, ram: str = "100%", **settings: Any) -> Iterator[StorageClient]:
    """A client of a stack with one RAM tier."""
    config = load_config(
        {
            "chunk_tokens": CHUNK_TOKENS,
            "pool": {"size": pool, "staging": "10%"},
            "tiers": [{"name": "ram", "backend": "cpu", "capacity": ram}],
            **settings,
        },
        host=PluginHost.discover(),
        environ={},
    )
    if not through_socket:
        host = ThreadHost(config)
        try:
            yield _settled(LocalClient(host, "bench"))
        finally:
            host.close()
        return
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "lmkv.sock"
        made = connect_or_start(config.text, path, "bench")
        try:
            yield _settled(made)
        finally:
            made.close()
            until = time.monotonic() + 10
            while path.exists() and time.monotonic() < until:
                time.sleep(0.02)


def _settled(client: StorageClient) -> StorageClient:
    """After the pool's pages have been touched, which goes on in the background of this process and the service's."""
    until = time.monotonic() + 30
    while not client.pool.prefaulted and time.monotonic() < until:
        time.sleep(0.05)
    time.sleep(0.5)
    return client


class Pages:
    """Paged memory of an engine, all touched: for each layer one buffer of `pages` runs of `run` bytes."""

    def __init__(self, *, layers: int, run: int, pages: int) -> None:
        runs = tuple(PageRun(layer, 0, run, run) for layer in range(layers))
        self.layout = PageLayout("LBNHC", "bfloat16", PAGE_TOKENS, runs)
        dice = np.random.default_rng(0)
        # Of torch, as an engine's: numpy's own memory begins elsewhere in a page of the machine, which memcpy feels.
        noise = [torch.from_numpy(dice.integers(0, 256, pages * run, np.uint8)) for _ in range(layers)]
        self.buffers = [layer.clone().numpy() for layer in noise]
        self.gpu = CPUConnector(self.layout, self.buffers)
        self._order = dice.permutation(pages).astype(np.int64)

    def engine(self, client: StorageClient) -> CacheEngine:
        """A cache engine on these pages."""
        page_bytes = self.layout.page_bytes
        space = Namespace("bench", "1", "bfloat16", (self.layout.describe(),), (page_bytes,), CHUNK_TOKENS, PAGE_TOKENS)
        return CacheEngine(client, space, gpu=self.gpu)

    def scattered(self, chunks: int) -> list[NDArray[np.int64]]:
        """Page ids of so many chunks, which lie anywhere."""
        return [self._order[i * CHUNK_PAGES : (i + 1) * CHUNK_PAGES] for i in range(chunks)]


def chain(chunks: int, seed: int) -> KeyChain:
    """Random tokens that make so many chunks."""
    made = KeyChain(CHUNK_TOKENS, PAGE_TOKENS)
    made.extend(np.random.default_rng(seed).integers(0, 50_000, chunks * CHUNK_TOKENS).astype(np.uint32))
    return made


def store_items(keys: KeyChain, pages: Sequence[NDArray[np.int64]]) -> list[StoreItem]:
    """All chunks of a chain."""
    return [StoreItem(frame_of(keys, i), ids) for i, ids in enumerate(pages)]


def retrieve_items(pages: Sequence[NDArray[np.int64]]) -> list[RetrieveItem]:
    """All chunks of a lease."""
    return [RetrieveItem(i, CHUNK_PAGES, ids) for i, ids in enumerate(pages)]
