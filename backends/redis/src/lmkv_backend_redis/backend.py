"""Frames in a Redis or Valkey. Calls run in the tier's threads, each on a connection of its own."""

from __future__ import annotations

import logging
import threading
from functools import partial
from typing import TYPE_CHECKING, Any, cast

from lmkv.backend import StorageBackendInterface
from lmkv.errors import BackendError, ConfigError, LmkvError
from lmkv.types import FAILED, MISS, Capabilities, Health, HealthState, Outcome
from lmkv_backend_redis import talks
from lmkv_backend_redis.channel import ReplyError
from lmkv_backend_redis.failures import DEFINITE, ERRORS
from lmkv_backend_redis.layout import Names
from lmkv_backend_redis.look import look
from lmkv_backend_redis.store import Store

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from pydantic import BaseModel

    from lmkv.memory import MemoryObject
    from lmkv.specs import BackendContext
    from lmkv.types import ChunkKey
    from lmkv_backend_redis.channel import Channel
    from lmkv_backend_redis.options import RedisOptions

log = logging.getLogger(__name__)
SCAN_COUNT = 1000


class RedisBackend(StorageBackendInterface):
    """One hash per frame. Thread-safe; no call takes much longer than the tier's deadline.

    Raises, from every method:
        BackendError: the store is not there, answers too late, nonsense, or nothing at all; names the store.
        ClosedError: after `close`.
    """

    capabilities = Capabilities(shared=True, persistent=True, batched_contains=True)

    def __init__(self, options: BaseModel, context: BackendContext) -> None:
        """Looks at the store for at most about `connect_timeout`; one that is not there is used as soon as it is.

        Raises:
            ConfigError: the store is there and says that it will never work like this.
        """
        self._options = cast("RedisOptions", options)
        self._tier = context.tier
        self._names = Names(self._options.prefix)
        self._store = Store(self._options, context.deadline)
        self._part, self._ttl = self._options.part_bytes, self._options.ttl
        self._slide = self._ttl if self._options.sliding else None
        self.capabilities = Capabilities(
            shared=True,
            persistent=True,
            batched_contains=True,
            native_expiry=self._ttl is not None,
            max_frame_bytes=talks.largest(self._part),
            parallelism=self._options.connections,
        )
        self._looking = threading.Lock()
        self._looked = False
        try:
            self._look()
        except BackendError as error:
            if error.kind in DEFINITE:
                self.close()
                raise ConfigError(str(error), kind=error.kind) from None
            log.warning("tier %s: %s; it will be used when it answers", self._tier, error)

    def contains(self, keys: Sequence[ChunkKey]) -> Sequence[bool]:
        """One round trip to each node that may have some of the keys, all at once. What cannot be said is a *no*."""
        names = self._names.frames(keys)
        found = [False] * len(keys)
        with self._store.exchange("contains", names) as lent:
            asked = [(channel, indices, [names[i] for i in indices]) for channel, indices in lent]
            for channel, _, here in asked:
                talks.ask_contains(channel, here)
            for channel, indices, here in asked:
                answers = talks.answer_contains(channel, here)
                for index, answer in zip(indices, answers, strict=True):
                    found[index] = answer is True
                moved = [name for name, answer in zip(here, answers, strict=True) if _elsewhere(answer)]
                if moved:  # a false no for now; redis-py finds out where to, for the next call
                    talks.touch(self._store.following(), moved)
        return found

    def get(self, keys: Sequence[ChunkKey], into: Sequence[MemoryObject]) -> Sequence[Outcome]:
        """Read frames, past redis-py's parser into `into`. One that lost a part is a miss, and deleted."""
        return self._move(
            "get",
            keys,
            into,
            lambda channel, names, part: talks.get(channel, names, part, self._part, self._slide),
        )

    def put(self, keys: Sequence[ChunkKey], objects: Sequence[MemoryObject]) -> Sequence[Outcome]:
        """Write frames from where they are; a full store is `FAILED(BackendError)` of kind ``no-space``."""
        limit = talks.largest(self._part)
        if max((memory.nbytes for memory in objects), default=0) > limit:
            return [self._put_within(limit, key, memory) for key, memory in zip(keys, objects, strict=True)]
        return self._move(
            "put",
            keys,
            objects,
            lambda channel, names, part: talks.put(channel, names, [o.view for o in part], self._part, self._ttl),
        )

    def delete(self, keys: Sequence[ChunkKey]) -> None:
        """Unlink frames."""
        self._tell("delete", self._names.frames(keys), talks.delete)

    def touch(self, keys: Sequence[ChunkKey]) -> None:
        """Make frames the youngest of the server's eviction order, and begin their time anew where it slides."""
        names = self._names.frames(keys)
        slide = self._slide
        if slide is not None:
            self._tell("touch", names, lambda channel, part: talks.extend(channel, part, slide))
        else:
            alone = self._store.target.kind == "cluster"
            self._tell("touch", names, talks.touch if alone else talks.touch_together)

    def describe(self, namespace: bytes, text: str) -> None:
        """Keep `text` under `<prefix>:n:<namespace>`."""
        self._small("describe", lambda: self._store.client().set(self._names.namespace(namespace), text))

    def clear(self, namespace: bytes | None = None) -> None:
        """Find the frames (of one namespace) by SCAN and unlink them. Takes as long as the store has keys."""
        for client in self._small("clear", self._store.primaries):
            for pattern in self._names.patterns(namespace):
                cursor = self._small("clear", partial(_unlink, client, pattern, 0))
                while cursor:
                    cursor = self._small("clear", partial(_unlink, client, pattern, cursor))

    def health(self) -> Health:
        """PING; where the store was not there at the start, also the look at it that is still owed."""
        try:
            self._look()
            self._small("ping", lambda: [client.ping() for client in self._store.primaries()])
        except LmkvError as error:
            return Health(HealthState.DOWN, str(error))
        return Health(HealthState.OK)

    def close(self) -> None:
        """Give up the connections, also those that calls wait on: these end with an error. Idempotent."""
        self._store.close()

    # --- inside ------------------------------------------------------------------------------------------------------

    def _look(self) -> None:
        with self._looking:
            if not self._looked:
                try:
                    look(self._store, self._options, self._names, self._tier)
                    self._looked = True
                finally:
                    self._store.sweep()

    def _put_within(self, limit: int, key: ChunkKey, memory: MemoryObject) -> Outcome:
        if memory.nbytes <= limit:
            return self.put([key], [memory])[0]
        text = f"a frame of {memory.nbytes} bytes: with part_bytes {self._part} at most {limit} bytes; raise part_bytes"
        return FAILED(BackendError(text, kind="size", retryable=False))

    def _move(
        self,
        operation: str,
        keys: Sequence[ChunkKey],
        objects: Sequence[MemoryObject],
        talk: Callable[[Channel, Sequence[bytes], Sequence[MemoryObject]], list[Outcome]],
    ) -> list[Outcome]:
        """Have the talk with every node that keeps some of the keys."""
        names = self._names.frames(keys)
        outcomes = [MISS] * len(keys)

        def have(channel: Channel, indices: Sequence[int]) -> None:
            found = talk(channel, [names[i] for i in indices], [objects[i] for i in indices])
            for index, outcome in zip(indices, found, strict=True):
                outcomes[index] = outcome

        with self._store.exchange(operation, names) as lent:
            for channel, indices in lent:
                have(channel, indices)
            elsewhere = [i for i, outcome in enumerate(outcomes) if _elsewhere(outcome.error)]
            if elsewhere:
                have(self._store.following(), elsewhere)
        return outcomes

    def _tell(self, operation: str, names: Sequence[bytes], talk: Callable[[Channel, Sequence[bytes]], Any]) -> None:
        with self._store.exchange(operation, names) as lent:
            for channel, indices in lent:
                here = [names[i] for i in indices]
                moved = [n for n, reply in zip(here, talk(channel, here), strict=True) if _elsewhere(reply)]
                if moved:
                    talk(self._store.following(), moved)

    def _small(self, operation: str, work: Callable[[], Any]) -> Any:
        """Something that redis-py does."""
        try:
            return work()
        except ERRORS as error:
            self._store.forget()
            raise self._store.failures.explain(operation, error) from None
        finally:
            self._store.sweep()


def _elsewhere(error: object) -> bool:
    return isinstance(error, ReplyError) and error.code in talks.ELSEWHERE


def _unlink(client: Any, pattern: str, cursor: int) -> int:
    """One step of a scan; returns where the next begins, 0 at the end."""
    position, keys = client.scan(cursor, match=pattern, count=SCAN_COUNT)
    if keys:
        with client.pipeline(transaction=False) as pipeline:
            for key in keys:
                pipeline.unlink(key)
            pipeline.execute()
    return int(position)
