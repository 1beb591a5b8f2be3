"""The port that other nodes connect to. Control connections become sessions, data sockets go to their transport.

Lives on the storage loop. Whatever comes in is a stranger's until the handshake is over: few at a time, little
memory, little time.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import inspect
import logging
import secrets
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, Final

from lmkv.acceptor import Acceptor, exactly
from lmkv.errors import ConfigError, LmkvError, ProtocolError
from lmkv.observe.address import loopback
from lmkv.peer import messages as m
from lmkv.peer import wire
from lmkv.peer.handshake import receive, shake_listening
from lmkv.peer.threads import to_the_end
from lmkv.peer.transport import TransportError

if TYPE_CHECKING:
    import ssl
    from collections.abc import Awaitable

    from lmkv.peer.hall import Hall
    from lmkv.peer.handshake import Identity
    from lmkv.peer.session import PeerSession

log = logging.getLogger("lmkv.peer")

HANDSHAKES: Final = 64
"""Connections that may be without a handshake at a time; more are closed."""
SESSIONS: Final = 1024
UNDER_WAY: Final = 64
"""Requests of one peer that may be worked on at a time; then nothing more is read from it."""
BACKLOG: Final = 128
GREETERS: Final = 4
"""Threads that speak TLS with new data sockets."""


def bind(host: str, port: int, *, keyed: bool) -> socket.socket:
    """A listening socket.

    Raises:
        ConfigError: the address cannot be had, or is off loopback and there is no key.
    """
    address = loopback(host)
    if address is None and not keyed:
        raise ConfigError(f"peer.listen: {host!r} is not a loopback address, and there is no peer.key")
    try:
        found = socket.getaddrinfo(address or host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        sock = socket.socket(found[0], socket.SOCK_STREAM)
    except OSError as e:
        raise ConfigError(f"peer.listen: {host}:{port}: {e.strerror or e}") from e
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(found[4])
        sock.listen(BACKLOG)
        sock.setblocking(False)
    except OSError as e:
        sock.close()
        raise ConfigError(f"peer.listen: {host}:{port}: {e.strerror or e}") from e
    return sock


class Listener:
    """Accepts peers on a listening socket.

    Args:
        hall: whom they are served from.
        me: this node.
        sock: from `bind`; taken over.
        tls: None: no TLS.
    """

    def __init__(self, hall: Hall, me: Identity, sock: socket.socket, tls: ssl.SSLContext | None = None) -> None:
        self._hall = hall
        self._me = me
        self._sock = sock
        self._tls = tls
        self._loop = asyncio.get_running_loop()
        self._tokens: dict[int, bytes] = {}
        self._connections: set[asyncio.Task[None]] = set()
        self._greeters = ThreadPoolExecutor(GREETERS, thread_name_prefix="lmkv-peer-greet")
        self._acceptor = Acceptor(
            sock,
            self._meet,
            most=HANDSHAKES,
            failed=lambda error: log.warning("cannot accept a peer: %s", error),
        )

    @property
    def port(self) -> int:
        """That it listens on."""
        return int(self._sock.getsockname()[1])

    async def close(self) -> None:
        """Close the port and every connection; sessions end. Idempotent."""
        await self._acceptor.close()
        connections = list(self._connections)
        for task in connections:
            task.cancel()
        await asyncio.gather(*connections, return_exceptions=True)
        self._sock.close()
        self._greeters.shutdown(wait=False)

    async def _meet(self, sock: socket.socket) -> bool:
        """Find out what a connection is, and whose; whatever fails costs this connection only."""
        try:
            wire.prepare(sock)
            async with _bound(wire.HANDSHAKE_SECONDS):
                kind = await exactly(sock, len(wire.CONTROL))
                if kind == wire.DATA:
                    await self._take_data(sock)
            if kind == wire.CONTROL:
                await self._take_control(sock)
            elif kind != wire.DATA:
                raise ProtocolError("a connection that is no lmkv peer's")  # noqa: TRY301  one place for all refusals
        except LmkvError as e:
            self._refused(e)
        except (OSError, asyncio.TimeoutError) as e:
            log.debug("a connection ended in the handshake: %r", e)
        except Exception:
            log.exception("a connection could not be met")
        else:
            return True
        return False

    def _refused(self, error: LmkvError) -> None:
        self._hall.metrics.inc("lmkv_peer_errors_total", kind=error.kind)
        log.warning("a connection was refused: %s", error, extra={"key": f"peer-refused-{error.kind}"})

    # --- data --------------------------------------------------------------------------------------------------------

    async def _take_data(self, sock: socket.socket) -> None:
        """Check a data socket's `DataHello` and give it to its transport, which then owns it."""
        if self._tls is None:
            length = wire.length_of(await exactly(sock, wire.LENGTH.size), m.HELLO_LIMIT)
            hello = wire.decode_opening(await exactly(sock, length))
            sock.setblocking(True)
        else:
            tls, stranger = self._tls, sock
            greeting = to_the_end(self._greeters, lambda: _greet(stranger, tls), unwanted=lambda met: met[0].close())
            sock, hello = await greeting
        try:
            known = self._known(hello)
            self._hall.transports[known.transport].accept(sock, known.session)
        except ProtocolError:
            sock.close()
            raise
        except TransportError as e:
            log.warning("a data connection was not taken: %s", e, extra={"key": "peer-data"})

    def _known(self, hello: object) -> m.DataHello:
        """It is of one of our sessions, and for a transport that we have."""
        if not isinstance(hello, m.DataHello):
            raise ProtocolError(f"a data connection begins with a {type(hello).__name__}")
        token = self._tokens.get(hello.session, b"")
        if not token or not hmac.compare_digest(token, hello.token) or hello.transport not in self._hall.transports:
            raise ProtocolError("a data connection of no session", kind="token")
        return hello

    # --- control -----------------------------------------------------------------------------------------------------

    async def _take_control(self, sock: socket.socket) -> None:
        """Shake hands; from then on it is a session."""
        reader = asyncio.StreamReader()
        protocol = asyncio.StreamReaderProtocol(reader)
        try:
            transport, _ = await self._loop.connect_accepted_socket(
                lambda: protocol,
                sock,
                ssl=self._tls,
                ssl_handshake_timeout=None if self._tls is None else wire.HANDSHAKE_SECONDS,
            )
        except BaseException:
            sock.close()
            raise
        writer = asyncio.StreamWriter(transport, protocol, reader, self._loop)
        try:
            async with _bound(wire.HANDSHAKE_SECONDS):
                hello, shown = await shake_listening(reader, writer, self._me)
        except ProtocolError as e:
            try:
                writer.write(wire.encode(0, wire.refusal(e)))
                await _close(writer)
            finally:
                transport.abort()
            raise
        except BaseException:
            transport.abort()
            raise
        if len(self._hall.sessions) >= SESSIONS:
            transport.abort()
            raise ProtocolError(f"{SESSIONS} peers are connected", kind="too-many")
        task = self._loop.create_task(self._serve(reader, writer, hello, shown))
        self._connections.add(task)
        task.add_done_callback(self._connections.discard)
        task.add_done_callback(lambda _: transport.abort())  # also of one that was cancelled before it began

    async def _serve(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, hello: m.PeerHello, shown: m.PeerProof
    ) -> None:
        """A session, from its welcome to its end."""
        hall = self._hall
        session = hall.open(hello.node, shown.transports)
        conversation = _Conversation(session, writer)
        self._tokens[session.number] = token = secrets.token_bytes(m.TOKEN_BYTES)
        try:
            blobs = {name: t.advertise() for name, t in hall.transports.items() if name in shown.transports}
            pool = hall.manager.pool.nbytes
            welcome = m.PeerWelcome(session.number, token, blobs, pool, hall.manager.chunk_tokens, hall.seconds)
            writer.write(wire.encode(0, welcome))
            log.info("node %s has come (%s); %d now", hello.node, hello.purpose, len(hall.sessions))
            await conversation.go_on(reader)
        except ProtocolError as e:
            self._refused(e)
            writer.write(wire.encode(0, wire.refusal(e)))
        except (LmkvError, OSError) as e:
            log.debug("node %s: %s", hello.node, e)
        except Exception:
            log.exception("the conversation with node %s failed", hello.node)
        finally:
            del self._tokens[session.number]
            session.close()
            await conversation.close()
            log.info("node %s has gone; %d left", hello.node, len(hall.sessions))
            with contextlib.suppress(Exception):
                await _close(writer)


class _Conversation:
    """Requests of one session in, replies out."""

    def __init__(self, session: PeerSession, writer: asyncio.StreamWriter) -> None:
        self._session = session
        self._writer = writer
        self._tasks: set[asyncio.Task[None]] = set()

    async def go_on(self, reader: asyncio.StreamReader) -> None:
        """Until the connection ends (ClosedError) or says what it may not (ProtocolError)."""
        while True:
            call, message = wire.decode_request(await receive(reader, m.MAX_MESSAGE))
            try:
                reply = self._session.handle(message)
            except LmkvError as e:
                self._answer(call, wire.refusal(e))
            else:
                if inspect.isawaitable(reply):
                    task = asyncio.ensure_future(self._later(call, reply))
                    self._tasks.add(task)
                    task.add_done_callback(self._tasks.discard)
                elif reply is not None:
                    self._answer(call, reply)
            await self._writer.drain()
            while len(self._tasks) >= UNDER_WAY:
                await asyncio.wait(self._tasks, return_when=asyncio.FIRST_COMPLETED)

    async def _later(self, call: int, reply: Awaitable[m.Reply]) -> None:
        answer: m.Reply
        try:
            answer = await reply
        except LmkvError as e:
            answer = wire.refusal(e)
        except Exception as e:
            log.exception("a peer's request failed")
            answer = wire.refusal(e)
        self._answer(call, answer)

    def _answer(self, call: int, reply: m.Reply) -> None:
        if call and not self._writer.is_closing():
            self._writer.write(wire.encode(call, reply))

    async def close(self) -> None:
        """Nobody waits for the answers any more. Returns when nothing is under way."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _greet(sock: socket.socket, tls: ssl.SSLContext) -> tuple[socket.socket, Any]:
    """TLS and the first message of a data socket, in a thread."""
    until = time.monotonic() + wire.HANDSHAKE_SECONDS
    sock.settimeout(wire.HANDSHAKE_SECONDS)
    secure = tls.wrap_socket(sock, server_side=True)
    try:
        length = wire.length_of(_read(secure, wire.LENGTH.size, until), m.HELLO_LIMIT)
        hello = wire.decode_opening(_read(secure, length, until))
        secure.settimeout(None)
    except BaseException:
        secure.close()
        raise
    return secure, hello


def _read(sock: socket.socket, count: int, until: float) -> bytes:
    data = b""
    while len(data) < count:
        sock.settimeout(max(0.001, until - time.monotonic()))  # of all of them: one byte now and then is no answer
        more = sock.recv(count - len(data))
        if not more:
            raise ConnectionResetError("the connection was closed")
        data += more
    return data


async def _close(writer: asyncio.StreamWriter) -> None:
    """Say what is still to be said, but not for ever."""
    with contextlib.suppress(OSError, asyncio.TimeoutError):
        await asyncio.wait_for(writer.drain(), 1.0)
    writer.close()
    with contextlib.suppress(OSError, asyncio.TimeoutError):
        await asyncio.wait_for(writer.wait_closed(), 1.0)


@contextlib.asynccontextmanager
async def _bound(seconds: float) -> Any:
    """What is inside gets so much time (`asyncio.timeout` of 3.11)."""
    task = asyncio.current_task()
    assert task is not None
    late = False

    def cancel() -> None:
        nonlocal late
        late = True
        task.cancel()

    timer = asyncio.get_running_loop().call_later(seconds, cancel)
    try:
        yield
    except asyncio.CancelledError:
        if late:
            raise asyncio.TimeoutError from None
        raise
    finally:
        timer.cancel()
