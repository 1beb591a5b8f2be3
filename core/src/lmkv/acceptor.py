"""Connections that come to a listening socket: few strangers at a time, and none is lost, whenever the end comes.

Not by `loop.sock_accept`: when the task that awaits it is cancelled in the turn in which a connection comes, nobody has
that connection, and its other end waits for the garbage collector.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable, Coroutine

AGAIN_SECONDS: Final = 0.1
"""Until it is tried again when nothing could be accepted."""


class Acceptor:
    """Accepts connections and has each met by a task of its own. On the running loop only.

    Args:
        sock: listens, without blocking; stays the caller's, who closes it after `close`.
        meet: gets a connection that does not block. True: it has taken it. Otherwise the connection is closed here, as
            it is when its task is cancelled, even before that has begun.
        most: connections that may be met at a time; those beyond are closed at once.
        failed: told why none could be accepted; it is tried again.
    """

    def __init__(
        self,
        sock: socket.socket,
        meet: Callable[[socket.socket], Coroutine[None, None, bool]],
        *,
        most: int,
        failed: Callable[[OSError], None],
    ) -> None:
        self._sock = sock
        self._meet = meet
        self._most = most
        self._failed = failed
        self._loop = asyncio.get_running_loop()
        self._tasks: set[asyncio.Task[bool]] = set()
        self._pause: asyncio.TimerHandle | None = None
        self._closed = False
        self._listen()

    @property
    def meeting(self) -> int:
        """Connections that are being met."""
        return len(self._tasks)

    async def close(self) -> None:
        """Accept no more, and close those that are being met. Idempotent."""
        if not self._closed:
            self._closed = True
            self._loop.remove_reader(self._sock)
            if self._pause is not None:
                self._pause.cancel()
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _listen(self) -> None:
        self._loop.add_reader(self._sock, self._accept)

    def _accept(self) -> None:
        try:
            sock, _ = self._sock.accept()
        except BlockingIOError:  # it has gone again
            return
        except OSError as e:  # descriptors used up, mostly: those who are connected are still served
            self._failed(e)
            self._loop.remove_reader(self._sock)
            self._pause = self._loop.call_later(AGAIN_SECONDS, self._listen)
            return
        if len(self._tasks) >= self._most:
            sock.close()
            return
        sock.setblocking(False)
        task = self._loop.create_task(self._meet(sock))
        self._tasks.add(task)

        def met(task: asyncio.Task[bool]) -> None:
            self._tasks.discard(task)
            if task.cancelled() or task.exception() is not None or not task.result():
                sock.close()

        task.add_done_callback(met)


async def exactly(sock: socket.socket, count: int) -> bytes:
    """So many bytes of a connection that does not block.

    Raises:
        ConnectionResetError: it was closed before.
        OSError: it failed.
    """
    loop, data = asyncio.get_running_loop(), b""
    while len(data) < count:
        more = await loop.sock_recv(sock, count - len(data))
        if not more:
            raise ConnectionResetError("the connection was closed")
        data += more
    return data
