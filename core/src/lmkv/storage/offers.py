"""How much of what is stored pays to be loaded: never slower than computing it.

A look-up has found a prefix, of which some lies in the pool and some in slower tiers. Loading the first n tokens ends
after a time that the tiers' measured costs tell, behind the loads that wait already; computing them takes n / (prefill
rate). What is offered is the prefix that saves most: not the first at which both are equal, for where the latency is
high a long prefix pays and a short one does not.
"""

from __future__ import annotations

import heapq
import time
from typing import TYPE_CHECKING, Final, NamedTuple

from lmkv.storage.driver import DEMOTE
from lmkv.storage.load_queue import Wanted
from lmkv.storage.loads import full

if TYPE_CHECKING:
    from collections.abc import Sequence

    from lmkv.storage.index import Entry, Shard
    from lmkv.storage.stack import Stack
    from lmkv.storage.tier import Tier

EXPLORE_SECONDS: Final = 60.0
"""A tier whose frames are withheld, and that nothing was loaded from for so long, is measured anew by one load."""


class Rules(NamedTuple):
    """What may be offered of frames below RAM."""

    measured: bool = True
    """Only what is loaded sooner than computed, where both speeds are known."""
    min_tokens: int = 0
    """Nothing at all if it is fewer tokens."""
    max_wait: float = 0.0
    """Only what is loaded within so many seconds, where that is known; 0: however long it takes."""

    def stricter(self, min_tokens: int, max_wait: float) -> Rules:
        """Both these and what a client asks for."""
        waits = [wait for wait in (self.max_wait, max_wait) if wait > 0]
        return self._replace(min_tokens=max(self.min_tokens, min_tokens), max_wait=min(waits, default=0.0))


DEFAULT_RULES: Final = Rules()


class Offer(NamedTuple):
    """What became of the entries that a look-up found."""

    entries: int
    """Leading ones that are offered."""
    withheld: dict[str, int]
    """Tokens of the others, by the tier that they would have to come from."""
    patience: float = float("inf")
    """Seconds that a running request may wait for the loads in all; infinite where their cost is not known."""


class Timetable:
    """When the loads of one tier end, as more and more frames are added; all of them behind what waits already.

    Frames make batches as in `Loads`, batches go to the thread that is free first, and threads take turns on what they
    share (see `lmkv.storage.cost`).
    """

    def __init__(self, tier: Tier, backlog: tuple[int, int]) -> None:
        threads = tier.settings.threads
        self.end = 0.0
        """Seconds until all that was added is in the pool; 0 while the tier's cost is not known."""
        self._model = tier.cost("get").model
        self._decode = tier.cost("decode").model
        self._ahead = tier.cost("get").drain(*backlog, threads) or 0.0
        self._free = [self._ahead] * threads
        self._link = self._ahead
        self._nbytes = self._frames = 0

    def wait(self) -> None:
        """A frame that is on its way already."""
        self.end = max(self.end, self._ahead)

    def add(self, nbytes: int) -> None:
        """One more frame."""
        self._nbytes += nbytes
        self._frames += 1
        model, decode, nbytes = self._model, self._decode, self._nbytes
        if model is None:
            return
        ready = self._free[0] + model.latency + nbytes * model.own
        end = moved = max(self._link, ready) + nbytes * model.shared
        if decode is not None:
            end += decode.latency + nbytes * (decode.own + decode.shared)
        self.end = max(self.end, end)
        if full(nbytes, self._frames):
            heapq.heapreplace(self._free, end)
            self._link = moved
            self._nbytes = self._frames = 0


class Offers:
    """Decides for every look-up. Lives on the storage loop."""

    def __init__(self, stack: Stack, rules: Rules) -> None:
        self.rules = rules
        self._stack = stack
        self._explored: dict[int, float] = {}

    def choose(
        self,
        entries: Sequence[Entry],
        tokens: Sequence[int],
        rate: float,
        rules: Rules,
        held: Sequence[Entry | None] = (),
    ) -> Offer:
        """How many of `entries`, which follow one another, to offer.

        Args:
            entries: found, none of them held yet by this request.
            tokens: of each.
            rate: tokens that the engine computes in a second; 0: not known.
            rules: what may be offered.
            held: what this request has been offered before, whose loads are on their way.
        """
        self._stack.loads.bring_due()
        sources: dict[int, Tier | None] = {}
        slow = [self._below(entry, sources) for entry in entries]
        if not any(slow):
            return Offer(len(entries), {})
        ends = self._ends(slow, held)
        first = next(i for i, parts in enumerate(slow) if parts)
        best, most = 0, 0.0
        done, base = 0, ends[0]
        measured = rules.measured and rate > 0
        for i, count in enumerate(tokens):
            done += count
            if slow[i] and rules.max_wait and ends[i + 1] > rules.max_wait:
                break
            saved = done / rate - (ends[i + 1] - base) if measured else float(i)
            if saved >= most:
                best, most = i + 1, saved
        if best > first and sum(tokens[first:best]) < rules.min_tokens:
            best = first
        withheld: dict[str, int] = {}
        for parts, count in zip(slow[best:], tokens[best:], strict=True):
            name = self._name(parts)
            withheld[name] = withheld.get(name, 0) + count
        if withheld:
            self._explore(entries[best:], slow[best:])
        return Offer(best, withheld, self._patience(slow[:best], ends[best]))

    @staticmethod
    def _patience(slow: Sequence[list[tuple[Tier, Shard, int]]], planned: float) -> float:
        """Twice what the loads should take, and a deadline: a tier that has become slow is not waited for."""
        tiers = {tier for parts in slow for tier, _, _ in parts}
        if any(not tier.cost("get").known for tier in tiers):
            return float("inf")
        return 2 * planned + max((tier.settings.deadline for tier in tiers), default=0.0)

    def _below(self, entry: Entry, sources: dict[int, Tier | None]) -> list[tuple[Tier, Shard, int]]:
        """What of an entry has to be loaded: its parts, where each would come from, their numbers.

        `sources` keeps where frames come from that lie in the same tiers, for one look-up.
        """
        ram = self._stack.ram
        bit = 0 if ram is None else ram.bit
        found: list[tuple[Tier, Shard, int]] = []
        for number, part in entry.shards.items():
            places = part.tiers
            if not places & bit and part.staged is None:
                if places not in sources:
                    sources[places] = self._stack.loads.source(part)
                tier = sources[places]
                if tier is not None:
                    found.append((tier, part, number))
        return found

    def _ends(self, slow: Sequence[list[tuple[Tier, Shard, int]]], held: Sequence[Entry | None]) -> list[float]:
        """Seconds until what is held is there, then with one entry more, and so on."""
        tables: dict[int, Timetable] = {}

        def table(tier: Tier) -> Timetable:
            made = tables.get(tier.number)
            if made is None:
                made = tables[tier.number] = Timetable(tier, self._stack.loads.backlog(tier))
            return made

        for entry in held:
            for tier, part, _ in () if entry is None else self._below(entry, {}):
                if part.loading is not None:
                    table(tier).wait()
        end = max((made.end for made in tables.values()), default=0.0)
        ends = [end]
        stored_bytes = self._stack.loads.stored_bytes
        for parts in slow:
            for tier, part, _ in parts:
                made = table(tier)
                if part.loading is None:
                    made.add(stored_bytes(tier, part))
                else:
                    made.wait()
                end = max(end, made.end)
            ends.append(end)
        return ends

    def _name(self, parts: Sequence[tuple[Tier, Shard, int]]) -> str:
        if parts:
            return max((tier for tier, _, _ in parts), key=lambda tier: tier.number).name
        return self._stack.tiers[0].name

    def _explore(self, entries: Sequence[Entry], slow: Sequence[list[tuple[Tier, Shard, int]]]) -> None:
        """What is withheld may be quicker than it was: now and then a load shows it that nobody waits for."""
        now = time.monotonic()
        chosen: Tier | None = None
        wanted: list[Wanted] = []
        nbytes = 0
        for entry, parts in zip(entries, slow, strict=True):
            for tier, part, number in parts:
                if chosen is None and self._stale(tier, now):
                    chosen = tier
                    self._explored[tier.number] = now
                if tier is chosen and not full(nbytes, len(wanted)):
                    nbytes += self._stack.loads.stored_bytes(tier, part)
                    wanted.append(Wanted(entry, number))
        if wanted:
            self._stack.loads.start(wanted, priority=DEMOTE, keep=True)

    def _stale(self, tier: Tier, now: float) -> bool:
        last = max(tier.cost("get").measured_at, self._explored.get(tier.number, float("-inf")))
        return tier.cost("get").known and now - last >= EXPLORE_SECONDS
