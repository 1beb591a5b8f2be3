"""Peers as seen from here: a link to each, and what is asked over it.

`Peers` has a loop in a thread of its own, `lmkv-peers`. A `PeerLink` connects when it is first used, shakes hands,
answers who waits, and connects anew after a failure, a restart of the peer or a silence. Bytes move through the best
transport that both sides have, in threads.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Sequence
    from concurrent.futures import Future

    from lmkv.memory import MemoryObject
    from lmkv.peer import messages as m
    from lmkv.types import ChunkKey, Outcome

Result = TypeVar("Result")


class Frame(NamedTuple):
    """One sealed frame of the own pool that is to be pushed; the caller keeps its memory until the push has ended."""

    key: ChunkKey
    parent: bytes
    pages: int
    prefixes: bytes
    object: MemoryObject


class PeerLink:
    """One peer. Its coroutines run on the loop of `Peers` only: see `Peers.run` and `Peers.submit`.

    Every call ends by `until` (time of `time.monotonic`), with an answer or an error; what a call that was too late
    had got from the peer is given back. Errors of all calls:

        ClosedError: the peer is not reachable, has gone, or fell silent.
        ProtocolError: another version, another key, or no lmkv at all.
        LmkvError: what the peer refused with; kinds as there.

    Attributes:
        address: `host:port`.
        node: the peer's name; empty before the first connection.
        incarnation: of the peer; 0 before the first connection.
    """

    address: str
    node: str
    incarnation: int

    async def ask(self, request: m.Request, until: float) -> m.Reply:
        """Any request and its answer (never a `PeerRefused`, which is raised)."""
        raise NotImplementedError

    async def agree(self, namespace_json: str, until: float) -> None:
        """Check that both sides have the same namespace; `ConfigError` with what differs. Asked once a connection."""
        raise NotImplementedError

    async def has(self, namespace: bytes, digests: Sequence[bytes], until: float) -> tuple[list[bool], float]:
        """Which chunks the peer has, all shards of them, and how many seconds a pull would wait for its turn."""
        raise NotImplementedError

    async def pull(self, keys: Sequence[ChunkKey], into: Sequence[MemoryObject], until: float) -> list[Outcome]:
        """Read frames into memory of the own pool.

        One outcome per key: `OK(nbytes)`, `MISS`, or `FAILED` where the memory is too small or the bytes did not come.
        They are *not* verified: the caller does that, as a tier does. Memory is not touched after the return.
        All keys are of one namespace.
        """
        raise NotImplementedError

    async def push(self, frames: Sequence[Frame], until: float, *, transfer: str = "") -> list[Outcome]:
        """Write sealed frames into the peer's pool.

        One outcome per frame: `OK(nbytes)` (also if the peer has it already), `REJECTED` (no room) or `FAILED`.
        """
        raise NotImplementedError


class Peers:
    """The links of a node, one per address. Thread-safe. Closed with the service.

    Made by the node (`NodeStorage.peers`). For asking only (no bytes), as a proxy does: `Peers.asking(key=…)`.
    """

    def link(self, address: str) -> PeerLink:
        """The link to `host:port`, made at the first use; `ConfigError` for what is no address."""
        raise NotImplementedError

    def run(self, coroutine: Coroutine[Any, Any, Result]) -> Result:
        """Run a coroutine of a link and wait for its result: for threads, not for loops."""
        raise NotImplementedError

    def submit(self, coroutine: Coroutine[Any, Any, Result]) -> Future[Result]:
        """The same without waiting; on a loop: ``await asyncio.wrap_future(peers.submit(…))``."""
        raise NotImplementedError

    def has(self, address: str, namespace: bytes, digests: Sequence[bytes], until: float) -> tuple[list[bool], float]:
        """As `PeerLink.has`. Blocking."""
        raise NotImplementedError

    def pull(self, address: str, keys: Sequence[ChunkKey], into: Sequence[MemoryObject], until: float) -> list[Outcome]:
        """As `PeerLink.pull`. Blocking."""
        raise NotImplementedError

    def push(self, address: str, frames: Sequence[Frame], until: float, *, transfer: str = "") -> list[Outcome]:
        """As `PeerLink.push`. Blocking."""
        raise NotImplementedError

    def on_restart(self, callback: Callable[[str, int], None]) -> None:
        """Call `callback(address, incarnation)`, on the loop of the peers, when a peer is seen to have restarted."""
        raise NotImplementedError

    def close(self) -> None:
        """Close all links, end the thread. Idempotent. Blocking, for as long as copies under way take to break off."""
        raise NotImplementedError
