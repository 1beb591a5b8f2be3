"""What comes over a peer connection: anything. What is made of it: a message, or an error."""

from __future__ import annotations

import asyncio
import contextlib
import pickle
import random
import secrets
import struct
import time
from collections import Counter
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from peer_rig import KEY, SPACE, Peer, eventually, peer
from storage_rig import chain

from lmkv.errors import ConfigError, LmkvError, ProtocolError
from lmkv.peer import messages as m
from lmkv.peer import wire
from lmkv.peer.connection import Connection, open_connection
from lmkv.peer.handshake import CONNECTS, LISTENS, Identity, proof
from lmkv.peer.line import Line, take_ready
from lmkv.peer.transport import TransportError
from lmkv.peer.wire import open_data

if TYPE_CHECKING:
    from lmkv.keys import KeyChain
    from lmkv.peer.transport import Reach

DIGEST = b"d" * 32
SAMPLES: tuple[m.PeerMessage, ...] = (
    m.PeerHello(m.VERSION, "n", 1, b"n" * 32),
    m.PeerChallenge(m.VERSION, "n", 1, b"n" * 32, b"p" * 32),
    m.PeerProof(b"p" * 32, {"tcp": b""}),
    m.PeerWelcome(1, b"t" * 16, {"tcp": b""}, 1 << 20, 256, 30.0),
    m.DataHello(1, b"t" * 16, 0),
    m.PeerRefused("k", "m"),
    m.PeerOk(3),
    m.Agree(SPACE.json()),
    m.Has(SPACE.id, DIGEST * 3),
    m.Holds(b"\x05", 0.5),
    m.Lease(SPACE.id, DIGEST * 2, (0, 1), 5.0),
    m.Leased(7, (0, -1), (4096, 0), 5.0),
    m.Release(7),
    m.Reserve("t", SPACE.id, 0, (m.NewFrame(DIGEST, b"", 2, DIGEST),)),
    m.Reserved(8, (4096,), (4096,), 5.0),
    m.Commit(8, (0,)),
    m.Committed(("", "frame: no")),
    m.Abort(8, done=False),
    m.Admit("t", 100, SPACE.id),
    m.Admitted("t", 4096, 5.0),
    m.NoRoom(4096, 0, 0.2, 1),
    m.Finish("t", "complete", 100),
    m.Await("t", 1.0),
    m.TransferState("open", 1, 2),
)
OPENINGS, REQUESTS, REPLIES = (
    kinds.__args__  # type: ignore[attr-defined]
    for kinds in (m.Opening, m.Request, m.Reply)
)


def decoded(body: bytes) -> list[Any]:
    """What each of the decoders makes of it; none may raise anything but ProtocolError."""
    found: list[Any] = []
    for decode in (wire.decode_opening, wire.decode_request, wire.decode_reply):
        try:
            found.append(decode(body))
        except ProtocolError:
            found.append(None)
    return found


@pytest.mark.parametrize("message", SAMPLES, ids=lambda sample: type(sample).__name__)
def test_round_trip(message: m.PeerMessage) -> None:
    data = wire.encode(5, message)
    assert wire.length_of(data[:4], m.MAX_MESSAGE) == len(data) - 4
    opening, request, reply = decoded(data[4:])
    for found, kinds in (
        (opening, OPENINGS),
        ((request or (5, None))[1], REQUESTS),
        ((reply or (5, None))[1], REPLIES),
    ):
        assert found == (message if isinstance(message, kinds) else None)


def test_every_message_is_tried() -> None:
    assert {type(sample) for sample in SAMPLES} == {*OPENINGS, *REQUESTS, *REPLIES}


def test_a43_ten_thousand_random_peer_messages() -> None:
    rng = random.Random(43)
    for number in range(10_000):
        if number % 2:
            body = rng.randbytes(rng.randrange(200))
        else:  # a message of ours with some bytes changed, cut or added
            body = bytearray(wire.encode(rng.randrange(9), rng.choice(SAMPLES))[4:])
            for _ in range(rng.randrange(1, 4)):
                body[rng.randrange(len(body))] = rng.randrange(256)
            body = bytes(body[: rng.randrange(len(body) + 1)] if number % 3 else body)
        for found in decoded(body):
            message = found[1] if isinstance(found, tuple) else found
            assert message is None or isinstance(message, m.PeerMessage)


@pytest.mark.parametrize(
    "body",
    [
        pickle.dumps({"a": 1}),
        b"\x93\x01\xa3Has" * 50_000,
        b"\x91" * 100_000,  # arrays in arrays
        b"\xdd\xff\xff\xff\xff",  # an array of four billion elements
        b"\x92\x01\xc6\xff\xff\xff\xff",  # a blob of four billion bytes
        msgspec.msgpack.encode((1, ["Has", b"n", "not bytes"])),
        msgspec.msgpack.encode((1 << 63, ["PeerOk", 1])),
        msgspec.msgpack.encode((1, ["__reduce__", 1])),
        msgspec.msgpack.encode({"type": "Has"}),
    ],
)
def test_a43_hostile_bodies(body: bytes) -> None:
    for found in decoded(body):
        assert found is None or isinstance(found[1] if isinstance(found, tuple) else found, m.PeerMessage)


def test_a43_lengths_are_refused_before_anything_is_allocated() -> None:
    with pytest.raises(ProtocolError, match="claims"):
        wire.length_of(struct.pack("<I", m.MAX_MESSAGE + 1), m.MAX_MESSAGE)
    with pytest.raises(ProtocolError, match="bytes of digests"):
        m.split_digests(b"x" * 33)
    with pytest.raises(ProtocolError, match="bytes of digests"):
        m.split_digests(DIGEST * (m.MAX_DIGESTS + 1))
    with pytest.raises(ProtocolError, match="the limit is"):
        wire.encode(1, m.Has(SPACE.id, b"x" * (m.MAX_MESSAGE + 1)))


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=300))
def test_any_bytes(body: bytes) -> None:
    decoded(body)


# --- against a node that listens -------------------------------------------------------------------------------------


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


async def says(node: Peer, data: bytes) -> bytes:
    """What the node answers before it closes the connection."""
    host, port = node.address.rsplit(":", 1)
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        writer.write(data)
        await writer.drain()
        return await asyncio.wait_for(reader.read(), 20)
    except ConnectionError:
        return b""
    finally:
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()


async def connection(node: Peer, key: str = "", name: str = "stranger") -> Connection:
    host, port = node.address.rsplit(":", 1)
    me = Identity(name, secrets.randbits(60) + 1, key.encode())
    return await open_connection(host, int(port), me, {"tcp": b""}, purpose="node", tls=None)


@pytest.mark.anyio
@pytest.mark.parametrize(
    "data",
    [
        pickle.dumps([1, 2, 3]) + b"\x00" * 64,
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        wire.CONTROL + struct.pack("<Q", 1 << 60),
        wire.CONTROL + struct.pack("<I", m.HELLO_LIMIT + 1) + b"x" * 100,
        wire.CONTROL + struct.pack("<I", 20) + b"\x80\x04" * 10,
        wire.CONTROL + wire.encode(0, m.DataHello(1, b"t" * 16, 0)),
        wire.CONTROL + wire.encode(1, m.Has(SPACE.id, DIGEST)),
        wire.CONTROL + wire.encode(0, m.PeerHello(m.VERSION + 1, "n", 1, b"n" * 32)),
        wire.CONTROL + wire.encode(0, m.PeerHello(m.VERSION, "n" * 1000, 1, b"n" * 32)),
        wire.CONTROL + wire.encode(0, m.PeerHello(m.VERSION, "n", 1, b"short")),
        wire.DATA + wire.encode(0, m.DataHello(1, b"t" * 16, 0)),
        wire.DATA + wire.encode(0, m.DataHello(0, b"", 0)),
        wire.DATA + wire.encode(0, m.PeerHello(m.VERSION, "n", 1, b"n" * 32)),
        wire.DATA + struct.pack("<I", 1 << 31),
    ],
)
async def test_a43_strangers_are_cut_off_and_the_node_still_answers(data: bytes) -> None:
    async with peer("b", key=KEY) as b, peer("a", key=KEY) as a:
        answer = await says(b, data)
        if answer:
            with_refusal = wire.decode_reply(answer[4:])[1]
            assert isinstance(with_refusal, (m.PeerRefused, m.PeerChallenge))
        has, _ = await a.on(a.link(b).has(SPACE.id, [DIGEST], time.monotonic() + 10))
        assert has == [False]


@pytest.mark.anyio
async def test_who_does_not_know_the_key_gets_nothing() -> None:
    async with peer("b", key=KEY) as b:
        for key in ("", KEY + "x", KEY[:-1]):
            with pytest.raises(ProtocolError) as e:
                await connection(b, key)
            assert e.value.kind == "key"
            assert KEY not in str(e.value)
        good = await connection(b, KEY)
        good.close("enough")
        # A stranger without a check of his own: he cannot answer the challenge, not even with the node's own proof.
        host, port = b.address.rsplit(":", 1)
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(wire.CONTROL + wire.encode(0, m.PeerHello(m.VERSION, "n", 5, b"n" * 32)))
        challenge = wire.decode_reply(await _body(reader))[1]
        assert isinstance(challenge, m.PeerChallenge)
        writer.write(wire.encode(0, m.PeerProof(challenge.proof, {})))
        refused = wire.decode_reply(await _body(reader))[1]
        assert isinstance(refused, m.PeerRefused)
        assert refused.kind == "key"
        writer.close()
        await eventually(lambda: not b.hall.sessions)


@pytest.mark.anyio
async def test_a_data_socket_needs_the_token_of_a_session_that_lives() -> None:
    def admitted(reach: Reach) -> bool:
        line = Line(open_data(reach, 0, time.monotonic() + 20))
        try:
            take_ready(line, time.monotonic() + 20)
        except TransportError:
            return False
        finally:
            line.close()
        return True

    async with peer("b", key=KEY) as b:
        one, other = [await connection(b, KEY, name) for name in ("n", "o")]
        token = one.reach.token
        others = (bytes(len(token)), token[:-1], b"", other.reach.token)
        for reach in (one.reach, *(one.reach._replace(token=each) for each in others)):
            assert await asyncio.to_thread(admitted, reach) is (reach is one.reach)
        one.close("enough")
        await eventually(lambda: len(b.hall.sessions) == 1)
        assert not await asyncio.to_thread(admitted, one.reach)
        other.close("enough")


@pytest.mark.anyio
async def test_a_handshake_that_was_overheard_is_worth_nothing() -> None:
    """The same hello and the same proof once more: the node has another nonce now."""
    async with peer("b", key=KEY) as b:
        host, port = b.address.rsplit(":", 1)
        hello, heard, came = m.PeerHello(m.VERSION, "n", 5, b"n" * 32), b"", []
        for _ in range(2):
            reader, writer = await asyncio.open_connection(host, int(port))
            writer.write(wire.CONTROL + wire.encode(0, hello))
            challenge = wire.decode_reply(await _body(reader))[1]
            assert isinstance(challenge, m.PeerChallenge)
            heard = heard or proof(KEY.encode(), CONNECTS, hello, challenge)
            writer.write(wire.encode(0, m.PeerProof(heard, {})))
            came.append(type(wire.decode_reply(await _body(reader))[1]))
            writer.close()
        assert came == [m.PeerWelcome, m.PeerRefused]
        await eventually(lambda: not b.hall.sessions)


def test_a_proof_is_of_all_that_was_said() -> None:
    hello, challenge = m.PeerHello(1, "a", 1, b"n" * 32, "node"), m.PeerChallenge(1, "b", 2, b"c" * 32, b"")
    replace = msgspec.structs.replace
    others = [{"version": 2}, {"node": "x"}, {"incarnation": 9}, {"nonce": b"x" * 32}]
    hellos = [hello, *(replace(hello, **change) for change in [*others, {"purpose": "control"}])]
    said = [(each, challenge) for each in hellos] + [(hello, replace(challenge, **change)) for change in others]
    proofs = {proof(key, role, *each) for each in said for role in (LISTENS, CONNECTS) for key in (b"k", b"l")}
    assert len(proofs) == 4 * len(said)


def guesses(hello: m.PeerHello, challenge: m.PeerChallenge) -> tuple[bytes, ...]:
    """Noise, a proof without a key, and one of the other role."""
    key = KEY.encode()
    return b"p" * 32, proof(b"", LISTENS, hello, challenge), proof(key, CONNECTS, hello, challenge)


@pytest.mark.anyio
@pytest.mark.parametrize("which", range(3))
async def test_a_listener_that_does_not_know_the_key_gets_no_proof(which: int) -> None:
    """Whoever sits on the port of a node that is away learns nothing, and nothing is asked of him."""
    said: list[bytes] = []

    async def rogue(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        assert await reader.readexactly(8) == wire.CONTROL
        hello = wire.decode_opening(await _body(reader))
        assert isinstance(hello, m.PeerHello)
        nonce = b"r" * 32
        unproved = m.PeerChallenge(m.VERSION, "b", 7, nonce, b"")
        guess = guesses(hello, unproved)[which]
        writer.write(wire.encode(0, m.PeerChallenge(m.VERSION, "b", 7, nonce, guess)))
        said.append(await reader.read())
        writer.close()

    server = await asyncio.start_server(rogue, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    async with peer("a", key=KEY) as a:
        with pytest.raises(ProtocolError) as e:
            await a.on(a.link(f"127.0.0.1:{port}").has(SPACE.id, [DIGEST], time.monotonic() + 10))
        assert e.value.kind == "key"
    server.close()
    await server.wait_closed()
    assert said == [b""]


async def _body(reader: asyncio.StreamReader) -> bytes:
    return await reader.readexactly(wire.length_of(await reader.readexactly(4), m.MAX_MESSAGE))


class Wilds:
    """Requests of the right form and wild content."""

    def __init__(self, keys: KeyChain) -> None:
        self.rng = random.Random(7)
        self.keys = keys

    def number(self) -> int:
        return self.rng.choice([0, 1, -1, 7, 1 << 40, -(1 << 63), (1 << 64) - 1, self.rng.randrange(1 << 62)])

    def blob(self) -> bytes:
        noise = self.rng.randbytes(self.rng.randrange(70))
        return self.rng.choice([b"", DIGEST, b"".join(self.keys.digests), noise, SPACE.id])

    def name(self) -> str:
        return self.rng.choice(["", "t", "t" * 300, "ü", "\x00", "complete", SPACE.json()])

    def seconds(self) -> float:
        return self.rng.choice([-1.0, 1e300, float("nan"), float("inf"), 0.01])

    def flag(self) -> bool:
        return bool(self.rng.randrange(2))

    def request(self) -> m.PeerMessage:
        number, blob, name, keys = self.number, self.blob, self.name, self.keys
        frame = m.NewFrame(blob(), blob(), number(), blob())
        good = m.NewFrame(keys.digests[1], keys.digests[0], 2, b"".join(keys.prefixes(1)[:1]))
        space, shard = self.rng.choice([SPACE.id, blob()]), self.rng.choice([0, number()])
        return self.rng.choice(
            [
                m.Agree(name()),
                m.Has(space, blob(), self.flag()),
                m.Lease(space, blob(), (shard, 0), self.seconds(), self.flag(), self.seconds()),
                m.Release(number()),
                m.Reserve(self.rng.choice(["", name()]), space, shard, (self.rng.choice([frame, good]),)),
                m.Commit(number(), (number(),)),
                m.Abort(number(), self.flag()),
                m.Admit(name(), number(), self.rng.choice([space, b""]), self.rng.choice(["m", ""])),
                m.Finish(name(), name(), number()),
                m.Await(name(), self.rng.choice([-1.0, 0.01])),
            ]
        )

    def give_back(self, reply: m.PeerMessage) -> m.Release | m.Abort | None:
        """Half of what was given."""
        if isinstance(reply, m.Leased) and reply.lease and self.flag():
            return m.Release(reply.lease)
        if isinstance(reply, m.Reserved) and reply.reservation and self.flag():
            return m.Abort(reply.reservation)
        return None


async def outcome(one: Connection, message: Any, wilds: Wilds) -> str:
    if isinstance(message, (m.Release, m.Abort)):
        one.tell(message)
        return "told"
    try:
        reply = await one.ask(message, time.monotonic() + 20)
    except LmkvError as e:
        return e.kind
    if (back := wilds.give_back(reply)) is not None:
        one.tell(back)
    return "answered"


@pytest.mark.anyio
async def test_a43_random_requests_of_an_admitted_peer() -> None:
    """Each is answered, refused, or ends the connection; nothing stays held."""
    keys = chain(range(8))
    wilds = Wilds(keys)
    async with peer("b") as b:
        b.store(keys)
        one = await connection(b)
        seen: Counter[str] = Counter()
        for _ in range(1500):
            if not one.alive:
                one = await connection(b)
            seen[await outcome(one, wilds.request(), wilds)] += 1
        assert seen["answered"] > 100
        assert seen["protocol"] > 100
        assert not seen["internal"]
        one.close("enough")
        await one.closed()
        await eventually(lambda: not b.hall.sessions)
        b.hall.incoming.close()
        await eventually(b.at_rest)


def test_what_a_peer_says_is_shown_short_and_in_one_line() -> None:
    error = wire.error_of(m.PeerRefused("k\n" * 5000, "a\nb\x1b[31m" + "x" * 100_000, "config", retryable=True), "b")
    assert isinstance(error, ConfigError)
    assert str(error).startswith("peer b: a?b?[31mxxx")
    assert len(str(error)) < 1100
    assert len(error.kind) < 1100
    assert "\n" not in str(error) + error.kind
    assert error.retryable
    assert type(wire.error_of(m.PeerRefused("k", "m", "no such family"), "b")) is LmkvError
