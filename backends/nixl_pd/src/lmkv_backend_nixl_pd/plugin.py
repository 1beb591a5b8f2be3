"""Offers what this distribution has to lmkv; imports nothing heavy."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lmkv.hookspecs import hookimpl
from lmkv.specs import CommandSpec, TransportSpec

if TYPE_CHECKING:
    from collections.abc import Iterable

    from lmkv.peer.transport import TransportFactory
    from lmkv.specs import Command


def _proxy() -> Command:
    from lmkv_backend_nixl_pd.proxy.command import ProxyCommand  # noqa: PLC0415  only when the verb is asked for

    return ProxyCommand()


def _nixl() -> TransportFactory:
    from lmkv_backend_nixl_pd.agent import bindings  # noqa: PLC0415  only when a node opens its peer port
    from lmkv_backend_nixl_pd.transport import NixlTransport  # noqa: PLC0415  as above

    bindings()  # says now whether the library is there
    return NixlTransport


@hookimpl
def lmkv_transports() -> Iterable[TransportSpec]:
    """Offer the transport `nixl`."""
    return [
        TransportSpec(name="nixl", summary="RDMA, or copies by the kernel, through NIXL and UCX", rank=10, load=_nixl)
    ]


@hookimpl
def lmkv_commands() -> Iterable[CommandSpec]:
    """Offer `lmkv proxy`."""
    return [CommandSpec(name="proxy", summary="an OpenAI-compatible proxy before several engines", load=_proxy)]
