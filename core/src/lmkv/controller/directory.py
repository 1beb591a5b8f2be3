"""What is where: the contract of a directory, and its answers.

A directory maps (namespace, digest) to *places*: tiers of nodes in which all shards of that chunk lie. It is told by
the agents' events and pages (`lmkv.controller.fleet` hands them on, in the order in which they came) and is never a
promise: whoever goes to a place may find that the chunk has gone.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from lmkv.errors import ProtocolError
from lmkv.types import DIGEST_BYTES, NAMESPACE_BYTES

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from numpy.typing import NDArray

    from lmkv.agent.messages import Change


class Place(NamedTuple):
    """One tier of one node."""

    node: str
    tier: int
    """Its number in the node's `Register.tiers`: 0 is the fastest."""


class Holding(NamedTuple):
    """What one place has of the digests that were asked for."""

    place: Place
    leading: int
    """Digests from the first on without a gap."""
    bitmap: bytes
    """Bit i % 8 of byte i // 8: digest i lies there."""


class NodeHits(NamedTuple):
    """What one node has, in whichever of its tiers."""

    node: str
    leading: int
    """Digests from the first on without a gap, where each may lie in another tier."""
    total: int
    """Digests that it has, behind gaps too."""
    holdings: tuple[Holding, ...]
    """By tier, the fastest first."""


@dataclass(frozen=True, slots=True)
class Placement:
    """The answer to a look-up of `count` digests: only places that have any of them, by node and tier."""

    count: int
    holdings: tuple[Holding, ...]

    def nodes(self) -> tuple[NodeHits, ...]:
        """By node: the longest prefix first, of equals the one with more in its fastest tier, then by name."""
        by_node: dict[str, list[Holding]] = {}
        for holding in sorted(self.holdings):
            by_node.setdefault(holding.place.node, []).append(holding)
        hits = [_hits(node, holdings) for node, holdings in by_node.items()]
        return tuple(sorted(hits, key=lambda hit: (-hit.leading, -hit.holdings[0].leading, hit.node)))


def _hits(node: str, holdings: Sequence[Holding]) -> NodeHits:
    bits = 0
    for holding in holdings:
        bits |= int.from_bytes(holding.bitmap, "little")
    # The lowest bit that is not set stands where the prefix ends.
    leading = (~bits & (bits + 1)).bit_length() - 1
    return NodeHits(node, leading, bits.bit_count(), tuple(holdings))


class Size(NamedTuple):
    """How much a directory knows."""

    entries: int
    """Digests with at least one place."""
    nbytes: int
    """Bytes that it takes for them; 0: not known here."""


class Directory(ABC):
    """Where chunks lie. All methods run on the controller's loop; none keeps it longer than some milliseconds.

    Changes of one node are told one after the other (never two calls for the same node at one time); look-ups may come
    at any time, also between two steps of a change.

    All raise `ProtocolError` for a namespace that is not of 16 bytes or a blob that is no whole number of digests.
    `RedisDirectory` raises `BackendError` where the store is away.

    Attributes:
        refresh: seconds after which a node is to tell anew what it has, for entries expire.
    """

    refresh: float = math.inf

    @abstractmethod
    async def apply(self, node: str, changes: Sequence[Change]) -> None:
        """What a node says that it has, and has no more. A digest that is in both blobs is there."""

    @abstractmethod
    async def begin(self, node: str) -> None:
        """A full resync of a node begins: what it has is told anew, by `page` and `apply`. Until `end` the old holds.

        A resync that has begun before and not ended is forgotten.
        """

    @abstractmethod
    async def page(self, node: str, namespace: bytes, tier: int, digests: bytes) -> None:
        """Part of what a node has."""

    @abstractmethod
    async def end(self, node: str) -> bool:
        """The resync is complete: what was not told since `begin` is not there.

        False: what was told since was dropped meanwhile, or there was no `begin`; the node has to tell it anew.
        """

    @abstractmethod
    async def drop(self, node: str) -> None:
        """A node has gone, or has started anew: nothing that it said holds. Takes effect at once."""

    @abstractmethod
    async def lookup(self, namespace: bytes, digests: bytes) -> Placement:
        """Who has how much of a prompt. `digests`: the prompt's chain, 32 bytes each, in order."""

    @abstractmethod
    async def holders(self, namespace: bytes, digests: bytes) -> list[tuple[Place, ...]]:
        """For each digest its places, sorted."""

    @abstractmethod
    async def size(self) -> Size:
        """How much there is."""

    async def close(self) -> None:  # noqa: B027  nothing to close in memory
        """Let go of connections. What is known stays in a store that others share."""


def placement(groups: Sequence[Iterable[Place]], which: Sequence[int] | NDArray[np.integer]) -> Placement:
    """The answer for digests, each of which lies in the places of the group that `which` names for it."""
    members: dict[Place, list[int]] = {}
    for number, places in enumerate(groups):
        for place in places:
            members.setdefault(place, []).append(number)
    count = len(which)
    if not members or not count:
        return Placement(count, ())
    having = np.zeros((len(members), len(groups)), bool)
    for row, numbers in zip(having, members.values(), strict=True):
        row[numbers] = True
    bits = having[:, which]
    leading = np.where(bits.all(axis=1), count, bits.argmin(axis=1)).tolist()
    bitmaps = np.packbits(bits, axis=1, bitorder="little")
    holdings = (Holding(place, leading[i], bitmaps[i].tobytes()) for i, place in enumerate(members))
    return Placement(count, tuple(sorted(holdings)))


def check_blob(namespace: bytes, digests: bytes) -> int:
    """The number of digests.

    Raises:
        ProtocolError: no namespace, or no whole number of digests.
    """
    count, rest = divmod(len(digests), DIGEST_BYTES)
    if len(namespace) != NAMESPACE_BYTES or rest:
        raise ProtocolError(
            f"{len(namespace)} bytes as a namespace and {len(digests)} of digests; "
            f"a namespace has {NAMESPACE_BYTES}, each digest {DIGEST_BYTES}"
        )
    return count
