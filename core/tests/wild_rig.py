"""A transport whose hardware touches the peer's memory by itself, as RDMA does: nobody asks a guard."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

from lmkv.hookspecs import hookimpl
from lmkv.peer.transport import Channel, Transport, TransportError, check_regions, unheeded
from lmkv.plugins import PluginHost
from lmkv.specs import TransportSpec

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from lmkv.memory import Pool
    from lmkv.peer.transport import Guard, Landed, Reach, Region, TransportContext


class Wild:
    """Plugin and fabric in one: every node of a test that has it can reach every other one's memory."""

    def __init__(self, rank: int = 5) -> None:
        self.rank = rank
        self.pools: dict[bytes, Pool] = {}
        self.dropped: list[int] = []
        self.moved = 0
        self.on_move: Callable[[], None] = lambda: None
        """Called in the thread of a call, before the bytes move. May raise, or wait."""
        self.too: dict[str, Any] = {"host": PluginHost.discover([self]), "transports": ("wild",)}
        """For `peer_rig.peer`: a node that has it, besides tcp."""

    @hookimpl
    def lmkv_transports(self) -> Iterable[TransportSpec]:
        """The one."""
        return [TransportSpec(name="wild", summary="memory of others", rank=self.rank, load=lambda: self._make)]

    def _make(self, pool: Pool, guard: Guard, context: TransportContext) -> Transport:
        blob = context.node.encode()
        self.pools[blob] = pool
        return WildTransport(self, pool, blob)


class WildTransport(Transport):
    name = "wild"
    remote_memory = True

    def __init__(self, wild: Wild, pool: Pool, blob: bytes) -> None:
        self.wild, self.pool, self.blob = wild, pool, blob

    def advertise(self) -> bytes:
        return self.blob

    def connect(self, reach: Reach, blob: bytes) -> Channel:
        if blob not in self.wild.pools:
            raise TransportError("no such memory")
        return WildChannel(self, self.wild.pools[blob])

    def drop(self, session: int) -> None:
        self.wild.dropped.append(session)

    def close(self) -> None:
        self.wild.pools.pop(self.blob, None)


class WildChannel(Channel):
    def __init__(self, transport: WildTransport, theirs: Pool) -> None:
        self.wild, self.ours, self.theirs = transport.wild, transport.pool, theirs
        self.closed = threading.Event()

    def read(self, remote: Sequence[Region], local: Sequence[Region], until: float, landed: Landed = unheeded) -> None:
        self._move(self.theirs, remote, self.ours, local)

    def write(self, local: Sequence[Region], remote: Sequence[Region], until: float) -> None:
        self._move(self.ours, local, self.theirs, remote)

    def _move(self, source: Pool, these: Sequence[Region], target: Pool, those: Sequence[Region]) -> None:
        check_regions(those if target is self.theirs else these, these if target is self.theirs else those, self.ours)
        self.wild.on_move()
        if self.closed.is_set():
            raise TransportError("the channel is closed")
        for one, other in zip(these, those, strict=True):
            target.cut(*other)[:] = source.cut(*one)
            self.wild.moved += one.nbytes

    def close(self) -> None:
        self.closed.set()
