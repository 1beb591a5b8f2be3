"""Random orders of every event that can happen to the storage: the invariants hold, nothing is held at the end."""

from __future__ import annotations

import asyncio
import contextlib
import random
import threading
from typing import TYPE_CHECKING, Any

import hypothesis.strategies as st
from hypothesis import HealthCheck, settings
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule
from storage_rig import FRAME, Client, Shelf, chain, namespace, storage

from lmkv.errors import BackendError
from lmkv.service import protocol as p
from lmkv.storage import loads
from lmkv.types import FAILED, MISS

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Sequence

    from lmkv.keys import KeyChain
    from lmkv.types import ChunkKey, Outcome

SHARDS = 2
TAILS = ([], [1, 2, 3], range(20, 28), range(30, 33))
PROMPTS = [[*range(8), *tail] for tail in TAILS] + [list(range(50, 50 + n)) for n in (5, 9)]
prompts = st.sampled_from(range(len(PROMPTS)))


class StorageMachine(RuleBasedStateMachine):
    """Two clients, RAM for six frames, a shelf for ten that fails now and then."""

    leases = Bundle("leases")
    holds = Bundle("holds")
    reservations = Bundle("reservations")

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.frames_in_batch, loads.BATCH_FRAMES = loads.BATCH_FRAMES, 1  # so that some loads wait for others
        self.shelf = Shelf()
        self.shelf.on_get = self.shelf.on_put = self.weather
        self.storm = ""
        self.gate = threading.Event()
        self.gate.set()
        self.stack = contextlib.AsyncExitStack()
        below = [(self.shelf, {"capacity": 10 * FRAME, "deadline": 0.5, "failures": 3, "probe": 0.01})]
        self.manager = self.run(
            self.stack.enter_async_context(storage(ram=6 * FRAME, below=below, staging=4 * FRAME, lease_seconds=30))
        )
        self.space = namespace(SHARDS)
        self.clients = [self.inside(Client, self.manager, self.space, f"client {i}") for i in range(2)]
        self.chains: list[KeyChain] = [chain(list(tokens)) for tokens in PROMPTS]

    def run(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        return self.loop.run_until_complete(coroutine)

    def inside(self, function: Callable[..., Any], *args: Any) -> Any:
        """Call a blocking function on the loop."""

        async def body() -> Any:
            return function(*args)

        return self.run(body())

    def ask(self, who: int, message: p.Message) -> Any:
        return self.run(self.clients[who].wait(message))

    def weather(self, keys: Sequence[ChunkKey]) -> Sequence[Outcome] | None:
        self.gate.wait(5)
        if self.storm == "raise":
            raise BackendError("storm")
        if self.storm == "fail":
            return [FAILED(BackendError("rain")) for _ in keys]
        if self.storm == "miss":
            return [MISS for _ in keys]
        return None

    @rule(storm=st.sampled_from(["", "", "", "raise", "fail", "miss"]))
    def change_weather(self, storm: str) -> None:
        self.storm = storm

    @rule(who=st.integers(0, 1), prompt=prompts, shard=st.integers(0, SHARDS - 1), target=reservations)
    def reserve(self, who: int, prompt: int, shard: int) -> tuple[int, p.Reserved, list[p.NewFrame], int]:
        client = self.clients[who]
        frames = client.frames(self.chains[prompt], tail=True)
        return who, self.ask(who, p.Reserve(self.space.id, shard, tuple(frames))), frames, shard

    @rule(reserved=consumes(reservations), fail_one=st.booleans())
    def commit(self, reserved: tuple[int, p.Reserved, list[p.NewFrame], int], fail_one: bool) -> None:
        who, reply, frames, shard = reserved
        client = self.clients[who]
        if reply.reservation not in client.session.reservations:
            return
        for frame, offset, length in zip(frames, reply.offsets, reply.lengths, strict=True):
            if offset >= 0:
                self.manager.pool.view[offset : offset + length] = client.payload(frame.digest, shard, length).data
        self.ask(who, p.Commit(reply.reservation, (0,) if fail_one else ()))

    @rule(reserved=consumes(reservations))
    def abort(self, reserved: tuple[int, p.Reserved, list[p.NewFrame], int]) -> None:
        self.ask(reserved[0], p.Abort(reserved[1].reservation))

    @rule(who=st.integers(0, 1), prompt=prompts, shard=st.integers(0, SHARDS - 1))
    def store(self, who: int, prompt: int, shard: int) -> None:
        client = self.clients[who]
        frames = client.frames(self.chains[prompt], tail=True)
        self.inside(lambda: client.store(frames, shards=[shard]))

    @rule(who=st.integers(0, 1), prompt=prompts, rate=st.sampled_from([0.0, 0.0, 1.0, 1e12]), target=leases)
    def look_up(self, who: int, prompt: int, rate: float) -> tuple[int, p.Found]:
        """At 1e12 tokens a second nothing pays to be loaded, once it is known what a load takes."""
        found = self.run(self.clients[who].look_up(self.chains[prompt], rate=rate))
        assert found.chunks <= len(self.chains[prompt].digests)
        assert not found.withheld or not found.pages
        assert (found.lease > 0) == bool(found.chunks or found.pages)
        return prompt, found

    @rule(who=st.integers(0, 1), prompt=prompts)
    def asked_and_given_up(self, who: int, prompt: int) -> None:
        """The loads of the first frames have begun, those of the others have not."""
        self.gate.clear()
        found = self.run(self.clients[who].look_up(self.chains[prompt]))
        self.ask(who, p.Release(found.lease))
        self.gate.set()

    @rule(prompt=prompts)
    def prefetch(self, prompt: int) -> None:
        self.ask(0, p.Prefetch(self.space.id, b"".join(self.chains[prompt].digests)))

    @rule(who=st.integers(0, 1), lease=leases, shard=st.integers(0, SHARDS - 1))
    def load(self, who: int, lease: tuple[int, p.Found], shard: int) -> None:
        prompt, found = lease
        self.run(self.clients[who].load(found, self.chains[prompt], shard=shard))

    @rule(who=st.integers(0, 1), lease=leases, shard=st.integers(0, SHARDS - 1), target=holds)
    def acquire(self, who: int, lease: tuple[int, p.Found], shard: int) -> tuple[int, int]:
        _, found = lease
        count = found.chunks + (found.pages > 0)
        return who, self.ask(who, p.Acquire(found.lease, shard, 0, count)).hold

    @rule(hold=consumes(holds))
    def done(self, hold: tuple[int, int]) -> None:
        self.ask(hold[0], p.Done(hold[1]))

    @rule(lease=leases, skip=st.integers(0, 3))
    def trim(self, lease: tuple[int, p.Found], skip: int) -> None:
        self.ask(0, p.Trim(lease[1].lease, skip))

    @rule(lease=leases, who=st.integers(0, 1))
    def release(self, lease: tuple[int, p.Found], who: int) -> None:
        self.ask(who, p.Release(lease[1].lease))

    @rule(who=st.integers(0, 1))
    def client_dies_and_comes_back(self, who: int) -> None:
        self.inside(self.clients[who].session.close)
        self.clients[who] = self.inside(Client, self.manager, self.space, f"client {who}")

    @rule(tier=st.sampled_from([None, "ram", "shelf1"]))
    def clear(self, tier: str | None) -> None:
        self.ask(0, p.Clear(None, tier))

    @rule(prompt=prompts, keep=st.booleans(), up=st.booleans())
    def move(self, prompt: int, keep: bool, up: bool) -> None:
        names = ("shelf1", "ram") if up else ("ram", "shelf1")
        self.ask(0, p.Move(self.space.id, b"".join(self.chains[prompt].digests), *names, keep))

    @rule(prompt=prompts, codec=st.sampled_from(["zlib", "identity"]))
    def recode(self, prompt: int, codec: str) -> None:
        digests = b"".join(self.chains[prompt].digests)
        self.ask(0, p.Recode(self.space.id, digests, "shelf1", codec))

    @rule(prompt=prompts, seconds=st.sampled_from([0.001, 60.0]))
    def pin(self, prompt: int, seconds: float) -> None:
        self.ask(0, p.Pin(self.space.id, b"".join(self.chains[prompt].digests), seconds))

    @rule(prompt=prompts)
    def unpin(self, prompt: int) -> None:
        self.ask(0, p.Unpin(self.space.id, b"".join(self.chains[prompt].digests)))

    @rule()
    def tick(self) -> None:
        self.run(asyncio.sleep(0.002))

    @rule(seed=st.integers(0, 9))
    def bits_flip(self, seed: int) -> None:
        with self.shelf.lock:
            keys = sorted(self.shelf.frames)
            if keys:
                key = random.Random(seed).choice(keys)
                damaged = bytearray(self.shelf.frames[key])
                damaged[seed * 100] ^= 4
                self.shelf.frames[key] = bytes(damaged)

    @invariant()
    def books_are_right(self) -> None:
        manager = self.manager
        counted: dict[int, int] = {}
        for space in manager.index.namespaces.values():
            for entry in space.entries.values():
                assert entry.holds >= 0
                assert entry.shards
                for number, part in entry.shards.items():
                    assert part.writes >= 0
                    for tier in manager.stack.tiers:
                        if part.tiers & tier.bit:
                            counted[tier.number] = counted.get(tier.number, 0) + 1
                            assert entry.key(number) in tier.index
        for tier in manager.stack.tiers:
            assert tier.capacity is not None
            assert tier.used <= tier.capacity
            assert counted.get(tier.number, 0) <= len(tier.index)
        assert manager.stack.room.filling == sum(
            slot.object.nbytes for c in self.clients for slots in c.session.reservations.values() for slot in slots
        )

    def teardown(self) -> None:
        self.storm = ""
        for client in self.clients:
            self.inside(client.session.close)
        last = self.inside(Client, self.manager, self.space)
        self.run(last.settled())
        held = {name: n for name, n in self.manager.holds().items() if n}
        assert held == {"sessions": 1}
        self.run(last.wait(p.Clear()))
        for tier in self.manager.stack.tiers:
            self.inside(tier.tidy)
        self.run(last.settled())
        assert self.manager.pool.free_bytes == self.manager.pool.nbytes, self.manager.pool.holders()
        assert not any(space.entries for space in self.manager.index.namespaces.values())
        assert all(tier.used == 0 for tier in self.manager.stack.tiers)
        assert not self.shelf.frames
        self.run(self.stack.aclose())
        self.loop.close()
        loads.BATCH_FRAMES = self.frames_in_batch


TestStorage = StorageMachine.TestCase
TestStorage.settings = settings(
    max_examples=40, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)
