"""Look-ups of one client: what is there of a prompt, and a lease on it."""

from __future__ import annotations

import asyncio
import math
from typing import TYPE_CHECKING

from lmkv.service import protocol as p
from lmkv.service.digests import split_digests
from lmkv.storage.discovery import discover, stores
from lmkv.storage.driver import QUEUED
from lmkv.types import MissReason

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from lmkv.observe.clients import ClientMetrics
    from lmkv.storage.index import Entry, NamespaceIndex
    from lmkv.storage.manager import StorageManager
    from lmkv.storage.offers import Offer
    from lmkv.storage.stack import Stack
    from lmkv.types import ChunkKey


class Lookups:
    """Answers `Lookup` and `Extend`.

    Args:
        leases: numbers of the client's leases, which new ones are added to.
    """

    def __init__(self, manager: StorageManager, metrics: ClientMetrics, leases: set[int]) -> None:
        self._manager = manager
        self._stack = manager.stack
        self._metrics = metrics
        self._leases = leases
        self.closed = False
        """The client has gone: what is still being asked for it gets no lease."""

    def lookup(self, message: p.Lookup) -> p.Found | Awaitable[p.Found]:
        """At once, unless a shared store has to be asked.

        Raises:
            ConfigError: the namespace was not registered.
        """
        namespace = self._manager.index.registered(message.namespace)
        digests = split_digests(message.digests)
        entries = present(namespace, digests)
        if not message.again:
            self._metrics.inc("lmkv_lookups_total")
        parent = digests[len(entries) - 1] if entries else b""
        missing = digests[len(entries) :]
        prefixes = self._unknown(namespace, split_digests(message.prefixes))
        if (missing and stores(self._stack)) or prefixes:
            return self._asking(
                namespace, missing, parent, prefixes, entries,
                lambda found: self._found(message, namespace, digests, _with(namespace, digests, len(entries), found)),
            )  # fmt: skip
        return self._found(message, namespace, digests, entries)

    def _unknown(self, namespace: NamespaceIndex, prefixes: list[bytes]) -> list[bytes]:
        """The page prefixes to ask the shared stores for: all, if one is longer than what the index has, or none."""
        if not prefixes or not stores(self._stack, tails=True):
            return []
        known = namespace.longest_prefix(prefixes)
        return [] if known is not None and known[1] == len(prefixes) else prefixes

    async def _asking(  # noqa: PLR0917  one question
        self,
        namespace: NamespaceIndex,
        digests: Sequence[bytes],
        parent: bytes,
        prefixes: Sequence[bytes],
        held: Sequence[Entry | None],
        answer: Callable[[list[Entry]], p.Found],
    ) -> p.Found:
        """Ask the shared stores, all at once, for what the index does not have; then answer with what it has then."""
        lease = self._manager.holdings.lease([*held])  # what is there stays while we ask
        try:
            discovered = await discover(self._stack, namespace, digests, parent, prefixes)
            found = answer(discovered)
        finally:
            self._manager.end_lease(lease.number)
        for entry in discovered:
            if not entry.holds:
                self._stack.settle(entry)  # what no lease has taken is forgotten: the store knows it
        return found

    def _found(
        self, message: p.Lookup, namespace: NamespaceIndex, digests: Sequence[bytes], entries: list[Entry]
    ) -> p.Found:
        missing = len(digests) - len(entries)
        if missing:
            self._miss(message, missing, self._manager.index.why_missing(namespace, digests[len(entries)]))
        reached = self._reached(message, entries)
        partial = None
        if not missing and len(reached) == len(entries):
            partial = self._partial(message, namespace)
        found = [*reached, partial[0]] if partial else reached
        tiers = note_use(self._stack, found)
        withheld, patience = 0, math.inf
        if any(tiers) or self._stack.ram is None:
            fitting = self._stack.room.fits(found, self._manager.pinned)
            if fitting < len(found):
                self._miss(message, len(found) - fitting, MissReason.NO_ROOM)
                tiers, found, reached, partial = tiers[:fitting], found[:fitting], found[:fitting], None
            offer = self._offer(namespace, message, found, partial)
            patience = offer.patience
            if offer.entries < len(found):
                tiers, reached, partial = tiers[: offer.entries], found[: offer.entries], None
                withheld = self._withhold(message, offer)
        here = self._stack.ram is not None and not any(tiers)
        lease = self._lease(reached, partial, patience, here=here) if message.hold else 0
        if partial:
            return p.Found(lease, len(reached), partial[1], partial[0].digest, tiers)
        return p.Found(lease, len(reached), tiers=tiers, withheld=withheld)

    def _offer(
        self, namespace: NamespaceIndex, message: p.Lookup, found: list[Entry], partial: tuple[Entry, int] | None
    ) -> Offer:
        """What of that it pays to load."""
        offers = self._manager.offers
        tokens = [self._manager.chunk_tokens] * len(found)
        if partial:
            tokens[-1] = self._tokens(namespace, partial[1])
        rules = offers.rules.stricter(message.min_tokens, message.max_wait)
        return offers.choose(found, tokens, message.prefill_rate, rules)

    def _tokens(self, namespace: NamespaceIndex, pages: int) -> int:
        return pages * self._manager.chunk_tokens // namespace.chunk_pages

    def _withhold(self, message: p.Lookup | p.Extend, offer: Offer) -> int:
        if not message.again:
            for tier, count in offer.withheld.items():
                self._metrics.inc("lmkv_withheld_tokens_total", count, tier=tier)
        return sum(offer.withheld.values())

    def extend(self, message: p.Extend) -> p.Found | Awaitable[p.Found]:
        """The longest page prefix of the first chunk that was missing, under the lease of the look-up."""
        namespace = self._manager.index.registered(message.namespace)
        lease = self._manager.holdings.get(message.lease) if message.lease else None
        last = lease.entries[lease.chunks - 1] if lease is not None and lease.chunks else None
        if last is not None or not message.chunks:
            prefixes = self._unknown(namespace, split_digests(message.prefixes))
            if prefixes:
                parent = b"" if last is None else last.digest
                return self._asking(
                    namespace, (), parent, prefixes, [last], lambda _: self._extended(message, namespace)
                )
        return self._extended(message, namespace)

    def _extended(self, message: p.Extend, namespace: NamespaceIndex) -> p.Found:
        lease = self._manager.holdings.get(message.lease) if message.lease else None
        partial = self._partial(message, namespace)
        number = 0 if lease is None else lease.number
        if partial is None:
            return p.Found(number, message.chunks)
        entry, pages = partial
        offers = self._manager.offers
        held = [] if lease is None else lease.entries
        if not self._stack.room.here(entry):
            own = [each for each in held if each is not None]
            if self._stack.room.fits([*own, entry], self._manager.pinned) <= len(own):
                return p.Found(number, message.chunks)
        tokens = [self._tokens(namespace, pages)]
        offer = offers.choose([entry], tokens, message.prefill_rate, offers.rules._replace(min_tokens=0), held)
        if not offer.entries:
            return p.Found(number, message.chunks, withheld=self._withhold(message, offer))
        tiers = note_use(self._stack, [entry])
        if lease is not None and len(lease.entries) == lease.chunks:
            lease.add_partial(entry)
            lease.patience = max(lease.patience, offer.patience)
            self._stack.loads.bring([entry], None, priority=QUEUED)
        elif message.lease == 0 and message.hold:
            number = self._lease([], partial, offer.patience)
        return p.Found(number, message.chunks, pages, entry.digest, tiers)

    def _lease(
        self, entries: Sequence[Entry], partial: tuple[Entry, int] | None, patience: float, *, here: bool = False
    ) -> int:
        """Promise these, and start their loads in order unless all are `here`; 0 when there is nothing to promise."""
        if self.closed or (not entries and partial is None):
            return 0
        lease = self._manager.holdings.lease([*entries])
        if partial is not None:
            lease.add_partial(partial[0])
        lease.patience = patience
        self._leases.add(lease.number)
        if not here:
            self._stack.loads.bring_soon(lease.entries)
        return lease.number

    def _partial(self, message: p.Lookup | p.Extend, namespace: NamespaceIndex) -> tuple[Entry, int] | None:
        found = namespace.longest_prefix(split_digests(message.prefixes))
        return found if found is not None and self._reached(message, [found[0]]) else None

    def _reached(self, message: p.Lookup | p.Extend, entries: list[Entry]) -> list[Entry]:
        """The leading entries that can be loaded: not those that lie only in tiers that are off."""
        off = self._stack.unreachable()
        if off:
            for i, entry in enumerate(entries):
                if any(not part.tiers & ~off and part.staged is None for part in entry.shards.values()):
                    self._miss(message, len(entries) - i, MissReason.TIER_OPEN)
                    return entries[:i]
        return entries

    def _miss(self, message: p.Lookup | p.Extend, count: int, reason: MissReason) -> None:
        """Count chunks that were asked for and are not to be had; the look-up before an `Extend` has done so."""
        if not message.again and isinstance(message, p.Lookup):
            self._metrics.inc("lmkv_misses_total", count, reason=reason.value)


def present(namespace: NamespaceIndex, digests: Sequence[bytes]) -> list[Entry]:
    """The entries of the leading chunks that are READY."""
    entries: list[Entry] = []
    get = namespace.entries.get
    for digest in digests:
        entry = get(digest)
        if entry is None or not entry.ready:
            break
        entries.append(entry)
    return entries


def _with(namespace: NamespaceIndex, digests: Sequence[bytes], known: int, found: list[Entry]) -> list[Entry]:
    """As `present`, where `known` chunks were there before the stores were asked, and now those `found` are."""
    before = present(namespace, digests[:known])
    return before if len(before) < known else before + found[: len(digests) - known]


def note_use(stack: Stack, entries: Sequence[Entry]) -> tuple[int, ...]:
    """Note the use of `entries` in every tier; the number of the tier that each has to come from."""
    places: list[int] = []
    tiers = stack.tiers
    used: list[list[ChunkKey]] = [[] for _ in tiers]
    known: dict[int, tuple[int, list[list[ChunkKey]]]] = {}  # of frames that lie in the same tiers
    for entry in reversed(entries):  # the first chunks end up as the most recently used
        slowest = 0
        for part in entry.shards.values():
            bits = part.tiers
            if bits not in known:
                known[bits] = (bits & -bits).bit_length() - 1, [used[n] for n in range(len(tiers)) if bits >> n & 1]
            fastest, lists = known[bits]
            if fastest > slowest and part.staged is None:
                slowest = fastest
            for keys in lists:
                keys.append(part.key)
        places.append(slowest)
    loop = asyncio.get_running_loop()
    for tier, keys in zip(tiers, used, strict=True):
        if keys:
            tier.touch(keys)
            if not tier.resident:
                loop.call_soon(loop.call_soon, tier.remember_use, keys)  # once the answer has gone out
    places.reverse()
    return tuple(places)
