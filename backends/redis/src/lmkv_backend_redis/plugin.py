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
    from lmkv_backend_redis.options import RedisOptions  # noqa: PLC0415  only when a tier of this kind is configured

    return RedisOptions


def _load() -> BackendFactory:
    from lmkv_backend_redis.backend import RedisBackend  # noqa: PLC0415  only when a tier of this kind is built

    return RedisBackend


@hookimpl
def lmkv_backends() -> Iterable[BackendSpec]:
    """Offer `backend: redis`."""
    return [
        BackendSpec(
            name="redis",
            summary="Redis or Valkey: one server, sentinel or cluster; TCP, TLS or unix socket",
            options=_options,
            load=_load,
        )
    ]
