"""What the two sides of the connector tell each other: small, picklable values.

Scheduler → worker once per step (`StepMetadata`), worker → scheduler once per step (`WorkerReport`) and once at the
start (`Handshake`). This module imports nothing of vLLM: the connector registers the classes with vLLM's abstract ones.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lmkv.layout import LayoutDescription
    from lmkv.service.protocol import NewFrame


@dataclass(frozen=True, slots=True)
class LoadItem:
    """Pages of one leased frame that go into the engine's pages."""

    index: int
    """Number of the frame in the lease."""
    first: int
    """First page of the frame that is wanted."""
    pages: tuple[int, ...]
    """The engine's page ids, for frame pages `first`, `first + 1`, …"""
    tier: str = ""
    """Where the frame was found."""


@dataclass(frozen=True, slots=True)
class Load:
    """One request's load: all items or, from the first that fails on, none."""

    request: str
    lease: int
    incarnation: int
    """Of the service that gave the lease."""
    items: tuple[LoadItem, ...]


@dataclass(frozen=True, slots=True)
class Save:
    """Frames of one request whose pages are computed when the step of this metadata is done."""

    job: int
    frames: tuple[NewFrame, ...]
    pages: tuple[int, ...]
    """The engine's page ids of all frames, one frame after the other."""


@dataclass(slots=True)
class StepMetadata:
    """What the workers shall do in one step."""

    namespace: str | None = None
    """Canonical JSON of the namespace; sent when it is new."""
    loads: tuple[Load, ...] = ()
    saves: tuple[Save, ...] = ()
    """Of pages that this step computes: to be started after it."""
    early_saves: tuple[Save, ...] = ()
    """Of pages computed before, of requests that have finished: to be started before this step."""
    fence: int = 0
    """This save job and all before it are to be done, or dropped, before this step: their pages were given away."""
    idle: bool = False
    """The step computes nothing."""
    timed: int = 0
    """To be reported with the step's output, which so tells when it was done; 0: need not be."""


@dataclass(slots=True)
class WorkerReport:
    """What one worker (after `aggregate`: all of them) has finished since the last step."""

    saved: dict[int, int] = field(default_factory=dict)
    """Save job → workers that are through with it, whether it was stored or dropped."""
    failed: dict[str, int] = field(default_factory=dict)
    """Request → number of the first frame of its lease that could not be loaded."""
    timed: int = 0
    """`StepMetadata.timed` of the step that this report comes with."""

    def aggregate(self, other: WorkerReport) -> WorkerReport:
        """Both reports as one; the order does not matter."""
        saved = dict(self.saved)
        for job, count in other.saved.items():
            saved[job] = saved.get(job, 0) + count
        failed = dict(self.failed)
        for request, index in other.failed.items():
            failed[request] = min(index, failed.get(request, index))
        return WorkerReport(saved, failed, max(self.timed, other.timed))


@dataclass(frozen=True, slots=True)
class Handshake:
    """What the scheduler side must know of one worker to build the namespace."""

    layout: LayoutDescription
    """`PageLayout.describe()`."""
    page_bytes: int
