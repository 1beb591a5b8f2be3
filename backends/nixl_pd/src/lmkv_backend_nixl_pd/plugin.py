"""Offers what this distribution has to lmkv; imports nothing heavy."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lmkv.hookspecs import hookimpl
from lmkv.specs import CommandSpec

if TYPE_CHECKING:
    from collections.abc import Iterable

    from lmkv.specs import Command


def _proxy() -> Command:
    from lmkv_backend_nixl_pd.proxy.command import ProxyCommand  # noqa: PLC0415  only when the verb is asked for

    return ProxyCommand()


@hookimpl
def lmkv_commands() -> Iterable[CommandSpec]:
    """Offer `lmkv proxy`."""
    return [CommandSpec(name="proxy", summary="an OpenAI-compatible proxy before several engines", load=_proxy)]
