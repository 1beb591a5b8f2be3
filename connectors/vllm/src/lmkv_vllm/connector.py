"""LMKVConnector: lmkv as a KV connector of vLLM 0.32.

    vllm serve MODEL --kv-transfer-config '{"kv_connector": "LMKVConnector", "kv_role": "kv_both",
        "kv_connector_module_path": "lmkv_vllm.connector", "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"lmkv.config": "stack.yaml"}}'

This class only translates between vLLM's calls and `SchedulerSide` / `WorkerSide`. Importing the module starts no
thread and touches no device, since vLLM imports it in every one of its processes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorWorkerMetadata,
)
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from lmkv.errors import LmkvError
from lmkv.observe.clients import Who
from lmkv_vllm.geometry import check_chunk, layout_tags, namespace_extra, read_geometry, read_layout
from lmkv_vllm.guard import guarded, join_logging, logger
from lmkv_vllm.identity import model_identity
from lmkv_vllm.link import Link, stack_config
from lmkv_vllm.metadata import Handshake, StepMetadata, WorkerReport
from lmkv_vllm.scheduler import SchedulerSide
from lmkv_vllm.settings import read_settings
from lmkv_vllm.worker import WorkerSide

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

# Our messages are plain dataclasses; vLLM's abstract classes have no behaviour to inherit.
KVConnectorMetadata.register(StepMetadata)
KVConnectorWorkerMetadata.register(WorkerReport)
KVConnectorHandshakeMetadata.register(Handshake)


class LMKVConnector(KVConnectorBase_V1):  # type: ignore[misc]  # vLLM is Any at our seam
    """One side of the connector, as vLLM's role says. Every call but those at the start is safe: an error is a miss.

    Args:
        vllm_config: vLLM's configuration; `kv_connector_extra_config` has our settings.
        role: scheduler or worker.
        kv_cache_config: what pages there are.

    Raises:
        ConfigError: a setting is wrong, or this engine's KV cannot be cached; says why and what to do.
    """

    # Everything that is loaded comes out of the pool, wherever it was found.
    _cache_hit_source = CacheHitSource.HOST

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        join_logging()
        self._scheduler: SchedulerSide | None = None
        self._worker: WorkerSide | None = None
        self._settings = read_settings(vllm_config.kv_transfer_config.kv_connector_extra_config)
        self._geometry = read_geometry(vllm_config, kv_cache_config)
        world = vllm_config.parallel_config.world_size
        config = stack_config(self._settings, world)
        if config is not None:
            check_chunk(config.chunk_tokens, self._geometry.page_tokens)
        if role is KVConnectorRole.SCHEDULER:
            if vllm_config.kv_transfer_config.kv_load_failure_policy != "recompute":
                logger.warning(
                    'kv_load_failure_policy is "fail", vLLM\'s default: a request whose load fails ends with an error. '
                    'Set it to "recompute".'
                )
            self._link = Link(self._settings, config, "vllm-scheduler", _who(vllm_config, "scheduler"), copies=False)
            name, revision, extra = model_identity(vllm_config)
            self._scheduler = SchedulerSide(
                self._settings,
                self._link,
                self._geometry,
                (name, revision, namespace_extra(vllm_config, extra)),
                workers=world,
                loads=vllm_config.kv_transfer_config.is_kv_consumer,
                saves=vllm_config.kv_transfer_config.is_kv_producer,
            )
        else:
            self._rank, self._shard = _own_rank(vllm_config)
            who = _who(vllm_config, str(self._shard))
            self._link = Link(self._settings, config, f"vllm-worker-{self._shard}", who, copies=True)
            self._handshake: Handshake | None = None

    @property
    def requires_kv_delivery(self) -> bool:
        """No: a save that is lost is a miss later."""
        return False

    # --- worker side ---

    def register_kv_caches(self, kv_caches: Mapping[str, Any]) -> None:
        """The engine's memory. Raises `ConfigError` when its pages cannot be cached."""
        names = [name for group in self._kv_cache_config.kv_cache_groups for name in group.layer_names]
        layout = read_layout(self._kv_cache_config, layout_tags(self._vllm_config, names))
        gpu = _gpu_connector(layout, kv_caches)
        self._handshake = Handshake(layout.describe(), layout.page_bytes)
        self._worker = WorkerSide(self._settings, self._link, gpu, self._shard)

    def get_handshake_metadata(self) -> Handshake | None:
        """This worker's page layout, for the scheduler side. Waits for the service: then hits can be loaded at once."""
        self._link.wait(self._settings.start_deadline)
        return self._handshake

    @guarded(lambda: None)
    def handle_preemptions(self, kv_connector_metadata: StepMetadata) -> None:
        """Before anything of a step is computed: save or give up what it overwrites."""
        if self._worker is not None:
            self._worker.before_step(kv_connector_metadata)

    @guarded(lambda: None)
    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:  # noqa: ARG002  vLLM's signature
        """Begin the step's loads."""
        if self._worker is not None:
            self._worker.start(self._get_connector_metadata())

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing: loads are over before vLLM computes with their pages."""

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        """Nothing: pages are saved whole, after the step."""

    @guarded(lambda: None)
    def wait_for_save(self) -> None:
        """Begin the step's saves."""
        if self._worker is not None:
            self._worker.after_step(self._get_connector_metadata())

    @guarded(lambda: (None, None))
    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:  # noqa: ARG002
        """Requests whose load is over. No save is ever waited for, so nothing is finished sending."""
        if self._worker is None:
            return None, None
        idle = self.has_connector_metadata() and self._get_connector_metadata().idle
        return None, self._worker.received(idle=idle) or None

    @guarded(set)
    def get_block_ids_with_load_errors(self) -> set[int]:
        """Pages that a load should have filled and did not."""
        return self._worker.bad_pages() if self._worker is not None else set()

    @guarded(lambda: None)
    def build_connector_worker_meta(self) -> WorkerReport | None:
        """What this worker has finished, for the scheduler side."""
        return self._worker.report() if self._worker is not None else None

    # --- scheduler side ---

    def set_xfer_handshake_metadata_pp_aware(self, metadata: Mapping[tuple[int, int], Handshake]) -> None:
        """The workers' page layouts; the last step of the start: waits for the service. Raises `ConfigError`."""
        if self._scheduler is None:
            return
        self._scheduler.handshakes(metadata)
        try:
            ready = self._link.wait(self._settings.start_deadline)
        except LmkvError:
            self.shutdown()
            raise
        if not ready:
            logger.warning(
                "the service was not reached within %g s: starting without cache", self._settings.start_deadline
            )

    @guarded(lambda: None)
    def on_new_request(self, request: Any) -> None:
        """Begin to look it up."""
        if self._scheduler is not None:
            self._scheduler.arrived(request)

    @guarded(lambda: (0, False))
    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        """Tokens that can be loaded beyond those that the engine has; None: ask again in the next step."""
        if self._scheduler is None:
            return 0, False
        return self._scheduler.offered(request, num_computed_tokens)

    @guarded(lambda: None)
    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """The engine has pages for the request; `num_external_tokens` of its tokens are to be loaded into them."""
        if self._scheduler is not None:
            self._scheduler.admitted(request, blocks.get_block_ids()[0], num_external_tokens)

    @guarded(StepMetadata)
    def build_connector_meta(self, scheduler_output: Any) -> StepMetadata:
        """What the workers do in the step that was just scheduled."""
        return self._scheduler.step(scheduler_output) if self._scheduler is not None else StepMetadata()

    @guarded(lambda: None)
    def update_connector_output(self, connector_output: Any) -> None:
        """What the workers have finished."""
        if self._scheduler is not None:
            report = connector_output.kv_connector_worker_meta
            self._scheduler.reported(report, connector_output.finished_recving or ())

    @guarded(tuple)
    def take_events(self) -> Iterable[Any]:
        """None of ours. vLLM asks once for each step whose output it has processed: so we know when that was."""
        if self._scheduler is not None:
            self._scheduler.processed()
        return ()

    @guarded(lambda: (False, None))
    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """A request has ended. Its blocks are never held back: what is left to save is fenced."""
        return False, None if self._scheduler is None else self._scheduler.finished(request, block_ids)

    @guarded(lambda: False)
    def reset_cache(self) -> bool:
        """Forget everything, as after a change of weights. Never fails: vLLM would raise out of `sleep`, too."""
        return self._scheduler.reset() if self._scheduler is not None else True

    # --- both ---

    @guarded(lambda: None)
    def shutdown(self) -> None:
        """Stop our threads and leave the service; takes some seconds at most. Idempotent."""
        try:
            if self._scheduler is not None:
                self._scheduler.shutdown()
            if self._worker is not None:
                self._worker.shutdown()
        finally:
            self._link.close()


def _who(vllm_config: Any, rank: str) -> Who:
    """How this process's counts are labelled. vLLM gives all processes of an engine the same engine id."""
    model, transfer = vllm_config.model_config, vllm_config.kv_transfer_config
    return Who(str(model.served_model_name or model.model), rank, str(transfer.engine_id or ""))


def _own_rank(vllm_config: Any) -> tuple[tuple[int, int], int]:
    """(pp rank, tp rank) of this worker, and its number in that order."""
    from vllm.distributed.parallel_state import get_pp_group, get_tp_group  # noqa: PLC0415  set up in workers only

    pp, tp = get_pp_group().rank_in_group, get_tp_group().rank_in_group
    return (pp, tp), pp * vllm_config.parallel_config.tensor_parallel_size + tp


def _gpu_connector(layout: Any, kv_caches: Mapping[str, Any]) -> Any:
    """A copier over the one buffer behind all layers."""
    import torch  # noqa: PLC0415  in workers only

    from lmkv.gpu import connector_for  # noqa: PLC0415  in workers only

    storages = {tensor.untyped_storage().data_ptr(): tensor for tensor in kv_caches.values()}
    if len(storages) != 1:
        raise LmkvError(f"vLLM's KV cache lies in {len(storages)} buffers, expected one", kind="geometry")
    (tensor,) = storages.values()
    storage = tensor.untyped_storage()
    raw = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage, 0, (storage.nbytes(),), (1,))
    buffer: Any = raw.numpy() if tensor.device.type == "cpu" else raw
    return connector_for(str(tensor.device), layout, [buffer])
