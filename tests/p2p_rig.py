"""Nodes that read from each other: each on a loopback address of its own, with an engine, in this process or another.

python p2p_rig.py SLOT PROMPTS CHUNKS: a node in a process of its own. Stores, says where it listens, serves until its
standard input ends.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fake_engine import CHUNK, PLUGINS, SHAPE, FakeEngine, Node, Request, Shape, prompts
from server_rig import HOST, free_port

from lmkv.config import load_config

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from typing import Self

    from lmkv.config import Config

DEADLINE = 1.0
"""So long that nothing but the tier can be the reason for such a wait."""
PROBE = 0.2
SLACK = 3.0
"""Two busy cores are in no hurry."""
SETTINGS = ("deadline", "breaker", "read", "threads", "write")


def far(**options: Any) -> dict[str, Any]:
    """The tier of other nodes; keyword arguments that are no options of it are settings of the tier."""
    settings = {key: options.pop(key) for key in SETTINGS if key in options}
    return {
        "name": "far",
        "backend": "p2p",
        "write": "never",
        "deadline": f"{DEADLINE}s",
        "breaker": {"failures": 3, "probe": f"{PROBE}s"},
        "options": {"rest": "200ms", **options},
        **settings,
    }


def stack(*tiers: dict[str, Any], shape: Shape = SHAPE, ram: int | None = 64, **groups: Any) -> Config:
    """A RAM tier of so many frames (unless None) above `tiers`."""
    first = [] if ram is None else [{"name": "ram", "backend": "cpu", "capacity": ram * shape.frame}]
    pool = {"size": 256 * shape.frame, "staging": 64 * shape.frame, "prefault": False}
    return load_config(
        {"chunk_tokens": CHUNK, "pool": pool, "tiers": [*first, *tiers], **groups}, host=PLUGINS, environ={}
    )


class Member(Node):
    """A node of the fleet, with an engine."""

    def __init__(self, config: Config, shape: Shape = SHAPE) -> None:
        super().__init__(config)
        self.llm: FakeEngine = self.engine(shape=shape)

    @property
    def address(self) -> str:
        """Where others read from."""
        peer = self.host.storage.peer
        assert peer is not None
        return peer.address

    @property
    def far(self) -> dict[str, Any]:
        """What the node says of its tier of other nodes."""
        found: dict[str, Any] = self.on_loop(self.manager.health)[1]["far"]
        return found

    def pulled(self) -> float:
        """Bytes that came from others."""
        return self.counter("lmkv_peer_bytes_total", op="pull")

    def served(self) -> float:
        """Bytes that others have read here."""
        return self.counter("lmkv_peer_served_bytes_total", way="out")


class Fleet:
    """The nodes of a test, closed at its end; nothing may be held then."""

    def __init__(self) -> None:
        self._numbers = iter(range(2, 255))
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def node(
        self,
        name: str,
        *tiers: dict[str, Any],
        listen: str = "",
        shape: Shape = SHAPE,
        ram: int | None = 64,
        peer: dict[str, Any] | None = None,
        **groups: Any,
    ) -> Member:
        """A node that others can read from, with `tiers` below its RAM."""
        listen = listen or f"127.0.0.{next(self._numbers)}:0"
        section = {"node": name, "listen": listen, "transports": ["tcp"], "share": "100%", **(peer or {})}
        made = Member(stack(*tiers, shape=shape, ram=ram, peer=section, **groups), shape)
        self._stack.callback(made.close)
        return made


def place(host: str = HOST) -> str:
    """An address that nobody listens on yet."""
    return f"{host}:{free_port(host)}"


def target(address: str) -> tuple[str, int]:
    """The same for a `FaultProxy`."""
    host, _, port = address.rpartition(":")
    return host, int(port)


def serve(engine: FakeEngine, prompt: Sequence[int]) -> tuple[int, float]:
    """One request from look-up to store: tokens that came, all of them right, and how long it waited for them."""
    begin = time.monotonic()
    request = Request([engine], prompt).queue().look_up().allocate().load()
    waited = time.monotonic() - begin
    request.run().store().finish()
    return request.computed, waited


def until(true: Callable[[], bool], what: str, seconds: float = 20.0) -> None:
    """Wait for a condition."""
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, f"not within {seconds:g} s: {what}"
        time.sleep(0.02)


@contextlib.contextmanager
def process(shape: Shape, count: int, chunks: int, **peer: Any) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A node in another process that has the first `count` of `prompts`, of so many chunks; and its address."""
    here = Path(__file__).resolve().parent
    command = [sys.executable, __file__, str(shape.slot), str(count), str(chunks), json.dumps(peer)]
    path = [str(here), str(here.parent / "core" / "tests"), os.environ.get("PYTHONPATH", "")]
    child = subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path)},
    )
    assert child.stdout is not None
    try:
        yield child, child.stdout.readline().strip()
    finally:
        child.kill()
        child.communicate()


def main() -> None:
    """The process."""
    slot, count, chunks = map(int, sys.argv[1:4])
    shape = Shape(slot=slot)
    with Fleet() as fleet:
        node = fleet.node("child", shape=shape, listen="127.0.0.1:0", peer=json.loads(sys.argv[4]))
        for prompt in prompts(count, chunks * CHUNK):
            assert node.llm.store(prompt) == len(prompt)
        sys.stdout.write(node.address + "\n")
        sys.stdout.flush()
        sys.stdin.read()


if __name__ == "__main__":
    main()
