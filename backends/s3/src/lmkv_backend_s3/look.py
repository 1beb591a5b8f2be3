"""The look at a bucket before it is used: is it there, may we read, may we write."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING, Any, Final

from lmkv.errors import ConfigError
from lmkv_backend_s3.line import Payload
from lmkv_backend_s3.refusals import AbsentError, StoreError

if TYPE_CHECKING:
    from lmkv_backend_s3.bucket import Bucket
    from lmkv_backend_s3.names import Names
    from lmkv_backend_s3.options import S3Options

SILENCE: Final = 1.0
"""Seconds without an answer after which a store counts as not there, at the start."""


def look(bucket: Bucket, names: Names, options: S3Options, until: float) -> None:
    """Read an object that is not there, write one, read it, delete it. Creates the bucket where the options say so.

    Raises:
        ConfigError: the store refuses one of these.
        StoreError: it is not there, busy or silent.
    """
    name = names.probe(os.urandom(8).hex())
    step = "read"
    try:
        if not _readable(bucket, name, until):
            step = "created"
            _create(bucket, options, until)
        if not options.read_only:
            step = "written"
            bucket.write("put_object", name, _soon(until), Body=Payload(memoryview(b"lmkv")))
            step = "read"
            bucket.fetch(name, memoryview(bytearray(8)), _soon(until), patient=False)
            step = "emptied"
            bucket.ask("delete_object", _soon(until), Key=name)
    except StoreError as e:
        if not e.definite:
            raise
        raise ConfigError(f"cannot be {step}: {e}", kind=e.kind) from None
    except AbsentError:
        raise ConfigError(f"{bucket.title}: an object that was just written is not there") from None


def _readable(bucket: Bucket, name: str, until: float) -> bool:
    """False: the bucket does not exist, and may be created."""
    try:
        bucket.fetch(name, memoryview(bytearray(1)), _soon(until), patient=False)
    except AbsentError:
        return True
    except StoreError as e:
        if e.code == "NoSuchBucket":
            return False
        if e.code in {"AccessDenied", "403"}:  # a store that lets us read but not list does not say "no such object"
            e.args = (f"{e}; s3:GetObject and s3:ListBucket are needed",)
        raise
    return True


def _create(bucket: Bucket, options: S3Options, until: float) -> None:
    if not options.create:
        text = f"there is no {bucket.title}: create it, correct `bucket`, or set create: true"
        raise ConfigError(text, kind="no-such-bucket")
    place: dict[str, Any] = {}
    if options.endpoint is None and options.region not in {None, "us-east-1"}:
        place = {"CreateBucketConfiguration": {"LocationConstraint": options.region}}
    try:
        bucket.ask("create_bucket", until, **place)
    except StoreError as e:
        if e.code != "BucketAlreadyOwnedByYou":  # another node was quicker
            raise


def _soon(until: float) -> float:
    return min(until, time.monotonic() + SILENCE)
