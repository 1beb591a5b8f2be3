"""`io: aiofiles`: the same files, read and written by coroutines on one loop."""

from __future__ import annotations

import asyncio
import os
from typing import TYPE_CHECKING, Final

import aiofiles

from lmkv.backend import AsyncBackend
from lmkv.errors import FrameError
from lmkv.types import FAILED, OK, Outcome
from lmkv_backend_disk.backend import FolderBackend
from lmkv_backend_disk.direct import advanced, checked_size
from lmkv_backend_disk.names import frame_path
from lmkv_backend_disk.trailers import tail_of

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Sequence

    from pydantic import BaseModel

    from lmkv.memory import MemoryObject
    from lmkv.specs import BackendContext
    from lmkv.types import ChunkKey
    from lmkv_backend_disk.trailers import Tail

AT_ONCE: Final = 4
"""Frames of all calls together that are read or written at one time."""


class AioDiskBackend(FolderBackend, AsyncBackend):
    """Frames of one call are moved at once, at most `AT_ONCE` of all calls."""

    def __init__(self, options: BaseModel, context: BackendContext) -> None:
        FolderBackend.__init__(self, options, context)
        AsyncBackend.__init__(self)
        self._turn = asyncio.Semaphore(AT_ONCE)

    def get(self, keys: Sequence[ChunkKey], into: Sequence[MemoryObject]) -> Sequence[Outcome]:
        """See `aget`."""
        return AsyncBackend.get(self, keys, into)

    def put(self, keys: Sequence[ChunkKey], objects: Sequence[MemoryObject]) -> Sequence[Outcome]:
        """See `aput`."""
        return AsyncBackend.put(self, keys, objects)

    def close(self) -> None:
        """Stop the loop and give up the directory. Idempotent."""
        AsyncBackend.close(self)
        FolderBackend.close(self)

    async def acontains(self, keys: Sequence[ChunkKey]) -> Sequence[bool]:
        """See `FolderBackend.contains`."""
        return await asyncio.to_thread(FolderBackend.contains, self, keys)

    async def adelete(self, keys: Sequence[ChunkKey]) -> None:
        """See `FolderBackend.delete`."""
        await asyncio.to_thread(FolderBackend.delete, self, keys)

    async def aget(self, keys: Sequence[ChunkKey], into: Sequence[MemoryObject]) -> Sequence[Outcome]:
        """Read frames, several at once."""
        return await self._all([self._get(key, memory.view) for key, memory in zip(keys, into, strict=True)])

    async def aput(self, keys: Sequence[ChunkKey], objects: Sequence[MemoryObject]) -> Sequence[Outcome]:
        """Write frames, several at once."""
        tails: list[Tail] = []
        outcomes = await self._all(
            [self._put(key, memory.view, tails) for key, memory in zip(keys, objects, strict=True)]
        )
        await asyncio.to_thread(self.folder.trailers.append, tails)
        return outcomes

    async def _all(self, transfers: Sequence[Coroutine[object, object, Outcome]]) -> Sequence[Outcome]:
        """All outcomes; an exception is raised only when every transfer has ended, and uses no buffer any more."""
        results = await asyncio.gather(*transfers, return_exceptions=True)
        outcomes: list[Outcome] = []
        for result in results:
            if isinstance(result, BaseException):
                raise result
            outcomes.append(result)
        return outcomes

    async def _get(self, key: ChunkKey, view: memoryview) -> Outcome:
        path = frame_path(self.folder.root, key)
        try:
            async with self._turn, aiofiles.open(path, "rb", buffering=0, opener=self._opener(view)) as file:
                size = checked_size(file.fileno(), view)
                done = 0
                while done < size:
                    try:
                        count = await file.readinto(view[done:])
                    except OSError as e:
                        if not self.direct.undo(file.fileno(), "read", e):
                            raise
                        continue
                    done = advanced(file.fileno(), done, count or 0, size)
            return OK(size)
        except FrameError as e:
            return FAILED(e)
        except OSError as e:
            return await asyncio.to_thread(self.unread, path, e)

    async def _put(self, key: ChunkKey, view: memoryview, tails: list[Tail]) -> Outcome:
        temp = self.folder.temp_path()
        try:
            async with self._turn:
                with self.folder.cleaned(temp):
                    try:
                        inode = await self._write(temp, view)
                    except FileNotFoundError:
                        await asyncio.to_thread(self.folder.check)
                        inode = await self._write(temp, view)
                    await asyncio.to_thread(self.folder.publish, temp, key)
        except OSError as e:
            return FAILED(self.folder.error("put", temp, e))
        tails.append(tail_of(key, view, inode))
        return OK(len(view))

    async def _write(self, temp: str, view: memoryview) -> int:
        async with aiofiles.open(temp, "xb", buffering=0, opener=self._opener(view)) as file:
            done, size = 0, len(view)
            while done < size:
                try:
                    count = await file.write(view[done:])
                except OSError as e:
                    if not self.direct.undo(file.fileno(), "write", e):
                        raise
                    continue
                done = advanced(file.fileno(), done, count, size)
            await asyncio.to_thread(self.folder.flush_data, file.fileno())
            return os.fstat(file.fileno()).st_ino

    def _opener(self, view: memoryview) -> Callable[[str, int], int]:
        return lambda path, flags: self.direct.open(path, flags, view)
