"""The contract of transports: what moves bytes between the pools of two nodes, and nothing else.

A transport is made once in a process, over its pool. It knows no keys, frames or leases: the peer protocol has settled
on both sides which regions may be read or written before a `Channel` is asked to, and the serving side asks its `Guard`
again before it touches memory. `Region`s are offsets into the pool of the side that they belong to.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, NamedTuple, Protocol

from lmkv.errors import BackendError

if TYPE_CHECKING:
    import socket
    import ssl
    from collections.abc import Sequence

    from lmkv.memory import Pool

MAX_BLOB: Final = 16 << 10
"""Bytes of `Transport.advertise` at most; the receiving side refuses more before it looks at them."""
MAX_REGIONS: Final = 1 << 16
"""Regions of one call of `Channel.read` or `write` at most."""


class TransportError(BackendError):
    """The bytes of a call did not get across: the peer has gone, refuses, or the transport is broken.

    What the call should have filled is undefined, on the peer's side too. The channel may be of no use any more; a new
    one may work.
    """

    default_kind = "transport"


class DeadlineError(TransportError):
    """It was not done by `until`. The transport no longer touches this side's memory on behalf of the call."""

    default_kind = "deadline"


class Region(NamedTuple):
    """The bytes `[offset, offset + nbytes)` of a pool. Any alignment; never empty."""

    offset: int
    nbytes: int


class Guard(Protocol):
    """What the serving side allows one session. Asked in threads of the transport, for each region; must be quick."""

    def may_read(self, session: int, region: Region) -> bool:
        """Whether that session may read these bytes now. Never raises, whatever the numbers."""

    def may_write(self, session: int, region: Region) -> bool:
        """Whether that session may write these bytes now. Never raises, whatever the numbers."""


class Throttle(Protocol):
    """Keeps what a node serves to others below its share of time and bandwidth.

    Told after each piece (of some MiB at most) that a serving thread has moved. Called in several threads, never waits
    itself. Transports with `remote_memory` cannot ask: there the node has to limit what it grants.
    """

    def __call__(self, nbytes: int, seconds: float) -> float:
        """`nbytes` were moved with `seconds` of this node's processor time: how many seconds to rest before the next.

        The transport rests so long in the thread that asked; 0: goes on.
        """


class Served(Protocol):
    """Told what peers have moved here, for the node's figures. Called in threads of the transport; must be quick."""

    def __call__(self, session: int, nbytes: int) -> None:
        """So many bytes of that session's, read or written, are done. With `remote_memory` the peer says so itself."""


class Reach(NamedTuple):
    """How to open data sockets to the peer's own port."""

    host: str
    port: int
    session: int
    """The session's number at the peer."""
    token: bytes
    """Secret of the session, which its data sockets show."""
    tls: ssl.SSLContext | None = None
    """For sockets to a peer that speaks TLS; its host name or address is checked as the context says."""


class Landed(Protocol):
    """Told, while a call of `Channel.read` goes on, how much of it is there: work is done in the thread that tells."""

    def __call__(self, nbytes: int) -> None:
        """The first `nbytes` bytes of the call's `local` regions, one behind the other, will not change any more."""


def unlimited(nbytes: int, seconds: float) -> float:
    """The `Throttle` that never rests."""
    del nbytes, seconds
    return 0.0


def unheeded(nbytes: int) -> None:
    """The `Landed` that nobody waits for."""
    del nbytes


def uncounted(session: int, nbytes: int) -> None:
    """The `Served` that nobody asks."""
    del session, nbytes


@dataclass(frozen=True, slots=True, kw_only=True)
class TransportContext:
    """What the core tells a transport when it makes it."""

    node: str
    """Name of this node, for messages and for peers."""
    incarnation: int
    """This life of the node: with the name it is unique among all that a peer ever meets."""
    sockets: int = 4
    """Connections to each peer that bytes may travel over at a time."""
    throttle: Throttle = unlimited
    """Limits what this node serves."""
    served: Served = uncounted
    """Counts what this node serves."""


class Transport(ABC):
    """One way to move bytes; one object in a process, over one pool. Thread-safe.

    Attributes:
        name: as in the spec.
        remote_memory: the peer's side touches our memory by itself, without asking our `Guard`: what it was told of
            stays allocated until it has said that it is done, or its connection has ended.
    """

    name: str
    remote_memory: bool = False

    @abstractmethod
    def advertise(self) -> bytes:
        """What a peer needs to know to `connect`: at most `MAX_BLOB` bytes, no secrets. May be asked often."""

    @abstractmethod
    def connect(self, reach: Reach, blob: bytes) -> Channel:
        """A channel to the peer that said `blob` in its own `advertise`. Blocking, for some round trips at most.

        Raises:
            TransportError: `blob` is not of this transport, the peer is not reachable, or refuses.
        """

    def accept(self, sock: socket.socket, session: int) -> None:
        """Serve a data socket that the peer's channel has opened to our port, for an admitted session.

        Takes the socket over, also when it raises: blocking, without a time-out, past its `DataHello` (an `SSLSocket`
        where TLS is on). Returns at once; never blocks, so it may be called on a loop.

        Raises:
            TransportError: this transport uses no data sockets, has too many, or is closed.
        """
        del session
        sock.close()
        raise TransportError(f"transport {self.name!r} takes no data sockets")

    def drop(self, session: int) -> None:  # noqa: B027  nothing to cut where no thread serves
        """The session has ended: cut what serves it. After the return no thread of ours touches memory for it.

        May wait for a copy that is under way, some milliseconds. Unknown numbers are ignored.
        """

    def touches(self, session: int, region: Region) -> bool:
        """Whether bytes of `region` may still be read or written for that session because the guard let it pass before.

        Who has taken a grant back asks this before the memory is given to somebody else; once False it stays so. Never
        waits.
        """
        del session, region
        return self.remote_memory

    @abstractmethod
    def close(self) -> None:
        """Cut everything, wait for the threads to end. Idempotent. Channels that are in use raise `TransportError`."""


class Channel(ABC):
    """Moves bytes to and from the pool of one peer. Blocking, thread-safe, releases the GIL: for threads only.

    A call lists as many remote as local regions, pairwise of equal length. When it returns, all are there whole; when
    it raises, nothing of this call touches local memory any more, and the content of what it should have filled is
    undefined. `until` is a time of `time.monotonic`. A call whose lists are wrong raises `ValueError`.
    """

    @abstractmethod
    def read(self, remote: Sequence[Region], local: Sequence[Region], until: float, landed: Landed = unheeded) -> None:
        """Fill `local` of our pool with `remote` of the peer's.

        `landed` may be told what is there already: growing numbers, by one thread at a time, best every one to four
        MiB. Frames are verified as it is told, while their bytes are in the processor's caches.

        Raises:
            TransportError: refused, broken, closed, or the peer has gone.
            DeadlineError: not done by `until`.
        """

    @abstractmethod
    def write(self, local: Sequence[Region], remote: Sequence[Region], until: float) -> None:
        """Put `local` of our pool into `remote` of the peer's. When it returns, the peer's memory has the bytes.

        Raises:
            TransportError: refused, broken, closed, or the peer has gone.
            DeadlineError: not done by `until`.
        """

    @abstractmethod
    def close(self) -> None:
        """Give up the connection. Idempotent; calls that are under way raise `TransportError`."""


class TransportFactory(Protocol):
    """Makes the transport of this process; may take a second and raise `TransportError`."""

    def __call__(self, pool: Pool, guard: Guard, context: TransportContext) -> Transport:
        """Over `pool`, which stays mapped until the transport is closed; `guard` says what peers may touch."""


def check_regions(remote: Sequence[Region], local: Sequence[Region], pool: Pool) -> int:
    """Bytes of a call of `read` or `write`, whose lists are as `Channel` says.

    Raises:
        ValueError: they are not.
    """
    if len(remote) != len(local):
        raise ValueError(f"{len(remote)} remote regions for {len(local)} local ones")
    if len(local) > MAX_REGIONS:
        raise ValueError(f"{len(local)} regions in one call; the limit is {MAX_REGIONS}")
    total = 0
    for there, here in zip(remote, local, strict=True):
        if there.nbytes != here.nbytes or here.nbytes <= 0:
            raise ValueError(f"regions of {there.nbytes} and {here.nbytes} bytes")
        if here.offset < 0 or here.offset + here.nbytes > pool.nbytes or there.offset < 0:
            raise ValueError(f"{here} is not inside a pool of {pool.nbytes} bytes")
        total += here.nbytes
    return total


def neighbours(remote: Sequence[Region], local: Sequence[Region]) -> list[tuple[Region, Region]]:
    """The pairs of a call in order, of which those that follow each other on both sides are made one."""
    pairs: list[tuple[Region, Region]] = []
    for there, here in zip(remote, local, strict=True):
        if pairs:
            before_there, before_here = pairs[-1]
            if sum(before_there) == there.offset and sum(before_here) == here.offset:
                nbytes = before_here.nbytes + here.nbytes
                pairs[-1] = (Region(before_there.offset, nbytes), Region(before_here.offset, nbytes))
                continue
        pairs.append((there, here))
    return pairs
