"""The messages between agents and controllers: what they carry, and what is refused."""

from __future__ import annotations

import contextlib
import random

import msgspec
import pytest

from lmkv.agent import messages as m
from lmkv.errors import ProtocolError

DIGESTS = bytes(range(64))
SPACE = b"n" * 16
RAM = m.TierFacts("ram", "cpu", 9, False, True)

FROM_NODE: list[m.Message] = [
    m.Register(
        m.VERSION, "a", 7, 1, {"peer": "h:1"}, ("{}",), (m.TierFacts("ram", "cpu", 9, False, True),), 5.0, ("z",)
    ),
    m.Namespaces(("{}",)),
    m.Events(1, 2, (m.Change(SPACE, 0, DIGESTS, b""),)),
    m.Page(1, 0, True, 0, SPACE, 0, DIGESTS),
    m.Heartbeat(3, (1, 2), 0.5),
    m.Progress("j", 1, 2, {"00": "why"}, {"ram": 1}, m.DONE, ""),
]
COMMANDS: list[m.Command] = [
    m.PinChunks(SPACE, DIGESTS, None),
    m.UnpinChunks(SPACE, DIGESTS),
    m.Fetch("h:1", SPACE, DIGESTS, "ram", 1.0, "{}"),
    m.Fence(SPACE, DIGESTS),
    m.Drop(SPACE, DIGESTS, "ram", 7),
    m.Shift(SPACE, DIGESTS, "ram", "disk", True),
    m.RecodeChunks(SPACE, DIGESTS, "disk", "zlib"),
    m.ClearTier(None, "ram"),
]
FROM_CONTROLLER: list[m.Message] = [
    m.Accepted(30.0),
    m.Refused("version", "why"),
    m.Resync("why"),
    m.Cancel("j"),
    *(m.Do("j", command) for command in COMMANDS),
]


@pytest.mark.parametrize("message", FROM_NODE)
def test_of_a_node(message: m.Message) -> None:
    assert m.decode_from_node(m.encode(message)) == message
    with pytest.raises(ProtocolError):
        m.decode_from_controller(m.encode(message))


@pytest.mark.parametrize("message", FROM_CONTROLLER)
def test_of_a_controller(message: m.Message) -> None:
    assert m.decode_from_controller(m.encode(message)) == message
    with pytest.raises(ProtocolError):
        m.decode_from_node(m.encode(message))


@pytest.mark.parametrize(
    "message",
    [
        m.Page(1, 0, True, 0, SPACE, 0, b"x" * 33),
        m.Page(1, 0, True, 0, SPACE, 0, bytes(32 * (m.MAX_DIGESTS + 1))),
        m.Events(1, 1, (m.Change(SPACE, 0, b"", b"x"),)),
        m.Register(m.VERSION, "a", 1, 1, {}, (), (RAM,) * (m.MAX_TIERS + 1), 5.0),
    ],
)
def test_limits_of_a_node(message: m.Message) -> None:
    with pytest.raises(ProtocolError):
        m.decode_from_node(m.encode(message))


@pytest.mark.parametrize("command", [c for c in COMMANDS if not isinstance(c, m.ClearTier)])
def test_limits_of_a_command(command: m.Command) -> None:
    for digests in (b"x", bytes(32 * (m.MAX_DIGESTS + 1))):
        with pytest.raises(ProtocolError, match=f"at most {m.MAX_DIGESTS}"):
            m.decode_from_controller(m.encode(m.Do("j", msgspec.structs.replace(command, digests=digests))))


def test_what_is_too_long_is_not_sent_and_not_read() -> None:
    with pytest.raises(ProtocolError, match="the limit is"):
        m.encode(m.Resync("x" * m.MAX_MESSAGE))
    with pytest.raises(ProtocolError, match="the limit is"):
        m.decode_from_node(bytes(m.MAX_MESSAGE + 1))


def test_a43_ten_thousand_random_messages() -> None:
    rng = random.Random(43)
    good = [m.encode(message) for message in (*FROM_NODE, *FROM_CONTROLLER)]
    for number in range(10_000):
        body = bytearray(rng.choice(good) if number % 2 else rng.randbytes(rng.randrange(200)))
        for _ in range(rng.randrange(4)):
            if body:
                body[rng.randrange(len(body))] = rng.randrange(256)
        for decode in (m.decode_from_node, m.decode_from_controller):
            with contextlib.suppress(ProtocolError):
                assert isinstance(decode(bytes(body)), m.Message)
    with pytest.raises(ProtocolError, match="text message"):
        m.decode_from_node("text")
    with pytest.raises(ProtocolError):
        m.decode_from_node(b"\x80\x04\x95" + bytes(8) + b"c__builtin__\neval\n.")
    with pytest.raises(ProtocolError):
        m.decode_from_controller(b"\xdd\xff\xff\xff\xff" + b"\xc6\xff\xff\xff\xff")
