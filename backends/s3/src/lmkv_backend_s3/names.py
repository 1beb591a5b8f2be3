"""Keys of objects: `<prefix>frames/<namespace>/<shard>/<digest>`, all of it lower-case hexadecimal.

The frames of one namespace and shard lie side by side, so that one listing tells which of many keys are there, and a
lifecycle rule on `<prefix>frames/` expires frames and nothing else.
"""

from __future__ import annotations

import re
from typing import Final

from lmkv.types import ChunkKey

_FRAME: Final = re.compile(r"([0-9a-f]{32})/([0-9a-f]{1,8})/([0-9a-f]{64})")


class Names:
    """The keys under one prefix, which is empty or ends with a slash."""

    def __init__(self, prefix: str) -> None:
        self.frames = f"{prefix}frames/"
        self._namespaces = f"{prefix}namespaces/"
        self._probes = f"{prefix}probes/"

    def frame(self, key: ChunkKey) -> str:
        """The object that holds the frame of `key`."""
        return f"{self.frames}{key}"

    def folder(self, namespace: bytes, shard: int | None = None) -> str:
        """What the keys of all frames of a namespace (and shard) begin with; ends with a slash."""
        return f"{self.frames}{namespace.hex()}/" + ("" if shard is None else f"{shard:x}/")

    def description(self, namespace: bytes) -> str:
        """The object that says what a namespace stands for."""
        return f"{self._namespaces}{namespace.hex()}.json"

    def probe(self, token: str) -> str:
        """An object that is written and deleted again to see whether that is allowed."""
        return f"{self._probes}{token}"

    def parse(self, name: str) -> ChunkKey | None:
        """The key of an object below `frames`; None for one that is not ours."""
        match = _FRAME.fullmatch(name, len(self.frames)) if name.startswith(self.frames) else None
        return match and ChunkKey(bytes.fromhex(match[1]), int(match[2], 16), bytes.fromhex(match[3]))
