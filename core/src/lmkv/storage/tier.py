"""A tier: one backend, and everything that a backend must not care about.

Deadline, bulkhead, breaker, capacity, eviction, codec, verification and counters. Knows keys and sizes; what a key
belongs to is the stack's business. All methods run on the storage loop; the backend's calls run in the driver's
threads.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple, cast

from lmkv.backend import ResidentBackend
from lmkv.errors import FrameError
from lmkv.frame import Trailer, verify
from lmkv.specs import BulkPolicy
from lmkv.storage.breaker import Breaker
from lmkv.storage.calls import Calls, Request, miss_reason
from lmkv.storage.coder import Coder
from lmkv.storage.coding import IDENTITY
from lmkv.storage.driver import Driver
from lmkv.types import FAILED, OK, Health, HealthState, OutcomeKind

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from lmkv.backend import StorageBackendInterface
    from lmkv.memory import MemoryObject
    from lmkv.observe.metrics import Metrics
    from lmkv.specs import Codec, EvictionPolicy
    from lmkv.storage.coding import PutItem
    from lmkv.types import ChunkKey, MissReason, Outcome


@dataclass(frozen=True, slots=True, kw_only=True)
class TierSettings:
    """What the configuration says about a tier; sizes in bytes, times in seconds."""

    name: str
    capacity: int | None
    """None: the store limits itself."""
    write: Literal["through", "demote", "never"] = "through"
    read: Literal["promote", "direct"] = "promote"
    codec: str = IDENTITY
    deadline: float = 2.0
    threads: int = 4
    queue_calls: int = 64
    queue_bytes: int = 1 << 30
    failures: int = 5
    probe: float = 5.0


class GetResult(NamedTuple):
    """What a load gave for one key."""

    outcome: Outcome
    trailer: Trailer | None = None
    reason: MissReason | None = None
    """Why it is not OK."""


class Tier:
    """One configured backend of the stack.

    Attributes:
        index: bytes of each stored frame, for tiers that this node owns alone; empty for shared stores.
        used: bytes in `index` and in puts under way.
        unreadable: those in `index` whose codec or key is not here: kept until room is needed or a put replaces them.
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
        self.number = number
        self.bit = 1 << number
        self.settings = settings
        self.name = settings.name
        self.backend = backend
        self.policy = policy
        self.resident = isinstance(backend, ResidentBackend)
        self.shared = backend.capabilities.shared
        self.index: dict[ChunkKey, int] = {}
        self.used = 0
        self.unreadable: set[ChunkKey] = set()
        self.reads = Breaker(settings.failures, settings.probe)
        self.writes = Breaker(settings.failures, settings.probe)
        self.on_late_put: Callable[[ChunkKey], None] = lambda _: None
        self.coder = Coder(settings.name, backend, settings.codec, codecs)
        self._pending: dict[ChunkKey, int] = {}
        self._dying: dict[ChunkKey, int] = {}
        self._doubtful: set[ChunkKey] = set()
        self._calls: Calls | None = None
        if not self.resident:
            driver = Driver(
                settings.name,
                threads=settings.threads,
                max_calls=settings.queue_calls,
                max_bytes=settings.queue_bytes,
            )
            self._calls = Calls(settings.name, driver, settings.deadline, metrics)

    # --- capacity ----------------------------------------------------------------------------------------------------

    @property
    def capacity(self) -> int | None:
        """Bytes that the tier may hold, or None."""
        return self.settings.capacity

    def takes(self, key: ChunkKey, nbytes: int, *, replace: bool = False) -> bool:
        """Whether a put of this frame makes sense now: not there, not under way, not too large."""
        limit = self.backend.capabilities.max_frame_bytes
        nbytes = self.coder.bound(nbytes)
        if limit is not None and nbytes > limit:
            return False
        if self.capacity is not None and nbytes > self.capacity:
            return False
        there = key in self.index and key not in self.unreadable
        return (replace or not there) and key not in self._pending and key not in self._dying

    def record(self, key: ChunkKey, nbytes: int, parent: bytes) -> None:
        """`key` is stored with `nbytes`: count it and give it to the policy."""
        self.used += nbytes - self.index.get(key, 0)
        self.index[key] = nbytes
        self.unreadable.discard(key)
        if self.policy is not None:
            self.policy.add(key, parent or None)

    def record_all(self, sizes: Mapping[ChunkKey, int], parents: Mapping[ChunkKey, bytes | None]) -> None:
        """As `record` for each in turn: what is found at a start, least recently used first."""
        self.used += sum(sizes.values()) - sum(self.index[key] for key in sizes.keys() & self.index.keys())
        self.index.update(sizes)
        if isinstance(self.policy, BulkPolicy):
            self.policy.add_all(parents)
        elif self.policy is not None:
            for key, parent in parents.items():
                self.policy.add(key, parent)

    def forget(self, key: ChunkKey) -> int:
        """`key` is no longer stored (or no longer ours to count); returns its bytes."""
        nbytes = self.index.pop(key, 0)
        self.used -= nbytes
        self.unreadable.discard(key)
        if self.policy is not None:
            self.policy.remove(key)
        return nbytes

    def touch(self, keys: Sequence[ChunkKey]) -> None:
        """These frames were used."""
        policy = self.policy
        if policy is not None:
            for key in keys:
                policy.touch(key)

    def victims(self, nbytes: int, free: Callable[[ChunkKey], bool]) -> Iterable[ChunkKey]:
        """Keys whose eviction frees `nbytes`, as far as there are any that `free` allows; found as they are taken."""
        if self.policy is None or nbytes <= 0:
            return ()
        return self.policy.victims(nbytes, self.index.__getitem__, free)

    def shortfall(self, nbytes: int) -> int:
        """Bytes that must go before `nbytes` more fit; 0 or less: they fit."""
        return 0 if self.capacity is None else self.used + nbytes - self.capacity

    # --- resident ----------------------------------------------------------------------------------------------------

    def adopt(self, key: ChunkKey, obj: MemoryObject, parent: bytes) -> None:
        """Keep `obj` by reference (resident tiers); the tier takes an owner of its own."""
        cast("ResidentBackend", self.backend).adopt([key], [obj])
        self.record(key, obj.nbytes, parent)

    def borrow(self, key: ChunkKey) -> MemoryObject | None:
        """The object under `key`, retained for the caller (resident tiers)."""
        return cast("ResidentBackend", self.backend).borrow([key])[0]

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
            frames = self.coder.encode(items, codec)
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
        return self._run(Request("put", len(keys), work, finish, objects, priority, self.writes))

    async def get(self, keys: Sequence[ChunkKey], objects: Sequence[MemoryObject], *, priority: int) -> list[GetResult]:
        """Load frames into `objects` and verify them. Never raises; what does not verify is reported as corrupt."""
        trailers: dict[int, Trailer] = {}

        def work() -> list[Outcome]:
            outcomes = list(self.backend.get(keys, objects))
            for i, outcome in enumerate(outcomes):
                if outcome.ok:
                    try:
                        trailers[i] = verify(objects[i].view[: outcome.nbytes], keys[i])
                    except FrameError as e:
                        outcomes[i] = FAILED(e)
            self._bury(keys, outcomes)
            return outcomes

        outcomes = await self._run(Request("get", len(keys), work, _ignore, objects, priority, self.reads))
        return [GetResult(o, trailers.get(i), miss_reason(o)) for i, o in enumerate(outcomes)]

    async def decode(
        self, source: MemoryObject, trailer: Trailer, target: MemoryObject, *, priority: int
    ) -> MissReason | None:
        """Turn a loaded frame of another codec into the identity-coded frame in `target`, sealed; or say why not."""

        def work() -> list[Outcome]:
            self.coder.decode(source, trailer, target)
            return [OK(target.nbytes)]

        return miss_reason((await self._run(Request("decode", 1, work, _ignore, [source, target], priority)))[0])

    async def contains(self, keys: Sequence[ChunkKey], *, priority: int) -> list[bool]:
        """Ask a shared store. All False when it cannot say within the deadline."""
        found: list[bool] = []

        def work() -> list[Outcome]:
            found[:] = self.backend.contains(keys)
            return [OK(0)]

        outcomes = await self._run(Request("contains", 1, work, _ignore, (), priority, self.reads))
        return found if outcomes[0].ok and len(found) == len(keys) else [False] * len(keys)

    def delete(self, keys: Sequence[ChunkKey]) -> None:
        """Remove frames, from the index now and from the store soon; until then they count, and cannot be put again."""
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

    def tidy(self) -> None:
        """Delete what a put that broke off may have left in the store uncounted. Called now and then."""
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
        if self._calls is not None and keys and self.backend.capabilities.persistent and not self.queue()[0]:
            self._tell("touch", lambda: self.backend.touch(keys))

    def describe(self, namespace: bytes, text: str) -> None:
        """Hand a namespace's JSON to the backend."""
        if self._calls is not None:
            self._tell("describe", lambda: self.backend.describe(namespace, text))

    def health(self) -> Health:
        """What the breakers and the last error say; no I/O."""
        error = "" if self._calls is None else self._calls.last_error
        if self._calls is not None and self._calls.stuck:
            return Health(HealthState.DOWN, f"off while all its threads hang; last: {error}")
        if self.reads.open:
            return Health(HealthState.DOWN, f"off after failures; last: {error}")
        if self.writes.open:
            return Health(HealthState.DEGRADED, f"takes no stores after failures; last: {error}")
        return Health(HealthState.OK)

    def queue(self) -> tuple[int, int]:
        """Calls and bytes that wait in the driver."""
        return (0, 0) if self._calls is None else (self._calls.driver.queued_calls, self._calls.driver.queued_bytes)

    @property
    def busy(self) -> bool:
        """Calls wait or run."""
        return self._calls is not None and self._calls.driver.busy

    def close(self, deadline: float) -> bool:
        """Stop the driver and close the backend, in at most about `deadline` seconds. Blocks: call it off the loop.

        Returns False when a call still hangs in the backend; the backend is then left open to it.
        """
        if self._calls is not None and not self._calls.driver.close(deadline):
            return False
        self.backend.close()
        return True

    # --- inside ------------------------------------------------------------------------------------------------------

    def _run(self, request: Request) -> asyncio.Future[list[Outcome]]:
        if self._calls is None:
            msg = f"tier {self.name!r} is resident: it is borrowed from, not called"
            raise TypeError(msg)
        return self._calls.start(request)

    def _stored(self, item: PutItem, nbytes: int, *, late: bool) -> None:
        if not self.shared:
            self.record(item.key, nbytes, item.trailer.parent)
        if late:
            self.on_late_put(item.key)

    def _tell(self, op: str, work: Callable[[], None]) -> None:
        """A call that nobody waits for."""

        def run() -> list[Outcome]:
            work()
            return [OK(0)]

        self._run(Request(op, 1, run, _ignore))

    def _flush_deletes(self) -> None:
        """Delete what is dying. When that fails or the queue is full, the next put or delete tries again."""
        keys = list(self._dying)

        def work() -> list[Outcome]:
            self.backend.delete(keys)
            return [OK(0)]

        def finish(outcomes: list[Outcome], *, late: bool) -> None:  # noqa: ARG001  late or not, they are gone
            if outcomes[0].ok:
                self._buried(keys)

        self._run(Request("delete", 1, work, finish))

    def _buried(self, keys: Sequence[ChunkKey]) -> None:
        for key in keys:
            self._dying.pop(key, None)

    def _bury(self, keys: Sequence[ChunkKey], outcomes: Sequence[Outcome]) -> None:
        """In a driver thread: damaged frames go out of the way; missing ones for good, should the store be wrong.

        Nobody has put such a frame anew meanwhile: it is in the index until the outcomes are told.
        """
        damaged = [key for key, outcome in zip(keys, outcomes, strict=True) if isinstance(outcome.error, FrameError)]
        missing = [key for key, outcome in zip(keys, outcomes, strict=True) if outcome.kind is OutcomeKind.MISS]
        if damaged:
            self.backend.set_aside(damaged)
        if missing and not self.shared:
            self.backend.delete(missing)


def _ignore(outcomes: list[Outcome], *, late: bool) -> None:
    """For calls whose books need no keeping."""
