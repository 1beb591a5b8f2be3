"""One agent of the NIXL library: registered memory, peers, transfers; its errors as those of transports.

The library's Python wrapper has no setting for how long the progress thread sleeps, and without it that thread keeps a
core busy in every process; so this uses the bindings below the wrapper. Events wake the thread earlier.
"""

from __future__ import annotations

import contextlib
import importlib
import itertools
import mmap
import os
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata
from typing import TYPE_CHECKING, Any, Final

from lmkv.errors import PluginError
from lmkv.peer.transport import TransportError
from lmkv_backend_nixl_pd.doorstep import DOOR_BYTES, SIGN_BYTES, address_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

PACKAGES: Final = ("nixl_cu13", "nixl_cu12", "nixl_rocm")
"""Builds of the library. For host memory all are the same."""
WORKERS: Final = 2
"""Of the agent that begins transfers."""
PROGRESS_MICROS: Final = 100_000
"""Longest sleep of the progress thread."""
UCX_SETTINGS: Final = {
    "UCX_WARN_UNUSED_ENV_VARS": "n",
    # What is cut off on purpose leaves requests behind, which UCX would list one by one.
    "UCX_LOG_LEVEL": "error",
}
"""What UCX is told unless the environment says otherwise."""


def bindings() -> Any:
    """The library's bindings.

    Raises:
        PluginError: it is not installed, or does not load on this machine.
    """
    found = [name for name in PACKAGES if name in sys.modules] or list(PACKAGES)
    reasons = []
    for name in found:
        try:
            return importlib.import_module(f"{name}._bindings")
        except ModuleNotFoundError as e:
            if e.name != name:
                reasons.append(f"{name}: {e}")
        except (ImportError, OSError) as e:  # a shared library that is not there
            reasons.append(f"{name}: {e}")
    why = "; ".join(reasons) or "it is not installed"
    raise PluginError(
        f"transport 'nixl' needs the NIXL library: {why}. Install nixl-cu12 or nixl-cu13 (for hosts without CUDA: "
        "pip install --no-deps nixl-cu12, beside numpy); until then nodes use tcp"
    )


def version_of(library: Any) -> str:
    """Of the distribution that these bindings are from."""
    return metadata.version(library.__name__.partition(".")[0])


class Agent:
    """Thread-safe: the library is told to lock. Names of agents must never come again, on any machine.

    Calls into it are counted, so that `destroy` waits for those that are under way: afterwards no transfer that it ever
    began touches memory, whatever became of it. Nothing else of the library gives that promise.
    """

    def __init__(self, library: Any, name: str, memory: Sequence[tuple[int, int]], workers: int = 1) -> None:
        """Starts it and registers `memory` (address, bytes). `workers`: threads that may begin transfers at a time.

        Raises:
            TransportError: the library refuses; there is no usable network device.
        """
        self._errors = tuple(
            value for value in vars(library).values() if isinstance(value, type) and issubclass(value, Exception)
        )
        self._library = library
        self._changed = threading.Condition()
        self._users = 0
        self._retired = False
        for key, value in UCX_SETTINGS.items():
            os.environ.setdefault(key, value)
        config = library.nixlAgentConfig()
        config.useProgThread = True
        config.pthrDelay = PROGRESS_MICROS
        config.syncMode = library.NIXL_THREAD_SYNC_RW
        with self._meaning("starting NIXL"):
            self._agent = library.nixlAgent(name, config)
            self._backend = [self._agent.createBackend("UCX", {"num_workers": str(workers)})]
            table = [(address, nbytes, 0, "") for address, nbytes in memory]
            self._agent.registerMem(library.nixlRegDList(library.DRAM_SEG, table), self._backend)

    @property
    def description(self) -> bytes:
        """What another agent needs to reach this one's memory."""
        with self._use("asking for metadata") as agent:
            return bytes(agent.getLocalMD())

    @property
    def retired(self) -> bool:
        """Of no more use."""
        return self._retired

    def add(self, description: bytes) -> str:
        """Make a peer known; returns the name of its agent. Twice is once."""
        with self._use("reading a peer's metadata") as agent:
            name: bytes = agent.loadRemoteMD(description)
            return name.decode("ascii", "replace")

    def forget(self, name: str) -> None:
        """Disconnect. Never raises."""
        with contextlib.suppress(TransportError), self._use("disconnecting") as agent:
            agent.invalidateRemoteMD(name)

    def begin(
        self,
        operation: str,
        local: Sequence[tuple[int, int]],
        remote: Sequence[tuple[int, int]],
        peer: str,
    ) -> tuple[int, bool]:
        """Start a transfer between (address, bytes) here and there.

        Returns the transfer, which has to be released, and whether it is done already.
        """
        library = self._library
        kind = library.NIXL_READ if operation == "read" else library.NIXL_WRITE
        with self._use(operation) as agent:
            handle = agent.createXferReq(kind, self._table(local), self._table(remote), peer, b"", self._backend)
            try:
                return handle, self._is_done(agent.postXferReq(handle), operation)
            except BaseException:
                with contextlib.suppress(*self._errors):
                    agent.releaseXferReq(handle)
                raise

    def done(self, handle: int) -> bool:
        """Whether that transfer is done; raises when it has failed."""
        with self._use("a transfer") as agent:
            return self._is_done(agent.getXferStatus(handle), "a transfer")

    def release(self, handle: int) -> None:
        """Forget a transfer; raises when it goes on all the same."""
        with self._use("releasing a transfer") as agent:
            agent.releaseXferReq(handle)

    def tell(self, peer: str, note: bytes) -> None:
        """Send a note to a peer. Never raises: it may be lost."""
        with contextlib.suppress(TransportError), self._use("sending a note") as agent:
            agent.genNotif(peer, note, self._backend)

    def notes(self) -> list[bytes]:
        """What peers have said since the last call."""
        with self._use("asking for notes") as agent:
            found: dict[str, list[bytes]] = agent.getNotifs({}, self._backend)
            return [note for notes in found.values() for note in notes]

    def destroy(self) -> None:
        """Cut all connections and forget everything. Waits for calls that are under way. Idempotent."""
        with self._changed:
            self._retired = True
            while self._users:
                self._changed.wait()
            self._agent = None

    @contextlib.contextmanager
    def _use(self, what: str) -> Iterator[Any]:
        with self._changed:
            if self._retired:
                raise TransportError(f"{what}: NIXL has been stopped here")
            self._users += 1
        try:
            with self._meaning(what):
                yield self._agent
        finally:
            with self._changed:
                self._users -= 1
                self._changed.notify_all()

    @contextlib.contextmanager
    def _meaning(self, what: str) -> Iterator[None]:
        try:
            yield
        except self._errors as e:
            raise TransportError(f"{what}: {type(e).__name__} ({e})") from e

    def _is_done(self, status: Any, what: str) -> bool:
        if status == self._library.NIXL_SUCCESS:
            return True
        if status == self._library.NIXL_IN_PROG:
            return False
        raise TransportError(f"{what}: NIXL says {status}")

    def _table(self, ranges: Sequence[tuple[int, int]]) -> Any:
        return self._library.nixlXferDList(self._library.DRAM_SEG, [(address, nbytes, 0) for address, nbytes in ranges])


class Starter:
    """The agent that begins transfers, and the peers that it knows.

    Where the kernel copies, it does so while a transfer is begun, and the library lets other threads of the same worker
    spin until then. So a few threads begin all transfers, as many as there are workers, and the others sleep.

    Attributes:
        crew: those threads.
        aside: it gets no more channels.
    """

    def __init__(self, library: Any, name: str, pool: tuple[int, int]) -> None:
        """`pool`: address and bytes. Raises as `Agent`."""
        self._page = mmap.mmap(-1, DOOR_BYTES)
        self._slots = itertools.cycle(range(0, DOOR_BYTES, SIGN_BYTES))
        self._lock = threading.Lock()
        self._members: dict[str, int] = {}
        self._base = address_of(self._page)
        self.crew = ThreadPoolExecutor(WORKERS, thread_name_prefix="lmkv-nixl")
        self.aside = False
        self.agent = Agent(library, name, [pool, (self._base, DOOR_BYTES)], WORKERS)

    def join(self, name: str, description: bytes) -> None:
        """One channel more to the peer of that name and metadata; `TransportError` when they are not good."""
        with self._lock:
            said = self.agent.add(description)
            if said != name:
                raise TransportError(f"metadata of {said!r} where that of {name!r} belongs")
            self._members[name] = self._members.get(name, 0) + 1

    def leave(self, name: str) -> None:
        """One channel less; the last one disconnects, so that a later one begins anew."""
        with self._lock:
            self._members[name] -= 1
            if not self._members[name]:
                del self._members[name]
                self.agent.forget(name)
            self._end_if_idle()

    def set_aside(self) -> None:
        """Ends with its last channel. Idempotent."""
        with self._lock:
            self.aside = True
            self._end_if_idle()

    def _end_if_idle(self) -> None:
        if self.aside and not self._members:
            self.end()

    def end(self) -> None:
        """When this returns, nothing that it has begun touches memory any more. Idempotent."""
        self.agent.destroy()
        self.crew.shutdown(wait=False)

    def slot(self) -> tuple[int, memoryview]:
        """Address and view of a place for what stands at a doorstep; others get others for a while."""
        with self._lock:
            at = next(self._slots)
        return self._base + at, memoryview(self._page)[at : at + SIGN_BYTES]
