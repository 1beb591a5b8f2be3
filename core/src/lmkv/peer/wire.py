"""How peer messages lie on a TCP connection, and how a connection is opened.

A connection begins, in the clear, with eight bytes that say what it is: `CONTROL` or `DATA`. TLS, if configured,
begins after them. A frame is a 4-byte little-endian length and one MessagePack array `[call, message]`; call 0 is a
one-way message, a message of the handshake, or a last word before the connection is closed.
"""

from __future__ import annotations

import socket
import struct
import time
from typing import TYPE_CHECKING, Any, Final

import msgspec

from lmkv.errors import BackendError, ClosedError, ConfigError, FrameError, LmkvError, PluginError, ProtocolError
from lmkv.peer import messages as m
from lmkv.peer.transport import TransportError

if TYPE_CHECKING:
    from lmkv.peer.transport import Reach

LENGTH: Final = struct.Struct("<I")
CONTROL: Final = b"lmkvpeer"
DATA: Final = b"lmkvdata"
HANDSHAKE_SECONDS: Final = 5.0
SHOWN: Final = 1000
"""Characters of a peer's text in a message at most."""

_encode: Final = msgspec.msgpack.Encoder().encode
_openings: Final[Any] = msgspec.msgpack.Decoder(tuple[int, m.Opening])
_requests: Final[Any] = msgspec.msgpack.Decoder(tuple[int, m.Request])
_replies: Final[Any] = msgspec.msgpack.Decoder(tuple[int, m.Reply])
_KINDS: Final[dict[str, type[LmkvError]]] = {
    kind.default_kind: kind for kind in (ConfigError, PluginError, BackendError, FrameError, ProtocolError, ClosedError)
}


def encode(call: int, message: m.PeerMessage) -> bytes:
    """One frame.

    Raises:
        ProtocolError: the message is longer than `MAX_MESSAGE`.
    """
    body = _encode((call, message))
    if len(body) > m.MAX_MESSAGE:
        raise ProtocolError(f"a {type(message).__name__} of {len(body)} bytes; the limit is {m.MAX_MESSAGE}")
    return LENGTH.pack(len(body)) + body


def length_of(head: bytes, limit: int) -> int:
    """Bytes of the body that follows.

    Raises:
        ProtocolError: more than `limit`. Nothing after it can be understood.
    """
    (length,) = LENGTH.unpack(head)
    if length > limit:
        raise ProtocolError(f"a message that claims {length} bytes; the limit is {limit}")
    return int(length)


def decode_opening(body: bytes) -> m.PeerHello | m.DataHello | m.PeerProof:
    """What a peer says before it is admitted; ProtocolError when it is nothing that belongs there."""
    opening: m.PeerHello | m.DataHello | m.PeerProof = _decode(_openings, body)[1]
    return opening


def decode_request(body: bytes) -> tuple[int, m.Request]:
    """What a peer asks; ProtocolError when it is no request of this protocol."""
    return _decode(_requests, body)


def decode_reply(body: bytes) -> tuple[int, m.Reply]:
    """What a peer answers; ProtocolError when it is no reply of this protocol."""
    return _decode(_replies, body)


def _decode(decoder: Any, body: bytes) -> tuple[int, Any]:
    try:
        pair: tuple[int, Any] = decoder.decode(body)
    except (msgspec.MsgspecError, ValueError, RecursionError, OverflowError) as e:
        raise ProtocolError(f"a message of {len(body)} bytes that the protocol does not know: {e}") from e
    return pair


def refusal(error: BaseException) -> m.PeerRefused:
    """An error as it travels to the peer."""
    if isinstance(error, LmkvError):
        family = next((k for k, cls in _KINDS.items() if isinstance(error, cls)), type(error).default_kind)
        return m.PeerRefused(error.kind, str(error), family, error.retryable)
    return m.PeerRefused("internal", type(error).__name__)


def error_of(refused: m.PeerRefused, who: str) -> LmkvError:
    """The error that peer `who` raised."""
    error = _KINDS.get(refused.family, LmkvError)(f"peer {who}: {shown(refused.message)}", kind=shown(refused.kind))
    error.retryable = refused.retryable
    return error


def shown(text: str) -> str:
    """What a peer says, as messages and logs may show it."""
    cut = text if len(text) <= SHOWN else f"{text[:SHOWN]}…"
    return "".join(c if c.isprintable() else "?" for c in cut)


def prepare(sock: socket.socket) -> None:
    """Send at once, and notice within half a minute that the other machine has vanished."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 15)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 5)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)


def open_data(reach: Reach, number: int, until: float) -> socket.socket:
    """A data socket to the peer, past its `DataHello`: for the transport that the core has. Blocking.

    Args:
        reach: of the session.
        number: which socket of the channel it is.
        until: time of `time.monotonic`.

    Returns:
        A socket (`ssl.SSLSocket` where TLS is on) without a time-out, with TCP_NODELAY; the caller's. That the peer has
        not admitted it shows when it is read from: it is closed.

    Raises:
        TransportError: the peer is not reachable, or speaks no TLS.
    """
    sock: socket.socket | None = None
    try:
        sock = socket.create_connection((reach.host, reach.port), timeout=max(0.001, until - time.monotonic()))
        prepare(sock)
        sock.sendall(DATA)
        if reach.tls is not None:
            sock.settimeout(max(0.001, until - time.monotonic()))
            sock = reach.tls.wrap_socket(sock, server_hostname=reach.host)
        sock.sendall(encode(0, m.DataHello(reach.session, reach.token, number)))
        sock.settimeout(None)
    except OSError as e:  # ssl.SSLError and TimeoutError are some
        if sock is not None:
            sock.close()
        raise TransportError(f"no data connection to {reach.host}:{reach.port}: {e}") from e
    return sock
