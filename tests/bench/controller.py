"""The controller's directory in memory: 10 million entries, look-ups over them, what agents tell."""

from __future__ import annotations

import asyncio
import gc
import resource
import statistics
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING, Final

import numpy as np
from tests.bench.harness import Row, absolute

from lmkv.agent import messages as m
from lmkv.controller.fleet import Fleet
from lmkv.controller.memory_directory import MemoryDirectory
from lmkv.controller.roster import MemoryRoster
from lmkv.types import DIGEST_BYTES

if TYPE_CHECKING:
    from collections.abc import Sequence

ENTRIES: Final = 10_000_000
NODES: Final = 16
PAGE: Final = 4096
PROMPT: Final = 512
LOOKUPS: Final = 101
MESSAGES: Final = 800
MESSAGE: Final = 128
"""Digests stored in a message of events, and as many removed: what full caches tell."""
EVENTS: Final = 200_000
SPACE: Final = b"\x07" * 16
TIERS: Final = tuple(m.TierFacts(name, name, 1, shared=False, writable=True) for name in ("cpu", "disk"))


def directory() -> list[Row]:
    """Look-ups, events and memory of one controller that knows 10 million chunks, in a process of its own.

    In this one, memory that was freed after other measurements would be used again, and not be counted.
    """
    with ProcessPoolExecutor(1, get_context("spawn")) as process:
        return process.submit(_measure).result()


def _measure() -> list[Row]:
    return asyncio.run(_directory())


async def _directory() -> list[Row]:
    fleet = Fleet(MemoryDirectory(), MemoryRoster(1e9))
    random = np.random.default_rng(1)
    before = _resident()
    nodes = [_Node(fleet, f"node-{i}") for i in range(NODES)]
    turns = _Turns()
    some = await _load(nodes, random)
    longest = await turns.stop()
    size = await fleet.directory.size()
    gc.collect()
    nbytes = (_resident() - before) / size.entries
    rate = statistics.median([await _events(nodes[0], random) for _ in range(3)])
    lookups = [await _look(fleet, digests) for digests in some[:LOOKUPS]]
    work = f"controller: {PROMPT} digests looked up in {size.entries / 1e6:.0f} million"
    return [
        absolute(work, "ms", lookups, at_most=5),
        Row("controller: events taken in, one core", "1/s", rate, None, None, ">= 2e+05 1/s", rate >= EVENTS),
        absolute("controller: memory of an entry, resident", "B", [nbytes], at_most=120),
        absolute("controller: longest turn of the loop meanwhile", "ms", [longest], at_most=100),
    ]


class _Node:
    """One agent, through messages as they come."""

    def __init__(self, fleet: Fleet, name: str) -> None:
        self._talk = fleet.converse(lambda _: None, lambda: None)
        self._name = name
        self._pages = 0
        self._sequence = 0

    async def join(self) -> None:
        await self.say(m.encode(m.Register(m.VERSION, self._name, 1, 1, {}, (), TIERS, 5.0)))

    async def page(self, tier: int, digests: bytes, *, last: bool = False) -> None:
        await self.say(m.encode(m.Page(1, self._pages, last, 0, SPACE, tier, digests)))
        self._pages += 1

    def events(self, stored: bytes, removed: bytes) -> bytes:
        self._sequence += 1
        return m.encode(m.Events(1, self._sequence, (m.Change(SPACE, 0, stored, removed),)))

    async def say(self, body: bytes) -> None:
        if any(isinstance(said, m.Resync) for said in await self._talk.receive(m.decode_from_node(body))):
            raise AssertionError("the directory asks for what it has been told")


class _Turns:
    """How long the loop takes for a turn, at most: processor time, for others use this machine, too."""

    def __init__(self) -> None:
        self._longest = 0.0
        self._task = asyncio.create_task(self._watch())

    async def stop(self) -> float:
        """Milliseconds."""
        self._task.cancel()
        await asyncio.wait([self._task])
        return self._longest * 1e3

    async def _watch(self) -> None:
        last = time.thread_time()
        while True:
            await asyncio.sleep(0)
            now = time.thread_time()
            self._longest = max(self._longest, now - last)
            last = now


async def _load(nodes: Sequence[_Node], random: np.random.Generator) -> list[bytes]:
    """All tell in pages what they have; a quarter lies on the disk of another one, too. Returns some prompts."""
    for node in nodes:
        await node.join()
    some = []
    for number in range(-(-ENTRIES // PAGE)):
        digests = random.bytes(DIGEST_BYTES * PAGE)
        await nodes[number % NODES].page(0, digests)
        if number % 4 == 0:
            await nodes[int(random.integers(NODES))].page(1, digests)
        if number % 20 == 0:
            some.append(digests[: DIGEST_BYTES * PROMPT])
    for node in nodes:
        await node.page(0, b"", last=True)
    return some


async def _events(node: _Node, random: np.random.Generator) -> float:
    """Digests in a second of processor time, decoding included. What is stored is removed by the message after next."""
    blobs = [random.bytes(DIGEST_BYTES * MESSAGE) for _ in range(MESSAGES)]
    bodies = [node.events(blob, blobs[i - 2] if i > 1 else b"") for i, blob in enumerate(blobs)]
    begin = time.process_time()
    for body in bodies:
        await node.say(body)
    return 2 * MESSAGE * MESSAGES / (time.process_time() - begin)


async def _look(fleet: Fleet, digests: bytes) -> float:
    """Milliseconds."""
    begin = time.perf_counter()
    found = await fleet.directory.lookup(SPACE, digests)
    spent = time.perf_counter() - begin
    if found.nodes()[0].leading != PROMPT:
        raise AssertionError("the directory has forgotten something")
    return spent * 1e3


def _resident() -> int:
    """Bytes."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
