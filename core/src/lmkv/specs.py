"""What the hooks return: frozen descriptions with a lazy `load`, so that listing plugins imports no client library."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Protocol, TypeAlias, runtime_checkable

if TYPE_CHECKING:
    from argparse import ArgumentParser, Namespace
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from pydantic import BaseModel

    from lmkv.backend import StorageBackendInterface
    from lmkv.peer.transport import TransportFactory
    from lmkv.types import ChunkKey

Buffer: TypeAlias = bytes | bytearray | memoryview
API: Final = 1
"""The plugin contract's number. A spec of another number is reported and not used."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BackendContext:
    """What the core tells a backend when it builds it."""

    tier: str
    """Name of the tier in the YAML file, for messages."""
    capacity: int | None = None
    """Bytes that the core will keep in it at most; None where the store limits itself."""
    ranks: int = 1
    """Engine ranks that this node serves."""
    deadline: float = 2.0
    """Seconds that the tier waits for a batch. No call should keep its thread much longer: use it as time limit."""


class BackendFactory(Protocol):
    """Builds a backend; may do I/O, may raise `ConfigError` or `BackendError`."""

    def __call__(self, options: BaseModel, context: BackendContext) -> StorageBackendInterface:
        """`options` is an instance of the spec's options model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BackendSpec:
    """A backend that a distribution offers.

    `options` returns the pydantic model of the tier's `options:` mapping and must import nothing heavy; `load`
    returns the factory (usually the backend's class) and may import the client library.
    """

    name: str
    summary: str
    options: Callable[[], type[BaseModel]]
    load: Callable[[], BackendFactory]
    api: int = API


@dataclass(frozen=True, slots=True, kw_only=True)
class Payload:
    """What a codec is told about the payload in its hands.

    `key`, `raw_bytes` and `context` are always right. What the namespace says of the values is there for `encode` only:
    what `decode` needs of it, `encode` has to write into its output.
    """

    key: ChunkKey
    raw_bytes: int
    """Length of the payload before encoding."""
    dtype: str = ""
    """Type of the KV values as the connector declared it: `bfloat16`, `float16`, `float32`, …; empty: unknown."""
    context: bytes = b""
    """What else the frame's trailer says: chunks before this one, page prefixes. For codecs that authenticate."""
    pages: int = 0
    """Pages in the payload; 0: unknown."""
    page_tokens: int = 0
    """Tokens of a page; 0: unknown."""
    runs: tuple[int, ...] = ()
    """Bytes of each run of one page. The payload is, for each run in order, that run of all its pages."""


class Codec(ABC):
    """Turns payloads into smaller (or sealed) ones and back. Thread-safe; releases the GIL in its work.

    A codec reads whatever was stored under its name, also with other options. It makes no payload longer than the raw
    one by more than `GROWTH` bytes.
    """

    name: str
    lossless: bool = True
    seals: bool = False
    """What it makes cannot be read without a key: a tier with such a codec never stores a frame without it."""

    @abstractmethod
    def encode(self, raw: memoryview, about: Payload) -> Sequence[Buffer]:
        """The encoded payload in one or more parts, to be stored one behind the other. May be parts of `raw`."""

    @abstractmethod
    def decode(self, encoded: memoryview, into: memoryview, about: Payload) -> None:
        """Fill `into`, which has exactly the raw length. On an error its content is undefined.

        Raises:
            FrameError: it is nothing that `encode` made, or not of this length; never anything else for wrong bytes.
            UnreadableError: it may be right, but what is needed to read it, such as a key, is not here.
        """

    def refusal(self, dtype: str) -> str:
        """Why KV of that type (see `Payload.dtype`) cannot be encoded: a clause for a message; empty: it can be."""
        del dtype
        return ""


GROWTH: Final = 1024
"""Bytes by which the output of a codec may exceed the raw payload."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CodecSpec:
    """A codec that a distribution offers.

    `load` returns a callable that makes one, and may import its library. With `options` (which returns a pydantic
    model and must import nothing heavy) that callable gets an instance of the model.
    """

    name: str
    summary: str
    load: Callable[[], Callable[..., Codec]]
    options: Callable[[], type[BaseModel]] | None = None
    lossless: bool = True
    """As the codec's own."""
    seals: bool = False
    """As the codec's own. After such a codec nothing gets smaller, so it has to be the last of a chain."""
    reads_values: bool = False
    """It looks at the payload as KV values, so it has to be the first of a chain."""
    api: int = API


class EvictionPolicy(Protocol):
    """Chooses victims of one tier. Lives on the storage loop; no call may block or do I/O.

    Entries are keyed by `ChunkKey`. `parent` is the digest of the preceding chunk in the same namespace, or None.
    """

    def add(self, key: ChunkKey, parent: bytes | None) -> None:
        """`key` was stored; it becomes the most recently used."""

    def touch(self, key: ChunkKey) -> None:
        """`key` was used."""

    def remove(self, key: ChunkKey) -> None:
        """`key` has gone (evicted, deleted, failed). Unknown keys are ignored."""

    def victims(
        self, nbytes: int, size: Callable[[ChunkKey], int], free: Callable[[ChunkKey], bool]
    ) -> Iterable[ChunkKey]:
        """Keys to evict, in order, until `nbytes` are covered; only keys for which `free(key)` holds.

        May give fewer, and may look for each when it is taken: the policy is not changed before the last was taken or
        the iterator is dropped. Does not change the policy's own state; the tier calls `remove` for what it evicts.
        """


@runtime_checkable
class BulkPolicy(EvictionPolicy, Protocol):
    """A policy that also takes many entries at once, for quick starts and stores. Others get one `add` for each."""

    def add_all(self, parents: Mapping[ChunkKey, bytes | None]) -> None:
        """As `add` for each key in turn.

        Called with what a tier holds at a start, least recently used first, and with what was stored together.
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicySpec:
    """An eviction policy that a distribution offers; `load` returns a callable that makes one."""

    name: str
    summary: str
    load: Callable[[], Callable[[], EvictionPolicy]]
    api: int = API


class Command(Protocol):
    """A verb of the command line: `lmkv NAME …`."""

    def configure(self, parser: ArgumentParser) -> None:
        """Add its arguments to its own parser. The attributes `name` and `verb` of the result are taken."""

    def run(self, options: Namespace) -> int:
        """Do it; returns the exit code.

        `LmkvError` is a mistake of the user: its message is printed, and the code is 2.
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandSpec:
    """A verb that a distribution adds to the command `lmkv`.

    `load` returns the command. It is called only when that verb is on the command line, also for its `--help`; what is
    heavy is best imported in the command's `run`.
    """

    name: str
    summary: str
    """One line for `lmkv --help`."""
    load: Callable[[], Command]
    api: int = API


@dataclass(frozen=True, slots=True, kw_only=True)
class TransportSpec:
    """A way to move bytes between the pools of two nodes that a distribution offers.

    `load` returns the factory (usually the transport's class) and may import the library. It raises `PluginError` with
    one sentence when the machine cannot have it: peers then use what else they have in common.
    """

    name: str
    summary: str
    rank: int
    """Of the transports that two peers have in common the one of the highest rank is used; `tcp` has 0."""
    load: Callable[[], TransportFactory]
    api: int = API
