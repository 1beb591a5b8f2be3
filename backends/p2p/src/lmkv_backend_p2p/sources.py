"""Who has what: the peers of a list say it themselves, or the controller's directory does."""

from __future__ import annotations

import os
import socket
import time
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from lmkv.errors import BackendError, LmkvError
from lmkv.peer.address import parse_address

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from concurrent.futures import Future

    from lmkv.peer.peers import Peers
    from lmkv_backend_p2p.options import P2POptions
    from lmkv_backend_p2p.resting import Resting

NOWHERE = bytes(16)
"""A namespace that nothing is stored in."""
MOST = 1 << 12
"""Chunks of one question; more are asked for in several."""
Answer: TypeAlias = "tuple[list[bool], float]"


class Holder(NamedTuple):
    """One peer that has some of what was asked for."""

    address: str
    held: list[bool]
    """One for each digest: all shards of it."""
    wait: float
    """How busy it is: the less the better. Comparable within one answer only."""


class Source(ABC):
    """Finds holders. Thread-safe; blocking."""

    _links: Peers | None = None

    def meet(self, peers: Peers) -> None:
        """The links of this node. Before that, only `look` may be called.

        Raises:
            ConfigError: they cannot be used as the options want.
        """
        self._links = peers

    @property
    def met(self) -> bool:
        """The links are there."""
        return self._links is not None

    @property
    def peers(self) -> Peers:
        """The links; BackendError without them."""
        if self._links is None:
            raise BackendError("this process has no links to other nodes: only a node service has")
        return self._links

    @abstractmethod
    def holders(self, namespace: bytes, digests: Sequence[bytes], until: float) -> list[Holder]:
        """Every peer that can be reached and has some of `digests`, by `until` (time of `time.monotonic`).

        Raises:
            BackendError: there is nobody who can say.
        """

    @abstractmethod
    def look(self, until: float) -> None:
        """Return when it can be used; raises LmkvError that says why not."""

    def close(self) -> None:  # noqa: B027  a default, not a duty
        """Let go of connections. Idempotent."""


class Listed(Source):
    """The peers of a list, each asked what it has. Nobody is sent to one that lets him wait longer than `patience`."""

    def __init__(self, options: P2POptions, resting: Resting, patience: float) -> None:
        self._patience = patience
        self._addresses = tuple(dict.fromkeys(options.peers))
        self._below = options.below
        self._resting = resting

    def meet(self, peers: Peers) -> None:
        """See `Source`."""
        for address in self._addresses:
            peers.link(address)
        super().meet(peers)

    def holders(self, namespace: bytes, digests: Sequence[bytes], until: float) -> list[Holder]:
        """See `Source`. Peers that do not answer are left alone; others that are too busy are left out."""
        asked = [address for address in self._addresses if self._resting.well(address)]
        if self._addresses and not asked:
            raise BackendError("no peer answers")
        found: dict[str, Answer] = {}
        for first in range(0, len(digests), MOST):
            answers = self._ask(asked, namespace, digests[first : first + MOST], until)
            asked = list(answers)
            for address, (held, wait) in answers.items():
                before = found.get(address, ([], 0.0))[0]
                found[address] = before + held, wait
        return [Holder(a, held, wait) for a, (held, wait) in found.items() if any(held) and wait < self._patience]

    def look(self, until: float) -> None:
        """See `Source`. Without links it is only tried whether anybody listens."""
        if not self.met:
            self._knock(until)
            return
        for address in self._ask(self._addresses, NOWHERE, [], until):
            self._resting.recovered(address)

    def _ask(
        self, addresses: Iterable[str], namespace: bytes, digests: Sequence[bytes], until: float
    ) -> dict[str, Answer]:
        """What each peer says, once for each node."""
        peers = self.peers
        asked: dict[str, Future[Answer]] = {
            address: peers.submit(peers.link(address).has(namespace, digests, until, below=self._below))
            for address in addresses
        }
        answers: dict[str, Answer] = {}
        nodes: set[int] = set()
        last: LmkvError | None = None
        for address, future in asked.items():
            try:
                answer = future.result()
            except LmkvError as error:
                if error.kind == "self":  # a list that is the same on all nodes
                    self._addresses = tuple(each for each in self._addresses if each != address)
                    continue
                last = error
                self._resting.failed(address, error)
                continue
            node = peers.link(address).incarnation
            if node not in nodes:  # else it is in the list under two names
                nodes.add(node)
                answers[address] = answer
        if last is not None and not answers:
            raise BackendError(f"no peer answers: {last}")
        return answers

    def _knock(self, until: float) -> None:
        errors = []
        for address in self._addresses:
            try:
                with socket.create_connection(parse_address(address), max(0.05, until - time.monotonic())):
                    return
            except OSError as e:
                errors.append(f"{address}: {e.strerror or e}")
        raise BackendError(f"no peer listens: {'; '.join(errors)}")


def nothing() -> bytes:
    """A digest of no chunk."""
    return os.urandom(32)
