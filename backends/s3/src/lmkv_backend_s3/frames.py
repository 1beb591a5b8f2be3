"""Frames of a batch as requests: in one piece, in ranges, in parts; as many at once as there are connections."""

from __future__ import annotations

import contextlib
import time
from functools import partial
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from lmkv.errors import BackendError, FrameError
from lmkv.types import FAILED, MISS, OK
from lmkv_backend_s3.bucket import Fetched, Made
from lmkv_backend_s3.line import Payload
from lmkv_backend_s3.refusals import AbsentError, BeyondError, StoreError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from lmkv.types import Outcome
    from lmkv_backend_s3.bucket import Bucket
    from lmkv_backend_s3.crew import Crew
    from lmkv_backend_s3.options import S3Options

ALIGNED: Final = 4096
MOST_PARTS: Final = 10_000
REREADS: Final = 3
"""Times that a frame is read anew because it was replaced meanwhile."""
ABORT_SECONDS: Final = 5.0


class Span(NamedTuple):
    """A part of a frame."""

    start: int
    stop: int


def spans(nbytes: int, about: int) -> list[Span]:
    """Parts of equal size, none of them smaller than about ⅔ of `about`, that make up `nbytes`."""
    count = max(1, round(nbytes / about))
    size = -(-nbytes // count)
    size += -size % ALIGNED
    return [Span(start, min(start + size, nbytes)) for start in range(0, max(nbytes, 1), size)]


class Frames:
    """Moves frames between memory and a bucket. Thread-safe; returns only when nothing uses the memory any more."""

    def __init__(self, bucket: Bucket, crew: Crew, options: S3Options) -> None:
        self._bucket = bucket
        self._crew = crew
        self._range_size = options.range_size
        self._multipart_size = options.multipart_size
        self._part_size = options.part_size
        self._ranges = True
        """The server sends parts of objects."""

    # --- down --------------------------------------------------------------------------------------------------------

    def load(self, names: Sequence[str], views: Sequence[memoryview], until: float) -> list[Outcome]:
        """One outcome per object; raises when all of them fail, or the store refuses."""
        jobs: list[Callable[[], Fetched]] = []
        plan = [spans(len(view), self._range_size) if self._ranges else [] for view in views]
        for name, view, parts in zip(names, views, plan, strict=True):
            if len(parts) <= 1:
                jobs.append(partial(self._bucket.fetch, name, view, until))
            else:
                jobs += [partial(self._bucket.fetch, name, view[a:b], until, start=a) for a, b in parts]
        results = self._crew.run(jobs)
        del jobs
        outcomes: list[Outcome | StoreError] = []
        at = 0
        for name, view, parts in zip(names, views, plan, strict=True):
            count = max(1, len(parts))
            outcomes.append(self._loaded(name, view, parts, results[at : at + count], until))
            at += count
        return judged(outcomes)

    def _loaded(
        self, name: str, view: memoryview, parts: list[Span], results: list[Fetched | Exception], until: float
    ) -> Outcome | StoreError:
        """Of one frame."""
        for _ in range(REREADS):
            problem = next((r for r in results if isinstance(r, Exception) and not isinstance(r, BeyondError)), None)
            if problem is not None:
                return _told(problem)
            first = results[0]
            if isinstance(first, BeyondError):
                return OK(0)  # an object without a byte
            assert isinstance(first, Fetched)
            total = first.nbytes if first.total is None else first.total
            if total > len(view) or (first.more and len(parts) <= 1):
                return FAILED(FrameError(f"the stored frame is longer than its buffer of {len(view)} bytes"))
            if len(parts) <= 1 or _complete(parts, results, total, first.version):
                return OK(total)
            if any(isinstance(r, Fetched) and r.whole for r in results):
                self._ranges = False
            # Replaced between two of the reads, or a server that takes no ranges: all of it by one request.
            parts = []
            results = self._crew.run([partial(self._bucket.fetch, name, view, until)])
        return FAILED(BackendError("the frame was replaced each time that it was read"))

    # --- up ----------------------------------------------------------------------------------------------------------

    def store(self, names: Sequence[str], views: Sequence[memoryview], until: float) -> list[Outcome]:
        """One outcome per object; raises when all of them fail, or the store refuses."""
        small = [i for i, view in enumerate(views) if len(view) < self._multipart_size]
        outcomes: list[Outcome | StoreError] = [MISS] * len(views)
        done = self._crew.run([partial(self._put, names[i], views[i], until) for i in small])
        for i, result in zip(small, done, strict=True):
            outcomes[i] = _told(result) if isinstance(result, Exception) else OK(len(views[i]))
        for i in set(range(len(views))) - set(small):
            outcomes[i] = self._store_parts(names[i], views[i], until)
        return judged(outcomes)

    def _put(self, name: str, view: memoryview, until: float) -> None:
        self._bucket.put(name, Payload(view), until)

    def _store_parts(self, name: str, view: memoryview, until: float) -> Outcome | StoreError:
        made = Made(name, len(view), time.monotonic())
        upload = ""
        try:
            upload = self._bucket.write("create_multipart_upload", name, until)["UploadId"]
            size = max(self._part_size, -(-len(view) // MOST_PARTS))
            size += -size % ALIGNED
            jobs = [
                partial(self._put_part, name, view[start : start + size], until, PartNumber=number, UploadId=upload)
                for number, start in enumerate(range(0, len(view), size), start=1)
            ]
            results = self._crew.run(jobs)
            del jobs
            self._bucket.complete(made, upload, _all_done(results), until)
        except Exception as e:  # noqa: BLE001  judged by `_told`
            if upload:  # in another thread: the memory has to be given back now, and the time is up
                self._crew.begin(partial(self._abort, made, upload))
            return _told(e.with_traceback(None))
        return OK(len(view))

    def _put_part(self, name: str, view: memoryview, until: float, **params: Any) -> dict[str, Any]:
        done = self._bucket.write_part(name, until, Body=Payload(view), **params)
        return {"ETag": done.get("ETag", ""), "PartNumber": params["PartNumber"]}

    def _abort(self, made: Made, upload: str) -> None:
        """Parts of an upload that is never completed are paid for; a lifecycle rule removes what this cannot.

        An upload that the store has completed, and that nobody has heard of, is left alone.
        """
        with contextlib.suppress(Exception):
            until = time.monotonic() + ABORT_SECONDS
            if not self._bucket.has(made, until):
                self._bucket.ask("abort_multipart_upload", until, Key=made.key, UploadId=upload)


def judged(outcomes: Sequence[Outcome | StoreError]) -> list[Outcome]:
    """Failures as outcomes of their keys, as long as the store works: else the first of them is raised."""
    problems = [o for o in outcomes if isinstance(o, StoreError)]
    definite = next((problem for problem in problems if problem.definite), None)
    if definite is not None or (problems and len(problems) == len(outcomes)):
        raise definite or problems[0]
    return [FAILED(o) if isinstance(o, StoreError) else o for o in outcomes]


def _told(problem: Exception) -> Outcome | StoreError:
    """What one failed request means for its frame; what is neither a miss nor the store's fault is raised."""
    if isinstance(problem, AbsentError):
        return MISS
    if isinstance(problem, StoreError):
        return problem
    raise problem


def _all_done(results: list[dict[str, Any] | Exception]) -> list[dict[str, Any]]:
    """The results; raises the first failure among them."""
    done = []
    for result in results:
        if isinstance(result, Exception):
            raise result
        done.append(result)
    return done


def _complete(parts: list[Span], results: list[Fetched | Exception], total: int, version: str) -> bool:
    """Whether all parts are of one object, and are there."""
    for (start, stop), result in zip(parts, results, strict=True):
        wanted = max(0, min(stop, total) - start)
        if isinstance(result, BeyondError):
            if wanted:
                return False
        elif not isinstance(result, Fetched) or not result.is_part(wanted, total, version):
            return False
    return True
