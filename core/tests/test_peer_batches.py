"""How much one message between nodes may ask for, and what it may do to others while it is served."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Any

import pytest
from peer_rig import SPACE, drop, eventually, peer, sealed
from storage_rig import FRAME, chain

from lmkv.errors import LmkvError
from lmkv.peer import messages as m
from lmkv.peer import reservations
from lmkv.peer.link import PeerLink
from lmkv.types import OutcomeKind

if TYPE_CHECKING:
    from lmkv.keys import KeyChain

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


def heads(keys: KeyChain) -> tuple[m.NewFrame, ...]:
    """The frames of a prompt, as they are announced."""
    return tuple(m.NewFrame(digest, keys.parent(i), 2, keys.prefixes(i)[0]) for i, digest in enumerate(keys.digests))


async def test_more_than_the_loop_bears_is_refused() -> None:
    digest = b"d" * 32
    many = tuple(m.NewFrame(i.to_bytes(32, "big"), b"", 2, digest) for i in range(m.MAX_FRAMES + 1))
    names = digest * (m.MAX_FRAMES // 2 + 1)
    async with peer("a") as a, peer("b") as b:
        for request in (
            m.Reserve("", SPACE.id, 0, many),
            m.Has(SPACE.id, digest * (m.MAX_DIGESTS + 1)),
            m.Lease(SPACE.id, names, (0, 1), 5.0),
            m.Commit(7, tuple(range(m.MAX_FRAMES + 1))),
            m.Reserve("", SPACE.id, 0, (m.NewFrame(digest, b"", 2, bytes(m.MAX_PREFIXES + 1)),)),
        ):
            with pytest.raises(LmkvError):
                await a.on(a.link(b).ask(request, time.monotonic() + 20))
        assert b.manager.stack.room.filling == 0


async def test_what_is_asked_for_at_once_is_asked_in_portions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever calls a link need not know how much a message may ask for."""
    keys, asked = chain(range(16)), []
    names = [i.to_bytes(32, "big") for i in range(m.MAX_DIGESTS + 5)]
    expect = PeerLink._expect

    async def noted(self: PeerLink, request: m.Request, *more: Any) -> m.Reply:
        asked.append(type(request))
        return await expect(self, request, *more)

    monkeypatch.setattr(PeerLink, "_expect", noted)
    async with peer("a", pool=(m.MAX_FRAMES + 16) * FRAME) as a, peer("b") as b:
        b.store(keys)
        digests = [*keys.digests[:2], *names, *keys.digests[2:]]
        has, wait = await a.on(a.link(b).has(SPACE.id, digests, time.monotonic() + 20))
        assert has == [True, True, *[False] * len(names), True, True]
        assert wait == 0.0
        absent = [key._replace(digest=names[i]) for i in range(m.MAX_FRAMES) for key in a.keys(keys)[:1]]
        outcomes, came = await a.pull(b, [*a.keys(keys)[:2], *absent, *a.keys(keys)[2:]])
        assert [o.ok for o in outcomes] == [True, True, *[False] * len(absent), True, True]
        assert len(came) == 4
        assert asked == [m.Has] * 2 + [m.Lease] * 2
        await eventually(b.at_rest)


async def test_a_large_reservation_lets_others_in() -> None:
    """What is to be answered meanwhile is: nobody else's look-up waits for all of it."""
    keys = chain(range(4 * 4 * reservations.PART_FRAMES))
    frames = len(keys.digests)
    async with peer("b", ram=(frames + 8) * FRAME, pool=5 * frames * FRAME) as b:
        session, turns = b.hall.open("a", ["tcp"]), 0

        async def others() -> None:
            nonlocal turns
            while True:
                turns += 1
                await asyncio.sleep(0)

        task = asyncio.ensure_future(others())
        await asyncio.sleep(0)
        before = turns
        reserved = await session.handle(m.Reserve("", SPACE.id, 0, heads(keys)))  # type: ignore[misc]
        task.cancel()
        assert isinstance(reserved, m.Reserved)
        assert min(reserved.offsets) >= 0
        assert turns - before >= 3
        session.handle(m.Abort(reserved.reservation))
        assert b.at_rest()


@pytest.mark.parametrize("end", ["session", "transfer", "time"])
async def test_a_reservation_that_ends_while_memory_is_taken_for_it(end: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reservations, "PART_FRAMES", 1)
    keys = chain(range(16))
    async with peer("b", admission="100%") as b:
        session = b.hall.open("a", ["tcp"])
        name = "t" if end == "transfer" else ""
        if name:
            session.handle(m.Admit(name, 16, SPACE.id))
        pending = asyncio.ensure_future(session.handle(m.Reserve(name, SPACE.id, 0, heads(keys))))  # type: ignore[arg-type]
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert not pending.done()
        assert b.manager.stack.room.filling > 0
        if end == "session":
            session.close()
        elif end == "transfer":
            b.hall.incoming.finish(name, "aborted")
        else:
            session.expire(float("inf"))
        with pytest.raises(LmkvError):
            await pending
        await eventually(b.at_rest)
        assert not b.manager.index.namespaces[SPACE.id].entries


async def test_what_is_said_to_be_there_is_not_evicted_for_the_rest_of_the_batch() -> None:
    """The pusher would count on it, and the look-up would end before it."""
    keys, others = chain(range(16)), chain(range(100, 116))
    async with peer("b", ram=4 * FRAME, pool=40 * FRAME) as b:
        b.store(keys)
        session = b.hall.open("a", ["tcp"])
        batch = (*heads(keys)[:2], *heads(others))
        reserved = await session.handle(m.Reserve("", SPACE.id, 0, batch))  # type: ignore[misc]
        assert isinstance(reserved, m.Reserved)
        assert reserved.offsets[:2] == (m.PRESENT, m.PRESENT)
        assert sum(offset >= 0 for offset in reserved.offsets) == 2
        assert reserved.offsets.count(m.REJECTED) == 2
        has = session.handle(m.Has(SPACE.id, b"".join(keys.digests)))
        assert isinstance(has, m.Holds)
        assert has.bitmap == b"\x03"
        session.handle(m.Abort(reserved.reservation))
        assert b.at_rest()


async def test_a_tail_that_a_longer_frame_has_keeps_that_frame_in_the_batch() -> None:
    keys, others = chain(range(16)), chain(range(100, 116))
    tail = m.NewFrame(keys.prefixes(0)[0], b"", 1, b"")
    async with peer("b", ram=4 * FRAME, pool=40 * FRAME) as b:
        assert b.client is not None
        b.client.store(b.client.frames(keys)[:1])
        b.store(chain(range(200, 212)))
        session = b.hall.open("a", ["tcp"])
        reserved = await session.handle(m.Reserve("", SPACE.id, 0, (tail, *heads(others))))  # type: ignore[misc]
        assert isinstance(reserved, m.Reserved)
        assert reserved.offsets[0] == m.PRESENT
        assert b.manager.index.entry(b.keys(keys)[0]) is not None
        session.handle(m.Abort(reserved.reservation))


async def test_a_push_keeps_what_is_there() -> None:
    """A batch with what is there, what is new and what has no room: a prefix is found afterwards, as it was said."""
    keys = chain(range(32))
    async with peer("a") as a, peer("b", ram=6 * FRAME, pool=40 * FRAME) as b:
        a.store(keys)
        b.store(chain(range(8)))
        frames = sealed(a, keys)
        outcomes = await a.on(a.link(b).push(frames, time.monotonic() + 20))
        drop(frames)
        kinds = [outcome.kind for outcome in outcomes]
        assert kinds == [OutcomeKind.OK] * 6 + [OutcomeKind.REJECTED] * 2
        assert b.client is not None
        assert (await b.client.look_up(keys, hold=False)).chunks == 6
        await eventually(b.at_rest)
