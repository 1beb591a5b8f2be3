"""Transfers to this node: room for a whole request before it is computed, and what has come of it.

Everything runs on the storage loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import OrderedDict, defaultdict
from typing import TYPE_CHECKING, Final

from lmkv.errors import ConfigError, ProtocolError
from lmkv.peer import messages as m
from lmkv.peer.compare import no_model, of_model
from lmkv.peer.filling import frame_size

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from lmkv.memory import MemoryObject
    from lmkv.peer.session import PeerSession
    from lmkv.storage.index import Entry, NamespaceIndex
    from lmkv.storage.leases import Slot
    from lmkv.storage.manager import StorageManager

log = logging.getLogger("lmkv.peer")

STATES: Final = frozenset({"complete", "failed", "aborted"})
RETRY_SECONDS: Final = 0.2
"""After which who found no room may ask again."""
PATIENCE: Final = 10 * RETRY_SECONDS
"""Who has not asked for so long has lost his place in the queue."""
UNASKED_SHARE: Final = 4
"""What is pushed without an admission gets memory only while all that is being filled is no more than such a part of
the pool: the engine has stores, too."""
KEPT: Final = 4096
"""Transfers that have ended, remembered for those who ask how they ended."""


class _Transfer:
    """One request on its way here."""

    def __init__(self, name: str, nbytes: int, expires: float) -> None:
        self.name = name
        self.nbytes = nbytes
        self.expires = expires
        self.state = "open"
        self.tokens = 0
        self.frames = 0
        self.stock: dict[int, list[MemoryObject]] = defaultdict(list)
        """Memory that is set aside, by its size."""
        self.entries: dict[Entry, None] = {}
        """Held for the look-up to come."""
        self.held = 0
        """Bytes of them."""
        self.session: PeerSession | None = None
        """Who pushes it."""
        self.over = asyncio.Event()


class Incoming:
    """Transfers to this node.

    Args:
        manager: whose pool they go to.
        most: bytes that may be set aside at a time.
        seconds: after which a transfer of which nothing is heard is given up.
        waiting: places in the queue for room.

    Attributes:
        admitted: bytes that open transfers were promised.
        out_of_use: tells the bytes that peers may still touch, so that nobody can have them.
    """

    def __init__(self, manager: StorageManager, *, most: int, seconds: float, waiting: int) -> None:
        self._manager = manager
        self._stack = manager.stack
        self._most = most
        self.seconds = seconds
        self._places = waiting
        self._clock = manager.clock
        self._transfers: OrderedDict[str, _Transfer] = OrderedDict()
        self._queue: OrderedDict[str, tuple[int, float]] = OrderedDict()
        """Who found no room, first come first: bytes needed, when last asked."""
        self.admitted = 0
        self.out_of_use: Callable[[], int] = lambda: 0

    # --- admission ---------------------------------------------------------------------------------------------------

    def admit(self, asked: m.Admit) -> m.Admitted | m.NoRoom:
        """Set aside room for a whole request.

        Raises:
            ConfigError: it can never fit (kind ``too-large``), or no engine of that model has registered here (kind
                ``no-namespace``, retryable).
        """
        name = m.check_transfer(asked.transfer)
        known = self._transfers.get(name)
        if known is not None and known.state == "open":
            known.expires = self._clock() + self.seconds
            return m.Admitted(name, known.nbytes, self.seconds)
        if known is not None:
            raise ConfigError(f"transfer {name} has ended already: {known.state}", kind="ended")
        sizes = self._sizes(self._namespace(asked), asked.tokens)
        needed = sum(sizes)
        if needed > self._most:
            raise ConfigError(
                f"a request of {asked.tokens} tokens takes {needed} bytes here, but transfers may set aside no more "
                f"than {self._most} (peer.admission): send it to a node with more room, or compute it in one place",
                kind="too-large",
            )
        ahead = self._ahead(name)
        free = self._most - self.admitted - self.out_of_use() - sum(ahead)
        objects = None if needed > free or len(self._transfers) >= 2 * KEPT else self._set_aside(sizes)
        if objects is None:
            self._wait_in_queue(name, needed)
            return m.NoRoom(needed, max(0, free), RETRY_SECONDS, len(ahead))
        self._queue.pop(name, None)
        transfer = _Transfer(name, needed, self._clock() + self.seconds)
        for obj in objects:
            transfer.stock[obj.nbytes].append(obj)
        self._transfers[name] = transfer
        self.admitted += needed
        self._gauge()
        return m.Admitted(name, needed, self.seconds)

    def _namespace(self, asked: m.Admit) -> NamespaceIndex:
        if asked.namespace:
            return self._manager.index.registered(m.check_namespace(asked.namespace))
        same = of_model(asked.model, self._manager)
        if not same:
            raise no_model(asked.model, self._manager)
        return max(same, key=lambda n: n.page_total * n.chunk_pages)

    def _sizes(self, namespace: NamespaceIndex, tokens: int) -> list[int]:
        """Bytes of every frame that a request of so many tokens has here."""
        if tokens < 0:
            raise ProtocolError(f"a request of {tokens} tokens")
        chunk_tokens = self._manager.chunk_tokens
        chunks, rest = divmod(tokens, chunk_tokens)
        largest = sum(frame_size(namespace, shard, namespace.chunk_pages) for shard in range(namespace.shards))
        if chunks * largest > self._most:  # before a list of them is made
            return [chunks * largest]
        tail = rest * namespace.chunk_pages // chunk_tokens
        pages = [namespace.chunk_pages] * chunks + ([tail] if tail else [])
        return [frame_size(namespace, shard, count) for count in pages for shard in range(namespace.shards)]

    def _ahead(self, name: str) -> list[int]:
        """Bytes that those need who wait longer than `name`."""
        now = self._clock()
        for other in [other for other, (_, asked) in self._queue.items() if now - asked > PATIENCE]:
            del self._queue[other]
        before: list[int] = []
        for other, (needed, _) in self._queue.items():
            if other == name:
                break
            before.append(needed)
        return before

    def _wait_in_queue(self, name: str, needed: int) -> None:
        """Keep the place of `name`; who finds the queue full has none, and asks again as if he had just come."""
        if name in self._queue or len(self._queue) < self._places:
            self._queue[name] = (needed, self._clock())

    def _set_aside(self, sizes: Sequence[int]) -> list[MemoryObject] | None:
        """Memory for all of it, or none. Frames of the RAM tier that nobody holds give way."""
        room, pool, ram = self._stack.room, self._manager.pool, self._stack.ram
        if ram is None:
            raise ConfigError("this node has no RAM tier: nothing can be transferred to it", kind="no-ram")
        total = sum(sizes)
        short = total + max(0, room.reserve - pool.passing_bytes) - pool.free_bytes
        short = max(short, ram.shortfall(total + room.filling))
        if short > 0 and not self._stack.evict(ram, short):
            return None
        made = room.for_stores(sizes)
        objects = [obj for obj in made if obj is not None]
        if len(objects) < len(made):  # free, but in pieces
            self._give_back(objects)
            return None
        return objects

    def _give_back(self, objects: Iterable[MemoryObject]) -> None:
        for obj in objects:
            self._stack.room.filling -= obj.nbytes
            obj.release("fill")
        self._stack.room.more()

    # --- what comes --------------------------------------------------------------------------------------------------

    def memory(self, name: str, session: PeerSession) -> Callable[[int], MemoryObject | None]:
        """Where the frames that `session` pushes for a transfer get their memory, see `filling.begin`.

        Raises:
            ConfigError: the transfer is not open (kind ``unknown-transfer``).
        """
        room = self._stack.room
        transfer: _Transfer | None = None
        if name:
            transfer = self._transfers.get(m.check_transfer(name))
            if transfer is None or transfer.state != "open":
                raise ConfigError(f"transfer {name} is not open here", kind="unknown-transfer")
            transfer.session = session
            transfer.expires = self._clock() + self.seconds
        stock = {} if transfer is None else transfer.stock

        def memory(nbytes: int) -> MemoryObject | None:
            if stock.get(nbytes):
                return stock[nbytes].pop()
            if room.filling + self.out_of_use() + nbytes > self._manager.pool.nbytes // UNASKED_SHARE:
                return None
            obj = room.for_store(nbytes)
            if obj is not None:
                room.filling += nbytes
            return obj

        return memory

    def hold(self, name: str, entries: Iterable[Entry | None]) -> None:
        """The transfer keeps these until a look-up has them: as many bytes as were admitted, and no more."""
        transfer = self._transfers.get(name)
        if transfer is not None:
            for entry in entries:
                nbytes = 0 if entry is None else entry.pages * entry.namespace.page_total
                if entry is None or entry in transfer.entries or transfer.held + nbytes > transfer.nbytes:
                    continue
                transfer.entries[entry] = None
                transfer.held += nbytes
                entry.hold()

    def arrived(self, name: str, slots: Sequence[Slot]) -> None:
        """These frames of a transfer are in the index."""
        transfer = self._transfers.get(name)
        if transfer is not None and slots:
            transfer.frames += len(slots)
            transfer.expires = self._clock() + self.seconds

    def finish(self, name: str, state: str, tokens: int = 0) -> None:
        """It has ended (`complete`, `failed`, `aborted`): what was set aside and not used is free again. Idempotent."""
        if state not in STATES:
            raise ProtocolError(f"{state!r} is no state that a transfer ends in")
        self._queue.pop(name, None)
        transfer = self._transfers.get(name)
        if transfer is None or transfer.state != "open":
            if transfer is not None and state == "aborted":  # it is there, and nobody wants it
                self._let_go(transfer)
            return
        transfer.state, transfer.tokens = state, max(0, tokens)
        transfer.expires = self._clock() + self.seconds
        transfer.session = None
        self.admitted -= transfer.nbytes
        for objects in transfer.stock.values():
            self._give_back(objects)
        transfer.stock.clear()
        if state == "aborted":
            self._let_go(transfer)
        transfer.over.set()
        self._gauge()
        self._manager.metrics.inc("lmkv_transfers_total", state=state, way="in")

    def left(self, session: PeerSession) -> None:
        """A peer has gone: what it was pushing comes no more."""
        for transfer in list(self._transfers.values()):
            if transfer.session is session:
                log.warning("transfer %s: node %s has gone", transfer.name, session.peer, extra={"key": "left"})
                self.finish(transfer.name, "failed")

    # --- for the engine's side ---------------------------------------------------------------------------------------

    def state(self, name: str) -> m.TransferState:
        """How a transfer stands now."""
        transfer = self._transfers.get(name)
        if transfer is None:
            return m.TransferState("unknown")
        return m.TransferState(transfer.state, transfer.tokens, transfer.frames)

    async def wait(self, name: str, seconds: float) -> m.TransferState:
        """How a transfer stands; returns when it has ended, is not known, or after `seconds`."""
        transfer = self._transfers.get(name)
        if transfer is not None and transfer.state == "open" and seconds > 0:
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(transfer.over.wait(), min(seconds, self.seconds))
        return self.state(name)

    def let_go(self, name: str) -> None:
        """A look-up has leased what has arrived, or nobody wants it: hold it no longer. Idempotent."""
        transfer = self._transfers.get(name)
        if transfer is not None:
            self._let_go(transfer)

    def _let_go(self, transfer: _Transfer) -> None:
        entries, transfer.entries, transfer.held = list(transfer.entries), {}, 0
        for entry in entries:
            entry.let_go()
        self._stack.settle_all(entries)

    # --- house -------------------------------------------------------------------------------------------------------

    def expire(self, now: float) -> None:
        """Give up those of which nothing was heard for too long."""
        for name, transfer in list(self._transfers.items()):
            if transfer.expires > now:
                continue
            if transfer.state == "open":
                log.warning("transfer %s: nothing was heard of it in time", name, extra={"key": "transfer-expired"})
                self.finish(name, "failed")
            self._let_go(transfer)
            if transfer.expires <= now:
                del self._transfers[name]
        while len(self._transfers) > KEPT:
            ended = next((n for n, t in self._transfers.items() if t.state != "open"), None)
            if ended is None:
                break
            self._let_go(self._transfers.pop(ended))

    def close(self) -> None:
        """End all of them. Idempotent."""
        for name, transfer in list(self._transfers.items()):
            self.finish(name, "failed")
            self._let_go(transfer)
        self._transfers.clear()
        self._queue.clear()

    def _gauge(self) -> None:
        self._manager.metrics.set("lmkv_peer_admitted_bytes", self.admitted)
