"""How a plan is carried out: lanes side by side, in each one work after the other."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Final

from lmkv.agent import messages as m
from lmkv.controller.records import Errand, Failure, Transfer, Work, Worked
from lmkv.errors import LmkvError
from lmkv.service.digests import split_digests

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable, Mapping

    from lmkv.controller.courier import Allowed, Call, Courier
    from lmkv.controller.fleet import Fleet
    from lmkv.controller.jobs import Job
    from lmkv.controller.records import Command, Event

log = logging.getLogger("lmkv.controller")

PIN_SECONDS: Final = 3600.0
"""What was fetched is safe from eviction for so long; taken away at the source within half of it, or not at all."""
COME_SECONDS: Final = 60.0
"""A node that is not there (as all are when a controller starts) is waited for so long."""
LANES: Final = 32
DROPS: Final = 3
"""What a node finds too late is asked of it so often."""


class Execution:
    """Carries out plans. On the controller's loop."""

    def __init__(self, fleet: Fleet, courier: Courier) -> None:
        self._fleet = fleet
        self._courier = courier

    async def run(self, job: Job, add: Callable[[Event], Awaitable[None]], mine: Callable[[], Awaitable[bool]]) -> None:
        """Do what is left of a job; each work that is over is told to `add`. Returns early when it is cancelled.

        `mine` is asked before anything is taken away: whether no other controller has gone on with the job meanwhile.

        Raises:
            LmkvError: what `add` raises; nothing else.
        """
        lanes: dict[str, list[int]] = {}
        for index, work in enumerate(job.plan.works):
            if index not in job.worked:
                lanes.setdefault(work.lane, []).append(index)
        room = asyncio.Semaphore(LANES)

        async def lane(indices: Iterable[int]) -> None:
            async with room:
                for index in indices:
                    if job.cancelled:
                        return
                    await add(await self._work(job, index, mine))

        tasks = [asyncio.ensure_future(lane(indices)) for indices in lanes.values()]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _work(self, job: Job, index: int, mine: Callable[[], Awaitable[bool]]) -> Worked:
        work = job.plan.works[index]
        try:
            if isinstance(work, Transfer):
                return await self._transfer(job, index, work, mine)
            return await self._errand(job, index, work)
        except LmkvError as error:
            return _nothing_done(index, work, str(error))

    async def _errand(self, job: Job, index: int, work: Errand) -> Worked:
        progress = await self._command((job, index), work.node, "do", work.command)
        failed = _failures(work, progress.failed)
        if progress.state != m.DONE:
            # What it says of single chunks holds; of the others it is not known, which is no success.
            return _nothing_done(index, work, _reason(progress), progress)
        return Worked(index, failed, progress.counts)

    async def _transfer(self, job: Job, index: int, work: Transfer, mine: Callable[[], Awaitable[bool]]) -> Worked:
        """Every chunk lies at one end at least, always: it goes at the source once it is pinned at the target."""
        clock = asyncio.get_running_loop().time
        endpoint = await self._peer(work.source)
        before = await self._there(work.target)
        began = clock()
        text = (await self._fleet.namespaces()).get(work.namespace)
        fetch = m.Fetch(
            endpoint, work.namespace, work.digests, work.target_tier, PIN_SECONDS, "" if text is None else text.json()
        )
        fetched = await self._command((job, index), work.target, "fetch", fetch)
        failed = dict(fetched.failed)
        if fetched.state != m.DONE:
            failed |= _all(work.digests, _reason(fetched)) | fetched.failed
        safe = _without(work.digests, failed)
        if not await mine():  # who has it now takes away and unpins; later jobs may have brought chunks back
            raise LmkvError("another controller goes on with the job", kind="superseded")
        sure = True
        if safe and work.remove:
            if job.cancelled:
                failed |= _all(safe, f"cancelled: copied, and not removed from {work.source!r}")
            elif await self._there(work.target) != before or clock() - began > PIN_SECONDS / 2:
                failed |= _all(safe, f"stays on {work.source!r}: {work.target!r} has started anew")
            else:
                left, sure = await self._drop((job, index), work, safe, mine, incarnation=before)
                failed |= left
        if sure:
            # All of them: a fetch that was cancelled does not say which it has pinned. Where it is not known whether
            # the source has let go, or may yet, the pins end by themselves.
            await self._command(
                (job, index), work.target, "unpin", m.UnpinChunks(work.namespace, work.digests, fetched=True)
            )
        return Worked(index, _failures(work, failed), fetched.counts, cancelled=bool(failed) and job.cancelled)

    async def _drop(
        self, at: tuple[Job, int], work: Transfer, safe: bytes, mine: Callable[[], Awaitable[bool]], *, incarnation: int
    ) -> tuple[dict[str, str], bool]:
        """Take away at the source what is safe at the target, as long as that is the same start of the same node.

        The source has given a fence before the last look whether the job is still ours. So it refuses what was held up
        after that look, in this process or on the way; then both are done once more.

        Returns what may still be there, with the reason, and whether that is all that the source will do.
        """

        async def allowed() -> bool:
            record = await self._courier.record(work.target)
            return record is None or record.incarnation == incarnation

        where = f"copied, but perhaps not removed from {work.source!r}"
        for tried in range(1, DROPS + 1):
            try:
                fenced = await self._command(at, work.source, f"fence{tried}", m.Fence(work.namespace, safe), allowed)
            except LmkvError as error:
                return _all(safe, f"{where}: {error}"), True
            if fenced.state != m.DONE:
                return _all(safe, f"{where}: {_reason(fenced)}"), True
            if not await mine():
                raise LmkvError("another controller goes on with the job", kind="superseded")
            drop = m.Drop(work.namespace, safe, work.source_tier, fenced.counts.get("fence", 0))
            try:
                dropped = await self._command(at, work.source, f"drop{tried}", drop, allowed)
            except LmkvError as error:
                return _all(safe, f"{where}: {error}"), False
            if "late" not in dropped.counts:
                break
        if dropped.state == m.DONE:
            return {digest: f"{where}: {reason}" for digest, reason in dropped.failed.items()}, True
        return _all(safe, f"{where}: {_reason(dropped)}"), True

    async def _command(
        self, at: tuple[Job, int], node: str, step: str, command: Command, allowed: Allowed | None = None
    ) -> m.Progress:
        job, index = at

        def watch(call: Call) -> None:
            job.calls[index] = call
            if job.cancelled and step != "unpin":
                call.cancel()

        await self._there(node)
        return await self._courier.run(node, f"{job.id}.{job.attempt}.{index}.{step}", command, watch, allowed)

    async def _there(self, node: str) -> int:
        """The incarnation of a node; waits for one that is not there.

        Raises:
            LmkvError: (kind ``away``) it does not come.
        """
        until = asyncio.get_running_loop().time() + COME_SECONDS
        while (record := await self._courier.record(node)) is None:
            if asyncio.get_running_loop().time() > until:
                raise LmkvError(f"node {node!r} is gone", kind="away", retryable=True)
            await asyncio.sleep(0.25)
        return record.incarnation

    async def _peer(self, node: str) -> str:
        await self._there(node)
        record = await self._courier.record(node)
        endpoint = record.endpoints.get("peer", "") if record is not None else ""
        if not endpoint:
            raise LmkvError(f"node {node!r} has no peer port: set peer.listen there", kind="no-peer")
        return endpoint


def _reason(progress: m.Progress) -> str:
    return progress.error or ("cancelled" if progress.state == m.CANCELLED else "the node failed and said no reason")


def _nothing_done(index: int, work: Work, reason: str, progress: m.Progress | None = None) -> Worked:
    known = {} if progress is None else progress.failed
    failed = _failures(work, _all(work.digests, reason) | known)
    if progress is None:
        return Worked(index, failed, {}, reason)
    return Worked(index, failed, progress.counts, reason, progress.state == m.CANCELLED)


def _failures(work: Work, failed: Mapping[str, str]) -> tuple[Failure, ...]:
    """What a node said of chunks, in the order of the plan; of those only that it was asked about."""
    return tuple(
        Failure(work.namespace, digest, work.node, failed[digest.hex()])
        for digest in split_digests(work.digests)
        if digest.hex() in failed
    )


def _all(blob: bytes, reason: str) -> dict[str, str]:
    return {digest.hex(): reason for digest in split_digests(blob)}


def _without(blob: bytes, failed: Mapping[str, str]) -> bytes:
    return b"".join(digest for digest in split_digests(blob) if digest.hex() not in failed)
