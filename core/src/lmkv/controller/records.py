"""What is written down about a job: its plan, and what came of it. JSON, one event a line."""

from __future__ import annotations

from typing import Final, Literal, TypeAlias

import msgspec

from lmkv.agent.messages import (
    ClearTier,
    Drop,
    Fence,
    Fetch,
    PinChunks,
    RecodeChunks,
    Shift,
    UnpinChunks,
)
from lmkv.errors import ProtocolError
from lmkv.types import DIGEST_BYTES

State: TypeAlias = Literal["waiting", "running", "done", "failed", "cancelled"]
WAITING: Final = "waiting"
RUNNING: Final = "running"
DONE: Final = "done"
FAILED: Final = "failed"
CANCELLED: Final = "cancelled"
ENDED: Final[frozenset[State]] = frozenset({DONE, FAILED, CANCELLED})

Command: TypeAlias = PinChunks | UnpinChunks | Fetch | Fence | Drop | Shift | RecodeChunks | ClearTier


class Failure(msgspec.Struct, frozen=True):
    """A chunk for which the job did not do what was asked."""

    namespace: bytes
    digest: bytes
    node: str
    reason: str


class Errand(msgspec.Struct, frozen=True, tag="errand"):
    """One command for one node."""

    node: str
    command: Command

    @property
    def lane(self) -> str:
        """Works of one lane are done one after the other, lanes at the same time."""
        return self.node

    @property
    def namespace(self) -> bytes:
        """Of its chunks; empty where it names none."""
        return b"" if isinstance(self.command, ClearTier) else self.command.namespace

    @property
    def digests(self) -> bytes:
        """The chunks whose results are told one by one."""
        return b"" if isinstance(self.command, ClearTier) else self.command.digests


class Transfer(msgspec.Struct, frozen=True, tag="transfer"):
    """Chunks that go from one node to another."""

    source: str
    source_tier: str
    """Empty: wherever they lie there."""
    target: str
    target_tier: str
    namespace: bytes
    digests: bytes
    remove: bool
    """Move: take them away at the source once they are safe at the target."""

    @property
    def lane(self) -> str:
        """See `Errand.lane`."""
        return self.target

    @property
    def node(self) -> str:
        """Where the result is to be seen."""
        return self.target


Work: TypeAlias = Errand | Transfer


class Plan(msgspec.Struct, frozen=True, tag="plan"):
    """Everything that a job is to do; never changed."""

    verb: str
    by: str
    """Name of the token that asked for it."""
    created: float
    """Seconds since 1970."""
    works: tuple[Work, ...]
    lost: tuple[Failure, ...] = ()
    """Chunks that nothing can be done about, such as one that no node has."""
    key: str = ""
    """Hash of the idempotency key and of who gave it; empty: none."""
    fingerprint: str = ""
    """Hash of the request."""

    @property
    def total(self) -> int:
        """Chunks, each once for each node."""
        return sum(len(work.digests) for work in self.works) // DIGEST_BYTES + len(self.lost)

    @property
    def moves(self) -> frozenset[bytes]:
        """Namespaces whose chunks are taken away from one node for another."""
        return frozenset(work.namespace for work in self.works if isinstance(work, Transfer) and work.remove)


class Started(msgspec.Struct, frozen=True, tag="started"):
    """A controller has begun, or gone on with, the job."""

    attempt: int
    """1, 2, …; part of the names under which nodes know its commands."""
    at: float


class Worked(msgspec.Struct, frozen=True, tag="worked"):
    """One work is over."""

    work: int
    """Its index in the plan."""
    failed: tuple[Failure, ...] = ()
    counts: dict[str, int] = {}
    error: str = ""
    """Why it was not done as a whole."""
    cancelled: bool = False
    """It ended before all was done, as somebody wished."""


class Ended(msgspec.Struct, frozen=True, tag="ended"):
    """The job is over."""

    state: State
    at: float
    error: str = ""
    """Why, where no work says so."""


Event: TypeAlias = Plan | Started | Worked | Ended

_encode: Final = msgspec.json.Encoder().encode
_decode: Final = msgspec.json.Decoder(Event).decode


def encode(event: Event) -> bytes:
    """One line, without its end."""
    return _encode(event)


def decode(line: bytes) -> Event:
    """The event of a line.

    Raises:
        ProtocolError: it is none.
    """
    try:
        return _decode(line)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise ProtocolError(f"no event of a job: {error}") from error
