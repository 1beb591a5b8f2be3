"""Threads of our own inside vLLM's processes: where they run, and a lane that does jobs in order."""

from __future__ import annotations

import contextlib
import os
import queue
import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable


def spread() -> None:
    """Let the calling thread run beside the engine's compute threads, on whichever core is idle.

    vLLM's CPU build binds the threads that compute to cores of their own, the main thread among them, and a new thread
    inherits the binding of the one that starts it: our copies would stop the computation. Nor is the calling thread
    bound to the other cores: another engine may compute there, or spin while it waits for its next step. A thread that
    waits there for its turn while it holds Python's lock stops this engine, too; for seconds, as was seen.
    """
    if hasattr(os, "sched_setaffinity"):
        with contextlib.suppress(OSError):  # the container may allow none of them
            os.sched_setaffinity(0, range(os.cpu_count() or 1))


class Lane:
    """Does jobs in threads of its own, each in the order in which they came. Nothing waits for it but `close`."""

    def __init__(self, name: str, threads: int) -> None:
        self._queue: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._threads = [
            threading.Thread(target=self._work, name=f"lmkv-{name}-{number}", daemon=True) for number in range(threads)
        ]
        self._started = False

    def submit(self, job: Callable[[], None]) -> None:
        """Queue a job, which must not raise."""
        if not self._started:
            self._started = True
            for thread in self._threads:
                thread.start()
        self._queue.put(job)

    def close(self, seconds: float) -> bool:
        """Stop after the jobs queued so far; whether all threads have ended within `seconds` each."""
        if not self._started:
            return True
        for _ in self._threads:
            self._queue.put(None)
        for thread in self._threads:
            thread.join(seconds)
        return not any(thread.is_alive() for thread in self._threads)

    def _work(self) -> None:
        spread()
        while (job := self._queue.get()) is not None:
            job()
