"""Whether objects are there, at a fraction of the work that boto3 makes of each HEAD.

boto3 builds every request from the model of the service and the rules of its endpoints, and reads every answer by that
model. For HEADs of one bucket all but the key comes out the same. So the first is boto3's, and what it was about to
sign is the pattern of those that follow: boto3's signer signs them, with keys renewed as ever, our transport carries
them. What is answered neither by yes nor by no is asked again by boto3, which follows redirects and knows what may have
become wrong; then the pattern is taken anew.
"""

from __future__ import annotations

import http.client
import threading
from typing import TYPE_CHECKING, Any, Final, NamedTuple
from urllib.parse import quote

from botocore.awsrequest import AWSRequest
from botocore.exceptions import ClientError

from lmkv_backend_s3.refusals import BUSY, AbsentError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from botocore.awsrequest import AWSPreparedRequest

    from lmkv_backend_s3.transport import Transport

_OPERATION: Final = "HeadObject"
_ANEW: Final = ("signing", "retries", "endpoint_properties")
"""Parts of a request's context that signing may change."""
_OF_ONE: Final = "amz-sdk-"
"""Begins headers that name one call of boto3."""


class Pattern(NamedTuple):
    """What HEADs have in common."""

    base: str
    """Of the URL: all up to the key."""
    headers: Mapping[str, str]
    context: Mapping[str, Any]
    signer: Any

    def request(self, key: str) -> AWSPreparedRequest:
        """One of them, signed now."""
        request = AWSRequest(method="HEAD", url=self.base + _quoted(key), headers=self.headers)
        request.context.update(self.context)
        for name in _ANEW:
            if name in self.context:
                request.context[name] = dict(self.context[name])
        self.signer.sign(_OPERATION, request)
        return request.prepare()


class Heads:
    """HEADs of objects of one bucket. Thread-safe; each inside an exchange of the transport.

    Args:
        client: boto3's.
        params: of each HEAD, the bucket's name among them.
    """

    def __init__(self, client: Any, transport: Transport, params: Mapping[str, Any]) -> None:
        self._client = client
        self._transport = transport
        self._params = params
        self._pattern: Pattern | None = None
        self._here = threading.local()
        client.meta.events.register_first(f"before-sign.s3.{_OPERATION}", self._learn)

    def exists(self, key: str) -> bool:
        """True, or AbsentError; raises what boto3 raises, or the transport."""
        pattern = self._pattern
        if pattern is not None:
            status = self._transport.send(pattern.request(key)).status_code
            if status == http.client.OK:
                return True
            if status == http.client.NOT_FOUND:
                raise AbsentError
            if status in BUSY:  # such an answer has no words
                about = {"Error": {"Code": str(status)}, "ResponseMetadata": {"HTTPStatusCode": status}}
                raise ClientError(about, _OPERATION)
            self._pattern = None
        self._here.key = key
        try:
            self._client.head_object(Key=key, **self._params)
        finally:
            self._here.key = None
        return True

    def _learn(self, request: AWSRequest, request_signer: Any, **_: Any) -> None:
        """boto3 is about to sign a request of this thread."""
        key: str | None = getattr(self._here, "key", None)
        if key is None or request.params or not request.url.endswith(f"/{_quoted(key)}"):
            return
        base = request.url.removesuffix(_quoted(key))
        headers = {name: value for name, value in request.headers.items() if not name.lower().startswith(_OF_ONE)}
        self._pattern = Pattern(base, headers, dict(request.context), request_signer)


def _quoted(key: str) -> str:
    """As botocore writes it into a URL."""
    return quote(key, safe="/-_.~")
