"""What this node holds: chunks, their shards, where each shard lies. One writer, the storage loop; no locks.

A chunk's life: FILLING while a shard of it is being written by a client, READY once every shard lies somewhere, gone
when the last place is lost. Only a READY chunk is visible to look-ups.
"""

from __future__ import annotations

import math
import struct
from collections import OrderedDict
from functools import lru_cache
from typing import TYPE_CHECKING, Final, TypeAlias

from lmkv.errors import ConfigError
from lmkv.types import DIGEST_BYTES, ChunkKey, MissReason

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable, Iterable, Sequence

    from lmkv.layout import LayoutDescription
    from lmkv.memory import MemoryObject

_NEVER: Final = -math.inf
GHOSTS: Final = 1 << 16
"""Digests remembered after they were lost, so that a later miss can be told from one that was never stored."""


@lru_cache(maxsize=256)
def _cut(count: int) -> Callable[[bytes], tuple[bytes, ...]]:
    """Cuts a string of so many digests by one call, several times faster than slices do."""
    return struct.Struct(f"{DIGEST_BYTES}s" * count).unpack


class Shard:
    """One rank's part of a chunk.

    Attributes:
        tiers: bit i set: the frame lies whole in tier number i.
        filling: number of the reservation whose client is writing it, or 0.
        staged: the frame in the pool, kept for leases (or for stores under way) while no resident tier has it; one
        owner.
        loading: set while a load into the pool is under way; its result is None or the reason of the failure.
        nbytes: bytes of the identity-coded frame.
    """

    __slots__ = ("filling", "key", "loading", "nbytes", "staged", "tiers", "writes")

    def __init__(self, key: ChunkKey, nbytes: int, tiers: int = 0) -> None:
        self.key = key
        self.tiers = tiers
        self.filling = 0
        self.staged: MemoryObject | None = None
        self.loading: asyncio.Future[MissReason | None] | None = None
        self.nbytes = nbytes
        self.writes = 0
        """Copies to other tiers that read the pool's frame now."""

    @property
    def present(self) -> bool:
        """Whether the frame can be had from anywhere."""
        return self.tiers != 0 or self.staged is not None


class Entry:
    """A chunk or tail of one namespace."""

    __slots__ = (
        "digest", "doomed", "holds", "leased", "leaving", "namespace", "packed", "pages", "parent",
        "pinned_until", "shards",
    )  # fmt: skip

    def __init__(self, namespace: NamespaceIndex, digest: bytes, parent: bytes, pages: int, prefixes: bytes) -> None:
        self.namespace = namespace
        self.digest = digest
        self.parent = parent
        self.pages = pages
        self.packed = prefixes
        """Its page prefixes one behind the other: a third of the memory that they take one by one."""
        self.shards: dict[int, Shard] = {}
        self.holds = 0
        self.leased = 0
        """Of the holds: those by leases, whose owners may wait until what lies below is loaded again."""
        self.pinned_until = _NEVER
        self.doomed = False
        """Cleared while held: out of sight, its frames go with the last hold."""
        self.leaving = 0
        """Bits of tiers that it leaves with the last hold."""

    def hold(self) -> None:
        """Somebody counts on it: it is no victim until `let_go`, and what it needs of the pool is spoken for."""
        books = self.namespace.books
        books.holds += 1
        if not self.holds:
            books.nbytes += self.pages * self.namespace.page_total
        self.holds += 1

    def let_go(self) -> None:
        """Gives back one `hold`; settling the entry is the caller's."""
        books = self.namespace.books
        books.holds -= 1
        self.holds -= 1
        if not self.holds:
            books.nbytes -= self.pages * self.namespace.page_total

    @property
    def prefixes(self) -> tuple[bytes, ...]:
        """Digests of its first 1 … pages-1 pages, or empty. Made anew at each call."""
        return _cut(len(self.packed) // DIGEST_BYTES)(self.packed)

    def prefix(self, pages: int) -> bytes:
        """The digest of its first `pages` pages, empty if it is not known."""
        return self.packed[(pages - 1) * DIGEST_BYTES : pages * DIGEST_BYTES]

    @property
    def ready(self) -> bool:
        """All shards lie somewhere."""
        shards = self.shards
        if len(shards) != self.namespace.shards:
            return False
        for shard in shards.values():  # noqa: SIM110  twice as fast as all(…), and the inside of every look-up
            if not shard.tiers and shard.staged is None:
                return False
        return True

    @property
    def visible(self) -> bool:
        """Look-ups may find it: it is in the index of its namespace."""
        return self.namespace.entries.get(self.digest) is self

    def part(self, shard: int, nbytes: int, key: ChunkKey | None = None) -> Shard:
        """The record of one shard, made if it is not there; `nbytes` of its identity-coded frame, `key` if at hand."""
        found = self.shards.get(shard)
        if found is None:
            found = self.shards[shard] = Shard(key or ChunkKey(self.namespace.id, shard, self.digest), nbytes)
        return found

    def key(self, shard: int) -> ChunkKey:
        """The key of one shard's frame."""
        part = self.shards.get(shard)
        return ChunkKey(self.namespace.id, shard, self.digest) if part is None else part.key


Family: TypeAlias = dict[bytes, dict[Entry, None]]
"""Page prefix → the entries that begin with it; at least two begin with the same page."""


class Books:
    """Sums over all entries that somebody holds.

    Attributes:
        holds: how often they are held.
        nbytes: of their pages, all shards, each entry once.
    """

    __slots__ = ("holds", "nbytes")

    def __init__(self) -> None:
        self.holds = 0
        self.nbytes = 0


class NamespaceIndex:
    """The chunks of one namespace, by digest and by the digests of their page prefixes.

    Entries are found by the prefix of their first page. Mostly one alone has it, whose other prefixes are then compared
    one by one; where several have it, they are a family, with a map of all prefixes of its members.

    `shards` is 0 until a client has registered the namespace: frames found on disk wait for that.
    """

    __slots__ = (
        "_families", "_ghosts", "_nameless", "books", "chunk_pages", "clients", "entries", "id", "layouts",
        "page_bytes", "page_total", "shards",
    )  # fmt: skip

    def __init__(self, identity: bytes, books: Books | None = None) -> None:
        self.id = identity
        self.books = books or Books()
        self.clients = 0
        """Sessions that have registered it."""
        self.page_total = 0
        """Bytes of a page, all shards."""
        self.shards = 0
        self.chunk_pages = 0
        self.page_bytes: tuple[int, ...] = ()
        self.layouts: tuple[LayoutDescription, ...] = ()
        self.entries: dict[bytes, Entry] = {}
        self._families: dict[bytes, Entry | Family] = {}
        self._nameless = 0
        """Entries of several pages whose page prefixes are not known."""
        self._ghosts: OrderedDict[bytes, MissReason] = OrderedDict()

    def add(self, digest: bytes, parent: bytes, pages: int, prefixes: bytes) -> Entry:
        """The entry of `digest`, made if it is not there; `prefixes` are one behind the other."""
        entry = self.entries.get(digest)
        if entry is None:
            entry = Entry(self, digest, parent, pages, prefixes)
            self.entries[digest] = entry
            if prefixes:
                self._enter(entry)
            elif pages > 1:
                self._nameless += 1
        return entry

    def learn(self, entry: Entry, prefixes: bytes) -> None:
        """The page prefixes of an entry that was found in a shared store, which tells them only when it is loaded."""
        if prefixes and not entry.packed and self.entries.get(entry.digest) is entry:
            entry.packed = prefixes
            self._nameless -= entry.pages > 1
            self._enter(entry)

    def discard(self, entry: Entry, reason: MissReason | None) -> None:
        """Take `entry` out of sight; `reason` is given for later misses of its digest."""
        if self.entries.get(entry.digest) is not entry:
            return
        del self.entries[entry.digest]
        if entry.packed:
            self._leave(entry)
        elif entry.pages > 1:
            self._nameless -= 1
        if reason is not None:
            self._ghosts[entry.digest] = reason
            if len(self._ghosts) > GHOSTS:
                self._ghosts.popitem(last=False)

    def longest_prefix(self, prefixes: Sequence[bytes]) -> tuple[Entry, int] | None:
        """The READY entry that holds most of the pages whose prefix digests are given, and how many."""
        family = self._families.get(prefixes[0]) if prefixes else None
        for pages in range(len(prefixes), 0, -1):
            prefix = prefixes[pages - 1]
            whole = self.entries.get(prefix)
            if whole is not None and whole.ready:
                return whole, pages
            for entry in _beginning(family, prefix, pages):
                if entry.ready:
                    return entry, pages
        return None

    def longer(self, prefixes: Sequence[bytes], digest: bytes) -> Iterable[Entry]:
        """Every entry that begins with all of the frame of these page prefixes and this digest, and goes on."""
        family = self._families.get(prefixes[0] if prefixes else digest)
        return _beginning(family, digest, len(prefixes) + 1)

    def shorter(self, entry: Entry) -> Iterable[Entry]:
        """Every other entry whose pages are all among the first pages of `entry`."""
        entries = self.entries
        first = entry.packed[:DIGEST_BYTES]
        if not self._nameless and self._families.get(first) is entry and first not in entries:
            return ()  # nothing else begins as it does
        return [entries[prefix] for prefix in entry.prefixes if prefix in entries]

    def why_missing(self, digest: bytes) -> MissReason:
        """The reason to count for a digest that no look-up can offer."""
        entry = self.entries.get(digest)
        if entry is not None:
            return MissReason.NOT_ALL_SHARDS
        return self._ghosts.get(digest, MissReason.NEVER_STORED)

    def _enter(self, entry: Entry) -> None:
        first = entry.packed[:DIGEST_BYTES]
        family = self._families.setdefault(first, entry)
        if family is entry:
            return
        if isinstance(family, Entry):
            alone, family = family, {}
            self._families[first] = family
            _join(family, alone)
        _join(family, entry)

    def _leave(self, entry: Entry) -> None:
        first = entry.prefix(1)
        family = self._families[first]
        if isinstance(family, Entry):
            del self._families[first]
            return
        for prefix in set(entry.prefixes):  # a client may name one twice
            members = family[prefix]
            del members[entry]
            if not members:
                del family[prefix]
        if len(family[first]) == 1:
            (self._families[first],) = family[first]


def _beginning(family: Entry | Family | None, prefix: bytes, pages: int) -> Iterable[Entry]:
    """Those that begin with the pages of `prefix`, and go on after them."""
    if family is None:
        return ()
    if isinstance(family, Entry):
        return (family,) if family.prefix(pages) == prefix else ()
    return family.get(prefix, ())


def _join(family: Family, entry: Entry) -> None:
    for prefix in entry.prefixes:
        family.setdefault(prefix, {})[entry] = None


class Index:
    """All namespaces of the node."""

    __slots__ = ("books", "namespaces")

    def __init__(self) -> None:
        self.namespaces: dict[bytes, NamespaceIndex] = {}
        self.books = Books()

    def namespace(self, identity: bytes) -> NamespaceIndex:
        """The namespace, made if it is not there."""
        found = self.namespaces.get(identity)
        if found is None:
            found = self.namespaces[identity] = NamespaceIndex(identity, self.books)
        return found

    def registered(self, identity: bytes) -> NamespaceIndex:
        """The namespace that a client has registered; `ConfigError` if none has."""
        found = self.namespaces.get(identity)
        if found is None or not found.shards:
            raise ConfigError(f"namespace {identity.hex()} was not registered", kind="namespace")
        return found

    def entry(self, key: ChunkKey) -> Entry | None:
        """The visible entry that `key` belongs to."""
        found = self.namespaces.get(key.namespace)
        return None if found is None else found.entries.get(key.digest)

    def why_missing(self, namespace: NamespaceIndex, digest: bytes) -> MissReason:
        """As `NamespaceIndex.why_missing`, but tells when another namespace has the same tokens."""
        reason = namespace.why_missing(digest)
        if reason is MissReason.NEVER_STORED and any(
            other is not namespace and digest in other.entries for other in self.namespaces.values()
        ):
            return MissReason.NAMESPACE
        return reason
