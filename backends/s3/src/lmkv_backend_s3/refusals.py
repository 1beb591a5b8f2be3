"""What went wrong, in our words: by what can be done about it."""

from __future__ import annotations

import http.client
import re
import ssl
from typing import Final

from botocore.exceptions import (
    BotoCoreError,
    ClientError,
    HTTPClientError,
    NoCredentialsError,
    PartialCredentialsError,
)
from botocore.exceptions import (
    ConnectionError as BotoConnectionError,
)
from botocore.parsers import ResponseParserError

from lmkv.errors import BackendError

BUSY: Final = {429, 500, 502, 503, 504}
_BUSY_CODES: Final = {
    "BandwidthLimitExceeded",
    "InternalError",
    "OperationAborted",
    "PriorRequestNotComplete",
    "RequestLimitExceeded",
    "RequestTimeout",
    "ServiceUnavailable",
    "SlowDown",
    "Throttling",
    "ThrottlingException",
    "TooManyRequests",
}
_ABSENT: Final = {"NoSuchKey", "NotFound", "404"}
_BEYOND: Final = {"InvalidRange", "416"}
_ADVICE: Final = {
    "403": "the keys are wrong or may not do this; `lmkv check` tells which",
    "404": "there is no such bucket, or no such object",
    "AccessDenied": "these keys may not do this: see the policy in docs/how-to/s3.md",
    "AllAccessDisabled": "the store has closed this bucket",
    "AuthorizationHeaderMalformed": "`region` is not that of the bucket",
    "ExpiredToken": "the session token has expired: renew it, or use role_arn, which renews by itself",
    "IllegalLocationConstraintException": "`region` is not that of the bucket",
    "InvalidAccessKeyId": "the store does not know this access key: correct access_key",
    "InvalidBucketName": "correct `bucket`",
    "InvalidStorageClass": "the store does not have this storage_class",
    "InvalidToken": "session_token is wrong, or does not belong to access_key",
    "MethodNotAllowed": "`endpoint` speaks another protocol, or does not offer this",
    "MissingContentMD5": "the store wants checksums: set checksums: true",
    "InvalidRequest": "the store wants something else of this request; with Object Lock set checksums: true",
    "NoSuchBucket": "create it, correct `bucket`, or set create: true",
    "NotImplemented": "the store does not offer this",
    "PermanentRedirect": "`region` or `endpoint` is not that of the bucket",
    "RequestTimeTooSkewed": "the clock of this machine is wrong",
    "SignatureDoesNotMatch": "secret_key is not that of access_key",
    "XAmzContentSHA256Mismatch": "the store wants signed payloads: set sign_payload: always",
}


_NO_KEYS: Final = (
    "boto3 found no keys: set access_key and secret_key, or profile, or give boto3 what it looks for (environment,"
    " ~/.aws, instance role)"
)
_NOT_TRUSTED: Final = (
    "the server's certificate is not trusted ({}): set ca_bundle, or the name in `endpoint` that it was made for"
)
_TROUBLES: Final[tuple[tuple[tuple[type[Exception], ...], str, bool, str], ...]] = (
    ((ssl.SSLCertVerificationError,), "certificate", True, _NOT_TRUSTED),
    ((TimeoutError,), "timeout", False, "no answer in time"),
    ((NoCredentialsError, PartialCredentialsError), "no-credentials", True, _NO_KEYS),
    (
        (OSError, http.client.HTTPException, BotoConnectionError, HTTPClientError),
        "unreachable",
        False,
        "cannot reach the store: {}",
    ),
    ((ResponseParserError,), "unreachable", False, "the answer is no S3: is `endpoint` right?"),
    ((BotoCoreError,), "client", True, "{}"),
)
"""Errors that are no answer of S3, most special first: code, whether trying again is of no use, what to say."""


class AbsentError(Exception):
    """There is no such object."""


class BeyondError(Exception):
    """The range asked for begins behind the object's end."""


class StoreError(BackendError):
    """The store did not do what it was asked to.

    Attributes:
        code: S3's word for it, or ours: ``unreachable``, ``timeout``, ``certificate``, ``no-credentials``.
        definite: it is there and refuses: trying again without a change will not help.
    """

    def __init__(self, message: str, *, code: str, definite: bool) -> None:
        super().__init__(message, kind=_kind(code), retryable=not definite)
        self.code = code
        self.definite = definite


def explained(what: str, error: Exception) -> Exception:
    """`AbsentError`, `BeyondError` or a `StoreError` that says what was being done and what to do.

    Errors that are no answer of a store or network come back as they are.
    """
    if isinstance(error, ClientError):
        return _answered(what, error)
    for kinds, code, definite, text in _TROUBLES:
        if isinstance(error, kinds):
            reason = getattr(error, "verify_message", "") or str(error) or type(error).__name__
            return StoreError(f"{what}: {text.format(reason)}", code=code, definite=definite)
    return error


def _answered(what: str, error: ClientError) -> Exception:
    about = error.response.get("Error", {})
    code = str(about.get("Code") or "")
    status = int(error.response.get("ResponseMetadata", {}).get("HTTPStatusCode") or 0)
    if error.operation_name == "AssumeRole":
        what = f"{what}: assuming role_arn"
    elif code in _ABSENT:
        return AbsentError()
    elif code in _BEYOND:
        return BeyondError()
    if status in BUSY or code in _BUSY_CODES:
        return StoreError(f"{what}: the store is busy: {code} ({status})", code=code, definite=False)
    said = str(about.get("Message") or "").strip().rstrip(".")
    advice = _ADVICE.get(code) or _ADVICE.get(str(status), "")
    text = ": ".join(part for part in (what, code, said) if part)
    return StoreError(f"{text}; {advice}" if advice else text, code=code, definite=True)


def _kind(code: str) -> str:
    """``NoSuchBucket`` → ``no-such-bucket``: kinds are words with hyphens."""
    return re.sub(r"(?<=[a-z])(?=[A-Z])", "-", code).lower() or "backend"
