"""Two nodes in two processes: bytes come and go; one is killed in the middle."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from peer_rig import drop, eventually, peer, sealed
from proxy_rig import FaultProxy
from storage_rig import chain, namespace

from lmkv.errors import LmkvError, PluginError
from lmkv.frame import frame_bytes, verify
from lmkv.plugins import PluginHost
from lmkv.types import OutcomeKind

if TYPE_CHECKING:
    from collections.abc import Iterator


pytestmark = pytest.mark.anyio
PAGE = 4 << 20
SPACE = namespace(page_bytes=PAGE)
FRAME = frame_bytes(2 * PAGE, 1)
HERE = Path(__file__).parent


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@contextmanager
def child(chunks: int, *settings: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A node in another process, and its address."""
    paths = [str(HERE), str(HERE.parent / "core/tests"), os.environ.get("PYTHONPATH", "")]
    process = subprocess.Popen(
        [sys.executable, str(HERE / "peer_child.py"), str(PAGE), str(chunks), *settings],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
    )
    assert process.stdout is not None
    try:
        yield process, json.loads(process.stdout.readline())["address"]
    finally:
        if process.poll() is None:
            process.kill()
        process.communicate()


def needs(transport: str) -> None:
    try:
        PluginHost.discover().load_transport(transport)
    except PluginError as e:
        pytest.skip(str(e))


def node(name: str = "a", **settings: Any) -> Any:
    return peer(name, ram=8 * FRAME, space=SPACE, **settings)


@pytest.mark.parametrize("transport", ["tcp", pytest.param("nixl", marks=pytest.mark.slow)])
async def test_pull_and_push_between_processes(transport: str) -> None:
    needs(transport)
    theirs, ours = chain(range(16)), chain(range(100, 108))
    with child(4, f"transports={transport}") as (process, address):
        async with node(transports=(transport,)) as a:
            into = a.memory(4, FRAME)
            until = time.monotonic() + 30
            outcomes = await a.on(a.link(address).pull(a.keys(theirs), into, until))
            assert [o.kind for o in outcomes] == [OutcomeKind.OK] * 4
            assert a.client is not None
            for key, obj in zip(a.keys(theirs), into, strict=True):
                trailer = verify(obj.view, key)
                assert obj.view[: trailer.raw_bytes] == a.client.payload(key.digest, 0, trailer.raw_bytes).data
                obj.release("test")
            a.store(ours)
            frames = sealed(a, ours)
            assert all(o.ok for o in await a.on(a.link(address).push(frames, until)))
            drop(frames)
            assert list(a.link(address)._channels.open) == [transport]
            has, _ = await a.on(a.link(address).has(SPACE.id, [*ours.digests, *theirs.digests], until))
            assert all(has)
            assert a.at_rest()
        said, _ = process.communicate(timeout=30)
        assert json.loads(said)["used"] == 6 * FRAME
        assert process.returncode == 0


async def test_killed_in_the_middle_of_a_read() -> None:
    """The child serves with one per cent of its time: a read of a few milliseconds takes a second."""
    keys = chain(range(16))
    with child(4, "share=0.2%", "sockets=1") as (process, address):
        async with node(sockets=1) as a:
            link = a.link(address)
            into = a.memory(4, FRAME)
            for obj in into:
                obj.view[:64] = bytes(64)
            begun = time.monotonic()
            reading = asyncio.ensure_future(a.on(link.pull(a.keys(keys), into, begun + 60)))
            await eventually(lambda: into[0].view[:64] != bytes(64))
            process.send_signal(signal.SIGKILL)
            outcomes = await reading
            assert [o.kind for o in outcomes] == [OutcomeKind.FAILED] * 4
            assert time.monotonic() - begun < 30
            for obj in into:
                obj.release("test")
            with pytest.raises(LmkvError):
                await a.on(link.has(SPACE.id, keys.digests, time.monotonic() + 1))
            assert a.at_rest()


@pytest.mark.slow  # as the one before, from the other side
async def test_killed_in_the_middle_of_a_transfer() -> None:
    keys = chain(range(100, 116))
    with child(1) as (process, address), FaultProxy(int(address.rsplit(":", 1)[1])) as proxy:
        async with node() as a:
            a.store(keys)
            link = a.link(proxy.address)
            await a.on(link.agree(SPACE.json(), time.monotonic() + 20))
            proxy.throttle(8 << 20)
            a.node.outgoing.send("t", proxy.address, SPACE.id, keys.digests, 16, final=True)
            await eventually(lambda: proxy.bytes_up > 2 << 20)
            process.send_signal(signal.SIGKILL)
            await eventually(lambda: a.node.outgoing.state("t").state == "failed", 30)
            await eventually(a.at_rest)


@pytest.mark.slow
async def test_killed_while_nixl_moves_bytes() -> None:
    """Whenever it dies: every call ends in its time, as an error or done, and nothing stays held here."""
    needs("nixl")
    keys, ours = chain(range(16)), chain(range(100, 116))
    for pause in (0.0, 0.01, 0.05):
        with child(4, "transports=nixl") as (process, address):
            async with node(transports=("nixl",)) as a:
                a.store(ours)
                outcomes, _ = await a.pull(address, a.keys(keys), seconds=30)
                assert all(o.ok for o in outcomes)
                begun = time.monotonic()
                pulling = asyncio.ensure_future(a.pull(address, a.keys(keys), seconds=20))
                a.node.outgoing.send("t", address, SPACE.id, ours.digests, 16, final=True)
                await asyncio.sleep(pause)
                process.send_signal(signal.SIGKILL)
                with contextlib.suppress(LmkvError):
                    await pulling
                await eventually(lambda: a.node.outgoing.state("t").state != "open", 40)
                assert time.monotonic() - begun < 45
                await eventually(a.at_rest, 40)
