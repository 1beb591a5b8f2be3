from __future__ import annotations

import hashlib
import json
import os
import re
import struct
import subprocess
import sys
import threading
from array import array
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lmkv.errors import ConfigError, LmkvError, ProtocolError
from lmkv.keys import Extras, KeyChain, MediaSpan, Namespace
from lmkv.layout import PageLayout, PageRun

DOC = Path(__file__).parents[2] / "docs" / "reference" / "key-format.md"
# Tokens 1 … 8, chunks of 4, no extras. Never change these: everything that anybody has stored would be lost.
A1_DIGESTS = [
    "848b012a0ed3fdbd5ce83465349e371c481058d49d266c379e153982aab6fbfb",
    "04c8a889765a3616c5bc53693785aa30d9b05ceaa817a4a8b4f1d0ebceb8090e",
]


def chain(tokens: object, extras: Extras | None = None, chunk: int = 4, page: int = 2) -> KeyChain:
    made = KeyChain(chunk, page, extras)
    made.extend(tokens)
    return made


def media(identity: str, start: int = 0, length: int = 4) -> Extras:
    return Extras(media=(MediaSpan(identity, start, length),))


# --- the format, written a second time and plainly, from docs/reference/key-format.md alone --------------------------


def tlv(tag: int, value: bytes) -> bytes:
    return bytes([tag]) + len(value).to_bytes(4, "little") + value


def plain_root(extras: Extras) -> bytes:
    message = b"lmkv1"
    for tag, text in ((1, extras.salt), (2, extras.adapter), (3, extras.adapter_version)):
        if text:
            message += tlv(tag, text.encode())
    while len(message) % 4 != 2:
        message += b"\0"
    return hashlib.sha256(message).digest()


def plain_media(extras: Extras, first: int, last: int) -> bytes:
    fields = b""
    for span in sorted(set(extras.media), key=lambda each: (each.start, each.length, each.identity.encode())):
        if span.start < last and span.start + span.length > first:
            where = (span.start - first).to_bytes(8, "little", signed=True) + span.length.to_bytes(8, "little")
            fields += tlv(16, where + span.identity.encode())
    if not fields:
        return b""
    return fields + bytes(-len(fields) % 4) + len(fields).to_bytes(4, "little") + b"M"


def plain_digest(parent: bytes, tokens: list[int], extras: Extras, first: int) -> bytes:
    message = parent + b"".join(token.to_bytes(4, "little") for token in tokens)
    return hashlib.sha256(message + plain_media(extras, first, first + len(tokens))).digest()


texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
spans = st.builds(MediaSpan, texts.filter(bool), st.integers(0, 40), st.integers(1, 12))
extras_of_any_kind = st.builds(Extras, texts, texts, texts, st.lists(spans, max_size=4).map(tuple))
token_lists = st.lists(st.integers(0, 2**32 - 1), max_size=45)


@given(token_lists, extras_of_any_kind, st.integers(1, 3), st.integers(1, 4), st.lists(st.integers(0, 45), max_size=4))
@settings(deadline=None)
def test_chain_is_what_the_documentation_says(
    tokens: list[int], extras: Extras, pages: int, page: int, cuts: list[int]
) -> None:
    chunk = pages * page
    made = KeyChain(chunk, page, extras)
    for start, end in zip([0, *sorted(cuts)], [*sorted(cuts), len(tokens)], strict=True):
        made.extend(tokens[start:end])
    assert made.tokens == len(tokens)
    parent, expected = plain_root(extras), []
    for i in range(len(tokens) // chunk + 1):
        first = i * chunk
        whole = min(chunk, len(tokens) - first) // page
        prefixes = [plain_digest(parent, tokens[first : first + j * page], extras, first) for j in range(1, whole + 1)]
        assert made.prefixes(i) == prefixes
        assert made.pages(i) == whole
        assert made.prefixes(i, 1) == prefixes[:1]
        assert made.parent(i) == (expected[-1] if expected else b"")
        if len(tokens) - first >= chunk:
            parent = prefixes[-1]
            expected.append(parent)
    assert made.digests == expected


# --- scenarios -------------------------------------------------------------------------------------------------------


def test_a01_same_key_everywhere() -> None:
    assert [each.hex() for each in chain(range(1, 9)).digests] == A1_DIGESTS
    program = (
        "from lmkv.keys import KeyChain\n"
        "made = KeyChain(4, 2)\n"
        "made.extend(range(1, 9))\n"
        "print(*[digest.hex() for digest in made.digests])"
    )
    for seed in (None, "0", "1"):
        environ = {name: value for name, value in os.environ.items() if name != "PYTHONHASHSEED"}
        environ |= {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        environ |= {"PYTHONHASHSEED": seed} if seed else {}
        for _ in range(2):
            done = subprocess.run(
                [sys.executable, "-c", program], env=environ, capture_output=True, text=True, check=True
            )
            assert done.stdout.split() == A1_DIGESTS


def test_a02_fields_do_not_mix() -> None:
    variants = [
        Extras(),
        Extras(adapter="x"),
        Extras(salt="x"),
        media("x"),
        Extras(adapter="x", adapter_version="1"),
        Extras(adapter="x", adapter_version="2"),
        Extras(adapter_version="x"),
    ]
    digests = [digest for extras in variants for digest in chain(range(8), extras).digests]
    assert len(set(digests)) == 2 * len(variants)


def test_a03_two_images_one_question() -> None:
    tokens = [1, 2, 3, 4, 99, 99, 99, 99, 5, 6, 7, 8]
    first = chain(tokens, media("a" * 60 + "ffff", 4, 4)).digests
    second = chain(tokens, media("b" * 60 + "ffff", 4, 4)).digests
    assert first[0] == second[0] == chain(tokens).digests[0]
    assert not set(first[1:]) & set(second[1:])


def test_a03_image_across_chunks_and_pages() -> None:
    tokens = list(range(16))
    base, one, two = chain(tokens), chain(tokens, media("1", 6, 4)), chain(tokens, media("2", 6, 4))
    assert one.digests[0] == base.digests[0]
    assert one.prefixes(1)[0] == base.prefixes(1)[0]
    assert len({base.prefixes(1)[1], one.prefixes(1)[1], two.prefixes(1)[1]}) == 3
    assert len({base.digests[3], one.digests[3], two.digests[3]}) == 3


@pytest.mark.parametrize(
    "other", [MediaSpan("1", 5, 5), MediaSpan("1", 6, 3), MediaSpan("1", 5, 4), MediaSpan("2", 6, 4)]
)
def test_a03_where_an_image_lies_matters(other: MediaSpan) -> None:
    tokens = [7] * 16
    assert chain(tokens, Extras(media=(other,))).digests[2] != chain(tokens, media("1", 6, 4)).digests[2]


def test_order_of_media_does_not_matter() -> None:
    spans = (MediaSpan("b", 0, 3), MediaSpan("a", 2, 3), MediaSpan("c", 2, 1))
    assert chain(range(8), Extras(media=spans)).digests == chain(range(8), Extras(media=spans[::-1])).digests


def test_tokens_that_look_like_media_are_no_media() -> None:
    extras = media("1234567", 0, 2)
    section = plain_media(extras, 0, 2)
    as_tokens = list(struct.unpack(f"<{len(section) // 4}I", section[: len(section) // 4 * 4]))
    digests = {plain_digest(b"p" * 32, [1, 2], extras, 0)}
    digests |= {plain_digest(b"p" * 32, [1, 2, *as_tokens[:n]], Extras(), 0) for n in range(len(as_tokens) + 1)}
    assert len(digests) == len(as_tokens) + 2
    assert len(section) % 4 == 1


# --- tokens ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "tokens",
    [
        tuple(range(10)),
        range(10),
        array("I", range(10)),
        array("q", range(10)),
        memoryview(array("i", range(10))),
        np.arange(10),
        np.arange(10, dtype=np.uint8),
        np.arange(10, dtype=np.uint32),
        np.arange(10, dtype=">u4"),
        np.arange(10, dtype=">i8"),
        np.arange(20, dtype=np.uint32)[::2] // 2,
        np.repeat(np.arange(10, dtype=np.uint32), 2)[::2],
        list(np.arange(10)),
    ],
    ids=lambda each: f"{type(each).__name__}-{getattr(each, 'dtype', '')}",
)
def test_tokens_of_any_kind(tokens: object) -> None:
    assert chain(tokens).digests == chain(list(range(10))).digests


def test_tokens_are_copied() -> None:
    tokens = np.arange(7, dtype=np.uint32)
    made = chain(tokens)
    before = made.prefixes(0), made.prefixes(1)
    tokens[:] = 0
    assert (made.prefixes(0), made.prefixes(1)) == before
    made.extend([7])
    assert made.digests == chain(range(8)).digests


@pytest.mark.parametrize(
    "tokens",
    [
        [1, -1],
        [2**32],
        [1.5],
        ["a"],
        "12",
        b"1234",
        bytearray(4),
        None,
        np.array([1, -1]),
        np.array([1, 2**32]),
        np.array([1, 2**63], dtype=np.uint64),
        np.array([-1], dtype=np.int8),
        np.array([1.0]),
        np.array([[1, 2]]),
        np.array(5),
        np.array([True]),
    ],
    ids=repr,
)
def test_tokens_that_are_none_are_refused_and_change_nothing(tokens: object) -> None:
    made = chain([1, 2, 3])
    with pytest.raises(ConfigError, match="tokens must be") as caught:
        made.extend(tokens)
    assert caught.value.kind == "token"
    assert made.tokens == 3
    made.extend([4])
    assert made.digests == chain([1, 2, 3, 4]).digests


def test_the_greatest_token() -> None:
    assert chain([2**32 - 1] * 4).digests == chain(np.full(4, 2**32 - 1, dtype=np.uint64)).digests


def test_a_step_of_decoding_hashes_only_what_it_completes(monkeypatch: pytest.MonkeyPatch) -> None:
    made = chain(range(4000))
    hashed: list[int] = []
    append = KeyChain._append
    monkeypatch.setattr(KeyChain, "_append", lambda self, parts: (hashed.append(len(parts)), append(self, parts)))
    for token in range(9):
        made.extend([token])
    assert hashed == [1, 1]
    assert made.digests == chain([*range(4000), *range(9)]).digests


@pytest.mark.parametrize("media", [(), (MediaSpan("a" * 10, 8, 400), MediaSpan("b" * 10, 300, 400))])
def test_one_thread_extends_while_others_ask(media: tuple[MediaSpan, ...]) -> None:
    """An answer comes while the scheduler goes on: prefixes of full chunks are right, and nothing stops `extend`."""
    chain = KeyChain(64, 16, Extras(media=media))
    chain.extend(range(64 * 12))
    right = [chain.prefixes(i) for i in range(12)]
    wrong: list[object] = []
    over = threading.Event()

    def ask(step: int) -> None:
        i = 0
        while not over.is_set():
            i = (i + step) % 12
            try:
                if chain.prefixes(i) != right[i]:
                    wrong.append(i)
            except Exception as error:  # noqa: BLE001  what happens in this thread is what the test is about
                wrong.append(error)

    interval = sys.getswitchinterval()
    threads = [threading.Thread(target=ask, args=(step,)) for step in (5, 7)]
    sys.setswitchinterval(1e-6)
    try:
        for thread in threads:
            thread.start()
        for token in range(1500):
            chain.extend([token])
    finally:
        sys.setswitchinterval(interval)
        over.set()
        for thread in threads:
            thread.join()
    assert wrong == []
    assert chain.tokens == 64 * 12 + 1500


def test_prefixes_of_a_chunk_that_is_not_there() -> None:
    made = chain(range(9))
    for i in (-1, 3):
        with pytest.raises(IndexError):
            made.prefixes(i)
    assert made.prefixes(2) == []
    assert made.prefixes(0, 0) == []


@pytest.mark.parametrize(("chunk", "page"), [(256, 544), (256, 0), (0, 16), (256, 24), (-4, -2)])
def test_a34_chunk_that_is_no_whole_number_of_pages(chunk: int, page: int) -> None:
    with pytest.raises(ConfigError, match=f"{chunk} tokens .* pages of {page} tokens"):
        KeyChain(chunk, page)


@pytest.mark.parametrize(
    "make",
    [
        lambda: media(""),
        lambda: media("a", -1),
        lambda: media("a", 0, 0),
        lambda: media("a", 2**63),
        lambda: media("\ud800"),
        lambda: Extras(salt="\udfff"),
    ],
)
def test_impossible_extras_are_refused(make: object) -> None:
    with pytest.raises(ConfigError):
        make()


# --- namespace -------------------------------------------------------------------------------------------------------

LAYOUT = PageLayout("P", "bfloat16", 16, (PageRun(0, 0, 512, 512), PageRun(1, 0, 512, 512)), (("order", "LBK"),))


def namespace(**changes: object) -> Namespace:
    fields = {
        "model": "org/model/name",
        "revision": "r1",
        "kv_dtype": "bfloat16",
        "layouts": (LAYOUT.describe(),) * 2,
        "page_bytes": (LAYOUT.page_bytes,) * 2,
        "chunk_tokens": 256,
        "page_tokens": 16,
        "extra": {"rope": "ntk", "a": "b"},
    }
    return Namespace(**{**fields, **changes})


def described(**changes: object) -> tuple:
    return (replace(LAYOUT, **changes).describe(),) * 2


def test_namespace_comes_back_from_its_json() -> None:
    made = namespace(model="öß\n\"'𝄞")
    assert made.json().isascii()
    read = Namespace.from_json(made.json())
    assert read == made
    assert hash(read) == hash(made)
    assert read.id == made.id
    assert len(made.id) == 16
    assert (made.shards, made.chunk_pages) == (2, 16)


def test_namespace_ignores_the_order_of_its_extra_and_later_changes_of_it() -> None:
    extra = {"a": "b", "rope": "ntk"}
    made = namespace(extra=extra)
    extra["rope"] = "none"
    assert made.id == namespace().id
    assert made == namespace()


def test_a04_dtype_and_revision() -> None:
    ids = {namespace(**each).id for each in ({}, {"kv_dtype": "fp8"}, {"revision": "r2"}, {"model": "other"})}
    assert len(ids) == 4


def test_a05_names_are_told_apart_and_printed_as_hexadecimal_only() -> None:
    names = ["org/model/name", "org/model-SEP-name", "org%2Fmodel/name", "x" * 300, "mödel", "..", ""]
    ids = {namespace(model=name).id.hex() for name in names}
    assert len(ids) == len(names)
    salts = {chain(range(8), Extras(salt=salt)).digests[0].hex() for salt in ("a/b", "..", "", "a", "/b")}
    assert len(salts) == 5


def test_a06_twin_shapes() -> None:
    twin = described(tags=(("order", "LBH2D"),))
    assert namespace(layouts=twin).id != namespace().id


def test_a07_one_layer_more() -> None:
    runs = (*LAYOUT.runs, PageRun(2, 0, 512, 512))
    assert namespace(layouts=described(runs=runs), page_bytes=(1536, 1536)).id != namespace().id


@pytest.mark.parametrize(
    "changes",
    [
        {"layouts": ()},
        {"page_bytes": (1024,)},
        {"page_bytes": (1024, 1025)},
        {"page_tokens": 32},
        {"chunk_tokens": 250},
        {"model": "\ud800"},
    ],
)
def test_impossible_namespaces_are_refused(changes: dict[str, object]) -> None:
    with pytest.raises(ConfigError):
        namespace(**changes)


def edited(**changes: object) -> str:
    fields = {**json.loads(namespace().json()), **changes}
    return json.dumps({k: v for k, v in fields.items() if v is not None}, sort_keys=True, separators=(",", ":"))


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "null",
        "\ud800",
        "[" * 100_000,
        " " + namespace().json(),
        edited(lmkv=2),
        edited(lmkv=None),
        edited(surprise=1),
        edited(model=None),
        edited(model=5),
        edited(chunk_tokens="256"),
        edited(chunk_tokens=250),
        edited(page_bytes=[1024, 1e3]),
        edited(extra={"a": 1}),
        edited(layouts=[{}]),
        edited(layouts=[{**LAYOUT.describe(), "more": 1}] * 2),
        edited(model="x" * (1 << 20)),
        json.dumps(json.loads(namespace().json())),
    ],
    ids=lambda each: each[:24],
)
def test_a43_namespace_text_that_is_none(text: str) -> None:
    with pytest.raises(ProtocolError):
        Namespace.from_json(text)


@given(st.text(max_size=200))
@settings(deadline=None)
def test_a43_random_namespace_text(text: str) -> None:
    with pytest.raises(LmkvError):
        Namespace.from_json(text)


# --- documentation ---------------------------------------------------------------------------------------------------


def test_golden_values_of_the_documentation() -> None:
    golden = json.loads(re.search(r"```json golden\n(.*?)```", DOC.read_text(encoding="utf-8"), re.DOTALL)[1])
    assert len(golden["chains"]) >= 6
    for case in golden["chains"]:
        fields = dict(case["extras"])
        spans = tuple(MediaSpan(**span) for span in fields.pop("media", ()))
        made = chain(case["tokens"], Extras(**fields, media=spans), case["chunk_tokens"], case["page_tokens"])
        assert made._root.hex() == case["root"]
        assert [each.hex() for each in made.digests] == case["digests"]
        for i, prefixes in case["prefixes"].items():
            assert [each.hex() for each in made.prefixes(int(i))] == prefixes
    assert Namespace.from_json(golden["namespace"]["json"]).id.hex() == golden["namespace"]["id"]
    layout = golden["namespace"]["layout"]
    assert hashlib.sha256(layout.encode()).hexdigest() == LAYOUT.fingerprint() == golden["namespace"]["fingerprint"]
