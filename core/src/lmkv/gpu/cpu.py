"""Gather and scatter for engines whose pages are in host memory: numpy only, and as few calls as the layout allows."""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from lmkv.errors import ConfigError
from lmkv.gpu.base import CopyJob, GPUConnector, check_job, check_layers

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import numpy.typing as npt

    from lmkv.gpu.base import EngineBuffer
    from lmkv.layout import PageLayout, PageRun

_LEAST_ROW: Final = 256
"""Bytes. Rows shorter than this cost more to index than copying page by page does."""
_STRING_COPY: Final = 4096
"""Bytes from which glibc's memcpy uses `rep movsb`, see `_Group.collides`."""
_TOO_CLOSE: Final = 32
"""Bytes after its source, modulo 4 KiB, below which a target makes `rep movsb` crawl."""


@dataclass(frozen=True, slots=True)
class _Group:
    """Neighbouring runs of one buffer that one call can copy: of one length and stride, and equally far apart.

    The buffer is seen as rows of `row` bytes: page p of run r is `parts` of them, from `origins[r] + p * step` on.
    Where no such rows exist (`rows` is None), pages that don't follow each other are copied one by one.
    """

    start: int
    """Where the group starts in a frame of one page, in bytes."""
    count: int
    """Runs."""
    length: int
    """Bytes of each run."""
    address: int
    """Of page 0 of the first run."""
    grain: int
    """The pages of all runs lie at `address` plus multiples of this; divides 4 KiB."""
    pages: npt.NDArray[np.uint8]
    """[run, page, byte]: a view of the engine's memory."""
    rows: npt.NDArray[np.void] | None
    row: int
    origins: npt.NDArray[np.int64]
    """[run, 1]"""
    step: int
    parts: npt.NDArray[np.int64] | None
    """0, 1, … `length // row - 1`; None when a page is one row."""

    def gather(self, job: CopyJob, first_id: int, memory: int) -> None:
        """Engine → frame. `first_id`: of consecutive ids, else -1; `memory`: address of the frame."""
        at = self.offset(job)
        collides = self.collides(memory + at - self.address)
        if self.rows is None or collides or first_id >= 0:
            frame = self.frame(job, at)
            for source, target in self.pieces(job, first_id, frame):
                _copy(target, source, words=collides)
            return
        index = self.index(job.pages)
        shape, strides = index.shape, (job.frame_pages * self.length, self.row)
        target = np.ndarray(shape, self.rows.dtype, job.memory, at, strides)
        if self.count == 1 or len(job.pages) == job.frame_pages:  # contiguous: otherwise take would fill a copy
            self.rows.take(index, 0, target, "clip")  # ids are checked; "raise" would fill a copy, too
        else:
            for part, out in zip(index, target, strict=True):
                self.rows.take(part, 0, out, "clip")

    def scatter(self, job: CopyJob, first_id: int, memory: int) -> None:
        """Frame → engine. Arguments as `gather`."""
        at = self.offset(job)
        collides = self.collides(self.address - memory - at)
        if self.rows is None or collides or first_id >= 0:
            frame = self.frame(job, at)
            for target, source in self.pieces(job, first_id, frame):
                _copy(target, source, words=collides)
            return
        index = self.index(job.pages)
        shape, strides = index.shape, (job.frame_pages * self.length, self.row)
        self.rows[index] = np.ndarray(shape, self.rows.dtype, job.memory, at, strides)

    def offset(self, job: CopyJob) -> int:
        """Of the first byte that is copied, in the frame."""
        return job.frame_pages * self.start + job.first * self.length

    def frame(self, job: CopyJob, at: int) -> npt.NDArray[np.uint8]:
        """[run, page, byte]: the bytes of the job's pages in the frame."""
        shape, strides = (self.count, len(job.pages), self.length), (job.frame_pages * self.length, self.length, 1)
        return np.ndarray(shape, np.uint8, job.memory, at, strides)

    def index(self, pages: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """[run, row]: the rows of these pages."""
        at = self.origins + (pages if self.step == 1 else pages * self.step)
        return at if self.parts is None else (at[:, :, None] + self.parts).reshape(self.count, -1)

    def pieces(
        self, job: CopyJob, first_id: int, frame: npt.NDArray[np.uint8]
    ) -> Iterator[tuple[npt.NDArray[np.uint8], npt.NDArray[np.uint8]]]:
        """(engine, frame) views that correspond: one pair of all consecutive pages, or a pair for each page."""
        if first_id >= 0:
            yield self.pages[:, first_id : first_id + len(job.pages)], frame
            return
        ids = job.pages.tolist()
        for run, kept in zip(self.pages, frame, strict=True):
            for page, piece in zip(ids, kept, strict=True):
                yield run[page], piece

    def collides(self, ahead: int) -> bool:
        """Whether a target that lies `ahead` bytes after its source would be copied several times slower by memcpy.

        On some processors (glibc bug 30994) `rep movsb` crawls when the target lies just after the source modulo
        4 KiB. The pool is aligned; memory of numpy starts 16 bytes into a page, so its pages always hit this.
        """
        near = 0 < ahead % self.grain < _TOO_CLOSE <= self.grain and ahead % 8 == 0
        return near and self.length >= _STRING_COPY


def _copy(target: npt.NDArray[np.uint8], source: npt.NDArray[np.uint8], *, words: bool) -> None:
    """Copy; with `words` through the loop of a ufunc instead of memcpy."""
    if words and target.shape[-1] % 8 == 0:
        np.positive(source.view(np.int64), target.view(np.int64))
    else:
        np.copyto(target, source)


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
        self._plans = {(0, len(layout.runs)): self._plan(range(len(layout.runs)))}

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
        return [(job, i, _address(job.memory)) for job, i in zip(jobs, first_ids, strict=True) if len(job.pages)]

    def _plan_for(self, layers: range | None) -> tuple[_Group, ...]:
        runs = check_layers(layers, len(self.layout.runs))
        key = (runs.start, runs.stop)
        plan = self._plans.get(key)
        if plan is None:
            plan = self._plans[key] = self._plan(runs)
        return plan

    def _plan(self, which: range) -> tuple[_Group, ...]:
        """The runs in groups, each as long as possible."""
        groups: list[_Group] = []
        begin = which.start
        for end in range(which.start + 1, which.stop + 1):
            if end == which.stop or not _evenly(self.layout.runs[begin : end + 1]):
                groups.append(self._group(begin, self.layout.runs[begin:end]))
                begin = end
        return tuple(groups)

    def _group(self, first: int, runs: Sequence[PageRun]) -> _Group:
        run = runs[0]
        memory = self._buffers[run.buffer]
        gap = runs[1].offset - run.offset if len(runs) > 1 else 0
        row = gcd(run.length, run.stride)
        rows = parts = None
        if row == run.length or row >= _LEAST_ROW:
            phase = run.offset % row
            rows = np.ndarray(((memory.nbytes - phase) // row,), np.dtype((np.void, row)), memory.data, phase)
            parts = np.arange(run.length // row) if row < run.length else None
        shape, strides = (len(runs), self.num_pages, run.length), (gap, run.stride, 1)
        return _Group(
            start=self.layout.run_starts[first],
            count=len(runs),
            length=run.length,
            address=_address(memory.data) + run.offset,
            grain=gcd(row, gap, 4096),
            pages=np.ndarray(shape, np.uint8, memory.data, run.offset, strides),
            rows=rows,
            row=row,
            origins=np.array([[r.offset // row] for r in runs]),
            step=run.stride // row,
            parts=parts,
        )


def _evenly(runs: Sequence[PageRun]) -> bool:
    """Whether one group can hold these, of which all but the last are known to be even."""
    a, b, last = runs[0], runs[1], runs[-1]
    if (last.buffer, last.length, last.stride) != (a.buffer, a.length, a.stride):
        return False
    gap = b.offset - a.offset
    return gap % gcd(a.length, a.stride) == 0 and last.offset - a.offset == gap * (len(runs) - 1)


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


def _address(memory: memoryview) -> int:
    address: int = np.frombuffer(memory, np.uint8, 1).__array_interface__["data"][0]
    return address
