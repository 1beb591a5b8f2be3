"""The channels of one link: of the best transport that both sides have, of the next one when it fails.

One that has failed is tried again after a while, beside what is under way: nobody waits for it.

Lives on the loop of `Peers`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from typing import TYPE_CHECKING, Final

from lmkv.errors import LmkvError
from lmkv.peer import messages as m
from lmkv.peer.threads import to_the_end
from lmkv.peer.transport import Channel, DeadlineError, TransportError
from lmkv.types import NAMESPACE_BYTES

if TYPE_CHECKING:
    from collections.abc import Callable

    from lmkv.peer.connection import Connection
    from lmkv.peer.peers import Means

log = logging.getLogger("lmkv.peer")

PROBE_SECONDS: Final = 1.0
"""For a sign of life of a peer whose transport has failed."""


PAUSE: Final = 30.0
"""Seconds after which a transport that has failed is tried again; doubled with each failure."""
PAUSE_MAX: Final = 600.0


class Bar:
    """A transport that has failed with a peer.

    Attributes:
        pause: seconds, the last of them.
        until: time of `time.monotonic` at which it may be tried again.
        up: it has been, and a channel could be opened.
    """

    def __init__(self) -> None:
        self.pause = 0.0
        self.until = 0.0
        self.up = True

    def fail(self) -> None:
        """Once more. Calls that were under way together count once; who was well for long begins anew."""
        now = time.monotonic()
        if not self.up and now < self.until:
            return
        well = self.up and now > self.until + PAUSE_MAX
        self.pause = PAUSE if well or not self.pause else min(PAUSE_MAX, 2 * self.pause)
        self.until = now + self.pause
        self.up = False


class Channels:
    """Of one peer.

    Args:
        address: of the peer, for messages.
        means: of this node.
    """

    def __init__(self, address: str, means: Means) -> None:
        self.barred: dict[str, Bar] = {}
        """Transports that have failed with this life of the peer, also those that are up again."""
        self.open: dict[str, Channel] = {}
        self._address = address
        self._means = means
        self._opening: tuple[Connection, asyncio.Future[tuple[str, Channel]]] | None = None
        self._trying: dict[str, asyncio.Task[None]] = {}

    async def move(self, connection: Connection, work: Callable[[Channel], None], until: float) -> str:
        """Run `work` with the best channel there is; with the next one if its transport fails. Which it was.

        Raises:
            TransportError: of the last one; or the peer itself has gone.
            DeadlineError: not done by `until`, which `work` keeps, too.
        """
        while True:
            name, channel = await self._best(connection, until)
            try:
                await to_the_end(self._means.movers, lambda channel=channel: work(channel))  # type: ignore[misc]
            except DeadlineError:
                raise
            except TransportError as e:
                await self._drop(name, channel)
                if not await self._bar(connection, name, e):
                    raise
            except Exception as e:  # a plugin's fault is a fault of the transport
                await self._drop(name, channel)
                error = TransportError(f"transport {name}: {type(e).__name__}: {e}")
                if not await self._bar(connection, name, error):
                    raise error from e
            else:
                return name

    async def forget(self) -> None:
        """Close all; calls that are under way fail."""
        for name, channel in list(self.open.items()):
            await self._drop(name, channel)

    async def _best(self, connection: Connection, until: float) -> tuple[str, Channel]:
        """What is open of the best transport, or is opened now: once for all who want it, each waits by his `until`."""
        self._try_again(connection)
        ranked = self._ranked(connection)
        if ranked and ranked[0] in self.open and connection.alive:
            return ranked[0], self.open[ranked[0]]
        if self._opening is None or self._opening[0] is not connection or self._opening[1].done():
            opening = asyncio.ensure_future(self._open(connection))
            opening.add_done_callback(lambda task: task.cancelled() or task.exception())  # who asked may have gone
            self._opening = connection, opening
        attempt = self._opening[1]
        done, _ = await asyncio.wait([attempt], timeout=max(0.0, until - time.monotonic()))
        if not done:
            raise DeadlineError(f"no channel to peer {self._address} was open in time")
        return attempt.result()

    def _ranked(self, connection: Connection) -> list[str]:
        common = [name for name in self._means.ranked if name in connection.welcome.transports]
        return [name for name in common if name not in self.barred or self.barred[name].up]

    def _try_again(self, connection: Connection) -> None:
        """Begin to open channels of transports whose pause is over; what is moved meanwhile goes as it went."""
        now = time.monotonic()
        for name, bar in self.barred.items():
            if not bar.up and bar.until <= now and name not in self._trying and name in connection.welcome.transports:
                task = asyncio.ensure_future(self._reopen(connection, name, bar))
                self._trying[name] = task
                task.add_done_callback(lambda _, name=name: self._trying.pop(name))  # type: ignore[misc]

    async def _reopen(self, connection: Connection, name: str, bar: Bar) -> None:
        try:
            await self._open_one(connection, name)
        except Exception as e:  # noqa: BLE001  also a plugin's fault; it was said when it failed first
            if connection.alive:
                bar.fail()
                log.debug("peer %s: transport %s fails still: %s", connection.node, name, e)
            return
        bar.up = True
        log.info("peer %s: transport %s is used again", connection.node, name)

    async def _open(self, connection: Connection) -> tuple[str, Channel]:
        for name in self._ranked(connection):
            self._check(connection)
            if name in self.open:
                return name, self.open[name]
            try:
                channel = await self._open_one(connection, name)
            except TransportError as e:
                if not await self._bar(connection, name, e):
                    raise
                continue
            return name, channel
        raise TransportError(f"peer {self._address} has no transport in common with this node")

    async def _open_one(self, connection: Connection, name: str) -> Channel:
        """A new channel of one transport, among those that are open."""
        transport, blob = self._means.transports[name], connection.welcome.transports[name]
        movers = self._means.movers
        channel = await to_the_end(
            movers,
            lambda: transport.connect(connection.reach, blob),
            unwanted=lambda channel: movers.submit(channel.close),
        )
        self.open[name] = channel
        try:
            self._check(connection)  # it may have ended meanwhile, and `forget` be through
        except TransportError:
            await self._drop(name, channel)
            raise
        return channel

    def _check(self, connection: Connection) -> None:
        if not connection.alive:
            raise TransportError(f"the connection to peer {self._address} has ended")

    async def _bar(self, connection: Connection, name: str, error: TransportError) -> bool:
        """Use transport `name` no more for a while; whether there is another one. Said once in a life of the peer.

        When it is the peer itself that has gone, it is not the transport's fault.
        """
        if name == self._means.ranked[-1] or not await self._answers(connection):
            return False
        if name not in self.barred:
            self.barred[name] = Bar()
            log.warning("peer %s: transport %s failed, going on with another: %s", connection.node, name, error)
            self._means.count_error(error)
        self.barred[name].fail()
        return True

    @staticmethod
    async def _answers(connection: Connection) -> bool:
        try:
            await connection.ask(m.Has(bytes(NAMESPACE_BYTES), b""), time.monotonic() + PROBE_SECONDS)
        except LmkvError:
            return False
        return True

    async def _drop(self, name: str, channel: Channel) -> None:
        if self.open.get(name) is channel:
            del self.open[name]
        with contextlib.suppress(Exception):
            await to_the_end(self._means.movers, channel.close)
