"""By which a wrong key is recognised before it does harm: frames that are there already, and a mark in shared stores.

The mark is a small frame under a key of its own. Who first stores encrypted frames in a shared store leaves it;
whoever comes later with another key under the same name is told when he looks at it. A store that one node owns alone
needs none: its own frames can be listed.
"""

from __future__ import annotations

import hashlib
from collections import deque
from typing import TYPE_CHECKING, Final

from lmkv.codec.chain import SEPARATOR
from lmkv.errors import WRONG_KEY, BackendError, FrameError, UnreadableError
from lmkv.frame import Trailer, frame_bytes, parse_trailer, verify
from lmkv.layout import PageLayout, PageRun
from lmkv.storage.codecs import reader
from lmkv.storage.coding import IDENTITY, PutItem, aligned, encoded, payload, stored_bound
from lmkv.types import ChunkKey

if TYPE_CHECKING:
    from collections.abc import Callable

    from lmkv.backend import StorageBackendInterface
    from lmkv.specs import Codec
    from lmkv.types import StoredFrame

MARK: Final = ChunkKey(hashlib.sha256(b"lmkv mark").digest()[:16], 0, hashlib.sha256(b"key").digest())
_BYTES: Final = 64


def sample(key: ChunkKey, nbytes: int) -> PutItem:
    """A frame to try a tier with: one page of bfloat16 from 0.5 to 2, which every codec takes; `nbytes` in 32s."""
    noise = hashlib.shake_128(key.digest).digest(nbytes // 2)
    layout = PageLayout("sample", "bfloat16", 16, (PageRun(0, 0, nbytes, nbytes),))
    obj = aligned(frame_bytes(nbytes, 0))
    obj.view[0:nbytes:2] = memoryview(noise)
    obj.view[1:nbytes:2] = memoryview(b"\x3f" * (nbytes // 2))
    return PutItem(key, obj, Trailer(key, b"", 1, (), IDENTITY, nbytes, nbytes), layout=layout.describe())


def leave_mark(backend: StorageBackendInterface, codecs: Callable[[str], Codec], codec: Codec) -> None:
    """Look at the mark of a shared store, and leave one where there is none that can be read. Blocks.

    Raises:
        UnreadableError: of kind `WRONG_KEY`: the store's frames are written with another key of the same name.
        BackendError: the store does not answer as it should.
    """
    into = aligned(stored_bound(frame_bytes(_BYTES, 0)))
    outcome = backend.get([MARK], [into])[0]
    if outcome.error is not None:
        raise BackendError(f"reading the mark of the key: {outcome.error}") from outcome.error
    if outcome.ok and _read(into.view[: outcome.nbytes], MARK, codecs):
        return
    outcome = backend.put([MARK], [encoded(sample(MARK, _BYTES), codec)])[0]
    if outcome.error is not None:
        raise BackendError(f"leaving the mark of the key: {outcome.error}") from outcome.error


def look_at_frames(backend: StorageBackendInterface, codecs: Callable[[str], Codec], codec: Codec) -> str:
    """Try the last encrypted frame of a store that can be listed; what there is to say about it. Blocks.

    Raises:
        UnreadableError: of kind `WRONG_KEY`, as `leave_mark`.
    """
    seal = codec.name.rpartition(SEPARATOR)[2]  # what seals is the last of a chain
    for frame in deque((frame for frame in backend.scan() if _codec(frame).rpartition(SEPARATOR)[2] == seal), maxlen=1):
        into = aligned(frame.nbytes)
        if backend.get([frame.key], [into])[0].ok and not _read(into.view, frame.key, codecs):
            return "the last frame there was written with a key that is not given here, or is damaged"
    return ""


def _codec(frame: StoredFrame) -> str:
    try:
        return parse_trailer(frame.trailer).codec
    except FrameError:
        return ""


def _read(view: memoryview, key: ChunkKey, codecs: Callable[[str], Codec]) -> bool:
    """Whether the frame can be read; a wrong key is raised."""
    try:
        trailer = verify(view, key)
        if trailer.codec != IDENTITY:
            into = memoryview(bytearray(trailer.raw_bytes))
            reader(codecs, trailer.codec).decode(view[: trailer.payload_bytes], into, payload(trailer, None))
    except UnreadableError as error:
        if error.kind == WRONG_KEY:
            raise
        return False
    except FrameError:
        return False
    return True
