"""What the controller says to one agent, without a transport: messages in, messages out."""

from __future__ import annotations

import logging
import math
import secrets
import time
from typing import TYPE_CHECKING, Final

from msgspec.structs import replace

from lmkv.agent import messages as m
from lmkv.controller.roster import NodeRecord
from lmkv.errors import BackendError, ClosedError, LmkvError, ProtocolError
from lmkv.keys import Namespace
from lmkv.types import DIGEST_BYTES, NAMESPACE_BYTES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from lmkv.controller.fleet import Fleet

MAX_NAME: Final = 128
"""Characters of the name of a node or of a tier."""
MAX_NAMESPACES: Final = 1024
"""Namespaces of one node."""
MAX_ENDPOINTS: Final = 16
MAX_EPOCH: Final = (1 << 63) - 1

_log = logging.getLogger(__name__)


class AgentConversation:
    """One connection of one agent. On the controller's loop; `receive` is called for one message after the other.

    Attributes:
        send: gives a message to the node; does not block.
        close: asks the transport to end the connection.
        node: name of the node; empty before it has registered.
        refused: the registration was refused: the connection closes once the answer is out.
    """

    def __init__(
        self,
        fleet: Fleet,
        send: Callable[[m.FromController], None],
        close: Callable[[], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.send = send
        self.close = close
        self.node = ""
        self.refused = False
        self._fleet = fleet
        self._clock = clock
        self._record: NodeRecord | None = None
        self._epoch = 0  # the one whose page 0 came last
        self._next = 0  # the least that may begin
        self._page = 0
        self._sequence = 0
        self._paging = False
        self._lost = True  # what comes is of no use before another epoch has begun
        self._ask = ""
        self._later = False
        self._told = clock()

    async def receive(self, message: m.FromNode) -> tuple[m.FromController, ...]:
        """Take in a message of the agent; what is returned goes to it, in that order.

        Raises:
            ProtocolError: it may not say that (now): the connection closes. What it told before stays as it is.
            ClosedError: another connection of the same node has replaced this one, or the node was dropped for its
                silence: the connection closes, and the agent registers anew.
            BackendError: it cannot be registered, for the store that the controllers share is away.
        """
        fleet = self._fleet
        fleet.counts[type(message).__name__] += 1
        record = self._record
        if record is None:
            if not isinstance(message, m.Register):
                raise ProtocolError(f"a {type(message).__name__} before the node has registered")
            return (await self._register(message),)
        try:
            async with fleet.lock(self.node):
                if not fleet.is_current(self.node, self) or not await fleet.roster.seen(record):
                    raise ClosedError(f"node {self.node} has another connection, or was dropped", kind="superseded")
                await self._take(message)
        except BackendError as error:
            key = ("directory-away", self.node)
            _log.warning("node %s: the directory did not take a message: %s", self.node, error, extra={"key": key})
            self.lose("the controller's directory was away", later=True)
            return ()
        return self._asked(message)

    def lose(self, reason: str, *, later: bool = False) -> None:
        """What comes in this epoch is of no use: ask for another one, with the next heartbeat if `later`."""
        if not self._lost:
            self._fleet.counts["gaps"] += 1
            _log.info("node %s: %s; what it has is read anew", self.node, reason)
        if not self._lost or later:  # an epoch that was asked for and whose beginning was not taken is asked for again
            self._ask, self._later = reason, later
        self._lost, self._paging, self._next = True, False, self._epoch + 1

    async def ended(self) -> None:
        """The connection has gone. The node stays until its time-out, so that it can come back."""
        record = self._record
        if record is None or not self._fleet.left(self.node, self):
            return
        try:
            await self._fleet.roster.update(replace(record, connected=False))
        except BackendError as error:
            _log.warning("node %s: cannot note that its connection ended: %s", self.node, error)

    def _asked(self, message: m.FromNode) -> tuple[m.FromController, ...]:
        fleet = self._fleet
        beat = isinstance(message, m.Heartbeat)
        if beat and not self._lost and not self._paging and self._clock() - self._told > fleet.directory.refresh:
            self._told = self._clock()
            self._ask = "what is known of the node is read anew now and then"
        if not self._ask or (self._later and not beat):
            return ()
        reason, self._ask = self._ask, ""
        fleet.counts["resyncs"] += 1
        return (m.Resync(reason),)

    async def _register(self, message: m.Register) -> m.Accepted | m.Refused:
        fleet = self._fleet
        refusal = _refusal(message, fleet.roster.timeout)
        if refusal is not None:
            self.refused = True
            _log.warning("a node is refused: %s", refusal.message)
            return refusal
        texts = _parsed(message.namespaces)
        record = NodeRecord(
            name=message.node,
            incarnation=message.incarnation,
            endpoints=message.endpoints,
            tiers=message.tiers,
            codecs=message.codecs,
            heartbeat=message.heartbeat,
            controller=fleet.roster.controller,
            connection=secrets.token_hex(8),
            namespaces=tuple(texts),
        )
        async with fleet.lock(message.node):
            before = await fleet.roster.register(record, texts)
            self.node, self._record, self._next = message.node, record, message.epoch
            fleet.joined(message.node, self)
            if before is not None and before.incarnation != message.incarnation:
                if before.connected:
                    said = "node %s: another process has taken its place; do two nodes have the same name?"
                    _log.warning(said, message.node, extra={"key": ("replaced", message.node)})
                await fleet.directory.drop(message.node)
        fleet.counts["registrations"] += 1
        _log.info("node %s: registered with %d tiers", message.node, len(message.tiers))
        return m.Accepted(fleet.roster.timeout)

    async def _take(self, message: m.FromNode) -> None:
        if isinstance(message, m.Events):
            await self._events(message)
        elif isinstance(message, m.Page):
            await self._paged(message)
        elif isinstance(message, m.Heartbeat):
            await self._beat(message)
        elif isinstance(message, m.Progress):
            await self._fleet.roster.tell(self.node, message)
        elif isinstance(message, m.Namespaces):
            await self._declared(message)
        else:
            raise ProtocolError(f"node {self.node}: a second registration on one connection")

    async def _events(self, message: m.Events) -> None:
        for change in message.changes:
            self._check(change.namespace, change.tier)
        if self._lost or message.epoch < self._epoch:
            return
        if message.epoch > self._epoch:
            self.lose(f"events of epoch {message.epoch}, whose beginning did not come")
            return
        if message.sequence <= self._sequence:
            return  # came before
        if message.sequence != self._sequence + 1:
            self.lose(f"events {self._sequence + 1} to {message.sequence - 1} did not come")
            return
        await self._fleet.directory.apply(self.node, message.changes)
        self._sequence = message.sequence
        blobs = sum(len(change.stored) + len(change.removed) for change in message.changes)
        self._fleet.counts["events"] += blobs // DIGEST_BYTES

    async def _paged(self, message: m.Page) -> None:
        directory = self._fleet.directory
        if message.digests:
            self._check(message.namespace, message.tier)
        if message.number == 0 and message.epoch >= self._next:
            await directory.begin(self.node)
            self._epoch, self._next = message.epoch, message.epoch + 1
            self._page = self._sequence = 0
            self._paging, self._lost, self._ask = True, False, ""
        elif self._lost or message.epoch < self._epoch:
            return
        elif message.epoch > self._epoch or message.number > self._page:
            self.lose(f"page {self._page if message.epoch == self._epoch else 0} did not come")
            return
        elif message.number < self._page or not self._paging:
            return  # came before
        if message.sequence != self._sequence:
            self.lose(f"events {self._sequence + 1} to {message.sequence} did not come")
            return
        if message.digests:
            await directory.page(self.node, message.namespace, message.tier, message.digests)
        self._page += 1
        self._fleet.counts["paged"] += len(message.digests) // DIGEST_BYTES
        if message.last:
            await self._whole()

    async def _whole(self) -> None:
        self._paging = False
        if not await self._fleet.directory.end(self.node):
            self.lose("the directory has forgotten a part of the pages")
            return
        self._told = self._clock()
        await self._update(synced=True)

    async def _beat(self, message: m.Heartbeat) -> None:
        assert self._record is not None
        if len(message.used) != len(self._record.tiers) or not math.isfinite(message.load):
            raise ProtocolError(f"node {self.node}: a heartbeat about {len(message.used)} tiers, load {message.load}")
        if not self._lost and message.sequence != self._sequence:
            self.lose(f"events {self._sequence + 1} to {message.sequence} did not come")
        await self._update(used=message.used, load=message.load, synced=not self._lost and not self._paging)

    async def _declared(self, message: m.Namespaces) -> None:
        assert self._record is not None
        texts = _parsed(message.jsons)
        known = dict.fromkeys((*self._record.namespaces, *texts))
        if len(known) > MAX_NAMESPACES:
            raise ProtocolError(f"node {self.node}: more than {MAX_NAMESPACES} namespaces")
        self._record = replace(self._record, namespaces=tuple(known))
        await self._fleet.roster.update(self._record, texts)

    async def _update(self, **changed: object) -> None:
        assert self._record is not None
        self._record = replace(self._record, **changed)
        if not await self._fleet.roster.update(self._record):
            raise ClosedError(f"node {self.node} has another connection", kind="superseded")

    def _check(self, namespace: bytes, tier: int) -> None:
        assert self._record is not None
        if len(namespace) != NAMESPACE_BYTES or not 0 <= tier < len(self._record.tiers):
            raise ProtocolError(
                f"node {self.node}: tier {tier} of {len(self._record.tiers)}, a namespace of {len(namespace)} bytes"
            )


def _refusal(message: m.Register, timeout: float) -> m.Refused | None:
    """Why a node cannot be registered, if so."""
    tiers = [tier.name for tier in message.tiers]
    named = all(0 < len(name) <= MAX_NAME and name.isprintable() for name in (message.node, *tiers))
    few = len(message.namespaces) <= MAX_NAMESPACES and len(message.endpoints) <= MAX_ENDPOINTS
    slow = (
        f"would send a heartbeat every {message.heartbeat:g} s, but this controller drops one after {timeout:g} s of "
        "silence: set controller.heartbeat of the node well below that, or start the controller with a longer --timeout"
    )
    checks = (
        (
            "version",
            message.version == m.VERSION,
            f"speaks version {message.version} of the agent protocol, this controller {m.VERSION}",
        ),
        ("name", named, f"names of nodes and tiers are 1 to {MAX_NAME} printable characters"),
        ("name", len(set(tiers)) == len(tiers), "two of its tiers have the same name"),
        ("heartbeat", 0 < message.heartbeat < timeout, slow),  # NaN is refused, too
        ("limit", few, f"has more than {MAX_NAMESPACES} namespaces or {MAX_ENDPOINTS} end points"),
        ("limit", 0 <= message.epoch < MAX_EPOCH, f"epoch {message.epoch} is none"),
    )
    faults = (m.Refused(kind, f"node {message.node[:MAX_NAME]!r}: {said}") for kind, holds, said in checks if not holds)
    return next(faults, None)


def _parsed(jsons: Iterable[str]) -> dict[bytes, str]:
    """Id → text.

    Raises:
        ProtocolError: no canonical JSON of a namespace.
    """
    try:
        return {Namespace.from_json(text).id: text for text in jsons}
    except LmkvError as error:
        raise ProtocolError(f"a namespace of the node: {error}") from error
