"""One control connection to a peer, from its handshake to its end. Lives on the loop of `Peers`."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import socket
import time
from typing import TYPE_CHECKING, Final

from lmkv.errors import ClosedError, LmkvError, ProtocolError
from lmkv.peer import messages as m
from lmkv.peer import wire
from lmkv.peer.handshake import receive, shake_connecting
from lmkv.peer.transport import Reach

if TYPE_CHECKING:
    import ssl
    from collections.abc import Mapping

    from lmkv.peer.handshake import Identity

log = logging.getLogger("lmkv.peer")

CONNECT_SECONDS: Final = 5.0
"""For the connection and its handshake, whatever the first call's time is: those after it profit."""
SILENCE_SECONDS: Final = 2.0
"""A peer that says nothing for so long, while it is asked, has gone."""


class Connection:
    """What a handshake has led to.

    Attributes:
        node: the peer's name.
        incarnation: of the peer.
        welcome: what it said.
        reach: for data sockets.
        agreed: namespaces (their JSON) that both sides have.
    """

    def __init__(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        introduced: tuple[m.PeerChallenge, m.PeerWelcome],
        reach: Reach,
    ) -> None:
        """For `open_connection`."""
        challenge, self.welcome = introduced
        self.node, self.incarnation = challenge.node, challenge.incarnation
        self.reach = reach
        self.agreed: set[str] = set()
        self._writer = writer
        self._numbers = itertools.count(1)
        self._pending: dict[int, asyncio.Future[m.Reply]] = {}
        self._unheard: float | None = None
        """Since when a question is open and nothing at all was heard."""
        self._why = ""
        self._reading = asyncio.get_running_loop().create_task(self._read(reader))

    @property
    def alive(self) -> bool:
        """It can be asked."""
        return not self._reading.done()

    async def ask(self, request: m.Request, until: float) -> m.Reply:
        """The answer, by `until` (time of `time.monotonic`). What comes later is given back.

        Raises:
            ClosedError: the connection has ended, or (kind ``deadline``) there was no answer in time.
            LmkvError: what the peer refused with.
        """
        if not self.alive:
            raise ClosedError(f"peer {self.node}: {self._why or 'the connection has ended'}")
        number = next(self._numbers)
        asked = time.monotonic()
        self._unheard = self._unheard or asked
        future = self._pending[number] = asyncio.get_running_loop().create_future()
        try:
            self._writer.write(wire.encode(number, request))
            await asyncio.wait((future,), timeout=max(0.0, until - asked))
        except asyncio.CancelledError:
            if future.done() and future.exception() is None:  # it has come, and nobody is there to take it
                self._too_late(future.result())
            raise
        finally:
            self._pending.pop(number, None)
        if not future.done():
            if self._silent():
                self.close("it has fallen silent")
            raise ClosedError(f"peer {self.node} did not answer in time", kind="deadline")
        reply: m.Reply = future.result()
        if isinstance(reply, m.PeerRefused):
            raise wire.error_of(reply, self.node)
        return reply

    def _silent(self) -> bool:
        return self._unheard is not None and time.monotonic() - self._unheard >= SILENCE_SECONDS

    def tell(self, message: m.Release | m.Abort) -> None:
        """Send what is not answered; a connection that has ended needs it no more."""
        if self.alive:
            self._writer.write(wire.encode(0, message))

    def close(self, why: str) -> None:
        """End it: who waits for an answer gets a ClosedError. Idempotent."""
        self._why = self._why or why
        self._reading.cancel()
        self._writer.transport.abort()

    async def closed(self) -> None:
        """Wait until nothing of it runs any more."""
        await asyncio.gather(self._reading, return_exceptions=True)
        with contextlib.suppress(OSError):
            await self._writer.wait_closed()

    async def _read(self, reader: asyncio.StreamReader) -> None:
        why = "it was closed"
        try:
            while True:
                number, reply = wire.decode_reply(await receive(reader, m.MAX_MESSAGE))
                self._unheard = None
                if number == 0 and isinstance(reply, m.PeerRefused):
                    why = f"the peer ended the connection: {wire.shown(reply.message)}"
                    return
                future = self._pending.get(number)
                if future is not None and not future.done():
                    future.set_result(reply)
                else:
                    self._too_late(reply)
        except LmkvError as e:
            why = str(e)
            if isinstance(e, ProtocolError):
                log.warning("peer %s: %s", self.node, e, extra={"key": "peer-protocol"})
        finally:
            self._why = self._why or why
            self._writer.transport.abort()
            pending, self._pending = self._pending, {}
            for future in pending.values():
                if not future.done():
                    future.set_exception(ClosedError(f"peer {self.node}: {self._why}"))
                    future.exception()  # who asked may have given up

    def _too_late(self, reply: m.Reply) -> None:
        """Nobody waits for this answer any more: what it gives is given back."""
        if isinstance(reply, m.Leased) and reply.lease:
            self._writer.write(wire.encode(0, m.Release(reply.lease)))
        elif isinstance(reply, m.Reserved) and reply.reservation:
            self._writer.write(wire.encode(0, m.Abort(reply.reservation)))


async def open_connection(
    host: str,
    port: int,
    me: Identity,
    transports: Mapping[str, bytes],
    *,
    purpose: str,
    tls: ssl.SSLContext | None,
) -> Connection:
    """Connect and shake hands, within `CONNECT_SECONDS`.

    Raises:
        ClosedError: the peer is not reachable, or does not answer.
        ProtocolError: another version, another key, or no lmkv.
    """
    where = f"{host}:{port}"
    try:
        return await asyncio.wait_for(_open(Reach(host, port, 0, b"", tls), me, transports, purpose), CONNECT_SECONDS)
    except asyncio.TimeoutError:
        raise ClosedError(f"peer {where} did not finish the handshake in {CONNECT_SECONDS:g} s") from None
    except OSError as e:  # ssl.SSLError is one
        raise ClosedError(f"peer {where} is not reachable: {e.strerror or e}") from e


async def _open(where: Reach, me: Identity, transports: Mapping[str, bytes], purpose: str) -> Connection:
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader()
    protocol = asyncio.StreamReaderProtocol(reader)
    sock = await _connected(where.host, where.port)
    try:
        await loop.sock_sendall(sock, wire.CONTROL)
        name = None if where.tls is None else where.host
        transport, _ = await loop.create_connection(lambda: protocol, sock=sock, ssl=where.tls, server_hostname=name)
    except BaseException:
        sock.close()
        raise
    writer = asyncio.StreamWriter(transport, protocol, reader, loop)
    try:
        introduced = await shake_connecting(reader, writer, me, transports, purpose)
    except BaseException:
        transport.abort()
        raise
    welcome = introduced[1]
    return Connection(reader, writer, introduced, where._replace(session=welcome.session, token=welcome.token))


async def _connected(host: str, port: int) -> socket.socket:
    """A connected socket, to the first address of the name that takes it."""
    loop = asyncio.get_running_loop()
    found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    error: OSError = ConnectionError("the name has no address")
    for family, kind, number, _, address in found:
        sock = socket.socket(family, kind, number)
        try:
            sock.setblocking(False)
            await loop.sock_connect(sock, address)
            wire.prepare(sock)
        except OSError as e:
            sock.close()
            error = e
        except BaseException:
            sock.close()
            raise
        else:
            return sock
    raise error
