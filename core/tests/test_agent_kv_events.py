"""KV events over a real ZMQ socket, read with vLLM's own decoder where it is installed."""

from __future__ import annotations

import asyncio
import importlib.util
import threading
import warnings
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
import zmq
from agent_rig import eventually, truth
from storage_rig import CHUNK_TOKENS, FRAME, PAGE_TOKENS, Client, Shelf, chain, namespace, storage

from lmkv.agent import kv_events
from lmkv.agent.kv_events import Publisher
from lmkv.agent.tap import Tap
from lmkv.config.fleet import EventsConfig
from lmkv.errors import ConfigError
from lmkv.service import protocol as p

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from lmkv.storage.manager import StorageManager

OURS = msgspec.msgpack.Decoder(kv_events.Batch)


class Subscriber:
    """Follows a stream as a router does: what is in which medium, sequence by sequence."""

    def __init__(self, endpoint: str, topic: bytes = b"", decode: Any = OURS.decode) -> None:
        self.context = zmq.Context()
        self.socket = self.context.socket(zmq.SUB)
        self.socket.setsockopt(zmq.SUBSCRIBE, topic)
        self.socket.connect(endpoint)
        self.decode = decode
        self.events: list[Any] = []
        self.topics: set[bytes] = set()
        self.numbers: list[int] = []
        self.known: dict[str, dict[bytes, Any]] = {}
        self.parents: dict[bytes, bytes | None] = {}

    def read(self) -> None:
        while self.socket.poll(0):
            topic, number, body = self.socket.recv_multipart()
            self.take(topic, number, body)

    def take(self, topic: bytes, number: bytes, body: bytes) -> None:
        self.topics.add(topic)
        self.numbers.append(int.from_bytes(number, "big"))
        for event in self.decode(body).events:
            self.events.append(event)
            match type(event).__name__:
                case "AllBlocksCleared":
                    self.known.clear()
                case "BlockRemoved":
                    for digest in event.block_hashes:
                        self.known.get(event.medium, {}).pop(digest, None)
                case "BlockStored":
                    parent = event.parent_block_hash
                    for digest in event.block_hashes:
                        self.known.setdefault(event.medium, {})[digest] = event
                        self.parents[digest] = parent
                        parent = digest

    def agrees(self, manager: StorageManager) -> bool:
        self.read()
        names = [tier.name for tier in manager.stack.tiers]
        known = {medium: set(digests) for medium, digests in self.known.items() if digests}
        there: dict[str, set[bytes]] = {}
        for (_, tier), digests in truth(manager).items():
            there.setdefault(names[tier], set()).update(digests)
        return known == there

    def close(self) -> None:
        self.context.destroy(linger=0)


@asynccontextmanager
async def publishing(manager: StorageManager, **settings: Any) -> AsyncIterator[Publisher]:
    config = EventsConfig(**({"publish": "tcp://127.0.0.1:*"} | settings))
    publisher = Publisher(manager, Tap(manager), config)
    publisher.start()
    try:
        yield publisher
    finally:
        await publisher.close()


def shelf() -> list[tuple[Shelf, dict[str, int]]]:
    return [(Shelf(), {"capacity": 100 * FRAME})]


async def followed(manager: StorageManager, publisher: Publisher, **options: Any) -> Subscriber:
    """A subscriber that has begun to get what is published."""
    subscriber = Subscriber(publisher.endpoints[0], **options)

    def heard() -> bool:
        subscriber.read()
        if not subscriber.events:
            publisher.lost("the test waits for its subscription")
        return bool(subscriber.events)

    await eventually(heard)
    return subscriber


def test_a_subscriber_knows_what_lies_where() -> None:
    async def main() -> None:
        async with storage(below=shelf()) as manager, publishing(manager) as publisher:
            one = Client(manager, namespace())
            subscriber = await followed(manager, publisher)
            keys = chain(range(14))
            one.store(one.frames(keys, tail=True))
            await one.settled()
            await eventually(lambda: subscriber.agrees(manager))
            assert {medium: len(digests) for medium, digests in subscriber.known.items()} == {"ram": 4, "shelf1": 4}
            for i, digest in enumerate(keys.digests):
                event = subscriber.known["ram"][digest]
                assert subscriber.parents[digest] == (keys.parent(i) or None)
                assert (event.block_size, event.token_ids, event.lora_id) == (CHUNK_TOKENS, [], None)
            tail = keys.prefixes(3)[-1]
            assert (subscriber.known["ram"][tail].block_size, subscriber.parents[tail]) == (
                PAGE_TOKENS,
                keys.digests[-1],
            )
            for start in range(0, 400, 4):  # more than RAM holds
                one.store(one.frames(chain(range(1000 + start, 1004 + start))))
                await asyncio.sleep(0)
            await one.settled()
            await eventually(lambda: subscriber.agrees(manager))
            assert any(type(event).__name__ == "BlockRemoved" for event in subscriber.events)
            one.ask(p.Clear())
            await eventually(lambda: subscriber.agrees(manager))
            assert type(subscriber.events[-1]).__name__ == "AllBlocksCleared"
            first = subscriber.numbers[0]
            assert subscriber.numbers == list(range(first, first + len(subscriber.numbers))), "no gap"
            subscriber.close()

    asyncio.run(main())


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed")
def test_vllm_reads_our_events() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of what it imports
        from vllm.distributed.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, KVEventBatch

    async def main() -> None:
        decode = msgspec.msgpack.Decoder(KVEventBatch).decode
        async with storage(below=shelf()) as manager, publishing(manager) as publisher:
            one = Client(manager, namespace())
            subscriber = await followed(manager, publisher, decode=decode)
            one.store(one.frames(chain(range(12))))
            await one.settled()
            await eventually(lambda: subscriber.agrees(manager))
            one.ask(p.Clear(tier="ram"))
            await eventually(lambda: subscriber.agrees(manager))
            one.ask(p.Clear())
            await eventually(lambda: subscriber.agrees(manager))
            assert {type(event) for event in subscriber.events} == {AllBlocksCleared, BlockRemoved, BlockStored}
            stored = next(event for event in subscriber.events if isinstance(event, BlockStored))
            assert stored.block_hashes == list(chain(range(12)).digests), "one run of chunks that follow one another"
            assert stored.locality == "LOCAL"
            subscriber.close()

    asyncio.run(main())


def test_the_wire_is_that_of_vllm() -> None:
    """Field by field, also where vLLM is not installed: an array of time and events, each a map with its type."""
    event = kv_events.BlockStored([b"d" * 32], None, [], 256, None, "ram", None, "LOCAL")
    batch = msgspec.msgpack.decode(msgspec.msgpack.encode(kv_events.Batch(1.5, [event])))
    assert batch == [
        1.5,
        [
            {
                "type": "BlockStored",
                "block_hashes": [b"d" * 32],
                "parent_block_hash": None,
                "token_ids": [],
                "block_size": 256,
                "lora_id": None,
                "medium": "ram",
                "lora_name": None,
                "locality": "LOCAL",
            }
        ],
    ]


def test_what_was_missed_can_be_asked_for() -> None:
    async def main() -> None:
        async with (
            storage(below=shelf()) as manager,
            publishing(manager, replay="tcp://127.0.0.1:*", topic="kv@{model}") as publisher,
        ):
            for model in ("a", "b"):
                one = Client(manager, namespace(model=model))
                one.store(one.frames(chain(range(8))))
                await one.settled()
            late = Subscriber(publisher.endpoints[0])
            ask = late.context.socket(zmq.DEALER)
            ask.connect(publisher.endpoints[1])
            ask.send_multipart((b"", b"too short"))

            async def replay(first: int) -> list[tuple[bytes, bytes, bytes]]:
                ask.send_multipart((b"", first.to_bytes(8, "big")))
                got: list[tuple[bytes, bytes, bytes]] = []
                while True:
                    await eventually(lambda: bool(ask.poll(0)))
                    _, topic, number, body = ask.recv_multipart()
                    if number == kv_events.END:
                        return got
                    got.append((topic, number, body))

            wanted = {medium: chain(range(8)).digests for medium in ("ram", "shelf1")}
            topics: set[bytes] = set()
            while {medium: list(digests) for medium, digests in late.known.items()} != wanted or len(topics) < 2:
                late.known.clear()
                late.numbers.clear()
                batches = await replay(0)
                for batch in batches:
                    if batch[0] == b"kv@a":
                        late.take(*batch)
                topics = {topic for topic, _, _ in batches}
            assert topics == {b"kv@a", b"kv@b"}
            assert late.numbers == list(range(len(late.numbers))), "each topic counts for itself"
            later = await replay(1)
            assert {batch for batch in batches if int.from_bytes(batch[1], "big")} <= set(later)
            assert bytes(8) not in {number for _, number, _ in later}
            late.close()

    asyncio.run(main())


def test_more_than_can_be_sent_begins_the_stream_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_events, "WAITING_MOST", 2)
    monkeypatch.setattr("lmkv.agent.tap.PERIOD", 0.001)

    async def main() -> None:
        async with storage(ram=400 * FRAME) as manager, publishing(manager) as publisher:
            one = Client(manager, namespace())
            subscriber = await followed(manager, publisher)
            send, gate = publisher._sender._send, threading.Event()
            listings = manager.metrics.snapshot()["lmkv_kv_event_listings_total"]

            def slowly(topic: bytes, batch: Any) -> None:
                gate.wait(20)
                send(topic, batch)

            publisher._sender._send = slowly  # type: ignore[method-assign]
            for start in range(0, 200, 4):
                one.store(one.frames(chain(range(start, start + 4))))
                await asyncio.sleep(0.003)
                assert publisher._queue.qsize() <= 2
            assert publisher._stale
            gate.set()
            await eventually(lambda: subscriber.agrees(manager))
            await eventually(lambda: manager.metrics.snapshot()["lmkv_kv_event_listings_total"] > listings)
            subscriber.close()

    asyncio.run(main())


def test_subscribers_that_listen_are_connected_to(tmp_path: Path) -> None:
    async def main() -> None:
        address = f"ipc://{tmp_path}/router"
        subscriber = Subscriber("tcp://127.0.0.1:1")
        subscriber.socket.bind(address)
        async with storage() as manager, publishing(manager, publish=None, connect=[address]) as publisher:
            one = Client(manager, namespace())
            assert publisher.endpoints == []
            one.store(one.frames(chain(range(8))))
            publisher.lost("until it is connected")

            def agrees() -> bool:
                if not subscriber.events:
                    publisher.lost("until it is connected")
                return subscriber.agrees(manager)

            await eventually(agrees)
        subscriber.close()

    asyncio.run(main())


def test_an_address_that_is_taken_stops_the_start() -> None:
    async def main() -> None:
        async with storage() as manager, publishing(manager) as publisher:
            taken = publisher.endpoints[0]
            with pytest.raises(ConfigError, match=f"events.publish: {taken} cannot be had"):
                Publisher(manager, Tap(manager), EventsConfig(publish=taken))

    asyncio.run(main())
