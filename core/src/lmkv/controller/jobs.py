"""Jobs: what takes long, with progress, results for each chunk, and an end that outlives this process."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import time
from typing import TYPE_CHECKING, Final

from lmkv.controller.journal import KEPT_CHUNKS, KEPT_JOBS, KEPT_SECONDS
from lmkv.controller.problems import Problem
from lmkv.controller.records import (
    CANCELLED,
    DONE,
    ENDED,
    FAILED,
    RUNNING,
    WAITING,
    Ended,
    Event,
    Failure,
    Plan,
    Started,
    Worked,
)
from lmkv.errors import LmkvError
from lmkv.types import DIGEST_BYTES

if TYPE_CHECKING:
    from collections.abc import Sequence

    from lmkv.controller.courier import Call
    from lmkv.controller.execution import Execution
    from lmkv.controller.journal import Journal
    from lmkv.controller.records import State
    from lmkv.observe.metrics import Metrics

log = logging.getLogger("lmkv.controller")

OPEN_MAX: Final = 256
"""Jobs that are not over, at most: more are refused until one is."""
LOOK_SECONDS: Final = 0.5
"""Between two looks at a job that another controller runs."""
KEEP_SECONDS: Final = 2.0
"""Between two looks at what other controllers have left, or want."""


class Job:
    """One job, as the events about it say. `changed` is set whenever something is different."""

    def __init__(self, identity: str, plan: Plan) -> None:
        self.id = identity
        self.plan = plan
        self.state: State = WAITING
        self.attempt = 0
        self.started: float | None = None
        self.ended: float | None = None
        self.worked: dict[int, Worked] = {}
        self.calls: dict[int, Call] = {}
        """Works that are under way, by their index in the plan."""
        self.cancelled = False
        self._error = ""
        self.over = asyncio.Event()

    @classmethod
    def replay(cls, identity: str, events: Sequence[Event]) -> Job:
        """The job after these events, the first of which is its plan."""
        plan, *rest = events
        assert isinstance(plan, Plan)
        job = cls(identity, plan)
        for event in rest:
            job.apply(event)
        return job

    def apply(self, event: Event) -> None:
        """Take in what has happened."""
        if isinstance(event, Started):
            self.state = RUNNING
            self.attempt = event.attempt
            self.started = event.at if self.started is None else self.started
        elif isinstance(event, Worked):
            self.worked[event.work] = event
            self.calls.pop(event.work, None)
        elif isinstance(event, Ended):
            self.state = event.state
            self._error = event.error
            self.ended = event.at
            self.over.set()

    @property
    def failures(self) -> list[Failure]:
        """Of works that are over, in the order of the plan."""
        return [*self.plan.lost, *(each for index in sorted(self.worked) for each in self.worked[index].failed)]

    @property
    def error(self) -> str:
        """The first thing that went wrong; empty: nothing did."""
        for index in sorted(self.worked):
            if self.worked[index].error:
                return self.worked[index].error
        failures = self.failures
        return failures[0].reason if failures else self._error

    def numbers(self) -> tuple[int, int]:
        """Chunks done and failed so far."""
        done, failed = 0, len(self.plan.lost)
        for index, work in enumerate(self.plan.works):
            if (worked := self.worked.get(index)) is not None:
                failed += len(worked.failed)
                done += len(work.digests) // DIGEST_BYTES - len(worked.failed)
            elif (call := self.calls.get(index)) is not None:
                done += call.progress.done
                failed += len(call.progress.failed)
        return done, failed

    def counts(self) -> dict[str, dict[str, int]]:
        """Node → what → number, so far."""
        found: dict[str, dict[str, int]] = {}
        for index, work in enumerate(self.plan.works):
            worked, call = self.worked.get(index), self.calls.get(index)
            numbers = worked.counts if worked is not None else call.progress.counts if call is not None else {}
            into = found.setdefault(work.node, {}) if numbers else {}
            for name, number in numbers.items():
                into[name] = into.get(name, 0) + number
        return found


class Jobs:
    """All jobs of a controller. On the controller's loop."""

    def __init__(self, journal: Journal, execution: Execution, metrics: Metrics) -> None:
        self.journal = journal
        self._execution = execution
        self._metrics = metrics
        self._jobs: dict[str, Job] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._keeper: asyncio.Task[None] | None = None

    @property
    def open(self) -> int:
        """Jobs that this controller runs now."""
        return len(self._tasks)

    async def start(self) -> None:
        """Go on with what the journal has. Raises `ConfigError` where it cannot be used."""
        for identity, events in (await self.journal.open()).items():
            self._take_over(identity, events)
        self._keeper = asyncio.create_task(self._keeping(), name="lmkv-jobs")

    async def submit(self, plan: Plan) -> Job:
        """A new job; or, with an idempotency key that is known, the job that has it.

        Raises:
            Problem: too many jobs, or the key was given with another request.
            BackendError: the journal cannot be written.
        """
        if len(self._tasks) >= OPEN_MAX:
            raise Problem(429, "busy", f"{OPEN_MAX} jobs are not over yet: wait for one", headers={"Retry-After": "5"})
        identity = secrets.token_hex(8)
        known = await self.journal.begin(identity, plan)
        if known is not None:
            return await self._same(known, plan)
        job = Job(identity, plan)
        log.info("job %s: %s of %d chunks, asked for by %s", identity, plan.verb, plan.total, plan.by)
        self._run(job)
        return job

    async def known(self, key: str, fingerprint: str) -> Job | None:
        """The job with an idempotency key, whatever would be planned for the request today.

        Raises:
            Problem: the key was given with another request.
        """
        identity = await self.journal.find(key) if key else None
        job = await self.get(identity) if identity is not None else None
        if job is not None and job.plan.fingerprint != fingerprint:
            raise Problem(409, "idempotency-key", "this Idempotency-Key was given with another request: take a new one")
        return job

    async def get(self, identity: str) -> Job | None:
        """A job by its id."""
        job = self._jobs.get(identity)
        if job is None and (events := await self.journal.read(identity)) and isinstance(events[0], Plan):
            job = Job.replay(identity, events)
        return job

    async def wait(self, job: Job, seconds: float) -> Job:
        """The job once it is over, or as it is after so long."""
        until = asyncio.get_running_loop().time() + seconds
        while job.state not in ENDED and (left := until - asyncio.get_running_loop().time()) > 0:
            with contextlib.suppress(TimeoutError, asyncio.TimeoutError):  # two classes before Python 3.11
                await asyncio.wait_for(job.over.wait(), min(left, LOOK_SECONDS))
            # Another controller may run it, or have taken it over.
            job = await self.get(job.id) or job
        return job

    async def recent(self, count: int) -> list[Job]:
        """The newest jobs, newest first."""
        found = [await self.get(identity) for identity in await self.journal.recent(count)]
        return [job for job in found if job is not None]

    async def cancel(self, job: Job) -> None:
        """Stop a job after what is under way. Nothing happens to one that is over."""
        if job.id in self._tasks:
            self._cancel(job)
        elif job.state not in ENDED:
            await self.journal.ask_cancel(job.id)

    async def close(self) -> None:
        """Leave all jobs as they are: whoever opens the journal next goes on with them. Idempotent."""
        keeper, self._keeper = self._keeper, None
        tasks = [task for task in (keeper, *self._tasks.values()) if task is not None]
        for task in tasks:
            task.cancel()
        for task in tasks:
            with contextlib.suppress(asyncio.CancelledError):
                await task
        await self.journal.close()

    async def _same(self, identity: str, plan: Plan) -> Job:
        job = await self.known(plan.key, plan.fingerprint)
        if job is None:
            raise Problem(
                409, "idempotency-key", f"job {identity} has this Idempotency-Key and is forgotten: take another"
            )
        return job

    def _cancel(self, job: Job) -> None:
        job.cancelled = True
        if job.state == WAITING:
            self._tasks[job.id].cancel()
        for call in job.calls.values():
            call.cancel()

    def _take_over(self, identity: str, events: list[Event]) -> None:
        if not events or not isinstance(events[0], Plan):
            log.warning("job %s: the journal has no plan of it; it is left alone", identity)
            return
        job = Job.replay(identity, events)
        if job.state not in ENDED:
            log.info("job %s: going on with %s of %d chunks", identity, job.plan.verb, job.plan.total)
            self._run(job)
        else:
            self._jobs[identity] = job

    def _run(self, job: Job) -> None:
        self._jobs[job.id] = job
        self._tasks[job.id] = asyncio.create_task(self._running(job), name=f"lmkv-job-{job.id}")

    async def _running(self, job: Job) -> None:
        try:
            async with self.journal.moving(job.plan.moves):
                await self._add(job, Started(job.attempt + 1, time.time()))
                await self._execution.run(job, lambda event: self._add(job, event), lambda: self.journal.mine(job.id))
            await self._add(job, Ended(_verdict(job), time.time()))
            log.info("job %s: %s", job.id, job.state)
            self._metrics.inc("lmkv_controller_jobs_total", verb=job.plan.verb, state=job.state)
        except asyncio.CancelledError:
            if not job.cancelled or job.state != WAITING:
                raise
            await self._add(job, Ended(CANCELLED, time.time()))  # it waited for another one
        except LmkvError as error:
            # Only the journal raises here. What is not written down is done again by whoever adopts the job.
            log.warning("job %s: stopped, to be gone on with: %s", job.id, error, extra={"key": ("journal", job.id)})
            del self._jobs[job.id]
        except Exception as error:
            log.exception("job %s: ended by a fault of ours", job.id)
            with contextlib.suppress(LmkvError):
                await self._add(job, Ended(FAILED, time.time(), f"a fault of the controller: {type(error).__name__}"))
        finally:
            self._tasks.pop(job.id, None)

    async def _add(self, job: Job, event: Event) -> None:
        await self.journal.add(job.id, event)
        job.apply(event)

    async def _keeping(self) -> None:
        while True:
            await asyncio.sleep(KEEP_SECONDS)
            try:
                for identity in await self.journal.keep(tuple(self._tasks)):
                    if identity in self._tasks:
                        self._cancel(self._jobs[identity])
                for identity, events in (await self.journal.adopt(tuple(self._tasks))).items():
                    self._take_over(identity, events)
                await self._forget_old()
            except LmkvError as error:
                log.warning("jobs: the journal does not answer: %s", error, extra={"key": "journal"})

    async def _forget_old(self) -> None:
        left, chunks, limit = KEPT_JOBS, KEPT_CHUNKS, time.time() - KEPT_SECONDS
        for identity, job in reversed(list(self._jobs.items())):
            if job.ended is None:
                continue
            left, chunks = left - 1, chunks - job.plan.total
            if min(left, chunks) < 0 or job.ended < limit:
                del self._jobs[identity]
                await self.journal.forget(identity)


def _verdict(job: Job) -> State:
    if job.cancelled and (len(job.worked) < len(job.plan.works) or any(w.cancelled for w in job.worked.values())):
        return CANCELLED
    return FAILED if job.error else DONE
