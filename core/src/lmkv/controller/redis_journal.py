"""Jobs in the Redis of the directory: any controller tells of them, and goes on with what another one has left."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import secrets
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, Final, TypeVar

import redis.asyncio as aioredis
from redis.exceptions import RedisError

from lmkv.controller.journal import KEPT_JOBS, KEPT_SECONDS, Journal
from lmkv.controller.records import Ended, Plan, decode, encode
from lmkv.errors import BackendError, ClosedError, ProtocolError
from lmkv.observe.log import mask

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterable

    from lmkv.controller.records import Event

PREFIX: Final = "lmkv:jobs:"
LEASE_SECONDS: Final = 15.0
"""A controller that has not said for so long that it runs a job has left it."""
ADOPTED_AT_ONCE: Final = 32
_AGAIN_SECONDS: Final = 0.25
_SOCKET_SECONDS: Final = 5.0

# All keys begin with ARGV[1], so that one server (not a cluster) has them all.
_BEGIN: Final = """
local p, id, key = ARGV[1], ARGV[2], ARGV[3]
if key ~= '' then
    local known = redis.call('GET', p .. 'key:' .. key)
    if known then return known end
    redis.call('SET', p .. 'key:' .. key, id, 'EX', ARGV[7])
end
redis.call('RPUSH', p .. 'job:' .. id, ARGV[4])
redis.call('ZADD', p .. 'recent', ARGV[5], id)
redis.call('ZREMRANGEBYRANK', p .. 'recent', 0, -ARGV[8] - 1)
redis.call('SADD', p .. 'open', id)
redis.call('SET', p .. 'owner:' .. id, ARGV[6], 'PX', ARGV[9])
return false
"""
_ADD: Final = """
local p, id, me = ARGV[1], ARGV[2], ARGV[3]
local owner = redis.call('GET', p .. 'owner:' .. id)
if (owner and owner ~= me) or redis.call('SISMEMBER', p .. 'open', id) == 0 then return 0 end
redis.call('RPUSH', p .. 'job:' .. id, ARGV[4])
if ARGV[5] == '1' then
    redis.call('SREM', p .. 'open', id)
    redis.call('SREM', p .. 'cancel', id)
    redis.call('DEL', p .. 'owner:' .. id)
    redis.call('EXPIRE', p .. 'job:' .. id, ARGV[6])
else
    redis.call('SET', p .. 'owner:' .. id, me, 'PX', ARGV[7])
end
return 1
"""
_KEEP: Final = """
local me = ARGV[1]
for _, key in ipairs(KEYS) do
    if redis.call('GET', key) == me then redis.call('PEXPIRE', key, ARGV[2]) end
end
return 1
"""
_RELEASE: Final = """
if redis.call('GET', KEYS[1]) == ARGV[1] then redis.call('DEL', KEYS[1]) end
return 1
"""

Call = TypeVar("Call", bound="Callable[..., Awaitable[Any]]")


def _reported(call: Call) -> Call:
    """Errors of the client library as ours."""

    @functools.wraps(call)
    async def reported(self: RedisJournal, *arguments: Any, **named: Any) -> Any:
        try:
            return await call(self, *arguments, **named)
        except (RedisError, OSError) as error:
            raise BackendError(f"the controller's Redis ({self.place}): {mask(str(error))}") from error

    return reported  # type: ignore[return-value]


class RedisJournal(Journal):
    """Jobs in a Redis that controllers share. A job has one owner, for as long as that one says so.

    Args:
        url: ``redis://…``; may hold a password, which is in no message.
    """

    shared = True

    def __init__(self, url: str) -> None:
        super().__init__()
        self._redis: Any = aioredis.Redis.from_url(
            url, socket_timeout=_SOCKET_SECONDS, socket_connect_timeout=_SOCKET_SECONDS
        )
        self.place = mask(url)
        self._me = secrets.token_hex(8)
        self._locks_held: dict[str, str] = {}

    @_reported
    async def find(self, key: str) -> str | None:
        """See `Journal.find`."""
        found = await self._redis.get(f"{PREFIX}key:{key}")
        return None if found is None else str(found.decode())

    @_reported
    async def begin(self, job: str, plan: Plan) -> str | None:
        """See `Journal.begin`."""
        known = await self._redis.eval(
            _BEGIN, 0, PREFIX, job, plan.key, encode(plan), plan.created, self._me,
            int(KEPT_SECONDS), KEPT_JOBS, int(LEASE_SECONDS * 1000),
        )  # fmt: skip
        return None if known is None else str(known.decode())

    @_reported
    async def add(self, job: str, event: Event) -> None:
        """See `Journal.add`.

        Raises:
            ClosedError: another controller has taken the job over.
        """
        over = "1" if isinstance(event, Ended) else "0"
        done = await self._redis.eval(
            _ADD, 0, PREFIX, job, self._me, encode(event), over, int(KEPT_SECONDS), int(LEASE_SECONDS * 1000)
        )
        if not done:
            raise ClosedError(f"job {job} is another controller's now", kind="superseded")

    @_reported
    async def read(self, job: str) -> list[Event]:
        """See `Journal.read`."""
        try:
            return [decode(line) for line in await self._redis.lrange(f"{PREFIX}job:{job}", 0, -1)]
        except ProtocolError as error:
            raise BackendError(f"job {job} in the controller's Redis ({self.place}): {error}") from error

    @_reported
    async def recent(self, count: int) -> list[str]:
        """See `Journal.recent`."""
        return [each.decode() for each in await self._redis.zrevrange(f"{PREFIX}recent", 0, count - 1)]

    async def forget(self, job: str) -> None:
        """They expire there."""

    @_reported
    async def adopt(self, running: Collection[str]) -> dict[str, list[Event]]:
        """See `Journal.adopt`."""
        adopted: dict[str, list[Event]] = {}
        left = {each.decode() for each in await self._redis.smembers(f"{PREFIX}open")} - set(running)
        for job in sorted(left)[:ADOPTED_AT_ONCE]:
            lease = int(LEASE_SECONDS * 1000)
            if await self._redis.set(f"{PREFIX}owner:{job}", self._me, nx=True, px=lease):
                adopted[job] = await self.read(job)
                if not adopted[job]:
                    await self._redis.srem(f"{PREFIX}open", job)
        return adopted

    @_reported
    async def keep(self, jobs: Collection[str]) -> set[str]:
        """See `Journal.keep`."""
        lease = int(LEASE_SECONDS * 1000)
        if jobs:
            await self._redis.eval(_KEEP, len(jobs), *(f"{PREFIX}owner:{job}" for job in jobs), self._me, lease)
        for name, token in list(self._locks_held.items()):
            await self._redis.eval(_KEEP, 1, name, token, lease)
        return {each.decode() for each in await self._redis.smembers(f"{PREFIX}cancel")} & set(jobs) if jobs else set()

    @_reported
    async def ask_cancel(self, job: str) -> None:
        """See `Journal.ask_cancel`."""
        await self._redis.sadd(f"{PREFIX}cancel", job)
        await self._redis.expire(f"{PREFIX}cancel", int(KEPT_SECONDS))

    @asynccontextmanager
    async def moving(self, namespaces: Iterable[bytes]) -> AsyncIterator[None]:
        """See `Journal.moving`. The lock of a controller that was killed ends with its lease."""
        token = f"{self._me}:{secrets.token_hex(8)}"
        taken: list[str] = []
        try:
            for namespace in sorted(namespaces):
                name = f"{PREFIX}moving:{namespace.hex()}"
                while not await self._lock(name, token):  # noqa: ASYNC110  it is freed in another process
                    await asyncio.sleep(_AGAIN_SECONDS)
                self._locks_held[name] = token
                taken.append(name)
            yield
        finally:
            for name in taken:
                self._locks_held.pop(name, None)
                with contextlib.suppress(BackendError):  # it ends by itself
                    await self._unlock(name, token)

    async def close(self) -> None:
        """See `Journal.close`. What runs here may be adopted at once."""
        with contextlib.suppress(RedisError, OSError):
            for job in await self._redis.smembers(f"{PREFIX}open"):
                await self._redis.eval(_RELEASE, 1, f"{PREFIX}owner:{job.decode()}", self._me)
        await self._redis.aclose()

    @_reported
    async def _lock(self, name: str, token: str) -> bool:
        return bool(await self._redis.set(name, token, nx=True, px=int(LEASE_SECONDS * 1000)))

    @_reported
    async def _unlock(self, name: str, token: str) -> None:
        await self._redis.eval(_RELEASE, 1, name, token)
