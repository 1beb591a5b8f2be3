"""The connector for engines whose pages are in host memory."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from lmkv.errors import ConfigError
from lmkv.gpu import strided
from lmkv.gpu.base import CopyJob, GPUConnector, check_job, check_layers

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

    from lmkv.gpu.base import EngineBuffer
    from lmkv.layout import PageLayout, PageRun


class CPUConnector(GPUConnector):
    """For pages in host memory. Blocking; the copies release the GIL; `stream` is ignored.

    Args:
        layout: what a page is.
        buffers: the engine's memory, in the order that `PageRun.buffer` counts. Used in place and kept alive.

    Raises:
        ConfigError: a buffer is missing, read-only or not contiguous, or no page of a run fits into it.
    """

    def __init__(self, layout: PageLayout, buffers: Sequence[EngineBuffer]) -> None:
        self.layout = layout
        self._buffers = [_as_bytes(i, buffer) for i, buffer in enumerate(buffers)]
        self.num_pages = min(_pages_in(i, run, self._buffers) for i, run in enumerate(layout.runs))
        self._plans: dict[tuple[int, int], tuple[strided.Group, ...]] = {}
        self._plan_for(None)

    def gather(self, jobs: Sequence[CopyJob], *, stream: Any = None, layers: range | None = None) -> None:
        """See `GPUConnector.gather`."""
        del stream
        plan = self._plan_for(layers)
        for job, first_id, memory in self._checked(jobs, write=True):
            for group in plan:
                group.gather(job, first_id, memory)

    def scatter(self, jobs: Sequence[CopyJob], *, stream: Any = None, layers: range | None = None) -> None:
        """See `GPUConnector.scatter`."""
        del stream
        plan = self._plan_for(layers)
        for job, first_id, memory in self._checked(jobs, write=False):
            for group in plan:
                group.scatter(job, first_id, memory)

    def _checked(self, jobs: Sequence[CopyJob], *, write: bool) -> list[tuple[CopyJob, int, int]]:
        """Each job that copies anything, its first id if its ids are consecutive, and where its memory is."""
        page_bytes, num_pages = self.layout.page_bytes, self.num_pages
        first_ids = [check_job(job, page_bytes, num_pages, write=write) for job in jobs]
        return [(job, i, strided.address(job.memory)) for job, i in zip(jobs, first_ids, strict=True) if len(job.pages)]

    def _plan_for(self, layers: range | None) -> tuple[strided.Group, ...]:
        runs = check_layers(layers, len(self.layout.runs))
        key = (runs.start, runs.stop)
        plan = self._plans.get(key)
        if plan is None:
            plan = self._plans[key] = strided.plan(self.layout, runs, self._buffers, self.num_pages)
        return plan


def _as_bytes(number: int, buffer: EngineBuffer) -> npt.NDArray[np.uint8]:
    array = np.asarray(buffer)
    if not array.flags.c_contiguous or not array.flags.writeable:
        raise ConfigError(f"engine buffer {number} must be contiguous and writable")
    return array.reshape(-1).view(np.uint8)


def _pages_in(number: int, run: PageRun, buffers: Sequence[npt.NDArray[np.uint8]]) -> int:
    if run.buffer >= len(buffers):
        raise ConfigError(f"run {number} of the layout is in buffer {run.buffer}, but there are {len(buffers)} buffers")
    nbytes = buffers[run.buffer].nbytes
    if run.offset + run.length > nbytes:
        raise ConfigError(
            f"run {number} of the layout needs bytes {run.offset} to {run.offset + run.length} of buffer {run.buffer}, "
            f"which has {nbytes}"
        )
    return (nbytes - run.offset - run.length) // run.stride + 1
