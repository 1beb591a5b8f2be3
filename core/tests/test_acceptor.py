"""Connections that come are met or closed, whenever the end comes."""

from __future__ import annotations

import asyncio
import errno
import socket
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import pytest

from lmkv import acceptor
from lmkv.acceptor import Acceptor, exactly

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


class Door:
    """A listening socket with an acceptor; `sockets` has what was taken."""

    def __init__(self, most: int) -> None:
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.listener.setblocking(False)
        self.begun = 0
        self.sockets: list[socket.socket] = []
        self.errors: list[OSError] = []
        self.acceptor = Acceptor(self.listener, self._meet, most=most, failed=self.errors.append)

    async def _meet(self, sock: socket.socket) -> bool:
        """What is wanted of it is in its first byte."""
        self.begun += 1
        match await exactly(sock, 1):
            case b"+":
                self.sockets.append(sock)
                return True
            case b"!":
                raise KeyError
        return False

    def call(self, says: bytes = b"") -> socket.socket:
        sock = socket.create_connection(self.listener.getsockname(), 20)
        sock.setblocking(False)
        sock.send(says)
        return sock


@asynccontextmanager
async def door(most: int = 8) -> AsyncIterator[Door]:
    made = Door(most)
    try:
        yield made
    finally:
        await made.acceptor.close()
        made.listener.close()
        for sock in made.sockets:
            sock.close()


async def hears(sock: socket.socket) -> bytes:
    """What it is told, or nothing when it is closed at the other end."""
    with sock:
        try:
            return await asyncio.wait_for(asyncio.get_running_loop().sock_recv(sock, 1), 20)
        except ConnectionResetError:
            return b""


async def eventually(true: Callable[[], Any]) -> None:
    for _ in range(4000):
        if true():
            return
        await asyncio.sleep(0.005)
    raise AssertionError("it does not come true")


async def test_who_is_not_taken_is_closed() -> None:
    async with door() as made:
        refused, fails, taken = made.call(b"-"), made.call(b"!"), made.call(b"+")
        assert [await hears(sock) for sock in (refused, fails)] == [b"", b""]
        await eventually(lambda: made.sockets)
        made.sockets[0].send(b"y")
        assert await hears(taken) == b"y"
        assert made.acceptor.meeting == 0


async def test_no_more_than_so_many_are_met_at_a_time() -> None:
    async with door(2) as made:
        silent = [made.call(), made.call()]
        await eventually(lambda: made.acceptor.meeting == 2)
        assert await hears(made.call(b"+")) == b""
        silent[0].close()
        await eventually(lambda: made.acceptor.meeting == 1)
        taken = made.call(b"+")
        await eventually(lambda: made.sockets)
        for sock in (*silent, taken):
            sock.close()


async def test_the_end_while_one_is_met() -> None:
    async with door() as made:
        sock = made.call()
        await eventually(lambda: made.begun)
        await made.acceptor.close()
        assert await hears(sock) == b""


async def test_the_end_in_the_turn_in_which_one_comes() -> None:
    """Its task never begins."""
    async with door() as made:
        sock = made.call(b"+")
        while not made.acceptor.meeting:  # noqa: ASYNC110  turn by turn
            await asyncio.sleep(0)
        await made.acceptor.close()
        assert await hears(sock) == b""
        assert (made.begun, made.sockets) == (0, [])


async def test_the_end_before_anybody_is_accepted() -> None:
    """Those in the kernel's queue are told by the end of the listening socket."""
    async with door() as made:
        sock = made.call(b"+")
        await made.acceptor.close()
        made.listener.close()
        assert await hears(sock) == b""
        assert made.begun == 0


async def test_what_cannot_be_accepted_now_is_later(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(acceptor, "AGAIN_SECONDS", 0.01)
    full = OSError(errno.EMFILE, "too many open files")
    async with door() as made:
        accept = socket.socket.accept

        def fails(sock: socket.socket) -> Any:
            if len(made.errors) < 3:
                raise full
            return accept(sock)

        monkeypatch.setattr(socket.socket, "accept", fails)
        sock = made.call(b"+")
        await eventually(lambda: made.sockets)
        assert made.errors == [full] * 3
        sock.close()


async def test_no_more_is_tried_after_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(acceptor, "AGAIN_SECONDS", 0.01)

    def fails(_: socket.socket) -> Any:
        raise OSError(errno.EMFILE, "too many open files")

    monkeypatch.setattr(socket.socket, "accept", fails)
    async with door() as made:
        sock = made.call()
        await eventually(lambda: made.errors)
        await made.acceptor.close()
        count = len(made.errors)
        await asyncio.sleep(0.05)
        assert len(made.errors) == count
        sock.close()
