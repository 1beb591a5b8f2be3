"""What the core itself offers through the hooks: its codecs and policies. Imports none of them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lmkv.hookspecs import hookimpl
from lmkv.specs import CodecSpec, PolicySpec

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from lmkv.specs import Codec, EvictionPolicy


@hookimpl
def lmkv_codecs() -> Iterable[CodecSpec]:
    """`identity` and `zlib`."""
    return (
        CodecSpec(name="identity", summary="payloads as they are", load=_identity),
        CodecSpec(name="zlib", summary="DEFLATE, level 1, lossless", load=_zlib),
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


def _lru() -> Callable[[], EvictionPolicy]:
    from lmkv.policy.lru import LRU  # noqa: PLC0415  loaded when used

    return LRU


def _leaf_first_lru() -> Callable[[], EvictionPolicy]:
    from lmkv.policy.leaf_first import LeafFirstLRU  # noqa: PLC0415  loaded when used

    return LeafFirstLRU
