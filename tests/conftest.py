"""What the tests that cross packages share."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from fake_engine import Node, stack

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path


@pytest.fixture
def node() -> Iterator[Callable[..., Node]]:
    """Starts storages of `stack(…)`, and checks at the end that none of them holds anything."""
    made: list[Node] = []

    def start(folder: Path | None = None, **settings: Any) -> Node:
        made.append(Node(stack(folder, **settings)))
        return made[-1]

    yield start
    for each in made:
        each.close()
