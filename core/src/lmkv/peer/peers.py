"""The links of a node, on a loop of their own. Blocking callers (threads of tiers) and loops may both ask."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, Final, TypeVar

from lmkv.config.peer import parse_address, show_address
from lmkv.errors import ClosedError, ConfigError, LmkvError
from lmkv.observe.address import loopback
from lmkv.peer.handshake import Identity
from lmkv.peer.link import Frame, PeerLink
from lmkv.peer.threads import outlast

if TYPE_CHECKING:
    import ssl
    from collections.abc import Callable, Coroutine, Mapping, Sequence
    from concurrent.futures import Future

    from lmkv.memory import MemoryObject
    from lmkv.observe.metrics import Metrics
    from lmkv.peer.connection import Connection
    from lmkv.peer.transport import Transport
    from lmkv.types import ChunkKey, Outcome

log = logging.getLogger("lmkv.peer")

MOVERS: Final = 16
"""Threads that read and write through transports."""
STRANGERS: Final = 1024
"""Links that are kept although nobody was ever met there: who sends requests to an engine may make up addresses."""
CLOSE_SECONDS: Final = 8.0
ERROR_KINDS: Final = frozenset({"closed", "deadline", "frame", "key", "protocol", "self", "transport", "version"})
"""Values of the label `kind`."""
Result = TypeVar("Result")


class Means:
    """What links work with.

    Attributes:
        me: this node.
        transports: by name.
        ranked: their names, best first; the last is what is left when all others fail.
        tls: None: no TLS.
        purpose: as `PeerHello` says.
        movers: threads for transports.
        attempts: connections that are being made.
        closed: no more of them.
    """

    def __init__(
        self,
        me: Identity,
        transports: Mapping[str, Transport],
        ranked: Sequence[str],
        *,
        tls: ssl.SSLContext | None,
        purpose: str,
        metrics: Metrics | None,
    ) -> None:
        self.me = me
        self.transports = dict(transports)
        self.ranked = tuple(ranked)
        self.tls = tls
        self.purpose = purpose
        self.movers = ThreadPoolExecutor(MOVERS, thread_name_prefix="lmkv-peer-move")
        self.attempts: set[asyncio.Future[Connection]] = set()
        self.closed = False
        self.callbacks: list[Callable[[str, int], None]] = []
        self._metrics = metrics

    def count(self, op: str, transport: str, nbytes: int) -> None:
        """Bytes of frames that were pulled or pushed."""
        if self._metrics is not None and nbytes:
            self._metrics.inc("lmkv_peer_bytes_total", nbytes, op=op, transport=transport)

    def count_error(self, error: LmkvError) -> None:
        """Something with a peer went wrong. A kind that only the peer may know becomes that of its family."""
        if self._metrics is not None:
            kind = error.kind if error.kind in ERROR_KINDS else type(error).default_kind
            self._metrics.inc("lmkv_peer_errors_total", kind=kind)

    def restarted(self, address: str, incarnation: int) -> None:
        """A peer is another one than it was."""
        for callback in self.callbacks:
            try:
                callback(address, incarnation)
            except Exception:  # of whoever wanted to know
                log.exception("a callback about the restart of %s failed", address)


class Peers:
    """The links of a node, one per address. Thread-safe. Closed with the service, before its transports.

    Made by the node (`PeerNode.peers`). For asking only (no bytes), as a proxy does: `Peers.asking(key)`.
    """

    def __init__(
        self,
        me: Identity,
        transports: Mapping[str, Transport] | None = None,
        ranked: Sequence[str] = (),
        *,
        tls: ssl.SSLContext | None = None,
        purpose: str = "node",
        metrics: Metrics | None = None,
    ) -> None:
        self._means = Means(me, transports or {}, ranked, tls=tls, purpose=purpose, metrics=metrics)
        self._links: dict[str, PeerLink] = {}
        self._lock = threading.Lock()
        self._closed = False
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run_loop, name="lmkv-peers", daemon=True)
        self._thread.start()

    @classmethod
    def asking(cls, key: str = "", *, node: str = "tool", tls: ssl.SSLContext | None = None) -> Peers:
        """Links that can ask and admit but move no bytes."""
        return cls(Identity(node, secrets.randbits(62) + 1, key.encode()), tls=tls, purpose="control")

    @property
    def name(self) -> str:
        """Of this node, as others see it."""
        return self._means.me.node

    def link(self, address: str) -> PeerLink:
        """The link to `host:port`, made at the first use.

        Raises:
            ConfigError: that is no address, or one off loopback while there is no key.
            ClosedError: the links are closed.
        """
        with self._lock:
            if self._closed:
                raise ClosedError("the links to peers are closed")
            found = self._links.get(address)
            if found is None:
                found = PeerLink(*self._checked(address), self._means)
                self._forget_strangers()
                self._links[address] = found
            return found

    def _forget_strangers(self) -> None:
        strangers = [address for address, link in self._links.items() if not link.incarnation]
        if len(strangers) >= STRANGERS:
            for address in strangers[: STRANGERS // 2]:
                del self._links[address]

    def _checked(self, address: str) -> tuple[str, int, str]:
        try:
            host, port = parse_address(address)
        except ValueError as e:
            raise ConfigError(f"a peer's address: {e}") from e
        if loopback(host) is None and not self._means.me.key:
            raise ConfigError(f"peer {address} is not on a loopback address, and there is no peer.key")
        return host, port, show_address(host, port)

    def run(self, coroutine: Coroutine[Any, Any, Result]) -> Result:
        """Run a coroutine of a link and wait for its result: for threads, not for loops."""
        return self.submit(coroutine).result()

    def submit(self, coroutine: Coroutine[Any, Any, Result]) -> Future[Result]:
        """The same without waiting."""
        with self._lock:
            if not self._closed:
                return asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        coroutine.close()
        raise ClosedError("the links to peers are closed")

    async def attend(self, coroutine: Coroutine[Any, Any, Result]) -> Result:
        """The same from another loop. Ends when it has ended there, also when this is cancelled: see `to_the_end`."""
        here = asyncio.get_running_loop()
        future: asyncio.Future[Result] = here.create_future()
        tasks: list[asyncio.Task[Result]] = []

        def start() -> None:
            task = self._loop.create_task(coroutine)
            tasks.append(task)
            task.add_done_callback(lambda _: here.call_soon_threadsafe(settle, task))

        def settle(task: asyncio.Task[Result]) -> None:
            if task.cancelled():
                future.set_exception(ClosedError("the links to peers are closed"))
            elif (error := task.exception()) is not None:
                future.set_exception(error)
            else:
                future.set_result(task.result())

        def cancel() -> None:
            tasks[0].cancel()  # `start` has run by then

        def hurry() -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed: it has ended there, and is told so here
                self._loop.call_soon_threadsafe(cancel)

        with self._lock:
            if self._closed:
                coroutine.close()
                raise ClosedError("the links to peers are closed")
            self._loop.call_soon_threadsafe(start)
        return await outlast(future, hurry)

    def has(
        self, address: str, namespace: bytes, digests: Sequence[bytes], until: float, *, below: bool = False
    ) -> tuple[list[bool], float]:
        """As `PeerLink.has`. Blocking."""
        return self.run(self.link(address).has(namespace, digests, until, below=below))

    def pull(
        self,
        address: str,
        keys: Sequence[ChunkKey],
        into: Sequence[MemoryObject],
        until: float,
        *,
        bring: bool = False,
    ) -> list[Outcome]:
        """As `PeerLink.pull`. Blocking."""
        return self.run(self.link(address).pull(keys, into, until, bring=bring))

    def push(self, address: str, frames: Sequence[Frame], until: float, *, transfer: str = "") -> list[Outcome]:
        """As `PeerLink.push`. Blocking."""
        return self.run(self.link(address).push(frames, until, transfer=transfer))

    def on_restart(self, callback: Callable[[str, int], None]) -> None:
        """Call `callback(address, incarnation)`, on the loop of the peers, when a peer is seen to have restarted."""
        self._means.callbacks.append(callback)

    def close(self) -> None:
        """Close all links, end the thread. Idempotent. Blocking, for as long as copies under way take to break off."""
        with self._lock:
            if self._closed:
                return
            self._closed = self._means.closed = True
        try:
            asyncio.run_coroutine_threadsafe(self._shut(), self._loop).result(CLOSE_SECONDS)
        except Exception:  # closing goes on whatever it was
            log.exception("the links to peers did not close cleanly")
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(CLOSE_SECONDS)
        self._means.movers.shutdown(wait=False)

    async def _shut(self) -> None:
        await asyncio.gather(*(link.close() for link in list(self._links.values())), return_exceptions=True)
        others = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)

    def _run_loop(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()
        self._loop.run_until_complete(self._shut())  # what was begun while it was being closed
        self._loop.run_until_complete(self._loop.shutdown_asyncgens())
        self._loop.close()
