"""Every hook. A plugin module marks its functions with `hookimpl` and is named in the entry-point group ``lmkv``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import pluggy

if TYPE_CHECKING:
    from collections.abc import Iterable

    from lmkv.specs import BackendSpec, CodecSpec, CommandSpec, PolicySpec, TransportSpec

PROJECT: Final = "lmkv"
hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)


@hookspec
def lmkv_backends() -> Iterable[BackendSpec]:
    """Backends that the distribution offers to the `backend:` key of a tier."""
    raise NotImplementedError


@hookspec
def lmkv_codecs() -> Iterable[CodecSpec]:
    """Codecs that the distribution offers to the `codec:` key of a tier."""
    raise NotImplementedError


@hookspec
def lmkv_policies() -> Iterable[PolicySpec]:
    """Eviction policies that the distribution offers to the `evict:` key of a tier."""
    raise NotImplementedError


@hookspec
def lmkv_commands() -> Iterable[CommandSpec]:
    """Verbs that the distribution adds to the command `lmkv`."""
    raise NotImplementedError


@hookspec
def lmkv_transports() -> Iterable[TransportSpec]:
    """Transports that the distribution offers for the bytes between two nodes."""
    raise NotImplementedError
