"""A fake vLLM: its scheduler's order of calls and block ownership, and a model that notices every wrong byte.

The KV of a token is a digest of all tokens up to it (and of the rank), so that what a page must hold is known.
Computing a token first checks the KV of every token before it, as attention would read it. What follows the real one:

* a finished or preempted request's blocks are free at once, and may be given to others in the next `schedule`;
* an aborted request whose load is under way keeps its blocks until the load is reported;
* `update_state_after_alloc` is called again after a load; `get_num_new_matched_tokens` only if nothing is computed;
* a load that failed from block i on leaves `i * page` computed tokens; with none, all blocks go and it is asked anew;
* reports for unknown requests stop the engine.
"""

from __future__ import annotations

import hashlib
import pickle
import struct
import time
from collections import OrderedDict, deque
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np

from lmkv.config import load_config
from lmkv.gpu import CPUConnector
from lmkv.layout import PageLayout, PageRun
from lmkv.observe.clients import Who
from lmkv.plugins import PluginHost
from lmkv.service import LocalClient, ThreadHost
from lmkv_vllm.geometry import Geometry
from lmkv_vllm.metadata import Handshake
from lmkv_vllm.scheduler import SchedulerSide
from lmkv_vllm.settings import Settings
from lmkv_vllm.worker import WorkerSide

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

PAGE = 2
CHUNK = 4
LAYERS = 2
SLOT = 8
"""Bytes of one token in one layer."""
SENTINEL = 0xEE


def kv(tokens: list[int], salt: str, rank: int) -> list[bytes]:
    """The KV of each token, all layers: depends on everything before it."""
    state = hashlib.blake2b(f"{salt}/{rank}".encode(), digest_size=SLOT * LAYERS)
    out = []
    for token in tokens:
        state.update(struct.pack("<I", token))
        out.append(state.digest())
    return out


def next_token(tokens: list[int], salt: str) -> int:
    """What the model says after these tokens."""
    return int.from_bytes(kv(tokens, salt, 99)[-1][:2], "little") % 50


@dataclass(eq=False)
class Request:
    """What the connector sees of vLLM's Request."""

    request_id: str
    prompt_token_ids: list[int]
    max_tokens: int = 3
    cache_salt: str | None = None
    skip_reading_prefix_cache: bool = False
    lora_request: Any = None
    mm_features: list[Any] = field(default_factory=list)
    prompt_embeds: Any = None
    resumable: bool = False
    kv_transfer_params: dict[str, Any] | None = None
    answered: dict[str, Any] | None = None
    """What the connector gave back at the end."""
    num_computed_tokens: int = 0
    num_preemptions: int = 0
    num_in_flight_tokens: int = 0
    status: str = "WAITING"
    blocks: list[int] = field(default_factory=list)
    local: int = 0
    """Tokens that the engine's own prefix cache had at the last admission."""
    offered: int | None = None
    external: int = 0
    """Tokens loaded in the last admission."""

    def __post_init__(self) -> None:
        self._all_token_ids = list(self.prompt_token_ids)

    @property
    def num_tokens(self) -> int:
        return len(self._all_token_ids)

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt_token_ids)

    @property
    def output(self) -> list[int]:
        return self._all_token_ids[self.num_prompt_tokens :]


class Blocks:
    """The block pool: freed blocks keep what they hold, and are found by it, until they are given to somebody else."""

    def __init__(self, count: int, *, caching: bool) -> None:
        self.caching = caching
        self.free: OrderedDict[int, None] = OrderedDict.fromkeys(range(1, count))  # block 0 is the null block
        self._users: dict[int, int] = {}
        self._found: dict[tuple[Any, ...], int] = {}
        self._name: dict[int, tuple[Any, ...]] = {}

    @staticmethod
    def _key(request: Request, page: int) -> tuple[Any, ...]:
        return (request.cache_salt, *request._all_token_ids[: (page + 1) * PAGE])

    def cached(self, request: Request) -> list[int]:
        """Blocks of the leading whole pages that are here; never the page of the last token."""
        blocks: list[int] = []
        if not self.caching or request.skip_reading_prefix_cache:
            return blocks
        for page in range((request.num_tokens - 1) // PAGE):
            block = self._found.get(self._key(request, page))
            if block is None:
                break
            blocks.append(block)
        return blocks

    def use(self, blocks: list[int]) -> None:
        for block in blocks:
            self.free.pop(block, None)
            self._users[block] = self._users.get(block, 0) + 1

    def allocate(self, count: int) -> list[int] | None:
        if count > len(self.free):
            return None
        blocks = [self.free.popitem(last=False)[0] for _ in range(count)]
        for block in blocks:
            self._found.pop(self._name.pop(block, ()), None)
            self._users[block] = 1
        return blocks

    def name(self, request: Request, tokens: int) -> None:
        """The first `tokens` of a request are computed, or will be in this step."""
        if self.caching:
            for page in range(min(tokens, request.num_tokens) // PAGE):
                key, block = self._key(request, page), request.blocks[page]
                if key not in self._found and block not in self._name:
                    self._found[key], self._name[block] = block, key

    def release(self, blocks: list[int]) -> None:
        for block in reversed(blocks):
            self._users[block] -= 1
            if not self._users[block]:
                self.free[block] = None

    def forget(self) -> None:
        """The engine's own reset of its prefix cache."""
        self._found.clear()
        self._name.clear()


class FakeLink:
    """A link that is there from the start."""

    def __init__(self, client: Any) -> None:
        self.client = client

    def when_ready(self, callback: Any) -> None:
        callback()

    def close(self) -> None:
        self.client.close()


def stack(**more: Any) -> Any:
    """A small stack: RAM only, chunks of 4 tokens."""
    settings: dict[str, Any] = {
        "chunk_tokens": CHUNK,
        "pool": {"size": "8MiB", "prefault": False, "hugepages": "off"},
        "tiers": [{"name": "ram", "backend": "cpu", "capacity": "4MiB"}],
        **more,
    }
    return load_config(settings, host=PluginHost.discover(), environ={})


class FakeVLLM:
    """One engine: scheduler, `ranks` workers, and both sides of the connector around a service in a thread."""

    def __init__(
        self,
        host: ThreadHost | None,
        *,
        links: Sequence[Any] = (),
        blocks: int = 64,
        ranks: int = 1,
        budget: int = 16,
        caching: bool = False,
        settings: Settings | None = None,
        loads: bool = True,
        saves: bool = True,
        instance: str = "engine",
    ) -> None:
        # The real deadline is one of real time, and two busy cores may miss it.
        self.settings = settings or Settings(lookup_deadline=10.0)
        self.budget = budget
        self.ranks = ranks
        self.blocks = Blocks(blocks, caching=caching)
        self.kv = [np.full((blocks, LAYERS, PAGE, SLOT), SENTINEL, np.uint8) for _ in range(ranks)]
        self.requests: dict[str, Request] = {}
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.received: set[str] = set()
        self.failed: set[str] = set()
        self.finished_ids: set[str] = set()
        self._receiving: dict[str, int] = {}
        self.steps = 0
        self.computed = 0
        """Tokens computed by the model."""
        self.seconds_per_token = 0.0
        page_bytes = PAGE * SLOT
        runs = tuple(PageRun(0, layer * page_bytes, LAYERS * page_bytes, page_bytes) for layer in range(LAYERS))
        layout = PageLayout("fake", "u8", PAGE, runs)
        self.links = list(links)
        """Of the scheduler and of each rank."""
        if host is not None:
            names = ["scheduler", *map(str, range(ranks))]
            clients = [LocalClient(host, f"fake-{name}", Who("fake", name, instance)) for name in names]
            self.links = [FakeLink(client) for client in clients]
        self.scheduler = SchedulerSide(
            self.settings,
            self.links[0],
            Geometry(PAGE, blocks, volatile_tail=False),
            ("fake", "r1", {}),
            workers=ranks,
            loads=loads,
            saves=saves,
        )
        self.workers = [
            WorkerSide(
                self.settings,
                self.links[rank + 1],
                CPUConnector(layout, [self.kv[rank]]),
                rank,
            )
            for rank in range(ranks)
        ]
        self.scheduler.handshakes({(0, rank): Handshake(layout.describe(), layout.page_bytes) for rank in range(ranks)})
        self.scheduler._epochs.take()  # for tests that want its cache engine before there is a request

    # --- what a user does ---

    def add(self, request: Request) -> Request:
        self.requests[request.request_id] = request
        self.waiting.append(request)
        self.scheduler.arrived(request)
        return request

    def abort(self, request: Request) -> None:
        if request.request_id not in self.requests or request.status.startswith("FINISHED"):
            return
        loading = request.status == "WAITING_FOR_REMOTE_KVS" and request.request_id not in self.received
        self.received.discard(request.request_id)
        self.failed.discard(request.request_id)
        if request in self.running:
            self.running.remove(request)
        if request in self.waiting:
            self.waiting.remove(request)
        self._finish(request, "FINISHED_ABORTED", keep_blocks=loading)

    def run(self, requests: Iterable[Request] = (), limit: int = 3000) -> None:
        """Step until all is done, the saves too."""
        for request in requests:
            self.add(request)
        idle = 0
        while self.requests or self.finished_ids:
            before = self.computed
            self.step()
            if self.computed == before:
                time.sleep(0.0002)
                idle += 1
            assert max(self.steps, idle) < limit, f"stuck with {list(self.requests.values())}"
        self.settle()

    def settle(self, seconds: float = 5.0) -> None:
        """Wait for the saves under way."""
        until = time.monotonic() + seconds
        while any(worker._saves for worker in self.workers):
            assert time.monotonic() < until, "saves do not end"
            time.sleep(0.0005)

    def ask(self, tokens: list[int], **more: Any) -> Request:
        """One request, from start to end."""
        request = Request(f"r{self.steps}-{len(tokens)}-{time.monotonic_ns()}", tokens, **more)
        self.run([request])
        return request

    def close(self) -> None:
        self.scheduler.shutdown()
        for worker in self.workers:
            worker.shutdown()
        for link in self.links:
            link.close()

    # --- one step, as EngineCore.step does it ---

    def step(self) -> None:
        self.steps += 1
        output = self._schedule()
        meta = self.scheduler.step(output)
        for request_id, count in output.num_scheduled_tokens.items():
            self.requests[request_id].num_computed_tokens += count
        bad: set[int] = set()
        report: Any = None
        done: set[str] = set()
        for worker in self.workers:  # each gets a message of its own
            mine = pickle.loads(pickle.dumps(meta))
            worker.before_step(mine)
            rank = self.workers.index(worker)
            for request_id, count in output.num_scheduled_tokens.items():
                self._compute(self.requests[request_id], count, rank)
            worker.start(mine)
            worker.after_step(mine)
            for request_id in worker.received(idle=mine.idle):
                self._receiving[request_id] = self._receiving.get(request_id, 0) + 1
                if self._receiving[request_id] == self.ranks:
                    del self._receiving[request_id]
                    done.add(request_id)
            bad |= worker.bad_pages()
            mine = worker.report()
            if mine is not None:
                report = mine if report is None else report.aggregate(mine)
        self._update(output, bad, pickle.loads(pickle.dumps(report)), done)
        self.scheduler.processed()

    def _schedule(self) -> Any:  # noqa: C901, PLR0912  in the order of the original
        scheduled: dict[str, int] = {}
        fresh: dict[str, list[int]] = {}
        new, resumed, preempted = [], [], []
        budget = self.budget
        for request in list(self.running):
            if request not in self.running or budget <= 0:
                continue
            count = min(request.num_tokens - request.num_computed_tokens, budget)
            while (blocks := self._allocate(request, request.num_computed_tokens + count)) is None:
                victim = self.running.pop()
                if victim.request_id in scheduled:
                    budget += scheduled.pop(victim.request_id)
                    fresh.pop(victim.request_id)
                self._preempt(victim)
                preempted.append(victim)
                if victim is request:
                    break
            else:
                self.blocks.name(request, request.num_computed_tokens + count)
                scheduled[request.request_id] = count
                fresh[request.request_id] = blocks
                budget -= count
        skipped: list[Request] = []
        self.waiting = deque(sorted(self.waiting, key=lambda r: not r.blocks))  # those that hold blocks come first
        while not preempted and self.waiting and budget > 0:
            request = self.waiting.popleft()
            if not self._ready(request):
                skipped.append(request)
                continue
            external = 0
            cached: list[int] = []
            if request.num_computed_tokens == 0:
                cached = self.blocks.cached(request)
                local = request.local = len(cached) * PAGE
                count, later = self.scheduler.offered(request, local)
                if request.skip_reading_prefix_cache:
                    count, later = 0, False
                if count is None:
                    skipped.append(request)
                    continue
                assert not (count == 0 and later)
                assert count % PAGE == 0
                assert local + count < request.num_tokens
                external, request.offered = count, count
                if external:
                    # A load holds its blocks without progress: admitted only if all prefills under way still fit.
                    fits = -(-request.num_tokens // PAGE) + self._reserved() <= len(self.blocks.free)
                    if not fits or self._allocate(request, local + external, cached) is None:
                        self.waiting.appendleft(request)
                        break
                    request.external = external
                    self.scheduler.admitted(request, list(request.blocks), external)
                    request.status = "WAITING_FOR_REMOTE_KVS"
                    request.num_computed_tokens = local + external
                    skipped.append(request)
                    continue
                computed = local
            else:
                computed = request.num_computed_tokens
            count = min(request.num_tokens - computed, budget)
            if self._allocate(request, computed + count, cached) is None:
                self.waiting.appendleft(request)
                break
            self.blocks.name(request, computed + count)
            self.scheduler.admitted(request, list(request.blocks), 0)
            (resumed if request.num_preemptions else new).append(request)
            request.num_computed_tokens = computed
            request.status = "RUNNING"
            self.running.append(request)
            scheduled[request.request_id] = count
            budget -= count
        self.waiting.extendleft(reversed(skipped))
        finished, self.finished_ids = self.finished_ids, set()
        old = [self.requests[i] for i in fresh]
        return SimpleNamespace(
            scheduled_new_reqs=[
                SimpleNamespace(
                    req_id=r.request_id, block_ids=(list(r.blocks),), num_computed_tokens=r.num_computed_tokens
                )
                for r in new
            ],
            scheduled_cached_reqs=SimpleNamespace(
                req_ids=[r.request_id for r in [*old, *resumed]],
                resumed_req_ids={r.request_id for r in resumed},
                new_block_ids=[(b,) if b else None for b in fresh.values()] + [(list(r.blocks),) for r in resumed],
                num_computed_tokens=[r.num_computed_tokens for r in [*old, *resumed]],
            ),
            num_scheduled_tokens=scheduled,
            scheduled_spec_decode_tokens={},
            scheduled_encoder_inputs={},
            total_num_scheduled_tokens=sum(scheduled.values()),
            preempted_req_ids={r.request_id for r in preempted},
            finished_req_ids=finished,
            kv_connector_block_state=SimpleNamespace(get_block_ids=lambda i: (list(self.requests[i].blocks),)),
        )

    def _ready(self, request: Request) -> bool:
        if request.status != "WAITING_FOR_REMOTE_KVS":
            return True
        if request.request_id not in self.received:
            return False
        self.received.remove(request.request_id)
        if request.request_id in self.failed:
            self.failed.remove(request.request_id)
            if request.num_computed_tokens == 0:
                self._release(request)
        self.blocks.name(request, request.num_computed_tokens)
        request.status = "PREEMPTED" if request.num_preemptions else "WAITING"
        return True

    def _allocate(self, request: Request, tokens: int, cached: list[int] | None = None) -> list[int] | None:
        """Blocks for `tokens`, of which `cached` hold the first; the new ones, or None when there are not enough."""
        cached = cached or []
        taken = sum(1 for block in cached if block in self.blocks.free)
        missing = -(-tokens // PAGE) - len(request.blocks) - len(cached)
        if missing > len(self.blocks.free) - taken:
            return None
        self.blocks.use(cached)
        fresh = self.blocks.allocate(max(0, missing))
        assert fresh is not None
        request.blocks += [*cached, *fresh]
        return fresh

    @staticmethod
    def _missing(request: Request) -> int:
        return -(-request.num_tokens // PAGE) - len(request.blocks)

    def _reserved(self) -> int:
        """Blocks that prefills and loads under way still need."""
        under_way = [r for r in self.requests.values() if r.blocks and r.num_computed_tokens < r.num_tokens]
        return sum(self._missing(r) for r in under_way)

    def _release(self, request: Request) -> None:
        self.blocks.release(request.blocks)
        request.blocks = []

    def _preempt(self, request: Request) -> None:
        self._release(request)
        request.num_computed_tokens = 0
        request.num_preemptions += 1
        request.status = "PREEMPTED"
        self.waiting.appendleft(request)

    def _finish(self, request: Request, status: str, *, keep_blocks: bool = False) -> None:
        request.status = status
        whole = -(-request.num_computed_tokens // PAGE)
        request.answered = self.scheduler.finished(request, request.blocks[:whole])
        self.finished_ids.add(request.request_id)
        if not keep_blocks:
            self._release(request)
            del self.requests[request.request_id]

    # --- the model ---

    def _write(self, request: Request, first: int, stop: int, rank: int) -> None:
        values = kv(request._all_token_ids[:stop], request.cache_salt or "", rank)
        for i in range(first, stop):
            self.kv[rank][request.blocks[i // PAGE], :, i % PAGE] = np.frombuffer(values[i], np.uint8).reshape(
                LAYERS, SLOT
            )

    def holds(self, request: Request, first: int, stop: int, rank: int = 0) -> bool:
        """Whether the pages hold the KV of these tokens."""
        values = kv(request._all_token_ids[:stop], request.cache_salt or "", rank)
        return all(
            self.kv[rank][request.blocks[i // PAGE], :, i % PAGE].tobytes() == values[i] for i in range(first, stop)
        )

    def _compute(self, request: Request, count: int, rank: int) -> None:
        stop = request.num_computed_tokens
        first = stop - count
        assert self.holds(request, 0, first, rank), f"{request.request_id}: wrong KV before token {first}"
        self._write(request, first, stop, rank)
        if rank == 0:
            self.computed += count
            time.sleep(count * self.seconds_per_token)

    def _update(self, output: Any, bad: set[int], report: Any, done: set[str]) -> None:
        for request in self.waiting:
            if request.status != "WAITING_FOR_REMOTE_KVS":
                continue
            whole = -(-request.num_computed_tokens // PAGE)
            broken = [i for i, block in enumerate(request.blocks[:whole]) if block in bad]
            if broken:
                request.num_computed_tokens = broken[0] * PAGE
                self.failed.add(request.request_id)
        for request in self.running:
            assert not bad.intersection(request.blocks)
        for request_id in output.num_scheduled_tokens:
            request = self.requests[request_id]
            if request.num_computed_tokens < request.num_tokens:
                continue
            request._all_token_ids.append(next_token(request._all_token_ids, request.cache_salt or ""))
            if len(request.output) >= request.max_tokens:
                self.running.remove(request)
                self._finish(request, "FINISHED_STOPPED")
        self.scheduler.reported(report, done)
        for request_id in done:
            request = self.requests[request_id]  # vLLM asserts the same
            if request.status == "WAITING_FOR_REMOTE_KVS":
                self.received.add(request_id)
            else:
                assert request.status.startswith("FINISHED")
                self._release(request)
                del self.requests[request_id]


def truth(tokens: list[int], count: int, salt: str = "") -> list[int]:
    """The answer without any cache."""
    tokens = list(tokens)
    for _ in range(count):
        tokens.append(next_token(tokens, salt))
    return tokens[-count:]
