"""Scheduler side: looks requests up, decides what is loaded and what is saved. All on vLLM's scheduler thread.

The life of a request here:

    arrived ──► asked ──► admitted (load, or nothing to load) ──► running, saved chunk by chunk ──► finished, tail saved
                  ▲                                                  │
                  └─────────────── preempted ◄───────────────────────┘

Whatever a look-up holds is let go by `Question.cancel`, at whichever exit comes first.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, Final

from lmkv.errors import ConfigError
from lmkv.service.protocol import Observe
from lmkv_vllm.epochs import Epochs
from lmkv_vllm.geometry import same_pages
from lmkv_vllm.guard import INCIDENTS
from lmkv_vllm.identity import RequestExtras, cacheable
from lmkv_vllm.lookups import NOTHING, Asking, Hasher, Question, patience, tokens_from
from lmkv_vllm.metadata import Load, LoadItem, Save, StepMetadata
from lmkv_vllm.rate import PrefillRate
from lmkv_vllm.requests import Tracked, hits_of, load_items
from lmkv_vllm.saving import Saves, frames_of, tried, written_pages
from lmkv_vllm.transfers import rest, transfer_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from lmkv.engine import CacheEngine, Hit
    from lmkv_vllm.geometry import Geometry
    from lmkv_vllm.link import Link
    from lmkv_vllm.metadata import Handshake, WorkerReport
    from lmkv_vllm.settings import Settings

FIRST_WAIT: Final = 0.0005
"""Seconds that the first question about a request waits for the answer: saying *later* costs a whole engine step."""
HELD_AT_ONCE: Final = 64
"""Requests in the queue that are looked up, and whose hits are held, before their turn comes."""


class SchedulerSide:
    """See the module. Not thread-safe.

    Args:
        model: name, revision and what else the weights depend on (`identity.model_identity`).
        workers: reports that make a save finished.
        loads: this engine reads from the cache.
        saves: this engine writes to it.
    """

    def __init__(
        self,
        settings: Settings,
        link: Link,
        geometry: Geometry,
        model: tuple[str, str, Mapping[str, str]],
        *,
        workers: int,
        loads: bool = True,
        saves: bool = True,
    ) -> None:
        self._settings = settings
        self._link = link
        self._geometry = geometry
        self._epochs = Epochs(link, model, geometry.page_tokens, settings.load_deadline)
        self._reads = loads
        self._writes = saves
        self._extras = RequestExtras()
        self._hasher = Hasher()
        self._tracked: dict[str, Tracked] = {}
        self._loading: dict[str, Tracked] = {}
        self._held = 0
        self._finished: list[tuple[Tracked, int, list[int]]] = []
        self._loads: list[Load] = []
        self._saves = Saves(workers)
        self._counts: dict[str, float] = {}
        self._rate = PrefillRate()

    # --- start and stop ---

    def handshakes(self, by_rank: Mapping[tuple[int, int], Handshake]) -> None:
        """Every worker's page layout, by (pp rank, tp rank): now the namespace can be built. Raises `ConfigError`."""
        handshakes = [by_rank[rank] for rank in sorted(by_rank)]
        pages = same_pages([h.layout for h in handshakes])
        if pages != self._geometry.page_tokens:
            raise ConfigError(f"the workers' blocks have {pages} tokens, the scheduler's {self._geometry.page_tokens}")
        self._epochs.handshakes = handshakes
        self._link.when_ready(self._epochs.connect)

    @property
    def _engine(self) -> CacheEngine | None:
        return self._epochs.engine

    def shutdown(self) -> None:
        """Let go of everything. Idempotent; waits about a second at most."""
        for tracked in [*self._tracked.values(), *self._loading.values()]:
            self._leave(tracked)
        self._tracked.clear()
        self._loading.clear()
        self._hasher.close(1.0)
        self._epochs.close(1.0)

    # --- look-up ---

    def arrived(self, request: Any) -> None:
        """A new request: begin to look it up while it waits in the engine's queue."""
        self._epochs.take()
        engine = self._engine
        if engine is None or not cacheable(request):
            return
        readable = self._reads and not request.skip_reading_prefix_cache
        if not readable and not self._writes:
            return
        tracked = Tracked(request, engine.chain(self._extras.of(request)), readable)
        self._tracked[request.request_id] = tracked
        tracked.transfer = transfer = transfer_of(request, engine, self._settings.transfer_deadline)
        if self._held < HELD_AT_ONCE and (transfer is None or not transfer.waits(time.monotonic())):
            self._begin(engine, tracked)

    def offered(self, request: Any, computed: int) -> tuple[int | None, bool]:
        """Tokens beyond `computed` that can be loaded, or None: ask again. Changes nothing that the engine notices."""
        tracked = self._tracked.get(request.request_id)
        if tracked is None or not tracked.readable or tracked.admitted == request.num_preemptions:
            return 0, False
        page = self._geometry.page_tokens
        # The last token is always computed; pages are whole, so the page that it lies in is never touched.
        wanted = (request.num_tokens - 1) // page * page
        if wanted <= computed:
            return 0, False
        hit = self._answer(tracked)
        if hit is None:
            return None, False
        count = max(0, min(hit.tokens, wanted) - computed) // page * page
        tracked.offer = (computed, count)
        return count, count > 0

    def _begin(self, engine: CacheEngine, tracked: Tracked) -> Question:
        about = Asking(tracked.readable, self._rate.tokens_per_second, tracked.asked)
        question = self._hasher.begin(engine, tracked.chain, tracked.request, about)
        tracked.question, tracked.asked = question, True
        self._held += 1
        return question

    def _answer(self, tracked: Tracked) -> Hit | None:
        """The hit; None while there is time left to wait for it."""
        engine, question, now = self._engine, tracked.question, time.monotonic()
        if engine is None or not engine.client.connected:
            return NOTHING
        if tracked.transfer is not None and tracked.transfer.waits(now):
            return None
        if question is not None and question.hashed:
            other = question.incarnation != engine.client.incarnation
            if other or now - question.begun > self._epochs.held_seconds:
                self._let_go(tracked)
                question = None
        if question is None:
            question = self._begin(engine, tracked)
        first = not question.deadline
        if first:
            question.deadline = now + self._patience(engine, tracked)
        hit = question.answer(FIRST_WAIT if first else 0.0)
        if hit is not None or now < question.deadline:
            return hit
        waited = (now - question.begun) * 1000
        INCIDENTS.note("look-up", f"no answer within {waited:.0f} ms: counted as a miss")
        question.cancel()
        self._held -= 1
        return NOTHING

    def _patience(self, engine: CacheEngine, tracked: Tracked) -> float:
        given, rate = self._settings.lookup_deadline, self._rate.tokens_per_second
        asks = engine.client.welcome.asks
        return patience(tracked.request.num_tokens, rate, asks=asks) if given is None else given

    def _let_go(self, tracked: Tracked) -> None:
        """Give back what the look-up holds, now or when it answers. Idempotent."""
        question = tracked.question
        if question is not None:
            self._held -= question.cancel()
            if question.hashed:
                tracked.question = None

    def _leave(self, tracked: Tracked) -> None:
        """Nothing more comes of it: neither of its look-up nor of its transfer. Idempotent."""
        self._let_go(tracked)
        if tracked.transfer is not None:
            tracked.transfer.end()

    # --- admission ---

    def admitted(self, request: Any, page_ids: list[int], external: int) -> None:
        """The engine has pages for the request; `external` tokens are to be loaded. Called again after the load.

        Whatever happens here, a load that the engine waits for is handed to the workers, and if only to fail there.
        """
        load: Load | None = None
        try:
            load = self._admit(request, page_ids, external)
        except Exception as error:  # noqa: BLE001  see above
            INCIDENTS.note("admission", f"{type(error).__name__}: {error}", error=error)
        if external > 0 and load is None:
            wanted = tuple(page_ids[-(external // self._geometry.page_tokens) :])
            load = Load(request.request_id, 0, 0, (LoadItem(0, 0, wanted),))
        if load is not None:
            self._loads.append(load)

    def _admit(self, request: Any, page_ids: list[int], external: int) -> Load | None:
        tracked = self._tracked.get(request.request_id)
        if tracked is None or tracked.admitted == request.num_preemptions:
            return None
        tracked.admitted = request.num_preemptions
        if tracked.stale is not None and tracked.admitted > tracked.stale:
            tracked.stale = None  # it computes everything anew
        question = tracked.question
        hit = (question.answer() if question is not None else None) or NOTHING
        (computed, offered), tracked.offer = tracked.offer, (0, 0)
        tracked.saved = hit.chunks
        if tracked.transfer is not None:
            tracked.transfer.admitted(tracked.chain, hit)
        if tracked.readable and not tracked.counted:
            tracked.counted = True
            self._count("lmkv_lookup_tokens_total", max(0, request.num_tokens - computed))
            tracked.hits = hits_of(hit, computed, external, self._chunk_tokens)
        if question is None or not hit.lease or not 0 < external <= offered:
            self._let_go(tracked)
            return None
        pages, chunk = self._geometry.page_tokens, self._chunk_tokens
        items = load_items(hit, page_ids, computed, external, page_tokens=pages, chunk_tokens=chunk)
        tracked.loading = True
        self._loading[request.request_id] = tracked
        if self._engine is not None and self._engine.client.incarnation == question.incarnation:
            self._engine.trim(hit.lease, items[0].index)
        return Load(request.request_id, hit.lease, question.incarnation, items)

    @property
    def _chunk_tokens(self) -> int:
        return self._epochs.chunk_tokens

    def _count(self, name: str, value: float) -> None:
        self._counts[name] = self._counts.get(name, 0.0) + value

    # --- steps ---

    def step(self, scheduler_output: Any) -> StepMetadata:
        """What the workers do in the step that was just scheduled. Loads are in it, whatever happens to the rest."""
        rest(scheduler_output, self._tracked.values())
        loads, self._loads = tuple(self._loads), []
        self._epochs.take()  # so that what is saved in this step belongs to the namespace that it tells
        meta = StepMetadata(self._epochs.news(), loads, idle=not scheduler_output.total_num_scheduled_tokens)
        meta.fence = self._saves.youngest
        try:
            meta.timed = self._rate.scheduled(scheduler_output)
            meta.early_saves = self._early_saves()
            # Before the step's own saves are added: what they read is written in this step.
            meta.fence = self._saves.fence(written_pages(scheduler_output, loads, self._geometry.page_tokens))
            if self._writes and self._engine is not None:
                meta.saves = self._step_saves(scheduler_output)
            if self._counts and self._engine is not None:
                self._engine.client.send(Observe(self._counts))
                self._counts = {}
        except Exception as error:  # noqa: BLE001  what is not saved is a miss later
            INCIDENTS.note("step", f"{type(error).__name__}: {error}", error=error)
        return meta

    def _step_saves(self, scheduler_output: Any) -> tuple[Save, ...]:
        """Chunks that will be complete when this step is done."""
        pages = scheduler_output.kv_connector_block_state
        saves = [
            tried(self._step_save, tracked, scheduled, pages)
            for request_id, scheduled in scheduler_output.num_scheduled_tokens.items()
            if (tracked := self._tracked.get(request_id)) is not None
        ]
        return tuple(save for save in saves if save is not None)

    def _step_save(self, tracked: Tracked, scheduled: int, state: Any) -> Save | None:
        request = tracked.request
        # Draft tokens and placeholders of the engine are not among the request's tokens yet.
        computed = min(request.num_computed_tokens + scheduled, request.num_tokens)
        computed = self._storable(tracked, computed, finished=False)
        if computed // self._chunk_tokens <= tracked.saved or state is None or not self._extended(tracked, computed):
            return None
        pages = state.get_block_ids(request.request_id)
        return self._save(tracked, computed, pages[0], tail=False) if pages else None

    def _early_saves(self) -> tuple[Save, ...]:
        """What finished requests have left. Their pages may be others' by now, who have not written yet.

        Nothing while there is no namespace: the workers may still have an earlier one.
        """
        finished, self._finished = self._finished, []
        if self._engine is None:
            return ()
        saves = [tried(self._early_save, *each) for each in finished]
        for tracked, _, _ in finished:
            if tracked.transfer is not None:
                tracked.transfer.complete()
        return tuple(save for save in saves if save is not None)

    def _early_save(self, tracked: Tracked, computed: int, pages: list[int]) -> Save | None:
        tails = self._epochs.tails
        return self._save(tracked, computed, pages, tail=tails) if self._extended(tracked, computed) else None

    def _save(self, tracked: Tracked, computed: int, page_ids: list[int], *, tail: bool) -> Save | None:
        first, chunk = tracked.saved, self._chunk_tokens
        frames = frames_of(tracked.chain, first, computed, tail=tail)
        tracked.saved = max(first, computed // chunk)
        begin = first * chunk // self._geometry.page_tokens
        save = self._saves.add(frames, page_ids[begin : begin + sum(frame.pages for frame in frames)])
        if tracked.transfer is not None and save is not None:
            tracked.transfer.saved(save.frames)
        return save

    def _storable(self, tracked: Tracked, computed: int, *, finished: bool) -> int:
        """How many of the first `computed` tokens may be stored."""
        request = tracked.request
        if tracked.loading or tracked.stale is not None:
            return 0
        if not self._settings.save_decode:
            computed = min(computed, request.num_prompt_tokens)
        if self._geometry.volatile_tail and not finished and computed > request.num_prompt_tokens:
            computed -= self._geometry.page_tokens  # a rejected draft may still rewrite the last page
        return computed

    def _extended(self, tracked: Tracked, computed: int) -> bool:
        """Bring the chain to `computed` tokens; False while a thread still works on it."""
        question = tracked.question
        if question is not None and (not question.hashed or question.answer() is None):
            return False
        if (missing := computed - tracked.chain.tokens) > 0:
            tracked.chain.extend(tokens_from(tracked.request, tracked.chain.tokens)[:missing])
        return True

    def reported(self, report: WorkerReport | None, received: Iterable[str]) -> None:
        """What the workers have finished in the last step."""
        if report is not None:
            self._rate.ended(report.timed)
            self._saves.report(report.saved)
            for request_id, index in report.failed.items():
                tracked = self._loading.get(request_id)
                if tracked is not None:
                    tracked.saved = min(tracked.saved, index)
                    tracked.hits = [hit for hit in tracked.hits if hit[0] < index]
        for request_id in received:
            tracked = self._loading.pop(request_id, None)
            if tracked is not None:
                tracked.loading = False
                self._let_go(tracked)
                hits, tracked.hits = tracked.hits, []
                for _, tier, tokens in hits:
                    self._count(f"lmkv_hit_tokens_total|tier={tier}", tokens)

    def processed(self) -> None:
        """All that came of one step has been said."""
        self._rate.processed()

    def finished(self, request: Any, page_ids: list[int]) -> dict[str, Any] | None:
        """A request has ended, in whatever way; its pages are free from now on, and still hold what was computed.

        Not so while they are being loaded: then vLLM keeps them until the load is reported. That ends early, since what
        is not in the pool yet nobody wants any more; what a worker copies just now it holds itself.
        Returns what vLLM is to answer as `kv_transfer_params`.
        """
        tracked = self._tracked.pop(request.request_id, None)
        if tracked is None:
            return None
        status, transfer = str(request.status), tracked.transfer
        (self._leave if status == "FINISHED_ABORTED" else self._let_go)(tracked)
        if not self._writes or tracked.loading or not page_ids or status == "FINISHED_ERROR":
            self._leave(tracked)
            return None
        computed = request.num_computed_tokens - getattr(request, "num_in_flight_tokens", 0)
        computed = self._storable(tracked, min(computed, request.num_tokens), finished=True)
        computed = min(computed, len(page_ids) * self._geometry.page_tokens)
        if computed < self._geometry.page_tokens:
            self._leave(tracked)
            return None
        self._finished.append((tracked, computed, page_ids))
        computed -= computed % (self._geometry.page_tokens if self._epochs.tails else self._chunk_tokens)
        return None if transfer is None else transfer.answer(computed)

    # --- reset ---

    def reset(self) -> bool:
        """The weights may have changed: nothing stored until now is found any more, be the service there or not.

        From here on another namespace is used, so that even a save under way cannot come back as a wrong hit.
        """
        for tracked in [*self._tracked.values(), *(each[0] for each in self._finished)]:
            self._leave(tracked)
            tracked.offer = (0, 0)
            if tracked.request.num_computed_tokens or tracked.loading:
                tracked.stale = tracked.request.num_preemptions
                tracked.admitted = max(tracked.admitted, tracked.stale)
        self._finished.clear()
        self._epochs.renew()
        return True
