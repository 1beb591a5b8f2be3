"""The roster in the Redis that controllers share: each of them sees all nodes, and reaches those of the others.

A record is dropped when its key under `<prefix>alive:` has expired; every message of a node puts that off. Messages for
a node that is connected elsewhere go through a channel of its controller. They may be lost with that one: whoever sent
a command sends it again when nothing is heard of it.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import time
from typing import TYPE_CHECKING, Final

import msgspec
from redis.exceptions import RedisError

from lmkv.agent import messages as m
from lmkv.controller.redis_link import PREFIX, Link, Script
from lmkv.controller.roster import NodeRecord, Roster
from lmkv.errors import BackendError, ProtocolError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from lmkv.agent.messages import FromController, Progress

_AGAIN_SECONDS: Final = 0.5
"""Between two tries to listen."""
_SEEN_SHARE: Final = 8
"""What a node says puts its end off once in such a part of the time-out."""

_log = logging.getLogger(__name__)
_encode: Final = msgspec.msgpack.Encoder().encode
_record: Final = msgspec.msgpack.Decoder(NodeRecord).decode
_command: Final = msgspec.msgpack.Decoder(tuple[str, bytes]).decode
_progress: Final = msgspec.msgpack.Decoder(tuple[str, str, bytes]).decode

# KEYS: alive, records, namespaces. ARGV: connection, milliseconds, name, record, then pairs of namespace and text.
_REGISTER: Final = Script("""
local before = redis.call('HGET', KEYS[2], ARGV[3])
redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])
redis.call('HSET', KEYS[2], ARGV[3], ARGV[4])
for i = 5, #ARGV, 2 do redis.call('HSET', KEYS[3], ARGV[i], ARGV[i + 1]) end
return before
""")
_UPDATE: Final = Script("""
if redis.call('GET', KEYS[1]) ~= ARGV[1] then return 0 end
redis.call('PEXPIRE', KEYS[1], ARGV[2])
redis.call('HSET', KEYS[2], ARGV[3], ARGV[4])
for i = 5, #ARGV, 2 do redis.call('HSET', KEYS[3], ARGV[i], ARGV[i + 1]) end
return 1
""")
_SEEN: Final = Script("""
if redis.call('GET', KEYS[1]) ~= ARGV[1] then return 0 end
return redis.call('PEXPIRE', KEYS[1], ARGV[2])
""")
_REMOVE: Final = Script("""
if redis.call('EXISTS', KEYS[1]) == 1 or redis.call('HGET', KEYS[2], ARGV[1]) ~= ARGV[2] then return 0 end
return redis.call('HDEL', KEYS[2], ARGV[1])
""")


class RedisRoster(Roster):
    """Shared by all controllers whose URL leads to the same database, see `Link`.

    Raises:
        ConfigError: no such URL.
    """

    def __init__(self, url: str, timeout: float, *, prefix: str = PREFIX) -> None:
        super().__init__(timeout)
        self._link = Link(url)
        self._prefix = prefix
        self._records = f"{prefix}nodes"
        self._spaces = f"{prefix}namespaces"
        self._everybody = f"{prefix}progress"
        self._milliseconds = max(1, round(timeout * 1000))
        self._put_off: dict[str, float] = {}  # connection → when it was put off last
        self._texts: dict[bytes, str] = {}
        self._listening: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Begin to listen.

        Raises:
            BackendError: the server is away, or refuses.
        """
        with self._link.reported():
            await self._link.client.ping()
        ready = asyncio.Event()
        self._listening = asyncio.create_task(self._listen(ready), name="lmkv-roster")
        await ready.wait()

    async def close(self) -> None:
        """Stop listening, let go of connections. Idempotent."""
        listening, self._listening = self._listening, None
        if listening is not None:
            listening.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await listening
        await self._link.close()

    async def register(self, record: NodeRecord, namespaces: Mapping[bytes, str]) -> NodeRecord | None:
        """As the contract says."""
        before = await self._link.call(_REGISTER, self._keys(record), *self._state(record, namespaces))
        self._put_off[record.connection] = time.monotonic()
        return None if before is None else self._decoded(before)

    async def update(self, record: NodeRecord, namespaces: Mapping[bytes, str] | None = None) -> bool:
        """As the contract says."""
        if not record.connected:
            self._put_off.pop(record.connection, None)
        return bool(await self._link.call(_UPDATE, self._keys(record), *self._state(record, namespaces or {})))

    async def seen(self, record: NodeRecord) -> bool:
        """As the contract says; asks the server now and then only, so another controller's word takes its time."""
        now = time.monotonic()
        if now - self._put_off.get(record.connection, -self.timeout) < self.timeout / _SEEN_SHARE:
            return True
        there = bool(await self._link.call(_SEEN, self._keys(record)[:1], record.connection, self._milliseconds))
        if there:
            self._put_off[record.connection] = now
        else:
            self._put_off.pop(record.connection, None)
        return there

    async def silent(self) -> list[NodeRecord]:
        """As the contract says."""
        records = list((await self.nodes()).values())
        if not records:
            return []
        with self._link.reported():
            alive = await self._link.client.mget([self._keys(record)[0] for record in records])
        return [record for record, there in zip(records, alive, strict=True) if there is None]

    async def remove(self, record: NodeRecord) -> bool:
        """As the contract says."""
        return bool(await self._link.call(_REMOVE, self._keys(record)[:2], record.name, _encode(record)))

    async def nodes(self) -> dict[str, NodeRecord]:
        """As the contract says."""
        with self._link.reported():
            found = await self._link.client.hgetall(self._records)
        return {name.decode(): self._decoded(record) for name, record in found.items()}

    async def namespaces(self) -> dict[bytes, str]:
        """As the contract says."""
        known = {namespace for record in (await self.nodes()).values() for namespace in record.namespaces}
        missing = list(known - self._texts.keys())
        if missing:
            with self._link.reported():
                texts = await self._link.client.hmget(self._spaces, missing)
            self._texts.update((key, text.decode()) for key, text in zip(missing, texts, strict=True) if text)
        self._texts = {namespace: text for namespace, text in self._texts.items() if namespace in known}
        return dict(self._texts)

    async def send(self, record: NodeRecord, message: FromController) -> bool:
        """As the contract says. True also when it was lost at the other controller."""
        if record.controller == self.controller:
            return self.deliver(record.name, message)
        with self._link.reported():
            return bool(
                await self._link.client.publish(
                    self._channel(record.controller), _encode((record.name, m.encode(message)))
                )
            )

    async def tell(self, node: str, progress: Progress) -> None:
        """As the contract says: here at once."""
        self.progress(node, progress)
        with self._link.reported():
            said = _encode((self.controller, node, m.encode(progress)))
            await self._link.client.publish(self._everybody, said)

    async def _listen(self, ready: asyncio.Event) -> None:
        while True:
            try:
                async with self._link.client.pubsub(ignore_subscribe_messages=True) as channel:
                    await channel.subscribe(self._channel(self.controller), self._everybody)
                    while True:
                        # The subscription is confirmed by the first answer.
                        said = await channel.get_message(timeout=_AGAIN_SECONDS)
                        ready.set()
                        if said is not None:
                            self._hear(said["channel"].decode(), said["data"])
            except (RedisError, OSError) as error:
                ready.set()
                said = "cannot hear other controllers through %s: %s"
                _log.warning(said, self._link.place, type(error).__name__, extra={"key": "deaf"})
                await asyncio.sleep(_AGAIN_SECONDS)

    def _hear(self, channel: str, data: bytes) -> None:
        try:
            if channel != self._everybody:
                node, body = _command(data)
                if not self.deliver(node, m.decode_from_controller(body)):
                    _log.warning("node %s: another controller's message finds it no longer here", node)
                return
            sender, node, body = _progress(data)
            progress = m.decode_from_node(body)
        except (ProtocolError, msgspec.MsgspecError, ValueError) as error:
            _log.warning("a message through %s that no controller sent: %s", self._link.place, error)
            return
        if sender != self.controller and isinstance(progress, m.Progress):
            self.progress(node, progress)

    def _keys(self, record: NodeRecord) -> list[str]:
        # A name is an operator's text, and no part of a key.
        name = hashlib.sha256(record.name.encode()).hexdigest()[:32]
        return [f"{self._prefix}alive:{name}", self._records, self._spaces]

    def _state(self, record: NodeRecord, namespaces: Mapping[bytes, str]) -> list[bytes | str | int]:
        pairs = [part for pair in namespaces.items() for part in pair]
        return [record.connection, self._milliseconds, record.name, _encode(record), *pairs]

    def _channel(self, controller: str) -> str:
        return f"{self._prefix}to:{controller}"

    def _decoded(self, record: bytes) -> NodeRecord:
        try:
            return _record(record)
        except (msgspec.MsgspecError, ValueError) as error:
            raise BackendError(f"{self._link.place}: a record of a node that cannot be read: {error}") from error
