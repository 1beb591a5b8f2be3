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
    try:
        digest = bytes.fromhex(name[:_DIGITS])
    except ValueError:
        return None
    if len(digest) != DIGEST_BYTES:
        return None
    digits = digest.hex()
    if name == f"{digits}.0":
        return ChunkKey(namespace, 0, digest)
    end = name[_DIGITS:]
    # Upper-case digits are no name of ours.
    return ChunkKey(namespace, int(end[1:], 16), digest) if _SHARD.fullmatch(end) and name == digits + end else None
