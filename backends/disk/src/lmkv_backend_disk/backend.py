"""Frames as files. Reads and writes run in the threads that the tier's driver calls from, several at once."""

from __future__ import annotations

import contextlib
import os
from typing import TYPE_CHECKING, cast

from lmkv.backend import StorageBackendInterface
from lmkv.errors import BackendError, FrameError
from lmkv.types import FAILED, MISS, OK, Capabilities, Health, HealthState, Outcome
from lmkv_backend_disk import listing
from lmkv_backend_disk.direct import Direct
from lmkv_backend_disk.folder import DiskError, Folder
from lmkv_backend_disk.names import frame_path, parse
from lmkv_backend_disk.trailers import tail_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from pydantic import BaseModel

    from lmkv.memory import MemoryObject
    from lmkv.specs import BackendContext
    from lmkv.types import ChunkKey, StoredFrame
    from lmkv_backend_disk.options import DiskOptions
    from lmkv_backend_disk.trailers import Tail


class FolderBackend(StorageBackendInterface):
    """All but the transfer of bytes: what the two ways of doing I/O have in common. Blocking and thread-safe.

    Raises, from every method:
        BackendError: the directory is not there, or the file system is read-only; names errno, path and operation.
    """

    capabilities = Capabilities(persistent=True, scan=True, parallelism=4)

    def __init__(self, options: BaseModel, context: BackendContext) -> None:
        """Takes the directory; raises `ConfigError` if it is not usable or somebody else's."""
        disk = cast("DiskOptions", options)
        self.folder = Folder(disk, context.capacity)
        self.direct = Direct(context.tier, on=disk.direct == "auto")

    def contains(self, keys: Sequence[ChunkKey]) -> Sequence[bool]:
        """Whether the files are there; when one is not, also checks that the directory is."""
        self.folder.check_open("contains")
        found = [os.path.exists(frame_path(self.folder.root, key)) for key in keys]
        if not all(found):
            self.folder.check()
        return found

    def delete(self, keys: Sequence[ChunkKey]) -> None:
        """Remove the files. When one is not there, checks that the directory is: it might come back with the file."""
        self.folder.check_open("delete")
        for key in keys:
            path = frame_path(self.folder.root, key)
            try:
                os.unlink(path)
            except FileNotFoundError:
                self.folder.check()
            except OSError as e:
                raise self.folder.error("delete", path, e) from e

    def scan(self) -> Iterator[StoredFrame]:
        """Everything stored, by time of last write or touch."""
        self.folder.check()
        return listing.scan(self.folder.root, self.folder.trailers)

    def touch(self, keys: Sequence[ChunkKey]) -> None:
        """Set the files' times, which count where the log is lost, and log the use; costs no write of their data."""
        used: list[ChunkKey] = []
        for key in keys:
            with contextlib.suppress(OSError):  # a hint
                os.utime(frame_path(self.folder.root, key))
                used.append(key)
        self.folder.trailers.use(used)

    def describe(self, namespace: bytes, text: str) -> None:
        """Keep `text` as `frames/<namespace>/namespace.json`."""
        self.folder.describe(namespace, text)

    def forget(self, namespace: bytes) -> None:
        """Remove the folders and the description of a namespace, unless a frame is there."""
        self.folder.forget(namespace.hex())

    def set_aside(self, keys: Sequence[ChunkKey]) -> None:
        """Move the files to `damaged/`, where the last few are kept for people to look at."""
        for key in keys:
            try:
                self.folder.set_aside(key)
            except OSError as e:
                raise self.folder.error("set_aside", frame_path(self.folder.root, key), e) from e

    def clear(self, namespace: bytes | None = None) -> None:
        """Remove every frame (of one namespace); the namespace's description stays."""
        self.folder.check()
        for owner, leaf in listing.leaves(self.folder.root, namespace):
            for name in os.listdir(leaf):
                if parse(owner, name) is not None:
                    self.folder.remove(f"{leaf}/{name}")

    def health(self) -> Health:
        """Makes and removes an empty file."""
        try:
            self.folder.check()
        except BackendError as e:
            return Health(HealthState.DOWN, str(e))
        try:
            self.folder.try_write()
        except BackendError as e:
            return Health(HealthState.DEGRADED, f"{e}; stores are refused, loads go on")
        return Health(HealthState.OK)

    def close(self) -> None:
        """Give up the directory. Idempotent."""
        self.folder.close()

    def unread(self, path: str, error: OSError) -> Outcome:
        """What a failed read of one frame means."""
        if isinstance(error, FileNotFoundError):
            self.folder.check()
            return MISS
        return FAILED(self.folder.error("get", path, error))


class DiskBackend(FolderBackend):
    """`io: threads`: system calls in the calling thread. Calls run at once, the keys of one call in turn."""

    def get(self, keys: Sequence[ChunkKey], into: Sequence[MemoryObject]) -> Sequence[Outcome]:
        """Read frames; a file longer than its buffer is `FAILED(FrameError)`."""
        self.folder.check_open("get")
        return [self._get(key, memory.view) for key, memory in zip(keys, into, strict=True)]

    def put(self, keys: Sequence[ChunkKey], objects: Sequence[MemoryObject]) -> Sequence[Outcome]:
        """Write frames; a full disk is `FAILED(BackendError)` of kind ``no-space`` for the frames that did not fit."""
        self.folder.check_open("put")
        tails: list[Tail] = []
        outcomes = [self._put(key, memory.view, tails) for key, memory in zip(keys, objects, strict=True)]
        self.folder.trailers.append(tails)
        return outcomes

    def _get(self, key: ChunkKey, view: memoryview) -> Outcome:
        path = frame_path(self.folder.root, key)
        try:
            fd = self.direct.open(path, os.O_RDONLY, view)
            try:
                return OK(self.direct.read(fd, view))
            finally:
                os.close(fd)
        except FrameError as e:
            return FAILED(e)
        except OSError as e:
            return self.unread(path, e)

    def _put(self, key: ChunkKey, view: memoryview, tails: list[Tail]) -> Outcome:
        temp = self.folder.temp_path()
        try:
            with self.folder.cleaned(temp):
                try:
                    inode = self._write(temp, view)
                except FileNotFoundError:
                    self.folder.check()  # puts the folder for temporary files back
                    inode = self._write(temp, view)
                self.folder.publish(temp, key)
        except OSError as e:
            return FAILED(self.folder.error("put", temp, e))
        tails.append(tail_of(key, view, inode))
        return OK(len(view))

    def _write(self, temp: str, view: memoryview) -> int:
        fd = self.direct.open(temp, os.O_WRONLY | os.O_CREAT | os.O_EXCL, view)
        try:
            self.direct.write(fd, view)
            self.folder.flush_data(fd)
            return os.fstat(fd).st_ino
        finally:
            os.close(fd)


class DiskFactory:
    """Builds the backend in the way of doing I/O that `options.io` says."""

    capabilities = FolderBackend.capabilities

    def __call__(self, options: BaseModel, context: BackendContext) -> FolderBackend:
        """Take the directory. Raises `ConfigError` if it is not usable or somebody else's."""
        if cast("DiskOptions", options).io == "aiofiles":
            from lmkv_backend_disk.aio import AioDiskBackend  # noqa: PLC0415  aiofiles only where it is asked for

            return AioDiskBackend(options, context)
        return DiskBackend(options, context)


create = DiskFactory()

__all__ = ["DiskBackend", "DiskError", "DiskFactory", "FolderBackend", "create"]
