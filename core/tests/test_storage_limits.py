"""What the storage refuses or bounds: read-only tiers, clients that have gone, trailers that are cut off."""

from __future__ import annotations

import asyncio
import threading
from typing import TYPE_CHECKING, Any

import pytest
from storage_rig import FRAME, Client, Shelf, chain, namespace, storage

from lmkv.errors import ConfigError
from lmkv.keys import Extras, KeyChain, Namespace
from lmkv.service import protocol as p

if TYPE_CHECKING:
    from collections.abc import Coroutine, Sequence

    from lmkv.types import ChunkKey


def run(coroutine: Coroutine[Any, Any, None]) -> None:
    asyncio.run(coroutine)


def prompt(number: int) -> KeyChain:
    """One chunk, another one for each number."""
    return chain(range(number * 10, number * 10 + 4))


def test_a_look_up_of_a_client_that_has_gone_leaves_no_lease() -> None:
    async def body() -> None:
        shelf, gate = Shelf(shared=True), threading.Event()
        async with storage(below=[(shelf, {})]) as manager:
            client, other = Client(manager, namespace()), Client(manager, namespace(), "other")
            other.store(other.frames(chain(range(8))))
            await other.settled()

            def slow(_: Sequence[ChunkKey]) -> None:
                gate.wait(5)

            shelf.on_contains = slow
            digests = b"".join(chain(range(12)).digests)
            asking = asyncio.ensure_future(client.wait(p.Lookup(client.space.id, digests)))
            await asyncio.sleep(0.05)
            client.session.close()
            gate.set()
            await asyncio.wait([asking])
            assert manager.holds()["leases"] == 0
            assert manager.holds()["entries"] == 0

    run(body())


def test_a_read_only_tier_stays_as_it_is() -> None:
    async def body() -> None:
        shelf = Shelf()
        async with storage(below=[(shelf, {"capacity": 40 * FRAME})]) as manager:
            client = Client(manager, namespace())
            for i in range(6):
                client.store(client.frames(prompt(i)))
                await client.settled()
        frames, used = dict(shelf.frames), dict(shelf.used)
        shelf.described.clear()
        async with storage(below=[(shelf, {"capacity": 3 * FRAME, "write": "never"})]) as manager:
            client = Client(manager, namespace())
            keys = prompt(100)
            client.store(client.frames(keys))
            digest = keys.digests[0]
            with pytest.raises(ConfigError, match="'shelf1' is read-only"):
                await client.wait(p.Move(client.space.id, digest, "ram", "shelf1", True))
            there = prompt(5)
            with pytest.raises(ConfigError, match="'shelf1' is read-only"):
                await client.wait(p.Move(client.space.id, there.digests[0], "shelf1", "ram"))
            with pytest.raises(ConfigError, match="'shelf1' is read-only"):
                await client.wait(p.Recode(client.space.id, there.digests[0], "shelf1", "zlib"))
            found = await client.look_up(there)
            assert await client.load(found, there) == [True]
            client.ask(p.Release(found.lease))
            copied = await client.wait(p.Move(client.space.id, prompt(4).digests[0], "shelf1", "ram", True))
            assert copied.count == 1
            await client.settled()
        assert (shelf.frames, shelf.used, shelf.described) == (frames, used, {})

    run(body())


def test_a_backend_that_lists_cut_off_trailers_loses_nothing(caplog: pytest.LogCaptureFixture) -> None:
    """128 pages: 127 page prefixes make a trailer of more than the 4 KiB that `Shelf` lists."""

    async def body() -> None:
        pages, tokens, nbytes = 128, 16, 64
        layout = {"name": "rig", "dtype": "bf16", "page_tokens": tokens, "runs": [nbytes], "tags": []}
        space = Namespace(
            model="m", revision="r", kv_dtype="bf16", layouts=(layout,),  # type: ignore[arg-type]
            page_bytes=(nbytes,), chunk_tokens=tokens * pages, page_tokens=tokens,
        )  # fmt: skip
        keys = KeyChain(tokens * pages, tokens, Extras())
        keys.extend(list(range(tokens * pages * 2)))
        shelf = Shelf()
        for turn in range(2):
            async with storage(ram=1 << 20, staging=1 << 20, below=[(shelf, {"capacity": 1 << 28})]) as manager:
                client = Client(manager, space)
                if not turn:
                    client.store(client.frames(keys))
                    await client.settled()
                found = await client.look_up(keys)
                assert await client.load(found, keys) == [True, True]
                assert not manager.metrics.value("lmkv_corrupt_frames_total")
        assert not shelf.aside

    run(body())
    assert "2 frames with less than their trailers" in caplog.text
