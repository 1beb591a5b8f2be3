"""Scheduler side: one question to the cache, from tokens to answer. Long prompts are hashed in a thread."""

from __future__ import annotations

import queue
import threading
import time
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from lmkv.engine import Hit
from lmkv_vllm.guard import INCIDENTS
from lmkv_vllm.threads import spread

if TYPE_CHECKING:
    from lmkv.engine import CacheEngine, LookupTicket
    from lmkv.keys import KeyChain

INLINE_TOKENS: Final = 16_384
"""Prompts above this are hashed in a thread; below, the change of threads would cost more than the hashing."""
NOTHING: Final = Hit()
PATIENCE: Final = 0.05
"""Seconds that a look-up may take when nobody but the node is asked."""
PATIENCE_SHARE: Final = 0.25
"""Part of the time that computing a prompt takes which its look-up may take when other stores are asked."""
PATIENCE_MAX: Final = 1.0


def patience(tokens: int, rate: float, *, asks: bool) -> float:
    """Seconds that it pays to wait for a look-up.

    Args:
        tokens: of the prompt.
        rate: tokens that the engine computes in a second; 0: not known yet.
        asks: stores outside of the node are asked.
    """
    if not asks:
        return PATIENCE
    return min(PATIENCE_MAX, max(PATIENCE, PATIENCE_SHARE * tokens / rate)) if rate else PATIENCE_MAX


def tokens_from(request: Any, first: int) -> list[int]:
    """Token ids of a request from position `first` on, prompt and output."""
    tokens: list[int] = request._all_token_ids  # noqa: SLF001  the public view copies one by one
    return tokens[first:]


class Asking(NamedTuple):
    """How a request is looked up."""

    lookup: bool
    """Or only hashed."""
    rate: float = 0.0
    """Tokens that the engine computes in a second; 0: not known."""
    again: bool = False
    """It was looked up before."""


class Question:
    """Extends a chain by a request's new tokens and, if it is to be read, looks it up. Made and used on one thread.

    Attributes:
        incarnation: of the service that is asked; leases mean something only there.
        begun: when, monotonic seconds.
        deadline: until when the engine waits for the answer; 0: it has not asked yet.
    """

    __slots__ = (
        "_about", "_cancelled", "_chain", "_engine", "_hashed", "_lock", "_ticket", "_tokens",
        "begun", "deadline", "incarnation",
    )  # fmt: skip

    def __init__(self, engine: CacheEngine, chain: KeyChain, tokens: list[int], about: Asking) -> None:
        self.begun = time.monotonic()
        self.deadline = 0.0
        self.incarnation = engine.client.incarnation
        self._engine = engine
        self._chain = chain
        self._tokens = tokens
        self._about = about
        self._ticket: LookupTicket | None = None
        self._cancelled = False
        self._lock = threading.Lock()
        self._hashed = threading.Event()

    def run(self) -> None:
        """Hash and ask. Once, on any thread; never raises."""
        try:
            self._chain.extend(self._tokens)
            with self._lock:
                if self._about.lookup and not self._cancelled:
                    rate, again = self._about.rate, self._about.again
                    self._ticket = self._engine.begin_lookup(self._chain, prefill_rate=rate, again=again)
        except Exception as error:  # noqa: BLE001  no answer is a miss
            INCIDENTS.note("look-up", f"{type(error).__name__}: {error}", error=error)
        finally:
            self._tokens = []
            self._hashed.set()

    @property
    def hashed(self) -> bool:
        """The chain may be used."""
        return self._hashed.is_set()

    def answer(self, seconds: float = 0.0) -> Hit | None:
        """The hit, or None if there is none after `seconds`. Nothing when it was cancelled or failed."""
        if self._cancelled:
            return NOTHING
        if not self._hashed.is_set():
            until = time.monotonic() + seconds
            if not seconds or not self._hashed.wait(seconds):
                return None
            seconds = max(0.0, until - time.monotonic())
        ticket = self._ticket
        if ticket is None:
            return NOTHING
        hit = ticket.poll()
        return hit if hit is not None or not seconds else ticket.wait(seconds)

    def cancel(self) -> bool:
        """Give back what is held, now or when the answer comes. True the first time."""
        with self._lock:
            if self._cancelled:
                return False
            self._cancelled = True
            ticket = self._ticket
        if ticket is not None:
            ticket.cancel()
        return True


class Hasher:
    """The thread for long prompts; started when the first one comes."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[Question | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def begin(self, engine: CacheEngine, chain: KeyChain, request: Any, about: Asking) -> Question:
        """A question about all tokens that `request` has now; short ones are hashed before it returns."""
        tokens = tokens_from(request, chain.tokens)
        question = Question(engine, chain, tokens, about)
        if len(tokens) <= INLINE_TOKENS:
            question.run()
            return question
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="lmkv-hash", daemon=True)
            self._thread.start()
        self._queue.put(question)
        return question

    def close(self, seconds: float) -> None:
        """Stop the thread; waits at most `seconds`."""
        if self._thread is not None:
            self._queue.put(None)
            self._thread.join(seconds)
            self._thread = None

    def _work(self) -> None:
        spread()
        while (question := self._queue.get()) is not None:
            question.run()
