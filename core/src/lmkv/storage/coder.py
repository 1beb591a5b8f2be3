"""A tier's codecs at work."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from lmkv.errors import ConfigError, FrameError, UnreadableError
from lmkv.storage.codecs import reader
from lmkv.storage.coding import IDENTITY, decode, encoded, stored_bound
from lmkv.storage.keymark import leave_mark

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from lmkv.backend import StorageBackendInterface
    from lmkv.frame import Trailer
    from lmkv.memory import MemoryObject
    from lmkv.specs import Codec
    from lmkv.storage.coding import PutItem

log = logging.getLogger(__name__)


class Coder:
    """Encodes what goes into a tier and decodes what comes out. Thread-safe.

    Args:
        tier: its name, for messages.
        own: name of the codec (or chain) that the tier is configured with.
        codecs: codecs by name, see `lmkv.storage.codecs`.
        shared: others read the store too.
    """

    def __init__(self, tier: str, own: str, codecs: Callable[[str], Codec], *, shared: bool) -> None:
        self.own = own
        self._tier = tier
        self._codecs = codecs
        self._marked = not shared

    def bound(self, nbytes: int, codec: str | None = None) -> int:
        """The most bytes that a frame takes here whose identity-coded one has `nbytes`."""
        return nbytes if (codec or self.own) == IDENTITY else stored_bound(nbytes)

    def encode(
        self, items: Sequence[PutItem], backend: StorageBackendInterface, codec: str | None = None
    ) -> list[MemoryObject]:
        """The frames as they are to be stored in `backend`. Blocks.

        Raises:
            BackendError: a codec refuses, or a shared store does not answer; nothing may be stored then.
        """
        chosen = self._codecs(codec or self.own)
        if chosen.seals and not self._marked:
            self._mark(backend, chosen)
        return [encoded(item, chosen) for item in items]

    def decode(
        self, source: MemoryObject, trailer: Trailer, target: MemoryObject, backend: StorageBackendInterface
    ) -> None:
        """Make the identity-coded frame in `target`. What is no payload of its codec is set aside in `backend`. Blocks.

        Raises:
            UnreadableError: its codec or key is not here: it stays where it is.
            FrameError: it was none.
        """
        try:
            decode(source, trailer, target, reader(self._codecs, trailer.codec))
        except UnreadableError:
            raise
        except FrameError:
            backend.set_aside([trailer.key])
            raise

    def admit(self, trailer: Trailer) -> None:
        """Whether a frame may be loaded from here.

        Raises:
            UnreadableError: it is in the clear where the tier encrypts: anybody who can write there can have made it.
        """
        if self._codecs(self.own).seals and not reader(self._codecs, trailer.codec).seals:
            raise UnreadableError(f"frame of codec {trailer.codec}: not encrypted, in a tier that encrypts")

    def check(self, codec: str) -> None:
        """Whether frames may be stored here with that codec.

        Raises:
            PluginError: there is no such codec.
            ConfigError: it needs options that nobody has given, or would store in the clear what this tier encrypts.
        """
        chosen, own = self._codecs(codec), self._codecs(self.own)
        if own.seals and not chosen.seals:
            raise ConfigError(f"tier {self._tier!r} encrypts ({own.name}): it stores nothing with codec {codec!r}")

    def check_dtypes(self, dtypes: Iterable[str]) -> None:
        """Raise `ConfigError` if the tier's codec refuses KV of one of these types."""
        own = self._codecs(self.own)
        for dtype in dtypes:
            if refusal := own.refusal(dtype):
                raise ConfigError(f"tier {self._tier!r}: codec {own.name!r} {refusal}", kind="codec")

    def _mark(self, backend: StorageBackendInterface, codec: Codec) -> None:
        """Look for the mark of the key once; a store that does not answer is asked again with the next put."""
        try:
            leave_mark(backend, self._codecs, codec)
        except UnreadableError as error:
            log.warning("tier %s: %s", self._tier, error, extra={"key": ("mark", self._tier)})
        self._marked = True
