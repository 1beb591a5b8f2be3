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
    from lmkv_backend_disk.options import DiskOptions  # noqa: PLC0415  only when a tier of this kind is configured

    return DiskOptions


def _load() -> BackendFactory:
    from lmkv_backend_disk.backend import create  # noqa: PLC0415  only when a tier of this kind is built

    return create


@hookimpl
def lmkv_backends() -> Iterable[BackendSpec]:
    """Offer `backend: disk`."""
    return [
        BackendSpec(
            name="disk",
            summary="local file system: one file per frame, found again after a restart",
            options=_options,
            load=_load,
        )
    ]
