"""A reset: whatever the service does meanwhile, nothing that was stored before is found after it."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Any

import fake_vllm
from fake_vllm import FakeLink, Request, truth

from lmkv.errors import ClosedError, ConfigError
from lmkv.service.link import failed
from lmkv.service.protocol import Clear, Register

if TYPE_CHECKING:
    from collections.abc import Callable

    import pytest


def tokens(count: int, start: int = 1) -> list[int]:
    return list(range(start, start + count))


def eventually(condition: Callable[[], bool], seconds: float = 20.0) -> None:
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.005)


def namespace(engine: Any) -> bytes:
    found: bytes = engine.scheduler._engine.namespace.id
    return found


class Fails:
    """A client whose requests of one kind fail."""

    def __init__(self, client: Any, kind: Any, error: Exception) -> None:
        self._client, self._plain = client, client.call
        self.asked = 0

        def call(request: Any) -> Any:
            if not isinstance(request, kind):
                return self._plain(request)
            self.asked += 1
            return failed(error)

        client.call = call

    def heal(self) -> None:
        self._client.call = self._plain


class LateLink(FakeLink):
    """A service that is reached only when the test says so."""

    def __init__(self, client: Any) -> None:
        super().__init__(None)
        self._late = client
        self._callback: Callable[[], None] = lambda: None

    def when_ready(self, callback: Any) -> None:
        self._callback = callback

    def come(self) -> None:
        self.client = self._late
        self._callback()

    def close(self) -> None:
        self._late.close()


def test_another_namespace(rig: Any) -> None:
    """A save that was under way at the reset ends after it: it is not found, nor is what ran before stored as new."""
    engine = rig.engine()
    before = namespace(engine)
    inner, go, begun = engine.workers[0]._gpu.inner, threading.Event(), threading.Event()
    gather = inner.gather

    def waits(jobs: Any, **more: Any) -> None:
        begun.set()
        go.wait(20)
        gather(jobs, **more)

    inner.gather = waits
    running = engine.add(Request("running", tokens(12), max_tokens=4))
    engine.step()
    assert begun.wait(20)
    assert engine.scheduler.reset() is True
    after = namespace(engine)
    assert after != before
    go.set()
    engine.run()
    assert running.output == truth(tokens(12), 4)
    assert engine.ask(tokens(12)).external == 0
    assert engine.ask(tokens(12)).external == 10
    assert engine.scheduler.reset() is True
    assert namespace(engine) not in {before, after}


def test_finished_just_before(rig: Any) -> None:
    """A request whose last pages are still to be saved when the reset comes: they are not stored as new."""
    engine = rig.engine()
    request = engine.add(Request("finished", tokens(3), max_tokens=1))
    while request.request_id in engine.requests:
        engine.step()
    assert engine.scheduler._finished
    engine.scheduler.reset()
    engine.run()
    assert engine.ask(tokens(9)).external == 0
    engine.ask(tokens(3, 100), max_tokens=1)
    assert engine.ask(tokens(9, 100)).external == 2


def test_before_the_service_is_reached(rig: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights are changed while the service is not there yet; then it comes, and has frames of the old ones."""
    host = rig.host()
    rig.engine(host).ask(tokens(13))
    monkeypatch.setattr(fake_vllm, "FakeLink", LateLink)
    engine = rig.engine(host)
    assert engine.scheduler.reset() is True
    for link in reversed(engine.links):
        link.come()
    assert engine.ask(tokens(13)).external == 0
    assert engine.ask(tokens(13)).external == 12


def test_namespace_is_refused(rig: Any) -> None:
    """The service will not have the new namespace: the engine runs without cache, and not with the old one."""
    engine = rig.engine()
    engine.ask(tokens(13))
    waiting = engine.add(Request("waiting", tokens(13, 300)))
    fails = Fails(engine.links[0].client, Register, ConfigError("the tier holds less", kind="too-small"))
    assert engine.scheduler.reset() is True
    assert fails.asked == 1
    fails.heal()
    engine.run()
    assert waiting.output == truth(tokens(13, 300), 3)
    assert rig.engine().ask(tokens(13, 300)).external == 0, "the workers have the old namespace still"
    assert engine.ask(tokens(13)).external == 0
    assert engine.ask(tokens(13), max_tokens=2).external == 0, "nothing is stored, or the workers have the old one"
    engine.scheduler._epochs._again()  # what a reconnection does
    assert engine.ask(tokens(13)).external == 0
    assert engine.ask(tokens(13)).external == 12


def test_service_is_away(rig: Any) -> None:
    """It cannot be told to clear: a reset all the same, or vLLM would raise. It is told when it is back."""
    engine = rig.engine()
    engine.ask(tokens(13))
    before = rig.health().tiers["ram"]["frames"]
    assert before > 0
    fails = Fails(engine.links[0].client, Clear, ClosedError("gone"))
    assert engine.scheduler.reset() is True
    assert fails.asked == 1
    fails.heal()
    assert engine.ask(tokens(13)).external == 0
    frames = rig.health().tiers["ram"]["frames"]
    engine.scheduler._epochs._again()
    assert rig.health().tiers["ram"]["frames"] == frames - before


def test_service_does_not_answer(rig: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The reset waits a bounded time; the namespace that is registered later is used from then on, and told to all."""
    monkeypatch.setattr("lmkv_vllm.epochs.RESET_SECONDS", 0.05)
    engine = rig.engine()
    engine.ask(tokens(13))
    client, go = engine.links[0].client, threading.Event()
    plain = client.call
    client.call = lambda request: (isinstance(request, Register) and go.wait(20), plain(request))[1]
    assert engine.scheduler.reset() is True
    assert engine.scheduler._engine is None
    assert engine.ask(tokens(13)).external == 0
    go.set()
    eventually(lambda: engine.scheduler._epochs._made is not None)
    assert engine.ask(tokens(13)).external == 0
    assert engine.ask(tokens(13)).external == 12


def test_two_resets_at_once(rig: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second comes while the first one's namespace is being registered: only the second one's is ever used."""
    monkeypatch.setattr("lmkv_vllm.epochs.RESET_SECONDS", 0.0)
    engine = rig.engine()
    engine.ask(tokens(13))
    client, gates = engine.links[0].client, [threading.Event(), threading.Event()]
    plain, registered = client.call, []

    def call(request: Any) -> Any:
        if isinstance(request, Register):
            registered.append(request.namespace_json)
            gates[len(registered) - 1].wait(20)
        return plain(request)

    client.call = call
    epochs = engine.scheduler._epochs
    epochs.renew()
    eventually(lambda: len(registered) == 1)
    epochs.renew()
    gates[0].set()
    eventually(lambda: len(registered) == 2)
    epochs.take()
    assert epochs.engine is None
    gates[1].set()
    eventually(lambda: epochs._made is not None)
    epochs.take()
    assert epochs.engine.namespace.json() == registered[1]
    assert engine.ask(tokens(13)).external == 0
    assert engine.ask(tokens(13)).external == 12


def test_many_resets_leave_nothing_behind(rig: Any) -> None:
    """A training loop resets after each step: neither client nor service keeps what nobody will ask for again."""
    engine = rig.engine(ranks=2)
    seen: set[bytes] = set()
    gone: list[bytes] = []
    for link in engine.links:
        client = link.client
        plain = client.unregister
        client.unregister = lambda space, plain=plain: (gone.append(space.id), plain(space))
    for number in range(6):
        seen.add(namespace(engine))
        engine.ask(tokens(9, 100 * number))
        assert engine.scheduler.reset() is True
    engine.ask(tokens(9))
    everybody = len(engine.links)
    assert sorted(gone) == sorted(list(seen) * everybody)
    clients = {space.id: space.clients for space in rig.hosts[0].storage.manager.index.namespaces.values()}
    assert clients[namespace(engine)] == everybody
    assert not any(count for identity, count in clients.items() if identity != namespace(engine))
    assert rig.health().tiers["ram"]["frames"] <= 3 * 2
