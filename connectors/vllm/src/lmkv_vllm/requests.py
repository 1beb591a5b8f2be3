"""Scheduler side: what is remembered of one request, and the arithmetic of its load."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from lmkv_vllm.metadata import LoadItem

if TYPE_CHECKING:
    from collections.abc import Sequence

    from lmkv.engine import Hit
    from lmkv.keys import KeyChain
    from lmkv_vllm.lookups import Question
    from lmkv_vllm.transfers import Arrival, Push


@dataclass(slots=True)
class Tracked:
    """One request of the engine."""

    request: Any
    chain: KeyChain
    readable: bool
    transfer: Push | Arrival | None = None
    """It goes to another node, or comes from one."""
    question: Question | None = None
    offer: tuple[int, int] = (0, 0)
    """Tokens that the engine had, and tokens offered to it, at the last question."""
    admitted: int = -1
    """Number of preemptions at the last admission: one look-up and one load for each."""
    loading: bool = False
    asked: bool = False
    """It was looked up before."""
    counted: bool = False
    saved: int = 0
    """Full chunks that need no save any more."""
    stale: int | None = None
    """Number of preemptions at a reset: what the request has computed until then must not be stored."""
    hits: list[tuple[int, str, int]] = field(default_factory=list)
    """Of the load under way: frame, tier it was found in, tokens."""


def load_items(
    hit: Hit, page_ids: Sequence[int], computed: int, external: int, *, page_tokens: int, chunk_tokens: int
) -> tuple[LoadItem, ...]:
    """Which pages of which frames go into the engine's pages, for `external` tokens after the first `computed`."""
    per_chunk = chunk_tokens // page_tokens
    first, stop = computed // page_tokens, (computed + external) // page_tokens
    items = []
    while first < stop:
        index = first // per_chunk
        end = min(stop, (index + 1) * per_chunk)
        items.append(LoadItem(index, first - index * per_chunk, tuple(page_ids[first:end]), hit.tiers[index]))
        first = end
    return tuple(items)


def hits_of(hit: Hit, computed: int, external: int, chunk_tokens: int) -> list[tuple[int, str, int]]:
    """Frame, tier and tokens of everything that is loaded."""
    found = []
    for index, tier in enumerate(hit.tiers):
        tokens = min((index + 1) * chunk_tokens, computed + external) - max(index * chunk_tokens, computed)
        if tokens > 0:
            found.append((index, tier, tokens))
    return found
