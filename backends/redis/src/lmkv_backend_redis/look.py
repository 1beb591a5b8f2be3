"""The first look at a store: does it let us in, do what we need, take values of our size, make room by itself."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any, Final

from redis.exceptions import ResponseError

from lmkv.errors import BackendError
from lmkv.memory import MemoryObject
from lmkv.units import format_size
from lmkv_backend_redis import talks
from lmkv_backend_redis.failures import ERRORS

if TYPE_CHECKING:
    from lmkv_backend_redis.layout import Names
    from lmkv_backend_redis.options import RedisOptions
    from lmkv_backend_redis.store import Store

log = logging.getLogger(__name__)
TRIAL: Final = b"lmkv"
_CONFIG: Final = "proto-max-bulk-len"


def look(store: Store, options: RedisOptions, names: Names, tier: str) -> None:
    """Log in, read the limits, write and read a tiny frame.

    Raises:
        BackendError: what the store answered, or that it did not; of a kind in `failures.DEFINITE` where somebody has
            to change something.
    """
    try:
        clients = store.primaries()
        for client in clients:
            client.ping()
            _limits(client, options)
        _advise(clients[0], options, tier)
    except (*ERRORS, BackendError) as error:
        raise store.failures.explain("connect", error) from None
    _try(store, options, names, tier)


def _limits(client: Any, options: RedisOptions) -> None:
    """Managed servers keep CONFIG to themselves; then their limit shows when a part is refused."""
    try:
        said = client.config_get(_CONFIG)
    except ResponseError:
        return
    limit = int(said.get(_CONFIG) or options.part_bytes)
    if limit < options.part_bytes:
        text = (
            f"part_bytes is {format_size(options.part_bytes)} ({options.part_bytes} bytes), but the server takes values"
            f" of at most {format_size(limit)} ({limit} bytes): lower part_bytes, or raise its {_CONFIG}"
        )
        raise BackendError(text, kind="limit", retryable=False)


def _advise(client: Any, options: RedisOptions, tier: str) -> None:
    try:
        memory = client.info("memory")
    except ResponseError:
        return
    limit, policy = int(memory.get("maxmemory", 0)), str(memory.get("maxmemory_policy", ""))
    if not limit:
        return
    if policy == "noeviction":
        advice = "set maxmemory-policy allkeys-lru on the server"
    elif policy.startswith("volatile") and options.ttl is None:
        advice = "it evicts only keys that expire: set ttl, or maxmemory-policy allkeys-lru on the server"
    else:
        return
    log.warning(
        "tier %s: %s has maxmemory %s with maxmemory-policy %s: once full it refuses stores; %s",
        tier, store_name(options), format_size(limit), policy, advice,
    )  # fmt: skip


def store_name(options: RedisOptions) -> str:
    """For messages."""
    return str(options.target)


def _try(store: Store, options: RedisOptions, names: Names, tier: str) -> None:
    """Everything that calls will do later, with a frame that nobody asks for."""
    name = names.trial()
    into = MemoryObject.over(bytearray(len(TRIAL)))
    with store.exchange("a first frame", [name]) as ((channel, _),):
        put = talks.put(channel, [name], [memoryview(TRIAL)], options.part_bytes, options.ttl)[0]
        got = talks.get(channel, [name], [into], options.part_bytes, options.ttl)[0]
        talks.ask_contains(channel, [name])
        talks.answer_contains(channel, [name])
        talks.touch(channel, [name])
        talks.delete(channel, [name])
    if not put.ok:
        log.warning("tier %s: %s takes no stores now: %s", tier, store_name(options), put.error)
    elif not got.ok or bytes(into.view) != TRIAL:
        error = BackendError("a first frame was written, but does not come back", kind="backend")
        raise store.failures.explain("connect", error)
