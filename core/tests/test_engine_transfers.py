"""Requests that move between nodes, as who uses a `CacheEngine` has them: pushed from here, awaited there."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from lmkv.config import load_config
from lmkv.engine import CacheEngine, StoreItem, frame_of, tail_of
from lmkv.errors import ConfigError, ProtocolError
from lmkv.gpu import CPUConnector
from lmkv.keys import Namespace
from lmkv.layout import PageLayout, PageRun
from lmkv.plugins import PluginHost
from lmkv.service import LocalClient, ThreadHost
from lmkv.service.protocol import Ok, TransferState

if TYPE_CHECKING:
    from collections.abc import Iterator

PAGE, CHUNK, PAGE_BYTES = 2, 8, 64
LAYOUT = PageLayout("test", "uint8", PAGE, (PageRun(0, 0, PAGE_BYTES, PAGE_BYTES),))
SPACE = Namespace("m", "r", "uint8", (LAYOUT.describe(),), (PAGE_BYTES,), CHUNK, PAGE)
TOKENS = list(range(30))
SECONDS = 20.0


class Node:
    """A service and an engine's memory."""

    def __init__(self, *, peer: bool = True) -> None:
        settings: dict[str, Any] = {
            "chunk_tokens": CHUNK,
            "pool": {"size": "1MiB", "prefault": False, "hugepages": "off"},
            "tiers": [{"name": "ram", "backend": "cpu", "capacity": "100%"}],
        }
        if peer:
            settings["peer"] = {"listen": "127.0.0.1:0", "transports": ["tcp"]}
        self.host = ThreadHost(load_config(settings, host=PluginHost.discover(), environ={}))
        self.memory = np.zeros((16, PAGE_BYTES), np.uint8)
        self.engine = CacheEngine(
            LocalClient(self.host, "engine"), SPACE, gpu=CPUConnector(LAYOUT, [self.memory.reshape(-1)])
        )
        node = self.host.storage.peer
        self.address = "" if node is None else node.address

    def reached(self, name: str, seconds: float = SECONDS) -> TransferState:
        answer = self.engine.await_transfer(name, seconds).result(SECONDS)
        assert isinstance(answer, TransferState)
        return answer

    def close(self) -> None:
        self.engine.close()
        self.host.close()


@pytest.fixture
def nodes() -> Iterator[tuple[Node, Node]]:
    made = Node(), Node()
    yield made
    for node in made:
        node.close()


def held(node: Node) -> int:
    return sum(count for name, count in node.engine.health().holds.items() if name not in {"sessions", "pins"})


def test_what_is_stored_here_is_retrieved_there(nodes: tuple[Node, Node]) -> None:
    """Announced before it is stored; the tail with the last word. Kept there until it is let go."""
    here, there = nodes
    here.memory[:] = np.random.default_rng(0).integers(1, 256, here.memory.shape, np.uint8)
    chain = here.engine.chain()
    chain.extend(np.array(TOKENS, np.uint32))
    tail = tail_of(chain)
    assert tail is not None
    for number, digest in enumerate(chain.digests):
        answer = here.engine.transfer("t", there.address, [digest], tokens=30, final=False)
        assert answer.result(SECONDS) == Ok(1)
        pages = np.arange(number * 4, number * 4 + 4)
        here.engine.store_frames([StoreItem(frame_of(chain, number), pages)])
    assert there.reached("t", 0.0).state in {"open", "unknown"}
    here.engine.store_frames([StoreItem(tail, np.arange(12, 15))])
    here.engine.transfer("t", there.address, [tail.digest], tokens=30, final=True).result(SECONDS)
    end = time.monotonic() + SECONDS
    while there.reached("t").state == "unknown":  # nobody has admitted it before
        assert time.monotonic() < end
    assert there.reached("t") == TransferState("complete", 30)
    assert held(there)
    assert there.engine.retrieve(TOKENS, np.arange(15)).all()
    assert (there.memory[:15] == here.memory[:15]).all()
    there.engine.end_transfer("t")
    assert there.reached("t").state == "complete", "how it ended is still known"
    assert not held(there)


def test_what_a_client_has_begun_goes_with_it(nodes: tuple[Node, Node]) -> None:
    here, there = nodes
    client = LocalClient(here.host, "other")
    with CacheEngine(client, SPACE) as other:
        other.transfer("t", there.address, [b"d" * 32], tokens=8, final=False).result(SECONDS)
        end = time.monotonic() + SECONDS
        while there.reached("t", 0.0).state == "unknown":
            assert time.monotonic() < end
            time.sleep(0.01)
    assert there.reached("t").state == "aborted"


def test_what_a_client_that_has_gone_did_not_store_is_not_waited_for(nodes: tuple[Node, Node]) -> None:
    """An engine dies between its last word and its last save: the other node hears at once what there is."""
    here, there = nodes
    chain = here.engine.chain()
    chain.extend(np.array(TOKENS, np.uint32))
    here.engine.store_frames([StoreItem(frame_of(chain, 0), np.arange(4))])
    with CacheEngine(LocalClient(here.host, "dies"), SPACE) as other:
        other.transfer("t", there.address, chain.digests, tokens=24, final=True).result(SECONDS)
        end = time.monotonic() + SECONDS
        outgoing = here.host.storage.peer.outgoing  # type: ignore[union-attr]
        while outgoing.state("t").tokens < 8:
            assert time.monotonic() < end
            time.sleep(0.01)
        assert there.reached("t", 0.1).state == "open"
    assert there.reached("t", SECONDS) == TransferState("complete", 8)


def test_a_wait_ends(nodes: tuple[Node, Node]) -> None:
    here, there = nodes
    here.engine.transfer("t", there.address, [b"d" * 32], tokens=8, final=False).result(SECONDS)
    end = time.monotonic() + SECONDS
    while there.reached("t", 0.0).state == "unknown":
        assert time.monotonic() < end
        time.sleep(0.01)
    begun = time.monotonic()
    assert there.reached("t", 0.1).state == "open"
    assert time.monotonic() - begun >= 0.1
    here.engine.end_transfer("t")
    assert there.reached("t").state == "aborted"


def test_what_cannot_be_is_refused() -> None:
    node = Node(peer=False)
    with pytest.raises(ConfigError, match=r"peer\.listen"):
        node.engine.transfer("t", "127.0.0.1:9", [], tokens=1, final=False).result(SECONDS)
    with pytest.raises(ConfigError, match=r"peer\.listen"):
        node.engine.await_transfer("t", 1.0).result(SECONDS)
    node.close()
    node = Node()
    with pytest.raises(ProtocolError, match="name"):
        node.engine.transfer("", "127.0.0.1:9", [], tokens=1, final=False).result(SECONDS)
    with pytest.raises(ProtocolError, match="name"):
        node.engine.await_transfer("x" * 1000, 1.0).result(SECONDS)
    node.close()
