"""Uvicorn's HTTP connections, with an end for those on which no whole head of a request comes.

Uvicorn itself has a time-out only between requests.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from uvicorn.protocols.http.auto import AutoHTTPProtocol

if TYPE_CHECKING:
    import asyncio

_Base: Any = AutoHTTPProtocol


class Connection(_Base):  # type: ignore[misc]  # one of several classes, by what is installed
    """One connection."""

    def __init__(self, *arguments: Any, head_seconds: float, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._head_seconds = head_seconds
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:
        """See asyncio.Protocol."""
        super().connection_made(transport)
        self._wait()

    def data_received(self, data: bytes) -> None:
        """See asyncio.Protocol."""
        super().data_received(data)
        if self._idle():
            self._wait()
        else:
            self._stop_waiting()

    def connection_lost(self, exc: Exception | None) -> None:
        """See asyncio.Protocol."""
        self._stop_waiting()
        super().connection_lost(exc)

    def _idle(self) -> bool:
        return self.cycle is None or bool(self.cycle.response_complete)

    def _wait(self) -> None:
        if self._timer is None:
            self._timer = self.loop.call_later(self._head_seconds, self._late)

    def _stop_waiting(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _late(self) -> None:
        self._timer = None
        # After an upgrade the transport is a WebSocket's.
        if self._idle() and self.transport.get_protocol() is self:
            self.transport.abort()


def protocol(head_seconds: float) -> Any:
    """What makes a connection's protocol for uvicorn; `head_seconds`: time for the head of a request to arrive."""
    return partial(Connection, head_seconds=head_seconds)
