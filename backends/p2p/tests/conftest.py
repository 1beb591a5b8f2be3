"""What the tests of this backend share."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from fake_peers import FakePeers

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture
def peers() -> Iterator[FakePeers]:
    made = FakePeers()
    yield made
    made.close()
