"""Frames as files in one folder, by coroutines."""

from __future__ import annotations

import asyncio
import itertools
from typing import TYPE_CHECKING, cast

import aiofiles
import aiofiles.os

from lmkv.backend import AsyncBackend
from lmkv.errors import ConfigError
from lmkv.types import FAILED, MISS, OK, Capabilities, ChunkKey, Outcome, StoredFrame

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from pydantic import BaseModel

    from lmkv.memory import MemoryObject
    from lmkv.specs import BackendContext
    from lmkv_backend_example.options import ExampleOptions


class ExampleBackend(AsyncBackend):
    """One file per frame, named by the key, published by rename."""

    capabilities = Capabilities(persistent=True, scan=True)

    def __init__(self, options: BaseModel, context: BackendContext) -> None:
        self._folder = cast("ExampleOptions", options).path
        if not self._folder.is_dir():
            raise ConfigError(f"{self._folder} is no folder; create it for tier {context.tier!r}")
        for leftover in self._folder.glob("*.part"):  # of a process that was killed while it wrote
            leftover.unlink()
        self._numbers = itertools.count()
        self._few = asyncio.Semaphore(8)  # a batch may have hundreds of keys: don't open all files at once
        super().__init__()

    async def acontains(self, keys: Sequence[ChunkKey]) -> Sequence[bool]:
        """Ask the file system."""
        return [await aiofiles.os.path.exists(self._path(key)) for key in keys]

    async def aget(self, keys: Sequence[ChunkKey], into: Sequence[MemoryObject]) -> Sequence[Outcome]:
        """Read all at once."""
        return await asyncio.gather(*map(self._get, keys, into))

    async def aput(self, keys: Sequence[ChunkKey], objects: Sequence[MemoryObject]) -> Sequence[Outcome]:
        """Write all at once."""
        return await asyncio.gather(*map(self._put, keys, objects))

    async def adelete(self, keys: Sequence[ChunkKey]) -> None:
        """Remove the files that are there."""
        for key in keys:
            await asyncio.to_thread(self._path(key).unlink, missing_ok=True)

    def scan(self) -> Iterator[StoredFrame]:
        """Everything stored, the oldest first."""
        found = sorted((path.stat().st_mtime, path) for path in self._folder.glob("*.frame"))
        for used, path in found:
            namespace, shard, digest = path.stem.split("-")
            with path.open("rb") as file:
                file.seek(-min(4096, path.stat().st_size), 2)
                key = ChunkKey(bytes.fromhex(namespace), int(shard, 16), bytes.fromhex(digest))
                yield StoredFrame(key, path.stat().st_size, file.read(), used)

    def touch(self, keys: Sequence[ChunkKey]) -> None:
        """Remember the use in the file's time."""
        for path in filter(type(self._folder).exists, map(self._path, keys)):
            path.touch()

    async def _get(self, key: ChunkKey, memory: MemoryObject) -> Outcome:
        try:
            async with self._few, aiofiles.open(self._path(key), "rb") as file:
                count = await file.readinto(memory.view)
                if await file.read(1):
                    return FAILED(ValueError(f"{key}: longer than the buffer of {memory.nbytes} bytes"))
                return OK(count or 0)
        except FileNotFoundError:
            return MISS
        except OSError as e:
            return FAILED(e)

    async def _put(self, key: ChunkKey, memory: MemoryObject) -> Outcome:
        path = self._path(key)
        temp = path.with_suffix(f".{next(self._numbers)}.part")
        try:
            async with self._few:
                async with aiofiles.open(temp, "wb") as file:
                    await file.write(memory.view)
                await aiofiles.os.replace(temp, path)
        except OSError as e:
            temp.unlink(missing_ok=True)
            return FAILED(e)
        return OK(memory.nbytes)

    def _path(self, key: ChunkKey) -> Path:
        return self._folder / f"{str(key).replace('/', '-')}.frame"
