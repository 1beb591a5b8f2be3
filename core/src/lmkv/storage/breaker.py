"""Circuit breaker of one direction of a tier: what keeps failing is left alone until somebody found that it works.

A breaker lets calls through or refuses them, and never tries anything itself: while it is open, the tier asks its
backend in the background (`lmkv.storage.watch`), and no request pays for that.
"""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable


class State(enum.Enum):
    """What a breaker does with calls."""

    CLOSED = "closed"
    """Lets them through."""
    OPEN = "open"
    """Refuses them."""
    TRIAL = "trial"
    """The store answers again: lets them through, and the first result decides."""


class Breaker:
    """Counts consecutive failures of one direction (reads or writes) of a tier. Lives on the storage loop.

    Args:
        failures: consecutive failures that open it.
        background: nobody waits for these calls. On trial, one of them goes at a time; and one that succeeds counts as
            a success even if it took longer than its deadline.

    Attributes:
        opened: called whenever it opens.
    """

    __slots__ = ("_failures", "_limit", "_trying", "background", "opened", "state")

    def __init__(self, failures: int, *, background: bool = False) -> None:
        self.state = State.CLOSED
        self.background = background
        self.opened: Callable[[], None] = lambda: None
        self._limit = failures
        self._failures = 0
        self._trying = False

    @property
    def open(self) -> bool:
        """Whether every call is refused."""
        return self.state is State.OPEN

    @property
    def refuses(self) -> bool:
        """Whether a call would be refused now: all are, or one is on trial and the others have to wait for it."""
        return self.state is State.OPEN or self._trying

    def allow(self) -> bool:
        """Whether a call may go out now. What was allowed is told of by `succeeded`, `failed` or `untold`."""
        if self.refuses:
            return False
        self._trying = self.background and self.state is State.TRIAL
        return True

    def succeeded(self) -> None:
        """A call did its work, be it a hit or a miss."""
        self._failures = 0
        self._trying = False
        self.state = State.CLOSED

    def failed(self) -> None:
        """A call raised, overran its deadline, or failed for every key."""
        self._failures += 1
        self._trying = False
        if self.state is State.TRIAL or self._failures >= self._limit:
            self.trip()

    def untold(self) -> None:
        """A call that was allowed did not reach the backend: it says nothing."""
        self._trying = False

    def trip(self) -> None:
        """The store is known not to work: open now."""
        self._trying = False
        if self.state is not State.OPEN:
            self.state = State.OPEN
            self.opened()

    def retry(self) -> None:
        """The store answers again: what is open goes on trial."""
        if self.state is State.OPEN:
            self.state = State.TRIAL
