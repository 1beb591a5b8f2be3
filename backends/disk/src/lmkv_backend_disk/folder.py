"""The directory of a disk tier: its owner, its places, what its errors mean, how it comes back when it vanished."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import itertools
import logging
import os
import re
import stat
import threading
import time
from typing import TYPE_CHECKING, Final

from lmkv.errors import BackendError, ClosedError, ConfigError
from lmkv_backend_disk.names import FRAMES, LEAF, NAMESPACE, frame_path, leaf_path
from lmkv_backend_disk.trailers import TrailerLog, generation_bytes

if TYPE_CHECKING:
    from collections.abc import Iterator

    from lmkv.types import ChunkKey
    from lmkv_backend_disk.options import DiskOptions

log = logging.getLogger(__name__)

TEMP: Final = "temp"
DESCRIPTION: Final = "namespace.json"
DAMAGED: Final = "damaged"
DAMAGED_KEPT: Final = 4
"""Files in `damaged/`; the oldest go. They do not count towards the capacity."""

HANDOVER_SECONDS: Final = 15.0
"""Time that a new owner gives the one before to end: a service whose last client has gone lingers and then closes."""
_HANDOVER_PAUSE: Final = 0.05

_TEMP_NAME: Final = re.compile(r"[0-9]+-[0-9]+\.part")
_NO_SPACE: Final = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
_ILL: Final = frozenset({errno.EROFS, errno.ENOTDIR, errno.EMFILE, errno.ENFILE})
"""Errors that say something about the tier, not about one frame."""


class DiskError(BackendError):
    """An operation on a path failed with an errno. The core adds the tier's name."""

    def __init__(self, operation: str, path: str, error: OSError) -> None:
        code = error.errno or 0
        kind = "no-space" if code in _NO_SPACE else "read-only" if code == errno.EROFS else "io"
        super().__init__(f"{operation} {path}: [Errno {code}] {os.strerror(code)}", kind=kind)
        self.errno = code
        self.path = path
        self.operation = operation


class Folder:
    """One directory with one owner. Thread-safe.

    Args:
        options: where it is, and what may be created.
        capacity: bytes of frames that will lie in it at most, or None; bounds the log of trailers.

    Raises:
        ConfigError: the directory cannot be used, or somebody else owns it and does not end within `HANDOVER_SECONDS`.
    """

    def __init__(self, options: DiskOptions, capacity: int | None) -> None:
        self.root = str(options.path)
        self._sync = options.fsync == "publish"
        self._numbers = itertools.count()
        self._mutex = threading.Lock()
        self._lock_fd = -1
        self._closed = False
        self.trailers = TrailerLog(self.root, generation_bytes(capacity))
        try:
            if options.create_parents:
                os.makedirs(os.path.dirname(self.root), exist_ok=True)
            with contextlib.suppress(FileExistsError):
                os.mkdir(self.root, 0o700)
            self._take_over()
            self._make_folders()
            self._clear_temp()
            for name in os.listdir(f"{self.root}/{FRAMES}"):
                if NAMESPACE.fullmatch(name):
                    self.forget(name)  # those of which earlier owners have cleared everything
        except OSError as e:
            self.close()
            raise ConfigError(f"directory {self.root} cannot be used: {e}") from e
        self._mounted = os.path.ismount(self.root)

    def close(self) -> None:
        """Give up ownership. Idempotent."""
        with self._mutex:
            self._closed = True
            self.trailers.close()
            self._unlock()

    def check_open(self, operation: str) -> None:
        """Raise `ClosedError` after `close`."""
        if self._closed:
            raise ClosedError(f"directory {self.root}: {operation} after close")

    def error(self, operation: str, path: str, error: OSError) -> DiskError:
        """What to return for one frame that failed, or raise if the whole tier is ill."""
        if error.errno in _ILL:
            raise DiskError(operation, path, error) from error
        if error.errno in {errno.ENOENT, errno.EACCES, errno.EIO, errno.ESTALE}:
            self.check()
        return DiskError(operation, path, error)

    def check(self) -> None:
        """Raise `DiskError` if the directory is not there; put back what is missing in it if it has come back empty."""
        try:
            self._look()
            with self._mutex:
                self.check_open("check")
                if not self._owns():
                    self._unlock()
                    self._lock()
                    self.trailers.reopen()
                self._make_folders()
        except OSError as e:
            raise DiskError("check", self.root, e) from e
        except ConfigError as e:  # somebody else took it meanwhile
            raise BackendError(str(e)) from e

    def temp_path(self) -> str:
        """A name for a file in the making; no other call gets the same."""
        return f"{self.root}/{TEMP}/{os.getpid()}-{next(self._numbers)}.part"

    @contextlib.contextmanager
    def cleaned(self, temp: str) -> Iterator[None]:
        """Within this a temporary file is made and published; whatever stops that, the file is removed."""
        try:
            yield
        except BaseException:
            self.remove(temp)
            raise

    def publish(self, temp: str, key: ChunkKey) -> None:
        """Make a finished temporary file the frame of `key`, in place of the one before."""
        target = frame_path(self.root, key)
        leaf = leaf_path(self.root, key)
        try:
            os.replace(temp, target)
        except FileNotFoundError:
            self.check()
            for folder in (os.path.dirname(leaf), leaf):
                with contextlib.suppress(FileExistsError):
                    os.mkdir(folder, 0o700)
            os.replace(temp, target)
            if self._sync:
                self._flush(os.path.dirname(leaf), f"{self.root}/{FRAMES}")
        if self._sync:
            self._flush(leaf)

    def flush_data(self, fd: int) -> None:
        """Bring a temporary file's bytes to the disk, if that is asked for."""
        if self._sync:
            os.fdatasync(fd)

    def remove(self, path: str) -> None:
        """Remove a temporary file, whatever has become of it."""
        with contextlib.suppress(OSError):
            os.unlink(path)

    def set_aside(self, key: ChunkKey) -> None:
        """Move a damaged frame out of the way, for people to look at; only the last few are kept."""
        name = f"{time.time_ns():020d}-{key.namespace.hex()}-{key.digest.hex()}.{key.shard:x}"
        with contextlib.suppress(FileNotFoundError):
            os.rename(frame_path(self.root, key), f"{self.root}/{DAMAGED}/{name}")
        for old in sorted(os.listdir(f"{self.root}/{DAMAGED}"))[:-DAMAGED_KEPT]:
            self.remove(f"{self.root}/{DAMAGED}/{old}")

    def describe(self, namespace: bytes, text: str) -> None:
        """Write `namespace.json` beside the frames of a namespace."""
        folder = f"{self.root}/{FRAMES}/{namespace.hex()}"
        temp = self.temp_path()
        self.check()
        try:
            with contextlib.suppress(FileExistsError):
                os.mkdir(folder, 0o700)
            with open(temp, "w", encoding="utf-8") as file:
                file.write(text)
            os.replace(temp, f"{folder}/{DESCRIPTION}")
        except OSError as e:
            self.remove(temp)
            raise DiskError("describe", folder, e) from e

    def forget(self, name: str) -> None:
        """Remove the folder of a namespace if there is no frame in it; hexadecimal `name`."""
        folder = f"{self.root}/{FRAMES}/{name}"
        with contextlib.suppress(OSError):  # not empty: it stays, which costs nothing
            leaves = [leaf for leaf in os.listdir(folder) if LEAF.fullmatch(leaf)]
            for leaf in leaves:
                os.rmdir(f"{folder}/{leaf}")
            self.remove(f"{folder}/{DESCRIPTION}")
            os.rmdir(folder)

    def try_write(self) -> None:
        """Make and remove an empty file; raises `DiskError` if that cannot be done."""
        self.check()
        temp = self.temp_path()
        try:
            os.close(os.open(temp, os.O_WRONLY | os.O_CREAT, 0o600))
        except OSError as e:
            raise DiskError("create", temp, e) from e
        self.remove(temp)

    def _look(self) -> None:
        """Raise `OSError` unless the directory is there."""
        if not stat.S_ISDIR(os.stat(self.root).st_mode):
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))
        if self._mounted and not os.path.ismount(self.root):  # the bare mount point is not our disk
            raise OSError(errno.ENODEV, os.strerror(errno.ENODEV))

    def _take_over(self) -> None:
        """Become the owner, as soon as the one before lets go: a service that stops writes what it owes first."""
        until = time.monotonic() + HANDOVER_SECONDS
        said = False
        while True:
            try:
                self._lock()
            except ConfigError as e:
                if time.monotonic() > until:
                    raise
                if not said:
                    log.warning("%s; waiting for it to end, %g s at most", e, HANDOVER_SECONDS)
                said = True
                time.sleep(_HANDOVER_PAUSE)
            else:
                return

    def _lock(self) -> None:
        """Become the owner, or say who is."""
        path = f"{self.root}/lock"
        fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.ftruncate(fd, 0)
            os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)
        except BlockingIOError as e:
            owner = os.pread(fd, 32, 0).decode("ascii", "replace").strip() or "unknown"
            os.close(fd)
            message = f"directory {self.root} is owned by process {owner}; each tier needs one of its own"
            raise ConfigError(message, kind="in-use") from e
        except BaseException:
            os.close(fd)
            raise
        self._lock_fd = fd

    def _unlock(self) -> None:
        fd, self._lock_fd = self._lock_fd, -1
        if fd >= 0:
            os.close(fd)

    def _owns(self) -> bool:
        """Whether the lock file at the path is still the one that we hold."""
        if self._lock_fd < 0:
            return False
        mine = os.fstat(self._lock_fd)
        try:
            there = os.stat(f"{self.root}/lock")
        except FileNotFoundError:
            return False
        return (mine.st_dev, mine.st_ino) == (there.st_dev, there.st_ino)

    def _make_folders(self) -> None:
        for name in (FRAMES, TEMP, DAMAGED):
            with contextlib.suppress(FileExistsError):
                os.mkdir(f"{self.root}/{name}", 0o700)

    def _clear_temp(self) -> None:
        """Remove what an owner before us left half-written. We hold the lock: no writer of these files is alive."""
        for name in os.listdir(f"{self.root}/{TEMP}"):
            if _TEMP_NAME.fullmatch(name):
                self.remove(f"{self.root}/{TEMP}/{name}")

    @staticmethod
    def _flush(*folders: str) -> None:
        for folder in folders:
            fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
            try:
                os.fsync(fd)
            finally:
                os.close(fd)
