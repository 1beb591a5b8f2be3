"""Offers the backend to lmkv; imports nothing heavy: boto3 only when a tier of this kind is built."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lmkv.hookspecs import hookimpl
from lmkv.specs import BackendSpec

if TYPE_CHECKING:
    from collections.abc import Iterable

    from pydantic import BaseModel

    from lmkv.specs import BackendFactory


def _options() -> type[BaseModel]:
    from lmkv_backend_s3.options import S3Options  # noqa: PLC0415  only when a tier of this kind is configured

    return S3Options


def _load() -> BackendFactory:
    from lmkv_backend_s3.backend import S3Backend  # noqa: PLC0415  only when a tier of this kind is built

    return S3Backend


@hookimpl
def lmkv_backends() -> Iterable[BackendSpec]:
    """Offer `backend: s3`."""
    return [
        BackendSpec(
            name="s3",
            summary="S3 and compatible object stores, shared by all who use the bucket",
            options=_options,
            load=_load,
        )
    ]
