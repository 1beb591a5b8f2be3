"""A data socket: whole lists of buffers through it by a deadline, and the requests of the `tcp` transport.

A request is a head (mark, operation, number of regions, bytes in all) and a table of regions (offset and length in the
pool of the side that serves). To a read it answers with a reply, then the bytes; a write's bytes follow its table, and
the reply comes when they lie in the pool. All numbers are little-endian.
"""

from __future__ import annotations

import contextlib
import select
import socket
import ssl
import struct
import time
from typing import TYPE_CHECKING, Final

from lmkv.peer.transport import DeadlineError, Region, TransportError
from lmkv.peer.wire import prepare

if TYPE_CHECKING:
    from collections.abc import Sequence

    from lmkv.specs import Buffer

READ: Final = 1
WRITE: Final = 2
DONE: Final = 0
REFUSED: Final = 1
READY: Final = b"lmkvtcp1"
"""What the serving side says first: it has admitted the socket."""
MAX_TABLE: Final = 512
"""Regions of one request at most; half of what the kernel takes in one call."""
BUFFER: Final = 1 << 20
"""Bytes asked of the kernel for each direction; it may give less."""
NEAR_BUFFER: Final = 128 << 10
"""For sending to a peer on this machine: nothing is under way for long, and few bytes stay in the caches."""
LOW: Final = 512 << 10
"""Bytes that the kernel collects before it wakes a thread that waits for many: each time costs as much as 100 KiB."""
_TLS_PIECE: Final = 1 << 20
"""Bytes handed to the TLS library at once, so that time-outs count."""
_MARK: Final = b"lmkT"
_HEAD: Final = struct.Struct("<4sB3xIQ")
_REPLY: Final = struct.Struct("<4sB3x")
_TIME: Final = struct.Struct("@ll")
_FOREVER: Final = _TIME.pack(0, 0)


class Line:
    """One data socket. Used by one thread at a time; `cut` may be called by any.

    A call that fails leaves it in the middle of something: it can only be closed. `until` is a time of
    `time.monotonic`, or None: no limit.

    Plain sockets block in the kernel until a whole list of buffers has passed, with the kernel's own time-out: a call
    takes the interpreter's lock twice and not for each buffer that the kernel had ready.
    """

    def __init__(self, sock: socket.socket) -> None:
        """Takes over a connected socket without a time-out."""
        self._sock = sock
        self._tls = isinstance(sock, ssl.SSLSocket)
        self._low = 1
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, NEAR_BUFFER if _is_near(sock) else BUFFER)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, BUFFER)
        prepare(sock)

    def send(self, parts: Sequence[Buffer], until: float | None) -> None:
        """All of `parts`, of which none is empty.

        Raises:
            DeadlineError: not by `until`.
            TransportError: the connection is broken.
        """
        with _meaning():
            if self._tls:
                self._send_tls(parts, until)
                return
            rest = list(parts)
            while rest:
                self._limit(socket.SO_SNDTIMEO, until)
                rest = _behind(rest, self._sock.sendmsg(rest))

    def fill(self, parts: Sequence[memoryview | bytearray], until: float | None) -> None:
        """All of `parts`, of which none is empty, with what the other side sends; raises as `send`."""
        with _meaning():
            if self._tls:
                self._fill_tls(parts, until)
                return
            rest: list[Buffer] = list(parts)
            left = sum(map(len, parts))
            while rest:
                # However few bytes the call misses: as many follow as it is woken at.
                many = left >= 2 * LOW
                self._wake_at(LOW if many else 1)
                self._limit(socket.SO_RCVTIMEO, until)
                some = _front(rest, left - LOW) if many else rest
                count = self._sock.recvmsg_into(some, 0, socket.MSG_WAITALL)[0]
                if not count:
                    raise _gone()
                rest = _behind(rest, count)
                left -= count

    def take(self, nbytes: int, until: float | None) -> bytearray:
        """A few bytes of the other side; raises as `send`."""
        taken = bytearray(nbytes)
        self.fill([taken], until)
        return taken

    def rest(self, seconds: float) -> None:
        """Do nothing for so long; `TransportError` at once when the connection ends meanwhile."""
        ended = select.poll()
        ended.register(self._sock, select.POLLRDHUP)
        if ended.poll(seconds * 1000):
            raise _gone()

    def cut(self) -> None:
        """End whatever a thread does with it. Idempotent."""
        with contextlib.suppress(OSError):
            socket.socket.shutdown(self._sock, socket.SHUT_RDWR)  # an SSLSocket's own would go on without TLS

    def close(self) -> None:
        """Cut, and give the descriptor back. Only when no thread uses it."""
        self.cut()
        self._sock.close()

    def _wake_at(self, nbytes: int) -> None:
        """Where the kernel has fewer bytes, a thread that receives sleeps."""
        if nbytes != self._low:
            self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, nbytes)
            self._low = nbytes

    def _limit(self, option: int, until: float | None) -> None:
        self._sock.setsockopt(socket.SOL_SOCKET, option, _FOREVER if until is None else _kernel_time(_left(until)))

    def _send_tls(self, parts: Sequence[Buffer], until: float | None) -> None:
        for part in parts:
            view = memoryview(part)
            for at in range(0, len(view), _TLS_PIECE):
                self._sock.settimeout(None if until is None else _left(until))
                self._sock.sendall(view[at : at + _TLS_PIECE])

    def _fill_tls(self, parts: Sequence[memoryview | bytearray], until: float | None) -> None:
        for part in parts:
            view = memoryview(part)
            while view:
                self._sock.settimeout(None if until is None else _left(until))
                count = self._sock.recv_into(view)
                if not count:
                    raise _gone()
                view = view[count:]


def take_ready(line: Line, until: float) -> None:
    """Wait until the serving side has admitted the socket; raises as `take_reply`."""
    said = line.take(len(READY), until)
    if said != READY:
        raise TransportError(f"the peer's data port speaks something else: it begins with {bytes(said)!r}")


def request(operation: int, regions: Sequence[Region]) -> bytes:
    """Head and table of a request for at most `MAX_TABLE` regions."""
    numbers = [number for region in regions for number in region]
    head = _HEAD.pack(_MARK, operation, len(regions), sum(region.nbytes for region in regions))
    return head + struct.pack(f"<{len(numbers)}Q", *numbers)


def take_request(line: Line, pool_bytes: int, patience: float) -> tuple[int, list[Region]]:
    """The next request: its operation and regions, all inside a pool of `pool_bytes`, none of them empty.

    Waits for it for ever, then `patience` seconds for the rest of it.

    Raises:
        TransportError: the connection has ended, or what comes is no such request.
    """
    mark, operation, count, total = _HEAD.unpack(line.take(_HEAD.size, None))
    if mark != _MARK or operation not in {READ, WRITE} or not 0 < count <= MAX_TABLE or total > pool_bytes:
        raise TransportError(f"a request that is none: operation {operation}, {count} regions, {total} bytes")
    numbers = struct.unpack(f"<{2 * count}Q", line.take(16 * count, time.monotonic() + patience))
    regions = [Region(*numbers[at : at + 2]) for at in range(0, 2 * count, 2)]
    if any(not nbytes or offset + nbytes > pool_bytes for offset, nbytes in regions):
        raise TransportError("a request for regions that are not inside the pool")
    if sum(region.nbytes for region in regions) != total:
        raise TransportError("a request whose regions are not as long as it says")
    return operation, regions


def reply(status: int) -> bytes:
    """`DONE` or `REFUSED`."""
    return _REPLY.pack(_MARK, status)


def take_reply(line: Line, until: float) -> None:
    """Wait for `DONE`.

    Raises:
        DeadlineError: nothing has come by `until`.
        TransportError: the peer refuses (kind ``refused``), has gone, or says something else.
    """
    mark, status = _REPLY.unpack(line.take(_REPLY.size, until))
    if mark == _MARK and status == REFUSED:
        raise TransportError("the peer does not allow these regions: what was granted has ended", kind="refused")
    if mark != _MARK or status != DONE:
        raise TransportError(f"an answer that is none (status {status})")


def _is_near(sock: socket.socket) -> bool:
    """Both ends are on this machine, by their addresses."""
    try:
        here, there = str(sock.getsockname()[0]), str(sock.getpeername()[0])
    except OSError:  # it has ended already; who uses it will hear of it
        return False
    return here == there or (here.startswith("127.") and there.startswith("127."))


def _front(parts: list[Buffer], count: int) -> list[Buffer]:
    """The first `count` bytes of `parts`, which have as many."""
    front: list[Buffer] = []
    for part in parts:
        if count <= len(part):
            return [*front, memoryview(part)[:count]]
        front.append(part)
        count -= len(part)
    return front


def _behind(parts: list[Buffer], count: int) -> list[Buffer]:
    """What is left of `parts` after its first `count` bytes."""
    for number, part in enumerate(parts):
        if count < len(part):
            return [memoryview(part)[count:], *parts[number + 1 :]] if count else parts[number:]
        count -= len(part)
    return []


def _left(until: float) -> float:
    seconds = until - time.monotonic()
    if seconds <= 0:
        raise DeadlineError("not done in time")
    return seconds


def _kernel_time(seconds: float) -> bytes:
    """A `struct timeval` that is never 0, which would mean for ever."""
    micros = max(1, int(seconds * 1e6))
    return _TIME.pack(*divmod(micros, 1_000_000))


def _gone() -> TransportError:
    return TransportError("the peer has closed the connection")


class _meaning:  # noqa: N801  reads like the functions of contextlib, at a third of their cost
    """What the socket raises, as errors of this package."""

    def __enter__(self) -> None:
        """Nothing to do."""

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if isinstance(error, (BlockingIOError, TimeoutError)):
            raise DeadlineError("the peer was too slow: not done in time") from error
        if isinstance(error, (OSError, ValueError)):  # ValueError: an SSLSocket that was closed meanwhile
            raise TransportError(f"the connection broke: {error}") from error
