"""The nodes of the fleet: who is registered, who is silent, and how a message gets to a node."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import Counter
from typing import TYPE_CHECKING, Final
from weakref import WeakValueDictionary

from lmkv.controller.conversation import AgentConversation
from lmkv.errors import ClosedError, LmkvError
from lmkv.keys import Namespace

if TYPE_CHECKING:
    from collections.abc import Callable

    from lmkv.agent.messages import Cancel, Do, FromController, Progress
    from lmkv.controller.directory import Directory
    from lmkv.controller.roster import NodeRecord, Roster

_ROUNDS: Final = 5
"""Looks for silent nodes within one time-out."""

_log = logging.getLogger(__name__)


class UnknownNodeError(LmkvError):
    """No node of that name is registered; the message names those that are."""

    default_kind = "unknown-node"


class Fleet:
    """What the controller knows of its nodes. On the controller's loop.

    Attributes:
        directory: what lies where; filled from the agents' messages.
        roster: who is there.
        counts: messages, by type name, and ``gaps``, ``resyncs``, ``registrations``, ``drops``, ``events`` (digests in
            changes), ``paged`` (digests in pages), ``superseded`` (connections that another one replaced).
    """

    def __init__(self, directory: Directory, roster: Roster) -> None:
        self.directory = directory
        self.roster = roster
        self.counts: Counter[str] = Counter()
        self._conversations: dict[str, AgentConversation] = {}
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._parsed: dict[bytes, Namespace] = {}
        self._watch: asyncio.Task[None] | None = None
        self._listeners: list[Callable[[str, Progress], None]] = []
        roster.deliver = self._deliver
        roster.progress = self._progress

    async def start(self) -> None:
        """Connect to what is shared and watch for silent nodes."""
        await self.roster.start()
        self._watch = asyncio.create_task(self._watching(), name="lmkv-fleet")

    async def close(self) -> None:
        """Stop watching, close the connections of agents, the roster and the directory. Idempotent."""
        watch, self._watch = self._watch, None
        if watch is not None:
            watch.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await watch
        for conversation in list(self._conversations.values()):
            conversation.close()
        self._conversations.clear()
        await self.roster.close()
        await self.directory.close()

    def listen(self, callback: Callable[[str, Progress], None]) -> None:
        """Call `callback(node, progress)` for every progress that any node tells any controller. It must not block."""
        self._listeners.append(callback)

    def converse(self, send: Callable[[FromController], None], close: Callable[[], None]) -> AgentConversation:
        """A conversation for a new connection.

        Args:
            send: takes a message for the node; does not block, and may raise ClosedError.
            close: asked to end the connection, once or more; does not block.
        """
        return AgentConversation(self, send, close)

    async def nodes(self) -> dict[str, NodeRecord]:
        """All registered nodes, by name."""
        return dict(sorted((await self.roster.nodes()).items()))

    async def node(self, name: str) -> NodeRecord:
        """One node.

        Raises:
            UnknownNodeError: there is none of that name.
        """
        nodes = await self.nodes()
        if name not in nodes:
            there = ", ".join(nodes) if nodes else "none is registered"
            raise UnknownNodeError(f"no node {name!r} is registered; there are: {there}")
        return nodes[name]

    async def namespaces(self) -> dict[bytes, Namespace]:
        """Every namespace that a registered node has declared, by id."""
        texts = await self.roster.namespaces()
        for namespace, text in texts.items():
            if namespace not in self._parsed:
                self._parsed[namespace] = Namespace.from_json(text)
        for namespace in self._parsed.keys() - texts.keys():
            del self._parsed[namespace]
        return dict(self._parsed)

    async def send(self, name: str, message: Do | Cancel) -> None:
        """Give a message to a node, also to one that is connected to another controller.

        Raises:
            UnknownNodeError: there is none of that name.
            ClosedError: it is not connected now (kind ``away``); it may come back within the time-out.
        """
        record = await self.node(name)
        if not record.connected or not await self.roster.send(record, message):
            raise ClosedError(f"node {name!r} is not connected to a controller now", kind="away")

    async def tick(self) -> list[str]:
        """Drop nodes that have been silent for the time-out; returns their names. `start` calls it now and then."""
        dropped = []
        for record in await self.roster.silent():
            async with self.lock(record.name):
                # The record goes last: whoever finds one that is left behind does both again.
                await self.directory.drop(record.name)
                if not await self.roster.remove(record):
                    self._ask_anew(record.name)
                    continue
            self.counts["drops"] += 1
            dropped.append(record.name)
            _log.warning("node %s: nothing heard for %g s; dropped", record.name, self.roster.timeout)
            conversation = self._conversations.pop(record.name, None)
            if conversation is not None:
                conversation.close()
        return dropped

    def lock(self, name: str) -> asyncio.Lock:
        """What changes the directory for a node holds it."""
        return self._locks.setdefault(name, asyncio.Lock())

    def joined(self, name: str, conversation: AgentConversation) -> None:
        """A conversation has registered its node: it takes the place of an older one."""
        before = self._conversations.get(name)
        self._conversations[name] = conversation
        if before is not None and before is not conversation:
            self.counts["superseded"] += 1
            before.close()

    def left(self, name: str, conversation: AgentConversation) -> bool:
        """A conversation has ended. False: it was no longer that of the node."""
        if not self.is_current(name, conversation):
            return False
        del self._conversations[name]
        return True

    def is_current(self, name: str, conversation: AgentConversation) -> bool:
        """Whether it is the node's conversation: no other one has registered the node since."""
        return self._conversations.get(name) is conversation

    def _ask_anew(self, name: str) -> None:
        """A node came back while it was being dropped here: what it told since may be lost."""
        conversation = self._conversations.get(name)
        if conversation is not None:
            conversation.lose("the node was dropped for its silence while it came back")

    def _deliver(self, name: str, message: FromController) -> bool:
        conversation = self._conversations.get(name)
        if conversation is None:
            return False
        try:
            conversation.send(message)
        except ClosedError:
            return False
        return True

    def _progress(self, node: str, progress: Progress) -> None:
        for listener in self._listeners:
            listener(node, progress)

    async def _watching(self) -> None:
        while True:
            await asyncio.sleep(self.roster.timeout / _ROUNDS)
            try:
                await self.tick()
            except LmkvError as error:
                _log.warning("cannot look for silent nodes: %s", error, extra={"key": "silent-nodes"})
