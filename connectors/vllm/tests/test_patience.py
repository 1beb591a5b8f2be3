"""How long a request waits for its look-up, where nobody has said it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from lmkv_vllm.lookups import PATIENCE, PATIENCE_MAX, patience
from lmkv_vllm.settings import Settings


@pytest.mark.parametrize(
    ("tokens", "rate", "asks", "seconds"),
    [
        (100_000, 1_000.0, False, PATIENCE),
        (2_000, 0.0, True, PATIENCE_MAX),
        (2_000, 2_000.0, True, 0.25),
        (16, 2_000.0, True, PATIENCE),
        (1_000_000, 2_000.0, True, PATIENCE_MAX),
    ],
)
def test_a_request_waits_for_other_stores_a_part_of_what_computing_takes(
    tokens: int, rate: float, asks: bool, seconds: float
) -> None:
    assert patience(tokens, rate, asks=asks) == seconds


def test_the_service_says_whether_stores_are_asked(rig: Any) -> None:
    """And the scheduler waits accordingly, unless it is told how long."""
    shared = {"backend": "redis", "options": {"url": "redis://127.0.0.1:1"}}  # away: it counts all the same
    request = SimpleNamespace(request=SimpleNamespace(num_tokens=2000))
    for tiers, given, seconds in (
        ([], None, PATIENCE),
        ([shared], None, PATIENCE_MAX),
        ([shared], 0.02, 0.02),
    ):
        host = rig.host(tiers=[{"backend": "cpu", "capacity": "100%"}, *tiers])
        scheduler = rig.engine(host, settings=Settings(lookup_deadline=given)).scheduler
        assert scheduler._patience(scheduler._engine, request) == seconds
