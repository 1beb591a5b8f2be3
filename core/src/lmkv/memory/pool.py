"""The pool: one arena of memory that the node service makes and every process of the node maps."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import mmap
import os
import threading
from pathlib import Path
from typing import Final, Literal, cast

from lmkv.errors import ClosedError, ConfigError, ProtocolError
from lmkv.memory.extents import Extents
from lmkv.memory.object import Holding, MemoryObject
from lmkv.memory.prefault import Prefault
from lmkv.types import ALIGNMENT

_SEALS: Final = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
_MASK: Final = ALIGNMENT - 1
_SOON_UNMAPPED: Final = 64 << 20
"""Bytes up to which unmapping takes some milliseconds at most."""


class Pool:
    """An arena in a memfd, and the allocator over it. Thread-safe.

    The service creates it and sends `fd` to its clients, who attach and only ever see the offsets that they are told;
    nothing is left behind when a process is killed. Its length is sealed, so no holder of the descriptor can cut it off
    under the others. Pages are touched in the background (`prefault`), in each process for its own mapping.

    Attributes:
        fd: descriptor of the memfd; the pool's own, closed by `close`.
        nbytes: length of the arena in bytes.
        hugepages: the arena lies in reserved hugepages.
        lock: guards the allocator and all owner counts.
        passing_bytes: bytes in objects that were allocated as `passing` and not kept.
    """

    def __init__(self, fd: int, nbytes: int, *, extents: Extents, hugepages: bool, prefault: bool, trace: bool) -> None:
        """Takes over `fd`; use `create` or `attach`."""
        self.fd = fd
        self.nbytes = nbytes
        self.hugepages = hugepages
        self.lock = threading.Lock()
        mapping = mmap.mmap(fd, nbytes)
        if not hugepages:
            with contextlib.suppress(OSError, ValueError):  # a hint; off for shared memory on most machines
                mapping.madvise(mmap.MADV_HUGEPAGE)
        self._view = memoryview(mapping)
        self._extents = extents
        self._live: dict[int, MemoryObject] | None = {} if trace else None
        self.passing_bytes = 0
        self._closed = False
        self._prefault = Prefault(mapping) if prefault else None

    @classmethod
    def create(
        cls,
        nbytes: int,
        *,
        hugepages: Literal["auto", "on", "off"] = "auto",
        prefault: bool = True,
        trace: bool = False,
    ) -> Pool:
        """Make an arena of at least `nbytes` bytes (rounded up to whole pages).

        Args:
            nbytes: at least one byte. Whether it fits the machine is for the configuration to check: a memfd takes its
                memory when it is touched.
            hugepages: `auto` takes reserved hugepages when enough are free, `on` insists, `off` doesn't ask.
            prefault: touch the pages in a background thread.
            trace: remember who holds what, for `holders`.

        Raises:
            ConfigError: hugepages are `on` and too few are free, or the kernel refuses a memfd of that size.
        """
        if nbytes <= 0:
            raise ConfigError(f"a pool of {nbytes} bytes: its size must be at least one byte")
        if hugepages != "off":
            pool = cls._on_hugepages(nbytes, required=hugepages == "on", prefault=prefault, trace=trace)
            if pool is not None:
                return pool
        size = _round_up(nbytes, ALIGNMENT)
        try:
            return cls._on_memfd(size, 0, prefault=prefault, trace=trace)
        except (OSError, OverflowError) as e:
            raise ConfigError(f"cannot make a pool of {size} bytes: {e}. Make pool.size smaller.") from e

    @classmethod
    def _on_hugepages(cls, nbytes: int, *, required: bool, prefault: bool, trace: bool) -> Pool | None:
        free, page = _free_hugepages()
        need = -(-nbytes // page) if page else 0
        why = f"{free} are free"
        if page and free >= need:
            try:
                return cls._on_memfd(need * page, os.MFD_HUGETLB, prefault=prefault, trace=trace)
            except OSError as e:  # somebody else was quicker, or a cgroup forbids them
                why = str(e)
        if required:
            raise ConfigError(
                f"pool.hugepages is on: {nbytes} bytes need {need} reserved hugepages of {page} bytes, but {why}. "
                f"Reserve them (sysctl vm.nr_hugepages={need}), or set pool.hugepages to auto."
                if page
                else "pool.hugepages is on, but this kernel has no hugepages. Set pool.hugepages to auto."
            )
        return None

    @classmethod
    def _on_memfd(cls, size: int, flags: int, *, prefault: bool, trace: bool) -> Pool:
        fd = os.memfd_create("lmkv-pool", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING | flags)
        try:
            os.ftruncate(fd, size)
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
            return cls(fd, size, extents=Extents(size), hugepages=flags != 0, prefault=prefault, trace=trace)
        except BaseException:
            os.close(fd)
            raise

    @classmethod
    def attach(cls, fd: int, nbytes: int, *, prefault: bool = True) -> Pool:
        """Map an arena that another process made. The result allocates nothing: it has no free bytes.

        `fd` stays the caller's, who may close it afterwards. `nbytes` is what the maker's `Pool.nbytes` says.

        Raises:
            ProtocolError: the descriptor is no memfd of that size with its size sealed.
        """
        try:
            seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
            size = os.fstat(fd).st_size
        except OSError as e:
            raise ProtocolError(f"the pool's descriptor is not usable: {e}") from e
        if not seals & fcntl.F_SEAL_SHRINK or nbytes <= 0 or size != nbytes:
            raise ProtocolError(
                f"the pool's descriptor has {size} bytes, seals {seals:#x}; expected {nbytes} bytes, sealed"
            )
        own = fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 0)
        try:
            return cls(own, nbytes, extents=Extents(0), hugepages=False, prefault=prefault, trace=False)
        except BaseException as e:
            os.close(own)
            if isinstance(e, OSError):
                raise ConfigError(f"cannot map the pool of {nbytes} bytes: {e}") from e
            raise

    @property
    def view(self) -> memoryview:
        """The whole arena, writable bytes (format B)."""
        view = self._view  # before the question: `close` takes it away after it has said so
        if self._closed:
            raise ClosedError("the pool is closed")
        return view

    @property
    def free_bytes(self) -> int:
        """Bytes in no memory object."""
        return self._extents.free_bytes

    @property
    def largest_free(self) -> int:
        """Bytes of the largest object that `allocate` could give now."""
        return self._extents.largest

    @property
    def address(self) -> int:
        """Where this process has mapped the arena, for DMA registration. Valid until `close`."""
        return ctypes.addressof(ctypes.c_char.from_buffer(self.view))

    def allocate(self, nbytes: int, owner: str, *, passing: bool = False) -> MemoryObject | None:
        """An object of `nbytes` bytes with one count for `owner`, or None when no extent is large enough. Never waits.

        Its content is whatever was there before. `passing`: it is on its way to somewhere, and counted so until the
        last release or `keep`.

        Raises:
            ValueError: `nbytes` is not positive.
            ClosedError: the pool is closed.
        """
        if nbytes <= 0:
            raise ValueError(f"a memory object of {nbytes} bytes")
        if self._closed:
            raise ClosedError("the pool is closed")
        with self.lock:
            offset = self._extents.take((nbytes + _MASK) & ~_MASK)
            if offset < 0:
                return None
            obj = self._made(offset, nbytes, owner)
            if passing:
                obj.passing = True
                self.passing_bytes += (nbytes + _MASK) & ~_MASK
            return obj

    def allocate_all(self, nbytes: int, count: int, owner: str) -> list[MemoryObject]:
        """As `allocate`, `count` times or until there is no extent that is large enough."""
        if nbytes <= 0:
            raise ValueError(f"a memory object of {nbytes} bytes")
        if self._closed:
            raise ClosedError("the pool is closed")
        objects: list[MemoryObject] = []
        size, run = (nbytes + _MASK) & ~_MASK, 1
        with self.lock:
            while run and len(objects) < count:
                start, run = self._extents.take_run(size, count - len(objects))
                objects += [self._made(start + i * size, nbytes, owner) for i in range(run)]
        return objects

    def _made(self, offset: int, nbytes: int, owner: str) -> MemoryObject:
        if self._live is None:
            return MemoryObject(self, offset, nbytes)
        obj = self._live[offset] = MemoryObject(self, offset, nbytes, {owner: 1})
        return obj

    def keep(self, obj: MemoryObject) -> None:
        """`obj` stays where it is: it is no longer `passing`. Idempotent."""
        if obj.passing:
            with self.lock:
                self._pass(obj)

    def _pass(self, obj: MemoryObject) -> None:
        if obj.passing:
            obj.passing = False
            self.passing_bytes -= (obj.nbytes + _MASK) & ~_MASK

    def cut(self, offset: int, nbytes: int) -> memoryview:
        """The bytes `[offset, offset + nbytes)`, for clients that were told where an object lies.

        Raises:
            ValueError: the range does not lie inside the arena.
            ClosedError: the pool is closed.
        """
        if offset < 0 or nbytes < 0 or offset + nbytes > self.nbytes:
            raise ValueError(f"bytes [{offset}, {offset + nbytes}) are not inside a pool of {self.nbytes} bytes")
        return self.view[offset : offset + nbytes]

    def reclaim(self, obj: MemoryObject) -> None:
        """For `MemoryObject`: its last count has gone. Called under `lock`."""
        self._extents.give(obj.offset, (obj.nbytes + _MASK) & ~_MASK)
        self._pass(obj)
        if self._live is not None:
            del self._live[obj.offset]

    def shorten(self, obj: MemoryObject, nbytes: int) -> None:
        """For `MemoryObject`: all behind its first `nbytes` is free. Called under `lock`."""
        kept, taken = (nbytes + _MASK) & ~_MASK, (obj.nbytes + _MASK) & ~_MASK
        if kept < taken:
            self._extents.give(obj.offset + kept, taken - kept)
            if obj.passing:
                self.passing_bytes -= taken - kept

    def holders(self) -> list[Holding]:
        """Every live object and who holds it, ascending by offset. Empty unless made with `trace`."""
        with self.lock:
            return [obj.holding() for _, obj in sorted((self._live or {}).items())]

    @property
    def prefaulted(self) -> bool:
        """The background touching has ended, or was not asked for."""
        return self._prefault is None or self._prefault.done.is_set()

    def close(self) -> None:
        """Stop pre-faulting, close the descriptor, unmap. Idempotent; safe while views of objects are alive.

        As long as somebody holds such a view the memory stays mapped and usable for him. Objects may be released
        afterwards; nothing can be allocated. Unmapping takes the kernel a second for some GiB, so a large arena is
        unmapped in a thread of its own.
        """
        with self.lock:
            if self._closed:
                return
            self._closed = True
        if self._prefault is not None:
            self._prefault.stop()
        os.close(self.fd)
        mapping = cast("mmap.mmap", self._view.obj)
        self._view = memoryview(b"")  # from now on views of objects keep the mapping, and nothing else does
        if self.nbytes <= _SOON_UNMAPPED:
            _unmap(mapping)
        else:
            threading.Thread(target=_unmap, args=(mapping,), name="lmkv-unmap", daemon=True).start()

    def __repr__(self) -> str:
        state = "closed" if self._closed else f"{self.free_bytes} free"
        return f"<Pool of {self.nbytes} bytes, {state}>"


def _unmap(mapping: mmap.mmap) -> None:
    with contextlib.suppress(BufferError):  # views are alive: the last of them unmaps
        mapping.close()


def _round_up(nbytes: int, unit: int) -> int:
    return -(-nbytes // unit) * unit


def _free_hugepages() -> tuple[int, int]:
    """Unreserved free hugepages of the default size, and that size in bytes; `(0, 0)` where there is no such thing."""
    values: dict[str, int] = {}
    try:
        for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
            name, _, rest = line.partition(":")
            if name.startswith("Huge"):
                values[name] = int(rest.split()[0])
    except (OSError, ValueError, IndexError):
        return 0, 0
    return max(0, values.get("HugePages_Free", 0) - values.get("HugePages_Rsvd", 0)), values.get(
        "Hugepagesize", 0
    ) << 10
