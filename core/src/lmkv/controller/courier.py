"""Commands to nodes, and what comes of them, over lost connections and restarts of either side."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Final, TypeAlias

from lmkv.agent import messages as m
from lmkv.errors import LmkvError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from lmkv.agent.messages import Progress
    from lmkv.controller.fleet import Fleet
    from lmkv.controller.records import Command
    from lmkv.controller.roster import NodeRecord

Allowed: TypeAlias = "Callable[[], Awaitable[bool]]"
log = logging.getLogger("lmkv.controller")

ENDED: Final = frozenset({m.DONE, m.FAILED, m.CANCELLED})
LOOK_SECONDS: Final = 0.5
"""Between two looks whether the node is there, and still the same."""
ASK_SECONDS: Final = 5.0
"""A command of which nothing was heard for so long is sent again: the node answers with how far it is."""


async def _always() -> bool:
    return True


class Call:
    """One command that is under way at a node. `progress` is the last that the node said about it."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.progress = m.Progress(name, 0, 0)
        self.cancelled = False
        self._news = asyncio.Event()

    def cancel(self) -> None:
        """Have the node stop after what is under way."""
        self.cancelled = True
        self._news.set()

    def hear(self, progress: Progress) -> None:
        """The node says how far it is."""
        if self.progress.state not in ENDED:
            self.progress = progress
            self._news.set()

    async def news(self, seconds: float) -> bool:
        """Wait for progress, or for the wish to cancel; False: there was none within `seconds`."""
        try:
            await asyncio.wait_for(self._news.wait(), seconds)
        except (TimeoutError, asyncio.TimeoutError):  # two classes before Python 3.11
            return False
        self._news.clear()
        return True


class Courier:
    """Carries commands to nodes. On the controller's loop."""

    def __init__(self, fleet: Fleet, step_timeout: float) -> None:
        self._fleet = fleet
        self._timeout = step_timeout
        self._calls: dict[tuple[str, str], Call] = {}
        fleet.listen(self._hear)

    def _hear(self, node: str, progress: Progress) -> None:
        call = self._calls.get((node, progress.job))
        if call is not None:
            call.hear(progress)

    async def record(self, node: str) -> NodeRecord | None:
        """The node, if it is registered now."""
        return (await self._fleet.nodes()).get(node)

    async def run(
        self, node: str, name: str, command: Command, watch: Callable[[Call], None], allowed: Allowed | None = None
    ) -> Progress:
        """Have a command carried out; returns the node's last word about it, whatever that is.

        A node does a command once for its name, so that it can be sent again after any silence. A node that has
        started anew does it again; all commands may be done twice.

        Args:
            node: name of the node.
            name: of the command, never used for another one.
            command: what to do.
            watch: is given the call, to look at its progress and to cancel it.
            allowed: asked now and then, and before anything is sent; no: the command is cancelled.

        Raises:
            LmkvError: (kind ``away``) the node did not come back, or said nothing, for too long.
        """
        call = Call(name)
        self._calls[node, name] = call
        watch(call)
        try:
            return await self._run(node, call, command, allowed or _always)
        finally:
            del self._calls[node, name]

    async def _run(self, node: str, call: Call, command: Command, allowed: Allowed) -> Progress:
        now = asyncio.get_running_loop().time
        until = now() + self._timeout
        while call.progress.state not in ENDED:
            if not call.cancelled and not await allowed():
                call.cancel()
            cancelling = call.cancelled
            connection = await self._send(node, m.Cancel(call.name) if cancelling else m.Do(call.name, command))
            # As long as it goes on telling there is nothing to say to it, unless somebody wants an end.
            while await self._heard(node, call, connection, allowed):
                until = now() + self._timeout
                if call.progress.state in ENDED or call.cancelled != cancelling:
                    break
            if call.progress.state not in ENDED and now() > until:
                await self._send(node, m.Cancel(call.name))
                raise LmkvError(f"node {node!r} said nothing for {self._timeout:g} s", kind="away", retryable=True)
        return call.progress

    async def _heard(self, node: str, call: Call, connection: str, allowed: Allowed) -> bool:
        """Wait for news of a command that was sent over a connection; False: it is time to send it again."""
        until = asyncio.get_running_loop().time() + (ASK_SECONDS if connection else 0.0)
        while not await call.news(LOOK_SECONDS):
            record = await self.record(node)
            same = record is not None and record.connected and record.connection == connection
            if not same or asyncio.get_running_loop().time() > until or not await allowed():
                return False
        return True

    async def _send(self, node: str, message: m.Do | m.Cancel) -> str:
        """The connection over which the message is on its way; empty: there is none."""
        record = await self.record(node)
        if record is None:
            return ""
        try:
            await self._fleet.send(node, message)
        except LmkvError as error:
            log.debug("%s for node %s is not sent: %s", type(message).__name__, node, error)
            return ""
        return record.connection
