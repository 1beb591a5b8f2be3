"""The kit for backend authors, and faults for those who test what stands on backends. Needs pytest.

* `BackendSuite`: derive a test class from it, say how to build your backend, run pytest (`ResidentSuite`: host memory).
* `FaultyBackend`: any backend, with a script of what goes wrong when.
* `make_key`, `make_payload`, `make_memory`: material for tests of your own.
"""

from __future__ import annotations

import pytest

pytest.register_assert_rewrite(
    "lmkv.testing.buffers",
    "lmkv.testing.concurrency",
    "lmkv.testing.contract",
    "lmkv.testing.persistence",
    "lmkv.testing.resident",
    "lmkv.testing.suite",
)

from lmkv.testing.faults import (  # noqa: E402  after the registration, or asserts would explain nothing
    Fault,
    FaultyBackend,
    corrupts,
    fails,
    hangs,
    misses,
    no_space,
    raises,
    rejects,
    short,
    slow,
)
from lmkv.testing.material import make_key, make_memory, make_payload  # noqa: E402
from lmkv.testing.suite import BackendSuite, ResidentSuite  # noqa: E402

__all__ = [
    "BackendSuite",
    "Fault",
    "FaultyBackend",
    "ResidentSuite",
    "corrupts",
    "fails",
    "hangs",
    "make_key",
    "make_memory",
    "make_payload",
    "misses",
    "no_space",
    "raises",
    "rejects",
    "short",
    "slow",
]
