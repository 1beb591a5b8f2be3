"""A fresh set of servers for each test."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from front_rig import Site

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture
def site() -> Iterator[Site]:
    made = Site()
    try:
        yield made
    finally:
        made.close()
