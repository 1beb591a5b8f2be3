"""The Redis that controllers share: scripts that run there whole, errors as ours, no password in any message."""

from __future__ import annotations

import asyncio
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final, TypeAlias
from urllib.parse import parse_qsl, urlsplit

import redis.asyncio as aioredis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import NoScriptError, RedisError

from lmkv.errors import BackendError, ConfigError
from lmkv.observe.log import mask

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

PREFIX: Final = "lmkv:fleet:"
"""Begins the name of every key."""
PORT: Final = 6379
CONNECTIONS: Final = 16
CONNECT_SECONDS: Final = 2.0
SECONDS: Final = 5.0
"""For an answer. A call is tried once more on a new connection: all scripts may run twice."""

_FORMS: Final = "write redis://[user:password@]host[:port][/database], rediss:// for TLS, or unix:///path"
_OPTIONS: Final = {
    "redis": frozenset[str](),
    "rediss": frozenset({"ssl_ca_certs", "ssl_certfile", "ssl_keyfile"}),
    "unix": frozenset({"db"}),
}


class Script:
    """A script by its text; `Link` loads it into the server when that does not know it."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.sha = ""


Call: TypeAlias = tuple[Script, "Sequence[bytes | str]", "Sequence[bytes | str | int]"]
"""A script, its keys, its arguments."""


class Link:
    """Connections to one server. On the loop on which it is first used.

    Args:
        url: ``redis://[user:password@]host[:port][/db]``, ``rediss://…`` for TLS (with ``?ssl_ca_certs=FILE``,
            ``ssl_certfile``, ``ssl_keyfile``), ``unix://[user:password@]/path[?db=n]``.

    Attributes:
        client: redis-py's. What it raises becomes a `BackendError` within `reported`.
        place: the URL without user and password.

    Raises:
        ConfigError: no such URL.
    """

    def __init__(self, url: str) -> None:
        self.place = _place(url)
        times = {"timeout": SECONDS, "socket_timeout": SECONDS, "socket_connect_timeout": CONNECT_SECONDS}
        try:
            pool: Any = aioredis.BlockingConnectionPool.from_url(
                url, max_connections=CONNECTIONS, retry=Retry(NoBackoff(), 1), **times
            )
        except (ValueError, TypeError):
            raise ConfigError(f"no URL of a Redis: {_FORMS}") from None
        self.client: Any = aioredis.Redis(connection_pool=pool)

    @contextmanager
    def reported(self) -> Iterator[None]:
        """Errors of the client library as `BackendError`."""
        try:
            yield
        except (RedisError, OSError, asyncio.TimeoutError) as error:
            said = mask(f"{type(error).__name__}: {error}")
            raise BackendError(f"the controller's Redis ({self.place}): {said}") from error

    async def call(self, script: Script, keys: Sequence[bytes | str], *arguments: bytes | str | int) -> Any:
        """Run a script.

        Raises:
            BackendError: the server is away, or refuses.
        """
        return (await self.calls([(script, keys, arguments)]))[0]

    async def calls(self, calls: Sequence[Call]) -> list[Any]:
        """Run scripts one after the other, in one round trip. Those that have run when one fails have run.

        Raises:
            BackendError: the server is away, or refuses.
        """
        if not calls:
            return []
        scripts = {script for script, _, _ in calls}
        with self.reported():
            await self._load(script for script in scripts if not script.sha)
            try:
                return await self._run(calls)
            except NoScriptError:  # it was started anew
                await self._load(scripts)
                return await self._run(calls)

    async def _run(self, calls: Sequence[Call]) -> list[Any]:
        pipe = self.client.pipeline(transaction=False)
        for script, keys, arguments in calls:
            pipe.evalsha(script.sha, len(keys), *keys, *arguments)
        said: list[Any] = await pipe.execute()
        return said

    async def _load(self, scripts: Iterable[Script]) -> None:
        for script in scripts:
            script.sha = await self.client.script_load(script.text)

    async def close(self) -> None:
        """Let go of all connections. Idempotent."""
        with self.reported():
            await self.client.aclose()
            await self.client.connection_pool.disconnect()


def _place(url: str) -> str:
    """What a URL leads to, without user and password.

    Raises:
        ConfigError: no such URL. Says nothing of it, for any part may be a password that was not percent-encoded.
    """
    try:
        parts = urlsplit(url)
        port = parts.port or PORT
    except ValueError:
        raise ConfigError(f"no URL of a Redis, the port is no number: {_FORMS}") from None
    options = _OPTIONS.get(parts.scheme)
    if options is None:
        raise ConfigError(f"no URL of a Redis: {_FORMS}")
    given = dict(parse_qsl(parts.query, keep_blank_values=True))
    if given.keys() - options:
        raise ConfigError(f"no URL of a Redis: {parts.scheme}:// has the options {sorted(options) or 'none'}")
    if "@" in parts.path or parts.netloc.count("@") > 1 or parts.fragment:
        raise ConfigError("no URL of a Redis: '@', '/', '?' and '#' in user or password are written %40, %2F, %3F, %23")
    database = parts.path.strip("/") or "0"
    if parts.scheme == "unix":
        if len(parts.path) > 1:
            return f"unix://{parts.path}"
        raise ConfigError(f"no URL of a Redis, no path: {_FORMS}")
    if not parts.hostname or not (database.isascii() and database.isdecimal()):
        raise ConfigError(f"no URL of a Redis, no host or a database that is no number: {_FORMS}")
    host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
    return f"{parts.scheme}://{host}:{port}/{database}"
