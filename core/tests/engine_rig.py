"""A fake engine's memory, a storage in a thread, and a client that can be meddled with."""

from __future__ import annotations

from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from lmkv.config import load_config
from lmkv.engine import CacheEngine
from lmkv.errors import LmkvError
from lmkv.gpu import CPUConnector
from lmkv.keys import Namespace
from lmkv.layout import PageLayout, PageRun
from lmkv.plugins import PluginHost
from lmkv.service import LocalClient, ThreadHost
from lmkv.service.link import Connection, StorageClient

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from numpy.typing import NDArray

PAGE, CHUNK, PAGES = 2, 8, 200
RUN = 512
SENTINEL = 0xEE
LAYOUT = PageLayout("test", "uint8", PAGE, tuple(PageRun(i, 0, RUN, RUN) for i in range(3)))


def config_text(pool: str = "8MiB", tail: str = "pages") -> str:
    return (
        f"pool: {{size: {pool}, prefault: false, hugepages: 'off'}}\nchunk_tokens: {CHUNK}\ntail: {tail}\n"
        "tiers:\n  - {name: ram, backend: cpu, capacity: 100%}\n"
    )


def thread_host(**options: str) -> ThreadHost:
    return ThreadHost(load_config(config_text(**options), host=PluginHost.discover(), environ={}))


def namespace(shards: int = 1, model: str = "m") -> Namespace:
    return Namespace(model, "r", "uint8", (LAYOUT.describe(),) * shards, (LAYOUT.page_bytes,) * shards, CHUNK, PAGE)


class Pages:
    """The memory of a fake engine."""

    def __init__(self) -> None:
        self.buffers = [np.full((PAGES, RUN), SENTINEL, np.uint8) for _ in LAYOUT.runs]
        self.gpu = CPUConnector(LAYOUT, self.buffers)

    def compute(self, tokens: NDArray[Any], ids: NDArray[Any], salt: int = 0) -> None:
        """KV of a deterministic model: depends on all tokens up to the page, on the layer and the salt."""
        for at, page in enumerate(ids):
            prefix = tokens[: (at + 1) * PAGE]
            if len(prefix) == (at + 1) * PAGE:
                for layer, buffer in enumerate(self.buffers):
                    buffer[page] = np.random.default_rng([*prefix.tolist(), layer, salt]).integers(
                        0, 200, RUN, np.uint8
                    )

    def equal(self, mine: NDArray[Any], other: Pages, theirs: NDArray[Any]) -> bool:
        return all((a[mine] == b[theirs]).all() for a, b in zip(self.buffers, other.buffers, strict=True))

    def untouched(self, ids: NDArray[Any]) -> bool:
        return all((buffer[ids] == SENTINEL).all() for buffer in self.buffers)


@pytest.fixture
def host() -> Iterator[ThreadHost]:
    one = thread_host()
    yield one
    one.close()


@pytest.fixture
def pages() -> Pages:
    return Pages()


@pytest.fixture
def engine(host: ThreadHost, pages: Pages) -> Iterator[CacheEngine]:
    with CacheEngine(LocalClient(host), namespace(), gpu=pages.gpu) as one:
        yield one


def held(engine: CacheEngine) -> dict[str, int]:
    return {name: n for name, n in engine.health().holds.items() if n and name != "sessions"}


def ids(first: int, tokens: int) -> NDArray[np.int64]:
    return np.arange(first, first + -(-tokens // PAGE))


def tokens_of(n: int, seed: int = 1) -> NDArray[np.uint32]:
    return np.random.default_rng(seed).integers(0, 1 << 32, n, np.uint32)


class Meddler(StorageClient):
    """A client whose requests and replies a test can look at and change."""

    def __init__(self, inner: StorageClient) -> None:
        self.inner = inner
        self.seen: list[Any] = []
        self.change: Callable[[Any, Any], Any] = lambda _request, reply: reply
        self.link = _MeddledConnection(self)

    def connection(self) -> Connection:
        return self.link

    @property
    def welcome(self) -> Any:
        return self.inner.welcome

    @property
    def connected(self) -> bool:
        return self.inner.connected

    def on_reconnect(self, callback: Callable[[], None]) -> None:
        self.inner.on_reconnect(callback)

    def close(self) -> None:
        self.inner.close()


class _MeddledConnection(Connection):
    def __init__(self, client: Meddler) -> None:
        super().__init__()
        self.client = client
        self.inner = client.inner.connection()
        self.pool, self.welcome = self.inner.pool, self.inner.welcome
        self.whole = True

    def call(self, request: Any) -> Any:
        self.client.seen.append(request)
        answer: Future[Any] = Future()

        def done(future: Future[Any]) -> None:
            try:
                answer.set_result(self.client.change(request, future.result()))
            except LmkvError as e:
                answer.set_exception(e)

        self.inner.call(request).add_done_callback(done)
        return answer

    def send(self, message: Any) -> bool:
        self.client.seen.append(message)
        return self.inner.send(message)

    @property
    def alive(self) -> bool:
        return self.inner.alive

    def intact(self) -> bool:
        return self.whole


@pytest.fixture
def meddler(host: ThreadHost) -> Meddler:
    return Meddler(LocalClient(host))
