"""The WebSocket of an agent: bytes to messages and back."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from typing import TYPE_CHECKING, Any, Final

from starlette.websockets import WebSocket, WebSocketDisconnect, WebSocketState

from lmkv.agent import messages as m
from lmkv.errors import ClosedError, LmkvError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from lmkv.controller.conversation import AgentConversation
    from lmkv.controller.fleet import Fleet

log = logging.getLogger("lmkv.controller")

OUTBOX: Final = 4096
"""Messages that wait for a slow agent, at most; then its connection ends."""
_GOING_AWAY: Final = 1001
_PROTOCOL: Final = 1002


class AgentConnection:
    """One connection of one agent. On the controller's loop."""

    def __init__(self, socket: WebSocket, fleet: Fleet, first_seconds: float) -> None:
        self._socket = socket
        self._first_seconds = first_seconds
        self._outbox: asyncio.Queue[m.FromController] = asyncio.Queue(OUTBOX)
        self._closing = asyncio.Event()
        self._code = _GOING_AWAY
        self._conversation: AgentConversation = fleet.converse(self.send, self.close)

    def send(self, message: m.FromController) -> None:
        """Put a message into the queue. Raises `ClosedError` if the connection ends."""
        if self._closing.is_set():
            raise ClosedError("the agent's connection is closed")
        try:
            self._outbox.put_nowait(message)
        except asyncio.QueueFull:
            self.close()
            raise ClosedError(f"the agent takes nothing: {OUTBOX} messages wait") from None

    def close(self) -> None:
        """End the connection. Idempotent."""
        self._closing.set()

    async def run(self) -> None:
        """From accepting the connection to its end, whoever ends it."""
        await self._socket.accept()
        tasks = [asyncio.ensure_future(each) for each in (self._read(), self._write(), self._closing.wait())]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            self.close()
            await self._stop(tasks)
            await self._conversation.ended()

    async def _stop(self, tasks: Sequence[asyncio.Future[Any]]) -> None:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        with contextlib.suppress(Exception):  # it may have gone meanwhile
            while not self._outbox.empty():  # such as why it is refused
                await self._socket.send_bytes(m.encode(self._outbox.get_nowait()))
        if self._socket.application_state is not WebSocketState.DISCONNECTED:
            with contextlib.suppress(Exception):
                await self._socket.close(self._code)

    async def _read(self) -> None:
        try:
            body = await asyncio.wait_for(self._receive(), self._first_seconds)
            while not self._conversation.refused:
                for reply in await self._conversation.receive(m.decode_from_node(body)):
                    self.send(reply)
                if not self._conversation.refused:
                    body = await self._receive()
        except WebSocketDisconnect:
            pass
        except (TimeoutError, asyncio.TimeoutError):  # two classes before Python 3.11
            log.warning("an agent said nothing for %g s; closed", self._first_seconds, extra={"key": "agent-silent"})
        except LmkvError as error:
            self._code = _PROTOCOL if error.kind == "protocol" else _GOING_AWAY
            name = self._conversation.node or "unnamed"
            log.warning("agent of node %s: %s; closed", name, error, extra={"key": ("agent", name)})

    async def _receive(self) -> bytes | str:
        message = await self._socket.receive()
        if message["type"] == "websocket.disconnect":
            raise WebSocketDisconnect(message.get("code", _GOING_AWAY))
        body: bytes | str | None = message.get("bytes")
        return message.get("text", "") if body is None else body

    async def _write(self) -> None:
        with contextlib.suppress(WebSocketDisconnect, RuntimeError):  # it has gone
            while True:
                await self._socket.send_bytes(m.encode(await self._outbox.get()))
