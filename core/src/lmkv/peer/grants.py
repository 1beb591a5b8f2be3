"""Which bytes of the pool a session may touch. Written on the storage loop, asked in threads of transports."""

from __future__ import annotations

from bisect import bisect_right
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable

    from lmkv.peer.transport import Region


class _Extents(NamedTuple):
    """Ranges that neither overlap nor touch, ascending. Replaced, never changed: threads read it without a lock."""

    starts: tuple[int, ...]
    ends: tuple[int, ...]

    def cover(self, region: Region) -> bool:
        at = bisect_right(self.starts, region.offset) - 1
        return region.nbytes > 0 and at >= 0 and region.offset + region.nbytes <= self.ends[at]


_NONE = _Extents((), ())


class _Rights:
    """One kind of access: session → lease or reservation → ranges."""

    def __init__(self) -> None:
        self._given: dict[int, dict[int, list[tuple[int, int]]]] = {}
        self._extents: dict[int, _Extents] = {}

    def give(self, session: int, number: int, ranges: Iterable[tuple[int, int]]) -> None:
        self._given.setdefault(session, {})[number] = [(offset, offset + nbytes) for offset, nbytes in ranges]
        self._renew(session)

    def take(self, session: int, number: int) -> None:
        if self._given.get(session, {}).pop(number, None) is not None:
            self._renew(session)

    def take_all(self, session: int) -> None:
        self._extents.pop(session, None)
        self._given.pop(session, None)

    def allow(self, session: int, region: Region) -> bool:
        return self._extents.get(session, _NONE).cover(region)

    def _renew(self, session: int) -> None:
        starts: list[int] = []
        ends: list[int] = []
        for start, end in sorted(each for ranges in self._given[session].values() for each in ranges):
            if ends and start <= ends[-1]:
                ends[-1] = max(ends[-1], end)
            else:
                starts.append(start)
                ends.append(end)
        self._extents[session] = _Extents(tuple(starts), tuple(ends))


class Grants:
    """The `Guard` of a node's transports."""

    def __init__(self) -> None:
        self._reads = _Rights()
        self._writes = _Rights()

    def may_read(self, session: int, region: Region) -> bool:
        """As `Guard` says: all of it lies in frames that the session has leased."""
        return self._reads.allow(session, region)

    def may_write(self, session: int, region: Region) -> bool:
        """As `Guard` says: all of it lies in frames that the session has reserved."""
        return self._writes.allow(session, region)

    def lend(self, session: int, lease: int, ranges: Iterable[tuple[int, int]]) -> None:
        """These (offset, bytes) may be read until `revoke`."""
        self._reads.give(session, lease, ranges)

    def open(self, session: int, reservation: int, ranges: Iterable[tuple[int, int]]) -> None:
        """These (offset, bytes) may be written until `revoke`."""
        self._writes.give(session, reservation, ranges)

    def revoke(self, session: int, number: int) -> None:
        """The lease or reservation has ended. Idempotent. What a thread has asked for before goes on."""
        self._reads.take(session, number)
        self._writes.take(session, number)

    def forget(self, session: int) -> None:
        """The session has ended."""
        self._reads.take_all(session)
        self._writes.take_all(session)
