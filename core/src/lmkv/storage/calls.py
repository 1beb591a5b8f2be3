"""The calls of one tier into its backend: deadline, bulkhead, breaker and counters around each.

Lives on the storage loop; the backend's code runs in the driver's threads. A call's result may come after its
deadline: the waiter has long been told, and what came late is handed to the tier, which keeps its books right.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from typing import TYPE_CHECKING, Final, NamedTuple, Protocol, cast

from lmkv.errors import BackendError, FrameError, UnreadableError
from lmkv.storage.cost import Cost
from lmkv.storage.driver import STORE, Call, Driver
from lmkv.storage.watch import Watch
from lmkv.types import FAILED, REJECTED, MissReason, Outcome, OutcomeKind

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from lmkv.backend import StorageBackendInterface
    from lmkv.memory import MemoryObject
    from lmkv.observe.metrics import Metrics
    from lmkv.storage.breaker import Breaker
    from lmkv.storage.inventory import TierSettings

log = logging.getLogger(__name__)

RESOLUTION: Final = 1e-3
"""Seconds by which a timer may come early."""


class RefusedError(BackendError):
    """A call did not reach the backend, or overran; `reason` is what a miss is counted under."""

    def __init__(self, message: str, reason: MissReason) -> None:
        super().__init__(message, kind=reason.value)
        self.reason = reason


class Finish(Protocol):
    """Gets the outcomes of a call, on the loop, exactly once unless the call never returns."""

    def __call__(self, outcomes: list[Outcome], *, late: bool) -> None:
        """`late`: the waiter was told something else at the deadline."""


class Request(NamedTuple):
    """One call: what to do, and whom to tell."""

    op: str
    nkeys: int
    work: Callable[[], list[Outcome]]
    finish: Finish
    objects: Sequence[MemoryObject] = ()
    priority: int = STORE
    breaker: Breaker | None = None
    until: float = math.inf
    """Loop time at which its waiter gives up, should that be before the deadline; no sign of illness."""

    @property
    def store(self) -> bool:
        """A store: nobody waits for it, and its deadline begins when it does."""
        return self.op == "put"


class Calls:
    """Runs requests of one tier. `on_room` is called when a late call has given back the memory that it was lent.

    Attributes:
        watch: the tier's breakers, and what closes them again.
        costs: measured costs by operation: ``get``, ``put``, ``decode``.
        last_error: what went wrong last, for people.
    """

    def __init__(
        self, settings: TierSettings, backend: StorageBackendInterface, metrics: Metrics, on_room: Callable[[], None]
    ) -> None:
        self.driver = Driver(
            settings.name, threads=settings.threads, max_calls=settings.queue_calls, max_bytes=settings.queue_bytes
        )
        self.watch = Watch(
            settings.name,
            self.driver,
            backend,
            failures=settings.failures,
            interval=settings.probe,
            deadline=settings.deadline,
            opened=self._refuse_queued,
        )
        self.costs = {"get": Cost(), "put": Cost(least=1), "decode": Cost(least=1)}
        self.last_error = ""
        self._tier = settings.name
        self._deadline = settings.deadline
        self._queue_seconds = settings.queue_seconds
        self._metrics = metrics
        self._on_room = on_room
        self._overdue: set[Call] = set()
        self._pending: dict[Call, tuple[Request, asyncio.Future[list[Outcome]]]] = {}

    @property
    def stuck(self) -> bool:
        """Every thread hangs in a call that has overrun its deadline: what is queued would wait for nothing."""
        return len(self._overdue) >= self.driver.threads

    @property
    def busy(self) -> bool:
        """Calls wait or run, or have returned and the loop has not been told yet what they gave."""
        return bool(self._pending) or self.driver.busy

    def start(self, request: Request) -> asyncio.Future[list[Outcome]]:
        """Begin a call. The future always gets one outcome per key, at the deadline at the latest, and never fails."""
        loop = asyncio.get_running_loop()
        waiting: asyncio.Future[list[Outcome]] = loop.create_future()
        if self.stuck or (request.breaker is not None and not request.breaker.allow()):
            self._refuse(request, waiting, MissReason.TIER_OPEN, f"is off after failures ({self.last_error})", "open")
            return waiting
        nbytes = sum(o.nbytes for o in request.objects)
        full = self.backlog(nbytes) if request.store else ""

        def complete(value: object, error: BaseException | None, seconds: float) -> None:
            if call.timer is not None:
                call.timer.cancel()
            overdue = call in self._overdue
            self._overdue.discard(call)
            self._pending.pop(call, None)
            outcomes = self._outcomes(request, value, error)
            self._judge(request, call, outcomes, error, seconds, late=overdue)
            late = waiting.done()
            _settle(request, waiting, outcomes)
            if late and request.objects:
                self._on_room()
            self._trim()

        def done(value: object, error: BaseException | None, seconds: float) -> None:
            try:
                loop.call_soon_threadsafe(complete, value, error, seconds)
            except RuntimeError:  # the loop has been closed: nobody is left to tell
                return

        found = None
        if not full:
            found = self.driver.submit(request.work, done=done, objects=request.objects, priority=request.priority)
        if found is None:
            self._reject(request, waiting, full or self.driver.full(self.driver.stores, nbytes) or "calls")
            return waiting
        call = found
        self._pending[call] = (request, waiting)
        least = self._queue_seconds if request.store else request.until - loop.time()
        first = min(self._deadline, least)
        self._arm(request, call, waiting, loop.time(), max(0.0, first))
        return waiting

    def backlog(self, nbytes: int) -> str:
        """Why a store of so many bytes would not be queued now: ``calls``, ``bytes``, ``seconds``; or nothing."""
        lane = self.driver.stores
        full = self.driver.full(lane, nbytes)
        if full or not lane.calls + lane.running:
            return full
        return "seconds" if self._store_seconds(1, nbytes) > self._queue_seconds else ""

    def _store_seconds(self, calls: int = 0, nbytes: int = 0) -> float:
        """How long the stores that wait and run will take, as far as that is known, with so many more."""
        lane = self.driver.stores
        calls, nbytes = lane.calls + lane.running + calls, lane.nbytes + lane.running_bytes + nbytes
        return self.costs["put"].drain(calls, nbytes, self.driver.threads) or 0.0

    def _trim(self) -> None:
        """A store has been measured: drop the newest of those that wait, as long as they are too much work."""
        while self.driver.stores.calls and self._store_seconds() > self._queue_seconds:
            call = self.driver.newest(self.driver.stores)
            if call is None or not self._drop(call):
                return

    def _drop(self, call: Call) -> bool:
        """A store has no time left in the queue; whether it had not begun."""
        if call not in self._pending or not self.driver.abandon(call):
            return False
        request, waiting = self._pending.pop(call)
        if call.timer is not None:
            call.timer.cancel()
        self._reject(request, waiting, "seconds")
        return True

    def count_dropped(self, nkeys: int, why: str) -> None:
        """So many frames are not stored; `why`: ``open``, or which bound of its queue is reached."""
        outcome = why if why in {"open", "deadline"} else "rejected"
        self._metrics.inc("lmkv_tier_operations_total", nkeys, tier=self._tier, op="put", outcome=outcome)
        if outcome == "rejected":
            self._metrics.inc("lmkv_tier_rejected_total", tier=self._tier, op="put")
        self._metrics.inc("lmkv_tier_dropped_writes_total", nkeys, tier=self._tier, reason=why)

    def _reject(self, request: Request, waiting: asyncio.Future[list[Outcome]], why: str) -> None:
        """The queue does not take it, or no longer."""
        if request.breaker is not None:
            request.breaker.untold()
        if request.store:
            self.count_dropped(request.nkeys, why)
        else:
            self._count(request, "rejected")
            self._metrics.inc("lmkv_tier_rejected_total", tier=self._tier, op=request.op)
        _settle(request, waiting, [REJECTED] * request.nkeys)

    def _arm(
        self, request: Request, call: Call, waiting: asyncio.Future[list[Outcome]], begin: float, seconds: float
    ) -> None:
        loop = asyncio.get_running_loop()
        call.timer = loop.call_later(seconds, self._expire, request, call, waiting, begin)

    def _expire(self, request: Request, call: Call, waiting: asyncio.Future[list[Outcome]], begin: float) -> None:
        deadline = self._deadline
        if request.store:
            left = self._time_left(call, begin)
            if left > 0:
                self._arm(request, call, waiting, begin, left)
                return
            if self._drop(call):
                return
        text = f"{request.op} overran its deadline of {deadline:g} s"
        if self.driver.abandon(call):  # never started: its time went by in the queue, no sign of illness
            del self._pending[call]
            if request.breaker is not None:
                request.breaker.untold()
            self._refuse(request, waiting, MissReason.DEADLINE, text + " in the queue", "deadline")
            return
        left = begin + deadline - asyncio.get_running_loop().time()
        if not request.store and left > RESOLUTION:  # whoever waits has no more time; the call has
            self._tell_overrun(request, waiting, "the time that a load has was over")
            self._arm(request, call, waiting, begin, left)
            return
        self._overdue.add(call)
        self.last_error = text
        if request.breaker is not None:
            request.breaker.failed()
        if self.stuck:
            self.watch.hung()
            self._refuse_queued()
        self._warn(text)
        self._tell_overrun(request, waiting, text)

    def _tell_overrun(self, request: Request, waiting: asyncio.Future[list[Outcome]], text: str) -> None:
        if not waiting.done():
            self._count(request, "deadline")
            error = RefusedError(f"tier {self._tier!r}: {text}", MissReason.DEADLINE)
            waiting.set_result([FAILED(error)] * request.nkeys)

    def _refuse_queued(self) -> None:
        """A breaker has opened, or every thread hangs: what has not begun and would be refused now is refused."""
        for call, (request, waiting) in list(self._pending.items()):
            off = self.stuck or (request.breaker is not None and request.breaker.open)
            if off and self.driver.abandon(call):
                del self._pending[call]
                if call.timer is not None:
                    call.timer.cancel()
                self._refuse(request, waiting, MissReason.TIER_OPEN, f"is off ({self.last_error})", "open")

    def _time_left(self, call: Call, begin: float) -> float:
        """Of a store: while it waits, until it has been in the queue for too long; then, until its deadline."""
        if not call.started:
            return min(self._deadline, begin + self._queue_seconds - asyncio.get_running_loop().time())
        return call.began + self._deadline - time.monotonic()

    def _refuse(
        self, request: Request, waiting: asyncio.Future[list[Outcome]], reason: MissReason, text: str, outcome: str
    ) -> None:
        """The call will never reach the backend."""
        if request.store:
            self.count_dropped(request.nkeys, outcome)
        else:
            self._count(request, outcome)
        _settle(request, waiting, [FAILED(RefusedError(f"tier {self._tier!r} {text}", reason))] * request.nkeys)

    def _outcomes(self, request: Request, value: object, error: BaseException | None) -> list[Outcome]:
        if error is not None:
            return [FAILED(error)] * request.nkeys
        outcomes = cast("list[Outcome]", value)
        if len(outcomes) != request.nkeys:
            msg = f"tier {self._tier!r}: {request.op} of {request.nkeys} keys returned {len(outcomes)} outcomes"
            return [FAILED(BackendError(msg))] * request.nkeys
        return outcomes

    def _judge(
        self,
        request: Request,
        call: Call,
        outcomes: Sequence[Outcome],
        error: BaseException | None,
        seconds: float,
        *,
        late: bool,
    ) -> None:
        """Count a finished call and tell the breaker, unless it was told at the deadline."""
        failed = [o.error for o in outcomes if o.error is not None]
        corrupt = all(isinstance(e, FrameError) for e in failed)
        ill = error is not None or (bool(failed) and len(failed) == len(outcomes) and not corrupt)
        breaker = request.breaker
        if breaker is not None and (not late or (breaker.background and not ill)):
            if ill:
                breaker.failed()
            else:
                breaker.succeeded()
        cost = self.costs.get(request.op)
        if cost is not None and error is None and not failed:
            cost.note(sum(o.nbytes for o in outcomes), call.began, call.began + seconds)
        if error is not None or failed:
            cause = error or failed[0]
            self.last_error = f"{request.op}: {type(cause).__name__}: {cause}"
            self._warn(self.last_error)
        self._metrics.observe("lmkv_tier_seconds", seconds, tier=self._tier, op=request.op)
        if error is not None:
            self._count(request, "failed")
            return
        for kind in OutcomeKind:
            count = sum(1 for o in outcomes if o.kind is kind)
            if count:
                self._metrics.inc(
                    "lmkv_tier_operations_total", count, tier=self._tier, op=request.op, outcome=kind.value
                )
        self._metrics.inc("lmkv_tier_bytes_total", sum(o.nbytes for o in outcomes), tier=self._tier, op=request.op)

    def _count(self, request: Request, outcome: str) -> None:
        self._metrics.inc(
            "lmkv_tier_operations_total", max(1, request.nkeys), tier=self._tier, op=request.op, outcome=outcome
        )

    def _warn(self, text: str) -> None:
        log.warning("tier %s: %s", self._tier, text, extra={"key": ("tier", self._tier)})


def _settle(request: Request, waiting: asyncio.Future[list[Outcome]], outcomes: list[Outcome]) -> None:
    late = waiting.done()
    request.finish(outcomes, late=late)
    if not late:
        waiting.set_result(outcomes)


def miss_reason(outcome: Outcome) -> MissReason | None:
    """What a load that gave `outcome` is counted under; None for OK."""
    if outcome.ok:
        return None
    if isinstance(outcome.error, RefusedError):
        return outcome.error.reason
    if isinstance(outcome.error, FrameError):
        return MissReason.UNREADABLE if isinstance(outcome.error, UnreadableError) else MissReason.CORRUPT
    if outcome.kind is OutcomeKind.MISS:
        return MissReason.EVICTED
    return MissReason.DEADLINE if outcome.kind is OutcomeKind.REJECTED else MissReason.FAILED
