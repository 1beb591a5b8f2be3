"""The pools of other nodes as a tier: asks who has a chunk, and pulls it from there."""

from __future__ import annotations

import time
from concurrent.futures import CancelledError, wait
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from lmkv.backend import StorageBackendInterface
from lmkv.errors import BackendError, LmkvError
from lmkv.peer.transport import TransportError
from lmkv.types import MISS, REJECTED, Capabilities, Health, HealthState
from lmkv_backend_p2p.places import Places
from lmkv_backend_p2p.resting import Resting
from lmkv_backend_p2p.share import Shares
from lmkv_backend_p2p.sources import NOWHERE, Listed

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from concurrent.futures import Future

    from pydantic import BaseModel

    from lmkv.memory import MemoryObject
    from lmkv.peer.peers import Peers
    from lmkv.specs import BackendContext
    from lmkv.types import ChunkKey, Outcome
    from lmkv_backend_p2p.sources import Source

PARALLELISM: Final = 8
_OF_DEADLINE: Final = 0.9
"""Part of the tier's deadline that a call may take: a miss in time is better than a call that has overrun."""


class _Pull(NamedTuple):
    address: str
    numbers: list[int]
    future: Future[list[Outcome]]


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
        self._deadline = context.deadline * _OF_DEADLINE
        self._below = options.below
        self._resting = Resting(options.rest, self._ask_again)
        self._places = Places(options.remember)
        self._shares = Shares()
        self._source: Source
        if options.controller is None:
            self._source = Listed(options, self._resting, self._deadline)
        else:
            from lmkv_backend_p2p.directory import Directory  # noqa: PLC0415  brings an HTTP client

            self._source = Directory(options, self._resting)

    def meet(self, peers: Peers) -> None:
        """See `lmkv.peer.node.PeerUser`.

        Raises:
            ConfigError: a peer is off loopback, and there is no key.
        """
        self._source.meet(peers)

    def contains(self, keys: Sequence[ChunkKey]) -> Sequence[bool]:
        """See `StorageBackendInterface`: one question to the directory, or one to each peer at the same time."""
        until = self._until()
        for namespace, digests in _by_namespace(keys) if self._source.met else ():
            self._ask(namespace, digests, until)
        return [bool(self._holders(key)) for key in keys]

    def get(self, keys: Sequence[ChunkKey], into: Sequence[MemoryObject]) -> Sequence[Outcome]:
        """See `StorageBackendInterface`. What cannot be had by the deadline is a miss, whatever the reason."""
        until = self._until()
        outcomes: list[Outcome] = [MISS] * len(keys)
        if not self._source.met:  # at the start of a node, and where there is none
            return outcomes
        self._find([key for key in keys if not self._holders(key)], len(keys), until)
        wanted = list(range(len(keys)))
        nbytes = [obj.nbytes for obj in into]
        while wanted and time.monotonic() < until:
            where = {i: self._holders(keys[i]) for i in wanted}
            plan = self._shares.begin(wanted, nbytes, where)
            if not plan:
                break
            try:
                self._pull(plan, keys, into, outcomes, _until_of(plan, where, until))
            finally:
                self._shares.end(plan, nbytes)
            wanted = [i for i in wanted if not outcomes[i].ok]
        return outcomes

    def _find(self, unknown: Sequence[ChunkKey], of: int, until: float) -> None:
        """Ask where these are. That nobody can say it matters only where all of a batch is unknown."""
        for namespace, digests in _by_namespace(unknown):
            try:
                self._ask(namespace, digests, until)
            except BackendError:
                if len(unknown) == of:
                    raise

    def _pull(
        self,
        plan: dict[str, list[int]],
        keys: Sequence[ChunkKey],
        into: Sequence[MemoryObject],
        outcomes: list[Outcome],
        until: dict[str, float],
    ) -> None:
        """Read from all peers at the same time. Of what does not come it is known afterwards that it is not there."""
        peers = self._source.peers
        pulls: list[_Pull] = []
        try:
            for address, numbers in plan.items():
                link = peers.link(address)
                for part in _parts(numbers, keys):
                    chosen = [keys[i] for i in part], [into[i] for i in part]
                    pulling = link.pull(*chosen, until[address], bring=self._below)
                    pulls.append(_Pull(address, part, peers.submit(pulling)))
        finally:
            wait([pull.future for pull in pulls])  # until then bytes may still come
        for address, part, future in pulls:
            for i, outcome in zip(part, self._came(address, future, len(part)), strict=True):
                outcomes[i] = outcome
                if not outcome.ok:
                    self._places.gone(keys[i].namespace, keys[i].digest, address)

    def _came(self, address: str, future: Future[list[Outcome]], count: int) -> Sequence[Outcome]:
        """The outcomes of one pull. A peer that has failed is left alone, and what it did not give is a miss."""
        try:
            outcomes = future.result()
        except (LmkvError, CancelledError) as e:
            self._resting.failed(address, e)
            return [MISS] * count
        broken = [outcome.error for outcome in outcomes if isinstance(outcome.error, TransportError)]
        if broken:
            self._resting.failed(address, broken[0])
        return [MISS if isinstance(outcome.error, TransportError) else outcome for outcome in outcomes]

    def _holders(self, key: ChunkKey) -> dict[str, float]:
        """Peers that have a chunk, as far as is known, and may be asked."""
        known = self._places.of(key.namespace, key.digest)
        return {address: wait for address, wait in known.items() if self._resting.well(address)}

    def _ask(self, namespace: bytes, digests: list[bytes], until: float) -> None:
        """Learn who has `digests`, in half of the time: the rest is for the bytes."""
        half = (time.monotonic() + until) / 2
        self._places.learn(namespace, digests, self._source.holders(namespace, digests, half))

    def _ask_again(self, address: str, seconds: float) -> Future[Any]:
        """Begin to ask a peer that has failed before."""
        peers = self._source.peers
        return peers.submit(peers.link(address).has(NOWHERE, [], time.monotonic() + seconds))

    def _until(self) -> float:
        return time.monotonic() + self._deadline

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
            self._source.look(self._until())
        except LmkvError as e:
            return Health(HealthState.DOWN, str(e))
        return Health(HealthState.OK)

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


def _parts(numbers: Sequence[int], keys: Sequence[ChunkKey]) -> list[list[int]]:
    """The numbers of each namespace: a pull is of one."""
    spaces: dict[bytes, list[int]] = {}
    for i in numbers:
        spaces.setdefault(keys[i].namespace, []).append(i)
    return list(spaces.values())


def _until_of(plan: dict[str, list[int]], where: dict[int, dict[str, float]], until: float) -> dict[str, float]:
    """Until when each peer is waited for: half of the time, where others have all that it is asked for."""
    half = (time.monotonic() + until) / 2
    return {a: half if all(len(where[i]) > 1 for i in numbers) else until for a, numbers in plan.items()}
