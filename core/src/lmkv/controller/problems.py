"""What a request is refused with: a status, a stable word, a message, and what there is instead of what was asked for.

Every error of the API has the same body: ``{"error": {"kind", "message", "known"}}``. None says what the client sent.
"""

from __future__ import annotations

from http import HTTPStatus
from typing import TYPE_CHECKING, Final

import msgspec

if TYPE_CHECKING:
    from collections.abc import Iterable

    from starlette.types import Send

KNOWN_MAX: Final = 100
"""Names in `known`, at most."""


class Problem(Exception):  # noqa: N818  raised for an answer, not for a fault
    """Ends a request with an error.

    Attributes:
        status: HTTP status.
        kind: stable word for programs.
        known: what exists of the kind that was asked for, sorted.
        headers: more headers of the answer.
    """

    def __init__(
        self,
        status: int,
        kind: str,
        message: str,
        known: Iterable[str] | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = int(status)
        self.kind = kind
        self.message = message
        self.known = None if known is None else sorted(known)[:KNOWN_MAX]
        self.headers = headers or {}

    def body(self) -> dict[str, object]:
        """The answer's JSON."""
        error: dict[str, object] = {"kind": self.kind, "message": self.message}
        if self.known is not None:
            error["known"] = self.known
        return {"error": error}


def unknown(what: str, name: str, known: Iterable[str], where: str = "") -> Problem:
    """404 for a name that nothing has; lists what there is."""
    names = sorted(known)
    listed = ", ".join(names[:KNOWN_MAX]) or "none"
    plural = f"{what[:-1]}ies" if what.endswith("y") else f"{what}s"
    message = f"there is no {what} {name!r}{where}; {plural}: {listed}"
    return Problem(HTTPStatus.NOT_FOUND, f"unknown-{what}", message, names)


def conflict(kind: str, message: str) -> Problem:
    """409: the request contradicts what is there."""
    return Problem(HTTPStatus.CONFLICT, kind, message)


async def send_problem(problem: Problem, send: Send) -> None:
    """Answer an HTTP request outside the framework."""
    body = msgspec.json.encode(problem.body())
    headers = {"content-type": "application/json", "content-length": str(len(body)), **problem.headers}
    raw = [(name.lower().encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()]
    await send({"type": "http.response.start", "status": problem.status, "headers": raw})
    await send({"type": "http.response.body", "body": body})
