"""Scheduler side: which pages are to be stored, and which saves must be over before a page is written anew.

vLLM frees the blocks of a finished or preempted request at once, while their save may still be under way. Nothing is
held back for it. Instead the pages of each unfinished save are remembered (the fence): when one of them is given to
somebody else, the workers finish or drop that save before the step that writes to it.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

from lmkv.service.protocol import NewFrame
from lmkv_vllm.guard import INCIDENTS
from lmkv_vllm.metadata import Save

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from lmkv.keys import KeyChain
    from lmkv_vllm.metadata import Load


def frames_of(chain: KeyChain, first: int, computed: int, *, tail: bool) -> list[NewFrame]:
    """Frames of the full chunks `first …` among the first `computed` tokens.

    With `tail`, also one of the whole pages after them. `chain` has at least `computed` tokens.
    """
    chunk_pages = chain.chunk_tokens // chain.page_tokens
    full = computed // chain.chunk_tokens
    frames = []
    for index in range(first, full):
        prefixes = chain.prefixes(index, chunk_pages - 1)
        frames.append(NewFrame(chain.digests[index], chain.parent(index), chunk_pages, b"".join(prefixes)))
    pages = (computed - full * chain.chunk_tokens) // chain.page_tokens
    if tail and pages and full >= first:
        *shorter, digest = chain.prefixes(full, pages)
        frames.append(NewFrame(digest, chain.parent(full), pages, b"".join(shorter)))
    return frames


def tried(plan: Callable[..., Save | None], *about: Any) -> Save | None:
    """One request's save. An error costs it alone: the saves of the others go on."""
    try:
        return plan(*about)
    except Exception as error:  # noqa: BLE001  what is not saved is a miss later
        INCIDENTS.note("save", f"{type(error).__name__}: {error}", error=error)
        return None


class Saves:
    """All saves that some worker may not be through with. Used on the scheduler's thread only.

    Args:
        workers: how many reports make a save finished.
    """

    def __init__(self, workers: int) -> None:
        self._workers = workers
        self._numbers = itertools.count(1)
        self._pages: dict[int, tuple[int, ...]] = {}
        self._reports: dict[int, int] = {}
        self._readers: dict[int, int] = {}
        """Page → the last save that reads it."""

    @property
    def youngest(self) -> int:
        """The last save that some worker has not reported; 0: there is none."""
        return next(reversed(self._pages), 0)

    def add(self, frames: Sequence[NewFrame], pages: Sequence[int]) -> Save | None:
        """A save of these pages; None where there is nothing to save, or a page is vLLM's null block."""
        if not frames or 0 in pages or len(pages) != sum(frame.pages for frame in frames):
            return None
        save = Save(next(self._numbers), tuple(frames), tuple(pages))
        self._pages[save.job] = save.pages
        self._readers.update(dict.fromkeys(save.pages, save.job))
        return save

    def fence(self, pages: Iterable[int]) -> int:
        """The youngest unfinished save that reads any of these pages; 0: none does.

        Workers do their saves in order, so when it is over all older ones are.
        """
        readers = self._readers
        return max((readers.get(page, 0) for page in pages), default=0) if readers else 0

    def report(self, saved: dict[int, int]) -> None:
        """Workers are through with these saves."""
        for job, count in saved.items():
            total = self._reports.get(job, 0) + count
            if total < self._workers:
                self._reports[job] = total
                continue
            self._reports.pop(job, None)
            for page in self._pages.pop(job, ()):
                if self._readers.get(page) == job:
                    del self._readers[page]


def written_pages(scheduler_output: Any, loads: Iterable[Load], page_tokens: int) -> Iterator[int]:
    """Pages that this step may write to for the first time in their present owner's hands.

    A new or resumed request's pages before `num_computed_tokens` come from vLLM's own cache, or were loaded before.
    """
    for new in scheduler_output.scheduled_new_reqs:
        yield from new.block_ids[0][new.num_computed_tokens // page_tokens :]
    cached = scheduler_output.scheduled_cached_reqs
    for request, blocks, computed in zip(cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True):
        if blocks is None:
            continue
        # For a resumed request these are all its blocks, otherwise only the new ones.
        skip = computed // page_tokens if request in cached.resumed_req_ids else 0
        yield from blocks[0][skip:]
    for load in loads:
        for item in load.items:
            yield from item.pages
