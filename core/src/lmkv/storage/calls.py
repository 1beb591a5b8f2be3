"""The calls of one tier into its backend: deadline, bulkhead, breaker and counters around each.

Lives on the storage loop; the backend's code runs in the driver's threads. A call's result may come after its
deadline: the waiter has long been told, and what came late is handed to the tier, which keeps its books right.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, NamedTuple, Protocol, cast

from lmkv.errors import BackendError, FrameError, UnreadableError
from lmkv.storage.driver import STORE, Call, Driver
from lmkv.types import FAILED, REJECTED, MissReason, Outcome, OutcomeKind

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from lmkv.memory import MemoryObject
    from lmkv.observe.metrics import Metrics
    from lmkv.storage.breaker import Breaker

log = logging.getLogger(__name__)


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


class Calls:
    """Runs requests of one tier.

    Attributes:
        last_error: what went wrong last, for people.
    """

    def __init__(self, tier: str, driver: Driver, deadline: float, metrics: Metrics) -> None:
        self.driver = driver
        self.last_error = ""
        self._tier = tier
        self._deadline = deadline
        self._metrics = metrics
        self._overdue: set[Call] = set()

    @property
    def stuck(self) -> bool:
        """Every thread hangs in a call that has overrun its deadline: what is queued would wait for nothing."""
        return len(self._overdue) >= self.driver.threads

    def start(self, request: Request) -> asyncio.Future[list[Outcome]]:
        """Begin a call. The future always gets one outcome per key, at the deadline at the latest, and never fails."""
        loop = asyncio.get_running_loop()
        waiting: asyncio.Future[list[Outcome]] = loop.create_future()
        if self.stuck or (request.breaker is not None and not request.breaker.allow()):
            self._refuse(request, waiting, MissReason.TIER_OPEN, f"is off after failures ({self.last_error})", "open")
            return waiting

        def complete(value: object, error: BaseException | None, seconds: float) -> None:
            timer.cancel()
            self._overdue.discard(cast("Call", call))
            outcomes = self._outcomes(request, value, error)
            self._judge(request, outcomes, error, seconds)
            _settle(request, waiting, outcomes)

        def done(value: object, error: BaseException | None, seconds: float) -> None:
            try:
                loop.call_soon_threadsafe(complete, value, error, seconds)
            except RuntimeError:  # the loop has been closed: nobody is left to tell
                return

        call = self.driver.submit(request.work, done=done, objects=request.objects, priority=request.priority)
        if call is None:
            self._count(request, "rejected")
            self._metrics.inc("lmkv_tier_rejected_total", tier=self._tier, op=request.op)
            _settle(request, waiting, [REJECTED] * request.nkeys)
            return waiting
        timer = loop.call_later(self._deadline, self._expire, request, call, waiting)
        return waiting

    def _expire(self, request: Request, call: Call, waiting: asyncio.Future[list[Outcome]]) -> None:
        text = f"{request.op} overran its deadline of {self._deadline:g} s"
        if self.driver.abandon(call):  # never started: its time went by in the queue, no sign of illness
            self._refuse(request, waiting, MissReason.DEADLINE, text + " in the queue", "deadline")
            return
        self._overdue.add(call)
        self.last_error = text
        if request.breaker is not None:
            request.breaker.failed()
        self._count(request, "deadline")
        self._warn(text)
        if not waiting.done():
            error = RefusedError(f"tier {self._tier!r}: {text}", MissReason.DEADLINE)
            waiting.set_result([FAILED(error)] * request.nkeys)

    def _refuse(
        self, request: Request, waiting: asyncio.Future[list[Outcome]], reason: MissReason, text: str, outcome: str
    ) -> None:
        """The call will never reach the backend."""
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
        self, request: Request, outcomes: Sequence[Outcome], error: BaseException | None, seconds: float
    ) -> None:
        """Count a finished call and tell the breaker."""
        failed = [o.error for o in outcomes if o.error is not None]
        corrupt = all(isinstance(e, FrameError) for e in failed)
        ill = error is not None or (bool(failed) and len(failed) == len(outcomes) and not corrupt)
        if request.breaker is not None:
            if ill:
                request.breaker.failed()
            else:
                request.breaker.succeeded()
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
