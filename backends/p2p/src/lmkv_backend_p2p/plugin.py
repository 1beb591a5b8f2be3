"""Offers the backend to lmkv; imports nothing heavy."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lmkv.hookspecs import hookimpl
from lmkv.specs import BackendSpec

if TYPE_CHECKING:
    from collections.abc import Iterable

    from pydantic import BaseModel

    from lmkv.specs import BackendFactory


def _options() -> type[BaseModel]:
    from lmkv_backend_p2p.options import P2POptions  # noqa: PLC0415  only when a tier of this kind is configured

    return P2POptions


def _load() -> BackendFactory:
    from lmkv_backend_p2p.backend import P2PBackend  # noqa: PLC0415  only when a tier of this kind is built

    return P2PBackend


@hookimpl
def lmkv_backends() -> Iterable[BackendSpec]:
    """Offer `backend: p2p`."""
    return [
        BackendSpec(
            name="p2p",
            summary="Pools of other nodes, found through the controller or a list of peers; read-only",
            options=_options,
            load=_load,
        )
    ]
