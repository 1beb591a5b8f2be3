"""A look-up under way: begun on the scheduler's thread, answered on the client's, polled for nothing."""

from __future__ import annotations

import threading
from concurrent.futures import CancelledError
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from lmkv.errors import LmkvError
from lmkv.service.link import expect
from lmkv.service.protocol import Extend, Found, Lookup, Release

if TYPE_CHECKING:
    from concurrent.futures import Future

    from lmkv.keys import KeyChain
    from lmkv.service.link import Connection
    from lmkv.service.protocol import Reply


@dataclass(frozen=True, slots=True)
class Hit:
    """What a look-up found."""

    lease: int = 0
    """Holds all of it until `CacheEngine.release`; 0: nothing is held."""
    chunks: int = 0
    """Leading full chunks."""
    pages: int = 0
    """Leading pages of the chunk after them."""
    tokens: int = 0
    """All of that in tokens."""
    frame: bytes = b""
    """Digest of the frame that the pages lie in; it is number `chunks` of the lease."""
    tiers: tuple[str, ...] = ()
    """Name of the tier that each chunk, and then the partial one, was found in."""
    withheld_tokens: int = 0
    """Tokens behind these that are stored as well, but are computed sooner than loaded. Also in a hit of nothing."""


NOTHING: Final = Hit()


class LookupTicket:
    """The promise of a `Hit`. Made by `CacheEngine.begin_lookup`; thread-safe.

    A failure of any kind is a `Hit` of nothing, with the reason in `error`. Whoever has the ticket either takes the hit
    and releases its lease, or cancels.
    """

    __slots__ = (
        "_again",
        "_asked",
        "_cancelled",
        "_chain",
        "_connection",
        "_done",
        "_found",
        "_hit",
        "_hold",
        "_lock",
        "_namespace",
        "_prefill_rate",
        "error",
    )

    def __init__(
        self,
        connection: Connection | None,
        namespace: bytes,
        chain: KeyChain,
        *,
        hold: bool,
        prefill_rate: float = 0.0,
        again: bool = False,
    ) -> None:
        self._connection = connection
        self._namespace = namespace
        self._chain = chain
        self._hold = hold
        self._prefill_rate = prefill_rate
        self._again = again
        self._asked = 0
        self._lock = threading.Lock()
        self._done = threading.Event()
        self._hit: Hit | None = None
        self._found = Found(0, 0)
        self._cancelled = False
        self.error: BaseException | None = None

    def begin(self) -> None:
        """Send the question. For `CacheEngine` only."""
        chain, connection = self._chain, self._connection
        digests = chain.digests
        self._asked = len(digests)
        rest = chain.prefixes(len(digests))
        if connection is None or not (digests or rest):
            self._finish(self._found)
            return
        request = Lookup(
            self._namespace, b"".join(digests), b"".join(rest), self._hold, self._prefill_rate, again=self._again
        )
        connection.call(request).add_done_callback(self._answered)

    def poll(self) -> Hit | None:
        """The hit, or None while there is no answer. Costs a field access."""
        return self._hit

    def wait(self, seconds: float | None) -> Hit | None:
        """As `poll`, waiting for the answer at most `seconds` (None: as long as it takes)."""
        if self._hit is None:
            self._done.wait(seconds)
        return self._hit

    def cancel(self) -> None:
        """Nobody wants the answer: releases the lease, now or when it arrives. Idempotent."""
        with self._lock:
            if self._cancelled:
                return
            self._cancelled = True
            hit = self._hit
            self._hit = NOTHING
        if hit is not None:
            self._release(hit.lease)
        self._done.set()

    def _answered(self, future: Future[Reply]) -> None:
        try:
            found = expect(future.result(), Found)
        except (LmkvError, CancelledError) as e:
            self.error = e
            self._finish(self._found)
            return
        self._found = found
        try:
            follow = None if self._cancelled else self._follow(found)
        except Exception as e:  # noqa: BLE001  whatever it is, the ticket must be answered
            self.error = e
            follow = None
        if follow is None:
            self._finish(found)
        else:
            follow.add_done_callback(self._extended)

    def _follow(self, found: Found) -> Future[Reply] | None:
        """Ask for the pages of the first chunk that was missing; None when none was, or it is there but withheld."""
        chain, connection = self._chain, self._connection
        if connection is None or found.chunks >= self._asked or found.withheld:
            return None
        prefixes = b"".join(chain.prefixes(found.chunks))
        return connection.call(
            Extend(found.lease, self._namespace, found.chunks, prefixes, self._hold, self._prefill_rate, self._again)
        )

    def _extended(self, future: Future[Reply]) -> None:
        before = self._found
        try:
            found = expect(future.result(), Found)
        except (LmkvError, CancelledError) as e:
            self.error = e
            self._finish(before)
            return
        if before.lease and found.lease != before.lease:  # it has ended meanwhile: nothing is promised
            self._release(found.lease)
            self._finish(Found(before.lease, 0))
            return
        tiers = before.tiers[: before.chunks] + found.tiers[-1:] if found.pages else before.tiers
        self._finish(Found(found.lease, before.chunks, found.pages, found.frame, tiers, found.withheld))

    def _finish(self, found: Found) -> None:
        hit = Hit(withheld_tokens=found.withheld) if found.withheld else NOTHING
        if found.chunks or found.pages:
            chain, names = self._chain, self._connection.welcome.tiers if self._connection else ()
            tokens = found.chunks * chain.chunk_tokens + found.pages * chain.page_tokens
            tiers = tuple([names[i] if 0 <= i < len(names) else "?" for i in found.tiers])
            hit = Hit(found.lease, found.chunks, found.pages, tokens, found.frame, tiers, found.withheld)
        with self._lock:
            unwanted = self._cancelled
            if not unwanted:
                self._hit = hit
        if unwanted or not hit.tokens:
            self._release(found.lease)
        self._done.set()

    def _release(self, lease: int) -> None:
        if lease and self._connection is not None:
            self._connection.send(Release(lease))
