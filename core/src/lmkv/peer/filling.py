"""Frames that peers fill: memory for them, the check of what has come, their way into the index.

Lives on the storage loop, except for `inspect`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from lmkv.errors import FrameError
from lmkv.frame import frame_bytes, verify
from lmkv.peer import messages as m
from lmkv.storage.coding import IDENTITY
from lmkv.storage.filling import ended
from lmkv.storage.leases import Slot

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from lmkv.memory import MemoryObject
    from lmkv.storage.index import NamespaceIndex
    from lmkv.storage.manager import StorageManager


def frame_size(namespace: NamespaceIndex, shard: int, pages: int) -> int:
    """Bytes of a whole frame."""
    return frame_bytes(pages * namespace.page_bytes[shard], pages - 1)


def begin(
    namespace: NamespaceIndex, shard: int, number: int, frame: m.NewFrame, memory: Callable[[int], MemoryObject | None]
) -> Slot | None:
    """Memory for a frame (checked before, and not `covered`) of reservation `number`, or None: there is no room.

    `memory` gives so many bytes under the owner word ``fill``, counted in `Room.filling`, or None.
    """
    nbytes = frame_size(namespace, shard, frame.pages)
    obj = memory(nbytes)
    if obj is None:
        return None
    entry = namespace.add(frame.digest, frame.parent, frame.pages, frame.prefixes)
    entry.part(shard, nbytes).filling = number
    return Slot(entry, shard, obj)


def inspect(slots: Sequence[Slot]) -> list[str]:
    """What is wrong with each frame, or `COMMITTED`. Reads all of their bytes: in a thread."""
    return [_wrong(slot) for slot in slots]


def _wrong(slot: Slot) -> str:
    entry, shard, obj = slot
    try:
        trailer = verify(obj.view, entry.key(shard))
    except FrameError as e:
        return str(e)
    raw = entry.pages * entry.namespace.page_bytes[shard]
    for name, came, announced in (
        ("codec", trailer.codec, IDENTITY),
        ("pages", trailer.pages, entry.pages),
        ("payload", trailer.payload_bytes, raw),
        ("parent", trailer.parent.hex(), entry.parent.hex()),
        ("page prefixes", b"".join(trailer.prefixes).hex(), entry.packed.hex()),
    ):
        if came != announced:
            return f"frame: it is of {name} {came}, not {announced}"
    return m.COMMITTED


def end(manager: StorageManager, slots: Sequence[Slot], outcomes: Sequence[str]) -> list[str]:
    """The frames have been filled and verified, or not: into the index with the good ones, out of it with the others.

    The memory of the others stays with the caller, under ``fill``. Returns the outcomes, with what was cleared
    meanwhile.
    """
    outcomes = ["cleared" if not why and slot.entry.doomed else why for slot, why in zip(slots, outcomes, strict=True)]
    good = [slot for slot, why in zip(slots, outcomes, strict=True) if not why]
    for slot in good:
        slot.object.sealed = True
    ended(manager.stack, slots, good)
    for slot in good:
        slot.object.release("fill")
    manager.stack.settle_all([slot.entry for slot in slots])
    return outcomes
