"""File names of frames: `frames/<namespace>/<first byte>/<digest>.<shard>`, all of it lower-case hexadecimal.

256 folders per namespace keep a folder at some hundred files for 100 000 frames; a second such level would cost more
folders than it has files in them, and doubles the time of the start-up scan.
"""

from __future__ import annotations

import re
from typing import Final

from lmkv.types import DIGEST_BYTES, ChunkKey

FRAMES: Final = "frames"
NAMESPACE: Final = re.compile(r"[0-9a-f]{32}")
LEAF: Final = re.compile(r"[0-9a-f]{2}")
_SHARD: Final = re.compile(r"\.(0|[1-9a-f][0-9a-f]{0,7})")
_DIGITS: Final = 2 * DIGEST_BYTES


def leaf_path(root: str, key: ChunkKey) -> str:
    """The folder that the frame of `key` lies in."""
    return f"{root}/{FRAMES}/{key.namespace.hex()}/{key.digest[:1].hex()}"


def frame_path(root: str, key: ChunkKey) -> str:
    """The file of `key`."""
    digest = key.digest.hex()
    return f"{root}/{FRAMES}/{key.namespace.hex()}/{digest[:2]}/{digest}.{key.shard:x}"


def parse(namespace: bytes, name: str) -> ChunkKey | None:
    """The key of a file in a folder of `namespace`; None for a file that is not ours. Quick: a scan has many."""
    digits, end = name[:_DIGITS], name[_DIGITS:]
    try:
        digest = bytes.fromhex(digits)
    except ValueError:
        return None
    if digest.hex() != digits or len(digest) != DIGEST_BYTES:  # it was upper-case, had blanks, was short
        return None
    if end == ".0":
        return ChunkKey(namespace, 0, digest)
    return ChunkKey(namespace, int(end[1:], 16), digest) if _SHARD.fullmatch(end) else None
