"""Conversations with one server: commands out, replies back in order, bulk bytes from and into the caller's memory.

`RawChannel` works on the socket of a connection that redis-py has made and logged in, past redis-py's parser.
`PlainChannel` says the same through redis-py's own commands: for a connection without a socket that can be used, and
for keys of a cluster that have moved, which redis-py follows.

Neither is thread-safe. After an exception a channel is worth nothing: an answer could come late.
"""

from __future__ import annotations

import itertools
import select
import socket
import ssl
import struct
import time
from collections import deque
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeAlias

from lmkv.errors import BackendError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

Argument: TypeAlias = "bytes | memoryview"
Reply: TypeAlias = "bytes | int | ReplyError | None"

FLUSH_BYTES: Final = 1 << 16
"""Small commands are gathered up to this many bytes; all else up to `FLUSH_BULK_BYTES` or `_IOV` buffers."""
FLUSH_BULK_BYTES: Final = 1 << 19
SCRATCH: Final = 1 << 16
SMALL: Final = 1 << 12
"""Bytes of the longest reply that is not put into the caller's memory."""
_TIMEVAL: Final = struct.Struct("@ll")
_TLS_BYTES: Final = 1 << 18
_IOV: Final = 512
"""Buffers for one `sendmsg`; the kernel takes 1024."""


class ReplyError(BackendError):
    """The server refused a command; `code` is the first word of what it said, such as ``OOM``."""

    def __init__(self, text: str) -> None:
        super().__init__(text, retryable=True)
        self.code = text.split(" ", 1)[0]


class Channel(Protocol):
    """What a conversation needs."""

    def send(self, *arguments: Argument) -> None:
        """One command. It may lie here until `flush` or until a reply is asked for."""

    def send_for_each(self, names: Sequence[bytes], word: bytes, *rest: bytes) -> None:
        """A command for each name, which goes behind its first word: `send` many times, but quicker."""

    def flush(self) -> None:
        """All commands go out now."""

    def reply(self) -> Reply:
        """The reply to the oldest command without one; a status line as bytes."""

    def replies(self, count: int) -> list[Reply]:
        """The replies to so many commands: `reply` many times, but quicker."""

    def reply_into(self, view: memoryview) -> int | ReplyError | None:
        """As `reply`, for a bulk string, which is put into `view`: its length. One that is longer is thrown away."""


class RawChannel:
    """On a connected socket.

    Args:
        sock: connected, logged in, nothing under way. Used, not owned.
        close: ends the connection.

    Attributes:
        until: time of the monotonic clock by which all waits end, in `TimeoutError`. The user sets it.
    """

    def __init__(self, sock: socket.socket, close: Callable[[], None]) -> None:
        self.until = 0.0
        self._sock = sock
        self._close = close
        self._tls = isinstance(sock, ssl.SSLSocket)
        self._whole = 0 if self._tls else socket.MSG_WAITALL
        sock.settimeout(None)
        self._pending: list[Argument] = []
        self._gathered = bytearray()
        self._pending_bytes = self._owed = 0
        self._scratch = bytearray(SCRATCH)
        self._room = memoryview(self._scratch)
        self._start = self._end = 0
        self._poll = select.poll()
        self._poll.register(sock, select.POLLIN)

    @property
    def clean(self) -> bool:
        """Every command has its reply, and nothing else has come."""
        return not (self._owed or self._pending_bytes or self._start != self._end or self._poll.poll(0))

    def close(self) -> None:
        """End the connection; a call that waits on it in another thread ends too."""
        self._close()

    def interrupt(self) -> None:
        """Whoever waits on this channel, in another thread, gets an error at once."""
        try:
            socket.socket.shutdown(self._sock, socket.SHUT_RDWR)
        except OSError:
            return

    def send(self, *arguments: Argument) -> None:
        """See `Channel`. A `memoryview` is sent from where it is, and must stay until its reply has come."""
        gathered = self._gathered
        gathered += b"*%d\r\n" % len(arguments)
        for argument in arguments:
            if isinstance(argument, bytes):
                gathered += b"$%d\r\n%b\r\n" % (len(argument), argument)
            else:
                gathered += b"$%d\r\n" % len(argument)
                self._pending += (bytes(gathered), argument)
                self._pending_bytes += len(argument)
                gathered.clear()
                gathered += b"\r\n"
        self._owed += 1
        if len(gathered) >= FLUSH_BYTES or len(self._pending) >= _IOV or self._pending_bytes >= FLUSH_BULK_BYTES:
            self.flush()

    def send_for_each(self, names: Sequence[bytes], word: bytes, *rest: bytes) -> None:
        """See `Channel`."""
        end = b"\r\n%b" % b"".join(map(_bulk, rest))
        for nbytes, alike in itertools.groupby(names, len):
            begin = b"*%d\r\n%b$%d\r\n" % (len(rest) + 2, _bulk(word), nbytes)
            self._gathered += begin + (end + begin).join(alike) + end
        self._owed += len(names)
        if len(self._gathered) >= FLUSH_BYTES:
            self.flush()

    def flush(self) -> None:
        """See `Channel`."""
        buffers, self._pending = [*self._pending, bytes(self._gathered)], []
        self._gathered.clear()
        self._pending_bytes = 0
        if self._tls:
            for buffer in buffers:
                self._send_tls(memoryview(buffer))
        else:
            self._send(buffers)

    def reply(self) -> Reply:
        """See `Channel`."""
        line = self._line()
        self._owed -= 1
        kind = line[:1]
        if kind == b"$":
            return self._small_bulk(_number(line))
        if kind == b":":
            return _number(line)
        if kind == b"+":
            return line[1:]
        if kind == b"-":
            return ReplyError(line[1:].decode("utf-8", "replace")[:500])
        raise _garbage(line)

    def replies(self, count: int) -> list[Reply]:
        """See `Channel`."""
        found: list[Reply] = []
        while len(found) < count:
            found.append(self.reply())  # waits, and understands everything
            found += self._plain_replies(count - len(found))
        return found

    def _plain_replies(self, most: int) -> list[Reply]:
        """What has come already, as long as it is numbers, nothing, and strings without an end of line in them."""
        end = self._scratch.rfind(b"\r\n", self._start, self._end)
        if not most or end < self._start:
            return []
        lines = bytes(self._room[self._start : end]).split(b"\r\n")
        found: list[Reply] = []
        add, taken, following = found.append, 0, iter(lines)
        for line in following:
            meaning = _plain(line)
            if meaning is None:
                break
            length, reply = meaning
            if length >= 0:
                string = next(following, None)
                if string is None or len(string) != length:
                    break
                taken += 2
                add(string)
            else:
                taken += 1
                add(reply)
            if len(found) == most:
                break
        self._start += sum(map(len, lines[:taken])) + 2 * taken
        self._owed -= len(found)
        return found

    def reply_into(self, view: memoryview) -> int | ReplyError | None:
        """See `Channel`."""
        line = self._line()
        if line[:1] == b"-":
            self._owed -= 1
            return ReplyError(line[1:].decode("utf-8", "replace")[:500])
        if line[:1] != b"$":
            raise _garbage(line)
        nbytes = _number(line)
        self._owed -= 1
        if nbytes < 0:
            return None
        if nbytes <= len(view):
            self._take(view[:nbytes])
        else:
            self._skip(nbytes)
        self._end_of_bulk()
        return nbytes

    def _small_bulk(self, nbytes: int) -> bytes | None:
        if nbytes < 0:
            return None
        if nbytes > SMALL:
            raise BackendError(f"the server sent {nbytes} bytes where at most {SMALL} make sense", kind="protocol")
        while self._end - self._start < nbytes + 2:
            self._fill()
        begin = self._start
        end = begin + nbytes
        self._start = end + 2
        return bytes(self._room[begin:end])

    # --- bytes -------------------------------------------------------------------------------------------------------

    def _send(self, buffers: Sequence[Argument]) -> None:
        left = deque(memoryview(buffer) for buffer in buffers)
        while left:
            self._wait(socket.SO_SNDTIMEO)
            try:
                sent = self._sock.sendmsg([left[i] for i in range(min(_IOV, len(left)))])
            except BlockingIOError:
                raise TimeoutError from None
            while left and sent >= len(left[0]):
                sent -= len(left.popleft())
            if sent:
                left[0] = left[0][sent:]

    def _send_tls(self, view: memoryview) -> None:
        while view:
            self._wait(socket.SO_SNDTIMEO)
            view = view[self._sock.send(view[:_TLS_BYTES]) :]

    def _wait(self, option: int) -> None:
        """The next system call ends by the deadline.

        The kernel keeps the time of plain sockets: a time-out of Python's would mean a `poll` before each call, and a
        return to Python for each few packets.
        """
        left = self.until - time.monotonic()
        if left <= 0:
            raise TimeoutError
        if self._tls:
            self._sock.settimeout(left)
        else:
            microseconds = int(left * 1e6) + 1
            self._sock.setsockopt(socket.SOL_SOCKET, option, _TIMEVAL.pack(*divmod(microseconds, 1_000_000)))

    def _receive(self, view: memoryview, flags: int = 0) -> int:
        self._wait(socket.SO_RCVTIMEO)
        try:
            count = self._sock.recv_into(view, 0, flags)
        except BlockingIOError:
            raise TimeoutError from None
        if not count:
            raise ConnectionResetError("the server closed the connection")
        return count

    def _fill(self) -> None:
        """More bytes into the scratch buffer."""
        if self._start == self._end:
            self._start = self._end = 0
        elif self._end == SCRATCH:
            rest = bytes(self._room[self._start : self._end])
            if len(rest) == SCRATCH:
                raise BackendError("the server sent a line without an end", kind="protocol")
            self._start, self._end = 0, len(rest)
            self._room[: self._end] = rest
        self._end += self._receive(self._room[self._end :])

    def _line(self) -> bytes:
        if self._pending_bytes or self._gathered:
            self.flush()
        while (end := self._scratch.find(b"\r\n", self._start, self._end)) < 0:
            if self._end - self._start > SMALL:
                raise _garbage(bytes(self._room[self._start : self._start + 16]))
            self._fill()
        begin, self._start = self._start, end + 2
        return bytes(self._room[begin:end])

    def _take(self, view: memoryview) -> None:
        done = min(len(view), self._end - self._start)
        view[:done] = self._room[self._start : self._start + done]
        self._start += done
        while done < len(view):
            done += self._receive(view[done:], self._whole)

    def _skip(self, nbytes: int) -> None:
        while nbytes:
            if self._start == self._end:
                self._fill()
            step = min(nbytes, self._end - self._start)
            self._start += step
            nbytes -= step

    def _end_of_bulk(self) -> None:
        while self._end - self._start < 2:  # noqa: PLR2004  \r\n
            self._fill()
        end = bytes(self._room[self._start : self._start + 2])
        if end != b"\r\n":
            raise _garbage(end)
        self._start += 2


class PlainChannel:
    """Through a client of redis-py, its parser and its copies included.

    Args:
        execute: runs commands in one pipeline and returns all replies, errors among them as `ReplyError`.
    """

    def __init__(self, execute: Callable[[Sequence[Sequence[bytes]]], Sequence[Any]]) -> None:
        self._execute = execute
        self._commands: list[list[bytes]] = []
        self._replies: deque[Any] = deque()

    def send(self, *arguments: Argument) -> None:
        """See `Channel`."""
        self._commands.append([bytes(each) for each in arguments])

    def send_for_each(self, names: Sequence[bytes], word: bytes, *rest: bytes) -> None:
        """See `Channel`."""
        for name in names:
            self.send(word, name, *rest)

    def flush(self) -> None:
        """See `Channel`."""
        commands, self._commands = self._commands, []
        if commands:
            self._replies.extend(self._execute(commands))

    def reply(self) -> Reply:
        """See `Channel`."""
        if not self._replies:
            self.flush()
        found: Reply = self._replies.popleft()
        return found

    def replies(self, count: int) -> list[Reply]:
        """See `Channel`."""
        return [self.reply() for _ in range(count)]

    def reply_into(self, view: memoryview) -> int | ReplyError | None:
        """See `Channel`."""
        found = self.reply()
        if found is None or isinstance(found, (ReplyError, int)):
            return found if not isinstance(found, int) else None
        if len(found) <= len(view):
            view[: len(found)] = found
        return len(found)


def _bulk(argument: bytes) -> bytes:
    return b"$%d\r\n%b\r\n" % (len(argument), argument)


@lru_cache(maxsize=256)  # what comes in great numbers mostly looks the same
def _plain(line: bytes) -> tuple[int, int | None] | None:
    """What a line says: the length of the string that is the next line, or -1 and the reply; None: something else."""
    kind, number = line[:1], line[1:20]
    if line == b"$-1":
        return -1, None
    if not number.isdigit() or len(line) > len(number) + 1:
        return None
    if kind == b":":
        return -1, int(number)
    return (int(number), None) if kind == b"$" and int(number) <= SMALL else None


def _number(line: bytes) -> int:
    """Behind the first character."""
    try:
        return int(line[1:22])
    except ValueError:
        raise _garbage(line) from None


def _garbage(data: bytes) -> BackendError:
    return BackendError(f"the server sent {data[:16]!r}, which is no reply of a Redis", kind="protocol")
