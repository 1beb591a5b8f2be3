"""What tests of the controller's directory stand on: directories of both kinds, digests, a model of what they hold."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from redis_rig import RedisServer

from lmkv.agent import messages as m
from lmkv.controller.directory import Directory, Place
from lmkv.controller.memory_directory import MemoryDirectory
from lmkv.controller.redis_directory import RedisDirectory

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable, Iterator

SPACE, OTHER = b"n" * 16, b"o" * 16


def digest(number: int) -> bytes:
    """Of chunk `number`: as good as random."""
    return hashlib.sha256(number.to_bytes(8, "little")).digest()


def blob(numbers: Iterable[int]) -> bytes:
    """Digests one behind the other."""
    return b"".join(map(digest, numbers))


def change(stored: Iterable[int] = (), removed: Iterable[int] = (), tier: int = 0, space: bytes = SPACE) -> m.Change:
    """One change of a node."""
    return m.Change(space, tier, blob(stored), blob(removed))


class Model:
    """What a directory should know, as plainly as can be."""

    def __init__(self) -> None:
        self.now: dict[str, dict[tuple[bytes, int], set[int]]] = {}
        self.fresh: dict[str, dict[tuple[bytes, int], set[int]]] = {}

    def apply(self, node: str, said: m.Change, stored: Iterable[int], removed: Iterable[int]) -> None:
        key = (said.namespace, said.tier)
        for told in (self.now, self.fresh):
            if node in told:
                told[node].setdefault(key, set()).difference_update(removed)
        target = self.fresh if node in self.fresh else self.now
        target.setdefault(node, {}).setdefault(key, set()).update(stored)

    def end(self, node: str) -> None:
        if node in self.fresh:
            self.now[node] = self.fresh.pop(node)

    def drop(self, node: str) -> None:
        self.now.pop(node, None)
        self.fresh.pop(node, None)

    def holders(self, space: bytes, number: int) -> tuple[Place, ...]:
        found = {
            Place(node, tier)
            for told in (self.now, self.fresh)
            for node, tiers in told.items()
            for (namespace, tier), numbers in tiers.items()
            if namespace == space and number in numbers
        }
        return tuple(sorted(found))


class Rig:
    """Directories of one kind that share what they know; each test has its own loop.

    Attributes:
        kind: ``memory`` or ``redis``.
    """

    def __init__(self, kind: str, url: str = "") -> None:
        self.kind = kind
        self.url = url
        self._made: list[Directory] = []

    def make(self, **options: Any) -> Directory:
        """One more directory, on the loop that runs."""
        made: Directory = MemoryDirectory() if self.kind == "memory" else RedisDirectory(self.url, **options)
        self._made.append(made)
        return made

    def run(self, test: Callable[[Directory], Awaitable[None]]) -> None:
        """Run a test with a directory and close all that were made."""

        async def body() -> None:
            try:
                await test(self.make())
            finally:
                for each in self._made:
                    await each.close()
                self._made.clear()

        asyncio.run(body())


@contextlib.contextmanager
def redis_server() -> Iterator[RedisServer]:
    """A real one, in a folder that goes with it."""
    with tempfile.TemporaryDirectory(prefix="lmkv-") as folder, RedisServer(Path(folder)) as server:
        yield server


def rigs(server: Callable[[], RedisServer], kind: str) -> Rig:
    """A rig with an empty store."""
    if kind == "memory":
        return Rig(kind)
    there = server()
    there.cli("FLUSHALL")
    return Rig(kind, there.url)


both = pytest.mark.parametrize("rig", ["memory", "redis"], indirect=True)
