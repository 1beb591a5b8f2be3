"""Tiers that can be made ill in every way there is, and requests that go on meanwhile.

A `Store` is a tier's storage with its faults by name. `Traffic` sends requests from several threads and looks at every
byte that comes back; what each request had to wait for the cache is what an engine would have been held up.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import logging
import random
import shutil
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from fake_engine import CHUNK, FRAME, PLUGINS, Node, Request, prompts
from proxy_rig import FaultProxy
from redis_rig import RedisServer
from s3_rig import JuiceGateway, client, make_bucket

from lmkv.config import load_config
from lmkv.errors import BackendError
from lmkv.observe.log import RateLimited
from lmkv.testing import FaultyBackend, corrupts, fails, hangs, misses, raises, rejects, short, slow

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from typing import Self

    from server_rig import Server

    from lmkv.config import Config
    from lmkv.testing import Fault

DEADLINE = 1.0
"""So long that nothing but the tier can be the reason for such a wait."""
PROBE = 0.3
FAILURES = 3
CALLS = 64
BYTES = 256 * FRAME
KNOWN = list(prompts(24, 3 * CHUNK))
"""Prompts that are in the tier before it is made ill."""


class Store:
    """What a tier keeps its frames in.

    Attributes:
        hangs: faults under which calls do not return before their deadline.
        fails: faults under which calls fail at once.
        lies: faults under which calls give what is wrong, or nothing, without failing.
        slows: faults that cost time but stay well below the deadline.
    """

    hangs: dict[str, Callable[[], object]]
    fails: dict[str, Callable[[], object]]
    lies: dict[str, Callable[[], object]]
    slows: dict[str, Callable[[], object]]

    def tier(self) -> dict[str, Any]:
        """`backend` and `options`."""
        raise NotImplementedError

    def attach(self, node: Node) -> None:
        """The node's storage has started."""

    def begin(self, fault: str) -> None:
        """Make it ill."""
        (self.hangs | self.fails | self.lies | self.slows)[fault]()

    def heal(self) -> None:
        """Make it well again."""
        raise NotImplementedError

    def touched(self) -> int:
        """How often somebody has come to it so far."""
        raise NotImplementedError

    def close(self) -> None:
        """The test is over; it has been healed."""


class DiskStore(Store):
    """A folder behind a `FaultyBackend`, or taken away."""

    hangs = dict.fromkeys(("hangs", "too slow"))  # type: ignore[assignment]  the names, for parameters of tests
    fails = dict.fromkeys(("raises", "every key fails", "no space", "folder gone"))  # type: ignore[assignment]
    lies = dict.fromkeys(("corrupts", "short", "misses", "rejects"))  # type: ignore[assignment]
    slows = dict.fromkeys(("slow",))  # type: ignore[assignment]

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.backend: FaultyBackend | None = None
        self._go = threading.Event()
        self.hangs = {"hangs": self._hang, "too slow": lambda: self.all(slow(1.5 * DEADLINE))}
        self.fails = {
            "raises": lambda: self.all(raises(BackendError("[Errno 5] Input/output error", kind="io"))),
            "every key fails": lambda: self.all(fails(OSError(errno.EIO, "Input/output error"))),
            "no space": lambda: self.some(fails(OSError(errno.ENOSPC, "No space left on device")), "put"),
            "folder gone": lambda: shutil.move(self.folder, self._away),
        }
        self.lies = {
            "corrupts": lambda: self.some(corrupts(17), "get"),
            "short": lambda: self.some(short(), "get"),
            "misses": lambda: self.some(misses(), "get"),
            "rejects": lambda: self.some(rejects(), "get", "put"),
        }
        self.slows = {"slow": lambda: self.all(slow(0.03))}

    @property
    def _away(self) -> Path:
        return self.folder.with_name("away")

    def tier(self) -> dict[str, Any]:
        return {"backend": "disk", "capacity": 512 * FRAME, "options": {"path": str(self.folder)}}

    def attach(self, node: Node) -> None:
        tier = node.manager.tier("far")
        self.backend = FaultyBackend(tier.backend)
        tier.backend = self.backend
        tier._calls.watch._backend = self.backend

    def touched(self) -> int:
        assert self.backend is not None
        return self.backend.calls.total()

    def some(self, fault: Fault, *operations: str) -> None:
        assert self.backend is not None
        for operation in operations:
            self.backend.script(operation, fault, None)

    def all(self, fault: Fault) -> None:
        """The operations of which keys have outcomes; what only raises goes for the others too."""
        self.some(fault, "get", "put")
        if fault.act.__qualname__.startswith(("raises", "hangs", "slow")):
            self.some(fault, "delete", "set_aside", "touch", "describe", "health")

    def _hang(self) -> None:
        self._go.clear()
        self.all(hangs(self._go))

    def heal(self) -> None:
        if self.backend is not None:
            self.backend.heal()
        self._go.set()
        if self._away.exists():
            shutil.move(self._away, self.folder)


class RemoteStore(Store):
    """A real server behind a proxy that goes wrong."""

    hangs = dict.fromkeys(("silent", "late", "trickles", "stopped"))  # type: ignore[assignment]  the names, as above
    fails = dict.fromkeys(("reset", "garbage", "refused", "cut", "killed"))  # type: ignore[assignment]
    lies = dict.fromkeys(("emptied",))  # type: ignore[assignment]
    slows = dict.fromkeys(("slow",))  # type: ignore[assignment]

    def __init__(self, server: Server) -> None:
        self.server = server.start()
        self.proxy = FaultProxy(server.port).__enter__()
        self.hangs = {
            "silent": self.proxy.silence,
            "late": lambda: self.proxy.delay(1.5 * DEADLINE),
            "trickles": lambda: self.proxy.throttle(50),
            "stopped": self.server.stop_answering,
        }
        self.fails = {
            "reset": self.proxy.reset,
            "garbage": self.proxy.garbage,
            "refused": self.proxy.refuse,
            "cut": lambda: self.proxy.cut_after(40),
            "killed": self.server.kill,
        }
        self.lies = {"emptied": self.empty}
        self.slows = {"slow": lambda: self.proxy.delay(0.02)}

    def empty(self) -> None:
        """Another tool deletes everything."""
        raise NotImplementedError

    def touched(self) -> int:
        return self.proxy.accepted

    def heal(self) -> None:
        if self.server.running:
            self.server.go_on()
        self.server.start()
        self.proxy.heal()

    def close(self) -> None:
        self.proxy.__exit__()
        self.server.__exit__()


class RedisStore(RemoteStore):
    """A real Redis."""

    server: RedisServer

    def __init__(self, folder: Path) -> None:
        super().__init__(RedisServer(folder))

    def tier(self) -> dict[str, Any]:
        return {"backend": "redis", "options": {"url": f"redis://{self.proxy.address}/0"}}

    def empty(self) -> None:
        self.server.cli("FLUSHALL")


class S3Store(RemoteStore):
    """A real S3 server."""

    server: JuiceGateway

    def __init__(self, folder: Path) -> None:
        super().__init__(JuiceGateway(folder))
        self.bucket = make_bucket(self.server)

    def tier(self) -> dict[str, Any]:
        options = {
            "bucket": self.bucket,
            "endpoint": f"http://{self.proxy.address}",
            "addressing": "path",
            "access_key": self.server.access_key,
            "secret_key": self.server.secret_key,
        }
        return {"backend": "s3", "options": options}

    def empty(self) -> None:
        with contextlib.closing(client(self.server)) as s3:
            for page in s3.get_paginator("list_objects_v2").paginate(Bucket=self.bucket):
                for found in page.get("Contents", ()):
                    s3.delete_object(Bucket=self.bucket, Key=found["Key"])


def start(store: Store, *, ram: int | None = 8 * FRAME, **tier: Any) -> Node:
    """A small RAM tier above the store's: nearly every load comes from there."""
    node = Node(config(store, ram=ram, **tier))
    store.attach(node)
    return node


def config(store: Store, *, ram: int | None = 8 * FRAME, **tier: Any) -> Config:
    tiers: list[dict[str, Any]] = [] if ram is None else [{"name": "ram", "backend": "cpu", "capacity": ram}]
    common = {
        "name": "far",
        "deadline": f"{DEADLINE}s",
        "breaker": {"failures": FAILURES, "probe": f"{PROBE}s"},
        "queue": {"calls": CALLS, "bytes": BYTES},
    }
    tiers.append({**common, **store.tier(), **tier})
    pool = {"size": 1 << 20, "staging": 64 * FRAME, "prefault": False}
    return load_config({"chunk_tokens": CHUNK, "pool": pool, "tiers": tiers}, host=PLUGINS, environ={})


class Visit(NamedTuple):
    """One request."""

    at: float
    """When it came (`time.monotonic`)."""
    waited: float
    """Seconds for its look-up and its load."""
    came: int
    """Tokens that were not computed."""


class Traffic:
    """Requests from `threads` threads, each with an engine of its own and `pause` seconds after each of its requests.

    A context manager; its end raises what went wrong in a thread, above all wrong bytes.
    """

    def __init__(
        self, node: Node, *, threads: int = 4, pause: float = 0.002, known: Sequence[list[int]] = KNOWN
    ) -> None:
        self.node = node
        self.visits: list[Visit] = []
        self.queues: list[tuple[int, int]] = []
        self._known = known
        self._pause = pause
        self._fresh = itertools.count(1_000_000, 1000)
        self._stop = threading.Event()
        self._errors: list[BaseException] = []
        self._threads = [threading.Thread(target=self._run, args=[number]) for number in range(threads)]

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(30)
        assert not any(thread.is_alive() for thread in self._threads), "a request hangs"
        if self._errors and kind is None:
            raise self._errors[0]

    def go_on(self, seconds: float) -> list[Visit]:
        """Let requests come for so long; those that came in this time and have been served."""
        begin = time.monotonic()
        self.wait(lambda: time.monotonic() - begin > seconds, seconds + 30, "time goes by")
        return self.since(begin)

    def since(self, begin: float) -> list[Visit]:
        """Requests that came after `begin` and have been served."""
        return [visit for visit in list(self.visits) if visit.at >= begin]

    def wait(self, true: Callable[[], bool], seconds: float, what: str) -> float:
        """Let requests come until it is; how long that took."""
        begin = time.monotonic()
        tier = self.node.manager.tier("far")
        while not true():
            if self._errors:
                raise self._errors[0]
            assert time.monotonic() - begin < seconds, f"not within {seconds:g} s: {what}"
            self.queues.append(tier.queue())
            time.sleep(0.01)
        return time.monotonic() - begin

    def _run(self, number: int) -> None:
        try:
            engine = self.node.engine()
            dice = random.Random(number)
            while not self._stop.is_set():
                new = dice.random() < 0.2
                prompt = next(iter(prompts_from(next(self._fresh)))) if new else dice.choice(self._known)
                at = time.monotonic()
                request = Request([engine], prompt).queue().look_up()
                request.allocate().load()
                waited = time.monotonic() - at
                request.run().store().finish()
                self.visits.append(Visit(at, waited, request.computed))
                time.sleep(self._pause)
        except BaseException as error:  # noqa: BLE001  told to the test
            self._errors.append(error)


def prompts_from(number: int) -> Iterator[list[int]]:
    """One prompt that nobody has asked before."""
    yield list(range(number, number + 2 * CHUNK))


class Lines(logging.Handler):
    """What a service would have written to its log: warnings after the rate limit. `all` counts those before it."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []
        self.all = 0
        self._limit = RateLimited(3600.0)

    def handle(self, record: logging.LogRecord) -> bool:
        self.all += 1
        if self._limit.filter(record):
            self.lines.append(f"{record.name}: {record.getMessage()}")
        return True


@contextlib.contextmanager
def lines() -> Iterator[Lines]:
    """Collect them."""
    made = Lines()
    logging.getLogger().addHandler(made)
    try:
        yield made
    finally:
        logging.getLogger().removeHandler(made)


def fill(node: Node, known: Sequence[list[int]] = KNOWN) -> None:
    """Store the known prompts, all of them."""
    engine = node.engine()
    for prompt in known:
        engine.store(prompt)
        node.settle()


def state(node: Node) -> str:
    """Of the tier."""
    return str(node.on_loop(node.manager.health)[1]["far"]["state"])


def descriptors() -> int:
    """Files and sockets that this process has open."""
    return sum(1 for _ in Path("/proc/self/fd").iterdir())
