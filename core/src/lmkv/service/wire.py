"""How messages lie on the socket, and who may be at its other end.

A frame is a 4-byte little-endian length and one MessagePack array `[call, message]`. Call numbers are the client's;
0 is a one-way message, and from the service a last word before it closes the connection.
"""

from __future__ import annotations

import os
import socket
import struct
import time
from typing import TYPE_CHECKING, Any, Final

import msgspec

from lmkv.errors import BackendError, ClosedError, ConfigError, FrameError, LmkvError, PluginError, ProtocolError
from lmkv.service import protocol

if TYPE_CHECKING:
    from collections.abc import Callable

    from lmkv.service.protocol import Message, Refused, Reply, Request

LENGTH: Final = struct.Struct("<I")
HELLO_LIMIT: Final = 4096
"""Bytes of the first message, from whom nothing is known yet."""
HANDSHAKE_SECONDS: Final = 5.0
SOCKET_BUFFER: Final = 1 << 20
"""Bytes asked of the kernel for each direction; it may give less."""

_CREDENTIALS: Final = struct.Struct("iII")
_encode: Final = msgspec.msgpack.Encoder().encode
_requests: Final[Any] = msgspec.msgpack.Decoder(tuple[int, protocol.Request])
_replies: Final[Any] = msgspec.msgpack.Decoder(tuple[int, protocol.Reply])
_KINDS: Final[dict[str, type[LmkvError]]] = {
    kind.default_kind: kind for kind in (ConfigError, PluginError, BackendError, FrameError, ProtocolError, ClosedError)
}


def encode(call: int, message: Message) -> bytes:
    """One frame.

    Raises:
        ProtocolError: the message is longer than `MAX_MESSAGE`.
    """
    body = _encode((call, message))
    if len(body) > protocol.MAX_MESSAGE:
        raise ProtocolError(f"a {type(message).__name__} of {len(body)} bytes; the limit is {protocol.MAX_MESSAGE}")
    return LENGTH.pack(len(body)) + body


def decode_request(body: bytes | memoryview) -> tuple[int, Request]:
    """What a client sent; ProtocolError when it is no request of this protocol."""
    return _decode(_requests, body)


def decode_reply(body: bytes | memoryview) -> tuple[int, Reply]:
    """What the service sent; ProtocolError when it is no reply of this protocol."""
    return _decode(_replies, body)


def _decode(decoder: Any, body: bytes | memoryview) -> tuple[int, Any]:
    try:
        pair: tuple[int, Any] = decoder.decode(body)
    except (msgspec.MsgspecError, ValueError, RecursionError, OverflowError) as e:
        raise ProtocolError(f"a message of {len(body)} bytes that the protocol does not know: {e}") from e
    return pair


def refusal(error: BaseException) -> Refused:
    """An error as it travels to the client."""
    if isinstance(error, LmkvError):
        return protocol.Refused(error.kind, str(error), type(error).default_kind, error.retryable)
    return protocol.Refused("internal", f"{type(error).__name__}: {error}")


def error_of(refused: Refused) -> LmkvError:
    """The error that the service raised."""
    error = _KINDS.get(refused.family, LmkvError)(refused.message, kind=refused.kind)
    error.retryable = refused.retryable
    return error


class Framer:
    """Cuts a byte stream into bodies. Allocates for what has arrived, never for what a length claims."""

    def __init__(self, limit: int = protocol.MAX_MESSAGE) -> None:
        self._limit = limit
        self._held = bytearray()

    def feed(self, data: bytes) -> list[bytes]:
        """The bodies completed by `data`.

        Raises:
            ProtocolError: a length above the limit. Nothing after it can be understood.
        """
        held = self._held
        source: bytes | bytearray = data
        if held:
            held += data
            source = held
        bodies: list[bytes] = []
        at, size = 0, len(source)
        while size - at >= LENGTH.size:
            (length,) = LENGTH.unpack_from(source, at)
            if length > self._limit:
                raise ProtocolError(f"a message that claims {length} bytes; the limit is {self._limit}")
            end = at + LENGTH.size + length
            if end > size:
                break
            bodies.append(bytes(source[at + LENGTH.size : end]))
            at = end
        if source is held:
            del held[:at]
        elif at < size:
            held += memoryview(data)[at:]
        return bodies


def new_socket() -> socket.socket:
    """An unconnected unix stream socket with roomy buffers."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    roomy(sock)
    return sock


def roomy(sock: socket.socket) -> None:
    """Ask for large kernel buffers, so that a look-up of thousands of chunks goes out in one call."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SOCKET_BUFFER)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, SOCKET_BUFFER)


def peer(sock: socket.socket) -> tuple[int, int]:
    """Process id and user id at the other end; process id 0 when it lives in another pid namespace."""
    pid, uid, _gid = _CREDENTIALS.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    return int(pid), int(uid)


def check_peer(sock: socket.socket, credentials: Callable[[socket.socket], tuple[int, int]] = peer) -> int:
    """The other end's process id.

    Raises:
        ProtocolError: it belongs to another user. The pool holds what users asked; only its owner may map it.
    """
    pid, uid = credentials(sock)
    if uid != os.geteuid():
        raise ProtocolError(f"the other end of the socket belongs to user {uid}, not {os.geteuid()}", kind="peer")
    return pid


def receive_welcome(sock: socket.socket, deadline: float) -> tuple[Reply, int | None]:
    """The service's first message and the descriptor that came with it. Blocking, until `deadline` (monotonic).

    Raises:
        ClosedError: the service went or did not answer in time.
        ProtocolError: it said something else than the protocol.
    """
    fds: list[int] = []
    try:
        head = b""
        while len(head) < LENGTH.size:
            sock.settimeout(max(0.001, deadline - time.monotonic()))
            data, found, _flags, _ = socket.recv_fds(sock, LENGTH.size - len(head), 4, socket.MSG_CMSG_CLOEXEC)
            fds += found
            head += _something(data)
        length = _first_length(head)
        body = b""
        while len(body) < length:
            sock.settimeout(max(0.001, deadline - time.monotonic()))
            body += _something(sock.recv(length - len(body)))
        reply = decode_reply(body)[1]
    except OSError as e:  # TimeoutError is one
        _close_all(fds)
        raise ClosedError(f"the service did not finish the handshake: {e}") from e
    except BaseException:
        _close_all(fds)
        raise
    _close_all(fds[1:])
    return reply, fds[0] if fds else None


def _first_length(head: bytes) -> int:
    (length,) = LENGTH.unpack(head)
    if length > HELLO_LIMIT << 4:
        raise ProtocolError(f"a first message that claims {length} bytes: no lmkv service answers on this socket")
    return int(length)


def _something(data: bytes) -> bytes:
    if not data:
        raise ClosedError("the service closed the connection during the handshake")
    return data


def _close_all(fds: list[int]) -> None:
    for fd in fds:
        os.close(fd)
