"""Memory that a peer may still touch although nobody has promised it to him any more.

RDMA has no protection: what a peer was told of, it can write to, whatever has become of it here. And a copy that a
thread of ours has begun ends when it ends. So the memory of a reservation or a lease that has expired, or was given
back without word that nothing is under way, is nobody's until the peer says so, its connection has ended, or the
transports know that nothing touches it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple, Protocol

if TYPE_CHECKING:
    from collections.abc import Iterable

    from lmkv.memory import MemoryObject
    from lmkv.observe.metrics import Metrics

OWNER: Final = "quarantine"


class Touched(Protocol):
    """Whether a session may still touch an object; never True again once it was False."""

    def __call__(self, session: int, obj: MemoryObject, /, *, said: bool) -> bool:
        """`said`: the peer has said that it does not, so that only what threads of ours do for it counts."""


class _Batch(NamedTuple):
    objects: tuple[MemoryObject, ...]
    until: float
    """Time before which it is not given back even if the connection has ended: the peer may not know of that yet."""
    said: bool
    """The peer has said that it touches it no more."""

    def touched(self, session: int, touched: Touched) -> bool:
        return any(touched(session, obj, said=self.said) for obj in self.objects)


class Quarantine:
    """Of one node. Lives on the storage loop.

    Args:
        metrics: where it is counted.
        touched: asked about what is held.
    """

    def __init__(self, metrics: Metrics, touched: Touched) -> None:
        self._metrics = metrics
        self._touched = touched
        self._held: dict[int, dict[int, _Batch]] = {}
        self._gone: set[int] = set()
        self.nbytes = 0

    def take(
        self,
        session: int,
        number: int,
        objects: Iterable[MemoryObject],
        owner: str,
        *,
        until: float = 0.0,
        said: bool = False,
    ) -> None:
        """Keep the memory of lease or reservation `number`; takes over the counts that `owner` has of it."""
        batch = _Batch(tuple(objects), until, said)
        for obj in batch.objects:
            obj.retain(OWNER)
            obj.release(owner)
        if batch.objects:
            self._held.setdefault(session, {})[number] = batch
            self._count(sum(obj.nbytes for obj in batch.objects))

    def done(self, session: int, number: int) -> bool:
        """The peer has said that it touches that memory no more; whether it was here."""
        held = self._held.get(session, {})
        batch = held.pop(number, None)
        if batch is None:
            return False
        batch = batch._replace(said=True)
        if batch.touched(session, self._touched):  # by a thread of ours, which ends soon
            held[number] = batch
        else:
            self._give_back(session, [batch])
        return True

    def gone(self, session: int, now: float) -> None:
        """The connection has ended, and no thread of ours touches memory for it."""
        self._gone.add(session)
        self._release(session, now)

    def tidy(self, now: float) -> None:
        """Give back what nothing touches any more."""
        for session in list(self._gone):
            self._release(session, now)
        for session, held in list(self._held.items()):
            free = [number for number, batch in held.items() if not batch.touched(session, self._touched)]
            self._give_back(session, [held.pop(number) for number in free])

    def close(self) -> None:
        """No peer can touch anything any more."""
        for session in list(self._held):
            self.gone(session, float("inf"))

    def _release(self, session: int, now: float) -> None:
        held = self._held.get(session, {})
        over = [number for number, batch in held.items() if batch.until <= now]
        self._give_back(session, [held.pop(number) for number in over])
        if session not in self._held:
            self._gone.discard(session)

    def _give_back(self, session: int, batches: list[_Batch]) -> None:
        for batch in batches:
            self._count(-sum(obj.nbytes for obj in batch.objects))
            for obj in batch.objects:
                obj.release(OWNER)
        if not self._held.get(session):
            self._held.pop(session, None)

    def _count(self, nbytes: int) -> None:
        self.nbytes += nbytes
        self._metrics.set("lmkv_peer_quarantined_bytes", self.nbytes)
