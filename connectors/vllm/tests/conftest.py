from __future__ import annotations

import re
import time
from typing import TYPE_CHECKING, Any

import pytest
from fake_vllm import FakeVLLM, stack

from lmkv.observe.families import FAMILIES
from lmkv.service import LocalClient, ThreadHost
from lmkv.service.protocol import GetHealth, HealthReport

if TYPE_CHECKING:
    from collections.abc import Iterator


class Counted:
    """Series of a service at one moment, or what has been added to them since another."""

    def __init__(self, values: dict[str, float]) -> None:
        self._values = values

    def __sub__(self, other: Counted) -> Counted:
        return Counted({name: value - other._values.get(name, 0.0) for name, value in self._values.items()})

    def names(self) -> list[str]:
        return list(self._values)

    def total(self, family: str, **labels: str) -> float:
        wanted = {f'{name}="{value}"' for name, value in labels.items()}
        return sum(value for name, value in self._values.items()
                   if name.split("{")[0] == family and wanted <= set(_labels(name)))  # fmt: skip

    def wrong_labels(self) -> list[str]:
        """Series whose labels are not those that the documentation says."""
        known = {}
        for family in FAMILIES:
            ends = ("_count", "_sum") if family.kind == "histogram" else ("",)
            known.update({family.name + end: {"instance", *family.every_label} for end in ends})
        return [name for name in self._values
                if {label.split("=")[0] for label in _labels(name)} != known[name.split("{")[0]]]  # fmt: skip


def _labels(name: str) -> list[str]:
    return re.findall(r'\w+="[^"]*"', name)


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
