"""The bulkhead of one tier: its own few threads, a bounded queue, and safety against calls that return late.

A backend's call runs in a thread of the tier's driver and in no other. What the queue cannot take is rejected at once;
loads and stores have a queue each, so that a flood of stores keeps out no load. Each call owns the memory objects that
it was lent until it *returns*, whatever its deadline said meanwhile, so a late write can never land in memory that has
been given to somebody else.
"""

from __future__ import annotations

import heapq
import itertools
import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Protocol

from lmkv.errors import ClosedError

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable, Sequence

    from lmkv.memory import MemoryObject

PROBE: Final = -1
"""Priority of the question whether the backend works again; always accepted."""
RUNNING: Final = 0
"""Priority of loads that a running request waits for."""
QUEUED: Final = 1
"""Priority of loads for requests that still wait in the engine's queue."""
STORE: Final = 2
"""Priority of write-through stores and control operations."""
DEMOTE: Final = 3
"""Priority of copies to slower tiers."""


class Work(Protocol):
    """What a call does in its thread; blocks, and may raise."""

    def __call__(self) -> object:
        """Returns the value for `Done`."""


class Done(Protocol):
    """Told once, in the driver's thread, when a call that was started has returned."""

    def __call__(self, value: object, error: BaseException | None, seconds: float) -> None:
        """Either `value` or `error`; `seconds` is the time in the backend."""


@dataclass(slots=True)
class Lane:
    """What waits and what runs of one kind: loads, or stores and all else."""

    calls: int = 0
    """That wait."""
    nbytes: int = 0
    """Of memory objects in them."""
    running: int = 0
    running_bytes: int = 0


class Call:
    """One accepted call. Changes under the driver's lock.

    Attributes:
        began: time (`time.monotonic`) at which it began to run; 0 before.
        timer: of its deadline, kept by whoever keeps deadlines.
    """

    __slots__ = (
        "abandoned", "began", "done", "lane", "nbytes", "objects", "order", "timer", "work",
    )  # fmt: skip

    def __init__(
        self, work: Work, objects: Sequence[MemoryObject], done: Done, *, order: tuple[int, int], lane: Lane
    ) -> None:
        self.work = work
        self.objects = objects
        self.nbytes = sum(o.nbytes for o in objects)
        self.done = done
        self.order = order
        self.lane = lane
        self.began = 0.0
        self.timer: asyncio.TimerHandle | None = None
        self.abandoned = False

    @property
    def started(self) -> bool:
        """It runs, or has run."""
        return self.began > 0


class Driver:
    """A thread pool with a bounded priority queue.

    Args:
        name: the tier's name, for thread names.
        threads: calls that run at once.
        max_calls: calls that may wait, of loads and of all else.
        max_bytes: bytes of memory objects that waiting calls of each of both kinds may hold; one call is always
            accepted by an empty queue.

    Attributes:
        loads: calls of the priorities `RUNNING` and `QUEUED`.
        stores: all others.

    Thread-safe. `submit` and `abandon` never wait for a backend.
    """

    def __init__(self, name: str, *, threads: int, max_calls: int, max_bytes: int) -> None:
        self.name = name
        self.max_calls = max_calls
        self.max_bytes = max_bytes
        self.threads = threads
        self.loads = Lane()
        self.stores = Lane()
        self._order = itertools.count()
        self._heap: list[tuple[int, int, Call]] = []
        self._wake = threading.Condition()
        self._closed = False
        self._threads = [
            threading.Thread(target=self._serve, name=f"lmkv-{name}-{i}", daemon=True) for i in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    @property
    def queued_calls(self) -> int:
        """Calls that wait."""
        return self.loads.calls + self.stores.calls

    @property
    def queued_bytes(self) -> int:
        """Bytes of the memory objects in them."""
        return self.loads.nbytes + self.stores.nbytes

    @property
    def running(self) -> int:
        """Calls that run."""
        return self.loads.running + self.stores.running

    @property
    def busy(self) -> bool:
        """Calls wait or run."""
        return self.queued_calls > 0 or self.running > 0

    def full(self, lane: Lane, nbytes: int) -> str:
        """Why a call with so many bytes would not be accepted now: ``calls``, ``bytes``, or nothing if it would be."""
        if lane.calls >= self.max_calls:
            return "calls"
        return "bytes" if lane.calls and lane.nbytes + nbytes > self.max_bytes else ""

    def submit(
        self,
        work: Work,
        *,
        done: Done,
        objects: Sequence[MemoryObject] = (),
        priority: int = STORE,
    ) -> Call | None:
        """Queue a call, or return None at once when the queue is full.

        Every object gets one owner (`call`) until the call returned or was dropped unstarted.

        Raises:
            ClosedError: the driver is closed.
        """
        nbytes = sum(o.nbytes for o in objects)
        with self._wake:
            if self._closed:
                msg = f"tier {self.name!r} is closed"
                raise ClosedError(msg)
            lane = self.loads if priority in {RUNNING, QUEUED} else self.stores
            if priority != PROBE and self.full(lane, nbytes):
                return None
            for o in objects:
                o.retain("call")
            call = Call(work, objects, done, order=(priority, next(self._order)), lane=lane)
            heapq.heappush(self._heap, (*call.order, call))
            lane.calls += 1
            lane.nbytes += nbytes
            self._wake.notify()
        return call

    def abandon(self, call: Call) -> bool:
        """Nobody waits for `call` any more (its deadline has passed).

        Returns True if it had not started: it is dropped, its objects are released and `done` is not called.
        Otherwise it runs on, keeps its objects until it returns, and `done` is called then.
        """
        with self._wake:
            if call.started or call.abandoned:
                return False
            self._drop(call)
        self._release(call)
        return True

    def newest(self, lane: Lane) -> Call | None:
        """Of the calls of `lane` that wait with memory objects: the one that would run last."""
        with self._wake:
            waiting = [c for _, _, c in self._heap if c.lane is lane and c.nbytes and not c.abandoned]
            return max(waiting, key=lambda call: call.order, default=None)

    def close(self, deadline: float) -> bool:
        """Drop what waits, let running calls finish for at most `deadline` seconds. Idempotent.

        Returns whether every thread has ended. Threads that hang in a backend are daemons and end with the process.
        """
        with self._wake:
            self._closed = True
            waiting = [call for _, _, call in self._heap if not call.abandoned]
            for call in waiting:
                self._drop(call)
            self._heap.clear()
            self._wake.notify_all()
        for call in waiting:
            self._release(call)
            call.done(None, ClosedError(f"tier {self.name!r} was closed"), 0.0)
        end = time.monotonic() + deadline
        for thread in self._threads:
            thread.join(max(0.0, end - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    def join(self) -> None:
        """After `close`: wait for the calls that hang, however long."""
        for thread in self._threads:
            thread.join()

    def _drop(self, call: Call) -> None:
        call.abandoned = True
        call.lane.calls -= 1
        call.lane.nbytes -= call.nbytes

    @staticmethod
    def _release(call: Call) -> None:
        objects, call.objects = call.objects, ()
        for o in objects:
            o.release("call")

    def _next(self) -> Call | None:
        with self._wake:
            while True:
                while self._heap:
                    call = heapq.heappop(self._heap)[2]
                    if call.abandoned:
                        continue
                    lane = call.lane
                    lane.calls -= 1
                    lane.nbytes -= call.nbytes
                    lane.running += 1
                    lane.running_bytes += call.nbytes
                    call.began = time.monotonic()
                    return call
                if self._closed:
                    return None
                self._wake.wait()

    def _returned(self, call: Call) -> None:
        with self._wake:
            call.lane.running -= 1
            call.lane.running_bytes -= call.nbytes

    def _serve(self) -> None:
        while (call := self._next()) is not None:
            value: object = None
            error: BaseException | None = None
            begin = time.perf_counter()
            try:
                value = call.work()
            except BaseException as e:  # noqa: BLE001  whatever a plugin raises is an outcome
                error = e
            seconds = time.perf_counter() - begin
            self._release(call)
            self._returned(call)
            call.done(value, error, seconds)
            del call, value, error  # a waiting thread must not keep buffers alive


def wait_for(driver: Driver, work: Callable[[], object], objects: Sequence[MemoryObject] = ()) -> object:
    """Run one call through `driver` and wait for it: for tests and tools, not for the loop.

    Raises what the call raised, or `ClosedError` when the queue is full.
    """
    finished = threading.Event()
    result: list[object] = [None, None]

    def done(value: object, error: BaseException | None, seconds: float) -> None:  # noqa: ARG001  the protocol's shape
        result[:] = [value, error]
        finished.set()

    if driver.submit(work, done=done, objects=objects) is None:
        msg = f"the queue of tier {driver.name!r} is full"
        raise ClosedError(msg, kind="queue-full")
    finished.wait()
    if isinstance(result[1], BaseException):
        raise result[1]
    return result[0]
