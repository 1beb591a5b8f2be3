"""What is still to be told to a controller of one node's tiers, in order and in bounded memory."""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING, Final

from lmkv.agent import messages as m

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from lmkv.agent.tap import Tap
    from lmkv.storage.index import NamespaceIndex

MOST: Final = 1 << 17
"""Digests that wait to be told, at most; with more, all that is there is told anew."""
AT_ONCE: Final = 1 << 13
"""Digests in one `Events`, at most."""


class Outbox:
    """Listens to the tap while the node is registered; makes `Events` and `Page`s when they can be sent.

    A message is made when it can go out and not before, so that each says what is true then. Lives on the storage loop.

    Attributes:
        stale: why the epoch is of no more use and another one has to begin; empty: it goes on.
        epoch: number of the epoch; none is used twice.
        sequence: of the `Events` made last in this epoch.
        digests: told by events so far.
    """

    def __init__(self, tap: Tap, wake: Callable[[], None]) -> None:
        self._tap = tap
        self._wake = wake
        self._waiting: dict[tuple[int, bytes], dict[bytes, bool]] = {}
        self._count = 0
        self._pages: Iterator[m.Page] | None = None
        self.epoch = secrets.randbits(48)
        self.sequence = 0
        self.stale = ""
        self.digests = 0

    # --- listener ----------------------------------------------------------------------------------------------------

    def changed(self, tier: int, namespace: bytes, stored: list[bytes], removed: list[bytes]) -> None:
        """See `Listener.changed`. Of a digest that waits only the last word is kept."""
        if self.stale:
            return  # the pages of the next epoch will tell
        waiting = self._waiting.setdefault((tier, namespace), {})
        before = len(waiting)
        waiting.update(dict.fromkeys(stored, True))
        waiting.update(dict.fromkeys(removed, False))
        self._count += len(waiting) - before
        if self._count > MOST:
            self.lost("more changes than the controller took")
        else:
            self._wake()

    def lost(self, why: str) -> None:
        """See `Listener.lost`: the epoch ends here."""
        self.stale = self.stale or why
        self._waiting.clear()
        self._count = 0
        self._pages = None
        self._wake()

    def declared(self, namespace: NamespaceIndex) -> None:
        """See `Listener.declared`."""
        del namespace
        self._wake()

    # --- sender ------------------------------------------------------------------------------------------------------

    def renew(self) -> int:
        """Number the next epoch, for a registration; it begins with `begin`."""
        self.lost("the node registered")
        self.epoch += 1
        return self.epoch

    def begin(self) -> None:
        """Begin the epoch: its pages are all that is there, from now on."""
        self.sequence = 0
        self.stale = ""
        self._pages = self._page_by_page()

    @property
    def paging(self) -> bool:
        """Pages of this epoch are still to come."""
        return self._pages is not None

    def page(self) -> m.Page | None:
        """The next page, made now; None: there is none to send."""
        page = None if self._pages is None else next(self._pages, None)
        if page is None:
            self._pages = None
        return page

    def events(self) -> m.Events | None:
        """What waits, as much as one message takes; None: nothing does."""
        changes = []
        left = AT_ONCE
        while left and self._waiting:
            (tier, namespace), waiting = next(iter(self._waiting.items()))
            if len(waiting) <= left:
                del self._waiting[tier, namespace]
                taken = waiting
            else:
                taken = {digest: waiting.pop(digest) for digest in list(waiting)[:left]}
            left -= len(taken)
            stored = b"".join([digest for digest, there in taken.items() if there])
            removed = b"".join([digest for digest, there in taken.items() if not there])
            changes.append(m.Change(namespace, tier, stored, removed))
        if not changes:
            return None
        self._count -= AT_ONCE - left
        self.digests += AT_ONCE - left
        self.sequence += 1
        return m.Events(self.epoch, self.sequence, tuple(changes))

    def _page_by_page(self) -> Iterator[m.Page]:
        number = 0
        for tier, namespace, entries in self._tap.listing():
            digests = b"".join([entry.digest for entry in entries])
            yield m.Page(self.epoch, number, False, self.sequence, namespace.id, tier.number, digests)
            number += 1
        yield m.Page(self.epoch, number, True, self.sequence, b"", 0, b"")
