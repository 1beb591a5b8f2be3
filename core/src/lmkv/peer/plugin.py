"""What the core itself offers to the peer protocol through the hooks: the transport over TCP. Imports it when used."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lmkv.hookspecs import hookimpl
from lmkv.specs import TransportSpec

if TYPE_CHECKING:
    from collections.abc import Iterable

    from lmkv.peer.transport import TransportFactory


@hookimpl
def lmkv_transports() -> Iterable[TransportSpec]:
    """`tcp`, which every node has: what is left when nothing better is common to two peers."""
    return [TransportSpec(name="tcp", summary="several TCP connections, optionally TLS", rank=0, load=_tcp)]


def _tcp() -> TransportFactory:
    from lmkv.peer.tcp import TcpTransport  # noqa: PLC0415  loaded when used

    return TcpTransport
