"""What comes into the node's tiers and goes, in vLLM's KV-event format, so that routers that know it see them.

The wire is that of `vllm.distributed.kv_events`: ZMQ multipart messages of topic, sequence number (8 bytes, big
endian) and a MessagePack batch. Hashes are lmkv's digests, which are no engine's block hashes: see
`docs/reference/kv-events.md`. A stream begins with `AllBlocksCleared` and all that is there, and begins again so when
something could not be told.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import queue
import threading
import time
from collections import deque
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import msgspec

from lmkv.errors import ConfigError
from lmkv.keys import Namespace

if TYPE_CHECKING:
    from collections.abc import Iterable

    from lmkv.agent.tap import Tap
    from lmkv.config.fleet import EventsConfig
    from lmkv.storage.index import Entry, NamespaceIndex
    from lmkv.storage.manager import StorageManager

log = logging.getLogger("lmkv.agent")

WAITING_MOST: Final = 1024
"""Batches that wait to be sent, at most."""
POLL_SECONDS: Final = 0.05
"""How often requests for a replay are looked for."""
LINGER_MS: Final = 200
"""That messages which are on their way are waited for at the end."""
KEPT_BYTES: Final = 16 << 20
"""Of batches that are kept for a replay, of each topic, at most."""
QUEUED_MOST: Final = 10_000
"""Messages that ZMQ keeps for a slow subscriber; what is above them it never gets."""
END: Final = (-1).to_bytes(8, "big", signed=True)
"""Sequence number of the last message of a replay."""
MODEL: Final = "{model}"
"""In a topic: the name of the model, so that each has a stream of its own."""
LOCAL: Final = "LOCAL"
_REQUEST_FRAMES: Final = 3


class KVEvent(msgspec.Struct, omit_defaults=True, tag=True):
    """Base of the events, with the names and fields of vLLM's."""


class BlockStored(KVEvent):
    """Chunks that lie whole in a tier; each but the first has the one before it as its parent."""

    block_hashes: list[bytes]
    parent_block_hash: bytes | None
    token_ids: list[int]
    """Empty: the tokens of prompts are hashed and not kept."""
    block_size: int
    """Tokens of each."""
    lora_id: int | None
    medium: str | None
    """Name of the tier."""
    lora_name: str | None
    locality: str | None = None


class BlockRemoved(KVEvent):
    """Chunks that no longer lie in a tier."""

    block_hashes: list[bytes]
    medium: str | None
    locality: str | None = None


class AllBlocksCleared(KVEvent):
    """Nothing that was told before holds."""


Event: TypeAlias = BlockStored | BlockRemoved | AllBlocksCleared


class Batch(msgspec.Struct, array_like=True, omit_defaults=True):
    """Events of one moment."""

    ts: float
    events: list[Event]


class Publisher:
    """Listens to the tap and publishes. Made and called on the storage loop; sends in a thread of its own.

    Attributes:
        endpoints: addresses that it is bound to, with the ports that they got.

    Raises:
        ConfigError: pyzmq is not installed, or an address cannot be had.
    """

    def __init__(self, manager: StorageManager, tap: Tap, config: EventsConfig) -> None:
        self._manager = manager
        self._tap = tap
        self._topic = config.topic
        self._names = {tier.number: tier.name for tier in tap.own}
        self._topics: dict[bytes, bytes] = {}
        self._stale = False
        self._queue: queue.Queue[tuple[bytes, Batch] | None] = queue.Queue(WAITING_MOST)
        self._listing: asyncio.Task[None] | None = None
        self._sender = Sender(config, self._queue)
        self.endpoints = self._sender.endpoints
        self._thread = threading.Thread(target=self._sender.run, name="lmkv-kv-events", daemon=True)

    def start(self) -> None:
        """Begin with all that is there."""
        self._thread.start()
        self._tap.join(self)
        self.lost("the start")

    async def close(self, deadline: float = 1.0) -> None:
        """Send what waits, if that is quick, and stop, in about `deadline` seconds at most. Idempotent."""
        self._tap.leave(self)
        if self._listing is not None:
            self._listing.cancel()
        with contextlib.suppress(queue.Full):
            self._queue.put_nowait(None)
        self._sender.stopping = True
        if self._thread.is_alive():
            await asyncio.to_thread(self._thread.join, deadline)

    # --- listener ----------------------------------------------------------------------------------------------------

    def changed(self, tier: int, namespace: bytes, stored: list[bytes], removed: list[bytes]) -> None:
        """See `Listener.changed`."""
        events: list[Event] = []
        if removed and any(each.index for each in self._tap.own):
            events.append(BlockRemoved(removed, self._names[tier], LOCAL))
        elif removed:
            events.append(AllBlocksCleared())
        known = self._manager.index.namespaces.get(namespace)
        if stored and known is not None:
            entries = [entry for digest in stored if (entry := known.entries.get(digest)) is not None]
            events += self._stored(tier, known, entries)
        if self._queue.full():
            self.lost("more changes than could be sent")
        elif events:
            self._put(self._topic_of(namespace), events)

    def lost(self, why: str) -> None:
        """See `Listener.lost`: begin again with all that is there."""
        log.debug("publishing anew what lies here: %s", why)
        self._stale = True
        if self._listing is None or self._listing.done():
            self._listing = asyncio.get_running_loop().create_task(self._list())

    def declared(self, namespace: NamespaceIndex) -> None:
        """See `Listener.declared`."""

    # --- inside ------------------------------------------------------------------------------------------------------

    async def _list(self) -> None:
        while self._stale:
            while not self._queue.empty():  # noqa: ASYNC110  filled and emptied by two threads; it is told once more, and not before there is room for that
                await asyncio.sleep(POLL_SECONDS)
            self._stale = False
            for topic in {self._topic_of(identity) for identity in self._manager.declared}:
                await self._room()
                self._put(topic, [AllBlocksCleared()])
            listing = self._tap.listing()
            while not self._stale:
                await self._room()  # before the next piece is looked at: it has to be true when it is put
                piece = next(listing, None)
                if piece is None:
                    break
                tier, namespace, entries = piece
                self._put(self._topic_of(namespace.id), self._stored(tier.number, namespace, entries))
            self._manager.metrics.inc("lmkv_kv_event_listings_total")

    async def _room(self) -> None:
        await asyncio.sleep(0)
        while self._queue.full():  # noqa: ASYNC110  emptied by another thread
            await asyncio.sleep(POLL_SECONDS)

    def _put(self, topic: bytes, events: list[Event]) -> None:
        self._queue.put_nowait((topic, Batch(time.time(), events)))
        for event in events:
            self._manager.metrics.inc("lmkv_kv_events_total", kind=type(event).__name__)

    def _stored(self, tier: int, namespace: NamespaceIndex, entries: Iterable[Entry]) -> list[Event]:
        """One event for each run of chunks that follow one another and are of one length."""
        events: list[Event] = []
        run: BlockStored | None = None
        page_tokens = self._manager.chunk_tokens // (namespace.chunk_pages or 1)
        for entry in entries:
            size = entry.pages * page_tokens
            if run is not None and run.block_hashes[-1] == entry.parent and run.block_size == size:
                run.block_hashes.append(entry.digest)
                continue
            parent = entry.parent or None
            run = BlockStored([entry.digest], parent, [], size, None, self._names[tier], None, LOCAL)
            events.append(run)
        return events

    def _topic_of(self, namespace: bytes) -> bytes:
        topic = self._topics.get(namespace)
        if topic is None:
            text = self._manager.declared.get(namespace)
            if MODEL not in self._topic:
                topic = self._topic.encode()
            elif text is None:
                return self._topic.replace(MODEL, "").encode()
            else:
                topic = self._topic.replace(MODEL, Namespace.from_json(text).model).encode()
            self._topics[namespace] = topic
        return topic


class Sender:
    """The sockets. Made by the loop, then used by one thread only.

    Attributes:
        endpoints: addresses that are bound.
    """

    def __init__(self, config: EventsConfig, batches: queue.Queue[tuple[bytes, Batch] | None]) -> None:
        try:
            import zmq  # noqa: PLC0415  only where events are published
        except ImportError as e:
            raise ConfigError("events: publishing needs pyzmq: pip install 'lmkv[events]'") from e
        self.stopping = False
        self.endpoints: list[str] = []
        self._batches = batches
        self._streams: dict[bytes, Stream] = {}
        self._steps = config.steps
        self._encode = msgspec.msgpack.Encoder().encode
        self._context = zmq.Context()
        self._fault = zmq.ZMQError
        self._publish = self._context.socket(zmq.PUB)
        self._publish.set_hwm(QUEUED_MOST)
        self._replay: Any = None if config.replay is None else self._context.socket(zmq.ROUTER)
        if self._replay is not None:
            self._replay.set_hwm(QUEUED_MOST)
        try:
            if config.publish is not None:
                self._bind(self._publish, config.publish, "publish")
            if config.replay is not None:
                self._bind(self._replay, config.replay, "replay")
            for address in config.connect:
                self._publish.connect(address)
        except BaseException:
            self._context.destroy(linger=0)
            raise

    def run(self) -> None:
        """Send what comes, until told to stop."""
        try:
            while True:
                with contextlib.suppress(queue.Empty):
                    item = self._batches.get(timeout=POLL_SECONDS)
                    if item is None:
                        return
                    self._send(*item)
                if self._replay is not None and self._replay.poll(0):
                    self._answer()
                if self.stopping and self._batches.empty():
                    return
        except Exception:
            log.exception("publishing events ended", extra={"key": "kv-events"})
        finally:
            self._context.destroy(linger=LINGER_MS)

    def _bind(self, socket: Any, address: str, name: str) -> None:
        import zmq  # noqa: PLC0415  is there

        try:
            if "[" in address:
                socket.setsockopt(zmq.IPV6, 1)
            socket.bind(address)
        except zmq.ZMQError as e:
            raise ConfigError(f"events.{name}: {address} cannot be had: {e}") from e
        self.endpoints.append(socket.getsockopt_string(zmq.LAST_ENDPOINT))

    def _send(self, topic: bytes, batch: Batch) -> None:
        stream = self._streams.get(topic)
        if stream is None:
            stream = self._streams[topic] = Stream(self._steps)
        self._publish.send_multipart((topic, *stream.add(self._encode(batch))))

    def _answer(self) -> None:
        """A subscriber asks for the batches from a number on: all that are kept, then `END`."""
        frames = self._replay.recv_multipart()
        if len(frames) != _REQUEST_FRAMES or len(frames[2]) != len(END):
            log.warning("a request for a replay of %d frames, which is none", len(frames), extra={"key": "kv-replay"})
            return
        client, first = frames[0], int.from_bytes(frames[2], "big")
        for topic, stream in self._streams.items():
            for number, body in stream.kept:
                if int.from_bytes(number, "big") >= first:
                    self._replay.send_multipart((client, b"", topic, number, body))
        self._replay.send_multipart((client, b"", b"", END, b""))


class Stream:
    """What was published under one topic: numbered without a gap, the last batches kept."""

    def __init__(self, steps: int) -> None:
        self.kept: deque[tuple[bytes, bytes]] = deque()
        self._steps = steps
        self._next = 0
        self._nbytes = 0

    def add(self, body: bytes) -> tuple[bytes, bytes]:
        """The number of the next batch, and the batch."""
        step = self._next.to_bytes(8, "big"), body
        self._next += 1
        self.kept.append(step)
        self._nbytes += len(body)
        while len(self.kept) > self._steps or self._nbytes > KEPT_BYTES:
            self._nbytes -= len(self.kept.popleft()[1])
        return step
