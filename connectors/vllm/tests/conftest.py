from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import pytest
from counted import Counted
from fake_vllm import FakeVLLM, stack

from lmkv.service import LocalClient, ThreadHost
from lmkv.service.protocol import Clear, Cleared, GetHealth, HealthReport

if TYPE_CHECKING:
    from collections.abc import Iterator


class Rig:
    """Services and engines of one test, and what they must have left at its end: nothing."""

    def __init__(self) -> None:
        self.hosts: list[ThreadHost] = []
        self.engines: list[FakeVLLM] = []

    def host(self, **settings: Any) -> ThreadHost:
        self.hosts.append(ThreadHost(stack(**settings)))
        return self.hosts[-1]

    def engine(self, host: ThreadHost | None = None, **arguments: Any) -> FakeVLLM:
        if host is None:
            host = self.hosts[-1] if self.hosts else self.host(ranks=arguments.get("ranks", 1))
        self.engines.append(FakeVLLM(host, **arguments))
        return self.engines[-1]

    def health(self, host: ThreadHost | None = None) -> HealthReport:
        client = LocalClient(host or self.hosts[-1], "test")
        report = client.call(GetHealth()).result(5)
        client.close()
        assert isinstance(report, HealthReport)
        return report

    def counted(self) -> Counted:
        return Counted(self.health().counters)

    def clear(self, tier: str) -> int:
        """How many frames were taken out of the last service's tier."""
        client = LocalClient(self.hosts[-1], "test")
        report = client.call(Clear(None, tier)).result(5)
        client.close()
        assert isinstance(report, Cleared)
        return report.counts[tier]

    def quiet(self, host: ThreadHost, seconds: float = 10.0) -> None:
        """Wait until all that was saved is stored, and no tier has anything to do."""
        manager, until = host.storage.manager, time.monotonic() + seconds

        async def busy() -> bool:
            return manager.holds()["reservations"] > 0 or any(tier.busy for tier in manager.stack.tiers)

        while host.run(busy(), seconds):
            assert time.monotonic() < until, "a tier is still busy, or a save under way"
            time.sleep(0.005)

    def nothing_held(self, seconds: float = 3.0) -> None:
        """No lease, hold or reservation is left anywhere."""
        until = time.monotonic() + seconds
        for host in self.hosts:
            while any(count for name, count in self.health(host).holds.items() if name not in {"sessions", "pins"}):
                assert time.monotonic() < until, self.health(host).holds
                time.sleep(0.005)

    def close(self) -> None:
        for engine in self.engines:
            engine.close()
        for host in self.hosts:
            host.close()


@pytest.fixture
def rig() -> Iterator[Rig]:
    made = Rig()
    try:
        yield made
        made.nothing_held()
    finally:
        made.close()
