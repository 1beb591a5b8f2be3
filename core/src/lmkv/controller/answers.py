"""What the API says of nodes and jobs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from lmkv.controller import models as b
from lmkv.controller.records import DONE, FAILED, WAITING
from lmkv.service.digests import split_digests

if TYPE_CHECKING:
    from collections.abc import Mapping

    from lmkv.controller.jobs import Job
    from lmkv.controller.roster import NodeRecord
    from lmkv.keys import Namespace


def node_state(record: NodeRecord, spaces: Mapping[bytes, Namespace]) -> b.NodeState:
    """A node as the API tells it."""
    used = (*record.used, *[0] * len(record.tiers))  # before the first heartbeat it is not known
    return b.NodeState(
        node=record.name,
        state="connected" if record.connected else "away",
        synced=record.synced,
        incarnation=str(record.incarnation),
        load=record.load,
        endpoints=record.endpoints,
        tiers=[
            b.TierState(
                name=tier.name,
                backend=tier.backend,
                capacity_bytes=tier.capacity,
                used_bytes=nbytes,
                shared=tier.shared,
                writable=tier.writable,
            )
            for tier, nbytes in zip(record.tiers, used, strict=False)
        ],
        codecs=list(record.codecs),
        namespaces=[_namespace(key, spaces[key]) for key in record.namespaces if key in spaces],
    )


def _namespace(key: bytes, space: Namespace) -> b.NamespaceState:
    return b.NamespaceState(
        namespace=key.hex(),
        model=space.model,
        revision=space.revision,
        kv_dtype=space.kv_dtype,
        chunk_tokens=space.chunk_tokens,
        page_tokens=space.page_tokens,
        shards=space.shards,
    )


def job_answer(job: Job, *, every: bool = False) -> b.JobAnswer:
    """A job as the API tells it; with `every`, each of its chunks."""
    done, failed = job.numbers()
    return b.JobAnswer(
        id=job.id,
        verb=job.plan.verb,
        state=job.state,
        created=job.plan.created,
        started=job.started,
        ended=job.ended,
        by=job.plan.by,
        total=job.plan.total,
        done=done,
        failed=failed,
        counts=job.counts(),
        error=job.error or None,
        chunks=_chunks(job, every=every),
    )


def _chunks(job: Job, *, every: bool) -> list[b.ChunkResult]:
    """How each chunk fared, or each that failed so far."""
    failures = {(each.namespace, each.digest, each.node): each.reason for each in job.failures}
    for index, call in job.calls.items():
        work = job.plan.works[index]
        failures |= {(work.namespace, bytes.fromhex(k), work.node): text for k, text in call.progress.failed.items()}
    places: dict[tuple[bytes, bytes, str], Literal["waiting", "done", "failed"]] = dict.fromkeys(failures, FAILED)
    if every:
        for index, work in enumerate(job.plan.works):
            for digest in split_digests(work.digests):
                places.setdefault((work.namespace, digest, work.node), DONE if index in job.worked else WAITING)
    return [
        b.ChunkResult(
            namespace=namespace.hex(),
            digest=digest.hex(),
            node=node,
            state=state,
            reason=failures.get((namespace, digest, node)),
        )
        for (namespace, digest, node), state in places.items()
    ]
