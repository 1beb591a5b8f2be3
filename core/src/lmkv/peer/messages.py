"""The messages between two node services: typed structs, MessagePack, length-prefixed (`lmkv.peer.wire`).

A control connection begins with `PeerHello` → `PeerChallenge` → `PeerProof` → `PeerWelcome`; then the side that has
connected asks and the other answers, each reply (or `PeerRefused`) under the request's number. One-way messages
(`Release`, `Abort`) are not answered. A data socket begins with `DataHello` and is a transport's from then on.

Digests travel as one blob of 32-byte values. Offsets are bytes from the start of the pool of the side that answers.
"""

from __future__ import annotations

from typing import Annotated, Final, TypeAlias

import msgspec

from lmkv.errors import ProtocolError
from lmkv.types import DIGEST_BYTES, NAMESPACE_BYTES

VERSION: Final = 1
MAX_MESSAGE: Final = 4 << 20
"""Bytes. A longer length prefix closes the connection before anything is allocated."""
HELLO_LIMIT: Final = 64 << 10
"""The same before the handshake is over."""
MAX_FRAMES: Final = 512
"""Frames (digest and shard) in one message, at most: what is done for it keeps the loop from others."""
MAX_DIGESTS: Final = 4096
"""Digests in one question, at most."""
MAX_PREFIXES: Final = 2 << 20
"""Bytes of page prefixes in one message, at most."""
MAX_NAME: Final = 128
"""Characters of a node's name or a transfer's."""
MAX_TRANSPORTS: Final = 16
NONCE_BYTES: Final = 32
PROOF_BYTES: Final = 32
TOKEN_BYTES: Final = 16

ABSENT: Final = -1
"""Offset in `Leased`: the frame is not there, or not in the pool."""
PRESENT: Final = -1
"""Offset in `Reserved`: the frame is there already, or somebody else is filling it."""
REJECTED: Final = -2
"""Offset in `Reserved`: no room."""

COMMITTED: Final = ""
"""Outcome in `Committed`: the frame has verified and is in the index. Any other text says why it is not."""


Numbers: TypeAlias = Annotated[tuple[int, ...], msgspec.Meta(max_length=MAX_FRAMES)]
"""One for each frame."""


class PeerMessage(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Base of all messages."""


# --- handshake -------------------------------------------------------------------------------------------------------


class PeerHello(PeerMessage, frozen=True):
    """First message on a control connection."""

    version: int
    node: str
    incarnation: int
    nonce: bytes
    purpose: str = "node"
    """`node`: a service, which may move bytes; `control`: only asks (a proxy, a tool)."""


class PeerChallenge(PeerMessage, frozen=True):
    """Answer to `PeerHello`: this side knows the key, does the other?"""

    version: int
    node: str
    incarnation: int
    """Random for each start of the service: who sees another one forgets every lease and reservation."""
    nonce: bytes
    proof: bytes


class PeerProof(PeerMessage, frozen=True):
    """Answer to `PeerChallenge`."""

    proof: bytes
    transports: dict[str, bytes] = {}
    """Name → what its `advertise` says."""


class PeerWelcome(PeerMessage, frozen=True):
    """Answer to `PeerProof`."""

    session: int
    token: bytes
    """What the session's data sockets show."""
    transports: dict[str, bytes]
    pool_bytes: int
    chunk_tokens: int
    lease_seconds: float
    """Longest lease or reservation that is granted."""


class DataHello(PeerMessage, frozen=True):
    """First and only message of a data socket; not answered. Who shows a wrong token is cut off."""

    session: int
    token: bytes
    number: int
    """Of the socket among those of its channel, from 0."""
    transport: str = "tcp"


class PeerRefused(PeerMessage, frozen=True):
    """The request cannot be served; all of it is that of the error."""

    kind: str
    message: str
    family: str = ""
    """Default kind of its class."""
    retryable: bool = False


class PeerOk(PeerMessage, frozen=True):
    """The request was done; `count` where the request counts something."""

    count: int = 0


class Agree(PeerMessage, frozen=True):
    """Asks whether a namespace (canonical JSON) is one of the peer's.

    Answered by `PeerOk`, or `PeerRefused`: of kind ``namespace`` naming each field that differs from the namespace that
    the peer has for the same model, with both values; of kind ``no-namespace`` (retryable) when no engine of that
    model has registered there yet.
    """

    namespace_json: str


# --- pull ------------------------------------------------------------------------------------------------------------


class Has(PeerMessage, frozen=True):
    """Which chunks (all shards) the peer could give. Answered by `Holds`."""

    namespace: bytes
    digests: bytes
    below: bool = False
    """Also those that lie in tiers of the peer below its RAM; else only what is in its pool."""


class Holds(PeerMessage, frozen=True):
    """Answer to `Has`."""

    bitmap: bytes
    """Bit i (of byte i // 8, lowest first): digest i is there."""
    wait: float
    """Seconds that a lease asked for now would wait for its turn: how busy the peer is with serving others."""


class Lease(PeerMessage, frozen=True):
    """Asks for frames to be kept where they are, for so many seconds at most. Answered by `Leased`.

    The answer may be late: the peer serves others no more than it is configured to.
    """

    namespace: bytes
    digests: bytes
    shards: Numbers
    seconds: float
    bring: bool = False
    """Also what lies below RAM only: it is loaded first."""
    wait: float = 5.0
    """Seconds that the asker waits for the answer; the peer does not work for it longer."""


class Leased(PeerMessage, frozen=True):
    """Answer to `Lease`: for each digest, and of it for each shard asked, where the sealed frame lies, or `ABSENT`."""

    lease: int
    """0: nothing is held."""
    offsets: Numbers
    lengths: Numbers
    """Bytes of each whole frame; 0 if absent."""
    seconds: float
    """Until the lease ends by itself, from before it was asked for on."""


class Release(PeerMessage, frozen=True):
    """The asker has read what it wanted and touches the memory no more. One-way. Idempotent."""

    lease: int


# --- push ------------------------------------------------------------------------------------------------------------


class NewFrame(msgspec.Struct, frozen=True, array_like=True):
    """One frame that is to come."""

    digest: bytes
    parent: bytes
    """Digest of the preceding chunk, empty for the first."""
    pages: int
    """Pages in it; fewer than a chunk's for a tail."""
    prefixes: bytes
    """Its page-prefix digests for 1 … pages-1 pages."""


class Reserve(PeerMessage, frozen=True):
    """Asks for memory for frames of one shard. Answered by `Reserved`."""

    transfer: str
    """Admitted before, or empty: whatever room there is."""
    namespace: bytes
    shard: int
    frames: Annotated[tuple[NewFrame, ...], msgspec.Meta(max_length=MAX_FRAMES)]


class Reserved(PeerMessage, frozen=True):
    """Answer to `Reserve`: for each frame an offset, `PRESENT` or `REJECTED`, and the bytes of the whole frame."""

    reservation: int
    """Names the whole batch; 0 when no frame got memory."""
    offsets: Numbers
    lengths: Numbers
    seconds: float
    """Until it ends by itself, from before it was asked for on. Nothing may be written later."""


class Commit(PeerMessage, frozen=True):
    """The frames of a reservation have been written whole; those whose index is in `failed` have not.

    Nothing of it is written to any more. Answered by `Committed`.
    """

    reservation: int
    failed: Numbers = ()


class Committed(PeerMessage, frozen=True):
    """Answer to `Commit`: an outcome (see `COMMITTED`) for each frame that had got memory, in order."""

    outcomes: Annotated[tuple[str, ...], msgspec.Meta(max_length=MAX_FRAMES)]


class Abort(PeerMessage, frozen=True):
    """Gives a reservation back unfilled. Idempotent. One-way."""

    reservation: int
    done: bool = True
    """Nothing of it is written to any more. False: that is not known, and its memory stays out of use until the
    connection ends."""


# --- transfers -------------------------------------------------------------------------------------------------------


class Admit(PeerMessage, frozen=True):
    """Asks for room for a whole request before it is computed. Answered by `Admitted` or `NoRoom`.

    Idempotent: asked again under the same name it prolongs what was admitted.
    """

    transfer: str
    tokens: int
    namespace: bytes = b""
    model: str = ""
    """Instead of a namespace: the name that the engine's namespace has as its model."""


class Admitted(PeerMessage, frozen=True):
    """Room has been set aside."""

    transfer: str
    nbytes: int
    seconds: float
    """Until it is given up if nothing comes."""


class NoRoom(PeerMessage, frozen=True):
    """Not now. Who asks again within some `retry_after` keeps its place before those who come later."""

    needed: int
    free: int
    """Bytes that could be set aside now."""
    retry_after: float
    ahead: int = 0
    """Transfers that wait and came before."""


class Finish(PeerMessage, frozen=True):
    """A transfer has ended. Answered by `PeerOk`. Idempotent; also for a transfer that is not known."""

    transfer: str
    state: str
    """`complete`, `failed` or `aborted`."""
    tokens: int = 0
    """Leading tokens of the request whose frames have been committed."""


class Await(PeerMessage, frozen=True):
    """How a transfer stands; waits up to `seconds` for its end. Answered by `TransferState`."""

    transfer: str
    seconds: float = 0.0


class TransferState(PeerMessage, frozen=True):
    """Answer to `Await`."""

    state: str
    """`open`, `complete`, `failed`, `aborted` or `unknown`."""
    tokens: int = 0
    frames: int = 0
    """Frames that have been committed so far."""


Opening = PeerHello | DataHello | PeerProof
Request = Agree | Has | Lease | Release | Reserve | Commit | Abort | Admit | Finish | Await
Reply = (
    PeerChallenge | PeerWelcome | PeerRefused | PeerOk | Holds | Leased | Reserved | Committed | Admitted | NoRoom
    | TransferState
)  # fmt: skip


def split_digests(blob: bytes) -> list[bytes]:
    """A blob of digests as a list; `ProtocolError` when it is none, or too long."""
    if len(blob) % DIGEST_BYTES or len(blob) > MAX_DIGESTS * DIGEST_BYTES:
        raise ProtocolError(f"{len(blob)} bytes of digests of {DIGEST_BYTES} bytes each; at most {MAX_DIGESTS} of them")
    return [blob[at : at + DIGEST_BYTES] for at in range(0, len(blob), DIGEST_BYTES)]


def check_namespace(identity: bytes) -> bytes:
    """`identity` if it can be a namespace's; `ProtocolError` if not."""
    if len(identity) != NAMESPACE_BYTES:
        raise ProtocolError(f"a namespace of {len(identity)} bytes; it has {NAMESPACE_BYTES}")
    return identity


def check_transfer(name: str) -> str:
    """`name` if it can be a transfer's; `ProtocolError` if not."""
    if not name or len(name) > MAX_NAME or not name.isascii() or not name.isprintable():
        raise ProtocolError(f"a transfer's name has 1 to {MAX_NAME} printable ASCII characters")
    return name


def check_blobs(transports: dict[str, bytes], most: int) -> dict[str, bytes]:
    """What a peer advertises if it is not too much; `ProtocolError` if it is."""
    if len(transports) > MAX_TRANSPORTS:
        raise ProtocolError(f"{len(transports)} transports; at most {MAX_TRANSPORTS}")
    for name, blob in transports.items():
        if len(name) > MAX_NAME or len(blob) > most:
            raise ProtocolError(f"a transport that advertises {len(blob)} bytes; at most {most}")
    return transports
