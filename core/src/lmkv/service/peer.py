"""One client as the service sees it: a connection, a session, and nothing that it could fill up."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
from collections import deque
from inspect import isawaitable
from typing import TYPE_CHECKING, Final

from lmkv.errors import LmkvError, ProtocolError
from lmkv.service import wire
from lmkv.service.protocol import Hello

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from lmkv.service.protocol import Message
    from lmkv.service.session import Session

log = logging.getLogger("lmkv.service")

OUT_BYTES: Final = 4 << 20
"""Replies that wait for a client that does not read; above that its requests are not read either."""
UNDER_WAY: Final = 1024
"""Requests of one client that wait for a tier; above that no more are read."""
BURST: Final = 64
"""Requests of one client that are served before the others get their turn."""
LAST_WORD_SECONDS: Final = 1.0
FORK_SECONDS: Final = 0.05
"""After the death of a client's process: until then the end of its socket is expected."""
GRACE_SECONDS: Final = 5.0
"""A client that was thrown out may still be copying: what it holds stays untouched for so long."""


class Peer(asyncio.Protocol):
    """Carries messages between one socket and one session. On the storage loop only.

    Args:
        sock: the connected socket, after the handshake; the transport owns it.
        session: this client's; closed here.
        name: for people.
        pid: process id at the other end; 0: not known.
        gone: called once, when the connection has ended.
    """

    def __init__(
        self, sock: socket.socket, session: Session, name: str, pid: int, gone: Callable[[Peer], None]
    ) -> None:
        self.name = name
        self._sock = sock
        self._session: Session | _Ended = session
        self._gone = gone
        self._loop = asyncio.get_running_loop()
        self._pidfd = self._watch(pid)
        self._framer = wire.Framer()
        self._bodies: deque[bytes] = deque()
        self._tasks: set[asyncio.Future[Message]] = set()
        self._transport: asyncio.Transport | None = None
        self._out_full = False
        self._reading = True
        self._scheduled = False
        self._expelled = False
        self._ended = False
        self._session_end: asyncio.TimerHandle | None = None

    # --- asyncio's calls ---

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begin."""
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        transport.set_write_buffer_limits(high=OUT_BYTES)

    def data_received(self, data: bytes) -> None:
        """Bytes from the client."""
        if self._ended or self._expelled:
            return
        try:
            self._bodies += self._framer.feed(data)
        except ProtocolError as e:
            self.expel(e)
            return
        if not self._scheduled:
            self._serve()

    def pause_writing(self) -> None:
        """It does not read its replies."""
        self._out_full = True
        self._steer()

    def resume_writing(self) -> None:
        """It reads again."""
        self._out_full = False
        self._steer()

    def connection_lost(self, exc: Exception | None) -> None:
        """The end: of the connection, and of what the session holds."""
        del exc
        if self._ended:
            return
        while self._bodies and not self._expelled:  # what it said before it went counts: a commit has no answer
            self._answer(self._bodies.popleft())
        self._ended = True
        self._bodies.clear()
        self._unwatch()
        # A client that is copying asks the kernel afterwards whether we were there until then: first this, then free.
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)
        if self._expelled:
            self._session_end = self._loop.call_later(GRACE_SECONDS, self.end_session)
        else:
            self.end_session()
        self._gone(self)

    # --- requests ---

    def _serve(self) -> None:
        """Some of the waiting requests."""
        self._scheduled = False
        for _ in range(BURST):
            if not self._bodies or self._stalled or self._expelled or self._ended:
                break
            self._answer(self._bodies.popleft())
        self._steer()

    @property
    def under_way(self) -> set[asyncio.Future[Message]]:
        """Requests that wait for a tier."""
        return self._tasks

    @property
    def _stalled(self) -> bool:
        return self._out_full or len(self._tasks) >= UNDER_WAY

    def _steer(self) -> None:
        """Read, go on later, or wait for the client or the tiers."""
        if self._ended or self._expelled or self._transport is None:
            return
        if self._bodies and not self._stalled and not self._scheduled:
            self._scheduled = True
            self._loop.call_soon(self._serve)
        reading = not self._bodies and not self._stalled
        if reading != self._reading:
            self._reading = reading
            if reading:
                self._transport.resume_reading()
            else:
                self._transport.pause_reading()

    def _answer(self, body: bytes) -> None:
        try:
            call, request = wire.decode_request(body)
            if isinstance(request, Hello):
                raise ProtocolError("a second Hello")  # noqa: TRY301  one place says what happens to it
        except ProtocolError as e:
            self.expel(e)
            return
        try:
            reply = self._session.handle(request)
        except LmkvError as e:
            self._refuse(call, type(request).__name__, e)
        except Exception as e:  # a fault of ours costs the client one call, not its connection
            log.exception("%s: %s failed", self.name, type(request).__name__)
            self._refuse(call, type(request).__name__, e)
        else:
            if reply is None:
                if call:
                    self._refuse(call, type(request).__name__, ProtocolError("a call that has no answer"))
            elif isawaitable(reply):
                self._later(call, type(request).__name__, reply)
            elif call:
                self._write(call, reply)

    def _later(self, call: int, what: str, reply: Awaitable[Message]) -> None:
        task: asyncio.Future[Message] = asyncio.ensure_future(reply)
        self._tasks.add(task)  # the loop itself keeps only weak references

        def done(task: asyncio.Future[Message]) -> None:
            self._tasks.discard(task)
            error = asyncio.CancelledError() if task.cancelled() else task.exception()
            if error is None:
                if call:
                    self._write(call, task.result())
            else:
                if not isinstance(error, (LmkvError, asyncio.CancelledError)):
                    log.error("%s: %s failed", self.name, what, exc_info=error)
                self._refuse(call, what, error)
            self._steer()

        task.add_done_callback(done)

    def _refuse(self, call: int, what: str, error: BaseException) -> None:
        if call:
            self._write(call, wire.refusal(error))
        else:
            log.debug("%s: %s was refused: %s", self.name, what, error)

    def _write(self, call: int, reply: Message) -> None:
        if self._ended or self._transport is None or self._transport.is_closing():
            return
        try:
            data = wire.encode(call, reply)
        except ProtocolError as e:
            log.exception("%s: an answer was too long", self.name)
            data = wire.encode(call, wire.refusal(e))
        self._transport.write(data)

    # --- the end ---

    def expel(self, error: LmkvError) -> None:
        """Say why, and close. What the session holds goes a little later, as the client may be copying."""
        if self._expelled or self._ended:
            return
        log.warning("%s (process %d) is thrown out: %s", self.name, wire.peer(self._sock)[0], error)
        self._write(0, wire.refusal(error))
        self._expelled = True
        self._bodies.clear()
        if self._transport is not None:
            self._transport.close()
            self._loop.call_later(LAST_WORD_SECONDS, self._transport.abort)

    def abort(self) -> None:
        """Close at once."""
        if self._transport is not None:
            self._transport.abort()

    def end_session(self) -> None:
        """Give back what the session holds. Idempotent."""
        if self._session_end is not None:
            self._session_end.cancel()
        session: Session | _Ended = self._session
        self._session = _ENDED
        try:
            session.close()
        except Exception:  # a fault of ours; the other clients go on
            log.exception("%s: closing the session failed", self.name)

    def _watch(self, pid: int) -> int:
        """Notice the death of the process, also where a fork of it keeps the socket open; -1 where that cannot be."""
        if pid <= 0 or pid == os.getpid():
            return -1
        try:
            fd = os.pidfd_open(pid)
        except OSError:
            return -1
        self._loop.add_reader(fd, self._died)
        return fd

    def _died(self) -> None:
        """The process has gone. Its last words may still be in the socket; a fork of it may keep that open."""
        self._unwatch()
        self._loop.call_later(FORK_SECONDS, self.abort)

    def _unwatch(self) -> None:
        fd, self._pidfd = self._pidfd, -1
        if fd >= 0:
            self._loop.remove_reader(fd)
            os.close(fd)


class _Ended:
    """A session that was closed."""

    def handle(self, request: object) -> Message:
        raise LmkvError(f"the session has ended ({type(request).__name__})", kind="closed")

    def close(self) -> None:
        """Nothing is left."""


_ENDED: Final = _Ended()
