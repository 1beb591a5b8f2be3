"""Frames as objects of a bucket that any number of nodes share."""

from __future__ import annotations

import logging
import os
import threading
import time
from typing import TYPE_CHECKING, Final, cast

from lmkv.backend import StorageBackendInterface
from lmkv.errors import BackendError, ConfigError
from lmkv.types import REJECTED, Capabilities, Health, HealthState, Outcome, StoredFrame
from lmkv_backend_s3.bucket import Bucket
from lmkv_backend_s3.crew import Crew
from lmkv_backend_s3.frames import Frames
from lmkv_backend_s3.listing import Listing
from lmkv_backend_s3.look import look
from lmkv_backend_s3.names import Names
from lmkv_backend_s3.refusals import AbsentError, StoreError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from pydantic import BaseModel

    from lmkv.memory import MemoryObject
    from lmkv.specs import BackendContext
    from lmkv.types import ChunkKey
    from lmkv_backend_s3.options import S3Options

log = logging.getLogger(__name__)

LOOK_SECONDS: Final = 0.5
"""Beyond the deadline: what a look at the start may take that is no request (names to resolve, keys to find)."""


class S3Backend(StorageBackendInterface):
    """Blocking and thread-safe. Each call ends at about the tier's deadline, whatever the store does.

    Raises, from every method:
        BackendError: the store refuses (`retryable` is False), is not reached, or is busy or silent for all of the
            deadline. The message names bucket and request, and says what to do.
        ClosedError: after `close`.
    """

    capabilities = Capabilities(persistent=True, shared=True, parallelism=4)

    def __init__(self, options: BaseModel, context: BackendContext) -> None:
        """Looks at the bucket; a store that is not there now is used as soon as it is.

        Raises:
            ConfigError: the store is there and says no; or the keys, the certificate or a file are not usable.
        """
        self._options = cast("S3Options", options)
        self._tier = context.tier
        self._deadline = context.deadline
        self._names = Names(self._options.prefix)
        self._bucket = Bucket(self._options, context.tier, context.deadline)
        self._crew = Crew(f"lmkv-{context.tier}-s3", self._options.connections)
        self._frames = Frames(self._bucket, self._crew, self._options)
        self._listing = Listing(self._bucket, self._crew, self._names, context.deadline)
        self._looked = threading.Event()
        """The bucket was found usable."""
        self._described: dict[bytes, str] = {}
        self._first_look()

    def contains(self, keys: Sequence[ChunkKey]) -> Sequence[bool]:
        """Few keys by a HEAD each, many by a listing of their namespace and shard."""
        return self._listing.contains(keys, self._limit())

    def get(self, keys: Sequence[ChunkKey], into: Sequence[MemoryObject]) -> Sequence[Outcome]:
        """Read frames, large ones in ranges; `FAILED(FrameError)` where one is longer than its memory."""
        names = [self._names.frame(key) for key in keys]
        return self._frames.load(names, [memory.view for memory in into], self._limit())

    def put(self, keys: Sequence[ChunkKey], objects: Sequence[MemoryObject]) -> Sequence[Outcome]:
        """Write frames, large ones in parts; refused where the tier is `read_only`."""
        if self._options.read_only:
            return [REJECTED] * len(keys)
        names = [self._names.frame(key) for key in keys]
        return self._frames.store(names, [memory.view for memory in objects], self._limit())

    def delete(self, keys: Sequence[ChunkKey]) -> None:
        """Remove the objects; nothing where the tier is `read_only`."""
        if self._options.read_only:
            return
        self._listing.remove([self._names.frame(key) for key in keys])

    def scan(self) -> Iterator[StoredFrame]:
        """Every frame by time of its last write, without its end: for people and `clear`, not to rebuild an index."""
        found: list[StoredFrame] = []
        for page in self._listing.objects(self._names.frames):
            for entry in page:
                key = self._names.parse(entry["Key"])
                if key is not None:
                    found.append(StoredFrame(key, entry["Size"], b"", entry["LastModified"].timestamp()))
        found.sort(key=lambda frame: frame.last_used)
        return iter(found)

    def describe(self, namespace: bytes, text: str) -> None:
        """Keep `text` as `<prefix>namespaces/<namespace>.json`."""
        if self._options.read_only or self._described.get(namespace) == text:
            return
        name = self._names.description(namespace)
        self._bucket.write("put_object", name, self._limit(), Body=text.encode(), ContentType="application/json")
        self._described[namespace] = text

    def clear(self, namespace: bytes | None = None) -> None:
        """Remove every frame (of one namespace), page by page; the namespace's description stays."""
        if self._options.read_only:
            raise BackendError(
                f"tier {self._tier!r} is read_only: nothing is cleared", kind="read-only", retryable=False
            )
        folder = self._names.frames if namespace is None else self._names.folder(namespace)
        for page in self._listing.objects(folder):
            self._listing.remove([e["Key"] for e in page if self._names.parse(e["Key"]) is not None])

    def health(self) -> Health:
        """One HEAD of the bucket; the whole look of the start where that has not succeeded yet."""
        try:
            if self._looked.is_set():
                self._bucket.ask("head_bucket", self._limit(), patient=False)
            else:
                self._look()
        except AbsentError:
            return Health(HealthState.DOWN, f"{self._bucket.title} does not exist any more")
        except StoreError as e:
            return Health(HealthState.DOWN, self._reason(e))
        except (BackendError, ConfigError) as e:
            return Health(HealthState.DOWN, str(e))
        return Health(HealthState.OK)

    def close(self) -> None:
        """End all connections, also those that somebody waits on; waits for nothing. Idempotent."""
        self._bucket.close()
        self._crew.close()

    def _limit(self) -> float:
        return time.monotonic() + self._deadline

    def _first_look(self) -> None:
        """In a thread of its own: resolving names and finding keys have no time limits."""
        refused: list[ConfigError] = []

        def run() -> None:
            try:
                self._look()
            except ConfigError as e:
                refused.append(e)
            except BackendError as e:
                log.warning("tier %s: %s; it is used as soon as it answers", self._tier, e)

        ended = self._crew.begin(run).wait(self._deadline + LOOK_SECONDS)
        if refused:
            self.close()
            raise refused[0].with_traceback(None) from None
        if not ended:
            log.warning("tier %s: no answer yet; it is used as soon as there is one", self._tier)

    def _look(self) -> None:
        look(self._bucket, self._names, self._options, self._limit())
        self._looked.set()

    def _reason(self, error: StoreError) -> str:
        """The answer to a HEAD has no words: ask for the reason."""
        if not error.definite:
            return str(error)
        try:
            self._bucket.fetch(self._names.probe(os.urandom(8).hex()), memoryview(bytearray(1)), self._limit())
        except StoreError as e:
            return str(e)
        except (AbsentError, BackendError):
            pass
        return str(error)
