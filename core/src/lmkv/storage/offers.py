"""How much of what is stored pays to be loaded: never slower than computing it.

A look-up has found a prefix, of which some lies in the pool and some in slower tiers. Loading the first n tokens ends
after a time that the tiers' measured costs tell, behind the loads that wait already; computing them takes n / (prefill
rate). What is offered is the prefix that saves most: not the first at which both are equal, for where the latency is
high a long prefix pays and a short one does not.
"""

from __future__ import annotations

import heapq
import time
from itertools import accumulate
from typing import TYPE_CHECKING, Final, NamedTuple, TypeAlias

from lmkv.storage import loads
from lmkv.storage.cost import Model
from lmkv.storage.driver import DEMOTE
from lmkv.storage.load_queue import Wanted

if TYPE_CHECKING:
    from collections.abc import Sequence

    from lmkv.storage.index import Entry, Shard
    from lmkv.storage.stack import Stack
    from lmkv.storage.tier import Tier

EXPLORE_SECONDS: Final = 60.0
"""A tier whose frames are withheld, and that nothing was loaded from for so long, is measured anew by one load."""


Below: TypeAlias = "list[tuple[int, Tier, Shard, int]]"
"""Parts to be loaded: the place of the entry in the prompt, the tier, the part, its number."""


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
        self._decode = tier.cost("decode").model or Model(0.0, 0.0, 0.0)
        self._ahead = tier.cost("get").drain(*backlog, threads) or 0.0
        self._free = [self._ahead] * threads
        self._link = self._ahead
        self._nbytes = self._frames = 0

    def wait(self) -> None:
        """A frame that is on its way already."""
        self.end = max(self.end, self._ahead)

    def add(self, sizes: Sequence[int]) -> list[float]:
        """More frames, of so many bytes; 0: of one that is on its way. The end after each of them."""
        model, decode = self._model, self._decode
        if model is None:
            if 0 in sizes:
                self.wait()
            return [self.end] * len(sizes)
        latency, own, shared = model
        after, each = decode.latency, decode.own + decode.shared
        most_bytes, most_frames = loads.BATCH_BYTES, loads.BATCH_FRAMES
        end, link, nbytes, frames = self.end, self._link, self._nbytes, self._frames
        begin = self._free[0] + latency
        ends: list[float] = []
        for size in sizes:  # hundreds in a look-up, of which a call would take as much time again
            if size:
                nbytes += size
                frames += 1
                moved = begin + nbytes * own
                moved = (link if link > moved else moved) + nbytes * shared  # noqa: FURB136
                ready = moved + after + nbytes * each
                if nbytes >= most_bytes or frames >= most_frames:
                    heapq.heapreplace(self._free, ready)
                    begin = self._free[0] + latency
                    link = moved
                    nbytes = frames = 0
            else:
                ready = self._ahead
            if ready > end:  # noqa: PLR1730
                end = ready
            ends.append(end)
        self.end, self._link, self._nbytes, self._frames = end, link, nbytes, frames
        return ends


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
        below = self._below(entries)
        if not below:
            return Offer(len(entries), {})
        ends = self._ends(len(entries), below, held)
        slow = {at for at, _, _, _ in below} if rules.max_wait else ()
        first = below[0][0]
        best, most = 0, 0.0
        done, base = 0, ends[0]
        measured = rules.measured and rate > 0
        for i, count in enumerate(tokens):
            done += count
            if i in slow and ends[i + 1] > rules.max_wait:
                break
            saved = done / rate - (ends[i + 1] - base) if measured else float(i)
            if saved >= most:
                best, most = i + 1, saved
        if best > first and sum(tokens[first:best]) < rules.min_tokens:
            best = first
        withheld: dict[str, int] = {}
        if best < len(entries):
            withheld = self._withheld(tokens, best, below)
            self._explore(entries, best, below)
        return Offer(best, withheld, self._patience(best, below, ends[best]))

    @staticmethod
    def _patience(best: int, below: Below, planned: float) -> float:
        """Twice what the loads should take, and a deadline: a tier that has become slow is not waited for."""
        tiers = {tier for at, tier, _, _ in below if at < best}
        if any(not tier.cost("get").known for tier in tiers):
            return float("inf")
        return 2 * planned + max((tier.settings.deadline for tier in tiers), default=0.0)

    def _below(self, entries: Sequence[Entry | None]) -> Below:
        """What of the entries has to be loaded: place of the entry, where its part would come from, the part."""
        ram = self._stack.ram
        bit = 0 if ram is None else ram.bit
        sources: dict[int, Tier | None] = {}  # of frames that lie in the same tiers
        found: Below = []
        for at, entry in enumerate(entries):
            for number, part in () if entry is None else entry.shards.items():
                places = part.tiers
                if not places & bit and part.staged is None:
                    if places not in sources:
                        sources[places] = self._stack.loads.source(part)
                    tier = sources[places]
                    if tier is not None:
                        found.append((at, tier, part, number))
        return found

    def _ends(self, count: int, below: Below, held: Sequence[Entry | None]) -> list[float]:
        """Seconds until what is held is there, then with one of `count` entries more, and so on."""
        tables: dict[int, Timetable] = {}

        def table(tier: Tier) -> Timetable:
            made = tables.get(tier.number)
            if made is None:
                made = tables[tier.number] = Timetable(tier, self._stack.loads.backlog(tier))
            return made

        for _, tier, part, _ in self._below(held):
            if part.loading is not None:
                table(tier).wait()
        ends = [max((made.end for made in tables.values()), default=0.0)] * (count + 1)
        stored_bytes = self._stack.loads.stored_bytes
        for tier in {tier for _, tier, _, _ in below}:
            parts = [(at, part) for at, source, part, _ in below if source is tier]
            sizes = [stored_bytes(tier, part) if part.loading is None else 0 for _, part in parts]
            for (at, _), end in zip(parts, table(tier).add(sizes), strict=True):
                ends[at + 1] = max(ends[at + 1], end)
        return list(accumulate(ends, max))

    def _withheld(self, tokens: Sequence[int], best: int, below: Below) -> dict[str, int]:
        """Tokens of the entries from `best` on, by the slowest tier that each has to come from."""
        names = [self._stack.tiers[0]] * len(tokens)
        for at, tier, _, _ in below:
            if tier.number > names[at].number:
                names[at] = tier
        withheld: dict[str, int] = {}
        for tier, count in zip(names[best:], tokens[best:], strict=True):
            withheld[tier.name] = withheld.get(tier.name, 0) + count
        return withheld

    def _explore(self, entries: Sequence[Entry], best: int, below: Below) -> None:
        """What is withheld may be quicker than it was: now and then a load shows it that nobody waits for."""
        now = time.monotonic()
        chosen: Tier | None = None
        wanted: list[Wanted] = []
        nbytes = 0
        for at, tier, part, number in below:
            if at < best:
                continue
            if chosen is None and self._stale(tier, now):
                chosen = tier
                self._explored[tier.number] = now
            if tier is chosen and not loads.full(nbytes, len(wanted)):
                nbytes += self._stack.loads.stored_bytes(tier, part)
                wanted.append(Wanted(entries[at], number))
        if wanted:
            self._stack.loads.start(wanted, priority=DEMOTE, keep=True)

    def _stale(self, tier: Tier, now: float) -> bool:
        last = max(tier.cost("get").measured_at, self._explored.get(tier.number, float("-inf")))
        return tier.cost("get").known and now - last >= EXPLORE_SECONDS
