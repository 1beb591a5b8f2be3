"""Whole-file reads and writes on a descriptor, past the page cache where the file system allows it.

O_DIRECT may be refused when the file is opened or only when the first bytes move. Both times the tier goes on through
the page cache, for good, after one warning. An unaligned buffer or length takes the page cache for that call only.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import logging
import os
from typing import TYPE_CHECKING, Final

from lmkv.errors import FrameError
from lmkv.types import ALIGNMENT

if TYPE_CHECKING:
    from collections.abc import Callable

log = logging.getLogger(__name__)

_REFUSALS: Final = frozenset({errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP})


def aligned(view: memoryview) -> bool:
    """Whether address and length of a writable buffer suit direct I/O."""
    if not len(view) or len(view) % ALIGNMENT:
        return False
    return ctypes.addressof(ctypes.c_char.from_buffer(view)) % ALIGNMENT == 0


class Direct:
    """Decides about O_DIRECT for one tier and does the I/O. Thread-safe: its one flag only ever goes from on to off.

    Attributes:
        on: direct I/O has not been refused yet.
    """

    def __init__(self, tier: str, *, on: bool) -> None:
        self._tier = tier
        self.on = on

    def flag(self, view: memoryview) -> int:
        """The flag to open a file with that `view` is read from or written to."""
        return os.O_DIRECT if self.on and aligned(view) else 0

    def open(self, path: str, flags: int, view: memoryview) -> int:
        """`os.open`, with O_DIRECT if it is possible. New files are readable by their owner only."""
        direct = self.flag(view)
        try:
            return os.open(path, flags | direct, 0o600)
        except OSError as e:
            if not direct or e.errno not in _REFUSALS:
                raise
            self.refused("open", e)
        return os.open(path, flags & ~os.O_EXCL, 0o600)  # the refusal may come after the file was made

    def refused(self, operation: str, error: OSError) -> None:
        """The file system takes no direct I/O: warn once, and don't try again."""
        if self.on:
            self.on = False
            log.warning(
                "tier %s: direct I/O refused by %s ([Errno %s] %s); going on through the page cache",
                self._tier, operation, error.errno, os.strerror(error.errno or 0),
            )  # fmt: skip

    def attempt(self, fd: int, operation: str, action: Callable[[], int]) -> int:
        """Do one system call; when it refuses because `fd` is direct, make it an ordinary file and do it again."""
        try:
            return action()
        except OSError as e:
            if not self.undo(fd, operation, e):
                raise
        return action()

    def undo(self, fd: int, operation: str, error: OSError) -> bool:
        """If `error` is a refusal of direct I/O, make `fd` an ordinary file; True: try again."""
        if error.errno not in _REFUSALS or not _ordinary(fd):
            return False
        self.refused(operation, error)
        return True

    def read(self, fd: int, view: memoryview) -> int:
        """Read the whole file into `view`, from its first byte on; returns the length of the file in bytes.

        Raises:
            FrameError: the file does not fit, or it became shorter meanwhile.
        """
        size = checked_size(fd, view)
        done = 0
        while done < size:
            # up to the end of the buffer: direct I/O wants whole blocks, also where the file ends within one
            target = view[done:]
            count = self.attempt(fd, "read", lambda: os.preadv(fd, [target], done))  # noqa: B023  called at once
            done = advanced(fd, done, count, size)
        return size

    def write(self, fd: int, view: memoryview) -> None:
        """Write the whole of `view` from the start of the file on."""
        done, size = 0, len(view)
        while done < size:
            rest = view[done:]
            count = self.attempt(fd, "write", lambda: os.pwrite(fd, rest, done))  # noqa: B023  called at once
            done = advanced(fd, done, count, size)


def checked_size(fd: int, view: memoryview) -> int:
    """Length of the file in bytes; raises `FrameError` if `view` is too short for it."""
    size = os.fstat(fd).st_size
    if size > len(view):
        raise FrameError(f"the stored frame has {size} bytes, the buffer {len(view)}", kind="size")
    return size


def advanced(fd: int, done: int, count: int, size: int) -> int:
    """The position after a call moved `count` bytes; the rest of an odd piece goes through the page cache."""
    if count <= 0:
        raise FrameError(f"the stored frame ends after {done} of {size} bytes", kind="size")
    done += count
    if done < size and done % ALIGNMENT:
        _ordinary(fd)
    return done


def _ordinary(fd: int) -> bool:
    """Take O_DIRECT off a descriptor; False if it was off already."""
    flags = fcntl.fcntl(fd, fcntl.F_GETFL)
    if not flags & os.O_DIRECT:
        return False
    fcntl.fcntl(fd, fcntl.F_SETFL, flags & ~os.O_DIRECT)
    return True
