"""The pools of other nodes as a tier: asks who has a chunk, and pulls it from there."""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING, Final

from lmkv.backend import StorageBackendInterface
from lmkv.errors import BackendError, LmkvError
from lmkv.types import MISS, REJECTED, Capabilities, Health, HealthState
from lmkv_backend_p2p.places import Places
from lmkv_backend_p2p.share import shares
from lmkv_backend_p2p.sources import Directory, Listed, Resting

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from concurrent.futures import Future

    from pydantic import BaseModel

    from lmkv.memory import MemoryObject
    from lmkv.peer.peers import Peers
    from lmkv.specs import BackendContext
    from lmkv.types import ChunkKey, Outcome
    from lmkv_backend_p2p.sources import Source

log = logging.getLogger(__name__)

PARALLELISM: Final = 8
_OF_DEADLINE: Final = 0.9
"""Part of the tier's deadline that a call may take: a miss in time is better than a call that has overrun."""


class P2PBackend(StorageBackendInterface):
    """Reads frames of other nodes, straight into the memory that the tier gives. Threads: any number.

    A peer that fails is left alone for a while; what was to come from it comes from others that have it, or is a miss
    before the tier's deadline. Only when nobody can say where anything is, the tier is ill.

    Raises:
        ConfigError: the CA file cannot be used.
    """

    capabilities = Capabilities(shared=True, read_only=True, batched_contains=True, parallelism=PARALLELISM)

    def __init__(self, options: BaseModel, context: BackendContext) -> None:
        from lmkv_backend_p2p.options import P2POptions  # noqa: PLC0415  the contract gives the base class

        assert isinstance(options, P2POptions)
        self._deadline = context.deadline
        self._below = options.below
        self._split = options.split
        self._resting = Resting(options.rest)
        self._places = Places(options.remember)
        self._links: Peers | None = None
        kind = Listed if options.controller is None else Directory
        self._source: Source = kind(options, self._resting, self._peers)

    def meet(self, peers: Peers) -> None:
        """See `lmkv.peer.node.PeerUser`."""
        self._links = peers

    def _peers(self) -> Peers:
        if self._links is None:
            raise BackendError("this process has no links to other nodes: only a node service has")
        return self._links

    def contains(self, keys: Sequence[ChunkKey]) -> Sequence[bool]:
        """See `StorageBackendInterface`: one question to the directory, or one to each peer at the same time."""
        there: set[tuple[bytes, bytes]] = set()
        for namespace, digests in _by_namespace(keys):
            there |= self._ask(namespace, digests, self._until())
        return [(key.namespace, key.digest) in there for key in keys]

    def get(self, keys: Sequence[ChunkKey], into: Sequence[MemoryObject]) -> Sequence[Outcome]:
        """See `StorageBackendInterface`. What cannot be had by the deadline is a miss, whatever the reason."""
        until = self._until()
        outcomes: list[Outcome] = [MISS] * len(keys)
        wanted = list(range(len(keys)))
        where = {i: self._places.of(keys[i].namespace, keys[i].digest) or {} for i in wanted}
        unknown = [keys[i] for i in wanted if not where[i]]
        for namespace, digests in _by_namespace(unknown):
            self._ask(namespace, digests, until)
        while wanted and time.monotonic() < until:
            where = {i: self._living(keys[i]) for i in wanted}
            plan = shares(wanted, [obj.nbytes for obj in into], where, self._split)
            if not plan:
                break
            self._pull(plan, keys, into, outcomes, until)
            wanted = [i for i in wanted if not outcomes[i].ok]
        return outcomes

    def _pull(
        self,
        plan: dict[str, list[int]],
        keys: Sequence[ChunkKey],
        into: Sequence[MemoryObject],
        outcomes: list[Outcome],
        until: float,
    ) -> None:
        """Read from all peers at the same time. Of what does not come it is known afterwards that it is not there."""
        peers = self._peers()
        pulls: dict[str, list[Future[list[Outcome]]]] = {}
        parts: dict[str, list[list[int]]] = {}
        for address, numbers in plan.items():
            spaces: dict[bytes, list[int]] = {}
            for i in numbers:
                spaces.setdefault(keys[i].namespace, []).append(i)
            parts[address] = list(spaces.values())
            pulls[address] = [
                peers.submit(
                    peers.link(address).pull([keys[i] for i in part], [into[i] for i in part], until, bring=self._below)
                )
                for part in parts[address]
            ]
        for address, futures in pulls.items():
            for part, future in zip(parts[address], futures, strict=True):
                try:
                    came: Sequence[Outcome] = future.result()
                except LmkvError as e:
                    log.warning("peer %s: %s", address, e, extra={"key": f"p2p-{address}"})
                    self._resting.failed(address)
                    came = [MISS] * len(part)
                for i, outcome in zip(part, came, strict=True):
                    outcomes[i] = outcome if outcome.ok else MISS
                    if not outcome.ok:
                        self._places.gone(keys[i].namespace, keys[i].digest, address)

    def _living(self, key: ChunkKey) -> dict[str, float]:
        """Peers that have a chunk, as far as is known, and may be asked."""
        known = self._places.of(key.namespace, key.digest) or {}
        return {address: wait for address, wait in known.items() if self._resting.well(address)}

    def _ask(self, namespace: bytes, digests: list[bytes], until: float) -> set[tuple[bytes, bytes]]:
        """Those of `digests` that some peer has; remembered."""
        holders = self._source.holders(namespace, digests, until)
        self._places.learn(namespace, digests, holders)
        return {(namespace, digest) for i, digest in enumerate(digests) if any(holder.held[i] for holder in holders)}

    def _until(self) -> float:
        return time.monotonic() + self._deadline * _OF_DEADLINE

    def put(self, keys: Sequence[ChunkKey], objects: Sequence[MemoryObject]) -> Sequence[Outcome]:
        """Refused: what other nodes keep is their business."""
        del objects
        return [REJECTED] * len(keys)

    def delete(self, keys: Sequence[ChunkKey]) -> None:
        """Nothing: as `put`."""

    def clear(self, namespace: bytes | None = None) -> None:
        """Nothing: as `put`."""

    def set_aside(self, keys: Sequence[ChunkKey]) -> None:
        """What a peer sent was damaged: it is not known any more who has these."""
        for namespace, digests in _by_namespace(keys):
            self._places.learn(namespace, digests, [])

    def health(self) -> Health:
        """Whether anybody can say where anything is."""
        try:
            why = self._source.look(self._until())
        except LmkvError as e:
            why = str(e)
        return Health(HealthState.DEGRADED, why) if why else Health(HealthState.OK)

    def close(self) -> None:
        """Idempotent. The links are the node's."""
        self._source.close()


def _by_namespace(keys: Sequence[ChunkKey]) -> Iterator[tuple[bytes, list[bytes]]]:
    """Each namespace with its digests, in order, each once."""
    spaces: dict[bytes, dict[bytes, None]] = {}
    for key in keys:
        spaces.setdefault(key.namespace, {})[key.digest] = None
    for namespace, digests in spaces.items():
        yield namespace, list(digests)
