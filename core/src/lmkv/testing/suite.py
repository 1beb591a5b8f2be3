"""`BackendSuite` and `ResidentSuite`: what every backend must do, as tests.

Usage:

    class TestFoo(BackendSuite):
        @pytest.fixture
        def make_backend(self, tmp_path):
            return lambda: FooBackend(FooOptions(path=tmp_path), BackendContext(tier="foo"))

A test is skipped only because of what `capabilities` says; what is claimed there is tested. A test that your backend
cannot pass is overridden with `pytest.mark.xfail(reason=…)` on it, and with nothing else.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import pytest

from lmkv.testing.buffers import BufferTests, CopyTests
from lmkv.testing.concurrency import ConcurrencyTests
from lmkv.testing.contract import ContractTests
from lmkv.testing.driven import DrivenBackend
from lmkv.testing.persistence import PersistenceTests
from lmkv.testing.resident import ResidentTests

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from lmkv.backend import StorageBackendInterface


class Suite:
    """The fixtures. Derive from `BackendSuite` or `ResidentSuite`."""

    ways: ClassVar[tuple[str, ...]] = ()

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        """Every test that opens a backend does it in each of the suite's ways."""
        if "open_backend" in metafunc.fixturenames:
            metafunc.parametrize("open_backend", self.ways, indirect=True)

    @pytest.fixture
    def make_backend(self) -> Callable[[], StorageBackendInterface]:
        """Override: a callable that makes a backend. All that one test makes share one store, which is empty at first.

        The suite closes each of them. What else must be cleaned up (a server, a bucket) belongs behind a `yield`.
        """
        raise NotImplementedError("override the fixture make_backend")

    @pytest.fixture
    def open_backend(
        self, request: pytest.FixtureRequest, make_backend: Callable[[], StorageBackendInterface]
    ) -> Iterator[Callable[[], StorageBackendInterface]]:
        """Makes backends, bare or behind a driver, and closes them."""
        made: list[StorageBackendInterface] = []

        def make() -> StorageBackendInterface:
            backend = make_backend()
            made.append(DrivenBackend(backend) if request.param == "driver" else backend)
            return made[-1]

        yield make
        for backend in made:
            backend.close()

    @pytest.fixture
    def backend(self, open_backend: Callable[[], StorageBackendInterface]) -> StorageBackendInterface:
        """The backend under test."""
        return open_backend()

    def test_suite_is_not_weakened(self) -> None:
        """A subclass overrides no test except to mark it as an expected failure with a reason."""
        suite = next(cls for cls in type(self).__mro__ if cls in {BackendSuite, ResidentSuite})
        for name in dir(suite):
            test = getattr(type(self), name)
            if not name.startswith("test_") or test is getattr(suite, name):
                continue
            marks = [mark for mark in getattr(test, "pytestmark", []) if mark.name == "xfail"]
            reasons = [mark.kwargs.get("reason") for mark in marks]
            assert any(reasons), f"{name} is overridden without pytest.mark.xfail(reason=…)"


class BackendSuite(ContractTests, BufferTests, CopyTests, ConcurrencyTests, PersistenceTests, Suite):
    """For backends that copy frames. Every test runs on the bare backend and behind the driver of a tier."""

    ways = ("bare", "driver")

    def test_is_not_resident(self, backend: StorageBackendInterface) -> None:
        """A resident backend is tested by `ResidentSuite`."""
        assert not backend.capabilities.resident


class ResidentSuite(ContractTests, BufferTests, ResidentTests, Suite):
    """For backends that keep memory objects. They run on the storage loop alone: bare, in one thread."""

    ways = ("bare",)

    def test_is_resident(self, backend: StorageBackendInterface) -> None:
        """Any other backend is tested by `BackendSuite`."""
        assert backend.capabilities.resident
