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
    from lmkv_backend_cpu.options import CpuOptions  # noqa: PLC0415  only when a tier of this kind is configured

    return CpuOptions


def _load() -> BackendFactory:
    from lmkv_backend_cpu.backend import CpuBackend  # noqa: PLC0415  only when a tier of this kind is built

    return CpuBackend


@hookimpl
def lmkv_backends() -> Iterable[BackendSpec]:
    """Offer `backend: cpu`."""
    return [
        BackendSpec(
            name="cpu",
            summary="host memory: keeps memory objects of the pool, without a copy",
            options=_options,
            load=_load,
        )
    ]
