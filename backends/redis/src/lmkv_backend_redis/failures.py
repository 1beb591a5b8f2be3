"""What an error of redis-py or of a socket means, in words for people and without secrets."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final
from urllib.parse import quote

from redis import exceptions
from redis.sentinel import MasterNotFoundError

from lmkv.errors import BackendError

if TYPE_CHECKING:
    from pydantic import SecretStr

    from lmkv_backend_redis.options import RedisOptions, Target

ERRORS: Final = (exceptions.RedisError, exceptions.RedisClusterException, OSError)
"""What redis-py raises; its cluster's errors are a family of their own."""
MASK: Final = "**********"
DEFINITE: Final = frozenset({"auth", "permission", "database", "tls", "limit"})
"""Kinds that no waiting changes: somebody has to change the configuration or the store."""
_SHORTEST: Final = 4
"""Characters below which a secret is not looked for in messages: too much else would be hidden."""


class Failures:
    """Explains the errors of one store.

    Args:
        target: where it is, for the messages.
        options: whose secrets appear in no message, should redis-py or the server ever repeat one.
    """

    def __init__(self, target: Target, options: RedisOptions) -> None:
        self._where = str(target)
        self._secrets: list[str] = []
        tls = target.tls
        for secret in (target.password, options.sentinel_password, None if tls is None else tls.key_password):
            self._secrets += _spellings(secret)

    def explain(self, operation: str, error: BaseException) -> BackendError:
        """The error to raise; its `kind` is one of `DEFINITE` where waiting does not help."""
        text = " ".join(str(error).split()).rstrip(".") or type(error).__name__
        kind, meaning = _meaning(error, text)
        if isinstance(error, MasterNotFoundError):
            text = text.partition(" : ")[0]  # what follows are redis-py's clients with all that they consist of
        for secret in self._secrets:
            text = text.replace(secret, MASK)
        message = f"{self._where}: {operation}: {f'{meaning} ({text})' if meaning else text}"
        return BackendError(message, kind=kind, retryable=kind not in DEFINITE)


def _meaning(error: BaseException, text: str) -> tuple[str, str]:  # noqa: C901, PLR0911  a table
    """Kind, and what to do."""
    code = text.split(" ", 1)[0]
    if isinstance(error, exceptions.NoPermissionError) or code == "NOPERM":
        return "permission", "the ACL user may not do this; see the page of this backend for what it needs"
    if isinstance(error, exceptions.AuthenticationError) or code in {"WRONGPASS", "NOAUTH"}:
        return "auth", "the store refuses the login: check username and password"
    if "invalid password" in text.lower() or "invalid username-password" in text.lower():
        return "auth", "the store refuses the login: check username and password"
    if "DB index is out of range" in text or "Invalid Database" in text:
        return "database", "the store has no such database: check db"
    if "CERTIFICATE_VERIFY_FAILED" in text:
        return "tls", "the server's certificate is not trusted: check tls.ca, or the host name"
    if "ALERT_CERTIFICATE_REQUIRED" in text or "ALERT_UNKNOWN_CA" in text or "ALERT_BAD_CERTIFICATE" in text:
        return "tls", "the server does not accept the client's certificate: check tls.cert and tls.key"
    if "EOF occurred in violation of protocol" in text:
        return "connection", "the server ended TLS: does it ask for a client's certificate (tls.cert, tls.key)?"
    if "WRONG_VERSION_NUMBER" in text or "record layer failure" in text:
        return "tls", "the server speaks no TLS there"
    if "refused" in text.lower() and isinstance(error, ERRORS):
        return "connection", "nobody listens there: is the server running?"
    if isinstance(error, MasterNotFoundError):
        return "connection", "no sentinel that answers knows the service: are they running, is service right?"
    if isinstance(error, (exceptions.TimeoutError, TimeoutError)):
        return "deadline", "no answer in time"
    if isinstance(error, (exceptions.ConnectionError, OSError)):
        return "connection", ""
    return (error.kind, "") if isinstance(error, BackendError) else ("backend", "")


def _spellings(secret: SecretStr | None) -> list[str]:
    text = "" if secret is None else secret.get_secret_value()
    return [] if len(text) < _SHORTEST else [text, quote(text, safe=""), quote(text)]
