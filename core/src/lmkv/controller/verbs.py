"""From a request to a plan: which commands go to which nodes. Nothing is sent here, and nothing may be unknown."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Final

from lmkv.agent.messages import ClearTier, PinChunks, RecodeChunks, Shift, UnpinChunks
from lmkv.controller.models import EVERY
from lmkv.controller.problems import Problem, conflict, unknown
from lmkv.controller.prompts import matching, named
from lmkv.controller.records import Errand, Failure, Plan, Transfer
from lmkv.service.digests import split_digests
from lmkv.types import DIGEST_BYTES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from lmkv.agent.messages import TierFacts
    from lmkv.controller.fleet import Fleet
    from lmkv.controller.models import (
        Chunks,
        ClearRequest,
        CompressRequest,
        DecompressRequest,
        MoveRequest,
        PinRequest,
        UnpinRequest,
    )
    from lmkv.controller.prompts import Named
    from lmkv.controller.records import Command, Work
    from lmkv.controller.roster import NodeRecord

MOVED_AT_ONCE: Final = 256
"""Chunks of one transfer: what is copied twice, at most, when a controller is killed in the middle."""
NAMED_AT_ONCE: Final = 4096
"""Chunks of one command that moves no bytes between nodes."""
_IDENTITY: Final = "identity"


class Planner:
    """Makes plans of requests, for the fleet as it is now. All methods raise `Problem` for what does not exist."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet

    async def pin(self, request: PinRequest) -> Plan:
        """Keep chunks where they are."""
        return await self._where_they_lie(
            "pin", request, request.node, lambda key, blob: PinChunks(key, blob, request.seconds)
        )

    async def unpin(self, request: UnpinRequest) -> Plan:
        """Take pins away."""
        return await self._where_they_lie("unpin", request, request.node, UnpinChunks)

    async def recode(self, verb: str, request: CompressRequest | DecompressRequest) -> Plan:
        """Store chunks of a tier anew with another codec."""
        record = await self._node(request.node)
        tier = _tier(record, request.tier)
        _check_writable(record, tier)
        for name in request.codec.split("+"):
            if name not in {_IDENTITY, *record.codecs}:
                raise unknown("codec", name, record.codecs, f" on node {record.name!r}")
        what = await self._named(request)
        chosen = await self._on(record, what, request.tier)
        return _plan(verb, _errands(record, chosen, lambda k, blob: RecodeChunks(k, blob, tier.name, request.codec)))

    async def move(self, request: MoveRequest, *, keep: bool) -> Plan:
        """Move (or copy) chunks between tiers of a node, or between nodes."""
        source, target = await self._node(request.source.node), await self._node(request.target.node)
        into = _tier(target, request.target.tier)
        out_of = _tier(source, request.source.tier) if request.source.tier else None
        _check_writable(target, into)
        if out_of is not None and not keep:
            _check_writable(source, out_of)
        what = await self._named(request)
        chosen = await self._on(source, what, request.source.tier)
        verb = "copy" if keep else "move"
        if source.name == target.name:
            if out_of is None or out_of is into:
                raise conflict("same-place", "within one node, source.tier and target.tier are two tiers: name both")
            tier = out_of.name
            return _plan(verb, _errands(source, chosen, lambda k, blob: Shift(k, blob, tier, into.name, keep)))
        _check_between(source, out_of, target, into)
        return _plan(
            verb,
            (
                Transfer(source.name, request.source.tier, target.name, into.name, key, part, not keep)
                for key, blob in chosen.items()
                for part in _parts(blob, MOVED_AT_ONCE)
            ),
        )

    async def clear(self, request: ClearRequest) -> Plan:
        """Remove everything of a node, tier, model or namespace."""
        nodes = await self._fleet.nodes()
        spaces = None
        if request.model is not None or request.namespace is not None:
            found = matching(await self._fleet.namespaces(), request.model or "", "", request.namespace or "")
            spaces = set(found)
        records = list(nodes.values()) if request.node == EVERY else [await self._node(request.node)]
        if request.tier is not None:
            with_tier = [r for r in records if any(tier.name == request.tier for tier in r.tiers)]
            if not with_tier:
                there = {tier.name for r in records for tier in r.tiers}
                raise unknown("tier", request.tier, there, _on_node(request.node))
            records = with_tier
        works = [
            Errand(record.name, ClearTier(key, request.tier))
            for record in records
            for key in ([None] if spaces is None else sorted(spaces & set(record.namespaces)))
        ]
        if spaces and not works:
            here = {k for r in records for k in r.namespaces}
            known = {n.model for key, n in (await self._fleet.namespaces()).items() if key in here}
            raise unknown("model", request.model or request.namespace or "", known, _on_node(request.node))
        return _plan("clear", works)

    # --- parts of them -----------------------------------------------------------------------------------------------

    async def _named(self, request: Chunks) -> Named:
        return await named(request, await self._fleet.namespaces())

    async def _node(self, name: str) -> NodeRecord:
        nodes = await self._fleet.nodes()
        if name not in nodes:
            raise unknown("node", name, nodes)
        return nodes[name]

    async def _where_they_lie(
        self, verb: str, request: Chunks, node: str, command: Callable[[bytes, bytes], Command]
    ) -> Plan:
        """On one node, or on every node that has them as far as the directory knows."""
        what = await self._named(request)
        if node:
            record = await self._node(node)
            return _plan(verb, _errands(record, await self._on(record, what, ""), command))
        nodes = await self._fleet.nodes()
        works: list[Work] = []
        lost: list[Failure] = []
        for key in what.namespaces:
            blob = what.all_digests(key)
            holders = await self._fleet.directory.holders(key, blob)
            by_node: dict[str, list[bytes]] = {}
            for digest, places in zip(split_digests(blob), holders, strict=True):
                for name in sorted({place.node for place in places} & nodes.keys()):
                    by_node.setdefault(name, []).append(digest)
                if not places:
                    lost.append(Failure(key, digest, "", "no node has it"))
            for name, digests in sorted(by_node.items()):
                works += _errands(nodes[name], {key: b"".join(digests)}, command)
        if works:  # in a namespace of which there is nothing, nothing was meant
            there = {work.namespace for work in works}
            lost = [each for each in lost if each.namespace in there]
        return _plan(verb, works, lost)

    async def _on(self, record: NodeRecord, what: Named, tier: str) -> dict[bytes, bytes]:
        """The chunks in question, in the one namespace of the node that is meant, or in those that have any of them."""
        here = {key: what.all_digests(key) for key in what.namespaces if key in record.namespaces}
        if not here:
            known = {each.model for key, each in (await self._fleet.namespaces()).items() if key in record.namespaces}
            asked = next(iter(what.namespaces.values())).model
            raise unknown("model", asked, known, f" on node {record.name!r}")
        if len(here) > 1:
            having = {key: blob for key, blob in here.items() if await self._has_any(record, key, blob, tier)}
            here = having or dict([next(iter(here.items()))])
        if not any(here.values()):
            raise Problem(409, "no-chunk", "the prompt is shorter than a page: there is no chunk of it")
        return here

    async def _has_any(self, record: NodeRecord, key: bytes, blob: bytes, tier: str) -> bool:
        numbers = {number for number, facts in enumerate(record.tiers) if tier in {"", facts.name}}
        holders = await self._fleet.directory.holders(key, blob)
        return any(p.node == record.name and p.tier in numbers for places in holders for p in places)


def _tier(record: NodeRecord, name: str) -> TierFacts:
    for tier in record.tiers:
        if tier.name == name:
            return tier
    raise unknown("tier", name, (tier.name for tier in record.tiers), f" on node {record.name!r}")


def _check_writable(record: NodeRecord, tier: TierFacts) -> None:
    if not tier.writable:
        raise conflict("read-only", f"tier {tier.name!r} of node {record.name!r} is read-only (write: never)")


def _check_between(source: NodeRecord, out_of: TierFacts | None, target: NodeRecord, into: TierFacts) -> None:
    """Between nodes, chunks go from what is one node's own to what is the other's."""
    for record, tier in ((source, out_of), (target, into)):
        if tier is not None and tier.shared:
            text = (
                f"tier {tier.name!r} of node {record.name!r} is a store that nodes share: nothing moves between nodes"
            )
            raise conflict("shared", text)
    if not source.endpoints.get("peer"):
        raise conflict("no-peer", f"node {source.name!r} has no peer port: set peer.listen in its configuration")


def _errands(record: NodeRecord, chosen: Mapping[bytes, bytes], make: Callable[[bytes, bytes], Command]) -> list[Work]:
    return [
        Errand(record.name, make(key, part)) for key, blob in chosen.items() for part in _parts(blob, NAMED_AT_ONCE)
    ]


def _parts(blob: bytes, count: int) -> Iterator[bytes]:
    size = count * DIGEST_BYTES
    return (blob[at : at + size] for at in range(0, len(blob), size))


def _plan(verb: str, works: Iterable[Work], lost: Iterable[Failure] = ()) -> Plan:
    return Plan(verb, "", time.time(), tuple(works), tuple(lost))


def _on_node(node: str) -> str:
    return "" if node == EVERY else f" on node {node!r}"
