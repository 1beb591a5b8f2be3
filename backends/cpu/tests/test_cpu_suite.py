from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING

import pytest
from pydantic import ValidationError

from lmkv.errors import ClosedError
from lmkv.memory import Pool
from lmkv.specs import BackendContext
from lmkv.testing import ResidentSuite, make_key, make_memory
from lmkv.types import HealthState
from lmkv_backend_cpu.backend import CpuBackend
from lmkv_backend_cpu.options import CpuOptions

if TYPE_CHECKING:
    from collections.abc import Callable


def cpu() -> CpuBackend:
    return CpuBackend(CpuOptions(), BackendContext(tier="ram"))


class TestCpu(ResidentSuite):
    @pytest.fixture
    def make_backend(self) -> Callable[[], CpuBackend]:
        return cpu


def test_every_byte_goes_back_to_the_pool() -> None:
    pool = Pool.create(1 << 20, prefault=False, trace=True)
    backend = cpu()
    for number in range(3):
        memory = pool.allocate(8192, "put")
        assert memory is not None
        backend.put([make_key(number % 2)], [memory])
        memory.release("put")
    assert pool.free_bytes == (1 << 20) - 2 * 8192
    assert {owner for holding in pool.holders() for owner in holding.owners} == {"ram"}
    backend.close()
    assert pool.free_bytes == 1 << 20
    pool.close()


def test_closed_says_so() -> None:
    backend = cpu()
    backend.close()
    assert backend.health().state is HealthState.DOWN
    with pytest.raises(ClosedError):
        backend.adopt([make_key(1)], [make_memory(4096)])


def test_unknown_option_is_refused() -> None:
    with pytest.raises(ValidationError, match="numa"):
        CpuOptions.model_validate({"numa": 1})


def test_listing_the_plugin_imports_no_backend() -> None:
    code = (
        "import sys, lmkv_backend_cpu.plugin as p; (spec,) = p.lmkv_backends(); assert spec.name == 'cpu';"
        "assert 'lmkv_backend_cpu.backend' not in sys.modules and 'pydantic' not in sys.modules;"
        "spec.load()(spec.options()(), None.__class__ and __import__('lmkv.specs').specs.BackendContext(tier='ram'))"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
