"""What every GPU connector does, whatever the device: the interface, and the checks that come before any copy."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from collections.abc import Sequence

    from lmkv.layout import PageLayout

EngineBuffer: TypeAlias = "memoryview | npt.NDArray[Any]"
"""Memory of the engine, writable and contiguous; never copied."""

_SMALL = 64
"""Page ids up to which a Python list is scanned faster than two numpy reductions run."""


class CopyJob(NamedTuple):
    """The pages of one frame to copy: `pages[i]` of the engine is page `first + i` of the frame."""

    pages: npt.NDArray[np.int64]
    """Page ids of the engine, one-dimensional. May be empty."""
    memory: memoryview
    """The frame's payload: at least `frame_pages * layout.page_bytes` bytes, from its first byte on."""
    frame_pages: int
    """Pages that the frame holds, copied or not; its inner offsets depend on it."""
    first: int = 0
    """Position in the frame of the first page to copy."""


class GPUConnector(ABC):
    """Copies pages between the engine's memory and frames. Knows bytes and runs, and nothing of what they mean.

    Thread-safe as long as no two calls touch the same pages or memory. Nothing is copied unless every job of the call
    passes its checks: a page id or a length that does not fit raises `ValueError` and leaves all memory as it was.

    Attributes:
        layout: what a page is.
        num_pages: pages that the engine's buffers hold; ids go from 0 to `num_pages - 1`.
    """

    layout: PageLayout
    num_pages: int

    @abstractmethod
    def gather(self, jobs: Sequence[CopyJob], *, stream: Any = None, layers: range | None = None) -> None:
        """Engine → frames.

        Args:
            jobs: a batch; one call for many frames is cheaper than many calls.
            stream: the device's stream to order the copy on; the copy may then be under way when the call returns. None
                (and always on a CPU): the bytes are there on return.
            layers: which runs to copy, as positions in `layout.runs` (which are layer-major: with k runs per layer,
                layers a to b - 1 are `range(k * a, k * b)`). None: all.

        Raises:
            ValueError: a job or `layers` does not fit; says which and how. Nothing was copied.
        """

    @abstractmethod
    def scatter(self, jobs: Sequence[CopyJob], *, stream: Any = None, layers: range | None = None) -> None:
        """Frames → engine. Arguments and errors as `gather`; an id that occurs twice gets the bytes of either."""

    def close(self) -> None:  # noqa: B027  most connectors have nothing to give back
        """Give back streams and staging memory. Idempotent. Default: nothing."""


def check_job(job: CopyJob, page_bytes: int, num_pages: int, *, write: bool) -> int:
    """Whether the job fits, and how its ids lie.

    Args:
        job: the job.
        page_bytes: bytes of one page.
        num_pages: pages of the engine.
        write: the copy writes into `job.memory`.

    Returns:
        The first page id if the ids are consecutive and ascending, else -1.

    Raises:
        ValueError: says what does not fit.
    """
    pages, memory, held, first = job.pages, job.memory, job.frame_pages, job.first
    if pages.dtype != np.int64 or pages.ndim != 1:
        raise ValueError(f"page ids must be one-dimensional int64, not {pages.ndim}-dimensional {pages.dtype}")
    count = len(pages)
    if first < 0 or first + count > held:
        raise ValueError(f"pages {first} to {first + count} of a frame that holds {held}")
    if memory.nbytes < held * page_bytes:
        raise ValueError(f"memory of {memory.nbytes} bytes for a frame of {held} pages of {page_bytes} bytes")
    if not memory.c_contiguous or (write and memory.readonly):
        raise ValueError(f"the frame's memory must be contiguous{' and writable' if write else ''}")
    if count == 0:
        return -1
    if count <= _SMALL:
        ids = pages.tolist()
        low, high, start = min(ids), max(ids), ids[0]
        consecutive = high - start == count - 1 and ids == list(range(start, start + count))
    else:
        low, high, start = int(pages.min()), int(pages.max()), int(pages[0])
        consecutive = high - start == count - 1 and bool((np.diff(pages) == 1).all())
    if low < 0 or high >= num_pages:
        raise ValueError(f"page ids {low} to {high}, but the engine has pages 0 to {num_pages - 1}")
    return start if consecutive else -1


def check_layers(layers: range | None, runs: int) -> range:
    """`layers` as a range of run positions.

    Raises:
        ValueError: it is empty of sense: a step, or outside `[0, runs)`.
    """
    if layers is None:
        return range(runs)
    if layers.step != 1 or layers.start < 0 or layers.stop > runs or layers.start > layers.stop:
        raise ValueError(f"{layers} is no range of the layout's {runs} runs")
    return layers
