"""The codecs of a stack: each tier's own, and for whatever else lies in a store the best that there is."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lmkv.codec.chain import SEPARATOR, chained
from lmkv.errors import ConfigError, LmkvError, PluginError, UnreadableError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from pydantic import BaseModel

    from lmkv.config.codecs import CodecChain
    from lmkv.plugins import PluginHost
    from lmkv.specs import Codec


class Codecs:
    """Makes codecs by the names that stand in frames; each once for the same options.

    Args:
        chains: of all tiers, since a frame that was written with another chain than its tier's may be in need of keys
            that another tier has.
    """

    def __init__(self, chains: Sequence[CodecChain], host: PluginHost) -> None:
        self._host = host
        self._elsewhere: dict[str, BaseModel | None] = {}
        for chain in chains:
            for step in chain.steps:
                self._elsewhere.setdefault(step.name, step.options)

    def of(self, chain: CodecChain, tier: str) -> Callable[[str], Codec]:
        """The codecs of a tier by name, which may be that of a chain; for any thread. The tier's own is made now.

        The result raises `PluginError` for a codec that is not installed, and `ConfigError` for one that needs options
        that no tier has.

        Raises:
            PluginError: a codec of the chain cannot be loaded.
            ConfigError: its options are wrong, as the codec alone can tell.
        """
        made: dict[str, Codec] = {}
        try:
            for step in chain.steps:
                made[step.name] = self._host.load_codec(step.name, step.options)
        except LmkvError as error:
            error.args = (f"tier {tier!r}: {error}", *error.args[1:])
            raise

        def codec(name: str) -> Codec:
            found = made.get(name)
            if found is None:
                parts = name.split(SEPARATOR)
                steps = [codec(part) for part in parts] if len(parts) > 1 else [self._other(name)]
                found = made[name] = chained(steps)
            return found

        codec(chain.name)
        return codec

    def _other(self, name: str) -> Codec:
        return self._host.load_codec(name, self._elsewhere.get(name))


def reader(codecs: Callable[[str], Codec], name: str) -> Codec:
    """The codec to decode a frame with.

    Raises:
        UnreadableError: it is not installed, or needs options (keys) that nobody has given.
    """
    try:
        return codecs(name)
    except (PluginError, ConfigError) as error:
        raise UnreadableError(f"frame of codec {name}: {str(error).splitlines()[0]}") from error
