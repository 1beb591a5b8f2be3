"""A tier: one backend, and everything that a backend must not care about.

Deadline, bulkhead, breaker, capacity, eviction, codec, verification and counters. Knows keys and sizes; what a key
belongs to is the stack's business. All methods run on the storage loop; the backend's calls run in the driver's
threads.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from typing import TYPE_CHECKING, NamedTuple, cast

from lmkv.backend import ResidentBackend
from lmkv.errors import FrameError
from lmkv.storage.arrivals import arriving
from lmkv.storage.calls import Calls, Request, miss_reason
from lmkv.storage.coder import Coder
from lmkv.storage.cost import Cost
from lmkv.storage.driver import STORE
from lmkv.storage.inventory import Inventory
from lmkv.types import FAILED, OK, Health, HealthState, MissReason, OutcomeKind

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable, Sequence

    from lmkv.backend import StorageBackendInterface
    from lmkv.frame import Trailer
    from lmkv.memory import MemoryObject
    from lmkv.observe.metrics import Metrics
    from lmkv.specs import Codec, EvictionPolicy
    from lmkv.storage.calls import Finish
    from lmkv.storage.coding import PutItem
    from lmkv.storage.inventory import TierSettings
    from lmkv.types import ChunkKey, Outcome

log = logging.getLogger(__name__)


class GetResult(NamedTuple):
    """What a load gave for one key."""

    outcome: Outcome
    trailer: Trailer | None = None
    reason: MissReason | None = None
    """Why it is not OK."""


class Tier(Inventory):
    """One configured backend of the stack. What it holds and may hold is in `Inventory`.

    Attributes:
        coder: what its codecs do.
        number: position in the stack, 0 is the fastest; also the bit in `Shard.tiers`.
    """

    def __init__(  # noqa: PLR0917  every part is given, so that tests can give others
        self,
        number: int,
        settings: TierSettings,
        backend: StorageBackendInterface,
        policy: EvictionPolicy | None,
        codecs: Callable[[str], Codec],
        metrics: Metrics,
    ) -> None:
        super().__init__(settings, policy, backend.capabilities.max_frame_bytes)
        self.number = number
        self.bit, self.name = 1 << number, settings.name
        self.backend = backend
        self.resident = isinstance(backend, ResidentBackend)
        self.shared = backend.capabilities.shared
        self.on_late_put: Callable[[ChunkKey], None] = lambda _: None
        self.on_room: Callable[[], None] = lambda: None
        self.coder = Coder(settings.name, settings.codec, codecs, shared=backend.capabilities.shared)
        self._flushing = False
        self._doubtful: set[ChunkKey] = set()
        self._undescribed: dict[bytes, str] = {}
        self._calls: Calls | None = None
        if not self.resident:
            self._calls = Calls(settings, backend, metrics, lambda: self.on_room())  # noqa: PLW0108  set later

    @property
    def readable(self) -> bool:
        """Loads are not refused."""
        return self._calls is None or not self._calls.watch.reads.open

    @property
    def writable(self) -> bool:
        """Stores are not refused."""
        return self._calls is None or not self._calls.watch.writes.open

    def refuses(self, nbytes: int) -> str:
        """Why a put of so many bytes is dropped at once, however much room there is (counted), or nothing."""
        if self._calls is None:
            return ""
        why = "open" if self._calls.watch.writes.refuses else self._calls.backlog(nbytes)
        if why:
            self._calls.count_dropped(1, why)
        return why

    # --- resident ----------------------------------------------------------------------------------------------------

    def adopt(self, keys: Sequence[ChunkKey], objects: Sequence[MemoryObject], parents: Sequence[bytes]) -> None:
        """Keep `objects` by reference (resident tiers); the tier takes an owner of its own of each."""
        cast("ResidentBackend", self.backend).adopt(keys, objects)
        sizes = [obj.nbytes for obj in objects]
        before = [parent or None for parent in parents]
        self.record_all(dict(zip(keys, sizes, strict=True)), dict(zip(keys, before, strict=True)))

    def borrow(self, keys: Sequence[ChunkKey]) -> Sequence[MemoryObject | None]:
        """The objects under `keys`, each retained for the caller (resident tiers)."""
        return cast("ResidentBackend", self.backend).borrow(keys)

    # --- calls -------------------------------------------------------------------------------------------------------

    def put(
        self, items: Sequence[PutItem], *, priority: int, codec: str | None = None
    ) -> asyncio.Future[list[Outcome]]:
        """Store frames. The caller has made room. The future gets one outcome per frame and never fails.

        What is stored after the deadline is recorded all the same, and reported to `on_late_put`.
        """
        keys = [item.key for item in items]
        dying = list(self._dying)
        deleted = broke_off = False
        for item in items:
            self._doubtful.discard(item.key)  # whatever is there is replaced
            self._pending[item.key] = self.coder.bound(item.object.nbytes, codec)
            self.used += self._pending[item.key]

        def work() -> list[Outcome]:
            nonlocal deleted, broke_off
            if dying:
                self.backend.delete(dying)
                deleted = True
            frames = self.coder.encode(items, self.backend, codec)
            broke_off = True
            outcomes = list(self.backend.put(keys, frames))
            broke_off = False
            return outcomes

        def finish(outcomes: list[Outcome], *, late: bool) -> None:
            if deleted:
                self._buried(dying)
            for item, outcome in zip(items, outcomes, strict=True):
                self.used -= self._pending.pop(item.key)
                if outcome.ok:
                    self._stored(item, outcome.nbytes, late=late)
                elif broke_off and not self.shared and item.key not in self.index:
                    self._doubtful.add(item.key)

        objects = [item.object for item in items]
        return self._run("put", len(keys), work, finish, objects, priority)

    async def get(
        self, keys: Sequence[ChunkKey], objects: Sequence[MemoryObject], *, priority: int, until: float = math.inf
    ) -> list[GetResult]:
        """Load frames into `objects` and verify them, by the loop's time `until` and within the tier's deadline.

        Never raises; what does not verify is reported as corrupt.
        """
        trailers: dict[int, Trailer] = {}

        def work() -> list[Outcome]:
            with arriving(objects) as arrivals:
                outcomes = list(self.backend.get(keys, objects))
            for i, outcome in enumerate(outcomes):
                if outcome.ok:
                    try:
                        trailers[i] = arrivals[i].verify(outcome.nbytes, keys[i])
                        self.coder.admit(trailers[i])
                    except FrameError as e:
                        outcomes[i] = FAILED(e)
            self._bury(keys, outcomes)
            return outcomes

        outcomes = await self._run("get", len(keys), work, _ignore, objects, priority, until)
        return [GetResult(o, trailers.get(i), miss_reason(o)) for i, o in enumerate(outcomes)]

    async def decode(
        self, source: MemoryObject, trailer: Trailer, target: MemoryObject, *, priority: int, until: float = math.inf
    ) -> MissReason | None:
        """Turn a loaded frame of another codec into the identity-coded frame in `target`, sealed; or say why not."""

        def work() -> list[Outcome]:
            self.coder.decode(source, trailer, target, self.backend)
            return [OK(target.nbytes)]

        return miss_reason((await self._run("decode", 1, work, _ignore, [source, target], priority, until))[0])

    async def contains(self, keys: Sequence[ChunkKey], *, priority: int) -> list[bool]:
        """Ask a shared store. All False when it cannot say within the deadline."""
        found: list[bool] = []

        def work() -> list[Outcome]:
            found[:] = self.backend.contains(keys)
            return [OK(0)]

        outcomes = await self._run("contains", 1, work, _ignore, (), priority)
        return found if outcomes[0].ok and len(found) == len(keys) else [False] * len(keys)

    def delete(self, keys: Sequence[ChunkKey]) -> None:
        """Remove frames, from the books now and from the store soon; until then they cannot be put again."""
        if not keys:
            return
        if self._calls is None:
            for key in keys:
                self.forget(key)
            self.backend.delete(keys)
            return
        for key in keys:
            nbytes = self.forget(key)
            if key not in self._dying:
                self._dying[key] = nbytes
        self._flush_deletes()

    async def clear(self, namespace: bytes | None) -> Outcome:
        """Remove every frame (of one namespace) from a shared store, also those that this node does not know of.

        Nothing of the index changes: that is the caller's.
        """

        def work() -> list[Outcome]:
            self.backend.clear(namespace)
            return [OK(0)]

        return (await self._run("clear", 1, work, _ignore))[0]

    def tidy(self) -> None:
        """Do what waited while the tier was off; bury what a put that broke off may have left. Called now and then."""
        if not (self.readable and self.writable):
            return
        for namespace, text in list(self._undescribed.items()):
            self.describe(namespace, text)
        if self._dying:
            self._flush_deletes()
        if self._doubtful:
            doubtful, self._doubtful = self._doubtful, set()
            self.delete(list(doubtful))

    def set_aside(self, keys: Sequence[ChunkKey]) -> None:
        """These frames are damaged: out of the index at once, out of the way soon."""
        for key in keys:
            self.forget(key)
        self._tell("set_aside", lambda: self.backend.set_aside(keys))

    def remember_use(self, keys: Sequence[ChunkKey]) -> None:
        """Let a persistent store note the use, so that the order survives a restart. A hint: dropped when busy."""
        if self.settings.write == "never":
            return
        busy = self.queue()[0] > self.settings.threads  # fewer may just have come, and begin in a moment
        if self._calls is not None and keys and self.backend.capabilities.persistent and not busy:
            self._tell("touch", lambda: self.backend.touch(keys))

    def describe(self, namespace: bytes, text: str) -> None:
        """Hand a namespace's JSON to the backend, unless the tier is read-only."""
        if self._calls is None or self.settings.write == "never":
            return
        self._undescribed[namespace] = text
        if self.readable and self.writable:
            del self._undescribed[namespace]
            self._tell("describe", lambda: self.backend.describe(namespace, text))

    def forget_namespace(self, namespace: bytes) -> None:
        """Nobody uses a namespace, and it has no frames here."""
        self._undescribed.pop(namespace, None)
        if self._calls is not None and self.backend.capabilities.persistent and not self.shared:
            self._tell("forget", lambda: self.backend.forget(namespace))

    def health(self) -> Health:
        """What the breakers and the last error say; no I/O."""
        return Health(HealthState.OK) if self._calls is None else self._calls.watch.health(self._calls.last_error)

    def look(self) -> None:
        """Ask the backend in the background whether it can be used at all."""
        if self._calls is not None:
            self._calls.watch.ask()

    def cost(self, op: str) -> Cost:
        """Measured cost of ``get``, ``put`` or ``decode``; of a resident tier nothing is measured."""
        return Cost() if self._calls is None else self._calls.costs[op]

    def queue(self) -> tuple[int, int]:
        """Calls and bytes that wait in the driver."""
        return (0, 0) if self._calls is None else (self._calls.driver.queued_calls, self._calls.driver.queued_bytes)

    def leave_alone(self) -> None:
        """The end is near: no more questions to a backend that is off."""
        if self._calls is not None:
            self._calls.watch.stop()

    @property
    def busy(self) -> bool:
        """Calls wait or run, or have not been counted yet."""
        return self._calls is not None and self._calls.busy

    def close(self, deadline: float) -> bool:
        """Stop the driver and close the backend, in at most about `deadline` seconds. Blocks: call it off the loop.

        Returns False when a call still hangs in the backend, which is then closed once that returns, or closing hangs.
        """
        end = time.monotonic() + deadline
        if self._calls is None:
            self.backend.close()
            return True
        ended = self._calls.driver.close(deadline)
        # In a thread of its own: a store that is silent may keep its client waiting for a good-bye.
        closing = threading.Thread(target=self._close_backend, name=f"lmkv-{self.name}-close", daemon=True)
        closing.start()
        closing.join(max(0.1, end - time.monotonic()) if ended else 0.0)
        return ended and not closing.is_alive()

    def _close_backend(self) -> None:
        if self._calls is not None:
            self._calls.driver.join()
        try:
            self.backend.close()
        except Exception as e:  # noqa: BLE001  whatever a plugin raises, the others have to be closed too
            log.warning("tier %s: closing it failed: %s: %s", self.name, type(e).__name__, e)

    # --- inside ------------------------------------------------------------------------------------------------------

    def _run(  # noqa: PLR0917  one call
        self,
        op: str,
        nkeys: int,
        work: Callable[[], list[Outcome]],
        finish: Finish,
        objects: Sequence[MemoryObject] = (),
        priority: int = STORE,
        until: float = math.inf,
    ) -> asyncio.Future[list[Outcome]]:
        if self._calls is None:
            msg = f"tier {self.name!r} is resident: it is borrowed from, not called"
            raise TypeError(msg)
        watch = self._calls.watch
        breaker = {"put": watch.writes, "get": watch.reads, "contains": watch.reads}.get(op)
        return self._calls.start(Request(op, nkeys, work, finish, objects, priority, breaker, until))

    def _stored(self, item: PutItem, nbytes: int, *, late: bool) -> None:
        if not self.shared:
            self.record(item.key, nbytes, item.trailer.parent)
        if late:
            self.on_late_put(item.key)

    def _tell(self, op: str, work: Callable[[], None]) -> None:
        """A call that nobody waits for. Left out while the tier is off."""
        if not (self.readable and self.writable):
            return

        def run() -> list[Outcome]:
            work()
            return [OK(0)]

        self._run(op, 1, run, _ignore)

    def _flush_deletes(self) -> None:
        """Delete what is dying. When that fails or cannot be done now, `tidy` or the next put tries again."""
        if self._flushing or not (self.readable and self.writable):
            return
        keys = list(self._dying)
        self._flushing = True

        def work() -> list[Outcome]:
            self.backend.delete(keys)
            return [OK(0)]

        def finish(outcomes: list[Outcome], *, late: bool) -> None:  # noqa: ARG001  late or not, they are gone
            self._flushing = False
            if outcomes[0].ok:
                self._buried(keys)
                if self._dying:
                    self._flush_deletes()

        self._run("delete", 1, work, finish)

    def _buried(self, keys: Sequence[ChunkKey]) -> None:
        for key in keys:
            self._dying.pop(key, None)

    def _bury(self, keys: Sequence[ChunkKey], outcomes: Sequence[Outcome]) -> None:
        """In a driver thread: damaged frames go out of the way; missing ones for good, should the store be wrong.

        Nobody has put such a frame anew meanwhile: it is in the index until the outcomes are told.
        """
        damaged = [
            key for key, outcome in zip(keys, outcomes, strict=True) if miss_reason(outcome) is MissReason.CORRUPT
        ]
        missing = [key for key, outcome in zip(keys, outcomes, strict=True) if outcome.kind is OutcomeKind.MISS]
        if damaged:
            self.backend.set_aside(damaged)
        if missing and not self.shared:
            self.backend.delete(missing)


def _ignore(outcomes: list[Outcome], *, late: bool) -> None:
    """For calls whose books need no keeping."""
