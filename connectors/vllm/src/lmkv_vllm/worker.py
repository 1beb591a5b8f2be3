"""Worker side: copies between the engine's pages and the pool, in threads of its own.

Loads: `start` → thread → `received`. Each load is reported exactly once, whatever becomes of it or of its request, and
the pages that did not arrive are reported no later than it is.

Saves: one thread does them in the order in which they came. A page belongs to its save until that has copied it; before
the engine writes to such a page it calls `before_step`, which waits for the save, or drops it.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from lmkv.engine import CacheEngine, RetrieveItem, StoreItem, StoreResult
from lmkv.errors import LmkvError
from lmkv.gpu import GPUConnector
from lmkv.keys import Namespace
from lmkv.service.protocol import Observe, Unstored
from lmkv_vllm.guard import INCIDENTS
from lmkv_vllm.metadata import WorkerReport
from lmkv_vllm.threads import Lane

if TYPE_CHECKING:
    from collections.abc import Sequence

    from lmkv.gpu import CopyJob
    from lmkv.service.protocol import NewFrame
    from lmkv_vllm.link import Link
    from lmkv_vllm.metadata import Load, LoadItem, Save, StepMetadata
    from lmkv_vllm.settings import Settings

IDLE_WAIT: Final = 0.005
"""Seconds that a step without computation waits for a load: an engine with nothing else to do would only ask again."""
IMPATIENT_SECONDS: Final = 10.0
"""After a save that did not end in time the next ones are not waited for: the service is stuck."""
SHUTDOWN_SECONDS: Final = 2.0
"""vLLM kills a worker that has not ended after 5 s."""


class DroppedError(LmkvError):
    """The engine wants the pages of a save back."""


class SaveJob:
    """One save under way; the lock is held while its pages are copied."""

    __slots__ = ("done", "dropped", "lock", "save")

    def __init__(self, save: Save) -> None:
        self.save = save
        self.lock = threading.Lock()
        self.dropped = False
        self.done = threading.Event()

    def drop(self) -> None:
        """No page of it is read from here on; waits for a copy under way, which takes milliseconds."""
        with self.lock:
            self.dropped = True


class FencedConnector(GPUConnector):
    """Copies for the save of the calling thread only while that has not been dropped; scatters without ado."""

    def __init__(self, inner: GPUConnector) -> None:
        self.inner = inner
        self.layout = inner.layout
        self.num_pages = inner.num_pages
        self._local = threading.local()

    def begin(self, job: SaveJob | None) -> None:
        """The calling thread gathers for `job` from here on."""
        self._local.job = job

    def gather(self, jobs: Sequence[CopyJob], *, stream: Any = None, layers: range | None = None) -> None:
        """See `GPUConnector.gather`. Raises `DroppedError`."""
        job: SaveJob | None = getattr(self._local, "job", None)
        if job is None:
            self.inner.gather(jobs, stream=stream, layers=layers)
            return
        with job.lock:
            if job.dropped:
                raise DroppedError("the engine wants its pages back", kind="dropped")
            self.inner.gather(jobs, stream=stream, layers=layers)

    def scatter(self, jobs: Sequence[CopyJob], *, stream: Any = None, layers: range | None = None) -> None:
        """See `GPUConnector.scatter`."""
        self.inner.scatter(jobs, stream=stream, layers=layers)

    def close(self) -> None:
        """Of the inner one."""
        self.inner.close()


class WorkerSide:
    """See the module. Called by one thread of vLLM's; its own threads come back through the fields under the lock.

    Args:
        shard: number of this worker among all that hold a part of each page.
    """

    def __init__(self, settings: Settings, link: Link, gpu: GPUConnector, shard: int) -> None:
        self._settings = settings
        self._link = link
        self._gpu = FencedConnector(gpu)
        self._shard = shard
        self._namespace: str | None = None
        self._engine: CacheEngine | None = None
        self._timed = 0
        self._changed = threading.Condition()
        """Guards everything below."""
        self._running: set[str] = set()
        self._received: set[str] = set()
        self._bad_pages: set[int] = set()
        self._report = WorkerReport()
        self._saves: OrderedDict[int, SaveJob] = OrderedDict()
        self._impatient = 0.0
        self._load_lane = Lane("load", settings.load_threads)
        self._save_lane = Lane("save", 1)

    # --- called by vLLM, once per step each ---

    def before_step(self, meta: StepMetadata) -> None:
        """Nothing of the step has been computed yet: save what it may overwrite."""
        self._timed = meta.timed
        if meta.namespace is not None:
            before, self._engine, self._namespace = self._engine, None, meta.namespace
            if before is not None:
                before.client.unregister(before.namespace)
        for save in meta.early_saves:
            self._submit(save)
        if meta.fence:
            self.settle(meta.fence)

    def start(self, meta: StepMetadata) -> None:
        """Begin the step's loads."""
        until = time.monotonic() + self._settings.load_deadline
        for load in meta.loads:
            with self._changed:
                self._running.add(load.request)
            try:
                self._load_lane.submit(partial(self._load, load, self._namespace, until))
            except Exception as error:  # noqa: BLE001  no thread to be had: the engine must hear of it all the same
                INCIDENTS.note("load", f"{type(error).__name__}: {error}", error=error)
                self._loaded(load, [False] * len(load.items))

    def after_step(self, meta: StepMetadata) -> None:
        """The step's pages are computed: begin its saves."""
        for save in meta.saves:
            self._submit(save)

    def received(self, *, idle: bool) -> set[str]:
        """Requests whose load is over since the last call, well or not. When `idle`, waits a little for one."""
        with self._changed:
            if idle and self._running and not self._received:
                self._changed.wait(IDLE_WAIT)
            received, self._received = self._received, set()
            return received

    def bad_pages(self) -> set[int]:
        """Pages that a load should have filled and did not, since the last call."""
        with self._changed:
            bad, self._bad_pages = self._bad_pages, set()
            return bad

    def report(self) -> WorkerReport | None:
        """What is for the scheduler side."""
        with self._changed:
            if not self._report.saved and not self._report.failed and not self._timed:
                return None
            report, self._report = self._report, WorkerReport()
            report.timed, self._timed = self._timed, 0
            return report

    def settle(self, number: int) -> None:
        """When it returns, no save up to `number` reads a page any more. Waits a bounded time."""
        with self._changed:
            jobs = [job for key, job in self._saves.items() if key <= number and not job.dropped]
        now = time.monotonic()
        until = now + self._settings.fence_deadline if now >= self._impatient else now
        late = [job for job in jobs if not job.done.wait(max(0.0, until - time.monotonic()))]
        for job in late:
            job.drop()
        if late:
            self._impatient = time.monotonic() + IMPATIENT_SECONDS
            INCIDENTS.note("save", f"{len(late)} saves dropped: the engine wanted their pages back")

    def shutdown(self) -> None:
        """End what is under way; waits some seconds at most. Idempotent."""
        self._save_lane.close(SHUTDOWN_SECONDS)
        with self._changed:
            jobs = list(self._saves.values())
        for job in jobs:
            job.drop()
        self._load_lane.close(SHUTDOWN_SECONDS)
        self._engine = None
        self._gpu.close()

    # --- own threads ---

    def _cache(self, namespace: str | None) -> CacheEngine | None:
        """The engine for a namespace; None while the service has never been reached. Waits for the registration.

        None also for a namespace before the present one: its hits have been let go, and its saves nobody would find.
        """
        engine, client = self._engine, self._link.client
        if namespace is None or client is None or namespace != self._namespace:
            return None
        if engine is not None and engine.namespace.json() == namespace:
            return engine
        engine = CacheEngine(client, Namespace.from_json(namespace), shard=self._shard, gpu=self._gpu)
        if namespace != self._namespace:  # a reset came meanwhile
            client.unregister(engine.namespace)
            return None
        self._engine = engine
        return engine

    def _load(self, load: Load, namespace: str | None, until: float) -> None:
        good = [False] * len(load.items)
        try:
            cache = self._cache(namespace)
            if cache is not None and self._same(load) and (left := until - time.monotonic()) > 0:
                items = [RetrieveItem(item.index, 0, np.array(item.pages, np.int64), item.first) for item in load.items]
                arrived = cache.retrieve_frames(load.lease, items, timeout=left, last=True)
                if self._same(load):  # else it may have been another lease of that number
                    good = arrived
        except Exception as error:  # noqa: BLE001  a load that fails is computed instead
            INCIDENTS.note("load", f"{type(error).__name__}: {error}", error=error)
        finally:
            self._loaded(load, good)

    def _same(self, load: Load) -> bool:
        """Whether the service is still the one that gave the lease: numbers begin anew in another."""
        client = self._link.client
        try:
            return client is not None and client.connection().welcome.incarnation == load.incarnation
        except LmkvError:
            return False

    def _loaded(self, load: Load, good: list[bool]) -> None:
        first_bad = good.index(False) if False in good else len(good)
        with self._changed:
            for item in load.items[first_bad:]:
                self._bad_pages.update(item.pages)
            if first_bad < len(good):
                self._report.failed[load.request] = load.items[first_bad].index
            self._running.discard(load.request)
            self._received.add(load.request)
            self._changed.notify_all()
        self._count_loaded(load.items[:first_bad])

    def _count_loaded(self, items: Sequence[LoadItem]) -> None:
        counts: dict[str, float] = {}
        for item in items:
            name = f"lmkv_rank_loaded_tokens_total|tier={item.tier}"
            counts[name] = counts.get(name, 0.0) + len(item.pages) * self._gpu.layout.page_tokens
        self._count(counts)

    def _count(self, counts: dict[str, float]) -> None:
        """Have it counted by the service, as this rank's. Never waits."""
        client = self._link.client
        if counts and client is not None:
            client.send(Observe(counts))

    def _submit(self, save: Save) -> None:
        job = SaveJob(save)
        with self._changed:
            full = len(self._saves) >= self._settings.save_backlog
            if not full:
                self._saves[save.job] = job
        if full:
            INCIDENTS.note("save", f"dropped: {self._settings.save_backlog} saves wait already")
            self._count({"lmkv_dropped_stores_total|reason=backlog": len(save.frames)})
            self._forgo(self._namespace, save.frames)
            self._saved(job)
            return
        self._save_lane.submit(partial(self._save, job, self._namespace))

    def _save(self, job: SaveJob, namespace: str | None) -> None:
        left = job.save.frames
        try:
            cache = self._cache(namespace)
            if job.dropped:  # one that is dropped in the middle of its copy is counted by the service
                self._count({"lmkv_dropped_stores_total|reason=fence": len(job.save.frames)})
            elif cache is not None and cache.client.connected:
                self._gpu.begin(job)
                results = cache.store_frames(_items(job.save))
                left = tuple([f for f, result in zip(left, results, strict=True) if result is StoreResult.FAILED])
                if left and not job.dropped:
                    INCIDENTS.note("save", "frames could not be stored")
        except Exception as error:  # noqa: BLE001  a save that fails is a miss later
            INCIDENTS.note("save", f"{type(error).__name__}: {error}", error=error)
        finally:
            self._gpu.begin(None)
            self._forgo(namespace, left)
            self._saved(job)

    def _forgo(self, namespace: str | None, frames: Sequence[NewFrame]) -> None:
        """Tell the service what is not stored: it waits for no more of it. Never waits."""
        client = self._link.client
        if frames and namespace is not None and client is not None:
            digests = b"".join([frame.digest for frame in frames])
            client.send(Unstored(Namespace.from_json(namespace).id, self._shard, digests))

    def _saved(self, job: SaveJob) -> None:
        with self._changed:
            self._saves.pop(job.save.job, None)
            self._report.saved[job.save.job] = 1
        job.done.set()


def _items(save: Save) -> list[StoreItem]:
    pages = np.array(save.pages, np.int64)
    items, at = [], 0
    for frame in save.frames:
        items.append(StoreItem(frame, pages[at : at + frame.pages]))
        at += frame.pages
    return items
