from __future__ import annotations

import hashlib
import json
import os
import pickle
import re
import struct
import sys
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lmkv import frame
from lmkv.errors import FrameError
from lmkv.frame import Arrival, Trailer, frame_bytes, link, parse_trailer, seal, trailer_bytes, verify
from lmkv.types import ALIGNMENT, ChunkKey, StoredFrame

DOC = Path(__file__).parents[2] / "docs" / "reference" / "frame-format.md"
PREFIXES = tuple(bytes([n]) * 32 for n in range(15))
TRAILER = Trailer(ChunkKey(b"n" * 16, 3, b"d" * 32), b"p" * 32, 16, PREFIXES, "identity", 10_000, 10_000)


def sealed(trailer: Trailer = TRAILER) -> bytearray:
    memory = bytearray(os.urandom(frame_bytes(trailer.payload_bytes, len(trailer.prefixes), trailer.codec)))
    seal(memoryview(memory), trailer)
    return memory


trailers = st.builds(
    lambda pages, some, **fields: Trailer(pages=pages, prefixes=PREFIXES[: pages - 1] if some else (), **fields),
    pages=st.integers(1, 16),
    some=st.booleans(),
    key=st.builds(
        ChunkKey, st.binary(min_size=16, max_size=16), st.integers(0, 2**32 - 1), st.binary(min_size=32, max_size=32)
    ),
    parent=st.one_of(st.just(b""), st.just(bytes(32)), st.binary(min_size=32, max_size=32)),
    codec=st.text("abcxyz-09", min_size=1, max_size=255),
    payload_bytes=st.integers(0, 20_000),
    raw_bytes=st.integers(0, 2**63 - 1),
)


@given(trailers)
@settings(deadline=None)
def test_what_was_sealed_comes_back(trailer: Trailer) -> None:
    memory = sealed(trailer)
    assert len(memory) % ALIGNMENT == 0
    assert verify(memoryview(memory), trailer.key) == trailer
    assert parse_trailer(memory[-ALIGNMENT:]) == trailer
    assert parse_trailer(memoryview(memory)) == trailer
    length = trailer_bytes(memory)
    assert parse_trailer(memory[-length:]) == trailer
    found = StoredFrame(trailer.key, len(memory), bytes(memory[-length:]), 0.0)
    whole = frame_bytes(trailer.raw_bytes, len(trailer.prefixes))
    assert link(found) == (trailer.parent, trailer.pages, b"".join(trailer.prefixes), whole)
    with pytest.raises(FrameError):
        parse_trailer(memory[1 - length :])


@pytest.mark.parametrize(
    "change",
    [
        {"key": TRAILER.key._replace(namespace=b"m" * 16)},
        {"key": TRAILER.key._replace(shard=2)},
        {"key": TRAILER.key._replace(digest=b"e" * 32)},
        {"nbytes": 12288 + ALIGNMENT},
        {"trailer": b""},
    ],
)
def test_a_frame_that_a_scan_found_under_another_name_is_refused(change: dict[str, Any]) -> None:
    memory = sealed()
    found = StoredFrame(TRAILER.key, len(memory), bytes(memory[-ALIGNMENT:]), 0.0)
    assert len(memory) == 12288
    link(found)
    with pytest.raises(FrameError):
        link(found._replace(**change))


def test_what_is_no_frame_has_no_trailer() -> None:
    assert trailer_bytes(b"") == trailer_bytes(bytes(4096)) == trailer_bytes(os.urandom(47)) == 0


def test_payload_stays_and_padding_is_cleared() -> None:
    memory = bytearray(b"\xff" * frame_bytes(10_000, 15))
    memory[:10_000] = payload = os.urandom(10_000)
    seal(memoryview(memory), TRAILER)
    assert memory[:10_000] == payload
    assert not any(memory[10_000:11_000])


def test_a21_damaged_frame() -> None:
    memory = sealed()
    trailer_start = len(memory) - 800
    for at in (0, 9_999, 10_001, *range(trailer_start, len(memory))):
        damaged = memory.copy()
        damaged[at] ^= 1
        with pytest.raises(FrameError):
            verify(memoryview(damaged), TRAILER.key)
    for other in (memory[:-1], memory[1:], b"", memory + b"x", memory + bytes(ALIGNMENT), memory[:ALIGNMENT]):
        with pytest.raises(FrameError):
            verify(memoryview(other), TRAILER.key)
    with pytest.raises(FrameError, match="were written"):
        verify(memoryview(bytes(ALIGNMENT) + memory), TRAILER.key)


@given(st.lists(st.integers(-5, 20_000), max_size=8), st.integers(0, 12_287), st.integers(0, 1), st.integers(0, 8192))
def test_a_frame_is_checked_however_it_lands(steps: list[int], at: int, flip: int, spare: int) -> None:
    memory = sealed()
    memory[at] ^= flip
    nbytes = len(memory)
    arrival = Arrival(memoryview(memory + bytes(spare)))
    for step in steps:
        arrival.landed(step)
    if flip:
        with pytest.raises(FrameError):
            arrival.verify(nbytes, TRAILER.key)
    else:
        assert arrival.verify(nbytes, TRAILER.key) == TRAILER


def test_what_has_landed_is_not_read_again() -> None:
    memory = sealed()
    arrival = Arrival(memoryview(memory))
    arrival.landed(4096)
    memory[0] ^= 1
    assert arrival.verify(len(memory), TRAILER.key) == TRAILER


def test_what_lands_anew_is_judged_by_what_is_there_in_the_end() -> None:
    right = sealed()
    memory = bytearray(os.urandom(len(right)))
    arrival = Arrival(memoryview(memory))
    arrival.landed(8192)  # of a try that came to nothing
    memory[:] = right
    arrival.landed(len(memory))
    assert arrival.verify(len(memory), TRAILER.key) == TRAILER


@pytest.mark.parametrize(
    ("field", "value"), [("namespace", b"m" * 16), ("shard", 2), ("digest", b"e" * 32)], ids=lambda each: str(each)[:9]
)
def test_the_frame_of_another_key_is_refused_by_name(field: str, value: object) -> None:
    with pytest.raises(FrameError, match=field):
        verify(memoryview(sealed()), TRAILER.key._replace(**{field: value}))


def with_footer(body: bytes, *, body_bytes: int | None = None, nbytes: int = ALIGNMENT, version: int = 1) -> bytes:
    """A page that ends with a trailer whose own checksum is right, whatever the numbers in it are."""
    head = struct.pack(
        "<8sHHIQ", frame.MAGIC, version, 0, (len(body) if body_bytes is None else body_bytes) & 0xFFFFFFFF, nbytes
    )
    covered = body + head
    tail = covered + frame.xxhash.xxh3_64_digest(covered) + bytes(16)
    return bytes(ALIGNMENT - len(tail)) + tail


def test_a43_hostile_bytes() -> None:
    key = TRAILER.key
    body = frame._BODY.pack(key.namespace, key.digest, bytes(32), key.shard, 1, 1 << 60, 1 << 60, 0, 0, 1, 0) + b"x"
    hostile = [
        pickle.dumps({"a": os.system}).ljust(ALIGNMENT, b"."),
        with_footer(body),
        with_footer(body, nbytes=1 << 60),
        with_footer(body, body_bytes=2**32 - 1),
        with_footer(body, version=2),
        with_footer(body[:50]),
        with_footer(body.replace(b"x", b"\xff")),
        with_footer(
            frame._BODY.pack(key.namespace, key.digest, bytes(32), 0, 2**32 - 1, 9, 9, 2**32 - 2, 0, 1, 0) + b"x"
        ),
        with_footer(frame._BODY.pack(key.namespace, key.digest, bytes(32), 0, 0, 9, 9, 0, 0, 1, 0) + b"x"),
        with_footer(frame._BODY.pack(key.namespace, key.digest, bytes(32), 0, 1, 9, 9, 0, 2, 1, 0) + b"x"),
    ]
    for each in hostile:
        for ask in (lambda each=each: verify(memoryview(each), key), lambda each=each: parse_trailer(each)):
            with pytest.raises(FrameError):
                ask()


@given(st.one_of(st.binary(max_size=600), st.binary(max_size=300).map(with_footer)))
@settings(max_examples=300, deadline=None)
def test_a43_random_bytes(raw: bytes) -> None:
    with pytest.raises(FrameError):
        parse_trailer(raw)
    with pytest.raises(FrameError):
        verify(memoryview(raw), TRAILER.key)


def test_a_trailer_longer_than_what_was_read_says_so() -> None:
    trailer = replace(TRAILER, pages=256, prefixes=(b"x" * 32,) * 255)
    memory = sealed(trailer)
    with pytest.raises(FrameError) as caught:
        parse_trailer(memory[-ALIGNMENT:])
    assert caught.value.kind == "short"
    assert parse_trailer(memory[-3 * ALIGNMENT :]) == trailer


@pytest.mark.parametrize(
    "changes",
    [
        {"parent": b"short"},
        {"prefixes": PREFIXES[:3]},
        {"prefixes": (*PREFIXES[:14], b"x")},
        {"pages": 0},
        {"codec": ""},
        {"codec": "ü"},
        {"payload_bytes": -1},
        {"key": ChunkKey(b"n", 0, b"d" * 32)},
        {"key": ChunkKey(b"n" * 16, -1, b"d" * 32)},
    ],
)
def test_an_impossible_trailer_is_not_sealed(changes: dict[str, object]) -> None:
    with pytest.raises(FrameError):
        seal(memoryview(bytearray(frame_bytes(10_000, 15))), replace(TRAILER, **changes))


def test_memory_of_another_size_is_not_sealed() -> None:
    for nbytes in (frame_bytes(10_000, 15) + ALIGNMENT, ALIGNMENT, 0):
        with pytest.raises(FrameError, match="of memory"):
            seal(memoryview(bytearray(nbytes)), TRAILER)


def test_the_checksum_lets_other_threads_run() -> None:
    memory = memoryview(bytearray(64 << 20))
    interval = sys.getswitchinterval()
    ran: list[bool] = []
    # No forced switches: another thread runs only where the GIL is given up of its own accord.
    sys.setswitchinterval(1000)
    try:
        for _ in range(100):
            gate = threading.Lock()
            gate.acquire()
            waiting = threading.Event()
            thread = threading.Thread(
                target=lambda gate=gate, waiting=waiting: (waiting.set(), gate.acquire(), ran.append(True))
            )
            thread.start()
            waiting.wait()
            gate.release()
            frame._checksum(memory)
            seen = bool(ran)
            thread.join()
            ran.clear()
            if seen:
                return
    finally:
        sys.setswitchinterval(interval)
    pytest.fail("the GIL was held in 100 checksums")


def test_golden_frame_of_the_documentation() -> None:
    golden = json.loads(re.search(r"```json golden\n(.*?)```", DOC.read_text(encoding="utf-8"), re.DOTALL)[1])
    fields = golden["trailer"]
    trailer = Trailer(
        ChunkKey(bytes.fromhex(fields["namespace"]), fields["shard"], bytes.fromhex(fields["digest"])),
        bytes.fromhex(fields["parent"]),
        fields["pages"],
        tuple(bytes.fromhex(each) for each in fields["prefixes"]),
        fields["codec"],
        fields["payload_bytes"],
        fields["raw_bytes"],
    )
    payload = golden["payload_text"].encode()
    memory = bytearray(frame_bytes(len(payload), len(trailer.prefixes), trailer.codec))
    memory[: len(payload)] = payload
    seal(memoryview(memory), trailer)
    assert len(memory) == golden["frame_bytes"]
    assert memory[golden["trailer_start"] :].hex() == golden["trailer_hex"]
    assert hashlib.sha256(memory).hexdigest() == golden["sha256_of_the_frame"]
