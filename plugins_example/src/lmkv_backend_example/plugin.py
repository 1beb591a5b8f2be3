"""Offers the backend to lmkv; imports nothing heavy, so that `lmkv plugins` stays quick."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lmkv.hookspecs import hookimpl
from lmkv.specs import BackendSpec

if TYPE_CHECKING:
    from collections.abc import Iterable

    from pydantic import BaseModel

    from lmkv.specs import BackendFactory


def _options() -> type[BaseModel]:
    from lmkv_backend_example.options import ExampleOptions  # noqa: PLC0415  only when it is configured

    return ExampleOptions


def _load() -> BackendFactory:
    from lmkv_backend_example.backend import ExampleBackend  # noqa: PLC0415  only when it is used

    return ExampleBackend


@hookimpl
def lmkv_backends() -> Iterable[BackendSpec]:
    """Offer `backend: example`."""
    return [BackendSpec(name="example", summary="files in one folder, by aiofiles", options=_options, load=_load)]
