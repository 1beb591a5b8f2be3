"""Two processes with a pool each and a transport between them, without the peer protocol: for tests of transports.

`Side` is one end, in this process. `Other` is one in a process of its own, which does what it is told line by line:
`python transport_rig.py NAME POOL_BYTES TLS_FOLDER`.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import ssl
import subprocess
import sys
import threading
import time
import zlib
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from lmkv.memory import Pool
from lmkv.peer import wire
from lmkv.peer.messages import DataHello
from lmkv.peer.transport import Reach, Region, TransportContext, TransportError
from lmkv.plugins import PluginHost

if TYPE_CHECKING:
    from collections.abc import Sequence

    from typing_extensions import Self

    from lmkv.peer.transport import Channel, Transport

SESSION = 7
TOKEN = b"sixteen bytes ok"


class Grants:
    """A guard that allows everything, until it is given ranges."""

    def __init__(self) -> None:
        self.reads: list[Region] | None = None
        self.writes: list[Region] | None = None

    def may_read(self, session: int, region: Region) -> bool:
        return session == SESSION and _inside(region, self.reads)

    def may_write(self, session: int, region: Region) -> bool:
        return session == SESSION and _inside(region, self.writes)


def _inside(region: Region, ranges: Sequence[Region] | None) -> bool:
    return ranges is None or any(
        one.offset <= region.offset and region.offset + region.nbytes <= one.offset + one.nbytes for one in ranges
    )


class Side:
    """A pool, a transport over it, and a port where data sockets arrive."""

    def __init__(self, name: str, nbytes: int, tls: Path | None = None, **context: Any) -> None:
        self.pool = Pool.create(nbytes, prefault=False)
        self.bytes = np.frombuffer(self.pool.view, np.uint8)
        self.grants = Grants()
        incarnation = int.from_bytes(os.urandom(7), "little")
        self.transport: Transport = PluginHost.discover().load_transport(name)(
            self.pool, self.grants, TransportContext(node=f"node-{os.getpid()}", incarnation=incarnation, **context)
        )
        self._tls = None
        if tls is not None:
            self._tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            self._tls.load_cert_chain(tls / "server.crt", tls / "server.key")
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self._thread = threading.Thread(target=self._listen, daemon=True)
        self._thread.start()

    def _listen(self) -> None:
        while True:
            try:
                sock = self._listener.accept()[0]
            except OSError:
                return
            try:
                self._admit(sock)
            except (OSError, TransportError, AssertionError):
                sock.close()

    def _admit(self, sock: socket.socket) -> None:
        sock.settimeout(5)
        assert sock.recv(8, socket.MSG_WAITALL) == wire.DATA
        if self._tls is not None:
            sock = self._tls.wrap_socket(sock, server_side=True)
        length = wire.length_of(_exactly(sock, 4), 4096)
        hello = wire.decode_opening(_exactly(sock, length))
        assert isinstance(hello, DataHello)
        assert hello.token == TOKEN
        sock.settimeout(None)
        self.transport.accept(sock, hello.session)

    def fill(self, seed: int) -> None:
        """The whole pool with noise."""
        self.bytes[:] = noise(len(self.bytes), seed)

    def close(self) -> None:
        self._listener.close()
        with suppress(OSError):
            socket.create_connection(("127.0.0.1", self.port), 1).close()
        self.transport.close()
        del self.bytes
        self.pool.close()


class Other:
    """A `Side` in a process of its own."""

    def __init__(self, name: str, nbytes: int, tls: Path | None = None) -> None:
        command = [sys.executable, __file__, name, str(nbytes), str(tls or "")]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._tls = tls
        first = self._answer()
        self.port: int = first["port"]
        self.blob = bytes.fromhex(first["blob"])

    def reach(self) -> Reach:
        """For the channel of the side here."""
        context = None
        if self._tls is not None:
            context = ssl.create_default_context(cafile=self._tls / "lmkv-test-authority.crt")
        return Reach("127.0.0.1", self.port, SESSION, TOKEN, context)

    def ask(self, what: str, **more: Any) -> Any:
        """Let it do something, and wait for that."""
        self.tell(what, **more)
        return self._answer()["value"]

    def tell(self, what: str, **more: Any) -> None:
        """Let it do something."""
        assert self.process.stdin is not None
        print(json.dumps({"what": what, **more}), file=self.process.stdin, flush=True)

    def answer(self) -> Any:
        """What it says to what it was told."""
        return self._answer()["value"]

    def _answer(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, f"the other side has ended: exit {self.process.wait(10)}"
        found: dict[str, Any] = json.loads(line)
        return found

    def stop(self) -> None:
        """All of its threads stand still until SIGCONT."""
        self.process.send_signal(signal.SIGSTOP)
        tasks = Path(f"/proc/{self.process.pid}/task")
        while any(" T " not in (task / "stat").read_text().rpartition(")")[2] for task in tasks.iterdir()):
            time.sleep(0.005)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(10)

    def close(self) -> None:
        self.kill()
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            with suppress(BrokenPipeError):
                pipe.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def noise(nbytes: int, seed: int) -> np.ndarray:
    """Bytes of which each eight differ from all others."""
    words = np.arange(-(-nbytes // 8), dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(seed)
    return words.view(np.uint8)[:nbytes]


def spread(total: int, number: int, nbytes: int, seed: int, align: int = 1) -> list[Region]:
    """So many regions of `nbytes` that do not overlap, in a random order, somewhere in `total` bytes."""
    dice = np.random.default_rng(seed)
    room = total // number
    assert room >= nbytes + align
    starts = [i * room + int(dice.integers(0, (room - nbytes) // align + 1)) * align for i in range(number)]
    dice.shuffle(starts)
    return [Region(start, nbytes) for start in starts]


def _exactly(sock: socket.socket, nbytes: int) -> bytes:
    got = b""
    while len(got) < nbytes:
        more = sock.recv(nbytes - len(got))
        assert more
        got += more
    return got


class _Child:
    """What the process of an `Other` does."""

    def __init__(self, side: Side) -> None:
        self.side = side
        self.channel: Channel | None = None

    def fill(self, seed: int) -> None:
        self.side.fill(seed)

    def crc(self, regions: list[list[int]]) -> int:
        value = 0
        for offset, nbytes in regions:
            value = zlib.crc32(self.side.pool.cut(offset, nbytes), value)
        return value

    def grant(self, reads: list[list[int]] | None = None, writes: list[list[int]] | None = None) -> None:
        self.side.grants.reads = None if reads is None else [Region(*one) for one in reads]
        self.side.grants.writes = None if writes is None else [Region(*one) for one in writes]

    def connect(self, port: int, blob: str) -> None:
        reach = Reach("127.0.0.1", port, SESSION, TOKEN, None)
        self.channel = self.side.transport.connect(reach, bytes.fromhex(blob))

    def repeat(self, operation: str, remote: list[list[int]], local: list[list[int]]) -> None:
        """Again and again in a thread, for ever."""
        channel = self.channel
        assert channel is not None
        there, here = [Region(*one) for one in remote], [Region(*one) for one in local]

        def work() -> None:
            while True:
                if operation == "read":
                    channel.read(there, here, time.monotonic() + 60)
                else:
                    channel.write(here, there, time.monotonic() + 60)

        threading.Thread(target=work, daemon=True).start()

    def threads(self) -> int:
        return threading.active_count()


def say(what: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(what) + "\n")
    sys.stdout.flush()


def main() -> None:
    name, nbytes, tls = sys.argv[1:]
    side = Side(name, int(nbytes), Path(tls) if tls else None)
    child = _Child(side)
    say({"port": side.port, "blob": side.transport.advertise().hex()})
    for line in sys.stdin:
        order = json.loads(line)
        value = getattr(child, order.pop("what"))(**order)
        say({"value": value})
    os._exit(0)


if __name__ == "__main__":
    main()
