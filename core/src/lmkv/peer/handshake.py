"""Who is at the other end: both sides prove that they know the key, without showing it.

    connecting                                   listening
    PeerHello  {version, node, incarnation, nonce}  →
                     ←  PeerChallenge {version, node, incarnation, nonce, proof}
    PeerProof  {proof, transports}               →
                     ←  PeerWelcome   {session, token, transports, …}

A proof is HMAC-SHA256 of the role and of all that both have said by then, so that one of another connection, of the
other direction, or of another version is worth nothing.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import secrets
import ssl
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, NamedTuple, TypeVar

from lmkv.errors import ClosedError, ConfigError, ProtocolError
from lmkv.peer import messages as m
from lmkv.peer import wire
from lmkv.peer.transport import MAX_BLOB

if TYPE_CHECKING:
    from collections.abc import Mapping

    from lmkv.config.peer import PeerTls

_LABEL: Final = b"lmkv peer handshake"
LISTENS: Final = b"listens"
CONNECTS: Final = b"connects"
Expected = TypeVar("Expected", m.PeerChallenge, m.PeerWelcome)


@dataclass(frozen=True, slots=True)
class Identity:
    """This node, as its peers get to know it."""

    node: str
    incarnation: int
    key: bytes = field(repr=False)
    """Empty: none, which is for loopback only."""


class Contexts(NamedTuple):
    """How TLS is spoken; None: it is not."""

    listening: ssl.SSLContext | None = None
    connecting: ssl.SSLContext | None = None


def tls_contexts(tls: PeerTls) -> Contexts:
    """What the section `peer.tls` means. Reads its files.

    Raises:
        ConfigError: a file is missing, or is not what it should be.
    """
    if tls.certificate is None:
        return Contexts()
    try:
        listening = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=tls.ca)
        listening.verify_mode = ssl.CERT_REQUIRED
        connecting = ssl.create_default_context(ssl.Purpose.SERVER_AUTH, cafile=tls.ca)
        for context in (listening, connecting):
            context.minimum_version = ssl.TLSVersion.TLSv1_2
            context.load_cert_chain(tls.certificate, tls.private_key)
    except (OSError, ValueError) as e:  # ssl.SSLError is an OSError
        raise ConfigError(f"peer.tls: {e} (certificate {tls.certificate}, key {tls.private_key}, CA {tls.ca})") from e
    return Contexts(listening, connecting)


def proof(key: bytes, role: bytes, hello: m.PeerHello, challenge: m.PeerChallenge) -> bytes:
    """What the side in that role shows; `challenge.proof` does not matter."""
    said = (
        role, b"%d" % hello.version, hello.node.encode(), b"%d" % hello.incarnation, hello.nonce,
        hello.purpose.encode(), b"%d" % challenge.version, challenge.node.encode(), b"%d" % challenge.incarnation,
        challenge.nonce,
    )  # fmt: skip
    mac = hmac.new(key, _LABEL, hashlib.sha256)
    for part in said:
        mac.update(len(part).to_bytes(4, "little") + part)
    return mac.digest()


async def receive(reader: asyncio.StreamReader, limit: int) -> bytes:
    """The next body.

    Raises:
        ProtocolError: it claims more than `limit` bytes.
        ClosedError: the connection has ended.
    """
    try:
        length = wire.length_of(await reader.readexactly(wire.LENGTH.size), limit)
        return await reader.readexactly(length)
    except (asyncio.IncompleteReadError, OSError) as e:
        raise ClosedError(f"the connection has ended: {e}") from e


async def shake_connecting(
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
    me: Identity,
    transports: Mapping[str, bytes],
    purpose: str,
) -> tuple[m.PeerChallenge, m.PeerWelcome]:
    """Introduce ourselves to the peer that we have connected to. Bounded by the caller.

    Raises:
        ProtocolError: another version or key (kinds ``version``, ``key``), or no lmkv.
        LmkvError: what the peer refused with.
        ClosedError: the connection has ended.
    """
    hello = m.PeerHello(m.VERSION, me.node, me.incarnation, secrets.token_bytes(m.NONCE_BYTES), purpose)
    writer.write(wire.encode(0, hello))
    challenge = await _expect(reader, m.PeerChallenge)
    if challenge.version != m.VERSION:
        raise ProtocolError(_versions(challenge.version), kind="version")
    _check_introduction(challenge)
    if not hmac.compare_digest(challenge.proof, proof(me.key, LISTENS, hello, challenge)):
        raise ProtocolError(
            f"node {challenge.node!r} does not have our key: peer.key must be the same on all nodes", kind="key"
        )
    writer.write(wire.encode(0, m.PeerProof(proof(me.key, CONNECTS, hello, challenge), dict(transports))))
    welcome = await _expect(reader, m.PeerWelcome)
    m.check_blobs(welcome.transports, MAX_BLOB)
    return challenge, welcome


async def shake_listening(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, me: Identity
) -> tuple[m.PeerHello, m.PeerProof]:
    """Hear who has connected; the caller welcomes him, bounds the time, and refuses on errors.

    Raises:
        ProtocolError: another version or key, or no lmkv.
        ClosedError: the connection has ended.
    """
    hello = wire.decode_opening(await receive(reader, m.HELLO_LIMIT))
    if not isinstance(hello, m.PeerHello):
        raise ProtocolError(f"a first message that is no PeerHello but {type(hello).__name__}")
    if hello.version != m.VERSION:
        raise ProtocolError(_versions(hello.version), kind="version")
    _check_introduction(hello)
    if hello.incarnation == me.incarnation:
        raise ProtocolError(f"node {me.node!r} has connected to itself", kind="self")
    challenge = m.PeerChallenge(m.VERSION, me.node, me.incarnation, secrets.token_bytes(m.NONCE_BYTES), b"")
    writer.write(
        wire.encode(
            0,
            m.PeerChallenge(
                challenge.version, me.node, me.incarnation, challenge.nonce, proof(me.key, LISTENS, hello, challenge)
            ),
        )
    )
    shown = wire.decode_opening(await receive(reader, m.HELLO_LIMIT))
    if not isinstance(shown, m.PeerProof):
        raise ProtocolError(f"a {type(shown).__name__} where a PeerProof belongs")
    if not hmac.compare_digest(shown.proof, proof(me.key, CONNECTS, hello, challenge)):
        raise ProtocolError(
            f"node {hello.node!r} does not have our key: peer.key must be the same on all nodes", kind="key"
        )
    m.check_blobs(shown.transports, MAX_BLOB)
    return hello, shown


async def _expect(reader: asyncio.StreamReader, kind: type[Expected]) -> Expected:
    _, reply = wire.decode_reply(await receive(reader, m.HELLO_LIMIT))
    if isinstance(reply, m.PeerRefused):
        raise wire.error_of(reply, "there")
    if not isinstance(reply, kind):
        raise ProtocolError(f"a {type(reply).__name__} where a {kind.__name__} belongs")
    return reply


def _versions(theirs: int) -> str:
    return f"the peer speaks version {theirs} of the peer protocol, this is version {m.VERSION}: run one lmkv on all"


def _check_introduction(said: m.PeerHello | m.PeerChallenge) -> None:
    if not 0 < len(said.node) <= m.MAX_NAME or not said.node.isprintable():
        raise ProtocolError(f"a node's name has 1 to {m.MAX_NAME} printable characters")
    if len(said.nonce) != m.NONCE_BYTES or not 0 < said.incarnation < 1 << 63:
        raise ProtocolError("an introduction without a nonce or an incarnation")
