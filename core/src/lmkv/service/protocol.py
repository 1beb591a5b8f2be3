"""The messages between a client and the node service: typed structs, MessagePack, length-prefixed.

A frame on the socket is a 4-byte little-endian length, then one MessagePack array with the call number, then the
tagged struct. Every request that has a reply struct is answered by that reply or by `Refused`, under the same number;
what is called one-way below is not answered. Digests travel as one blob of 32-byte values.
"""

from __future__ import annotations

from typing import Final

import msgspec

VERSION: Final = 1
MAX_MESSAGE: Final = 64 << 20
"""Bytes. A longer length prefix closes the connection before anything is allocated."""

ABSENT: Final = -1
"""Offset in `Loaded`: the chunk could not be loaded."""
PRESENT: Final = -1
"""Offset in `Reserved`: the frame is there already, or somebody else is filling it."""
REJECTED: Final = -2
"""Offset in `Reserved`: no room, or the tier stack takes no store now."""
MAX_FRAMES: Final = 1 << 16
"""Digests or frames in one message, at most."""


class Message(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Base of all messages."""


# --- handshake -------------------------------------------------------------------------------------------------------


class Hello(Message, frozen=True):
    """First message of a client."""

    version: int
    pid: int
    name: str
    """For people: `vllm-scheduler`, `vllm-worker-0`, `cli`."""
    model: str = ""
    """This and what follows: labels of all that is counted for this client, see `lmkv.observe.clients.Who`."""
    rank: str = ""
    instance: str = ""


class Welcome(Message, frozen=True):
    """The service's answer; the pool's file descriptor travels with it (SCM_RIGHTS)."""

    version: int
    incarnation: int
    """Random for each start of the service: a client that sees another one forgets every lease and hold."""
    pool_bytes: int
    chunk_tokens: int
    tail: str
    """`pages` or `none`."""
    tiers: tuple[str, ...]
    lease_seconds: float = 60.0
    """A lease ends by itself when it has not been used for so long."""
    asks: bool = False
    """There are tiers that look-ups have to ask, which takes their round trip."""
    node: str = ""
    """Name of this node among others."""


class Refused(Message, frozen=True):
    """The request cannot be served; all of it is that of the error."""

    kind: str
    message: str
    family: str = ""
    """Default kind of its class."""
    retryable: bool = False


class Ok(Message, frozen=True):
    """The request was done; `count` where the request counts something (chunks)."""

    count: int = 0


# --- look-up and retrieve --------------------------------------------------------------------------------------------


class Register(Message, frozen=True):
    """Declares a namespace by its canonical JSON (`Namespace.json`). Answered by `Ok`. Idempotent."""

    namespace_json: str


class Unregister(Message, frozen=True):
    """This session is through with a namespace: with no frame and no session left the service forgets it. One-way."""

    namespace: bytes


class Lookup(Message, frozen=True):
    """How many leading chunks are there, and of the first that is not, how many pages. Answered by `Found`.

    What is found is put under a lease of this session (if `hold`) and its loads into the pool start at once.
    """

    namespace: bytes
    digests: bytes
    """Digests of the full chunks, in order."""
    prefixes: bytes = b""
    """Page-prefix digests (1 page, 2 pages, …) of the tokens that follow the last full chunk."""
    hold: bool = True
    """False: only count; nothing is leased or loaded."""
    prefill_rate: float = 0.0
    """Tokens that the engine computes in a second, as measured; 0: unknown, nothing is withheld for being slow."""
    min_tokens: int = 0
    """Do not offer fewer tokens than these from below RAM; what the configuration says if that is more."""
    max_wait: float = 0.0
    """Do not offer what takes more seconds to load; 0: what the configuration says."""
    again: bool = False
    """This request has been looked up before: neither it nor what it misses is counted once more."""


class Extend(Message, frozen=True):
    """After a `Found` with fewer chunks than asked: page prefixes of the first chunk that was missing.

    Answered by `Found`. Adds the longest stored page prefix to the lease (to one of its own if `lease` is 0) and gives
    the same counts, now with `pages`. When `chunks` were found but their lease has ended since, nothing is held and the
    answer's lease is 0.
    """

    lease: int
    namespace: bytes
    chunks: int
    prefixes: bytes
    hold: bool = True
    prefill_rate: float = 0.0
    """As in `Lookup`."""
    again: bool = False
    """As in `Lookup`."""


class Found(Message, frozen=True):
    """Answer to `Lookup` and `Extend`."""

    lease: int
    """0: nothing is held (nothing found, or not asked to hold)."""
    chunks: int
    """Leading full chunks present, all shards."""
    pages: int = 0
    """Leading pages of the chunk after these that are present in some frame."""
    frame: bytes = b""
    """Digest of that frame, empty when `pages` is 0."""
    tiers: tuple[int, ...] = ()
    """For each full chunk, then for the partial one: index of the tier (in `Welcome.tiers`) that it was found in."""
    withheld: int = 0
    """Tokens behind those that are stored as well, but are computed sooner than loaded."""


class Trim(Message, frozen=True):
    """The engine needs only what follows the first `skip` chunks of the lease: lets go of those. One-way."""

    lease: int
    skip: int


class Release(Message, frozen=True):
    """Ends a lease. Idempotent; unknown leases are ignored. One-way."""

    lease: int


class Acquire(Message, frozen=True):
    """A worker wants the frames `first … first+count-1` of a lease in the pool.

    Answered by `Loaded` when all are there or have failed.
    The partial frame, if any, is number `chunks`. The worker holds what it got until `Done`.
    """

    lease: int
    shard: int
    first: int
    count: int


class Loaded(Message, frozen=True):
    """Answer to `Acquire`. `offsets[i]` is a pool offset or `ABSENT`; `reasons[i]` is a `MissReason` value or empty."""

    hold: int
    """0: nothing is held."""
    offsets: tuple[int, ...]
    lengths: tuple[int, ...]
    """Payload bytes of each frame."""
    reasons: tuple[str, ...]


class Done(Message, frozen=True):
    """The worker has copied what `hold` covers. Idempotent. One-way."""

    hold: int
    last: bool = False
    """It will not ask for these frames of the lease again: when no shard will, the lease lets go of them."""


# --- store -----------------------------------------------------------------------------------------------------------


class NewFrame(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One frame to be stored."""

    digest: bytes
    parent: bytes
    """Digest of the preceding chunk, empty for the first."""
    pages: int
    """Pages in it; fewer than a chunk's for a tail."""
    prefixes: bytes
    """Its page-prefix digests for 1 … pages-1 pages."""


class Reserve(Message, frozen=True):
    """Asks for memory for new frames of one shard. Answered by `Reserved`."""

    namespace: bytes
    shard: int
    frames: tuple[NewFrame, ...]


class Reserved(Message, frozen=True):
    """Answer to `Reserve`: for each frame a pool offset, `PRESENT` or `REJECTED`, and the payload length."""

    reservation: int
    """Names the whole batch; 0 when no frame got memory."""
    offsets: tuple[int, ...]
    lengths: tuple[int, ...]


class Commit(Message, frozen=True):
    """The frames of a reservation are filled; those whose index is in `failed` are not. One-way."""

    reservation: int
    failed: tuple[int, ...] = ()


class Abort(Message, frozen=True):
    """Gives a reservation back unfilled. Idempotent. One-way."""

    reservation: int


# --- transfers -------------------------------------------------------------------------------------------------------


class Transfer(Message, frozen=True):
    """Push these chunks of a request to another node, each as soon as it is READY here. Answered by `Ok`.

    Sent again, with what is new, as the request is computed.
    """

    transfer: str
    peer: str
    """The other node's peer port, `host:port`."""
    namespace: bytes
    digests: bytes
    tokens: int
    """Of the whole request, for its admission there."""
    final: bool = False
    """Nothing more will come: the transfer is complete when all of it has arrived."""


class AwaitTransfer(Message, frozen=True):
    """How a transfer to this node stands; waits up to `seconds` for its end. Answered by `TransferState`."""

    transfer: str
    seconds: float = 0.0


class TransferState(Message, frozen=True):
    """Answer to `AwaitTransfer`: `open`, `complete`, `failed`, `aborted` or `unknown`; leading tokens that came."""

    state: str
    tokens: int = 0


class EndTransfer(Message, frozen=True):
    """This session has what it wants of a transfer, or wants no more of it. Idempotent. One-way."""

    transfer: str


class Unstored(Message, frozen=True):
    """A worker will not reserve memory for frames that it was to store: no transfer waits for them. One-way."""

    namespace: bytes
    shard: int
    digests: bytes


# --- control ---------------------------------------------------------------------------------------------------------


class Pin(Message, frozen=True):
    """Pins stored chunks (all shards) against eviction for `seconds` (None: until `Unpin`). Answered by `Ok(count)`."""

    namespace: bytes
    digests: bytes
    seconds: float | None = None


class Unpin(Message, frozen=True):
    """Takes pins away. Answered by `Ok(count)`."""

    namespace: bytes
    digests: bytes


class Prefetch(Message, frozen=True):
    """Loads chunks into the RAM tier without holding them. Answered by `Ok(count)` of loads begun or already there."""

    namespace: bytes
    digests: bytes


class Move(Message, frozen=True):
    """Moves (or copies, `keep`) chunks between tiers of this node. Answered by `Ok(count)`."""

    namespace: bytes
    digests: bytes
    source: str
    target: str
    keep: bool = False


class Recode(Message, frozen=True):
    """Stores chunks of a tier anew with `codec` (`identity`: decompress). Answered by `Ok(count)`."""

    namespace: bytes
    digests: bytes
    tier: str
    codec: str


class Clear(Message, frozen=True):
    """Removes everything (of a namespace, of a tier). Held frames go when released. Answered by `Cleared`.

    Of a store that other nodes share only what this node holds in it goes, unless `tier` names it: then all goes.
    """

    namespace: bytes | None = None
    tier: str | None = None


class Cleared(Message, frozen=True):
    """Answer to `Clear`: chunk shards removed from each tier."""

    counts: dict[str, int]


class GetHealth(Message, frozen=True):
    """Answered by `HealthReport`."""


class HealthReport(Message, frozen=True):
    """State of the service: for each tier state, detail, bytes; numbers of holds of every kind."""

    state: str
    tiers: dict[str, dict[str, str | int | float]]
    holds: dict[str, int]
    counters: dict[str, float]


class Observe(Message, frozen=True):
    """Counts things that happened in a client in the service's metrics. One-way.

    Names are counters of `lmkv.observe.families` that clients have, labels behind them:
    ``lmkv_hit_tokens_total|tier=ram``. Model, rank and instance are those of the `Hello`.
    """

    counts: dict[str, float]


Request = (
    Hello | Register | Unregister | Lookup | Extend | Trim | Release | Acquire | Done | Reserve | Commit | Abort
    | Pin | Unpin | Prefetch | Move | Recode | Clear | GetHealth | Observe | Transfer | AwaitTransfer | EndTransfer
    | Unstored
)  # fmt: skip
Reply = Welcome | Refused | Ok | Found | Loaded | Reserved | TransferState | Cleared | HealthReport
