"""From what a request names to digests, and from digests to who has how much of a prompt."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from lmkv.controller.models import MAX_CHUNKS, LookupAnswer, NodeHit, TierHit
from lmkv.controller.problems import Problem, unknown
from lmkv.errors import ConfigError
from lmkv.keys import Extras, KeyChain, MediaSpan
from lmkv.types import DIGEST_BYTES

if TYPE_CHECKING:
    from collections.abc import Mapping

    from lmkv.controller.directory import Directory, NodeHits
    from lmkv.controller.models import Chunks, LookupRequest
    from lmkv.controller.roster import NodeRecord
    from lmkv.keys import Namespace

THREAD_TOKENS: Final = 1 << 15
"""A longer prompt is hashed in a thread, so that others need not wait for it."""


class Geometry(NamedTuple):
    """What a chain depends on besides the prompt."""

    chunk_tokens: int
    page_tokens: int


@dataclass(frozen=True, slots=True)
class Named:
    """The chunks that a request names, in each of its namespaces."""

    namespaces: dict[bytes, Namespace]
    digests: dict[bytes, bytes]
    """Namespace → digests of full chunks, in order."""
    chains: dict[Geometry, KeyChain]
    """Empty where the request gave digests."""

    def chain(self, namespace: bytes) -> KeyChain | None:
        """The prompt's chain; None where the request gave digests."""
        facts = self.namespaces[namespace]
        return self.chains.get(Geometry(facts.chunk_tokens, facts.page_tokens))

    def all_digests(self, namespace: bytes) -> bytes:
        """Of the full chunks and of the tail, the whole pages after them: what verbs act on."""
        chain = self.chain(namespace)
        tail = [] if chain is None else chain.prefixes(len(chain.digests))[-1:]
        return self.digests[namespace] + b"".join(tail)


def matching(
    namespaces: Mapping[bytes, Namespace], model: str = "", revision: str = "", namespace: str = ""
) -> dict[bytes, Namespace]:
    """The namespaces that a request means.

    Raises:
        Problem: there is none; says what there is.
    """
    found = dict(namespaces)
    if model:
        found = {key: each for key, each in found.items() if each.model == model}
        if not found:
            raise unknown("model", model, {each.model for each in namespaces.values()})
    if revision:
        here, found = found, {key: each for key, each in found.items() if each.revision == revision}
        if not found:
            raise unknown("revision", revision, {each.revision for each in here.values()}, f" of model {model!r}")
    if namespace:
        here, found = found, {key: each for key, each in found.items() if key.hex() == namespace}
        if not found:
            raise unknown("namespace", namespace, {key.hex() for key in here})
    return found


async def named(request: Chunks, namespaces: Mapping[bytes, Namespace]) -> Named:
    """What a request names. Its tokens are hashed here, and go no further.

    Raises:
        Problem: a model, revision or namespace that nobody has; media that make no sense.
    """
    found = matching(namespaces, request.model, request.revision, request.namespace)
    if request.digests:
        blob = bytes.fromhex("".join(request.digests))
        return Named(found, dict.fromkeys(found, blob), {})
    geometries = {Geometry(each.chunk_tokens, each.page_tokens) for each in found.values()}
    if len(request.tokens) > THREAD_TOKENS:
        chains = await asyncio.to_thread(_chains, request, geometries)
    else:
        chains = _chains(request, geometries)
    most = max(len(chain.digests) for chain in chains.values())
    if most >= MAX_CHUNKS:
        raise Problem(422, "body", f"the prompt has {most} chunks; at most {MAX_CHUNKS - 1} are taken at once")
    digests = {
        key: b"".join(chains[Geometry(each.chunk_tokens, each.page_tokens)].digests) for key, each in found.items()
    }
    return Named(found, digests, chains)


def _chains(request: Chunks, geometries: set[Geometry]) -> dict[Geometry, KeyChain]:
    try:
        spans = tuple(MediaSpan(each.identity, each.start, each.length) for each in request.media)
        extras = Extras(request.salt, request.adapter, request.adapter_version, spans)
        row = np.array(request.tokens, np.uint32)
        chains = {geometry: KeyChain(geometry.chunk_tokens, geometry.page_tokens, extras) for geometry in geometries}
        for chain in chains.values():
            chain.extend(row)
    except ConfigError as error:
        raise Problem(422, "body", str(error)) from None
    return chains


async def look_up(
    request: LookupRequest, what: Named, directory: Directory, nodes: Mapping[str, NodeRecord]
) -> LookupAnswer:
    """Who has how much of a prompt, best node first.

    A node's hit is counted to the last page of a tail that it has under a digest of its own. Pages of a chunk that it
    has only as the beginning of another prompt's chunk are not known here.
    """
    hits: list[NodeHit] = []
    for namespace in what.namespaces:
        blob = what.digests[namespace]
        placed = await directory.lookup(namespace, blob) if blob else None
        found = {hit.node: hit for hit in placed.nodes()} if placed is not None else {}
        tails = await _tails(namespace, what, directory, found)
        for name in found.keys() | tails.keys():
            record = nodes.get(name)
            if record is not None and record.connected:
                hits.append(
                    _node_hit(record, namespace, what, (found.get(name), tails.get(name, {})), held=request.chunks)
                )
    hits.sort(key=_rank)
    return LookupAnswer(tokens=len(request.tokens) or None, nodes=hits)


def _rank(hit: NodeHit) -> tuple[int, int, float, str]:
    """Most tokens first; of equals the one that has more in its fastest tier, then the less busy one."""
    return -hit.hit_tokens, -max((tier.hit_tokens for tier in hit.tiers[:1]), default=0), hit.load, hit.node


async def _tails(
    namespace: bytes, what: Named, directory: Directory, found: Mapping[str, NodeHits]
) -> dict[str, dict[int, int]]:
    """Node → tier → tokens that a tail frame adds to its full chunks."""
    chain = what.chain(namespace)
    if chain is None:
        return {}
    tails: dict[str, dict[int, int]] = {}
    for index in {0, *(hit.leading for hit in found.values())}:
        prefixes = chain.prefixes(index)
        if not prefixes:
            continue
        placed = await directory.lookup(namespace, b"".join(prefixes))
        for holding in placed.holdings:
            place = holding.place
            if (found[place.node].leading if place.node in found else 0) == index:
                pages = int.from_bytes(holding.bitmap, "little").bit_length()
                tails.setdefault(place.node, {})[place.tier] = pages * chain.page_tokens
    return tails


def _node_hit(
    record: NodeRecord, namespace: bytes, what: Named, found: tuple[NodeHits | None, Mapping[int, int]], *, held: bool
) -> NodeHit:
    hit, tails = found
    chunk = what.namespaces[namespace].chunk_tokens
    leading = hit.leading if hit is not None else 0
    holdings = {holding.place.tier: holding for holding in hit.holdings} if hit is not None else {}
    tiers = []
    for number in sorted(holdings.keys() | tails.keys()):
        if number >= len(record.tiers):
            continue  # of an earlier start of the node, with another stack
        holding = holdings.get(number)
        own = holding.leading if holding is not None else 0
        tokens = own * chunk + (tails.get(number, 0) if own == leading else 0)
        bitmap = holding.bitmap if holding is not None else bytes(-(-len(what.digests[namespace]) // DIGEST_BYTES // 8))
        facts = record.tiers[number]
        bits = bitmap.hex() if held else None
        tiers.append(TierHit(tier=facts.name, backend=facts.backend, hit_tokens=tokens, held=bits))
    return NodeHit(
        node=record.name,
        namespace=namespace.hex(),
        hit_tokens=leading * chunk + max(tails.values(), default=0),
        tiers=tiers,
        load=record.load,
        endpoints=record.endpoints,
    )
