"""Whether what a client asks for can be."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lmkv.errors import ProtocolError
from lmkv.types import DIGEST_BYTES

if TYPE_CHECKING:
    from collections.abc import Sequence

    from lmkv.service import protocol as p
    from lmkv.storage.index import NamespaceIndex


def check_frames(namespace: NamespaceIndex, frames: Sequence[p.NewFrame]) -> None:
    """Whether each frame can be what it says; `ProtocolError` if not."""
    for frame in frames:
        _check(namespace, frame)


def _check(namespace: NamespaceIndex, frame: p.NewFrame) -> None:
    if not 1 <= frame.pages <= namespace.chunk_pages or len(frame.digest) != DIGEST_BYTES:
        raise ProtocolError(f"a frame of {frame.pages} pages in a namespace whose chunks have {namespace.chunk_pages}")
    if len(frame.prefixes) != (frame.pages - 1) * DIGEST_BYTES or len(frame.parent) not in {0, DIGEST_BYTES}:
        raise ProtocolError(f"a frame of {frame.pages} pages comes with {len(frame.prefixes)} bytes of page prefixes")
    entry = namespace.entries.get(frame.digest)
    if entry is not None and entry.pages != frame.pages:
        raise ProtocolError(f"a frame of {frame.pages} pages under a digest that names {entry.pages}")
