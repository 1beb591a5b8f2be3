"""Which objects are there, and their removal: many names at once by listings, a few by requests of their own."""

from __future__ import annotations

import time
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from lmkv_backend_s3.refusals import AbsentError, StoreError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from lmkv.types import ChunkKey
    from lmkv_backend_s3.bucket import Bucket
    from lmkv_backend_s3.crew import Crew
    from lmkv_backend_s3.names import Names

PAGE: Final = 1000
"""Objects in an answer of a listing, and names in a request of removals, at most: rules of S3."""
HEADS_PER_PAGE: Final = 100
"""Requests about single objects that take as long as one page of a listing: until both have been measured."""
FEWEST_MEASURED: Final = 8
"""Requests at once that say what one of many takes."""
FORGET_SECONDS: Final = 60.0
SINGLES: Final = 3
"""So many removals go one by one."""
_NO_BATCHES: Final = {
    "InvalidRequest",
    "MalformedXML",
    "MethodNotAllowed",
    "MissingContentMD5",
    "NotImplemented",
    "UnsupportedOperation",
}


class Prices:
    """How many requests about single objects take as long as a page of a listing, by what both took lately."""

    def __init__(self) -> None:
        self._page = 0.0
        self._head = 0.0

    @property
    def heads_per_page(self) -> float:
        """Requests per page."""
        if not (self._page and self._head):
            return HEADS_PER_PAGE
        return min(max(self._page / self._head, HEADS_PER_PAGE / 10), HEADS_PER_PAGE * 10)

    def saw_page(self, seconds: float) -> None:
        """A page took so long."""
        self._page = (self._page + seconds) / 2 if self._page else seconds

    def saw_heads(self, number: int, seconds: float) -> None:
        """So many requests, as many at once as there are connections, took so long in all."""
        if number >= FEWEST_MEASURED:
            each = seconds / number
            self._head = (self._head + each) / 2 if self._head else each
            self._page *= 0.95  # what was slow once is tried again some time


class Listing:
    """Looks into a bucket. Thread-safe. Raises as `Bucket` does.

    Args:
        seconds: limit of one request of those methods that send as many as it takes.
    """

    def __init__(self, bucket: Bucket, crew: Crew, names: Names, seconds: float) -> None:
        self._bucket = bucket
        self._crew = crew
        self._names = names
        self._seconds = seconds
        self._sorted = not bucket.express
        """Listings come in order of names; those of S3 Express don't."""
        self._prices = Prices()
        self._large: dict[str, float] = {}
        """Folders whose listing was given up, and when."""
        self._batches = True
        """The store takes many removals in one request."""

    def contains(self, keys: Sequence[ChunkKey], until: float) -> list[bool]:
        """Which frames are there: a listing where it takes few pages for the number of keys, else a request each."""
        found: dict[ChunkKey, bool] = {}
        groups: dict[str, list[ChunkKey]] = {}
        for key in dict.fromkeys(keys):
            groups.setdefault(self._names.folder(key.namespace, key.shard), []).append(key)
        for folder, members in groups.items():
            pages = int(len(members) / self._prices.heads_per_page)
            if pages and time.monotonic() - self._large.get(folder, -FORGET_SECONDS) >= FORGET_SECONDS:
                self._list(folder, members, pages, until, found)
        unknown = [key for key in dict.fromkeys(keys) if key not in found]
        jobs = [partial(self._bucket.exists, self._names.frame(key), until) for key in unknown]
        begin = time.monotonic()
        results = self._crew.run(jobs)
        self._prices.saw_heads(len(jobs), time.monotonic() - begin)
        for key, result in zip(unknown, results, strict=True):
            if isinstance(result, Exception) and not isinstance(result, AbsentError):
                raise result
            found[key] = result is True
        return [found[key] for key in keys]

    def objects(self, prefix: str) -> Iterator[list[dict[str, Any]]]:
        """Everything below `prefix`, page by page."""
        token: str | None = None
        while True:
            page, token = self._page(prefix, token, time.monotonic() + self._seconds)
            yield page
            if token is None:
                return

    def remove(self, names: Sequence[str]) -> None:
        """Remove objects; absent ones are no error."""
        for at in range(0, len(names), PAGE):
            some = names[at : at + PAGE]
            if not self._batches or len(some) <= SINGLES or not self._remove_batch(some):
                for result in self._crew.run([partial(self._remove, name) for name in some]):
                    if isinstance(result, Exception):
                        raise result

    def _list(
        self, folder: str, members: list[ChunkKey], pages: int, until: float, found: dict[ChunkKey, bool]
    ) -> None:
        """Decide about as many of `members` as some pages of a listing tell."""
        wanted = {self._names.frame(key): key for key in members}
        token: str | None = None
        last = ""
        for _ in range(pages):
            page, token = self._page(folder, token, until)
            for entry in page:
                last = entry["Key"]
                if last in wanted:
                    found[wanted[last]] = True
            if token is None:
                found.update((key, False) for key in members if key not in found)
                return
        if len(self._large) > PAGE:
            self._large.clear()
        self._large[folder] = time.monotonic()
        if self._sorted:
            found.update((key, False) for name, key in wanted.items() if name <= last and key not in found)

    def _page(self, prefix: str, token: str | None, until: float) -> tuple[list[dict[str, Any]], str | None]:
        more: dict[str, Any] = {} if token is None else {"ContinuationToken": token}
        begin = time.monotonic()
        answer = self._bucket.ask("list_objects_v2", until, Prefix=prefix, MaxKeys=PAGE, **more)
        self._prices.saw_page(time.monotonic() - begin)
        return answer.get("Contents", []), answer.get("NextContinuationToken") if answer.get("IsTruncated") else None

    def _remove(self, name: str) -> None:
        try:
            self._bucket.ask("delete_object", time.monotonic() + self._seconds, Key=name)
        except AbsentError:
            return

    def _remove_batch(self, names: Sequence[str]) -> bool:
        """False where the store does not take such requests."""
        which = {"Objects": [{"Key": name} for name in names], "Quiet": True}
        try:
            answer = self._bucket.ask("delete_objects", time.monotonic() + self._seconds, Delete=which)
        except StoreError as e:
            if e.code not in _NO_BATCHES:
                raise
            self._batches = False
            return False
        for failed in answer.get("Errors", []):
            if failed.get("Code") not in {"NoSuchKey", "NoSuchVersion"}:
                text = f"{self._bucket.title}: delete_objects: {failed.get('Code')}: {failed.get('Message')}"
                raise StoreError(text, code=str(failed.get("Code")), definite=failed.get("Code") == "AccessDenied")
        return True
