"""Verbs that plugins add to the command line."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from lmkv.errors import PluginError
from lmkv.plugins import PluginHost

if TYPE_CHECKING:
    from argparse import ArgumentParser, _SubParsersAction

KNOWN: Final = {"proxy": "lmkv-backend-nixl-pd"}
"""Verbs of our own distributions, so that a message can say what to install."""


def add(verbs: _SubParsersAction[ArgumentParser], wanted: str) -> None:
    """Add every verb that plugins offer. Only the `wanted` one is loaded, to learn its arguments.

    Raises:
        PluginError: the wanted one is broken, claimed twice, or not installed though known.
    """
    host = PluginHost.discover()
    for name, found in sorted(host.commands.items()):
        parser = verbs.add_parser(name, help=found.spec.summary)
        if name == wanted:
            parser.set_defaults(verb=host.load_command(name, parser).run)
    if not wanted or wanted in verbs.choices:
        return
    if causes := host.causes("command", wanted):
        raise PluginError(causes)
    if wanted in KNOWN:
        raise PluginError(f"this command is in a distribution of its own: pip install {KNOWN[wanted]}")
