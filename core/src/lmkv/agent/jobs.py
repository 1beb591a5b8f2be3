"""The jobs that a controller has given to this node: carried out once each, with progress, until done or cancelled."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections import Counter, OrderedDict, deque
from typing import TYPE_CHECKING, Final

import xxhash

from lmkv.agent import messages as m
from lmkv.errors import LmkvError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator

    from lmkv.observe.metrics import Metrics

log = logging.getLogger("lmkv.agent")

RUNNING_MOST: Final = 4
"""Jobs at work at once; the others wait in the order in which they came."""
WAITING_MOST: Final = 1024
"""More are refused, and not remembered: they may be given again."""
FAILURES_MOST: Final = 1 << 18
"""Failed chunks of ended jobs that are remembered together."""
TELL_SECONDS: Final = 0.5
"""Between two words of a job that gets on."""
ALIVE_SECONDS: Final = 2.0
"""Between two words of one that waits."""
MAX_JOB: Final = 128
"""Characters of a job's name."""


class Stopped(Exception):  # noqa: N818  no error: somebody wants it so
    """The job was cancelled: its work ends here."""


class Job:
    """One job. Its command is carried out by the `work` of `Jobs`, which counts here what it has done.

    Attributes:
        failed: hexadecimal digest → reason.
        counts: see `Progress.counts`.
    """

    def __init__(self, name: str, command: m.Command) -> None:
        self.name = name
        self.command: m.Command | None = command
        self.mark = fingerprint(command)
        self.done = 0
        self.total = 0
        self.failed: dict[str, str] = {}
        self.counts: Counter[str] = Counter()
        self.state = m.RUNNING
        self.error = ""
        self.task: asyncio.Task[None] | None = None
        self.told = -math.inf
        """When its progress was last sent."""
        self.dirty = True
        """There is something to tell."""
        self.cancelled = False

    def check(self) -> None:
        """To be called between two steps: raises `Stopped` when the job was cancelled."""
        if self.cancelled:
            raise Stopped

    def fail(self, digest: bytes, reason: str) -> None:
        """A chunk could not be done."""
        self.failed[digest.hex()] = reason
        self.dirty = True

    def advance(self, chunks: int = 1) -> None:
        """Chunks are through."""
        self.done += chunks
        self.dirty = True

    def progress(self) -> m.Progress:
        """How far it is."""
        return m.Progress(
            self.name, self.done, self.total, dict(self.failed), dict(self.counts), self.state, self.error
        )


class Jobs:
    """All jobs of a node. Lives on the storage loop.

    Args:
        work: carries out the command of a job; raises `LmkvError` where nothing of it can be done.

    Attributes:
        on_progress: called when there is something to tell.
    """

    def __init__(self, work: Callable[[Job], Awaitable[None]], metrics: Metrics) -> None:
        self._work = work
        self._metrics = metrics
        self._jobs: OrderedDict[str, Job] = OrderedDict()
        self._live: dict[str, Job] = {}
        """Those of which something is or will be to tell."""
        self._waiting: deque[Job] = deque()
        self._running: set[Job] = set()
        self._refused: list[m.Progress] = []
        self._failures = 0
        self._timer: asyncio.TimerHandle | None = None
        self.on_progress: Callable[[], None] = lambda: None

    def do(self, message: m.Do) -> None:
        """Carry out a command; for a job that is known only tell again how far it is."""
        job = self._jobs.get(message.job)
        if job is not None and job.mark == fingerprint(message.command):
            self._tell_again(job)
        elif job is not None:
            self._refuse(message.job, "a job of this name has another command")
        elif not 0 < len(message.job) <= MAX_JOB:
            self._refuse(message.job[:MAX_JOB], f"a job's name has 1 to {MAX_JOB} characters")
        elif len(self._waiting) >= WAITING_MOST:
            self._refuse(message.job, f"{WAITING_MOST} jobs wait already: give it again later")
        else:
            job = self._jobs[message.job] = self._live[message.job] = Job(message.job, message.command)
            self._waiting.append(job)
            self._begin()
        self.on_progress()

    def cancel(self, name: str) -> None:
        """Stop a job after what is under way; one that has ended stays as it ended."""
        job = self._jobs.get(name)
        if job is None:
            self._refused.append(m.Progress(name, 0, 0, state=m.CANCELLED))
        elif job in self._waiting:
            self._waiting.remove(job)
            self._end(job, m.CANCELLED)
        elif job.state == m.RUNNING:
            job.cancelled = True
        else:
            self._tell_again(job)
        self.on_progress()

    def progress(self) -> Iterator[m.Progress]:
        """What is to be told now: of each job at most one word."""
        refused, self._refused = self._refused, []
        yield from refused
        now = time.monotonic()
        for job in list(self._live.values()):
            ended = job.state != m.RUNNING
            if ended:
                del self._live[job.name]
            elif now - job.told < (TELL_SECONDS if job.dirty else ALIVE_SECONDS):
                continue
            job.dirty, job.told = False, now
            yield job.progress()
        self._set_timer()

    async def close(self, deadline: float) -> None:
        """Stop all jobs, and wait for that up to `deadline` seconds. The controller gives them again."""
        if self._timer is not None:
            self._timer.cancel()
        self._waiting.clear()
        tasks = [job.task for job in self._running if job.task is not None]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=deadline)

    # --- inside ------------------------------------------------------------------------------------------------------

    def _tell_again(self, job: Job) -> None:
        job.dirty, job.told = True, -math.inf
        self._live[job.name] = job

    def _refuse(self, name: str, why: str) -> None:
        self._refused.append(m.Progress(name, 0, 0, state=m.FAILED, error=why))

    def _begin(self) -> None:
        while self._waiting and len(self._running) < RUNNING_MOST:
            job = self._waiting.popleft()
            self._running.add(job)
            job.task = asyncio.get_running_loop().create_task(self._carry_out(job))

    async def _carry_out(self, job: Job) -> None:
        state = m.FAILED
        try:
            await self._work(job)
            state = m.DONE
        except Stopped:
            state = m.CANCELLED
        except LmkvError as e:
            job.error = str(e)
        except Exception as e:
            log.exception("job %s failed", job.name)
            job.error = f"{type(e).__name__}: {e}"
        finally:
            job.task = None
            self._running.discard(job)
            self._end(job, state)
            self._begin()

    def _end(self, job: Job, state: str) -> None:
        kind = type(job.command).__name__
        job.state, job.command, job.dirty = state, None, True
        self._metrics.inc("lmkv_agent_jobs_total", command=kind, state=state)
        self._failures += len(job.failed)
        self._jobs.move_to_end(job.name)
        self._forget()
        self.on_progress()

    def _forget(self) -> None:
        """Of the jobs that have ended and were told the oldest go, where there are too many."""
        ended = len(self._jobs) - len(self._running) - len(self._waiting)
        for job in list(self._jobs.values()):
            if ended <= m.REMEMBERED_JOBS and self._failures <= FAILURES_MOST:
                return
            if job.state != m.RUNNING and not job.dirty:
                del self._jobs[job.name]
                self._failures -= len(job.failed)
                ended -= 1

    def _set_timer(self) -> None:
        """Come back when a running job has something to tell again."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._running or self._waiting:
            self._timer = asyncio.get_running_loop().call_later(TELL_SECONDS, self.on_progress)


def fingerprint(command: m.Command) -> bytes:
    """Tells two commands apart."""
    return xxhash.xxh3_128_digest(m.command_bytes(command))
