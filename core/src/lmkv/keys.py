"""How tokens become keys: the digest chain and the namespace. The exact bytes are in `docs/reference/key-format.md`.

Nothing here depends on the process, the machine or the environment: SHA-256 over tagged, length-prefixed bytes.
"""

from __future__ import annotations

import hashlib
import struct
import sys
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Mapping  # noqa: TC003  msgspec reads the annotations of Namespace
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from itertools import accumulate
from typing import TYPE_CHECKING, Final

import msgspec
import numpy as np

from lmkv.errors import ConfigError, ProtocolError
from lmkv.layout import LayoutDescription, canonical_json
from lmkv.types import NAMESPACE_BYTES

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    Tokens = Sequence[int] | array[int] | NDArray[np.integer]

TOKEN_BYTES: Final = 4
MAX_NAMESPACE_JSON: Final = 1 << 20
"""Bytes. A longer text is refused before it is parsed."""

_ROOT: Final = b"lmkv1"
_TAG_SALT: Final = 1
_TAG_ADAPTER: Final = 2
_TAG_ADAPTER_VERSION: Final = 3
_TAG_MEDIA: Final = 16
_MEDIA_END: Final = b"M"
_NAMESPACE_FORMAT: Final = 1
_LE_U32: Final = np.dtype("<u4")
_BLOCK_TOKENS: Final = 16384
# A copy of a ready context costs less than a new one: OpenSSL 3 looks the algorithm up anew for each constructor call.
_SHA256: Final = hashlib.sha256()


@dataclass(frozen=True, slots=True)
class MediaSpan:
    """Tokens that stand for an image, a sound and so on."""

    identity: str
    """Names the content in full, such as a hash of it; never cut."""
    start: int
    """Position of the first token in the prompt."""
    length: int
    """In tokens."""


@dataclass(frozen=True, slots=True)
class Extras:
    """What the KV of one request depends on besides its tokens. Order of `media` does not matter.

    Raises:
        ConfigError: a media span without identity, of no length or with a negative start; text that is not Unicode.
    """

    salt: str = ""
    """Separates tenants."""
    adapter: str = ""
    adapter_version: str = ""
    media: tuple[MediaSpan, ...] = ()

    def __post_init__(self) -> None:
        for name in ("salt", "adapter", "adapter_version"):
            _utf8(name, getattr(self, name))
        for span in self.media:
            if not _utf8("media identity", span.identity):
                raise ConfigError("a media span has an empty identity: its content must be named in full")
            if span.start < 0 or span.length < 1 or span.start + span.length >= 1 << 63:
                raise ConfigError(f"a media span of {span.length} tokens at {span.start} is impossible")

    def root(self) -> bytes:
        """The digest that the first chunk's digest starts from."""
        fields = (_TAG_SALT, self.salt), (_TAG_ADAPTER, self.adapter), (_TAG_ADAPTER_VERSION, self.adapter_version)
        message = _ROOT + b"".join(_tlv(tag, text.encode()) for tag, text in fields if text)
        # Length 2 modulo 4: no message of a chunk (0 or 1 modulo 4) is ever a root's.
        return hashlib.sha256(message + bytes((2 - len(message)) % 4)).digest()


class KeyChain:
    """The digests of one token sequence, chunk by chunk; grows with `extend`, by one thread at a time.

    Meanwhile others may ask for the prefixes of chunks that are full already.

    Keeps a copy of the tokens (4 bytes each) for `prefixes`.

    Attributes:
        digests: digest of every full chunk so far, 32 bytes each. Read only.
    """

    __slots__ = (
        "_buffer",
        "_chunk_type",
        "_media",
        "_page_type",
        "_root",
        "chunk_tokens",
        "digests",
        "page_tokens",
    )

    def __init__(self, chunk_tokens: int, page_tokens: int, extras: Extras | None = None) -> None:
        _check_geometry(chunk_tokens, page_tokens)
        extras = extras or Extras()
        self.chunk_tokens = chunk_tokens
        self.page_tokens = page_tokens
        self.digests: list[bytes] = []
        self._root = extras.root()
        self._media = _Media(extras.media)
        # As one void element each, numpy cuts the buffer into bytes objects of chunks or pages in one call.
        self._chunk_type = _void(chunk_tokens * TOKEN_BYTES)
        self._page_type = _void(page_tokens * TOKEN_BYTES)
        self._buffer = bytearray()

    @property
    def tokens(self) -> int:
        """Tokens given so far."""
        return len(self._buffer) // TOKEN_BYTES

    def extend(self, tokens: Tokens) -> None:
        """Append tokens; costs only them. On an error the chain is as before.

        Raises:
            ConfigError: (kind ``token``) not a flat run of integers, or one below 0 or from 2**32 on.
        """
        row = _row(tokens)
        if isinstance(row, array):
            self._buffer += row
        elif row.dtype == _LE_U32:
            self._buffer += np.ascontiguousarray(row).data
        elif row.size:
            # Cast straight into place: a second array of a long prompt costs more (new pages) than the cast itself.
            start, nbytes = len(self._buffer), row.size * TOKEN_BYTES
            if start:
                self._buffer += bytes(nbytes)
            else:
                self._buffer = bytearray(nbytes)
            np.frombuffer(self._buffer, _LE_U32, row.size, start)[:] = row
        done, full = len(self.digests), self.tokens // self.chunk_tokens
        # In blocks: all parts at once would take as much memory again, and new pages cost more than the digests.
        block = max(1, _BLOCK_TOKENS // self.chunk_tokens)
        for first in range(done, full, block):
            self._append(self._cut(self._chunk_type, first * self.chunk_tokens, min(block, full - first)))

    def _cut(self, kind: np.dtype[np.void], first: int, count: int) -> list[bytes]:
        """`count` chunks or pages from token `first` on, as bytes."""
        return np.frombuffer(self._buffer, kind, count, first * TOKEN_BYTES).tolist()  # type: ignore[no-any-return]

    def _append(self, parts: list[bytes]) -> None:
        first = len(self.digests) * self.chunk_tokens
        digest = self.digests[-1] if self.digests else self._root
        fresh, append = _SHA256.copy, self.digests.append
        if first >= self._media.end:
            for part in parts:
                sha = fresh()
                sha.update(digest)  # twice costs less than joining them
                sha.update(part)
                digest = sha.digest()
                append(digest)
            return
        for part in parts:
            last = first + self.chunk_tokens
            sha = fresh()
            sha.update(digest + part + self._media.section(first, last))
            digest = sha.digest()
            append(digest)
            first = last

    def parent(self, i: int) -> bytes:
        """Digest of the chunk before chunk i, empty for the first. `i == len(digests)`: the parent of the tail."""
        return self.digests[i - 1] if i else b""

    def pages(self, i: int) -> int:
        """Whole pages of chunk i; `i == len(digests)` is the unfinished last chunk."""
        if not 0 <= i <= len(self.digests):
            raise IndexError(f"chunk {i} of {len(self.digests)}")
        return min(self.chunk_tokens, self.tokens - i * self.chunk_tokens) // self.page_tokens

    def prefixes(self, i: int, pages: int | None = None) -> list[bytes]:
        """Digests of the first 1, 2, … whole pages of chunk i, at most `pages`; also of the unfinished last chunk.

        The last one of a full chunk is its own digest; the j-th is the digest of a tail of j pages.
        """
        count = self.pages(i) if pages is None else min(pages, self.pages(i))
        if count < 1:
            return []
        first = i * self.chunk_tokens
        sha = _SHA256.copy()
        sha.update(self.digests[i - 1] if i else self._root)
        update, result = sha.update, sha.digest
        # A copy: while something looks into the buffer itself, `extend` in another thread could not grow it.
        copied = self._buffer[first * TOKEN_BYTES : (first + count * self.page_tokens) * TOKEN_BYTES]
        parts = np.frombuffer(copied, self._page_type, count).tolist()
        found = []
        if first >= self._media.end:
            for part in parts:
                update(part)
                found.append(result())
            return found
        last = first
        for part in parts:
            last += self.page_tokens
            update(part)
            ended = sha.copy()
            ended.update(self._media.section(first, last))
            found.append(ended.digest())
        return found


class _Media:
    """The media spans of a request, cut by token range."""

    __slots__ = ("_ends", "_recent", "_spans", "_starts", "_values", "end")

    def __init__(self, media: tuple[MediaSpan, ...]) -> None:
        spans = sorted(set(media), key=lambda span: (span.start, span.length, span.identity.encode()))
        self._starts = [span.start for span in spans]
        # The greatest end so far is monotone even where spans overlap, so that a range is found by bisection.
        self._ends = list(accumulate((span.start + span.length for span in spans), max))
        self._values = [struct.pack("<Q", span.length) + span.identity.encode() for span in spans]
        self._spans = spans
        self._recent = (-1, 0, b"")
        self.end = self._ends[-1] if spans else 0

    def section(self, first: int, last: int) -> bytes:
        """What follows the tokens `first … last-1` in a message: empty when no span overlaps them."""
        low, high = bisect_right(self._ends, first), bisect_left(self._starts, last)
        if low >= high:
            return b""
        # The prefixes of a chunk begin alike and mostly overlap the same spans.
        recent = self._recent  # in one piece: several threads ask
        if (first, high) != recent[:2]:
            recent = self._recent = (first, high, self._make(first, low, high))
        return recent[2]

    def _make(self, first: int, low: int, high: int) -> bytes:
        fields = b"".join(
            _tlv(_TAG_MEDIA, struct.pack("<q", span.start - first) + value)
            for span, value in zip(self._spans[low:high], self._values[low:high], strict=True)
            if span.start + span.length > first
        )
        if not fields:
            return b""
        # Length 1 modulo 4, and readable from its end: tokens can never be taken for a media section or the reverse.
        return fields + bytes(-len(fields) % 4) + struct.pack("<I", len(fields)) + _MEDIA_END


@dataclass(frozen=True)
class Namespace:
    """Everything but the tokens that the bytes of a frame depend on. Declared by the connector.

    Raises:
        ConfigError: no shard, lengths that do not fit each other, a chunk that is no whole number of pages.
    """

    model: str
    revision: str
    kv_dtype: str
    layouts: tuple[LayoutDescription, ...]
    """`PageLayout.describe()` of each shard."""
    page_bytes: tuple[int, ...]
    """Of each shard."""
    chunk_tokens: int
    page_tokens: int
    extra: Mapping[str, str] = field(default_factory=dict)
    """Whatever else matters: quantisation, parallel configuration, RoPE scaling …"""

    def __post_init__(self) -> None:
        object.__setattr__(self, "extra", dict(self.extra))
        _check_geometry(self.chunk_tokens, self.page_tokens)
        for text in (self.model, self.revision, self.kv_dtype, *self.extra, *self.extra.values()):
            _utf8("namespace", text)
        if not self.layouts or len(self.layouts) != len(self.page_bytes):
            raise ConfigError(
                f"namespace: {len(self.layouts)} layouts, {len(self.page_bytes)} page sizes; one per shard"
            )
        for shard, (layout, nbytes) in enumerate(zip(self.layouts, self.page_bytes, strict=True)):
            runs, tokens = sum(layout["runs"]), layout["page_tokens"]
            if nbytes < 1 or nbytes != runs:
                raise ConfigError(f"namespace: shard {shard}: runs of {runs} bytes in a page of {nbytes}")
            if tokens != self.page_tokens:
                raise ConfigError(f"namespace: shard {shard}: pages of {tokens} tokens, not {self.page_tokens}")

    def __hash__(self) -> int:
        return hash(self.id)

    @property
    def shards(self) -> int:
        """Parts that a chunk has; it is present only if all are."""
        return len(self.layouts)

    @property
    def chunk_pages(self) -> int:
        """Pages of a full chunk."""
        return self.chunk_tokens // self.page_tokens

    @cached_property
    def id(self) -> bytes:
        """SHA-256 of `json()`, cut to 16 bytes."""
        return hashlib.sha256(self.json().encode()).digest()[:NAMESPACE_BYTES]

    def json(self) -> str:
        """Canonical JSON: ASCII, no spaces, keys sorted. Equal namespaces give equal text."""
        return canonical_json(
            {
                "lmkv": _NAMESPACE_FORMAT,
                "model": self.model,
                "revision": self.revision,
                "kv_dtype": self.kv_dtype,
                "layouts": self.layouts,
                "page_bytes": self.page_bytes,
                "chunk_tokens": self.chunk_tokens,
                "page_tokens": self.page_tokens,
                "extra": self.extra,
            }
        )

    @classmethod
    def from_json(cls, text: str) -> Namespace:
        """Read `json()` back.

        Raises:
            ProtocolError: not JSON, an unknown, missing or wrong field, impossible numbers, or not the canonical text.
        """
        if len(text) > MAX_NAMESPACE_JSON:
            raise ProtocolError(f"namespace: {len(text)} characters of JSON; at most {MAX_NAMESPACE_JSON} are read")
        try:
            namespace = msgspec.json.decode(text.encode(), type=cls)
        except (msgspec.DecodeError, UnicodeError, RecursionError, ConfigError) as error:
            raise ProtocolError(f"namespace: {error}") from error
        if namespace.json() != text:
            raise ProtocolError("namespace: the JSON is not canonical (unknown field, other format, order or spaces)")
        return namespace


def _row(tokens: Tokens) -> array[int] | NDArray[np.integer]:
    """`tokens` after checking: an array of little-endian uint32, or numpy integers that all fit into one."""
    if isinstance(tokens, (str, bytes, bytearray)):
        raise ConfigError(f"tokens must be integers, not {type(tokens).__name__}", kind="token")
    if not isinstance(tokens, (np.ndarray, array, memoryview)):
        try:
            flat = array("I", tokens)
        except (OverflowError, TypeError) as error:
            raise ConfigError(f"tokens must be integers from 0 to 2**32 - 1: {error}", kind="token") from error
        if sys.byteorder == "big":
            flat.byteswap()
        return flat
    row = np.asarray(tokens)
    if row.ndim != 1 or row.dtype.kind not in "iu":
        raise ConfigError(f"tokens must be a row of integers, not {row.dtype} {row.shape}", kind="token")
    if row.dtype != np.uint32:
        # All bits that any token has: one pass finds negative and too large ones.
        bits = int(np.bitwise_or.reduce(row))
        if bits < 0 or bits >> 32:
            raise ConfigError("tokens must be integers from 0 to 2**32 - 1: one is out of range", kind="token")
    return row


@lru_cache(maxsize=64)
def _void(nbytes: int) -> np.dtype[np.void]:
    return np.dtype((np.void, nbytes))


def _tlv(tag: int, value: bytes) -> bytes:
    return struct.pack("<BI", tag, len(value)) + value


def _utf8(name: str, text: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise ConfigError(f"{name} is not valid Unicode: {error.reason} at {error.start}") from error


def _check_geometry(chunk_tokens: int, page_tokens: int) -> None:
    if chunk_tokens < 1 or page_tokens < 1 or chunk_tokens % page_tokens:
        nearest = max(1, round(chunk_tokens / page_tokens)) * page_tokens if page_tokens > 0 else chunk_tokens
        raise ConfigError(
            f"a chunk of {chunk_tokens} tokens is no whole number of pages of {page_tokens} tokens: "
            f"set chunk_tokens to a multiple of {page_tokens}, such as {nearest}"
        )
