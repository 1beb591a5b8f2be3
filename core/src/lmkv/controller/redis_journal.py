"""Jobs in the Redis of the directory: any controller tells of them, and goes on with what another one has left."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Final

from lmkv.controller.journal import KEPT_JOBS, KEPT_SECONDS, Journal
from lmkv.controller.records import Ended, decode, encode
from lmkv.controller.redis_link import PREFIX, Link, Script
from lmkv.errors import BackendError, ClosedError, ProtocolError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Collection, Iterable

    from lmkv.controller.records import Event, Plan

LEASE_SECONDS: Final = 6.0
"""A controller that has not said for so long that it runs a job has left it."""
ADOPTED_AT_ONCE: Final = 32
_AGAIN_SECONDS: Final = 0.25
_LEASE: Final = int(LEASE_SECONDS * 1000)

# All of them may run twice, see `Link`.
# KEYS: job, its owner, idempotency key (or any that is not there), recent, open.
# ARGV: id, plan, when, owner, milliseconds of a lease, jobs and seconds kept.
_BEGIN: Final = Script("""
local known = redis.call('GET', KEYS[3])
if known and known ~= ARGV[1] then return known end
if redis.call('EXISTS', KEYS[1]) == 1 then return false end
redis.call('SET', KEYS[3], ARGV[1], 'EX', ARGV[7])
redis.call('RPUSH', KEYS[1], ARGV[2])
redis.call('ZADD', KEYS[4], ARGV[3], ARGV[1])
redis.call('ZREMRANGEBYRANK', KEYS[4], 0, -ARGV[6] - 1)
redis.call('SADD', KEYS[5], ARGV[1])
redis.call('SET', KEYS[2], ARGV[4], 'PX', ARGV[5])
return false
""")
# KEYS: job, its owner, open. ARGV: id, event, owner, milliseconds of a lease.
_ADD: Final = Script("""
if redis.call('LINDEX', KEYS[1], -1) == ARGV[2] then return 1 end
local owner = redis.call('GET', KEYS[2])
if (owner and owner ~= ARGV[3]) or redis.call('SISMEMBER', KEYS[3], ARGV[1]) == 0 then return 0 end
redis.call('RPUSH', KEYS[1], ARGV[2])
redis.call('SET', KEYS[2], ARGV[3], 'PX', ARGV[4])
return 1
""")
# KEYS: job, its owner, open, cancelled. ARGV: id, event, owner, seconds kept.
_END: Final = Script("""
if redis.call('LINDEX', KEYS[1], -1) == ARGV[2] then return 1 end
local owner = redis.call('GET', KEYS[2])
if (owner and owner ~= ARGV[3]) or redis.call('SREM', KEYS[3], ARGV[1]) == 0 then return 0 end
redis.call('RPUSH', KEYS[1], ARGV[2])
redis.call('EXPIRE', KEYS[1], ARGV[4])
redis.call('DEL', KEYS[2])
redis.call('SREM', KEYS[4], ARGV[1])
return 1
""")
# KEYS: leases. ARGV: who has them, milliseconds.
_KEEP: Final = Script("""
for _, key in ipairs(KEYS) do
    if redis.call('GET', key) == ARGV[1] then redis.call('PEXPIRE', key, ARGV[2]) end
end
return 1
""")
# KEYS: a lease. ARGV: who takes it, milliseconds. Whoever has it already gets it again.
_TAKE: Final = Script("""
local owner = redis.call('GET', KEYS[1])
if owner and owner ~= ARGV[1] then return 0 end
redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])
return 1
""")
# KEYS: leases. ARGV: who gives them back.
_GIVE_BACK: Final = Script("""
for _, key in ipairs(KEYS) do
    if redis.call('GET', key) == ARGV[1] then redis.call('DEL', key) end
end
return 1
""")


class RedisJournal(Journal):
    """Jobs in a Redis that controllers share. A job has one owner, for as long as that one says so.

    All methods raise `BackendError` where the server is away.

    Raises:
        ConfigError: no URL, see `Link`.
    """

    shared = True

    def __init__(self, url: str, *, prefix: str = f"{PREFIX}jobs:") -> None:
        super().__init__()
        self._link = Link(url)
        self._prefix = prefix
        self._me = secrets.token_hex(8)
        self._held: dict[str, str] = {}

    async def find(self, key: str) -> str | None:
        """See `Journal.find`."""
        with self._link.reported():
            found = await self._link.client.get(f"{self._prefix}key:{key}")
        return None if found is None else str(found.decode())

    async def begin(self, job: str, plan: Plan) -> str | None:
        """See `Journal.begin`."""
        p = self._prefix
        keys = (f"{p}job:{job}", self._owner(job), f"{p}key:{plan.key or job}", f"{p}recent", f"{p}open")
        kept = (KEPT_JOBS, int(KEPT_SECONDS))
        known = await self._link.call(_BEGIN, keys, job, encode(plan), repr(plan.created), self._me, _LEASE, *kept)
        return None if known is None else str(known.decode())

    async def add(self, job: str, event: Event) -> None:
        """See `Journal.add`.

        Raises:
            ClosedError: another controller has taken the job over.
        """
        p = self._prefix
        keys = [f"{p}job:{job}", self._owner(job), f"{p}open"]
        if isinstance(event, Ended):
            script, keys, last = _END, [*keys, f"{p}cancel"], int(KEPT_SECONDS)
        else:
            script, last = _ADD, _LEASE
        if not await self._link.call(script, keys, job, encode(event), self._me, last):
            raise ClosedError(f"job {job} is another controller's now", kind="superseded")

    async def read(self, job: str) -> list[Event]:
        """See `Journal.read`."""
        with self._link.reported():
            lines = await self._link.client.lrange(f"{self._prefix}job:{job}", 0, -1)
        try:
            return [decode(line) for line in lines]
        except ProtocolError as error:
            raise BackendError(f"job {job} in the controller's Redis ({self._link.place}): {error}") from error

    async def recent(self, count: int) -> list[str]:
        """See `Journal.recent`."""
        with self._link.reported():
            found = await self._link.client.zrevrange(f"{self._prefix}recent", 0, count - 1)
        return [each.decode() for each in found]

    async def forget(self, job: str) -> None:
        """They expire there."""

    async def adopt(self, running: Collection[str]) -> dict[str, list[Event]]:
        """See `Journal.adopt`."""
        adopted: dict[str, list[Event]] = {}
        left = await self._members("open") - set(running)
        for job in sorted(left)[:ADOPTED_AT_ONCE]:
            if await self._link.call(_TAKE, [self._owner(job)], self._me, _LEASE):
                if events := await self.read(job):
                    adopted[job] = events
                else:
                    await self._forget_open(job)
        return adopted

    async def keep(self, jobs: Collection[str]) -> set[str]:
        """See `Journal.keep`."""
        calls = [(_KEEP, [name], (token, _LEASE)) for name, token in self._held.items()]
        if jobs:
            calls.append((_KEEP, [self._owner(job) for job in jobs], (self._me, _LEASE)))
        await self._link.calls(calls)
        return await self._members("cancel") & set(jobs) if jobs else set()

    async def mine(self, job: str) -> bool:
        """See `Journal.mine`."""
        with self._link.reported():
            owner = await self._link.client.get(self._owner(job))
        return owner is not None and owner.decode() == self._me

    async def ask_cancel(self, job: str) -> None:
        """See `Journal.ask_cancel`."""
        with self._link.reported():
            await self._link.client.sadd(f"{self._prefix}cancel", job)

    @asynccontextmanager
    async def moving(self, namespaces: Iterable[bytes]) -> AsyncIterator[None]:
        """See `Journal.moving`. The lock of a controller that was killed ends with its lease."""
        token = f"{self._me}:{secrets.token_hex(8)}"
        taken: list[str] = []
        try:
            for namespace in sorted(namespaces):
                name = f"{self._prefix}moving:{namespace.hex()}"
                while not await self._link.call(_TAKE, [name], token, _LEASE):  # noqa: ASYNC110  another process has it
                    await asyncio.sleep(_AGAIN_SECONDS)
                self._held[name] = token
                taken.append(name)
            yield
        finally:
            for name in taken:
                self._held.pop(name, None)
            with contextlib.suppress(BackendError):  # they end by themselves
                if taken:
                    await self._link.call(_GIVE_BACK, taken, token)

    async def close(self) -> None:
        """See `Journal.close`. What runs here may be adopted at once."""
        with contextlib.suppress(BackendError):
            if left := await self._members("open"):
                await self._link.call(_GIVE_BACK, [self._owner(job) for job in left], self._me)
            await self._link.close()

    def _owner(self, job: str) -> str:
        return f"{self._prefix}owner:{job}"

    async def _forget_open(self, job: str) -> None:
        with self._link.reported():
            await self._link.client.srem(f"{self._prefix}open", job)

    async def _members(self, name: str) -> set[str]:
        with self._link.reported():
            return {each.decode() for each in await self._link.client.smembers(f"{self._prefix}{name}")}
