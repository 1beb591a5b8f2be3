"""What a client is told when the proxy itself has to answer, in OpenAI's shape; and how an engine can fail.

ApiError        becomes the answer to the client
EngineError     an engine did not answer: another may; kind `connect`, `closed`, `silent` or `protocol`
"""

from __future__ import annotations

from http import HTTPStatus

import msgspec

TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "not_found_error",
    405: "invalid_request_error",
    413: "invalid_request_error",
    429: "rate_limit_error",
}


class ApiError(Exception):
    """An answer that is an error.

    Attributes:
        status: HTTP status.
        code: stable word for programs.
        param: the field of the request that is wrong, where it is one.
        retry_after: seconds after which the same request may succeed.
    """

    def __init__(
        self, status: int, message: str, *, code: str, param: str | None = None, retry_after: float | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.param = param
        self.retry_after = retry_after

    def body(self) -> bytes:
        """The JSON of OpenAI's errors."""
        kind = TYPES.get(self.status, "server_error")
        error = {"message": str(self), "type": kind, "code": self.code, "param": self.param}
        return msgspec.json.encode({"error": error})

    def headers(self) -> list[tuple[bytes, bytes]]:
        """Those of the answer, without its length."""
        found = [(b"content-type", b"application/json")]
        if self.retry_after is not None:
            found.append((b"retry-after", b"%d" % max(1, round(self.retry_after))))
        if self.status == HTTPStatus.UNAUTHORIZED:
            found.append((b"www-authenticate", b"Bearer"))
        return found


class EngineError(Exception):
    """An engine (or the controller) did not answer, or broke off.

    Attributes:
        kind: `connect` (nobody is there), `closed` (it went), `silent` (too late), `protocol` (that was no HTTP).
    """

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind
