"""One frame through one tier's backend: put, get, compare, delete. A backend that hangs is left in a daemon thread."""

from __future__ import annotations

import contextlib
import hashlib
import os
import threading
import time
import traceback
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, TypeVar

from lmkv.errors import BackendError, FrameError, LmkvError
from lmkv.frame import verify
from lmkv.memory import MemoryObject, Pool
from lmkv.specs import BackendContext
from lmkv.storage.coding import IDENTITY, decode, encoded, stored_bound
from lmkv.storage.keymark import leave_mark, look_at_frames, sample
from lmkv.types import ChunkKey, HealthState
from lmkv.units import format_size

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from lmkv.backend import StorageBackendInterface
    from lmkv.config import TierConfig
    from lmkv.frame import Trailer
    from lmkv.plugins import PluginHost
    from lmkv.specs import Codec
    from lmkv.storage.codecs import Codecs
    from lmkv.storage.coding import PutItem
    from lmkv.types import Outcome

_T = TypeVar("_T")
PAYLOAD: Final = 1 << 20
IMPORT_SECONDS: Final = 10.0
"""Importing a client library says nothing about the store, and may take longer than a batch may."""
NAMESPACE: Final = hashlib.sha256(b"lmkv check").digest()[:16]


@dataclass
class Result:
    """What became of one tier."""

    tier: str
    backend: str
    problem: str = ""
    trace: str = ""
    seconds: dict[str, float] = field(default_factory=dict)
    step: str = "import"
    """What is going on."""
    remark: str = ""
    """What the backend says of its own health although it works."""

    @property
    def ok(self) -> bool:
        """The frame came back as it was, in time."""
        return not self.problem

    @property
    def row(self) -> tuple[str, str, str, str]:
        """For the table."""
        times = "  ".join(f"{step} {seconds * 1000:.1f} ms" for step, seconds in self.seconds.items())
        remark = f"  ({self.remark})" if self.remark else ""
        detail = self.problem or f"{format_size(PAYLOAD)}: {times}{remark}"
        return self.tier, self.backend, "ok" if self.ok else "FAILED", detail


def probe(tier: TierConfig, capacity: int | None, ranks: int, host: PluginHost, codecs: Codecs) -> Result:
    """Start the tier's backend and move one frame through its codec and it; look whether its key is the right one.

    A store that does not answer is told within the tier's deadline: starting and asking for its health have to be done
    by then. The frame's round trip has as long again.
    """
    result = Result(tier.name, tier.backend)
    imported, started, ended = threading.Event(), threading.Event(), threading.Event()
    context = BackendContext(tier=tier.name, capacity=capacity, ranks=ranks, deadline=tier.deadline)

    def work() -> None:
        try:
            factory = host.load_backend(tier.backend)
            own = codecs.of(tier.codec, tier.name)
            imported.set()
            _Trip(own, own(tier.codec.name), result).work(lambda: factory(tier.options, context), started)
        except (LmkvError, OSError) as error:
            result.problem = f"{result.step}: {_one_line(error)}"
        except BaseException as error:  # noqa: BLE001  a stranger's backend may raise anything
            result.problem = f"{result.step}: {type(error).__name__}: {_one_line(error)}"
            result.trace = traceback.format_exc()
        finally:
            for event in (imported, started, ended):
                event.set()

    threading.Thread(target=work, name=f"lmkv-check-{tier.name}", daemon=True).start()
    if not imported.wait(IMPORT_SECONDS):
        return _stuck(result, f"not done within {IMPORT_SECONDS:g} s")
    for event in (started, ended):
        if not event.wait(tier.deadline):
            return _stuck(result, f"no answer within the deadline of {tier.deadline:g} s")
    return result


def _stuck(result: Result, what: str) -> Result:
    return Result(result.tier, result.backend, f"{result.step}: {what}")


class _Trip:
    """One frame's way there and back."""

    def __init__(self, codecs: Callable[[str], Codec], codec: Codec, result: Result) -> None:
        self.codecs = codecs
        self.codec = codec
        self.result = result

    def work(self, start: Callable[[], StorageBackendInterface], started: threading.Event) -> None:
        result = self.result
        backend = _timed(result, "start", start)
        key = ChunkKey(NAMESPACE, 0, os.urandom(32))
        item = sample(key, PAYLOAD)
        pool = Pool.create(4 * stored_bound(item.object.nbytes), hugepages="off", prefault=False)
        try:
            if backend.capabilities.registered_memory:
                backend.attach(pool)
            sent = _allocate(pool, item.object.nbytes)
            sent.view[:] = item.object.view
            if backend.capabilities.resident:
                sent.retain("ram")  # `adopt` takes over one count
            result.step = "health"
            health = backend.health()
            if health.state is HealthState.DOWN:
                raise BackendError(health.detail or "the store is down")  # noqa: TRY301  as if the call had failed
            result.remark = health.detail
            started.set()
            if backend.capabilities.read_only:  # its health is all that can be had: nobody has put anything there
                sent.release("check")
                result.remark = result.remark or "only reads: no frame was moved"
            else:
                self._round_trip(backend, item._replace(object=sent), pool)
            if self.codec.seals:
                result.step = "key"
                self._look_at_key(backend)
        except BaseException:
            with contextlib.suppress(Exception):  # what went wrong before is what matters
                backend.close()
            raise
        else:
            _timed(result, "close", backend.close)
        finally:
            pool.close()

    def _round_trip(self, backend: StorageBackendInterface, item: PutItem, pool: Pool) -> None:
        result, key = self.result, item.key
        frame = _timed(result, "encode", lambda: encoded(item, self.codec))
        if frame is item.object:
            del result.seconds["encode"]  # nothing but its seal
        shared = backend.capabilities.shared  # where others may have stored it longer than we do
        got = _allocate(pool, stored_bound(item.object.nbytes) if shared else frame.nbytes)
        try:
            _expect(_timed(result, "put", lambda: backend.put([key], [frame])), "put")
            outcome = _expect(_timed(result, "get", lambda: backend.get([key], [got])), "get")
            result.step = "compare"
            trailer = verify(got.view[: outcome.nbytes], key)
            if got.view[: outcome.nbytes] != frame.view:
                raise FrameError("what came back is not what was written")
            if trailer.codec != IDENTITY:
                self._decode(item, trailer, got)
            _timed(result, "delete", lambda: backend.delete([key]))
            if list(backend.get([key], [got]))[0].ok:  # noqa: RUF015  an empty answer should raise
                raise BackendError("the frame is still there after delete")
        finally:
            item.object.release("check")
            got.release("check")

    def _decode(self, item: PutItem, trailer: Trailer, got: MemoryObject) -> None:
        back = MemoryObject.over(bytearray(item.object.nbytes))
        _timed(self.result, "decode", lambda: decode(got, trailer, back, self.codec))
        if self.codec.lossless and back.view[:PAYLOAD] != item.object.view[:PAYLOAD]:
            raise FrameError("what was decoded is not what was encoded")

    def _look_at_key(self, backend: StorageBackendInterface) -> None:
        """Whether the store's frames are written with the same key; in a shared store a mark tells."""
        remark = ""
        if backend.capabilities.shared:
            leave_mark(backend, self.codecs, self.codec)
        elif backend.capabilities.scan:
            remark = look_at_frames(backend, self.codecs, self.codec)
        self.result.remark = "; ".join(filter(None, (self.result.remark, remark)))


def _allocate(pool: Pool, nbytes: int) -> MemoryObject:
    found = pool.allocate(nbytes, "check")
    assert found is not None, "a fresh pool of four frames has room for two"
    return found


def _expect(outcomes: Sequence[Outcome], step: str) -> Outcome:
    outcome = outcomes[0]
    if not outcome.ok:
        reason = f": {_one_line(outcome.error)}" if outcome.error is not None else ""
        raise BackendError(
            f"{outcome.kind.value}{reason}" if step == "put" else f"{outcome.kind.value} after put{reason}"
        )
    return outcome


def _timed(result: Result, step: str, call: Callable[[], _T]) -> _T:
    result.step = step
    start = time.perf_counter()
    value = call()
    result.seconds[step] = time.perf_counter() - start
    return value


def _one_line(error: BaseException) -> str:
    return str(error).splitlines()[0] if str(error) else type(error).__name__
