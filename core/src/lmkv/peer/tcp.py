"""The transport over TCP: several sockets to each peer, bytes straight between them and the pool."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lmkv.peer.transport import Channel, Transport

if TYPE_CHECKING:
    from lmkv.memory import Pool
    from lmkv.peer.transport import Guard, Reach, TransportContext


class TcpTransport(Transport):
    """Serves data sockets in threads and opens them to peers."""

    name = "tcp"

    def __init__(self, pool: Pool, guard: Guard, context: TransportContext) -> None:
        self._pool = pool
        self._guard = guard
        self._context = context

    def advertise(self) -> bytes:
        """Nothing: the peer's port is known."""
        return b""

    def connect(self, reach: Reach, blob: bytes) -> Channel:
        """As the contract says."""
        raise NotImplementedError

    def close(self) -> None:
        """As the contract says."""
