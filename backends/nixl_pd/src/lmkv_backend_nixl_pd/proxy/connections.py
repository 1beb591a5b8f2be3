"""Clients' connections: uvicorn's, which by themselves let the head of a request be endless and take for ever."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

if TYPE_CHECKING:
    import asyncio

MAX_HEAD: Final = 128 << 10
"""Bytes of a request's line and headers."""
HEAD_SECONDS: Final = 30.0
"""Time for them to come, from the connection or their first byte on."""


class Connection(HttpToolsProtocol):
    """One connection; it is cut where no whole head comes."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._waiting = True
        self._head_bytes = 0
        self._late: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn has it
        """See asyncio.Protocol."""
        super().connection_made(transport)
        self._begin()

    def connection_lost(self, exc: Exception | None) -> None:
        """See asyncio.Protocol."""
        self._end()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """See asyncio.Protocol."""
        if self._waiting:
            self._head_bytes += len(data)
        super().data_received(data)
        if self._waiting and self._head_bytes > MAX_HEAD:
            self.transport.abort()

    def on_message_begin(self) -> None:
        """See httptools."""
        super().on_message_begin()
        self._begin()

    def on_headers_complete(self) -> None:
        """See httptools."""
        self._end()
        super().on_headers_complete()

    def _begin(self) -> None:
        self._waiting = True
        if self._late is None:
            self._late = self.loop.call_later(HEAD_SECONDS, self._cut)

    def _end(self) -> None:
        self._waiting, self._head_bytes = False, 0
        if self._late is not None:
            self._late.cancel()
            self._late = None

    def _cut(self) -> None:
        self._late = None
        self.transport.abort()
