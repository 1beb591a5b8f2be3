"""MemoryObject: a region of the pool that lives as long as somebody owns a count of it."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping


class Holding(NamedTuple):
    """One live memory object as `Pool.holders` reports it."""

    offset: int
    """Bytes from the start of the pool."""
    nbytes: int
    """Bytes, as asked for."""
    owners: Mapping[str, int]
    """Owner word → counts that it holds."""


class Arena(Protocol):
    """What a memory object needs of the memory that it lies in."""

    lock: threading.Lock

    def cut(self, offset: int, nbytes: int) -> memoryview:
        """The bytes of one object."""

    def reclaim(self, obj: MemoryObject) -> None:
        """The last count has gone. Called under `lock`."""

    def shorten(self, obj: MemoryObject, nbytes: int) -> None:
        """All behind the first `nbytes` of the object is free. Called under `lock`."""


class MemoryObject:
    """A region of memory with an owner count. Thread-safe.

    Who receives an object from `Pool.allocate` holds one count under the owner word that it gave. Each `retain` must
    be met by one `release`; the last release gives the memory back, and from then on the object is unusable. Owner
    words are short ("ram", "load", "put") and matter only where the pool traces; the counts are checked always.

    Attributes:
        offset: bytes from the start of the pool; 0 for an object over somebody's own buffer.
        nbytes: length of `view` in bytes, as asked for; the memory taken is rounded up to `lmkv.types.ALIGNMENT`.
        passing: it counts in `Pool.passing_bytes`.
        sealed: the frame in it carries its trailer; set by whoever wrote that, in whatever thread.
        on_landed: told what `landed` is told, by who waits for the bytes; None where nobody does.
    """

    __slots__ = ("_arena", "_count", "_lock", "_owners", "_view", "nbytes", "offset", "on_landed", "passing", "sealed")

    def __init__(self, arena: Arena, offset: int, nbytes: int, owners: dict[str, int] | None = None) -> None:
        """For arenas only: use `Pool.allocate` or `MemoryObject.over`. Starts with one count."""
        self._arena = arena
        self._lock = arena.lock
        self.offset = offset
        self.nbytes = nbytes
        self._count = 1
        self._owners = owners
        self._view: memoryview | None = None
        self.passing = False
        self.sealed = False
        self.on_landed: Callable[[int], None] | None = None

    @classmethod
    def over(cls, buffer: Any) -> MemoryObject:
        """An object over any contiguous writable buffer, for tests and tools. Its last release frees nothing."""
        view = memoryview(buffer).cast("B")
        if view.readonly:
            raise ValueError("a memory object needs a writable buffer")
        return cls(_Borrowed(view), 0, view.nbytes)

    @property
    def view(self) -> memoryview:
        """Exactly `nbytes` writable bytes (format B). Don't use it after your last release."""
        view = self._view
        if view is None:
            if self._count <= 0:
                raise RuntimeError(f"use of freed memory: {self!r}")
            view = self._view = self._arena.cut(self.offset, self.nbytes)
        return view

    def landed(self, nbytes: int) -> None:
        """A hint by who fills the object: its first `nbytes` bytes are final, until the call that fills it returns.

        Whoever waits for them works on them now, in this thread, while they are in the processor's caches. Best told
        every half to four MiB, with more bytes each time, by one thread at a time.
        """
        if self.on_landed is not None:
            self.on_landed(nbytes)

    @property
    def count(self) -> int:
        """Counts held now, by all owners."""
        return self._count

    def retain(self, owner: str) -> None:
        """Add one count for `owner`.

        Raises:
            RuntimeError: nobody holds the object any more, so that its memory may be somebody else's by now.
        """
        with self._lock:
            if self._count <= 0:
                raise RuntimeError(f"retain by {owner!r} after the last release: {self!r}")
            self._count += 1
            if self._owners is not None:
                self._owners[owner] = self._owners.get(owner, 0) + 1

    def release(self, owner: str) -> None:
        """Give back one count of `owner`; the last one gives the memory back to the pool.

        Raises:
            RuntimeError: more releases than counts (where the pool traces: than counts of this owner).
        """
        with self._lock:
            if self._count <= 0:
                raise RuntimeError(f"release by {owner!r} after the last release: {self!r}")
            if self._owners is not None:
                held = self._owners.get(owner, 0)
                if held <= 0:
                    raise RuntimeError(f"release by {owner!r}, who holds no count: {self!r}")
                if held == 1:
                    del self._owners[owner]
                else:
                    self._owners[owner] = held - 1
            self._count -= 1
            if self._count == 0:
                self._view = None
                self._arena.reclaim(self)

    def shorten(self, nbytes: int) -> None:
        """Keep the first `nbytes` bytes and give back the rest. For the only owner, before anybody else has a view.

        Raises:
            ValueError: it has not so many bytes, or none are to be kept.
            RuntimeError: nobody holds it any more.
        """
        if not 0 < nbytes <= self.nbytes:
            raise ValueError(f"{nbytes} bytes of {self!r}")
        with self._lock:
            if self._count <= 0:
                raise RuntimeError(f"shorten after the last release: {self!r}")
            self._arena.shorten(self, nbytes)
            self.nbytes = nbytes
            self._view = None

    def holding(self) -> Holding:
        """Who holds it now; no owners where the pool does not trace."""
        return Holding(self.offset, self.nbytes, dict(self._owners or {}))

    def __repr__(self) -> str:
        owners = "" if self._owners is None else f", owners {self._owners}"
        return f"<MemoryObject offset {self.offset}, {self.nbytes} bytes, count {self._count}{owners}>"


class _Borrowed:
    """The arena of an object over somebody's own buffer."""

    __slots__ = ("_view", "lock")

    def __init__(self, view: memoryview) -> None:
        self.lock = threading.Lock()
        self._view = view

    def cut(self, offset: int, nbytes: int) -> memoryview:
        return self._view[offset : offset + nbytes]

    def reclaim(self, obj: MemoryObject) -> None:
        """The buffer belongs to whoever made it."""

    def shorten(self, obj: MemoryObject, nbytes: int) -> None:
        """The buffer belongs to whoever made it."""
