"""Requests to one bucket: each within a limit, tried again while there is time, its failures in our words."""

from __future__ import annotations

import base64
import http.client
import random
import threading
import time
from email.utils import parsedate_to_datetime
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from lmkv.errors import ClosedError
from lmkv_backend_s3.client import make_client
from lmkv_backend_s3.heads import Heads
from lmkv_backend_s3.refusals import AbsentError, StoreError, explained

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import TypeVar

    from lmkv_backend_s3.line import Payload
    from lmkv_backend_s3.options import S3Options

    T = TypeVar("T")

FIRST_PAUSE: Final = 0.05
LONGEST_PAUSE: Final = 2.0
LOOK_SECONDS: Final = 0.5
"""Of the time left for a write, kept for a look whether it was done although no answer came."""
LOOK_SHARE: Final = 5
"""Of a short time, a part of it."""
CLOCK_SECONDS: Final = 2.0
"""By which the times of an object and of an answer may be off: both are whole seconds, maybe of two machines."""


class Fetched(NamedTuple):
    """What a read of an object, or of a part of it, gave."""

    nbytes: int
    """Bytes that were put into memory."""
    total: int | None
    """Bytes of the whole object; None where the server does not say."""
    version: str
    """Differs between two frames that were written under one key."""
    whole: bool
    """The server sent the object from its beginning, whatever range it was asked for."""
    more: bool
    """There are bytes behind those that fitted."""

    def is_part(self, nbytes: int, total: int, version: str) -> bool:
        """Whether it is so many bytes of that object."""
        return (self.nbytes, self.total, self.version) == (nbytes, total, version)


class Made(NamedTuple):
    """An object that a request is to make."""

    key: str
    nbytes: int
    since: float
    """When (on the monotonic clock) the first request about it went out: S3 dates a multipart upload from there."""


class Bucket:
    """Sends requests. Thread-safe.

    Raises, from all methods:
        StoreError: the store refuses (`definite`), or it was not reached, busy or silent until the limit.
        AbsentError, BeyondError: as their names say.
        ClosedError: after `close`.
    """

    def __init__(self, options: S3Options, tier: str, deadline: float) -> None:
        self.name = options.bucket
        self.title = f"bucket {options.bucket!r}" + (f" at {options.endpoint}" if options.endpoint else "")
        """For messages."""
        self.express = options.express
        self._tier = tier
        self._client, self._transport = make_client(options, deadline)
        self._closed = threading.Event()
        self._for_reads: dict[str, Any] = {}
        if options.sse_customer_key is not None:
            key = base64.b64decode(options.sse_customer_key.get_secret_value())
            self._for_reads = {"SSECustomerAlgorithm": "AES256", "SSECustomerKey": key}
        self._heads = Heads(self._client, self._transport, {"Bucket": self.name, **self._for_reads})
        self._for_writes = dict(self._for_reads)
        if options.sse is not None:
            self._for_writes["ServerSideEncryption"] = options.sse
        if options.kms_key_id is not None:
            self._for_writes["SSEKMSKeyId"] = options.kms_key_id
        if options.storage_class is not None:
            self._for_writes["StorageClass"] = options.storage_class

    # --- requests ----------------------------------------------------------------------------------------------------

    def ask(self, operation: str, until: float, *, patient: bool = True, **params: Any) -> dict[str, Any]:
        """One request whose answer is no frame; `operation` is the name of a method of boto3's client."""
        method: Callable[..., dict[str, Any]] = getattr(self._client, operation)

        def attempt() -> dict[str, Any]:
            with self._transport.exchange(until):
                return method(Bucket=self.name, **params)

        return self._persist(operation, attempt, until if patient else 0.0)

    def write(self, operation: str, key: str, until: float, **params: Any) -> dict[str, Any]:
        """A request that begins an object: with encryption and storage class."""
        return self.ask(operation, until, Key=key, **self._for_writes, **params)

    def write_part(self, key: str, until: float, **params: Any) -> dict[str, Any]:
        """A part of a multipart upload."""
        return self.ask("upload_part", until, Key=key, **self._for_reads, **params)

    def put(self, key: str, body: Payload, until: float) -> None:
        """Write an object in one piece. Done also where the answer is lost and a look finds the object."""
        made = Made(key, len(body), time.monotonic())
        self._finish("put_object", made, until, Body=body, **self._for_writes)

    def complete(self, made: Made, upload: str, parts: Sequence[dict[str, Any]], until: float) -> None:
        """End a multipart upload. Done also where the answer is lost and a look finds the object."""
        self._finish("complete_multipart_upload", made, until, UploadId=upload, MultipartUpload={"Parts": parts})

    def has(self, made: Made, until: float) -> bool:
        """Whether that object is there, and no older one of the same length; False where one look does not tell."""
        try:
            answer = self.ask("head_object", until, patient=False, Key=made.key, **self._for_reads)
        except (AbsentError, StoreError):
            return False
        now = answer["ResponseMetadata"]["HTTPHeaders"].get("date")
        written = answer.get("LastModified")
        if now and written:  # both by the store's clock
            age = parsedate_to_datetime(now).timestamp() - written.timestamp()
            if age > time.monotonic() - made.since + CLOCK_SECONDS:
                return False
        return answer.get("ContentLength") == made.nbytes

    def exists(self, key: str, until: float) -> bool:
        """Whether there is such an object. A store that lets nobody list answers 403 instead of 404: that is raised."""

        def attempt() -> bool:
            with self._transport.exchange(until):
                return self._heads.exists(key)

        return self._persist("head_object", attempt, until)

    def fetch(
        self, key: str, view: memoryview, until: float, *, start: int | None = None, patient: bool = True
    ) -> Fetched:
        """Read an object into `view`; with `start` only the bytes from there on that `view` has room for."""
        params = {"Range": f"bytes={start}-{start + len(view) - 1}"} if start is not None else {}

        def attempt() -> Fetched:
            with self._transport.exchange(until) as exchange:
                answer = self._client.get_object(Bucket=self.name, Key=key, **self._for_reads, **params)
                reply = exchange.reply
                assert reply is not None, "boto3 has sent the request by another way"
                whole = reply.status == http.client.OK
                if whole and start:
                    return Fetched(0, None, "", whole=True, more=True)  # the server takes no ranges
                expected = answer.get("ContentLength")
                nbytes = reply.receive(view, until)
                if whole and expected is None:
                    more = reply.receive(memoryview(bytearray(1)), until) > 0
                else:
                    more = (expected or 0) > nbytes
                total = _total(answer.get("ContentRange")) if not whole else expected or nbytes
                return Fetched(nbytes, total, str(answer.get("ETag") or answer.get("LastModified") or ""), whole, more)

        return self._persist("get_object", attempt, until if patient else 0.0)

    def close(self) -> None:
        """End every connection and every pause at once. Idempotent."""
        self._closed.set()
        self._transport.close()

    def _finish(self, operation: str, made: Made, until: float, **params: Any) -> None:
        """The request by which an object comes to be; where its answer is lost, a look whether it is there."""
        method: Callable[..., dict[str, Any]] = getattr(self._client, operation)
        sent = False

        def attempt() -> None:
            nonlocal sent
            try:
                with self._transport.exchange(until - _reserve(until)) as exchange:
                    try:
                        method(Bucket=self.name, Key=made.key, **params)
                    finally:
                        sent = sent or exchange.sent
            except Exception as e:
                doubtful = sent and _is_doubtful(explained(operation, e))
                if not (doubtful and self.has(made, min(until, time.monotonic() + LOOK_SECONDS))):
                    raise

        self._persist(operation, attempt, until)

    # --- patience ----------------------------------------------------------------------------------------------------

    def _persist(self, operation: str, attempt: Callable[[], T], until: float) -> T:
        """Try, with growing pauses, until `until`; a definite refusal is raised at once."""
        pause = FIRST_PAUSE
        tries = 0
        while True:
            self._check_open()
            tries += 1
            try:
                return attempt()
            except Exception as e:  # noqa: BLE001  sorted by what can be done about it
                problem = explained(f"{self.title}: {operation}", e)
            self._check_open()
            if not isinstance(problem, StoreError) or problem.definite:
                raise problem from None
            wait = pause * random.uniform(0.5, 1.0)  # noqa: S311  many clients must not come back at one moment
            if time.monotonic() + wait >= until:
                if tries > 1:
                    problem.args = (f"{problem} (tried {tries} times)",)
                raise problem from None
            self._closed.wait(wait)
            pause = min(2 * pause, LONGEST_PAUSE)

    def _check_open(self) -> None:
        if self._closed.is_set():
            raise ClosedError(f"tier {self._tier!r} is closed")


def _is_doubtful(problem: Exception) -> bool:
    """Whether the store may have done it all the same: no answer came, or there is no such upload (any more)."""
    return isinstance(problem, StoreError) and problem.code in {"timeout", "unreachable", "NoSuchUpload"}


def _reserve(until: float) -> float:
    """What is kept of the time left for a look afterwards."""
    return min(LOOK_SECONDS, max(0.0, until - time.monotonic()) / LOOK_SHARE)


def _total(content_range: str | None) -> int | None:
    """Bytes of the object from ``bytes 0-99/1234``."""
    total = (content_range or "").rpartition("/")[2]
    return int(total) if total.isdecimal() else None
