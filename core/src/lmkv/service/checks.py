"""Whether what a client asks for can be."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from lmkv.errors import ProtocolError
from lmkv.types import DIGEST_BYTES

if TYPE_CHECKING:
    from collections.abc import Sequence

    from lmkv.service import protocol as p
    from lmkv.storage.index import NamespaceIndex

_PARENT_BYTES: Final = frozenset({0, DIGEST_BYTES})


def check_frames(namespace: NamespaceIndex, frames: Sequence[p.NewFrame]) -> None:
    """Whether each frame can be what it says; `ProtocolError` if not."""
    most, entries = namespace.chunk_pages, namespace.entries
    for frame in frames:
        pages, prefixes = frame.pages, len(frame.prefixes)
        if not 1 <= pages <= most or len(frame.digest) != DIGEST_BYTES:
            raise ProtocolError(f"a frame of {pages} pages in a namespace whose chunks have {most}")
        if prefixes != (pages - 1) * DIGEST_BYTES or len(frame.parent) not in _PARENT_BYTES:
            raise ProtocolError(f"a frame of {pages} pages comes with {prefixes} bytes of page prefixes")
        entry = entries.get(frame.digest)
        if entry is not None and entry.pages != pages:
            raise ProtocolError(f"a frame of {pages} pages under a digest that names {entry.pages}")
