"""A few daemon threads that help callers with the many small jobs of one batch."""

from __future__ import annotations

import queue
import threading
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

T = TypeVar("T")


class Crew:
    """Runs the jobs of a batch at once: in the caller's thread, and in those of the crew that have nothing to do.

    Jobs end by themselves (every request has a time limit). The threads are daemons, so that one that hangs all the
    same does not keep the process from ending; they start when they are needed first. Thread-safe.
    """

    def __init__(self, name: str, size: int) -> None:
        self._name = name
        self._size = size
        self._calls: queue.SimpleQueue[_Batch[object] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._threads = 0
        self._closed = False

    def run(self, jobs: Sequence[Callable[[], T]]) -> list[T | Exception]:
        """Results, or what was raised, in order. Returns when every job has ended and nothing holds one any more."""
        batch = _Batch(jobs)
        if len(jobs) > 1:
            self._call_for(batch, min(len(jobs) - 1, self._size))
        batch.work()
        batch.ended.wait()
        return batch.results

    def begin(self, job: Callable[[], object]) -> threading.Event:
        """Run one job in a thread of the crew; what it raises is lost. The event is set when it has ended."""
        batch: _Batch[object] = _Batch([job])
        self._call_for(batch, 1)
        return batch.ended

    def close(self) -> None:
        """Let the threads end when they have nothing more to do. Does not wait for them. Idempotent."""
        with self._lock:
            self._closed = True
            for _ in range(self._threads):
                self._calls.put(None)
            self._threads = 0

    def _call_for(self, batch: _Batch[T], helpers: int) -> None:
        with self._lock:
            if self._closed:
                return
            for _ in range(min(helpers, self._size - self._threads)):
                self._threads += 1
                threading.Thread(target=self._serve, name=f"{self._name}-{self._threads}", daemon=True).start()
        for _ in range(helpers):
            self._calls.put(batch)  # type: ignore[arg-type]  # the queue does not look at results

    def _serve(self) -> None:
        while (batch := self._calls.get()) is not None:
            batch.work()
            del batch  # a waiting thread must not keep buffers alive


class _Batch(Generic[T]):
    """Jobs that several threads take one after the other."""

    def __init__(self, jobs: Sequence[Callable[[], T]]) -> None:
        self.results: list[T | Exception] = [RuntimeError("has not run")] * len(jobs)
        self.ended = threading.Event()
        self._lock = threading.Lock()
        self._jobs = list(enumerate(jobs))[::-1]
        self._running = 0
        if not jobs:
            self.ended.set()

    def work(self) -> None:
        """Take jobs until there are none."""
        while True:
            with self._lock:
                if not self._jobs:
                    return
                number, job = self._jobs.pop()
                self._running += 1
            try:
                self.results[number] = job()
            except Exception as error:  # noqa: BLE001  the caller judges what went wrong
                self.results[number] = error.with_traceback(None)  # whose frames hold buffers
            del job
            with self._lock:
                self._running -= 1
                if not self._jobs and not self._running:
                    self.ended.set()
