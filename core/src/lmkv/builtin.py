"""What the core itself offers through the hooks: its codecs and policies. Imports none of them."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

from lmkv.errors import PluginError
from lmkv.hookspecs import hookimpl
from lmkv.specs import CodecSpec, PolicySpec

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from pydantic import BaseModel

    from lmkv.codec.options import AesGcmOptions, ZstdOptions
    from lmkv.specs import Codec, EvictionPolicy


@hookimpl
def lmkv_codecs() -> Iterable[CodecSpec]:
    """`identity`, `zlib`, and those of the extra `lmkv[codecs]`."""
    return (
        CodecSpec(name="identity", summary="payloads as they are", load=_identity),
        CodecSpec(name="zlib", summary="DEFLATE, level 1, lossless", load=_zlib),
        CodecSpec(name="zstd", summary="Zstandard, lossless", load=_zstd, options=_zstd_options),
        CodecSpec(
            name="bf16-planes",
            summary="16-bit floats split into bytes of exponents and of mantissas, lossless",
            load=_planes,
            reads_values=True,
        ),
        CodecSpec(
            name="fp8",
            summary="16-bit floats as E4M3 with scales per channel, LOSSY",
            load=_fp8,
            lossless=False,
            reads_values=True,
        ),
        CodecSpec(
            name="aes-gcm", summary="authenticated encryption", load=_aes_gcm, options=_aes_gcm_options, seals=True
        ),
    )


@hookimpl
def lmkv_policies() -> Iterable[PolicySpec]:
    """`lru` and `leaf-first-lru`."""
    return (
        PolicySpec(name="lru", summary="least recently used first", load=_lru),
        PolicySpec(
            name="leaf-first-lru",
            summary="least recently used first, never a chunk before its cached continuation",
            load=_leaf_first_lru,
        ),
    )


def _identity() -> Callable[[], Codec]:
    from lmkv.codec.identity import IdentityCodec  # noqa: PLC0415  loaded when used

    return IdentityCodec


def _zlib() -> Callable[[], Codec]:
    from lmkv.codec.zlib import ZlibCodec  # noqa: PLC0415  loaded when used

    return ZlibCodec


def _zstd() -> Callable[[ZstdOptions], Codec]:
    with _extra():
        from lmkv.codec.zstd import ZstdCodec  # noqa: PLC0415  loaded when used
    return ZstdCodec


def _zstd_options() -> type[BaseModel]:
    from lmkv.codec.options import ZstdOptions  # noqa: PLC0415  loaded when used

    return ZstdOptions


def _planes() -> Callable[[], Codec]:
    with _extra():
        from lmkv.codec.planes import PlanesCodec  # noqa: PLC0415  loaded when used
    return PlanesCodec


def _fp8() -> Callable[[], Codec]:
    from lmkv.codec.fp8 import Fp8Codec  # noqa: PLC0415  loaded when used

    return Fp8Codec


def _aes_gcm() -> Callable[[AesGcmOptions], Codec]:
    with _extra():
        from lmkv.codec.aes_gcm import AesGcmCodec  # noqa: PLC0415  loaded when used
    return AesGcmCodec


def _aes_gcm_options() -> type[BaseModel]:
    from lmkv.codec.options import AesGcmOptions  # noqa: PLC0415  loaded when used

    return AesGcmOptions


@contextmanager
def _extra() -> Iterator[None]:
    """Says how to get what a codec imports."""
    try:
        yield
    except ImportError as error:
        missing = (error.name or "a library").partition(".")[0]
        raise PluginError(f"this codec needs {missing}: pip install 'lmkv[codecs]'") from error


def _lru() -> Callable[[], EvictionPolicy]:
    from lmkv.policy.lru import LRU  # noqa: PLC0415  loaded when used

    return LRU


def _leaf_first_lru() -> Callable[[], EvictionPolicy]:
    from lmkv.policy.leaf_first import LeafFirstLRU  # noqa: PLC0415  loaded when used

    return LeafFirstLRU
