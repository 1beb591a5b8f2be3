"""Scheduler side: which namespace this engine uses now, and its `CacheEngine`: another one after each reset.

A reset only sets a word, so that nothing can keep it from happening: from then on there is no `CacheEngine` until one
of the new epoch has been made. That may take a while, or until the service can be reached, and happens in other
threads; the scheduler's thread takes over what they have made, and only there, so that no step ever has saves of one
epoch and the namespace of another.
"""

from __future__ import annotations

import threading
import uuid
from typing import TYPE_CHECKING, Final

from lmkv.engine import CacheEngine
from lmkv.errors import ConfigError
from lmkv_vllm.geometry import check_chunk, namespace_of
from lmkv_vllm.guard import INCIDENTS, logger
from lmkv_vllm.link import clear

if TYPE_CHECKING:
    from collections.abc import Mapping

    from lmkv.keys import Namespace
    from lmkv_vllm.link import Link
    from lmkv_vllm.metadata import Handshake

RESET_SECONDS: Final = 2.0
"""Seconds that a reset waits at most for its namespace to be registered and the old one to be cleared."""
CLEAR_SECONDS: Final = 10.0
HELD_SHARE: Final = 1 / 3
"""Share of a lease's time for which a hit may wait for its request's turn; the rest is for its load to begin."""
HELD_SECONDS: Final = 20.0
"""As that, at most."""


def check_lease(lease_seconds: float, load_deadline: float) -> None:
    """Raises `ConfigError` with the numbers when a lease may end while its load is still in time."""
    least = load_deadline / (1 - HELD_SHARE)
    if lease_seconds < least:
        raise ConfigError(
            f"the service's leases end after {lease_seconds:g} s without use, but lmkv.load_deadline lets a load wait "
            f"{load_deadline:g} s: set leases.seconds in the stack file to at least {least:g}s, or lmkv.load_deadline "
            f"to at most {lease_seconds * (1 - HELD_SHARE):.3g}s"
        )


class Epochs:
    """See the module. `connect` may be called in any thread, the rest on the scheduler's.

    Args:
        model: name, revision and what else the bytes depend on.
        page_tokens: of the engine's pages.
        load_deadline: seconds that a load may take.

    Attributes:
        engine: of the present epoch; None while there is none.
        chunk_tokens: of the first one, and so of all; of a page while there was none.
        tails: unfinished chunks are stored.
    """

    def __init__(
        self, link: Link, model: tuple[str, str, Mapping[str, str]], page_tokens: int, load_deadline: float
    ) -> None:
        self.engine: CacheEngine | None = None
        self.chunk_tokens = page_tokens
        self.tails = False
        self.handshakes: list[Handshake] = []
        self._link = link
        self._model = model
        self._page_tokens = page_tokens
        self._load_deadline = load_deadline
        self._news: str | None = None
        self._making = threading.Lock()
        """Held while a namespace is registered: by one thread at a time."""
        self._lock = threading.Lock()
        """Guards what follows."""
        self._epoch = ""
        self._made: tuple[str, CacheEngine] | None = None
        self._made_for: str | None = None
        self._chunk = 0
        self._left: list[CacheEngine] = []
        """Of earlier epochs, still to be cleared."""

    def connect(self) -> None:
        """The service can be reached: make the `CacheEngine` of the present epoch, unless that was done.

        Waits for the service. Raises `ConfigError` when it refuses the namespace.
        """
        client = self._link.client
        if client is None or not self.handshakes:
            return
        with self._making:
            with self._lock:
                epoch = self._epoch
                if self._made_for == epoch:
                    return
            welcome = client.welcome
            if not self._chunk:
                self._chunk = welcome.chunk_tokens
                client.on_reconnect(self._again)
            check_chunk(self._chunk, self._page_tokens)
            check_lease(welcome.lease_seconds, self._load_deadline)
            engine = CacheEngine(client, self._namespace(epoch))
            with self._lock:
                self._made_for = epoch
                if epoch == self._epoch:
                    self._made = (welcome.tail, engine)
                else:  # a reset came meanwhile, and makes another
                    self._left.append(engine)
        logger.info(
            "caching in %s, chunks of %d tokens, namespace %s",
            ", ".join(welcome.tiers), engine.namespace.chunk_tokens, engine.namespace.id.hex(),
        )  # fmt: skip

    @property
    def held_seconds(self) -> float:
        """A hit that has waited longer for its request's turn is looked up anew, well before its lease ends."""
        engine = self.engine
        return HELD_SECONDS if engine is None else min(HELD_SECONDS, engine.client.welcome.lease_seconds * HELD_SHARE)

    def take(self) -> None:
        """Begin to use what has been made meanwhile."""
        if self._made is None:
            return
        with self._lock:
            made, self._made = self._made, None
        if made is not None:
            tail, self.engine = made
            self.chunk_tokens = self.engine.namespace.chunk_tokens
            self.tails = tail == "pages"
            self._news = self.engine.namespace.json()

    def news(self) -> str | None:
        """The namespace, if the workers have not been told of it."""
        news, self._news = self._news, None
        return news

    def renew(self) -> None:
        """Begin another epoch. Whatever becomes of the service: nothing stored until now is found from here on.

        What is left behind is cleared now or when the service is back.
        """
        with self._lock:
            self._epoch = uuid.uuid4().hex
            made, self._made = self._made, None
            self._left += [] if made is None else [made[1]]
            self._left += [] if self.engine is None else [self.engine]
        self.engine = self._news = None
        if self._link.client is not None:
            thread = threading.Thread(target=self._again, name="lmkv-reset", daemon=True)
            thread.start()
            thread.join(RESET_SECONDS)
            self.take()

    def close(self, seconds: float) -> None:
        """Nobody will look for the frames of this epoch again, unless it is the first."""
        engine, self.engine = self.engine, None
        if engine is not None and self._epoch:
            clear(engine, seconds)

    def _again(self) -> None:
        """Do what could not be done before."""
        try:
            self.connect()
        except Exception as error:  # noqa: BLE001  in a thread of its own
            INCIDENTS.note("reset", f"no cache until the service is another: {type(error).__name__}: {error}")
        with self._lock:
            left, self._left = self._left, []
        for engine in left:
            if clear(engine, CLEAR_SECONDS):
                engine.client.unregister(engine.namespace)
            else:
                with self._lock:
                    self._left.append(engine)

    def _namespace(self, epoch: str) -> Namespace:
        return namespace_of(self._model, self.handshakes, self._chunk, epoch)
