"""Links to peers that hold whatever bytes they are given: what real ones, who hold frames only, cannot show."""

from __future__ import annotations

import asyncio
import threading
import time
from typing import TYPE_CHECKING, Any

from lmkv.backend import WrapperBackend
from lmkv.errors import ClosedError, ConfigError
from lmkv.peer.address import parse_address
from lmkv.specs import BackendContext
from lmkv.types import FAILED, MISS, OK, REJECTED
from lmkv_backend_p2p.backend import P2PBackend
from lmkv_backend_p2p.options import P2POptions

if TYPE_CHECKING:
    from collections.abc import Coroutine, Sequence
    from concurrent.futures import Future

    from lmkv.memory import MemoryObject
    from lmkv.types import ChunkKey, Outcome


class FakeLink:
    """One peer. `down`: every call fails; `silent`: no call ends before its time; `wait`: how busy it says it is."""

    def __init__(self, number: int) -> None:
        self.incarnation = number
        self.frames: dict[ChunkKey, bytes] = {}
        self.asked = 0
        self.pulled: list[ChunkKey] = []
        self.down = False
        self.silent = False
        self.lost = False
        """It says that it has what it has not."""
        self.wait = 0.0
        self.pause = 0.0
        """Seconds before each answer."""

    async def _answer(self, until: float) -> None:
        self.asked += 1
        if self.pause:
            await asyncio.sleep(self.pause)
        if self.down:
            raise ClosedError("down")
        if self.silent:
            await asyncio.sleep(max(0.0, until - time.monotonic()))
            raise ClosedError("silent", kind="deadline")

    async def has(
        self, namespace: bytes, digests: Sequence[bytes], until: float, *, below: bool = False
    ) -> tuple[list[bool], float]:
        del below
        await self._answer(until)
        here = {key.digest for key in self.frames if key.namespace == namespace}
        return [digest in here for digest in digests], self.wait

    async def pull(
        self, keys: Sequence[ChunkKey], into: Sequence[MemoryObject], until: float, *, bring: bool = False
    ) -> list[Outcome]:
        del bring
        assert len({key.namespace for key in keys}) == 1
        await self._answer(until)
        self.pulled += keys
        outcomes = []
        for key, target in zip(keys, into, strict=True):
            data = None if self.lost else self.frames.get(key)
            if data is None:
                outcomes.append(MISS)
            elif len(data) > target.nbytes:
                outcomes.append(FAILED(ValueError("too long")))
            else:
                target.view[: len(data)] = data
                outcomes.append(OK(len(data)))
        return outcomes


class FakePeers:
    """The links of a node, on a loop of their own."""

    name = "me"

    def __init__(self) -> None:
        self.links: dict[str, FakeLink] = {}
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever)
        self._thread.start()

    def link(self, address: str) -> FakeLink:
        try:
            parse_address(address)
        except ValueError as e:
            raise ConfigError(str(e)) from e
        return self.links.setdefault(address, FakeLink(len(self.links) + 1))

    def submit(self, coroutine: Coroutine[Any, Any, Any]) -> Future[Any]:
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop)

    def close(self) -> None:
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()
        self.loop.close()


class Stocked(WrapperBackend):
    """Puts into the first peer what is to be read from it: the conformance kit stores before it reads."""

    def __init__(self, inner: P2PBackend, frames: dict[ChunkKey, bytes]) -> None:
        super().__init__(inner)
        self._frames = frames
        self._closed = False

    def put(self, keys: Sequence[ChunkKey], objects: Sequence[MemoryObject]) -> Sequence[Outcome]:
        assert list(self.inner.put(keys, objects)) == [REJECTED] * len(keys), "it only reads"
        if self._closed:
            return [REJECTED] * len(keys)
        self._frames.update({key: bytes(obj.view) for key, obj in zip(keys, objects, strict=True)})
        return [OK(obj.nbytes) for obj in objects]

    def delete(self, keys: Sequence[ChunkKey]) -> None:
        before = dict(self._frames)
        self.inner.delete(keys)
        self.inner.set_aside(keys)
        self.inner.clear()
        assert self._frames.keys() >= {key for key in before if key not in set(keys)}
        for key in keys:
            self._frames.pop(key, None)

    def clear(self, namespace: bytes | None = None) -> None:
        self.delete([key for key in self._frames if namespace in {None, key.namespace}])

    def set_aside(self, keys: Sequence[ChunkKey]) -> None:
        self.delete(keys)

    def close(self) -> None:
        self._closed = True
        self._frames.clear()
        self.inner.close()


def make(links: FakePeers | None, *, deadline: float = 2.0, **options: Any) -> P2PBackend:
    """A backend that has met `links`."""
    made = P2PBackend(P2POptions.model_validate(options), BackendContext(tier="far", deadline=deadline))
    if links is not None:
        made.meet(links)  # type: ignore[arg-type]  of the same shape
    return made
