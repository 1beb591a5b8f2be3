"""What the proxy counts, for Prometheus; names and meanings are in the reference page."""

from __future__ import annotations

from typing import Final

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

_SECONDS: Final = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0)


class Outcomes:
    """A counter by outcome; a word that was counted before costs a tenth of what the library takes to find it."""

    def __init__(self, counter: Counter) -> None:
        self._counter = counter
        self._known: dict[str, Counter] = {}

    def add(self, outcome: str) -> None:
        """Count one."""
        found = self._known.get(outcome)
        if found is None:
            found = self._known[outcome] = self._counter.labels(outcome)
        found.inc()


class Metrics:
    """All series of one proxy, in a registry of their own."""

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()
        self.requests = Counter(
            "lmkv_proxy_requests", "Requests by path and status; 499: the client went away.", ("path", "status"),
            registry=registry,
        )  # fmt: skip
        self.seconds = Histogram(
            "lmkv_proxy_request_seconds", "From a request's arrival to the end of its answer.", ("path",),
            buckets=_SECONDS, registry=registry,
        )  # fmt: skip
        self.up = Gauge(
            "lmkv_proxy_engine_up", "1: the engine is given requests.", ("role", "engine"), registry=registry
        )
        self.in_flight = Gauge(
            "lmkv_proxy_engine_in_flight", "Requests that the engine works on for this proxy.", ("role", "engine"),
            registry=registry,
        )  # fmt: skip
        self.engine_requests = Counter(
            "lmkv_proxy_engine_requests", "Requests sent to the engine.", ("role", "engine"), registry=registry
        )
        self.engine_failures = Counter(
            "lmkv_proxy_engine_failures", "Requests that the engine did not answer.", ("role", "engine", "kind"),
            registry=registry,
        )  # fmt: skip
        self.transfers = Outcomes(Counter(
            "lmkv_proxy_transfers", "Completion requests by how their prompt was computed.", ("outcome",),
            registry=registry,
        ))  # fmt: skip
        self.admission_seconds = Histogram(
            "lmkv_proxy_admission_seconds", "Wait for room at a decode node.", buckets=_SECONDS, registry=registry
        )
        self.prefill_seconds = Histogram(
            "lmkv_proxy_prefill_seconds", "Prompts that were computed and transferred.", buckets=_SECONDS,
            registry=registry,
        )  # fmt: skip
        self.choices = Outcomes(Counter(
            "lmkv_proxy_choices", "Completion requests by how their engine was chosen.", ("outcome",),
            registry=registry,
        ))  # fmt: skip
        self.prompt_tokens = Counter("lmkv_proxy_prompt_tokens", "Tokens of prompts looked up.", registry=registry)
        self.hit_tokens = Counter(
            "lmkv_proxy_hit_tokens", "Those of them that lay at the engine that was chosen.", registry=registry
        )

    def page(self) -> bytes:
        """The page in Prometheus' text format."""
        return generate_latest(self.registry)
