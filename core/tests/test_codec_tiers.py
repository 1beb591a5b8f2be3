"""Codecs in tiers: what fits, what others have stored, keys that are wrong, frames that somebody has changed."""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
from storage_rig import FRAME, PAGE_BYTES, Client, Shelf, chain, namespace, storage

from lmkv.codec.options import AesGcmOptions
from lmkv.config.codecs import CodecChain, CodecStep
from lmkv.errors import WRONG_KEY, ConfigError, PluginError, UnreadableError
from lmkv.frame import frame_bytes, parse_trailer, seal, verify
from lmkv.plugins import PluginHost
from lmkv.service import protocol as p
from lmkv.specs import Payload
from lmkv.storage.codecs import Codecs
from lmkv.storage.keymark import MARK, leave_mark, look_at_frames
from lmkv.types import FAILED, ChunkKey, HealthState, MissReason

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Sequence

    from numpy.typing import NDArray

    from lmkv.specs import Codec
    from lmkv.storage.manager import StorageManager

HOST = PluginHost.discover()
ONE, TWO = os.urandom(32).hex(), os.urandom(32).hex()


def keyed(use: str = "k", **keys: str) -> Callable[[str], Codec]:
    """Codecs of a tier with these keys; with none: of one that has no options for `aes-gcm`."""
    options = AesGcmOptions(keys=keys, use=use) if keys else None  # type: ignore[arg-type]  pydantic reads texts
    steps = (CodecStep("aes-gcm", options, ()),) if options else (CodecStep("identity", None, ()),)
    return Codecs([CodecChain(steps)], HOST).of(CodecChain(steps), "shelf")


class Compressible(Client):
    def payload(self, digest: bytes, shard: int, length: int) -> NDArray[Any]:
        noise = super().payload(digest, shard, length)
        noise[length // 8 :] = noise[0]
        return noise


@asynccontextmanager
async def below(
    shelf: Shelf, codec: str, codecs: Callable[[str], Codec], *, capacity: int | None = 50 * FRAME, **more: Any
) -> AsyncIterator[StorageManager]:
    settings = {"name": "low", "codec": codec, "capacity": None if shelf.capabilities.shared else capacity} | more
    async with storage(ram=8 * FRAME, below=[(shelf, settings)], codecs=codecs) as manager:
        yield manager


def keep(shelf: Shelf) -> Shelf:
    """As another process finds the same store."""
    found = Shelf(shared=shelf.capabilities.shared)
    found.frames, found.used = dict(shelf.frames), dict(shelf.used)
    return found


async def stored(manager: StorageManager, tokens: Sequence[int], kind: type[Client] = Client) -> Client:
    client = kind(manager, namespace())
    client.store(client.frames(chain(tokens)))
    await client.settled()
    return client


async def loads(client: Client, tokens: Sequence[int]) -> list[bool]:
    """What comes from below RAM; checked byte by byte."""
    client.ask(p.Clear(None, "ram"))
    found = await client.look_up(chain(tokens))
    try:
        return await client.load(found, chain(tokens))
    finally:
        client.ask(p.Release(found.lease))


def unreadable(manager: StorageManager) -> float:
    return manager.metrics.value("lmkv_misses_total", reason="unreadable")


@pytest.mark.parametrize("codec", ["zlib", "zstd", "bf16-planes"])
def test_a_compressed_tier_holds_more(codec: str) -> None:
    async def body() -> None:
        shelf, capacity, chunks = Shelf(), 10 * FRAME, 40
        async with below(shelf, codec, keyed(), capacity=capacity) as manager:
            tier, most = manager.tier("low"), 0
            client = Compressible(manager, namespace())
            for first in range(0, chunks * 100, 100):
                client.store(client.frames(chain(range(first, first + 4))))
                await client.settled()
                most = max(most, tier.used)
                assert tier.used == sum(map(len, shelf.frames.values())) == sum(tier.index.values())
            assert most <= capacity
            assert len(shelf.frames) > 15, "ten fit as they are"
            newest = (chunks - 1) * 100
            assert await loads(client, range(newest, newest + 4)) == [True]
            assert verify(memoryview(shelf.frames[next(reversed(shelf.frames))]), next(reversed(shelf.frames)))

    asyncio.run(body())


def test_many_puts_at_once_never_exceed_the_capacity() -> None:
    """Each reserves the most that it can come to; what it saves is given back when it is known."""

    async def body() -> None:
        shelf = Shelf()
        async with below(shelf, "zlib", keyed(), capacity=10 * FRAME) as manager:
            tier = manager.tier("low")
            client = Compressible(manager, namespace())
            for first in range(0, 3000, 100):
                client.store(client.frames(chain(range(first, first + 4))))
                assert tier.used <= 10 * FRAME
            await client.settled()
            assert tier.used == sum(map(len, shelf.frames.values())) <= 10 * FRAME
            assert tier.shortfall(0) <= 0

    asyncio.run(body())


def test_frames_that_encryption_makes_longer_never_exceed_the_capacity() -> None:
    async def body() -> None:
        shelf, full = Shelf(), 3996  # so that a frame fills two blocks of 4096 bytes to the last byte
        assert frame_bytes(2 * full, 1) == 8192 < frame_bytes(2 * full + 1, 1)
        capacity = 10 * 8192
        async with below(shelf, "aes-gcm", keyed(k=ONE), capacity=capacity) as manager:
            tier = manager.tier("low")
            client = Client(manager, namespace(page_bytes=full))
            for first in range(0, 3000, 100):
                client.store(client.frames(chain(range(first, first + 4))))
                assert tier.used <= capacity
                if first % 500 == 0:
                    await client.settled()
                    assert tier.used == sum(map(len, shelf.frames.values())) <= capacity
            assert set(map(len, shelf.frames.values())) == {12288}

    asyncio.run(body())


def test_what_gets_no_smaller_is_stored_as_it_is() -> None:
    async def body() -> None:
        shelf = Shelf()
        async with below(shelf, "bf16-planes", keyed()) as manager:
            client = await stored(manager, range(4))
            [frame] = shelf.frames.values()
            assert parse_trailer(frame[-4096:]).codec == "identity"
            assert len(frame) == FRAME
            assert await loads(client, range(4)) == [True]

    asyncio.run(body())


@pytest.mark.parametrize(
    ("writer", "reader"),
    [
        *itertools.product(["identity", "zlib", "zstd+aes-gcm"], ["identity", "bf16-planes"]),
        ("zstd+aes-gcm", "aes-gcm"),
        ("aes-gcm", "zstd+aes-gcm"),
    ],
)
def test_a_shared_store_may_hold_frames_of_any_codec(writer: str, reader: str) -> None:
    """The second node writes with another codec than the first; what it loads goes on into a tier of its own."""

    async def body() -> None:
        first = Shelf(shared=True)
        async with below(first, writer, keyed(k=ONE)) as manager:
            await stored(manager, range(8), Compressible)
        remote, local = keep(first), Shelf()
        both = [
            (local, {"name": "local", "capacity": 20 * FRAME, "write": "demote"}),
            (remote, {"name": "remote", "codec": reader}),
        ]
        async with storage(ram=8 * FRAME, below=both, codecs=keyed(k=ONE)) as manager:
            client = Compressible(manager, namespace())
            assert await loads(client, range(8)) == [True, True]
            assert manager.tier("ram").used == 2 * FRAME, "no byte more than the frames have"
            names = (client.space.id, b"".join(chain(range(8)).digests))
            assert (await client.wait(p.Move(*names, "ram", "local", keep=True))).count == 2
            for key, frame in local.frames.items():
                assert verify(memoryview(frame), key).codec == "identity"
            assert len(local.frames) == 2
            client.ask(p.Clear(None, "ram"))
        assert not remote.aside

    asyncio.run(body())


def test_a_frame_in_a_shared_store_may_be_longer_than_as_it_is() -> None:
    async def body() -> None:
        shelf, space = Shelf(shared=True), namespace(page_bytes=3996)
        for _ in range(2):
            async with below(shelf, "aes-gcm", keyed(k=ONE)) as manager:
                client = Client(manager, space)
                client.store(client.frames(chain(range(8))))
                await client.settled()
                assert await loads(client, range(8)) == [True, True]
            assert {len(frame) for key, frame in shelf.frames.items() if key != MARK} == {8192 + 4096}
            shelf = keep(shelf)

    asyncio.run(body())


def test_a_frame_stored_below_with_a_codec_is_sealed_before_it_goes_elsewhere() -> None:
    async def body() -> None:
        packed, plain = Shelf(), Shelf()
        tiers = [
            (packed, {"name": "packed", "capacity": 20 * FRAME, "codec": "zlib"}),
            (plain, {"name": "plain", "capacity": 20 * FRAME, "write": "demote"}),
        ]
        async with storage(ram=8 * FRAME, below=tiers, codecs=keyed()) as manager:
            client = await stored(manager, range(8), Compressible)
            names = (client.space.id, b"".join(chain(range(8)).digests))
            assert (await client.wait(p.Move(*names, "ram", "plain", keep=True))).count == 2
            for key, frame in plain.frames.items():
                assert verify(memoryview(frame), key).codec == "identity"
            client.ask(p.Clear(None, "packed"))
            await client.settled()
            assert await loads(client, range(8)) == [True, True]

    asyncio.run(body())


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("found", [{"k": TWO}, {"other": ONE}, {}])
def test_a_wrong_key_is_a_counted_miss_and_deletes_nothing(shared: bool, found: dict[str, str]) -> None:
    async def body() -> None:
        first = Shelf(shared=shared)
        async with below(first, "aes-gcm", keyed(k=ONE)) as manager:
            client = await stored(manager, range(8))
            assert await loads(client, range(8)) == [True, True]
        second = keep(first)
        name = next(iter(found), "k")
        async with below(second, "aes-gcm" if found else "identity", keyed(name, **found)) as manager:
            client = Client(manager, namespace())
            tier = manager.tier("low")
            assert await loads(client, range(8)) == [False, False]
            assert unreadable(manager) >= 2
            assert second.frames == first.frames
            assert not second.aside
            assert manager.metrics.value("lmkv_corrupt_frames_total") == 0
            assert tier.used == sum(map(len, second.frames.values())) * (not shared), (
                "they count as long as they lie there"
            )
            assert tier.health().state is HealthState.OK
            if not shared:
                assert (await client.look_up(chain(range(8)))).chunks == 0, "not offered again"
        third = keep(second)
        async with below(third, "aes-gcm", keyed(k=ONE)) as manager:
            assert await loads(Client(manager, namespace()), range(8)) == [True, True]

    asyncio.run(body())


@pytest.mark.parametrize("shared", [False, True])
def test_what_cannot_be_read_is_replaced_when_it_is_computed_anew(shared: bool) -> None:
    async def body() -> None:
        first = Shelf(shared=shared)
        async with below(first, "aes-gcm", keyed(k=ONE)) as manager:
            await stored(manager, range(8))
        second = keep(first)
        async with below(second, "aes-gcm", keyed("new", new=TWO)) as manager:
            client = Client(manager, namespace())
            assert await loads(client, range(8)) == [False, False]
            client.store(client.frames(chain(range(8))))
            await client.settled()
            assert await loads(client, range(8)) == [True, True]
            tier = manager.tier("low")
            assert tier.used == sum(map(len, second.frames.values())) * (not shared)
            assert not tier.unreadable

    asyncio.run(body())


def test_what_cannot_be_read_makes_room_and_can_be_cleared() -> None:
    async def body() -> None:
        first = Shelf()
        async with below(first, "aes-gcm", keyed(k=ONE)) as manager:
            await stored(manager, range(20))
        second = keep(first)
        async with below(second, "aes-gcm", keyed("new", new=TWO), capacity=7 * (FRAME + 4096)) as manager:
            client = Client(manager, namespace())
            assert not any(await loads(client, range(20)))
            assert len(manager.tier("low").unreadable) == 5
            client.store(client.frames(chain(range(100, 124))))
            await client.settled()
            assert await loads(client, range(100, 124)) == [True] * 6
            assert len(second.frames) <= 7 * (FRAME + 4096) // FRAME
        third = keep(first)
        async with below(third, "aes-gcm", keyed("new", new=TWO)) as manager:
            client = Client(manager, namespace())
            assert not any(await loads(client, range(20)))
            assert client.ask(p.Clear(client.space.id, "low")).counts == {"low": 5}
            await client.settled()
            assert not third.frames
            assert manager.tier("low").used == 0

    asyncio.run(body())


def test_an_unreadable_frame_makes_room_also_when_its_chunk_is_in_memory() -> None:
    async def body() -> None:
        first = Shelf()
        async with below(first, "aes-gcm", keyed(k=ONE)) as manager:
            await stored(manager, range(4))
        second, room = keep(first), 3 * FRAME + 4096
        async with below(second, "aes-gcm", keyed("new", new=TWO), capacity=room, write="demote") as manager:
            client = Client(manager, namespace())
            assert await loads(client, range(4)) == [False]
            for tokens in (range(4), range(100, 112)):
                client.store(client.frames(chain(tokens)))
            digests = b"".join(chain(range(100, 112)).digests)
            assert (await client.wait(p.Move(client.space.id, digests, "ram", "low", keep=True))).count == 3
            assert not manager.tier("low").unreadable
            assert await loads(client, range(100, 112)) == [True] * 3

    asyncio.run(body())


def test_keys_are_rotated() -> None:
    async def body() -> None:
        shelf = Shelf()
        async with below(shelf, "aes-gcm", keyed(k=ONE)) as manager:
            await stored(manager, range(8))
        both = keyed("new", k=ONE, new=TWO)
        shelf = keep(shelf)
        async with below(shelf, "aes-gcm", both) as manager:
            client = Client(manager, namespace())
            assert await loads(client, range(8)) == [True, True]
            names = (client.space.id, b"".join(chain(range(8)).digests))
            assert (await client.wait(p.Recode(*names, "low", "aes-gcm"))).count == 2
        shelf = keep(shelf)
        async with below(shelf, "aes-gcm", keyed("new", new=TWO)) as manager:
            assert await loads(Client(manager, namespace()), range(8)) == [True, True]

    asyncio.run(body())


def test_an_encrypting_tier_stores_nothing_in_the_clear() -> None:
    async def body() -> None:
        shelf = Shelf()
        async with below(shelf, "zstd+aes-gcm", keyed(k=ONE)) as manager:
            client = await stored(manager, range(8))
            names = (client.space.id, b"".join(chain(range(8)).digests))
            for codec in ("identity", "zlib"):
                with pytest.raises(ConfigError, match=r"tier 'low' encrypts \(zstd\+aes-gcm\): it stores nothing with"):
                    await client.wait(p.Recode(*names, "low", codec))
            assert (await client.wait(p.Recode(*names, "low", "aes-gcm"))).count == 2
            for key, frame in shelf.frames.items():
                raw = client.payload(key.digest, 0, 2 * PAGE_BYTES).tobytes()
                assert not any(raw[i : i + 8] in frame for i in range(0, len(raw), 100))
                assert parse_trailer(frame[-4096:]).codec == "aes-gcm"
            assert await loads(client, range(8)) == [True, True]
            with pytest.raises(PluginError, match="no codec 'zlb'"):
                await client.wait(p.Recode(*names, "low", "zlb"))

    asyncio.run(body())


def resealed(frame: bytes, key: ChunkKey, payload: bytes | None = None, **changes: Any) -> bytes:
    """The frame as somebody without the key can change it: all checksums are right."""
    trailer = parse_trailer(frame[-4096:])
    body = frame[: trailer.payload_bytes] if payload is None else payload
    trailer = replace(trailer, key=key, payload_bytes=len(body), **changes)
    made = bytearray(frame_bytes(len(body), len(trailer.prefixes), trailer.codec))
    made[: len(body)] = body
    seal(memoryview(made), trailer)
    return bytes(made)


def _flipped(frames: dict[ChunkKey, bytes], key: ChunkKey) -> bytes:
    body = bytearray(frames[key][: parse_trailer(frames[key][-4096:]).payload_bytes])
    body[200] ^= 1
    return resealed(frames[key], key, bytes(body))


CHANGES: dict[str, Callable[[dict[ChunkKey, bytes], ChunkKey], bytes]] = {
    "a bit": _flipped,
    "another chunk's frame": lambda frames, key: resealed(frames[next(k for k in frames if k != key)], key),
    "page prefixes": lambda frames, key: resealed(frames[key], key, prefixes=(b"\x07" * 32,)),
    "the chunk before it": lambda frames, key: resealed(frames[key], key, parent=b"\x07" * 32),
    "its length": lambda frames, key: resealed(
        frames[key], key, frames[key][: parse_trailer(frames[key][-4096:]).payload_bytes - 1]
    ),
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_somebody_without_the_key_has_changed_is_refused(change: str) -> None:
    async def body() -> None:
        first = Shelf()
        async with below(first, "aes-gcm", keyed(k=ONE)) as manager:
            await stored(manager, range(8))
        second = keep(first)
        key = next(k for k in second.frames if k.digest == chain(range(8)).digests[1])
        second.frames[key] = CHANGES[change](first.frames, key)
        async with below(second, "aes-gcm", keyed(k=ONE)) as manager:
            client = Client(manager, namespace())
            assert await loads(client, range(8)) == [True, False]
            assert manager.metrics.value("lmkv_corrupt_frames_total", tier="low") == 1
            assert second.aside == [key]

    asyncio.run(body())


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("codec", ["identity", "zlib"])
def test_an_encrypting_tier_loads_nothing_that_is_in_the_clear(codec: str, shared: bool) -> None:
    """Whoever can write to the store could put KV of their own choice there, with all checksums right."""

    async def body() -> None:
        first = Shelf(shared=shared)
        async with below(first, "zstd+aes-gcm", keyed(k=ONE)) as manager:
            await stored(manager, range(8))
        second = keep(first)
        key = next(k for k in second.frames if k.digest == chain(range(8)).digests[1])
        forged = b"".join(
            keyed()(codec).encode(memoryview(bytes(2 * PAGE_BYTES)), Payload(key=key, raw_bytes=2 * PAGE_BYTES))
        )
        second.frames[key] = resealed(first.frames[key], key, forged, codec=codec)
        async with below(second, "zstd+aes-gcm", keyed(k=ONE)) as manager:
            client = Client(manager, namespace())
            assert await loads(client, range(8)) == [True, False]
            assert unreadable(manager) == 1
            assert not second.aside, "it may be of a node that does not encrypt"
            client.store(client.frames(chain(range(8))))
            await client.settled()
            assert await loads(client, range(8)) == [True, True], "computed anew, and stored encrypted"

    asyncio.run(body())


def test_equal_chunks_do_not_look_alike() -> None:
    async def body() -> None:
        frames = []
        for _ in range(2):
            shelf = Shelf()
            async with below(shelf, "aes-gcm", keyed(k=ONE)) as manager:
                await stored(manager, range(4))
            frames += shelf.frames.values()
        assert frames[0] != frames[1], "a fresh nonce each time"

    asyncio.run(body())


def test_a_decode_that_gets_no_turn_is_no_sign_of_damage() -> None:
    async def body() -> None:
        shelf = Shelf()
        async with below(shelf, "zlib", keyed()) as manager:
            client = await stored(manager, range(4), Compressible)
            tier = manager.tier("low")
            whole = tier.decode

            async def busy(*args: Any, **more: Any) -> MissReason:
                return MissReason.DEADLINE

            tier.decode = busy  # type: ignore[method-assign]
            assert await loads(client, range(4)) == [False]
            assert len(tier.index) == 1
            tier.decode = whole  # type: ignore[method-assign]
            assert await loads(client, range(4)) == [True]

    asyncio.run(body())


@pytest.mark.parametrize(("dtype", "fits"), [("bfloat16", True), ("float16", True), ("float32", False), ("fp8", False)])
def test_fp8_refuses_other_kv_when_an_engine_registers(dtype: str, fits: bool) -> None:
    async def body() -> None:
        layout: Any = {"name": "rig", "dtype": dtype, "page_tokens": 2, "runs": [PAGE_BYTES], "tags": []}
        space = replace(namespace(), layouts=(layout,))
        shelf = Shelf()
        async with below(shelf, "fp8", keyed()) as manager:
            if fits:
                client = Client(manager, space)
                client.store(client.frames(chain(range(4))))
                await client.settled()
                [frame] = shelf.frames.values()
                assert parse_trailer(frame[-4096:]).codec == "fp8"
                assert parse_trailer(frame[-4096:]).payload_bytes < 2 * PAGE_BYTES * 0.55 + 800
            else:
                with pytest.raises(ConfigError, match=f"tier 'low': codec 'fp8' compresses KV of .*not of {dtype}"):
                    Client(manager, space)

    asyncio.run(body())


def test_the_mark_of_a_shared_store_tells_a_wrong_key(caplog: pytest.LogCaptureFixture) -> None:
    async def body() -> None:
        shelf = Shelf(shared=True)
        for _ in range(2):
            async with below(shelf, "zstd+aes-gcm", keyed(k=ONE)) as manager:
                await stored(manager, range(4))
        assert MARK in shelf.frames
        assert len(shelf.frames) == 2
        before = shelf.frames[MARK]
        leave_mark(shelf, keyed(k=ONE), keyed(k=ONE)("aes-gcm"))
        with pytest.raises(UnreadableError, match="another key than the one given here as 'k'") as caught:
            leave_mark(shelf, keyed(k=TWO), keyed(k=TWO)("aes-gcm"))
        assert caught.value.kind == WRONG_KEY
        assert shelf.frames[MARK] == before
        assert not caplog.records
        async with below(shelf, "aes-gcm", keyed(k=TWO)) as manager:
            await stored(manager, range(100, 104))
        [record] = caplog.records
        assert "another key" in record.getMessage()
        leave_mark(shelf, keyed("n", n=TWO), keyed("n", n=TWO)("aes-gcm"))
        assert shelf.frames[MARK] != before, "a retired key is no mistake"

    with caplog.at_level(logging.WARNING):
        asyncio.run(body())


def test_the_mark_is_tried_again_after_a_failure() -> None:
    async def body() -> None:
        shelf = Shelf(shared=True)
        shelf.on_get = lambda keys: [FAILED(OSError("down"))] * len(keys)
        async with below(shelf, "aes-gcm", keyed(k=ONE)) as manager:
            client = await stored(manager, range(4))
            assert not shelf.frames
            shelf.on_get = lambda _: None
            client.store(client.frames(chain(range(100, 104))))
            await client.settled()
            assert MARK in shelf.frames
            assert len(shelf.frames) == 2

    asyncio.run(body())


def test_no_mark_where_nothing_is_encrypted_or_shared() -> None:
    async def body() -> None:
        for shelf, codec in ((Shelf(shared=True), "zstd"), (Shelf(), "aes-gcm")):
            async with below(shelf, codec, keyed(k=ONE)) as manager:
                await stored(manager, range(4))
            assert MARK not in shelf.frames

    asyncio.run(body())


def test_own_frames_tell_a_wrong_key() -> None:
    async def body() -> None:
        shelf = Shelf()
        async with below(shelf, "aes-gcm", keyed(k=ONE)) as manager:
            await stored(manager, range(8))
        right, wrong, other = keyed(k=ONE), keyed(k=TWO), keyed("n", n=ONE)
        assert not look_at_frames(shelf, right, right("aes-gcm"))
        with pytest.raises(UnreadableError, match="another key"):
            look_at_frames(shelf, wrong, wrong("zstd+aes-gcm"))
        assert "a key that is not given here" in look_at_frames(shelf, other, other("aes-gcm"))
        assert not look_at_frames(Shelf(), wrong, wrong("aes-gcm"))

    asyncio.run(body())
