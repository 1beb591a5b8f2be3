"""A backend that goes wrong when it is told to."""

from __future__ import annotations

import collections
import errno
import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lmkv.backend import WrapperBackend
from lmkv.errors import BackendError
from lmkv.types import FAILED, MISS, OK, REJECTED, Outcome

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from lmkv.backend import StorageBackendInterface
    from lmkv.memory import MemoryObject
    from lmkv.types import ChunkKey, Health, StoredFrame


@dataclass(frozen=True, slots=True)
class Call:
    """One call as a fault sees it."""

    operation: str
    keys: Sequence[ChunkKey]
    objects: Sequence[MemoryObject]
    proceed: Callable[[], Any]
    """Do what the inner backend would have done."""


@dataclass(frozen=True, slots=True)
class Fault:
    """What happens instead of a call."""

    act: Callable[[Call], Any]


def raises(error: BaseException) -> Fault:
    """The call raises: the tier is ill."""

    def act(call: Call) -> Any:  # noqa: ARG001  a fault's shape
        raise error

    return Fault(act)


def fails(error: BaseException) -> Fault:
    """Every key is `FAILED(error)`."""
    return Fault(lambda call: [FAILED(error)] * len(call.keys))


def no_space() -> Fault:
    """Every key fails as on a full disk."""
    return fails(BackendError(f"put: [Errno {errno.ENOSPC}] No space left on device", kind="no-space"))


def rejects() -> Fault:
    """Every key is `REJECTED`."""
    return Fault(lambda call: [REJECTED] * len(call.keys))


def misses() -> Fault:
    """Nothing is there (for `get` and `contains`)."""
    return Fault(lambda call: [False if call.operation == "contains" else MISS] * len(call.keys))


def short(by: int = 1) -> Fault:
    """`get` gives `by` bytes fewer than are stored, as a torn frame does."""

    def act(call: Call) -> list[Outcome]:
        return [OK(max(0, outcome.nbytes - by)) if outcome.ok else outcome for outcome in call.proceed()]

    return Fault(act)


def corrupts(offset: int = 0) -> Fault:
    """`get` gives frames with the byte at `offset` flipped."""

    def act(call: Call) -> Any:
        outcomes = call.proceed()
        for memory, outcome in zip(call.objects, outcomes, strict=True):
            if outcome.ok:
                memory.view[offset] ^= 0xFF
        return outcomes

    return Fault(act)


def slow(seconds: float) -> Fault:
    """The call takes this long more."""

    def act(call: Call) -> Any:
        time.sleep(seconds)
        return call.proceed()

    return Fault(act)


def hangs(until: threading.Event) -> Fault:
    """The call does not begin before the event is set."""

    def act(call: Call) -> Any:
        until.wait()
        return call.proceed()

    return Fault(act)


class FaultyBackend(WrapperBackend):
    """Passes calls on to `inner`, except as scripted. Thread-safe.

    Attributes:
        calls: operation → calls so far, faulty ones included.
    """

    def __init__(self, inner: StorageBackendInterface) -> None:
        super().__init__(inner)
        self.calls: collections.Counter[str] = collections.Counter()
        self._script: dict[str, list[list[Any]]] = {}
        self._lock = threading.Lock()

    def script(self, operation: str, fault: Fault, times: int | None = 1) -> None:
        """The next `times` calls of `operation` (None: all) meet `fault`; faults of one operation queue up."""
        with self._lock:
            self._script.setdefault(operation, []).append([fault, times])

    def heal(self) -> None:
        """Forget every fault that has not happened yet. Calls that hang go on hanging."""
        with self._lock:
            self._script.clear()

    def contains(self, keys: Sequence[ChunkKey]) -> Sequence[bool]:
        """As scripted."""
        return self._call("contains", keys, (), lambda: self.inner.contains(keys))  # type: ignore[no-any-return]

    def get(self, keys: Sequence[ChunkKey], into: Sequence[MemoryObject]) -> Sequence[Outcome]:
        """As scripted."""
        return self._call("get", keys, into, lambda: self.inner.get(keys, into))  # type: ignore[no-any-return]

    def put(self, keys: Sequence[ChunkKey], objects: Sequence[MemoryObject]) -> Sequence[Outcome]:
        """As scripted."""
        return self._call("put", keys, objects, lambda: self.inner.put(keys, objects))  # type: ignore[no-any-return]

    def delete(self, keys: Sequence[ChunkKey]) -> None:
        """As scripted."""
        self._call("delete", keys, (), lambda: self.inner.delete(keys))

    def scan(self) -> Iterator[StoredFrame]:
        """As scripted."""
        return self._call("scan", (), (), self.inner.scan)  # type: ignore[no-any-return]

    def touch(self, keys: Sequence[ChunkKey]) -> None:
        """As scripted."""
        self._call("touch", keys, (), lambda: self.inner.touch(keys))

    def describe(self, namespace: bytes, text: str) -> None:
        """As scripted."""
        self._call("describe", (), (), lambda: self.inner.describe(namespace, text))

    def forget(self, namespace: bytes) -> None:
        """As scripted."""
        self._call("forget", (), (), lambda: self.inner.forget(namespace))

    def set_aside(self, keys: Sequence[ChunkKey]) -> None:
        """As scripted."""
        self._call("set_aside", keys, (), lambda: self.inner.set_aside(keys))

    def clear(self, namespace: bytes | None = None) -> None:
        """As scripted."""
        self._call("clear", (), (), lambda: self.inner.clear(namespace))

    def health(self) -> Health:
        """As scripted."""
        return self._call("health", (), (), self.inner.health)  # type: ignore[no-any-return]

    def _call(
        self, operation: str, keys: Sequence[ChunkKey], objects: Sequence[MemoryObject], proceed: Callable[[], Any]
    ) -> Any:
        with self._lock:
            self.calls[operation] += 1
            fault = self._next(operation)
        if fault is None:
            return proceed()
        return fault.act(Call(operation, keys, objects, proceed))

    def _next(self, operation: str) -> Fault | None:
        queue = self._script.get(operation)
        if not queue:
            return None
        fault: Fault = queue[0][0]
        if queue[0][1] is not None:
            queue[0][1] -= 1
            if queue[0][1] <= 0:
                queue.pop(0)
        return fault
