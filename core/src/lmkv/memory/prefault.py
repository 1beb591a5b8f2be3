"""Touches a mapping's pages in the background, so that neither start-up nor first use pays for it."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import logging
import os
import threading
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    import mmap

log = logging.getLogger(__name__)

MADV_POPULATE_WRITE: Final = 23
"""Linux 5.14: make the pages present and writable, without changing their content."""
STEP: Final = 4 << 20
"""Bytes per system call: a few milliseconds, which is what `stop` waits at most on an idle machine."""


class Prefault:
    """One daemon thread of lowest priority that walks the mapping once.

    Content is never changed, so the memory may be used meanwhile. Where the kernel is older than MADV_POPULATE_WRITE,
    or runs out of memory, it gives up: later first uses fault their pages in themselves.

    Attributes:
        error: why it gave up; None while all is well.
        done: set when the thread has ended, whatever the reason.
    """

    def __init__(self, mapping: mmap.mmap) -> None:
        self.error: OSError | None = None
        self.done = threading.Event()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._walk, args=(mapping,), name="lmkv-prefault", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End it now; returns when the thread no longer touches the mapping. Idempotent."""
        self._stop.set()
        self._thread.join()

    def _walk(self, mapping: mmap.mmap) -> None:
        with contextlib.suppress(OSError):  # a hint: Linux keeps priorities per thread
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)
        nbytes = len(mapping)
        exported = ctypes.c_char.from_buffer(mapping)  # keeps the mapping alive while we hold its address
        try:
            populate(ctypes.addressof(exported), nbytes, self._stop)
        except OSError as e:
            self.error = e
            if e.errno == errno.EINVAL:
                log.info("this kernel cannot pre-fault the pool (%s): the first use of each page will be slower", e)
            else:
                log.warning(
                    "could not pre-fault the pool of %d bytes: %s. The machine may not have that much memory: make "
                    "pool.size smaller.",
                    nbytes,
                    e,
                )
        finally:
            del exported
            self.done.set()


def populate(address: int, nbytes: int, stop: threading.Event) -> None:
    """Make `nbytes` at `address` present, in steps, until `stop` is set. Releases the GIL in each step.

    Raises:
        OSError: the kernel refused a step; what came before is present.
    """
    madvise = ctypes.CDLL(None, use_errno=True).madvise  # mmap.madvise would hold the GIL
    madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    madvise.restype = ctypes.c_int
    for start in range(0, nbytes, STEP):
        if stop.is_set():
            return
        if madvise(address + start, min(STEP, nbytes - start), MADV_POPULATE_WRITE) != 0:
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code))
