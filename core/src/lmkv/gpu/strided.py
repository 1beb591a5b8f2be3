"""Copies between strided host memory and contiguous frames: numpy only, and as few calls as the layout allows."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import gcd
from typing import TYPE_CHECKING, Final

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import numpy.typing as npt

    from lmkv.gpu.base import CopyJob
    from lmkv.layout import PageLayout, PageRun

    Bytes = npt.NDArray[np.uint8]

_LEAST_ROW: Final = 256
"""Bytes. Rows shorter than this cost more to index than copying page by page does."""
_STRING_COPY: Final = 4096
"""Bytes from which glibc's memcpy uses `rep movsb`, see `Group.collides`."""
_TOO_CLOSE: Final = 32
"""Bytes after its source, modulo 4 KiB, below which a target makes `rep movsb` crawl."""


@dataclass(frozen=True, slots=True, eq=False)
class Group:
    """Neighbouring runs of one length and stride, `count` equally far apart in each of one or more buffers.

    Each buffer's part is copied by one call. It is seen as rows of `row` bytes: page p of its run r is `parts` of them,
    from `origins[r] + p * step` on. Where no such rows exist (`rows` is empty), pages that don't follow each other are
    copied one by one. Consecutive pages are copied as slices where that spares indexing.
    """

    start: int
    """Where the group starts in a frame of one page, in bytes."""
    count: int
    """Runs in each buffer."""
    length: int
    """Bytes of each run."""
    pages: tuple[Bytes, ...]
    """For each buffer [run, page, byte]: a view of the engine's memory."""
    rows: tuple[npt.NDArray[np.void], ...]
    """For each buffer [row]: the same memory."""
    row: int
    origins: npt.NDArray[np.int64]
    """[run, 1]"""
    gap: int
    """Bytes between the runs of a buffer; 0 when it has one."""
    step: int
    grain: int
    """All pages lie at one of `phases` modulo this; divides 4 KiB."""
    phases: frozenset[int]
    slices: bool
    """Consecutive pages go as slices. They gain nothing over rows, but spare their indexing, which one call per buffer
    outweighs when there are several buffers."""

    def gather(self, job: CopyJob, first_id: int, memory: int) -> None:
        """Engine → frame. `first_id`: of consecutive ids, else -1; `memory`: address of the frame."""
        at = self._offset(job)
        words = self.length >= _STRING_COPY and any(self.collides(memory + at - phase) for phase in self.phases)
        if words or (first_id >= 0 and self.slices) or not self.rows:
            for source, target in self._pieces(job, first_id, at):
                _copy(target, source, words=words)
            return
        index, frame = self._index(job.pages), self._rows_in(job, at)
        if self.count == 1 or len(job.pages) == job.frame_pages:
            for rows, out in zip(self.rows, frame, strict=True):
                rows.take(index, 0, out, "clip")  # the ids are checked; "raise" would fill a copy and copy that
        else:  # runs are apart in the frame: take would fill a copy
            for rows, outs in zip(self.rows, frame, strict=True):
                for part, out in zip(index, outs, strict=True):
                    rows.take(part, 0, out, "clip")

    def scatter(self, job: CopyJob, first_id: int, memory: int) -> None:
        """Frame → engine. Arguments as `gather`."""
        at = self._offset(job)
        words = self.length >= _STRING_COPY and any(self.collides(phase - memory - at) for phase in self.phases)
        if words or (first_id >= 0 and self.slices) or not self.rows:
            for target, source in self._pieces(job, first_id, at):
                _copy(target, source, words=words)
            return
        index = self._index(job.pages)
        for rows, source in zip(self.rows, self._rows_in(job, at), strict=True):
            rows[index] = source

    def collides(self, ahead: int) -> bool:
        """Whether long runs with a target `ahead` bytes after the source are copied several times slower by memcpy.

        On some processors (glibc bug 30994) `rep movsb` crawls when the target lies just after the source modulo
        4 KiB. The pool is aligned; memory of numpy starts 16 bytes into a page, so its pages always hit this.
        """
        return 0 < ahead % self.grain < _TOO_CLOSE <= self.grain and ahead % 8 == 0

    def _offset(self, job: CopyJob) -> int:
        """Of the first byte that is copied, in the frame."""
        return job.frame_pages * self.start + job.first * self.length

    def _index(self, pages: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """The rows of these pages in each buffer: [row], or [run, row] when it has several runs."""
        if self.step != 1:
            pages = pages * self.step
        if self.row < self.length:
            pages = (pages[:, None] + np.arange(self.length // self.row)).reshape(-1)
        return pages if self.count == 1 else self.origins + pages

    def _rows_in(self, job: CopyJob, at: int) -> npt.NDArray[np.void]:
        """The frame's side of `_index`: [buffer, row] or [buffer, run, row]."""
        buffers, each, held = len(self.rows), len(job.pages) * (self.length // self.row), job.frame_pages * self.length
        dtype = self.rows[0].dtype
        if self.count == 1:
            return np.ndarray((buffers, each), dtype, job.memory, at, (held, self.row))
        shape, strides = (buffers, self.count, each), (self.count * held, held, self.row)
        return np.ndarray(shape, dtype, job.memory, at, strides)

    def _pieces(self, job: CopyJob, first_id: int, at: int) -> Iterator[tuple[Bytes, Bytes]]:
        """(engine, frame) views that correspond: all consecutive pages of a buffer at once, or each page alone."""
        buffers, pages, held = len(self.pages), len(job.pages), job.frame_pages * self.length
        shape, strides = (buffers, self.count, pages, self.length), (self.count * held, held, self.length, 1)
        frame = np.ndarray(shape, np.uint8, job.memory, at, strides)
        if first_id >= 0:
            window = (slice(None), slice(first_id, first_id + pages))
            for engine, kept in zip(self.pages, frame, strict=True):
                yield engine[window], kept
            return
        ids = job.pages.tolist()
        for engine, kept in zip(self.pages, frame, strict=True):
            for run, parts in zip(engine, kept, strict=True):
                for page, part in zip(ids, parts, strict=True):
                    yield run[page], part


def plan(layout: PageLayout, which: range, buffers: Sequence[Bytes], num_pages: int) -> tuple[Group, ...]:
    """The runs at positions `which` in as few groups as can be."""
    groups: list[Group] = []
    begin = which.start
    for end in range(which.start + 1, which.stop + 1):
        if end == which.stop or not _evenly(layout.runs[begin : end + 1]):
            group = _group(layout.run_starts[begin], layout.runs[begin:end], buffers, num_pages)
            joined = _join(groups[-1], group) if groups else None
            groups[-1:] = [joined] if joined is not None else [*groups[-1:], group]
            begin = end
    return tuple(groups)


def address(memory: memoryview) -> int:
    """Of the first byte."""
    result: int = np.frombuffer(memory, np.uint8, 1).__array_interface__["data"][0]
    return result


def _evenly(runs: Sequence[PageRun]) -> bool:
    """Whether one group can hold these runs of one buffer, of which all but the last are known to be even."""
    a, b, last = runs[0], runs[1], runs[-1]
    if (last.buffer, last.length, last.stride) != (a.buffer, a.length, a.stride):
        return False
    gap = b.offset - a.offset
    return gap > 0 and gap % gcd(a.length, a.stride) == 0 and last.offset - a.offset == gap * (len(runs) - 1)


def _group(start: int, runs: Sequence[PageRun], buffers: Sequence[Bytes], num_pages: int) -> Group:
    run = runs[0]
    memory = buffers[run.buffer][run.offset :]
    gap = runs[1].offset - run.offset if len(runs) > 1 else 0
    row = gcd(run.length, run.stride)
    grain = gcd(row, gap, 4096)
    rows = None
    if row == run.length or row >= _LEAST_ROW:
        rows = np.ndarray((memory.nbytes // row,), np.dtype((np.void, row)), memory.data)
    return Group(
        start=start,
        count=len(runs),
        length=run.length,
        pages=(np.ndarray((len(runs), num_pages, run.length), np.uint8, memory.data, 0, (gap, run.stride, 1)),),
        rows=() if rows is None else (rows,),
        row=row,
        origins=np.array([[(r.offset - run.offset) // row] for r in runs]),
        gap=gap,
        step=run.stride // row,
        grain=grain,
        phases=frozenset({address(memory.data) % grain}),
        slices=True,
    )


def _join(a: Group, b: Group) -> Group | None:
    """Both as one group, if `b` is for its buffer what `a` is for its own."""
    if (a.count, a.length, a.row, a.gap, a.step, a.grain) != (b.count, b.length, b.row, b.gap, b.step, b.grain):
        return None
    several = replace(a, pages=a.pages + b.pages, rows=a.rows + b.rows, phases=a.phases | b.phases)
    return replace(several, slices=a.row < a.length)


def _copy(target: Bytes, source: Bytes, *, words: bool) -> None:
    """Copy; with `words` through the loop of a ufunc instead of memcpy."""
    if words and target.shape[-1] % 8 == 0:
        np.positive(source.view(np.int64), target.view(np.int64))
    else:
        np.copyto(target, source)
