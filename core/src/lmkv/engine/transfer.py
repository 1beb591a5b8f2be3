"""Pages to frames of the pool and back: reserve → gather → commit, acquire → scatter → done."""

from __future__ import annotations

import enum
import logging
import time
from collections import deque
from concurrent.futures import CancelledError
from concurrent.futures import TimeoutError as FutureTimeoutError  # another class than TimeoutError before Python 3.11
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, TypeVar

from lmkv.errors import ClosedError, ConfigError, LmkvError
from lmkv.gpu import CopyJob
from lmkv.service.link import expect
from lmkv.service.protocol import PRESENT, REJECTED, Abort, Acquire, Commit, Done, Loaded, NewFrame, Reserve, Reserved
from lmkv.types import AT_ONCE, AT_ONCE_SHARE

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from concurrent.futures import Future

    import numpy as np
    from numpy.typing import NDArray

    from lmkv.gpu import GPUConnector
    from lmkv.keys import Namespace
    from lmkv.service.link import Connection, StorageClient
    from lmkv.service.protocol import Reply

log = logging.getLogger("lmkv.engine")
R = TypeVar("R")

BATCH_BYTES: Final = 256 << 20
"""A store asks for at most so much of the pool at once, and never for more than an eighth of it."""
POOL_SHARE: Final = 8
FRAMES_PER_RESERVE: Final = 64
FRAMES_PER_ACQUIRE: Final = AT_ONCE
ACQUIRE_BYTES: Final = 64 << 20
"""An acquire is answered when all of it is there; of large frames it takes fewer, so that copying begins sooner."""
ACQUIRES_UNDER_WAY: Final = 3
"""Scattering the first overlaps with loading the others, and staging holds a bounded number of frames."""
RESERVE_SECONDS: Final = 10.0


class StoreResult(enum.Enum):
    """What became of one frame."""

    STORED = "stored"
    PRESENT = "present"
    """It was there already, or somebody else is storing it."""
    REJECTED = "rejected"
    """No room, or nothing takes stores now: dropped, as every store may be."""
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class StoreItem:
    """One frame to be stored, and the engine pages (int64 ids, as many as `frame.pages`) that hold it."""

    frame: NewFrame
    pages: NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class RetrieveItem:
    """Pages `first … first+len(pages)-1` of frame number `index` of a lease, to go to the engine pages `pages`."""

    index: int
    """Number of the chunk in the lease; the partial frame is number `Hit.chunks`."""
    frame_pages: int
    """Pages that the frame holds; 0: not known, which is so for the partial frame. Another number is a failure."""
    pages: NDArray[np.int64]
    first: int = 0


class Transfer:
    """Moves frames of one shard. Thread-safe as far as its `GPUConnector` is; every method blocks its caller."""

    def __init__(self, client: StorageClient, namespace: Namespace, shard: int, gpu: GPUConnector | None) -> None:
        self._client = client
        self._namespace = namespace.id
        self._shard = shard
        self._gpu = gpu
        self._page_bytes = namespace.page_bytes[shard]
        self._chunk_bytes = self._page_bytes * namespace.chunk_pages
        self._all_bytes = sum(namespace.page_bytes) * namespace.chunk_pages

    @property
    def gpu(self) -> GPUConnector:
        """The connector; ConfigError when the engine was made without one."""
        if self._gpu is None:
            raise ConfigError("this CacheEngine was made without a GPUConnector: it can look up, but not move pages")
        return self._gpu

    # --- store ---

    def store(self, items: Sequence[StoreItem], *, stream: Any = None) -> list[StoreResult]:
        """Store frames; one result each. Never raises for what the service or a tier does."""
        _ = self.gpu
        results = [StoreResult.FAILED] * len(items)
        try:
            with self._client.connection() as link:
                for batch in self._batches(items, link.pool.nbytes // POOL_SHARE):
                    self._store_batch(link, items, batch, results, stream=stream)
        except ClosedError as e:
            log.debug("store: %s", e)
        except LmkvError as e:
            log.warning("store: %s", e)
        return results

    def _batches(self, items: Sequence[StoreItem], share: int) -> Iterator[list[int]]:
        """Indices of items, as many at a time as may be reserved at once; leaves out those that cannot be stored."""
        limit = min(BATCH_BYTES, share)
        batch: list[int] = []
        size = 0
        for i, item in enumerate(items):
            pages = item.frame.pages
            if pages <= 0 or len(item.pages) != pages:
                log.warning("store: %d page ids for a frame of %d pages", len(item.pages), pages)
                continue
            nbytes = pages * self._page_bytes
            if batch and (size + nbytes > limit or len(batch) == FRAMES_PER_RESERVE):
                yield batch
                batch, size = [], 0
            batch.append(i)
            size += nbytes
        if batch:
            yield batch

    def _store_batch(
        self,
        link: Connection,
        items: Sequence[StoreItem],
        batch: list[int],
        results: list[StoreResult],
        *,
        stream: Any,
    ) -> None:
        request = Reserve(self._namespace, self._shard, tuple([items[i].frame for i in batch]))

        def undo(late: Reserved) -> None:
            link.send(Abort(late.reservation))

        reserved = _wait(link.call(request), RESERVE_SECONDS, Reserved, undo)
        if not reserved.reservation:
            _note_absent(reserved, batch, results)
            return
        settled = False
        try:
            jobs = self._gather_jobs(link, items, batch, reserved)
            good = self._gather(jobs, stream)
            # Their positions among the frames that got memory.
            failed = tuple([number for number, slot in enumerate(jobs) if slot not in good])
            if not link.send(Commit(reserved.reservation, failed)):
                raise ClosedError("the service went while frames were being stored")
            settled = True
        finally:
            if not settled:
                link.send(Abort(reserved.reservation))
        _note_absent(reserved, batch, results)
        for slot in good:
            results[batch[slot]] = StoreResult.STORED

    def _gather_jobs(
        self, link: Connection, items: Sequence[StoreItem], batch: list[int], reserved: Reserved
    ) -> dict[int, CopyJob]:
        """Position in the batch → copy, for every frame that got memory."""
        jobs: dict[int, CopyJob] = {}
        view, page_bytes = link.pool.view, self._page_bytes
        end = len(view)
        if not len(reserved.offsets) == len(reserved.lengths) == len(batch):
            raise LmkvError(f"asked for {len(batch)} frames, got {len(reserved.offsets)}", kind="protocol")
        for slot, (offset, length) in enumerate(zip(reserved.offsets, reserved.lengths, strict=True)):
            if offset < 0:
                continue
            item = items[batch[slot]]
            pages = item.frame.pages
            if length != pages * page_bytes or offset + length > end:
                raise LmkvError(f"a frame of {pages} pages got {length} bytes at {offset}", kind="protocol")
            jobs[slot] = CopyJob(item.pages, view[offset : offset + length], pages)
        return jobs

    def _gather(self, jobs: dict[int, CopyJob], stream: Any) -> set[int]:
        """Copy pages into frames, all in one batch; if that fails, one by one, so that a bad one costs only itself."""
        if not jobs:
            return set()
        try:
            self.gpu.gather(list(jobs.values()), stream=stream)
        except Exception as e:  # noqa: BLE001  a bad page id, a device error: what it is named in the log
            log.warning("copying %d frames failed: %s", len(jobs), e)
        else:
            return set(jobs)
        return {slot for slot, job in jobs.items() if self._gathered(job, stream)}

    def _gathered(self, job: CopyJob, stream: Any) -> bool:
        try:
            self.gpu.gather([job], stream=stream)
        except Exception as e:  # noqa: BLE001  as above
            log.debug("copying a frame failed: %s", e)
            return False
        return True

    # --- retrieve ---

    def retrieve(
        self,
        lease: int,
        items: Sequence[RetrieveItem],
        *,
        stream: Any = None,
        layers: range | None = None,
        timeout: float = 30.0,
        last: bool = False,
    ) -> list[bool]:
        """Put leased frames into pages; True for each item whose bytes arrived. The first that fails ends it.

        Never raises for what the service or a tier does. A page of an item that is False holds anything.
        """
        _ = self.gpu
        arrived = [False] * len(items)
        until = time.monotonic() + timeout
        waiting: deque[range] = deque()
        asked: deque[tuple[range, Future[Reply]]] = deque()
        try:
            with self._client.connection() as link:
                waiting.extend(_runs(items, self._at_once(link.pool.nbytes)))
                try:
                    while waiting or asked:
                        while waiting and len(asked) < ACQUIRES_UNDER_WAY:
                            run = waiting.popleft()
                            first = items[run.start].index
                            asked.append((run, link.call(Acquire(lease, self._shard, first, len(run)))))
                        run, future = asked.popleft()
                        loaded = _wait(future, until - time.monotonic(), Loaded, lambda late: _let_go(link, late))
                        good = self._scatter(link, items, run, loaded, arrived, stream=stream, layers=layers, last=last)
                        if not good:
                            break
                finally:
                    for _, future in asked:
                        future.add_done_callback(lambda late: _let_go(link, late.result()) if _well(late) else None)
        except ClosedError as e:
            log.debug("retrieve: %s", e)
        except LmkvError as e:
            log.warning("retrieve: %s", e)
        return arrived

    def _at_once(self, pool_bytes: int) -> int:
        """Chunks to acquire at once, so that all of them, of all shards, have room in the pool with others."""
        return max(
            1,
            min(FRAMES_PER_ACQUIRE, ACQUIRE_BYTES // self._chunk_bytes, pool_bytes // AT_ONCE_SHARE // self._all_bytes),
        )

    def _scatter(
        self,
        link: Connection,
        items: Sequence[RetrieveItem],
        run: range,
        loaded: Loaded,
        arrived: list[bool],
        *,
        stream: Any,
        layers: range | None,
        last: bool,
    ) -> bool:
        """Copy what came of one acquire; whether it was all."""
        try:
            jobs = self._scatter_jobs(link, items[run.start : run.stop], loaded)
            if jobs:
                self.gpu.scatter(jobs, stream=stream, layers=layers)
                if not link.intact():  # the service may have given the memory to others while we read it
                    log.debug("retrieve: the service ended the session during a copy")
                    return False
        except Exception as e:  # noqa: BLE001  a bad page id, a device error: a failed load, which the engine recomputes
            log.warning("copying %d frames into pages failed: %s", len(run), e)
            return False
        finally:
            _let_go(link, loaded, last=last)
        arrived[run.start : run.start + len(jobs)] = [True] * len(jobs)
        return len(jobs) == len(run)

    def _scatter_jobs(self, link: Connection, items: Sequence[RetrieveItem], loaded: Loaded) -> list[CopyJob]:
        """Copies for the leading frames that are there and are what was expected."""
        view, page_bytes = link.pool.view, self._page_bytes
        end = len(view)
        jobs: list[CopyJob] = []
        for item, offset, length in zip(items, loaded.offsets, loaded.lengths, strict=False):
            if offset < 0 or offset + length > end:
                break
            held, rest = divmod(length, page_bytes)
            if rest or item.frame_pages not in {0, held} or item.first < 0 or item.first + len(item.pages) > held:
                log.warning(
                    "retrieve: a frame of %d bytes does not hold pages %d to %d of %d",
                    length, item.first, item.first + len(item.pages), item.frame_pages,
                )  # fmt: skip
                break
            jobs.append(CopyJob(item.pages, view[offset : offset + length], held, item.first))
        return jobs


def _note_absent(reserved: Reserved, batch: list[int], results: list[StoreResult]) -> None:
    for i, offset in zip(batch, reserved.offsets, strict=False):
        if offset == PRESENT:
            results[i] = StoreResult.PRESENT
        elif offset == REJECTED:
            results[i] = StoreResult.REJECTED


def _runs(items: Sequence[RetrieveItem], most: int) -> Iterator[range]:
    """Runs of items with consecutive indices, none with more than `most`."""
    start = 0
    for end in range(1, len(items) + 1):
        if end == len(items) or items[end].index != items[end - 1].index + 1 or end - start == most:
            yield range(start, end)
            start = end


def _let_go(link: Connection, loaded: Reply, *, last: bool = False) -> None:
    if isinstance(loaded, Loaded) and loaded.hold:
        link.send(Done(loaded.hold, last))


def _well(future: Future[Reply]) -> bool:
    return not future.cancelled() and future.exception() is None


def _wait(future: Future[Reply], seconds: float, kind: type[R], undo: Callable[[R], None]) -> R:
    """The reply. If it does not come in time, `undo` is called with it when it does.

    Raises:
        LmkvError: what the service said, or that it did not answer (kind `deadline`).
    """
    try:
        return expect(future.result(max(0.0, seconds)), kind)
    except (TimeoutError, FutureTimeoutError):

        def late(future: Future[Reply]) -> None:
            if _well(future) and isinstance(reply := future.result(), kind):
                undo(reply)

        future.add_done_callback(late)
        raise LmkvError("the service did not answer in time", kind="deadline", retryable=True) from None
    except CancelledError:
        raise ClosedError("the call was cancelled") from None
