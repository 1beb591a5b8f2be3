"""What a node's agent and the controller say to each other: typed structs, MessagePack, over one WebSocket.

The agent connects to `PATH` of the controller with its token as a bearer. Each binary WebSocket message is one tagged
struct; there is no other framing. Digests travel as one blob of 32-byte values.

A connection begins with `Register`, answered by `Accepted` or `Refused` (which closes it). From then on the agent
heartbeats. What lies in the node's own tiers is told in *epochs*. An epoch begins with `Page` number 0, and its pages
list all that is there; the agent begins one by itself after `Accepted`, after an overflow of its queue, and when
the controller asks for it by `Resync`. Changes go on being told by `Events` between the pages, numbered 1, 2, … in
each epoch. Every message says what was true when it was cut, and they arrive in the order in which they were cut: so a
directory applies each as it comes, and at the last page drops what it has for the node that neither a page nor an
event of this epoch has named as stored.

Jobs are named by the controller. A `Do` with the job of one that runs or has ended is answered by its `Progress` and
done no second time; that holds over reconnects, and as long as the node remembers (`REMEMBERED_JOBS`).
"""

from __future__ import annotations

from typing import Any, Final, TypeAlias

import msgspec

from lmkv.errors import ProtocolError
from lmkv.types import DIGEST_BYTES

VERSION: Final = 1
PATH: Final = "/v1/agent"
MAX_MESSAGE: Final = 8 << 20
"""Bytes; both sides give it to their WebSocket as the most that is read."""
MAX_DIGESTS: Final = 1 << 14
"""Digests in one blob, at most: larger jobs are cut by the controller."""
MAX_NAMESPACES_BYTES: Final = 4 << 20
"""Characters of namespace JSON in one message, at most; the rest follows by `Namespaces`."""
MAX_TIERS: Final = 64
REMEMBERED_JOBS: Final = 4096
"""Jobs whose end a node remembers, newest first."""

RUNNING: Final = "running"
DONE: Final = "done"
FAILED: Final = "failed"
CANCELLED: Final = "cancelled"


class Message(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Base of all messages."""


# --- node to controller ----------------------------------------------------------------------------------------------


class TierFacts(msgspec.Struct, frozen=True, array_like=True):
    """One tier of the node's stack, fastest first; its place in `Register.tiers` is its number in what follows."""

    name: str
    backend: str
    capacity: int
    """Bytes; 0: the store limits itself."""
    shared: bool
    """Other nodes read and write the same store: what lies in it is asked of it, not told by events."""
    writable: bool
    """False: `write: never`."""


class Register(Message, frozen=True):
    """First message of an agent. Answered by `Accepted` or `Refused`."""

    version: int
    node: str
    """Name of the node, unique in the fleet."""
    incarnation: int
    """Random for each start of the node's service: with another one nothing that was known of the node holds."""
    epoch: int
    """Number of the epoch that it will begin at once; greater than any that this incarnation has used."""
    endpoints: dict[str, str]
    """``peer``: host:port of its peer listener, if it has one; ``metrics``: URL of its page."""
    namespaces: tuple[str, ...]
    """Canonical JSON (`lmkv.keys.Namespace.json`) of the namespaces that its clients have declared."""
    tiers: tuple[TierFacts, ...]
    heartbeat: float
    """Seconds between two heartbeats. Refused (kind ``heartbeat``) unless the controller's time-out is longer."""
    codecs: tuple[str, ...] = ()
    """Names of the codecs that it can recode with."""


class Namespaces(Message, frozen=True):
    """Namespaces that clients have declared since."""

    jsons: tuple[str, ...]


class Change(msgspec.Struct, frozen=True, array_like=True):
    """What changed in one tier, for one namespace. A digest is in one of the two blobs, once."""

    namespace: bytes
    """16 bytes."""
    tier: int
    stored: bytes
    """Digests of chunks whose shards all lie whole in the tier now."""
    removed: bytes
    """Digests of chunks of which that is no longer so."""


class Events(Message, frozen=True):
    """Changes since the last one. `sequence` is one more than that of the `Events` before it in this epoch."""

    epoch: int
    sequence: int
    changes: tuple[Change, ...]


class Page(Message, frozen=True):
    """A part of all that lies in the node's own tiers: one tier, one namespace. Number 0 begins the epoch.

    The last page of an epoch, of an empty node the only one, has no digests (`namespace` empty, `tier` 0).
    """

    epoch: int
    number: int
    """0, 1, 2, …"""
    last: bool
    """The last page of the epoch: what was not named since its beginning is not there."""
    sequence: int
    """Of the `Events` sent last in this epoch; 0: none yet."""
    namespace: bytes
    tier: int
    digests: bytes


class Heartbeat(Message, frozen=True):
    """The node lives. From `Accepted` on, every `Register.heartbeat` seconds."""

    sequence: int
    """Of the `Events` sent last in this epoch: another one than the controller saw is a gap."""
    used: tuple[int, ...]
    """Bytes of each tier; 0 for shared ones."""
    load: float
    """How busy the node is with its peers: 0 idle, 1 at what it is allowed to give."""


class Progress(Message, frozen=True):
    """How far a job is. Sent when it begins, now and then, and at its end; all numbers are totals so far."""

    job: str
    done: int
    """Chunks that are through, without the failed ones."""
    total: int
    failed: dict[str, str] = {}
    """Hexadecimal digest → reason, of all chunks that failed so far."""
    counts: dict[str, int] = {}
    """`ClearTier`: chunk shards removed, by tier. `Fetch`: ``bytes`` pulled, ``present`` chunks that were there.
    `Fence`: ``fence``. `Drop`: ``late``."""
    state: str = RUNNING
    """`RUNNING`, `DONE` (some chunks may have failed), `FAILED` (`error` says why) or `CANCELLED`."""
    error: str = ""


# --- controller to node ----------------------------------------------------------------------------------------------


class Accepted(Message, frozen=True):
    """The node is registered."""

    timeout: float
    """Seconds without any message after which the controller drops the node."""


class Refused(Message, frozen=True):
    """The node is not registered; the connection closes. Kinds: ``version``, ``name``, ``heartbeat``, ``limit``."""

    kind: str
    message: str


class Resync(Message, frozen=True):
    """Begin another epoch: something is missing here."""

    reason: str


class PinChunks(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Keep chunks from eviction for `seconds` (None: until unpinned). Fails for chunks that are not there."""

    namespace: bytes
    digests: bytes
    seconds: float | None = None


class UnpinChunks(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Take pins away. A chunk without a pin is done, too."""

    namespace: bytes
    digests: bytes
    fetched: bool = False
    """Only those of a `Fetch`: what was pinned before it stays so, and what somebody has pinned since."""


class Fetch(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Pull chunks from a peer into `tier`. Done when they lie there whole, verified and pinned."""

    peer: str
    """host:port of its peer listener."""
    namespace: bytes
    digests: bytes
    tier: str
    pin_seconds: float = 0.0
    """Each chunk is pinned for so long before it counts as done; 0: not at all."""
    namespace_json: str = ""
    """Canonical JSON of the namespace, for a node none of whose clients has declared it; empty: it must have been."""


class Fence(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Give out a number under which these chunks may be dropped for a while: `Progress.counts` has it as ``fence``.

    It ends by the node's own clock, with the node, and when a `Fetch` brings any of them. So who asks for it, looks
    once more whether he may, and then drops, does not do so later than he thinks, however long he stood still.
    """

    namespace: bytes
    digests: bytes


class Drop(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Take chunks out of `tier` (empty: out of all own tiers). Those that are held go when they are let go of.

    Chunks that are not there are done.
    """

    namespace: bytes
    digests: bytes
    tier: str = ""
    fence: int = 0
    """Of a `Fence` for these chunks. When it has ended nothing is dropped: `FAILED`, with ``late`` among the counts. 0:
    whenever it comes."""


class Shift(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Move (or copy, `keep`) chunks between two tiers of the node."""

    namespace: bytes
    digests: bytes
    source: str
    target: str
    keep: bool = False


class RecodeChunks(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Store chunks of a tier anew with a codec (``identity``: decompress)."""

    namespace: bytes
    digests: bytes
    tier: str
    codec: str


class ClearTier(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Remove everything (of a namespace, of a tier). Held frames go when they are let go of, and then it is done."""

    namespace: bytes | None = None
    tier: str | None = None


Command: TypeAlias = PinChunks | UnpinChunks | Fetch | Fence | Drop | Shift | RecodeChunks | ClearTier


class Do(Message, frozen=True):
    """Carry out a command. Answered by `Progress`, several times."""

    job: str
    """At most 128 characters; the controller's name for it, never used twice for different commands."""
    command: Command


class Cancel(Message, frozen=True):
    """Stop a job after what is under way. Answered by its `Progress`; unknown jobs are reported as cancelled."""

    job: str


FromNode: TypeAlias = Register | Namespaces | Events | Page | Heartbeat | Progress
FromController: TypeAlias = Accepted | Refused | Resync | Do | Cancel

_encode: Final = msgspec.msgpack.Encoder().encode
_from_node: Final[Any] = msgspec.msgpack.Decoder(FromNode)
_from_controller: Final[Any] = msgspec.msgpack.Decoder(FromController)


def encode(message: Message) -> bytes:
    """One WebSocket message.

    Raises:
        ProtocolError: it is longer than `MAX_MESSAGE`.
    """
    body = _encode(message)
    if len(body) > MAX_MESSAGE:
        raise ProtocolError(f"a {type(message).__name__} of {len(body)} bytes; the limit is {MAX_MESSAGE}")
    return body


def command_bytes(command: Command) -> bytes:
    """A command alone, for comparing two."""
    return _encode(command)


def decode_from_node(body: bytes | str) -> FromNode:
    """What an agent sent.

    Raises:
        ProtocolError: no message of an agent, or one above the limits.
    """
    message: FromNode = _decode(_from_node, body)
    if isinstance(message, Events):
        for change in message.changes:
            check_digests(change.stored)
            check_digests(change.removed)
    elif isinstance(message, Page):
        check_digests(message.digests)
    elif isinstance(message, Register) and len(message.tiers) > MAX_TIERS:
        raise ProtocolError(f"a node with {len(message.tiers)} tiers; at most {MAX_TIERS} are known")
    return message


def decode_from_controller(body: bytes | str) -> FromController:
    """What a controller sent.

    Raises:
        ProtocolError: no message of a controller, or one above the limits.
    """
    message: FromController = _decode(_from_controller, body)
    if isinstance(message, Do) and not isinstance(message.command, ClearTier):
        check_digests(message.command.digests)
    return message


def check_digests(blob: bytes) -> int:
    """The number of digests in a blob.

    Raises:
        ProtocolError: no whole number of digests, or more than `MAX_DIGESTS`.
    """
    count, rest = divmod(len(blob), DIGEST_BYTES)
    if rest or count > MAX_DIGESTS:
        raise ProtocolError(f"{len(blob)} bytes of digests; {DIGEST_BYTES} bytes each, at most {MAX_DIGESTS}")
    return count


def _decode(decoder: Any, body: bytes | str) -> Any:
    if isinstance(body, str):
        raise ProtocolError("a text message; this protocol has binary ones only")
    if len(body) > MAX_MESSAGE:
        raise ProtocolError(f"a message of {len(body)} bytes; the limit is {MAX_MESSAGE}")
    try:
        return decoder.decode(body)
    except (msgspec.MsgspecError, ValueError, RecursionError, OverflowError) as e:
        raise ProtocolError(f"a message of {len(body)} bytes that the protocol does not know: {e}") from e
