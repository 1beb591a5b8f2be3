"""A TCP proxy that goes wrong when it is told to.

    with FaultProxy(server.port) as proxy:
        proxy.silence()
        …
        proxy.heal()

A fault is in force when its method returns: for connections that are open as for those that come. One fault at a
time; `delay` and `throttle` go together.
"""

from __future__ import annotations

import asyncio
import random
import socket
import struct
import threading
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from server_rig import HOST, free_port

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Self

PIECE = 65536
HELD = 64
"""Pieces of a direction that are under way at most; then the sender has to wait."""


@dataclass(frozen=True)
class Mode:
    """What happens to bytes now."""

    delay: float = 0.0
    rate: float = 0.0
    silent: bool = False
    mute: bool = False
    resets: bool = False
    garbage: bool = False
    left: int | None = None
    """Bytes that every connection may still pass, both directions together."""


class FaultProxy:
    """Listens on `port` of the loopback and passes everything to `target` and back.

    A context manager. Its methods may be called from any thread but its own.

    Attributes:
        accepted: connections so far.
        bytes_up: bytes passed on to the target so far.
        bytes_down: bytes passed on to clients so far.
    """

    def __init__(self, target: int | tuple[str, int]) -> None:
        self.target = (HOST, target) if isinstance(target, int) else target
        self.port = free_port()
        self.accepted = 0
        self.bytes_up = 0
        self.bytes_down = 0
        self._mode = Mode()
        self._links: set[_Link] = set()
        self._free_at = {"up": 0.0, "down": 0.0}
        self._loop = asyncio.new_event_loop()
        self._listener: socket.socket | None = None
        self._thread = threading.Thread(target=self._loop.run_forever, name=f"proxy-{self.port}", daemon=True)

    # faults

    def delay(self, seconds: float) -> None:
        """Every byte arrives so much later, in each direction; the bandwidth stays. Besides `throttle` if in force."""
        self._become(lambda: replace(Mode(), delay=seconds, rate=self._mode.rate))

    def throttle(self, bytes_per_second: float) -> None:
        """All connections together pass no more than this in each direction. Besides `delay` if in force."""
        self._become(lambda: replace(Mode(), rate=bytes_per_second, delay=self._mode.delay))

    def cut_after(self, nbytes: int) -> None:
        """Every connection, open or to come, is closed in mid-sentence after so many more bytes."""
        self._become(lambda: Mode(left=nbytes))

    def silence(self) -> None:
        """Connections are accepted and every byte is swallowed. `heal` closes those that have lost bytes."""
        self._become(lambda: Mode(silent=True))

    def mute(self) -> None:
        """The target gets everything, clients no answer. `heal` closes connections that have lost bytes."""
        self._become(lambda: Mode(mute=True))

    def reset(self) -> None:
        """RST for every open connection now, and for new ones as soon as they say something."""
        self._become(lambda: Mode(resets=True))
        self._call(lambda: self._drop(lambda _: True, rst=True))

    def garbage(self) -> None:
        """Clients get noise instead of what the target says, as long as that is."""
        self._become(lambda: Mode(garbage=True))

    def refuse(self) -> None:
        """Nobody listens any more; open connections are closed."""
        self._become(Mode)
        self._call(self._close_listener)
        self._call(lambda: self._drop(lambda _: True, rst=False))

    def heal(self) -> None:
        """No fault. Connections that have lost bytes are closed; others go on."""
        self._become(Mode)
        self._call(lambda: self._drop(lambda link: link.spoilt, rst=False))
        if self._listener is None:
            self._call(self._listen)

    def drop(self) -> None:
        """Close every open connection once, with RST; new ones are fine."""
        self._call(lambda: self._drop(lambda _: True, rst=True))

    # what tests look at

    @property
    def live(self) -> int:
        """Connections that are open."""
        return len(self._links)

    @property
    def address(self) -> str:
        """`host:port`."""
        return f"{HOST}:{self.port}"

    # life

    def __enter__(self) -> Self:
        self._thread.start()
        self._call(self._listen)
        return self

    def __exit__(self, *_: object) -> None:
        self._call(self._close_listener)
        self._call(lambda: self._drop(lambda _: True, rst=True))
        asyncio.run_coroutine_threadsafe(_finished(), self._loop).result(10)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()

    # on the loop

    def _become(self, mode: Callable[[], Mode]) -> None:
        def change() -> None:
            self._mode = mode()
            self._free_at = {"up": 0.0, "down": 0.0}
            for link in self._links:
                link.left = self._mode.left

        self._call(change)

    def _call(self, work: Callable[[], None]) -> None:
        """Run `work` on the loop and wait for it."""

        async def body() -> None:
            work()

        asyncio.run_coroutine_threadsafe(body(), self._loop).result(10)

    def _listen(self) -> None:
        listener = socket.socket()
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((HOST, self.port))
        listener.listen(256)
        listener.setblocking(False)
        self._listener = listener
        self._loop.add_reader(listener, self._accept, listener)

    def _close_listener(self) -> None:
        if self._listener is not None:
            self._loop.remove_reader(self._listener)
            self._listener.close()
            self._listener = None

    def _accept(self, listener: socket.socket) -> None:
        """Not by a task: one that is cancelled just then loses the socket."""
        try:
            client, _ = listener.accept()
        except (BlockingIOError, ConnectionAbortedError):  # who came has gone
            return
        self.accepted += 1
        link = _Link(self, client)
        self._links.add(link)
        link.task = self._loop.create_task(link.run())
        link.task.add_done_callback(lambda _: self._ended(link))

    def _ended(self, link: _Link) -> None:
        """Also of a link whose task was cancelled before it began."""
        self._links.discard(link)
        link.close()

    def _drop(self, which: Callable[[_Link], bool], *, rst: bool) -> None:
        for link in [link for link in self._links if which(link)]:
            link.end(rst=rst)

    async def pass_on(self, way: str, nbytes: int) -> None:
        """Wait until the link has room for so many bytes in this direction."""
        if rate := self._mode.rate:
            now = self._loop.time()
            start = max(now, self._free_at[way])
            self._free_at[way] = start + nbytes / rate
            await asyncio.sleep(self._free_at[way] - now)

    def count(self, way: str, nbytes: int) -> None:
        """So many bytes have been passed on."""
        if way == "up":
            self.bytes_up += nbytes
        else:
            self.bytes_down += nbytes

    @property
    def mode(self) -> Mode:
        """What happens to bytes now."""
        return self._mode

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        """All happens on it."""
        return self._loop


class _Link:
    """One client's connection and its twin to the target."""

    def __init__(self, proxy: FaultProxy, client: socket.socket) -> None:
        self.proxy = proxy
        self.client = client
        self.target = socket.socket()
        self.left = proxy.mode.left
        self.spoilt = False
        self.task: asyncio.Task[None] | None = None
        self._rst = False
        self._noise = random.Random(0)

    def end(self, *, rst: bool) -> None:
        """Close both sides soon; with RST towards the client if told."""
        self._rst = rst
        if self.task is not None:
            self.task.cancel()

    async def run(self) -> None:
        """Both directions, until either ends or the proxy ends it."""
        tasks: list[asyncio.Task[None]] = []
        try:
            for side in (self.client, self.target):
                side.setblocking(False)
                side.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            await self.proxy.loop.sock_connect(self.target, self.proxy.target)
            tasks = self._pump("up", self.client, self.target) + self._pump("down", self.target, self.client)
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        except (OSError, asyncio.CancelledError):
            pass
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def close(self) -> None:
        """Both sides."""
        if self._rst:
            self.client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        for side in (self.client, self.target):
            self.proxy.loop.remove_reader(side)
            self.proxy.loop.remove_writer(side)
            side.close()

    def _pump(self, way: str, source: socket.socket, sink: socket.socket) -> list[asyncio.Task[None]]:
        """A reader and a writer of one direction; the link ends with the first of all that ends."""
        held: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(HELD)
        return [
            self.proxy.loop.create_task(self._read(held, source)),
            self.proxy.loop.create_task(self._write(way, held, sink)),
        ]

    async def _read(self, held: asyncio.Queue[tuple[float, bytes]], source: socket.socket) -> None:
        """Take pieces from the source, also while others are held."""
        loop = self.proxy.loop
        while True:
            piece = await loop.sock_recv(source, self._room())
            if self.proxy.mode.resets and piece:
                self._rst = True
                return
            if self.proxy.mode.silent:
                self.spoilt = self.spoilt or bool(piece)
                if not piece:
                    return
                continue
            await held.put((loop.time() + self.proxy.mode.delay, piece))
            if not piece:
                await asyncio.Event().wait()  # the writer ends the link once the last piece is out

    def _room(self) -> int:
        """Small pieces at low rates, so that bytes trickle."""
        rate = self.proxy.mode.rate
        return max(1, min(PIECE, int(rate / 50))) if rate else PIECE

    async def _write(self, way: str, held: asyncio.Queue[tuple[float, bytes]], sink: socket.socket) -> None:
        loop = self.proxy.loop
        while True:
            due, piece = await held.get()
            await asyncio.sleep(max(0.0, due - loop.time()))
            await self.proxy.pass_on(way, len(piece))
            mode = self.proxy.mode
            if piece and (mode.silent or (mode.mute and way == "down")):
                self.spoilt = True
                continue
            last = not piece
            if self.left is not None:
                piece, last = piece[: self.left], last or len(piece) >= self.left
                self.left -= len(piece)
            if mode.garbage and way == "down" and piece:
                self.spoilt = True
                piece = self._noise.randbytes(len(piece))
            self.proxy.count(way, len(piece))  # first: who has got them may look at the count
            await loop.sock_sendall(sink, piece)
            if last:
                return


async def _finished() -> None:
    """Let everything that was cancelled end."""
    mine = asyncio.current_task()
    others = [task for task in asyncio.all_tasks() if task is not mine]
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)
