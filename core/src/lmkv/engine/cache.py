"""CacheEngine: what connectors and libraries call."""

from __future__ import annotations

from concurrent.futures import TimeoutError as FutureTimeoutError  # another class than TimeoutError before Python 3.11
from typing import TYPE_CHECKING, Any, Final, TypeVar

import numpy as np

from lmkv.engine.frames import digests_of, frame_of, masked_out, page_array, tail_of, token_array
from lmkv.engine.lookup import LookupTicket
from lmkv.engine.transfer import RetrieveItem, StoreItem, StoreResult, Transfer
from lmkv.errors import ClosedError, ConfigError, LmkvError
from lmkv.keys import Extras, KeyChain
from lmkv.layout import canonical_json
from lmkv.service.link import expect
from lmkv.service.protocol import (
    AwaitTransfer,
    Clear,
    Cleared,
    EndTransfer,
    GetHealth,
    HealthReport,
    Message,
    Move,
    Ok,
    Pin,
    Prefetch,
    Recode,
    Register,
    Release,
    Trim,
    Unpin,
)
from lmkv.service.protocol import Transfer as TransferMessage

if TYPE_CHECKING:
    from collections.abc import Sequence
    from concurrent.futures import Future
    from types import TracebackType

    from numpy.typing import NDArray
    from typing_extensions import Self

    from lmkv.gpu import GPUConnector
    from lmkv.keys import Namespace
    from lmkv.service.link import StorageClient
    from lmkv.service.protocol import Reply, Request

    Tokens = Sequence[int] | NDArray[Any]
    Mask = Sequence[bool] | NDArray[Any]

M = TypeVar("M", bound=Message)

CALL_SECONDS: Final = 10.0
MOVE_SECONDS: Final = 600.0
"""Moving and re-coding read and write every byte."""
NO_EXTRAS: Final = Extras()


class CacheEngine:
    """Stores, finds and brings back the KV pages of one shard of one namespace.

    Two sets of methods. By key, for connectors: `begin_lookup`, `store_frames`, `retrieve_frames`, `trim`, `release`,
    `transfer`, `await_transfer`, `end_transfer`. By tokens, for libraries: `store`, `retrieve`, `lookup` and the
    operator's methods. Stores and retrieves are advisory: what the service or a tier does wrong makes them do less, and
    is no exception. Thread-safe as far as the `GPUConnector` is.

    Attributes:
        client: the way to the service; closed by `close`.
        namespace: what the pages depend on besides tokens; registered with the service when the engine is made.
    """

    def __init__(
        self, client: StorageClient, namespace: Namespace, *, shard: int = 0, gpu: GPUConnector | None = None
    ) -> None:
        """Register the namespace; waits for the answer.

        Args:
            client: takes it over.
            namespace: see `lmkv.keys.Namespace`.
            shard: which part of each chunk this process holds.
            gpu: moves the pages; without it the engine can look up and do operator's work, but not move pages.

        Raises:
            ConfigError: the pages of `gpu` are not those of the namespace, or the service refuses it.
        """
        if not 0 <= shard < namespace.shards:
            raise ConfigError(f"shard {shard} of a namespace with {namespace.shards} shards")
        if gpu is not None and canonical_json(gpu.layout.describe()) != canonical_json(namespace.layouts[shard]):
            raise ConfigError(
                f"the page layout of the GPUConnector is not that of shard {shard} of the namespace: "
                f"{gpu.layout.describe()} is not {namespace.layouts[shard]}"
            )
        self.client = client
        self.namespace = namespace
        self._transfer = Transfer(client, namespace, shard, gpu)
        try:
            self._ask(Register(namespace.json()), Ok)
        except ClosedError:
            pass  # the client remembers it and registers as soon as the service is back
        except LmkvError as e:
            if e.kind == "deadline":
                return
            raise

    # --- by key ---

    def chain(self, extras: Extras = NO_EXTRAS) -> KeyChain:
        """An empty chain of this namespace's geometry."""
        return KeyChain(self.namespace.chunk_tokens, self.namespace.page_tokens, extras)

    def begin_lookup(
        self, chain: KeyChain, *, hold: bool = True, prefill_rate: float = 0.0, again: bool = False
    ) -> LookupTicket:
        """Ask how much of the chain's tokens is cached. Returns at once; never raises for what the service does.

        Asks for the full chunks and for the whole pages after them; if a full chunk is missing, for the pages of that
        one. With `hold`, what is found is leased and its loads begin. The chain may be extended meanwhile.

        `prefill_rate` is how many tokens the engine computes in a second, as measured. With it, the hit ends where
        loading more would take longer than computing it, and `Hit.withheld_tokens` says how much that leaves out. At 0
        (unknown) nothing is left out for that. `again`: the request was looked up before, and counted.
        """
        connection = None
        error: BaseException | None = None
        try:
            connection = self.client.connection()
        except ClosedError as e:
            error = e
        ticket = LookupTicket(connection, self.namespace.id, chain, hold=hold, prefill_rate=prefill_rate, again=again)
        ticket.error = error
        ticket.begin()
        return ticket

    def store_frames(self, items: Sequence[StoreItem], *, stream: Any = None) -> list[StoreResult]:
        """Copy pages into new frames, a batch at a time; one result for each item.

        Blocks; the pages must not be written to until it returns. Never raises for what the service does.
        """
        return self._transfer.store(items, stream=stream)

    def retrieve_frames(
        self,
        lease: int,
        items: Sequence[RetrieveItem],
        *,
        stream: Any = None,
        layers: range | None = None,
        timeout: float = 30.0,
        last: bool = False,
    ) -> list[bool]:
        """Copy leased frames into pages, in the order of `items`; True for each that arrived whole and verified.

        The first failure makes that item and all after it False; pages of those may have been written to. Blocks, at
        most about `timeout` seconds. Never raises for what the service does. Does not end the lease.

        With `last`, this shard of these frames is not asked for again: the lease lets go of what all have copied, so
        that more may be loaded than the pool has room for.
        """
        return self._transfer.retrieve(lease, items, stream=stream, layers=layers, timeout=timeout, last=last)

    def trim(self, lease: int, skip: int) -> None:
        """The first `skip` chunks of the lease are not needed. Never waits."""
        if lease and skip > 0:
            self.client.send(Trim(lease, skip))

    def release(self, lease: int) -> None:
        """End a lease. Idempotent; never waits."""
        if lease:
            self.client.send(Release(lease))

    # --- between nodes ---

    def transfer(self, name: str, peer: str, digests: Sequence[bytes], *, tokens: int, final: bool) -> Future[Reply]:
        """Have chunks of a request pushed to another node, each as soon as it is stored here. Never waits.

        Called again with more of them, in the order of the prompt; `final` with the last. What is not final when this
        client goes is given up, on both nodes.

        Args:
            name: of the transfer; unique.
            peer: `host:port` of the other node's peer port.
            digests: of chunks and, at the end, of the tail.
            tokens: of the whole request.
            final: no more will come.

        Returns:
            `Ok`, or why the service does not do it; what comes of it later only the other node knows.
        """
        blob = b"".join(digests)
        return self.client.call(TransferMessage(name, peer, self.namespace.id, blob, tokens, final))

    def await_transfer(self, name: str, seconds: float) -> Future[Reply]:
        """A `TransferState` when a transfer to this node has ended or is not known, after `seconds` at the latest.

        What has come by then is found by look-ups, and kept for them until `end_transfer`.
        """
        return self.client.call(AwaitTransfer(name, seconds))

    def end_transfer(self, name: str) -> None:
        """The transfer, begun or awaited here, is of no more use: nothing is pushed or kept for it. Never waits."""
        self.client.send(EndTransfer(name))

    # --- by tokens ---

    def store(
        self,
        tokens: Tokens,
        page_ids: Sequence[int] | NDArray[Any],
        mask: Mask | None = None,
        extras: Extras = NO_EXTRAS,
    ) -> NDArray[np.bool_]:
        """Store the pages of a token sequence.

        Args:
            tokens: all tokens from the start of the sequence.
            page_ids: the engine page of each run of `page_tokens` tokens, from the start; a begun last one is optional.
            mask: bool per token, False for a prefix that need not be stored; a whole number of pages. A chunk that the
                border falls into is stored whole, so that all its pages must be there.
            extras: what else the KV depends on.

        Returns:
            Bool per token: it was to be stored and is in the cache now. Whole pages after the last full chunk are
            stored too, unless the service is configured with `tail: none`.

        Raises:
            ConfigError: arguments that do not fit together (kind `input`); nothing has been stored then.
        """
        ids = token_array(tokens)
        size = self.namespace.page_tokens
        skip = masked_out(mask, len(ids), size)
        pages = page_array(page_ids, len(ids), size)
        chain = self._chain_of(ids, extras)
        per_chunk = chain.chunk_tokens // size
        begin = skip // chain.chunk_tokens
        items = [
            StoreItem(frame_of(chain, i), pages[i * per_chunk : (i + 1) * per_chunk])
            for i in range(begin, len(chain.digests))
        ]
        tail = tail_of(chain) if self.client.welcome.tail == "pages" else None
        if tail is not None:
            at = len(chain.digests) * per_chunk
            if skip < (at + tail.pages) * size:
                items.append(StoreItem(tail, pages[at : at + tail.pages]))
        stored = np.zeros(len(ids), np.bool_)
        at = begin * chain.chunk_tokens
        for item, result in zip(items, self.store_frames(items), strict=True):
            end = at + item.frame.pages * size
            stored[max(at, skip) : end] = result in {StoreResult.STORED, StoreResult.PRESENT}
            at = end
        return stored

    def retrieve(
        self,
        tokens: Tokens,
        page_ids: Sequence[int] | NDArray[Any],
        mask: Mask | None = None,
        extras: Extras = NO_EXTRAS,
    ) -> NDArray[np.bool_]:
        """Bring back the pages of the longest cached prefix of a token sequence.

        Args:
            tokens: all tokens from the start of the sequence.
            page_ids: where to, see `store`.
            mask: bool per token, False for a prefix that the caller has already; a whole number of pages, which are not
                written to.
            extras: as when it was stored.

        Returns:
            Bool per token: it was asked for and its page now holds it. Pages of the others may have been written to.

        Raises:
            ConfigError: arguments that do not fit together (kind `input`); nothing has been written then.
        """
        ids = token_array(tokens)
        size = self.namespace.page_tokens
        skip = masked_out(mask, len(ids), size)
        pages = page_array(page_ids, len(ids), size)
        arrived = np.zeros(len(ids), np.bool_)
        _ = self._transfer.gpu  # before anything is leased
        ticket = self.begin_lookup(self._chain_of(ids, extras))
        hit = ticket.wait(CALL_SECONDS)
        if hit is None or hit.tokens <= skip:
            ticket.cancel()
            return arrived
        per_chunk = self.namespace.chunk_tokens // size
        begin = skip // self.namespace.chunk_tokens
        self.trim(hit.lease, begin)
        items: list[RetrieveItem] = []
        for i in range(begin, hit.chunks + (hit.pages > 0)):
            held = per_chunk if i < hit.chunks else 0
            first = max(0, skip // size - i * per_chunk)
            end = i * per_chunk + (held or hit.pages)
            items.append(RetrieveItem(i, held, pages[i * per_chunk + first : end], first))
        at = skip
        try:
            for item, ok in zip(items, self.retrieve_frames(hit.lease, items, last=True), strict=True):
                if not ok:
                    break
                arrived[at : at + len(item.pages) * size] = True
                at += len(item.pages) * size
        finally:
            self.release(hit.lease)
        return arrived

    def lookup(self, tokens: Tokens, extras: Extras = NO_EXTRAS, *, prefill_rate: float = 0.0) -> int:
        """How many leading tokens are cached; a whole number of pages. 0 when the service does not answer.

        With `prefill_rate`, see `begin_lookup`, how many it pays to load.
        """
        chain = self._chain_of(token_array(tokens), extras)
        ticket = self.begin_lookup(chain, hold=False, prefill_rate=prefill_rate)
        hit = ticket.wait(CALL_SECONDS)
        return 0 if hit is None else hit.tokens

    def prefetch(self, tokens: Tokens, extras: Extras = NO_EXTRAS) -> int:
        """Begin to load the cached chunks into the fastest tier; how many are there or on their way."""
        return self._ask(Prefetch(self.namespace.id, self._named(tokens, extras)), Ok).count

    def pin(self, tokens: Tokens, seconds: float | None = None, extras: Extras = NO_EXTRAS) -> int:
        """Keep the cached chunks from eviction for `seconds` (None: until `unpin`); how many there were."""
        return self._ask(Pin(self.namespace.id, self._named(tokens, extras), seconds), Ok).count

    def unpin(self, tokens: Tokens, extras: Extras = NO_EXTRAS) -> int:
        """Take pins away; from how many chunks."""
        return self._ask(Unpin(self.namespace.id, self._named(tokens, extras)), Ok).count

    def move(self, tokens: Tokens, source: str, target: str, *, keep: bool = False, extras: Extras = NO_EXTRAS) -> int:
        """Move (with `keep`: copy) the chunks that lie in tier `source` to tier `target`; how many."""
        request = Move(self.namespace.id, self._named(tokens, extras), source, target, keep)
        return self._ask(request, Ok, MOVE_SECONDS).count

    def compress(self, tokens: Tokens, tier: str, codec: str, extras: Extras = NO_EXTRAS) -> int:
        """Store the chunks of a tier anew with `codec`; how many. A chain is named as in frames: ``zstd+aes-gcm``.

        Raises:
            PluginError: there is no such codec.
            ConfigError: it needs options that no tier has, or the tier encrypts and `codec` does not.
        """
        return self._ask(Recode(self.namespace.id, self._named(tokens, extras), tier, codec), Ok, MOVE_SECONDS).count

    def decompress(self, tokens: Tokens, tier: str, extras: Extras = NO_EXTRAS) -> int:
        """Store the chunks of a tier anew as they are in memory; how many."""
        return self.compress(tokens, tier, "identity", extras)

    def clear(self, tier: str | None = None) -> dict[str, int]:
        """Remove all of this namespace (from one tier); tier → chunk shards removed. Held ones go when released."""
        return self._ask(Clear(self.namespace.id, tier), Cleared).counts

    def health(self) -> HealthReport:
        """State of the service; `closed` when it cannot be reached."""
        try:
            return self._ask(GetHealth(), HealthReport)
        except ClosedError:
            return HealthReport("closed", {}, {}, {})

    def close(self) -> None:
        """Close the client. Idempotent."""
        self.client.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _chain_of(self, ids: NDArray[np.uint32], extras: Extras) -> KeyChain:
        chain = self.chain(extras)
        chain.extend(ids)
        return chain

    def _named(self, tokens: Tokens, extras: Extras) -> bytes:
        return digests_of(self._chain_of(token_array(tokens), extras))

    def _ask(self, request: Request, kind: type[M], seconds: float = CALL_SECONDS) -> M:
        future = self.client.call(request)
        try:
            return expect(future.result(seconds), kind)
        except (TimeoutError, FutureTimeoutError):
            raise LmkvError(
                f"no answer to {type(request).__name__} within {seconds:g} s", kind="deadline", retryable=True
            ) from None
