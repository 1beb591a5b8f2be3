"""Who is there: the contract of a roster, and the one that a single controller keeps in memory.

A roster holds a record of each registered node. Several controllers may share one (`lmkv.controller.redis_roster`); a
node is connected to one of them, and its record says to which. A record is under the name of the node *and* its
connection: what comes late from a connection that another one has replaced changes nothing.
"""

from __future__ import annotations

import secrets
import time
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

import msgspec

from lmkv.agent.messages import TierFacts  # noqa: TC001  msgspec reads the annotations

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from lmkv.agent.messages import FromController, Progress


class NodeRecord(msgspec.Struct, frozen=True):
    """A registered node."""

    name: str
    incarnation: int
    endpoints: dict[str, str]
    """``peer``: host:port of its peer listener; ``metrics``: URL of its page."""
    tiers: tuple[TierFacts, ...]
    codecs: tuple[str, ...]
    heartbeat: float
    """Seconds."""
    controller: str
    """Which controller it is, or was, connected to."""
    connection: str
    """Random, for each connection."""
    namespaces: tuple[bytes, ...] = ()
    """16 bytes each: those that it declared."""
    used: tuple[int, ...] = ()
    """Bytes of each tier at its last heartbeat."""
    load: float = 0.0
    connected: bool = True
    """False: its connection ended; it is dropped unless it comes back within the time-out."""
    synced: bool = False
    """The directory knows all that it has."""


class Roster(ABC):
    """Records of nodes, and the way to them. On the controller's loop.

    Attributes:
        controller: random name of this controller.
        timeout: seconds without a message after which a node is dropped.
    """

    def __init__(self, timeout: float) -> None:
        self.controller = secrets.token_hex(8)
        self.timeout = timeout
        self.deliver: Callable[[str, FromController], bool] = lambda _node, _message: False
        """Gives a message to a node that is connected here; False: it is not. Set by the fleet."""
        self.progress: Callable[[str, Progress], None] = lambda _node, _progress: None
        """Takes what nodes say about jobs, wherever they are connected. Set by the fleet."""

    @abstractmethod
    async def register(self, record: NodeRecord, namespaces: Mapping[bytes, str]) -> NodeRecord | None:
        """Put a record in place of an older one of that name, which is returned. `namespaces`: id → canonical JSON."""

    @abstractmethod
    async def update(self, record: NodeRecord, namespaces: Mapping[bytes, str] | None = None) -> bool:
        """Put another state of the same connection; it counts as seen. False: it has been replaced or dropped."""

    @abstractmethod
    async def seen(self, record: NodeRecord) -> bool:
        """A message came. False: another connection has replaced this one, or the node was dropped."""

    @abstractmethod
    async def silent(self) -> list[NodeRecord]:
        """Nodes of which nothing has been heard for the time-out."""

    @abstractmethod
    async def remove(self, record: NodeRecord) -> bool:
        """Take a silent node off. False: something has been heard, or another controller was first."""

    @abstractmethod
    async def nodes(self) -> dict[str, NodeRecord]:
        """All, by name."""

    @abstractmethod
    async def namespaces(self) -> dict[bytes, str]:
        """Canonical JSON of every namespace that a node of the roster has declared, by id."""

    @abstractmethod
    async def send(self, record: NodeRecord, message: FromController) -> bool:
        """Give a message to a node, wherever it is connected. False: its controller is not there."""

    @abstractmethod
    async def tell(self, node: str, progress: Progress) -> None:
        """Give what a node says about a job to all controllers."""

    async def start(self) -> None:  # noqa: B027  nothing to start in memory
        """Begin to listen for what other controllers send."""

    async def close(self) -> None:  # noqa: B027  nothing to close in memory
        """Let go of connections."""


class MemoryRoster(Roster):
    """For one controller alone."""

    def __init__(self, timeout: float, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(timeout)
        self._clock = clock
        self._records: dict[str, NodeRecord] = {}
        self._seen: dict[str, float] = {}
        self._texts: dict[bytes, str] = {}

    async def register(self, record: NodeRecord, namespaces: Mapping[bytes, str]) -> NodeRecord | None:
        """As the contract says."""
        before = self._records.get(record.name)
        self._put(record, namespaces)
        return before

    async def update(self, record: NodeRecord, namespaces: Mapping[bytes, str] | None = None) -> bool:
        """As the contract says."""
        if not self._current(record):
            return False
        self._put(record, namespaces or {})
        return True

    async def seen(self, record: NodeRecord) -> bool:
        """As the contract says."""
        if not self._current(record):
            return False
        self._seen[record.name] = self._clock()
        return True

    async def silent(self) -> list[NodeRecord]:
        """As the contract says."""
        before = self._clock() - self.timeout
        return [self._records[name] for name, seen in self._seen.items() if seen < before]

    async def remove(self, record: NodeRecord) -> bool:
        """As the contract says."""
        if not self._current(record) or self._seen[record.name] >= self._clock() - self.timeout:
            return False
        del self._records[record.name], self._seen[record.name]
        return True

    async def nodes(self) -> dict[str, NodeRecord]:
        """As the contract says."""
        return dict(self._records)

    async def namespaces(self) -> dict[bytes, str]:
        """As the contract says."""
        known = {namespace for each in self._records.values() for namespace in each.namespaces}
        self._texts = {namespace: text for namespace, text in self._texts.items() if namespace in known}
        return dict(self._texts)

    async def send(self, record: NodeRecord, message: FromController) -> bool:
        """As the contract says."""
        return self.deliver(record.name, message)

    async def tell(self, node: str, progress: Progress) -> None:
        """As the contract says."""
        self.progress(node, progress)

    def _current(self, record: NodeRecord) -> bool:
        there = self._records.get(record.name)
        return there is not None and there.connection == record.connection

    def _put(self, record: NodeRecord, namespaces: Mapping[bytes, str]) -> None:
        self._records[record.name] = record
        self._seen[record.name] = self._clock()
        self._texts.update(namespaces)
