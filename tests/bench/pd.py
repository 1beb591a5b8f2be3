"""How much of a transfer from a prefill to a decode node is hidden behind the prefill: two services, two processes.

The engine is played: chunks of 32 MiB (a model of 8 billion parameters with 16-bit KV) become ready one after the other
at the pace of an accelerator, which leaves this machine's cores alone as that does. All that follows is real: the copy
into the pool, the push, the check on the other side, and the word that it is complete. A vLLM on two cores computes
so much more slowly that anything would be hidden.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Any

import numpy as np
from tests.bench.harness import Row, against, interleaved

from lmkv.config import load_config
from lmkv.engine import CacheEngine, StoreItem, StoreResult, frame_of
from lmkv.errors import PluginError
from lmkv.gpu import CPUConnector
from lmkv.keys import KeyChain, Namespace
from lmkv.layout import PageLayout, PageRun
from lmkv.plugins import PluginHost
from lmkv.service import LocalClient, ThreadHost
from lmkv.service.protocol import Clear, Ok, TransferState

if TYPE_CHECKING:
    from collections.abc import Sequence

CHUNKS = 8
CHUNK_TOKENS = 256
PAGES = 16
PAGE_BYTES = 2 << 20
TOKENS_PER_SECOND = 5000.0
"""Of the prefill that is played."""
ROUNDS = 7
LONG = 60.0


class Node:
    """A service of this process and an engine's cache."""

    def __init__(self, transport: str, pages: int) -> None:
        settings = {
            "chunk_tokens": CHUNK_TOKENS,
            "pool": {"size": "1GiB"},
            "tiers": [{"name": "ram", "backend": "cpu", "capacity": "100%"}],
            "peer": {"listen": "127.0.0.1:0", "transports": [transport]},
        }
        self.host = ThreadHost(load_config(settings, host=PluginHost.discover(), environ={}))
        layout = PageLayout("bench", "bf16", CHUNK_TOKENS // PAGES, (PageRun(0, 0, PAGE_BYTES, PAGE_BYTES),))
        space = Namespace("b", "1", "bf16", (layout.describe(),), (PAGE_BYTES,), CHUNK_TOKENS, CHUNK_TOKENS // PAGES)
        memory = np.random.default_rng(0).integers(0, 256, max(1, pages) * PAGE_BYTES, np.uint8)
        self.engine = CacheEngine(LocalClient(self.host, "bench"), space, gpu=CPUConnector(layout, [memory]))
        peer = self.host.storage.peer
        assert peer is not None
        self.address = peer.address
        while not self.host.storage.pool.prefaulted:
            time.sleep(0.05)

    def clear(self) -> None:
        self.engine.client.call(Clear(self.engine.namespace.id)).result(LONG)

    def close(self) -> None:
        self.engine.close()
        self.host.close()


class Decode:
    """The other node, in a process of its own."""

    def __init__(self, transport: str) -> None:
        command = [sys.executable, "-m", "tests.bench.pd", transport]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.address: str = self._answer()

    def tell(self, what: str, name: str = "") -> None:
        assert self._process.stdin is not None
        print(json.dumps([what, name]), file=self._process.stdin, flush=True)

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        return json.loads(self._process.stdout.readline())

    def clear(self) -> None:
        self.tell("clear")
        self._answer()

    def complete(self, name: str) -> float:
        """When all of a transfer had come, by the clock that all processes share."""
        self.tell("await", name)
        state, tokens, when = self._answer()
        assert (state, tokens) == ("complete", CHUNKS * CHUNK_TOKENS), (state, tokens)
        return float(when)

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()


class Prefill:
    """The node here."""

    def __init__(self, transport: str, decode: Decode) -> None:
        self._node = Node(transport, CHUNKS * PAGES)
        self._decode = decode
        self._number = 0

    def close(self) -> None:
        self._node.close()

    def chunk_by_chunk(self, _: int) -> float:
        """Seconds from the end of the last chunk's computation until all has come."""
        name, keys = self._begin()
        self._announce(name, [], final=False)
        time.sleep(0.1)  # it waits for its turn in the engine's queue; the nodes meet meanwhile
        for number in range(CHUNKS):
            time.sleep(CHUNK_TOKENS / TOKENS_PER_SECOND)
            computed = time.monotonic()
            self._announce(name, keys.digests[: number + 1], final=number == CHUNKS - 1)
            self._store(keys, [number])
        return self._decode.complete(name) - computed

    def at_once(self, _: int) -> float:
        """Seconds from the end of all computation until all has come, when nothing is done before."""
        name, keys = self._begin()
        self._announce(name, [], final=False)
        time.sleep(0.1)
        computed = time.monotonic()
        self._announce(name, keys.digests, final=True)
        self._store(keys, range(CHUNKS))
        return self._decode.complete(name) - computed

    def _begin(self) -> tuple[str, KeyChain]:
        self._node.clear()
        self._decode.clear()
        self._number += 1
        keys = KeyChain(CHUNK_TOKENS, CHUNK_TOKENS // PAGES)
        dice = np.random.default_rng(self._number)
        keys.extend(dice.integers(0, 50_000, CHUNKS * CHUNK_TOKENS).astype(np.uint32))
        return f"t{self._number}", keys

    def _announce(self, name: str, digests: Sequence[bytes], *, final: bool) -> None:
        tokens = CHUNKS * CHUNK_TOKENS
        asked = self._node.engine.transfer(name, self._decode.address, digests, tokens=tokens, final=final)
        assert isinstance(asked.result(LONG), Ok)

    def _store(self, keys: KeyChain, numbers: Sequence[int]) -> None:
        items = [StoreItem(frame_of(keys, i), np.arange(i * PAGES, (i + 1) * PAGES, dtype=np.int64)) for i in numbers]
        assert set(self._node.engine.store_frames(items)) == {StoreResult.STORED}


def hidden() -> list[Row]:
    """A row for each transport that is here."""
    rows = []
    for transport in ("nixl", "tcp"):
        try:
            PluginHost.discover().load_transport(transport)
        except PluginError:
            continue
        decode = Decode(transport)
        prefill = Prefill(transport, decode)
        try:
            pairs = interleaved(prefill.chunk_by_chunk, prefill.at_once, ROUNDS)
        finally:
            prefill.close()
            decode.close()
        work = (
            f"prefill/decode over {transport}: what is left after the last of {CHUNKS} chunks of 32 MiB is computed "
            f"({TOKENS_PER_SECOND:.0f} tokens/s, played), of the whole transfer (engine API, two services)"
        )
        rows.append(against(work, "s", pairs, at_most=0.2))
    return rows


def main() -> None:
    """The decode node: does what it is told line by line, until its input ends."""
    node = Node(sys.argv[1], 1)
    _say(node.address)
    for line in sys.stdin:
        what, name = json.loads(line)
        if what == "clear":
            node.clear()
            _say(None)
            continue
        state = node.engine.await_transfer(name, LONG).result(LONG)
        when = time.monotonic()
        node.engine.end_transfer(name)
        assert isinstance(state, TransferState)
        _say([state.state, state.tokens, when])
    node.close()


def _say(what: Any) -> None:
    sys.stdout.write(json.dumps(what) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
