"""The transport over TCP: several sockets to each peer, bytes straight between them and the pool.

Both sides move bytes in threads that block: the serving side has one for each data socket, a channel's call uses its
own thread and those of the channel. Nothing is copied in Python: the kernel scatters into, and gathers from, the pool.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from concurrent.futures import ThreadPoolExecutor, wait
from typing import TYPE_CHECKING, Final

from lmkv.errors import ClosedError
from lmkv.peer import line as lines
from lmkv.peer.cut import pieces, shares
from lmkv.peer.line import Line
from lmkv.peer.transport import (
    Channel,
    DeadlineError,
    Region,
    Transport,
    TransportError,
    check_regions,
    neighbours,
    unheeded,
)
from lmkv.peer.wire import open_data

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable, Iterator, Sequence

    from lmkv.memory import Pool
    from lmkv.peer.transport import Guard, Landed, Reach, TransportContext

MAX_LINES: Final = 128
"""Data sockets that are served at a time, a thread for each."""
MAX_SESSION_LINES: Final = 16
"""Of one session."""
PIECE: Final = 4 << 20
"""Bytes that the serving side moves before it asks the guard and the throttle again."""
SHARE: Final = 1 << 20
"""A call is spread over more sockets only where each gets that many bytes."""
PATIENCE: Final = 30.0
"""Seconds that the serving side waits for a piece to pass."""
CONNECT_SECONDS: Final = 5.0
CLOSE_SECONDS: Final = 5.0

log = logging.getLogger(__name__)


class TcpTransport(Transport):
    """Serves data sockets in threads, and opens them to peers."""

    name = "tcp"

    def __init__(self, pool: Pool, guard: Guard, context: TransportContext) -> None:
        self._pool = pool
        self._guard = guard
        self._context = context
        self._lock = threading.Lock()
        self._served: set[_Served] = set()
        self._closed = False

    def advertise(self) -> bytes:
        """Nothing: the port is the peer's, and known."""
        return b""

    def connect(self, reach: Reach, blob: bytes) -> TcpChannel:
        """As the contract says."""
        if blob:
            raise TransportError(f"the tcp transport of {reach.host} says something that this one does not know")
        if self._closed:
            raise TransportError("the transport is closed")
        channel = TcpChannel(self._pool, reach, self._context.sockets)
        channel.open(time.monotonic() + CONNECT_SECONDS)
        return channel

    def accept(self, sock: socket.socket, session: int) -> None:
        """As the contract says."""
        try:
            served = _Served(Line(sock), session, self._pool, self._guard, self._context, self._ended)
            with self._lock:
                of_session = sum(other.session == session for other in self._served)
                if self._closed or len(self._served) >= MAX_LINES or of_session >= MAX_SESSION_LINES:
                    raise TransportError(f"session {session}: too many data connections")  # noqa: TRY301
                served.start()
                self._served.add(served)
        except (TransportError, OSError, RuntimeError) as e:  # RuntimeError: no more threads
            sock.close()
            raise TransportError(str(e)) from e

    def drop(self, session: int) -> None:
        """As the contract says."""
        with self._lock:
            served = [one for one in self._served if one.session == session]
        _end(served)

    def touches(self, session: int, region: Region) -> bool:
        """As the contract says."""
        with self._lock:
            return any(served.session == session and served.touches(region) for served in self._served)

    def close(self) -> None:
        """As the contract says. Channels are closed by those who have them."""
        with self._lock:
            self._closed = True
            served = list(self._served)
        _end(served)

    def _ended(self, served: _Served) -> None:
        with self._lock:
            self._served.discard(served)


class _Served(threading.Thread):
    """Does what one data socket of a peer asks for, until it ends."""

    def __init__(  # noqa: PLR0917
        self,
        line: Line,
        session: int,
        pool: Pool,
        guard: Guard,
        context: TransportContext,
        ended: Callable[[_Served], None],
    ) -> None:
        super().__init__(name=f"lmkv-serve-{session}", daemon=True)
        self.session = session
        self._line = line
        self._pool = pool
        self._may = {lines.READ: guard.may_read, lines.WRITE: guard.may_write}
        self._throttle = context.throttle
        self._served = context.served
        self._ended = ended
        self._touched: Sequence[Region] = ()
        self._cut = False

    def cut(self) -> None:
        """End it soon. Never waits."""
        self._cut = True
        self._line.cut()

    def touches(self, region: Region) -> bool:
        """Whether a request that is being served has bytes in common with `region`."""
        end = region.offset + region.nbytes
        return any(one.offset < end and region.offset < one.offset + one.nbytes for one in self._touched)

    def run(self) -> None:
        """The thread."""
        try:
            self._line.send([lines.READY], time.monotonic() + PATIENCE)
            while not self._cut:
                self._serve(*lines.take_request(self._line, self._pool.nbytes, PATIENCE))
        except (TransportError, ClosedError) as e:
            log.debug("session %d: a data connection has ended: %s", self.session, e)
        except Exception:  # a fault of ours; the other connections go on
            log.exception("session %d: serving a data connection failed", self.session)
        finally:
            self._touched = ()
            self._line.close()
            self._ended(self)

    def _serve(self, operation: int, regions: Sequence[Region]) -> None:
        self._touched = regions  # said before the guard is asked, so that nobody can miss it who took a grant back
        try:
            allowed = all(self._may[operation](self.session, region) for region in regions)
            if not allowed:
                self._line.send([lines.reply(lines.REFUSED)], time.monotonic() + PATIENCE)
                raise TransportError("a request for regions that are not granted")
            if operation == lines.READ:
                self._line.send([lines.reply(lines.DONE)], time.monotonic() + PATIENCE)
            for piece in pieces(regions, PIECE):
                self._move(operation, piece)
        finally:
            self._touched = ()
        if operation == lines.WRITE:
            self._line.send([lines.reply(lines.DONE)], time.monotonic() + PATIENCE)
        self._served(self.session, sum(region.nbytes for region in regions))

    def _move(self, operation: int, piece: Sequence[Region]) -> None:
        """One piece of a request, and the rest that it costs."""
        if self._cut or not all(self._may[operation](self.session, region) for region in piece):
            raise TransportError("what was granted has ended in the middle of a request")
        begin = time.thread_time()
        until = time.monotonic() + PATIENCE
        views = [self._pool.cut(*region) for region in piece]
        if operation == lines.READ:
            self._line.send(views, until)
        else:
            self._line.fill(views, until)
        rest = self._throttle(sum(region.nbytes for region in piece), time.thread_time() - begin)
        if rest > 0:
            self._line.rest(rest)


def _end(served: Sequence[_Served]) -> None:
    """Cut them and wait for their threads."""
    for one in served:
        one.cut()
    for one in served:
        one.join(CLOSE_SECONDS)


class TcpChannel(Channel):
    """Up to so many data sockets to one peer, opened when they are needed."""

    def __init__(self, pool: Pool, reach: Reach, sockets: int) -> None:
        self._pool = pool
        self._reach = reach
        self._sockets = sockets
        self._changed = threading.Condition()
        self._idle: list[Line] = []
        self._busy: set[Line] = set()
        self._opening = 0
        self._opened = 0
        self._closed = False
        self._crew = ThreadPoolExecutor(max(1, sockets - 1), thread_name_prefix="lmkv-tcp")

    def open(self, until: float) -> None:
        """Open the first socket, to see whether the peer takes it; raises as `Transport.connect`."""
        try:
            with self._line(until):
                pass
        except BaseException:
            self.close()
            raise

    def read(self, remote: Sequence[Region], local: Sequence[Region], until: float, landed: Landed = unheeded) -> None:
        """As the contract says. Nothing is told to `landed`: each stop to look at a part costs more than it saves."""
        del landed
        self._move(lines.READ, remote, local, until)

    def write(self, local: Sequence[Region], remote: Sequence[Region], until: float) -> None:
        """As the contract says."""
        self._move(lines.WRITE, remote, local, until)

    def close(self) -> None:
        """As the contract says."""
        with self._changed:
            self._closed = True
            for line in self._busy:
                line.cut()
            idle, self._idle = self._idle, []
            self._changed.notify_all()
        for line in idle:
            line.close()
        self._crew.shutdown(wait=False)

    def _move(self, operation: int, remote: Sequence[Region], local: Sequence[Region], until: float) -> None:
        """Spread a call over the sockets; returns or raises when no thread works for it any more."""
        total = check_regions(remote, local, self._pool)
        if not total:
            return
        first, *others = shares(neighbours(remote, local), total, self._width(total))
        try:
            futures = [self._crew.submit(self._carry, operation, share, until) for share in others]
        except RuntimeError as e:  # shut down
            raise TransportError("the channel is closed") from e
        try:
            self._carry(operation, first, until)
        finally:
            wait(futures)
        for future in futures:
            future.result()

    def _width(self, total: int) -> int:
        """Sockets for a call: those that nobody uses, for others it would have to wait; a MiB for each at least."""
        free = max(1, self._sockets - len(self._busy) - self._opening)
        return min(free, -(-total // SHARE))

    def _carry(self, operation: int, share: Sequence[tuple[Region, Region]], until: float) -> None:
        """One share of a call, through one socket."""
        with self._line(until) as line:
            for at in range(0, len(share), lines.MAX_TABLE):
                part = share[at : at + lines.MAX_TABLE]
                head = lines.request(operation, [there for there, _ in part])
                views = [self._pool.cut(*here) for _, here in part]
                if operation == lines.READ:
                    line.send([head], until)
                    lines.take_reply(line, until)
                    line.fill(views, until)
                else:
                    self._put(line, head, views, until)

    @staticmethod
    def _put(line: Line, head: bytes, views: list[memoryview], until: float) -> None:
        try:
            line.send([head, *views], until)
        except DeadlineError:
            raise
        except TransportError as broken:  # it closes the connection where it refuses, but says so before
            try:
                lines.take_reply(line, until)
            except TransportError as said:
                raise (said if said.kind == "refused" else broken) from None
            raise
        lines.take_reply(line, until)

    @contextlib.contextmanager
    def _line(self, until: float) -> Iterator[Line]:
        """A socket for oneself; of no more use after an error."""
        line = self._take(until)
        try:
            yield line
        except BaseException:
            with self._changed:
                self._busy.discard(line)
                idle, self._idle = self._idle, []  # whatever broke this one has probably broken those
                self._changed.notify_all()
            for one in (line, *idle):
                one.close()
            raise
        with self._changed:
            self._busy.discard(line)
            if not self._closed:
                self._idle.append(line)
                self._changed.notify()
                return
        line.close()

    def _take(self, until: float) -> Line:
        """Of those that are there, or a new one."""
        with self._changed:
            while not self._closed and not self._idle and len(self._busy) + self._opening >= self._sockets:
                if not self._changed.wait(max(0.0, until - time.monotonic())):
                    raise DeadlineError("no data connection was free in time")
            if self._closed:
                raise TransportError("the channel is closed")
            if self._idle:
                line = self._idle.pop()
                self._busy.add(line)
                return line
            self._opening += 1
            self._opened += 1
            number = self._opened
        return self._open(number, until)

    def _open(self, number: int, until: float) -> Line:
        """A new socket, in the place that was kept for it."""
        try:
            line = self._greeted(number, until)
        except BaseException:
            with self._changed:
                self._opening -= 1
                self._changed.notify()
            raise
        with self._changed:
            self._opening -= 1
            self._busy.add(line)
            if self._closed:
                line.cut()
        return line

    def _greeted(self, number: int, until: float) -> Line:
        """A new socket that the peer has admitted."""
        try:
            line = Line(open_data(self._reach, number, until))
        except TransportError as e:
            if time.monotonic() >= until:
                raise DeadlineError(str(e)) from e
            raise
        try:
            lines.take_ready(line, until)
        except BaseException:
            line.close()
            raise
        return line
