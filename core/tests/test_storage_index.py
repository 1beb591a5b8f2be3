"""Page prefixes in the index, against a plain search of all entries."""

from __future__ import annotations

import random

import pytest

from lmkv.storage.index import Entry, NamespaceIndex
from lmkv.types import ChunkKey, MissReason

PAGES = 4


def frame(pages: tuple[int, ...]) -> tuple[bytes, tuple[bytes, ...]]:
    """Digest and page prefixes of a frame with these pages."""
    digests = tuple(bytes(pages[:count]).ljust(32, b"\xff") for count in range(1, len(pages) + 1))
    return digests[-1], digests[:-1]


def expected(entries: dict[bytes, Entry], prefixes: list[bytes]) -> int:
    """Most pages that some READY entry shares."""
    held = [{*entry.prefixes, entry.digest} for entry in entries.values() if entry.ready]
    return max((pages for pages, prefix in enumerate(prefixes, 1) if any(prefix in each for each in held)), default=0)


def some_pages(dice: random.Random) -> tuple[int, ...]:
    return tuple(dice.randrange(2) for _ in range(dice.randint(1, PAGES)))


def change(index: NamespaceIndex, dice: random.Random) -> None:
    """Something happens to an entry."""
    digest, prefixes = frame(some_pages(dice))
    step = dice.random()
    bare = [entry for entry in index.entries.values() if not entry.prefixes and entry.pages > 1]
    if step < 0.5:
        entry = index.add(digest, b"", len(prefixes) + 1, b"" if dice.random() < 0.2 else b"".join(prefixes))
        if dice.random() < 0.8:
            entry.part(0, 4096).tiers = 1
    elif step < 0.6 and bare:
        index.learn(bare[0], b"".join(frame(tuple(bare[0].digest[: bare[0].pages]))[1]))
    elif index.entries:
        index.discard(dice.choice(list(index.entries.values())), MissReason.EVICTED)


@pytest.mark.parametrize("seed", range(8))
def test_longest_prefix_is_what_a_search_of_all_finds(seed: int) -> None:
    dice = random.Random(seed)
    index = NamespaceIndex(b"n" * 16)
    index.shards = 1
    asked = b""
    for _ in range(600):
        change(index, dice)
        asked, before = frame(some_pages(dice))
        found = index.longest_prefix([*before, asked])
        assert (0 if found is None else found[1]) == expected(index.entries, [*before, asked])
        assert found is None or (found[0].ready and index.entries[found[0].digest] is found[0])
        longer = {entry.digest for entry in index.longer(before, asked)}
        assert longer == {entry.digest for entry in index.entries.values() if asked in entry.prefixes}
    for entry in list(index.entries.values()):
        index.discard(entry, None)
    assert not index._families
    assert index.longest_prefix([asked]) is None


def test_the_key_of_a_shard() -> None:
    index = NamespaceIndex(b"n" * 16)
    entry = index.add(b"d" * 32, b"", 1, b"")
    assert entry.key(3) == ChunkKey(b"n" * 16, 3, b"d" * 32)
