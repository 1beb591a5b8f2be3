"""Transfers from this node: chunks of a request are pushed to the node that goes on with it, as soon as they are READY.

What was announced is waited for until it is READY, or it is known that it will not be: a store was refused or given up,
a client says that it stores it not (`Unstored`). How long a busy engine takes for a save nobody can guess.

Everything runs on the storage loop, except for what the links do. Nothing is tried twice: a transfer that fails has
failed on both sides, and the other node computes what has not come.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import OrderedDict, defaultdict
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Final

from lmkv.errors import BackendError, ConfigError, LmkvError
from lmkv.peer import messages as m
from lmkv.peer.link import Frame
from lmkv.peer.threads import outlast
from lmkv.storage.coding import complete
from lmkv.storage.driver import RUNNING
from lmkv.types import DIGEST_BYTES

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from lmkv.peer.link import PeerLink
    from lmkv.peer.peers import Peers
    from lmkv.storage.index import Entry, NamespaceIndex
    from lmkv.storage.leases import Slot
    from lmkv.storage.manager import StorageManager

log = logging.getLogger("lmkv.peer")

STEP_SECONDS: Final = 30.0
"""For one question or one push."""
FINISH_SECONDS: Final = 5.0
BATCH_BYTES: Final = 64 << 20
MOST: Final = 1024
"""Transfers that may be open at a time."""
KEPT: Final = 4096
"""Transfers that have ended, remembered for those who ask how they ended."""


class _Transfer:
    """One request on its way from here."""

    def __init__(self, name: str, address: str, namespace: NamespaceIndex, tokens: int) -> None:
        self.name = name
        self.address = address
        self.namespace = namespace
        self.whole = tokens
        self.owner: object = None
        self.digests: dict[bytes, int] = {}
        """All that were announced, in the order of the prompt; pages of each that has arrived, else 0."""
        self.ready: list[Entry] = []
        """What can be pushed and has not been."""
        self.waiting: dict[bytes, None] = {}
        """What is not READY yet."""
        self.final = False
        self.state = "open"
        self.heard = time.monotonic()
        self.more = asyncio.Event()
        self.task: asyncio.Task[None] | None = None

    def pages(self) -> int:
        """That have arrived in front."""
        total = 0
        for pages in self.digests.values():
            if not pages:
                break
            total += pages
        return total


class Outgoing:
    """Transfers from this node.

    Args:
        manager: what is pushed from.
        peers: the links.
        seconds: after which a transfer without any progress has failed.
    """

    def __init__(self, manager: StorageManager, peers: Peers, seconds: float = 60.0) -> None:
        self._manager = manager
        self._stack = manager.stack
        self._peers = peers
        self._seconds = seconds
        self._transfers: OrderedDict[str, _Transfer] = OrderedDict()
        self._wanted: dict[tuple[bytes, bytes], set[_Transfer]] = defaultdict(set)
        self._crew = ThreadPoolExecutor(1, thread_name_prefix="lmkv-peer-seal")
        self._tasks: set[asyncio.Task[None]] = set()
        self._stopped = False
        self._stack.on_stored = self._stored
        self._stack.on_unstored = self.unstored

    def send(
        self,
        transfer: str,
        address: str,
        namespace: bytes,
        digests: Sequence[bytes],
        tokens: int,
        *,
        final: bool,
        owner: object = None,
    ) -> None:
        """Push these chunks (and the tail) to the node at `address`, each as soon as it is READY here.

        May be called again with more digests, in the order of the prompt. Returns at once; what comes of it is in
        `state`. What is known already is not pushed twice, what comes after the end is ignored.

        Args:
            transfer: its name, as the proxy made it.
            address: the decode node's peer port, `host:port`.
            namespace: of all of them; registered here.
            digests: what is known by now, with or without those of earlier calls.
            tokens: of the whole request, for the admission.
            final: nothing more will be announced. When all is there, or is known not to come, the transfer is finished.
            owner: whose word that all of it is or will be stored counts as long as he is there: see `left`.

        Raises:
            ConfigError: the namespace is not registered, or too many transfers are open.
            ProtocolError: no name of a transfer.
        """
        known = self._transfers.get(m.check_transfer(transfer))
        if known is None:
            known = self._begin(transfer, address, self._manager.index.registered(namespace), tokens)
        if known.state != "open":
            return
        for digest in digests:
            self._announce(known, digest)
        known.final |= final
        known.owner = owner
        known.heard = time.monotonic()
        known.more.set()

    def state(self, transfer: str) -> m.TransferState:
        """How it stands: `open`, `complete`, `failed`, `aborted`, `unknown`; `tokens` is what has arrived in front."""
        known = self._transfers.get(transfer)
        if known is None:
            return m.TransferState("unknown")
        frames = sum(1 for pages in known.digests.values() if pages) * known.namespace.shards
        return m.TransferState(known.state, self._tokens(known), frames)

    def abort(self, transfer: str) -> None:
        """The request has gone: stop pushing, tell the decode node. Idempotent."""
        known = self._transfers.get(transfer)
        if known is not None and known.state == "open":
            self._end(known, "aborted")
            if known.task is not None:
                known.task.cancel()

    def stop(self) -> None:
        """The node is closing: no more of them, and nobody is told; the ends of the connections say it."""
        self._stopped = True
        for transfer in list(self._transfers.values()):
            if transfer.state == "open":
                self._end(transfer, "failed")
        for task in self._tasks:
            task.cancel()

    async def close(self) -> None:
        """Wait until nothing of them is under way. Idempotent."""
        self.stop()
        while self._tasks:
            await asyncio.wait(self._tasks)
        self._stack.on_stored = self._stack.on_unstored = None
        self._crew.shutdown(wait=False)

    # --- what is READY -----------------------------------------------------------------------------------------------

    def _begin(self, name: str, address: str, namespace: NamespaceIndex, tokens: int) -> _Transfer:
        if sum(t.state == "open" for t in self._transfers.values()) >= MOST or self._stopped:
            raise ConfigError(f"{MOST} transfers from this node are open", kind="too-many")
        while len(self._transfers) >= KEPT + MOST:
            del self._transfers[next(n for n, t in self._transfers.items() if t.state != "open")]
        transfer = self._transfers[name] = _Transfer(name, address, namespace, tokens)
        transfer.task = asyncio.get_running_loop().create_task(self._run(transfer))
        self._keep(transfer.task)
        return transfer

    def _keep(self, task: asyncio.Task[None]) -> None:
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _announce(self, transfer: _Transfer, digest: bytes) -> None:
        if digest in transfer.digests:
            return
        transfer.digests[digest] = 0
        entry = transfer.namespace.entries.get(digest)
        if entry is not None and entry.ready:
            self._take(transfer, entry)
        else:
            transfer.waiting[digest] = None
            self._wanted[transfer.namespace.id, digest].add(transfer)

    def _take(self, transfer: _Transfer, entry: Entry) -> None:
        """It is to be pushed, and must stay until it is."""
        entry.hold()
        transfer.ready.append(entry)
        transfer.more.set()

    def _stored(self, slots: Sequence[Slot]) -> None:
        """For `Stack.on_stored`."""
        if not self._wanted:
            return
        for entry, _, _ in slots:
            if (entry.namespace.id, entry.digest) in self._wanted and entry.ready:
                for transfer in self._wanted.pop((entry.namespace.id, entry.digest)):
                    transfer.waiting.pop(entry.digest, None)
                    self._take(transfer, entry)

    def unstored(self, namespace: bytes, shard: int, digest: bytes, prefixes: bytes = b"") -> None:
        """Who was to store this shard of a frame does not. For `Stack.on_unstored`, and for clients that say so.

        Nothing changes where somebody else has it or is filling it. A longer frame that begins with it goes instead.
        """
        wanted = self._wanted.get((namespace, digest))
        known = self._manager.index.namespaces.get(namespace)
        if not wanted or known is None:
            return
        entry = known.entries.get(digest)
        part = None if entry is None else entry.shards.get(shard)
        if part is not None and (part.present or part.filling):
            return
        pages = [prefixes[at : at + DIGEST_BYTES] for at in range(0, len(prefixes), DIGEST_BYTES)]
        longer = min(known.longer(pages, digest), key=lambda each: not each.ready, default=None)
        for transfer in self._wanted.pop((namespace, digest)):
            transfer.waiting.pop(digest, None)
            if longer is not None:
                del transfer.digests[digest]
                self._announce(transfer, longer.digest)
            transfer.more.set()

    def left(self, owner: object) -> None:
        """Who announced transfers has gone: what of them nobody has begun to store will not come."""
        for transfer in self._transfers.values():
            if transfer.owner is owner and transfer.state == "open":
                transfer.owner = None
                for digest in [d for d in transfer.waiting if not self._begun(transfer.namespace, d)]:
                    del transfer.waiting[digest]
                    self._want_no_more(transfer, digest)
                transfer.more.set()

    @staticmethod
    def _begun(namespace: NamespaceIndex, digest: bytes) -> bool:
        """Every shard of it is there or being filled."""
        entry = namespace.entries.get(digest)
        if entry is None or len(entry.shards) < namespace.shards:
            return False
        return all(part.present or part.filling for part in entry.shards.values())

    def _want_no_more(self, transfer: _Transfer, digest: bytes) -> None:
        key = transfer.namespace.id, digest
        wanted = self._wanted.get(key, set())
        wanted.discard(transfer)
        if not wanted:
            self._wanted.pop(key, None)

    # --- on its way --------------------------------------------------------------------------------------------------

    async def _run(self, transfer: _Transfer) -> None:
        state = "failed"
        try:
            link = self._peers.link(transfer.address)
            await self._admitted(transfer, link)
            while await self._something(transfer):
                await self._push(transfer, link)
            state = "complete"
        except asyncio.CancelledError:
            pass  # `abort` and `stop` have said what has become of it
        except LmkvError as e:
            log.warning("transfer %s to %s failed: %s", transfer.name, transfer.address, e, extra={"key": "transfer"})
        except Exception:
            log.exception("transfer %s to %s failed", transfer.name, transfer.address)
        finally:
            self._end(transfer, state)

    async def _admitted(self, transfer: _Transfer, link: PeerLink) -> None:
        """The other node has the same namespace, and room; mostly the proxy has asked it already."""
        text = self._manager.declared[transfer.namespace.id]
        await self._peers.attend(link.agree(text, time.monotonic() + STEP_SECONDS))
        begun = time.monotonic()
        asked = m.Admit(transfer.name, transfer.whole, transfer.namespace.id)
        while True:
            reply = await self._peers.attend(link.ask(asked, time.monotonic() + STEP_SECONDS))
            if isinstance(reply, m.Admitted):
                return
            if not isinstance(reply, m.NoRoom) or time.monotonic() - begun > self._seconds:
                raise BackendError(f"node {link.node} has no room for it", kind="no-room")
            await asyncio.sleep(min(5.0, max(0.05, reply.retry_after)))

    async def _something(self, transfer: _Transfer) -> bool:
        """Wait for something to push; False: all is done."""
        while not transfer.ready:
            if transfer.final and not transfer.waiting:
                return False
            left = transfer.heard + self._seconds - time.monotonic()
            if left <= 0:
                raise BackendError(f"nothing was heard of it for {self._seconds:g} s", kind="stalled")
            transfer.more.clear()
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(transfer.more.wait(), left)
        return True

    async def _push(self, transfer: _Transfer, link: PeerLink) -> None:
        batch, nbytes = [], 0
        while transfer.ready and nbytes < BATCH_BYTES:
            batch.append(transfer.ready.pop(0))
            nbytes += batch[-1].pages * transfer.namespace.page_total
        frames: list[Frame] = []
        try:
            for entry in batch:
                for shard in range(transfer.namespace.shards):
                    frames.append(await self._frame(entry, shard))  # noqa: PERF401  what is held so far is given back
            until = time.monotonic() + STEP_SECONDS
            outcomes = await self._peers.attend(link.push(frames, until, transfer=transfer.name))
        finally:
            try:
                await _sealed(frames)
            finally:
                for frame in frames:
                    frame.object.release("get")
                self._let_go(batch)
        bad = next((outcome for outcome in outcomes if not outcome.ok), None)
        if bad is not None:
            raise BackendError(f"a chunk was not taken: {bad.error or bad.kind.value}", kind="push")
        for entry in batch:
            transfer.digests[entry.digest] = entry.pages
        transfer.heard = time.monotonic()

    async def _frame(self, entry: Entry, shard: int) -> Frame:
        """A frame of a READY entry, in the pool; loaded first if need be."""
        obj = self._stack.in_pool(entry, shard)
        if obj is None:
            await self._stack.loads.load_one(entry, shard, priority=RUNNING)
            obj = self._stack.in_pool(entry, shard)
        if obj is None:
            raise BackendError("a chunk is no longer here", kind="gone")
        payload, sealed = entry.pages * entry.namespace.page_bytes[shard], None
        if not obj.sealed:
            sealed = self._crew.submit(complete, obj, self._stack.trailer(entry, shard))
        return Frame(entry.key(shard), entry.parent, entry.pages, entry.packed, obj, payload, sealed)

    # --- its end -----------------------------------------------------------------------------------------------------

    def _let_go(self, entries: Iterable[Entry]) -> None:
        entries = list(entries)
        for entry in entries:
            entry.let_go()
        self._stack.settle_all(entries)

    def _end(self, transfer: _Transfer, state: str) -> None:
        """Both sides hear of it; nothing stays held. Idempotent."""
        if transfer.state != "open":
            return
        transfer.state = state
        for digest in transfer.waiting:
            self._want_no_more(transfer, digest)
        transfer.waiting.clear()
        ready, transfer.ready = transfer.ready, []
        self._let_go(ready)
        self._manager.metrics.inc("lmkv_transfers_total", state=state, way="out")
        if not self._stopped:
            self._keep(asyncio.get_running_loop().create_task(self._tell(transfer, self._tokens(transfer))))

    async def _tell(self, transfer: _Transfer, tokens: int) -> None:
        finish = m.Finish(transfer.name, transfer.state, tokens)
        try:
            link = self._peers.link(transfer.address)
            await self._peers.attend(link.ask(finish, time.monotonic() + FINISH_SECONDS))
        except asyncio.CancelledError:
            pass
        except LmkvError as e:
            log.debug("transfer %s: %s could not be told of its end: %s", transfer.name, transfer.address, e)

    def _tokens(self, transfer: _Transfer) -> int:
        return transfer.pages() * self._manager.chunk_tokens // transfer.namespace.chunk_pages


async def _sealed(frames: Iterable[Frame]) -> None:
    """Wait until no thread writes trailers of them."""
    sealing = [asyncio.wrap_future(frame.sealed) for frame in frames if frame.sealed is not None]
    if sealing:
        await outlast(asyncio.gather(*sealing, return_exceptions=True))
