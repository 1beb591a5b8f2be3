from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lmkv.errors import ClosedError, ConfigError, LmkvError, ProtocolError
from lmkv.service import protocol, wire
from lmkv.service.protocol import Extend, Found, Hello, Lookup, NewFrame, Ok, Refused, Register, Reserve

REQUESTS = [
    Hello(1, 2, "name"),
    Register("{}"),
    Lookup(b"n" * 16, b"d" * 64, b"p" * 32, hold=False),
    Extend(7, b"n" * 16, 2, b"p" * 32),
    Reserve(b"n" * 16, 1, (NewFrame(b"d" * 32, b"", 2, b"p" * 32), NewFrame(b"e" * 32, b"d" * 32, 1, b""))),
]


@pytest.mark.parametrize("request_", REQUESTS, ids=lambda r: type(r).__name__)
def test_what_is_sent_is_what_arrives(request_: protocol.Request) -> None:
    bodies = wire.Framer().feed(wire.encode(5, request_))
    assert [wire.decode_request(body) for body in bodies] == [(5, request_)]


def test_a_request_is_no_reply() -> None:
    body = wire.encode(1, Register("{}"))[4:]
    with pytest.raises(ProtocolError, match="does not know"):
        wire.decode_reply(body)
    assert wire.decode_reply(wire.encode(1, Found(1, 2))[4:]) == (1, Found(1, 2))


@settings(deadline=None)  # the machine may be busy
@given(st.lists(st.binary(max_size=300), max_size=8), st.randoms(use_true_random=False))
def test_bodies_survive_any_cut_of_the_stream(bodies: list[bytes], random: object) -> None:
    stream = b"".join(wire.LENGTH.pack(len(body)) + body for body in bodies)
    framer, found, at = wire.Framer(), [], 0
    while at < len(stream):
        step = random.randint(1, 64)  # type: ignore[attr-defined]
        found += framer.feed(stream[at : at + step])
        at += step
    assert found == bodies


@settings(deadline=None)  # the machine may be busy
@given(st.binary(max_size=400))
def test_a43_random_bytes_are_refused_or_understood(data: bytes) -> None:
    framer = wire.Framer(limit=1 << 16)
    try:
        for body in [data, *framer.feed(data)]:
            wire.decode_request(body)
    except ProtocolError:
        pass


@pytest.mark.parametrize(
    "body",
    [
        b"\x80\x04\x95",  # the beginning of a pickle
        b"",
        b"\x92\x01" + b"\x91" * 100_000,  # nested without end
        b"\x92\x01\x94\xa7Reserve\xc4\x00\x00\xdd\xff\xff\xff\xff",  # an array that claims 2**32 - 1 items
        b"\x92\x01\x92\xa8Register\xdb\xff\xff\xff\xff",  # a string that claims 4 GiB
        b"\x93\x01\x92\xa8Register\xa0\xc0",
        b"\x92\x01\x92\xa8Register\xa1\xff",  # text that is no UTF-8
    ],
)
def test_a43_hostile_messages_are_protocol_errors(body: bytes) -> None:
    with pytest.raises(ProtocolError):
        wire.decode_request(body)
    with pytest.raises(ProtocolError):
        wire.decode_reply(body)


def test_a43_a_long_length_is_refused_before_anything_is_kept() -> None:
    framer = wire.Framer(limit=1000)
    with pytest.raises(ProtocolError, match="claims 1001 bytes"):
        framer.feed(wire.LENGTH.pack(1001))
    with pytest.raises(ProtocolError, match="the limit"):
        wire.encode(1, Register("x" * (protocol.MAX_MESSAGE + 1)))


def test_errors_keep_their_class_and_kind() -> None:
    for error in (ConfigError("c", kind="in-use"), ClosedError("c"), LmkvError("x", kind="deadline")):
        back = wire.error_of(wire.refusal(error))
        assert (type(back), back.kind, str(back), back.retryable) == (
            type(error),
            error.kind,
            str(error),
            error.retryable,
        )
    assert isinstance(wire.error_of(wire.refusal(ConfigError("c"))), ConfigError)
    assert wire.refusal(ValueError("v")) == Refused("internal", "ValueError: v")
    assert wire.decode_reply(wire.encode(0, Ok(3))[4:]) == (0, Ok(3))
