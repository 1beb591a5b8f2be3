"""The directory in a Redis (or Valkey), so that several controllers have the same one and any of them may die.

A chunk is a set of places under `<prefix>d:<namespace><digest>`, both as raw bytes. A place is a number that stands for
a tier of a node from one resync to the next; `<prefix>place` names those that hold. So a node whose facts no longer
hold costs one command and no sweep: the numbers are left out of the hash, and what sets say about them means nothing.
Chunks expire, and nodes tell anew what they have before that.

Not for a Redis Cluster: a look-up is one script over keys of all slots.
"""

from __future__ import annotations

import hashlib
import secrets
from typing import TYPE_CHECKING, Final

import msgspec

from lmkv.controller.directory import Directory, Place, Placement, Size, check_blob, placement
from lmkv.controller.redis_link import PREFIX, Link, Script
from lmkv.errors import BackendError
from lmkv.types import DIGEST_BYTES

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from lmkv.agent.messages import Change
    from lmkv.controller.redis_link import Call

KEEP_SECONDS: Final = 24 * 3600
"""After so long without a word about it a chunk expires."""
STEP: Final = 512
"""Chunks in one script, at most: it keeps the server for about half a millisecond."""

_encode: Final = msgspec.msgpack.encode
_decode: Final = msgspec.msgpack.Decoder(tuple[str, int]).decode
_CROWDED: Final = 8
"""At each such number of places those that no longer hold are taken out of a set."""

# KEYS: names of places, version of these, two hashes of a node, tier → place: those that hold, those of a resync.
# (Among the values of the hashes is also the token of who made them, which is no place.)
_BEGIN: Final = Script("""
for _, place in ipairs(redis.call('HVALS', KEYS[4])) do redis.call('HDEL', KEYS[1], place) end
redis.call('DEL', KEYS[4])
redis.call('HSET', KEYS[4], 'token', ARGV[1])
redis.call('INCR', KEYS[2])
return redis.call('HGETALL', KEYS[3])
""")
# KEYS: names of places, version of these, counter of places, a hash of a node. ARGV: token, tier, name.
_PLACE: Final = Script("""
if redis.call('HGET', KEYS[4], 'token') ~= ARGV[1] then return false end
local there = redis.call('HGET', KEYS[4], ARGV[2])
if there then return there end
local place = redis.call('INCR', KEYS[3])
redis.call('HSET', KEYS[1], place, ARGV[3])
redis.call('HSET', KEYS[4], ARGV[2], place)
redis.call('INCR', KEYS[2])
return tostring(place)
""")
_END: Final = Script("""
if redis.call('HGET', KEYS[4], 'token') ~= ARGV[1] then return 0 end
for _, place in ipairs(redis.call('HVALS', KEYS[3])) do redis.call('HDEL', KEYS[1], place) end
redis.call('RENAME', KEYS[4], KEYS[3])
redis.call('INCR', KEYS[2])
return 1
""")
_DROP: Final = Script("""
for _, name in ipairs({KEYS[3], KEYS[4]}) do
    for _, place in ipairs(redis.call('HVALS', name)) do redis.call('HDEL', KEYS[1], place) end
    redis.call('DEL', name)
end
redis.call('INCR', KEYS[2])
return 1
""")
# KEYS: names of places, then chunks. ARGV: place, seconds, crowd.
_STORE: Final = Script("""
if redis.call('HEXISTS', KEYS[1], ARGV[1]) == 0 then return 0 end
for i = 2, #KEYS do
    local key = KEYS[i]
    if redis.call('SADD', key, ARGV[1]) == 1 and redis.call('SCARD', key) % ARGV[3] == 0 then
        for _, place in ipairs(redis.call('SMEMBERS', key)) do
            if redis.call('HEXISTS', KEYS[1], place) == 0 then redis.call('SREM', key, place) end
        end
    end
    redis.call('EXPIRE', key, ARGV[2])
end
return 1
""")
_REMOVE: Final = Script("""
for _, key in ipairs(KEYS) do redis.call('SREM', key, unpack(ARGV)) end
return 1
""")
# KEYS: version of the names of places, then chunks.
_LOOK: Final = Script("""
local said = {redis.call('GET', KEYS[1]) or '0'}
for i = 2, #KEYS do said[i] = table.concat(redis.call('SMEMBERS', KEYS[i]), ' ') end
return said
""")


class _Told:
    """What this controller knows of the places of one node."""

    def __init__(self, token: str, current: dict[int, bytes]) -> None:
        self.token = token
        self.current = current
        self.fresh: dict[int, bytes] | None = None


class RedisDirectory(Directory):
    """Shared by all controllers whose URL leads to the same database.

    Args:
        url: see `Link`.
        keep: seconds after which a chunk of which nothing was heard expires; a node tells all anew in a third of them.
        prefix: begins the name of every key.

    Raises:
        ConfigError: no such URL.
    """

    def __init__(self, url: str, *, keep: float = KEEP_SECONDS, prefix: str = PREFIX) -> None:
        self.refresh = keep / 3
        self._keep = max(1, int(keep))
        self._link = Link(url)
        self._prefix = prefix
        self._names, self._version_key, self._next = (f"{prefix}{name}" for name in ("place", "version", "next"))
        self._chunk = f"{prefix}d:".encode()
        self._nodes: dict[str, _Told] = {}
        self._places: dict[bytes, Place] = {}
        self._version = b""

    async def apply(self, node: str, changes: Sequence[Change]) -> None:
        """As the contract says."""
        for change in changes:
            check_blob(change.namespace, change.removed)
            check_blob(change.namespace, change.stored)
        told = self._nodes.get(node) or await self._joined(node)
        calls: list[Call] = []
        for change in changes:
            places = [tiers[change.tier] for tiers in (told.current, told.fresh or {}) if change.tier in tiers]
            if places:
                calls.extend((_REMOVE, keys, places) for keys in self._keys(change.namespace, change.removed))
            calls += await self._storing(node, told, change.namespace, change.tier, change.stored)
        await self._run(node, calls)

    async def begin(self, node: str) -> None:
        """As the contract says."""
        token = secrets.token_hex(8)
        there = await self._link.call(_BEGIN, self._of(node), token)
        told = self._nodes[node] = _Told(token, _tiers(dict(zip(there[::2], there[1::2], strict=True))))
        told.fresh = {}

    async def page(self, node: str, namespace: bytes, tier: int, digests: bytes) -> None:
        """As the contract says."""
        check_blob(namespace, digests)
        told = self._nodes.get(node) or await self._joined(node)
        await self._run(node, await self._storing(node, told, namespace, tier, digests))

    async def end(self, node: str) -> bool:
        """As the contract says; False also when another controller has begun a resync of the node since."""
        told = self._nodes.get(node)
        if told is None or told.fresh is None or not await self._link.call(_END, self._of(node), told.token):
            return False
        told.current, told.fresh = told.fresh, None
        return True

    async def drop(self, node: str) -> None:
        """As the contract says; one short script, whatever the node had."""
        self._nodes.pop(node, None)
        await self._link.call(_DROP, self._of(node))

    async def lookup(self, namespace: bytes, digests: bytes) -> Placement:
        """As the contract says, in one round trip, or two when places have changed since the last one."""
        check_blob(namespace, digests)
        return placement(*await self._look(namespace, digests))

    async def holders(self, namespace: bytes, digests: bytes) -> list[tuple[Place, ...]]:
        """As the contract says."""
        check_blob(namespace, digests)
        groups, which = await self._look(namespace, digests)
        return [groups[group] for group in which]

    async def size(self) -> Size:
        """Keys of the database, about: those of others, and chunks without a place that have not expired, included."""
        with self._link.reported():
            return Size(await self._link.client.dbsize(), 0)

    async def close(self) -> None:
        """Let go of connections."""
        await self._link.close()

    async def _look(self, namespace: bytes, digests: bytes) -> tuple[list[tuple[Place, ...]], list[int]]:
        """Different sets of places, and which of them each digest has."""
        calls: list[Call] = [(_LOOK, [self._version_key, *keys], []) for keys in self._keys(namespace, digests)]
        said: list[bytes] = []
        version = self._version
        for answer in await self._link.calls(calls):
            version = answer[0]
            said += answer[1:]
        if version != self._version:
            await self._read_names()
        groups = {text: number for number, text in enumerate(dict.fromkeys(said))}
        return [self._named(text) for text in groups], [groups[text] for text in said]

    async def _read_names(self) -> None:
        with self._link.reported():
            pipe = self._link.client.pipeline(transaction=True)
            version, names = await pipe.get(self._version_key).hgetall(self._names).execute()
        self._places = {place: Place(*_decode(name)) for place, name in names.items()}
        self._version = version or b"0"

    def _named(self, text: bytes) -> tuple[Place, ...]:
        return tuple(sorted({self._places[each] for each in text.split() if each in self._places}))

    async def _storing(self, node: str, told: _Told, namespace: bytes, tier: int, digests: bytes) -> list[Call]:
        if not digests:
            return []
        tiers, name = (told.current, "now") if told.fresh is None else (told.fresh, "new")
        if tier not in tiers:
            keys = [self._names, self._version_key, self._next, self._node(node, name)]
            place = await self._link.call(_PLACE, keys, told.token, tier, _encode(Place(node, tier)))
            if place is None:
                raise self._lost(node)
            tiers[tier] = place
        arguments: list[bytes | str | int] = [tiers[tier], self._keep, _CROWDED]
        return [(_STORE, [self._names, *keys], arguments) for keys in self._keys(namespace, digests)]

    async def _run(self, node: str, calls: Sequence[Call]) -> None:
        if not all(await self._link.calls(calls)):
            raise self._lost(node)

    def _lost(self, node: str) -> BackendError:
        self._nodes.pop(node, None)
        return BackendError(f"what was told of node {node} has been dropped, by another controller or with the store")

    async def _joined(self, node: str) -> _Told:
        """Go on with what another controller was told of a node, outside of a resync."""
        now = self._node(node, "now")
        with self._link.reported():
            pipe = self._link.client.pipeline(transaction=True)
            _, there = await pipe.hsetnx(now, "token", secrets.token_hex(8)).hgetall(now).execute()
        told = self._nodes[node] = _Told(there[b"token"].decode(), _tiers(there))
        return told

    def _keys(self, namespace: bytes, digests: bytes) -> Iterator[list[bytes]]:
        """Names of chunks, in lots for one script."""
        stem = self._chunk + namespace
        for start in range(0, len(digests), STEP * DIGEST_BYTES):
            end = min(len(digests), start + STEP * DIGEST_BYTES)
            yield [stem + digests[at : at + DIGEST_BYTES] for at in range(start, end, DIGEST_BYTES)]

    def _of(self, node: str) -> list[str]:
        return [self._names, self._version_key, self._node(node, "now"), self._node(node, "new")]

    def _node(self, node: str, name: str) -> str:
        # A name is an operator's text, and no part of a key.
        return f"{self._prefix}{name}:{hashlib.sha256(node.encode()).hexdigest()[:32]}"


def _tiers(there: dict[bytes, bytes]) -> dict[int, bytes]:
    return {int(tier): place for tier, place in there.items() if tier != b"token"}
