"""Beginning and end of a service, its path, and clients that come back."""

from __future__ import annotations

import gc
import os
import signal
import socket
import stat
import subprocess
import sys
import threading
import time
from typing import TYPE_CHECKING

import pytest
from service_rig import BLOB, Served, eventually
from storage_rig import namespace

from lmkv.errors import ClosedError, ConfigError
from lmkv.service import files, peer, server
from lmkv.service.client import SocketClient
from lmkv.service.protocol import (
    Done,
    GetHealth,
    Pin,
    Register,
    Unregister,
)

if TYPE_CHECKING:
    from pathlib import Path

# --- the end ---------------------------------------------------------------------------------------------------------


def test_a42_stop(path: Path) -> None:
    """With calls under way: it ends, they fail, nothing is left behind; closing again does no harm."""
    service = Served(path)
    client = SocketClient(service.path, "test", prefault=False)
    slow = client.call(Pin(b"", BLOB, 60))
    eventually(lambda: bool(service.storage.sessions[0].seen))
    service.stop()
    assert isinstance(slow.exception(10), ClosedError)
    assert service.error is None
    assert service.storage.closed
    assert service.storage.sessions[0].closed.is_set()
    assert list(path.parent.iterdir()) == []
    with pytest.raises(ClosedError):
        client.call(GetHealth()).result(0)
    assert not client.send(Done(1))
    client.close()
    client.close()


def test_the_mapping_outlives_service_and_client(path: Path) -> None:
    service = Served(path)
    client = SocketClient(service.path, "test", prefault=False)
    view = client.pool.view[:4]
    view[:] = b"kept"
    service.stop()
    eventually(lambda: not client.connected)
    client.close()
    assert bytes(view) == b"kept"


def test_a_session_does_not_end_while_its_client_copies(served: Served) -> None:
    client = SocketClient(served.path, "test", prefault=False)
    session = served.storage.sessions[0]
    with client.connection() as link:
        client.close()
        assert not client.connected
        assert link.intact() is False
        assert not session.closed.wait(0.2)
    assert session.closed.wait(10)


def test_a_client_sees_that_its_session_has_ended(served: Served, client: SocketClient) -> None:
    link = client.connection()
    assert link.intact()
    session = served.storage.sessions[0]
    ours = next(o for o in gc.get_objects() if isinstance(o, peer.Peer) and o._session is session)
    ended: list[bool] = []
    session.close = lambda: ended.append(link.intact())  # type: ignore[method-assign]
    served.loop.call_soon_threadsafe(ours.connection_lost, None)
    eventually(lambda: bool(ended))
    assert ended == [False]


def test_linger_counts_from_the_last_client(path: Path) -> None:
    service = Served(path, linger=0.2)
    one = SocketClient(service.path, "one", prefault=False)
    two = SocketClient(service.path, "two", prefault=False)
    one.close()
    time.sleep(0.4)
    assert two.call(GetHealth()).result(10)
    two.close()
    three = SocketClient(service.path, "three", prefault=False)  # within the linger
    time.sleep(0.4)
    assert three.call(GetHealth()).result(10)
    three.close()
    service.thread.join(20)
    assert not service.thread.is_alive()
    assert service.error is None
    assert list(path.parent.iterdir()) == []


def test_a_service_that_nobody_comes_to_goes(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "FIRST_CLIENT_SECONDS", 0.2)
    service = Served(path, linger=0.0)
    files.answers(service.path)  # a look is no client
    service.thread.join(20)
    assert not service.thread.is_alive()
    assert service.storage.closed


# --- the path --------------------------------------------------------------------------------------------------------


def test_a_stale_socket_is_replaced(path: Path) -> None:
    stale = socket.socket(socket.AF_UNIX)
    stale.bind(str(path))
    stale.close()
    assert path.exists()
    assert not files.answers(str(path))
    service = Served(path)
    client = SocketClient(path, "test", prefault=False)
    assert client.call(GetHealth()).result(10)
    client.close()
    service.stop()


def test_a_live_socket_is_left_alone(served: Served, client: SocketClient, path: Path) -> None:
    second = Served(path)
    second.thread.join(20)
    assert isinstance(second.error, ConfigError)
    assert second.error.kind == "in-use"
    assert "listens" in str(second.error)
    assert client.call(GetHealth()).result(10)


def test_a_path_that_cannot_be_is_explained(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    with pytest.raises(ConfigError, match="no socket"):
        files.listen(str(tmp_path / "file"))
    assert (tmp_path / "file").read_text() == "mine"
    with pytest.raises(ConfigError, match="longer than 107 bytes"):
        files.listen(str(tmp_path / ("x" * 120)))
    with pytest.raises(ConfigError, match="errno"):
        files.listen(str(tmp_path / "file" / "s"))


def test_the_default_socket_is_private(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    one, two = files.default_socket("a"), files.default_socket("b")
    assert one != two
    assert one == files.default_socket("a")
    assert one.parent == two.parent
    assert stat.S_IMODE(one.parent.stat().st_mode) == 0o700
    one.parent.chmod(0o777)
    with pytest.raises(ConfigError, match="nobody else"):
        files.default_socket("a")


@pytest.mark.parametrize("mode", [0o777, 0o720])
def test_a_folder_that_others_can_write_to_is_refused(tmp_path: Path, mode: int) -> None:
    folder = tmp_path / "sockets"
    folder.mkdir()
    files.private_folder(folder)
    folder.chmod(mode)
    with pytest.raises(ConfigError, match="nobody else can write to"):
        files.private_folder(folder)


@pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="needs pidfd_open")
def test_a_client_that_died_is_noticed_while_its_fork_lives(served: Served) -> None:
    """A fork of an engine, such as a worker's compiler, keeps the socket open."""
    script = (
        "import os, sys, time\n"
        "from lmkv.errors import LmkvError\n"
        "from lmkv.service.client import SocketClient\n"
        "for attempt in range(5):\n"  # a busy machine may be late for a handshake
        "    try:\n"
        "        client = SocketClient(sys.argv[1], 'doomed', prefault=False)\n"
        "        break\n"
        "    except LmkvError as e:\n"
        "        print(e, file=sys.stderr)\n"
        "child = os.fork()\n"
        "if child:\n"
        "    print(child, flush=True)\n"
        "time.sleep(60)\n"
    )
    doomed = subprocess.Popen([sys.executable, "-c", script, served.path], stdout=subprocess.PIPE, text=True)
    child = 0
    try:
        assert doomed.stdout is not None
        child = int(doomed.stdout.readline())
        session = served.storage.sessions[-1]
        assert not session.closed.is_set()
        doomed.kill()
        doomed.wait()
        assert session.closed.wait(20)
        os.kill(child, 0)  # the fork still lives
    finally:
        doomed.kill()
        if child:
            os.kill(child, signal.SIGKILL)
        doomed.wait()
        if doomed.stdout is not None:
            doomed.stdout.close()


def test_a_lock_has_one_holder_and_leaves_no_file(tmp_path: Path) -> None:
    where = str(tmp_path / "lock")
    one, two = files.Lock(where), files.Lock(where)
    assert one.acquire()
    assert not two.acquire()
    one.release()
    one.release()
    assert not (tmp_path / "lock").exists()
    with two:
        assert two.wait(5)
        assert not one.acquire()
    assert list(tmp_path.iterdir()) == []


# --- coming back -----------------------------------------------------------------------------------------------------


def test_a29_quick_restart(path: Path) -> None:
    """Another service at the same address: noticed, registered again before anything else, callbacks run."""
    service = Served(path)
    client = SocketClient(service.path, "test", prefault=False)
    called = threading.Event()
    client.on_reconnect(lambda: 1 / 0)  # type: ignore[arg-type,return-value]  costs the others nothing
    client.on_reconnect(called.set)
    first = client.incarnation
    client.call(Register("one")).result(10)
    client.call(Register("two")).result(10)
    link = client.connection()
    service.stop()
    eventually(lambda: not client.connected)
    late = client.call(Register("three"))
    assert isinstance(late.exception(0), ClosedError)
    again = Served(path)
    eventually(lambda: client.connected)
    assert client.incarnation != first
    assert called.wait(10)
    assert [m.namespace_json for m in again.storage.sessions[0].seen] == ["one", "two", "three"]
    assert client.call(GetHealth()).result(10)
    assert not link.alive
    assert not link.send(Done(1))
    assert isinstance(link.call(GetHealth()).exception(0), ClosedError)
    client.close()
    again.stop()


def test_what_a_client_is_through_with_is_not_registered_again(path: Path) -> None:
    service = Served(path)
    client = SocketClient(service.path, "test", prefault=False)
    spaces = [namespace(model=name) for name in ("one", "two", "three")]
    for space in spaces:
        client.call(Register(space.json())).result(10)
    client.unregister(spaces[0])
    session = service.storage.sessions[0]
    eventually(lambda: Unregister(spaces[0].id) in session.seen)
    service.stop()
    eventually(lambda: not client.connected)
    client.unregister(spaces[1])
    again = Served(path)
    eventually(lambda: client.connected)
    assert again.storage.sessions[0].seen == [Register(spaces[2].json())]
    client.close()
    again.stop()


def test_a_client_starts_what_has_gone(path: Path) -> None:
    services = [Served(path)]

    def revive() -> None:
        if len(services) == 1:
            services.append(Served(path))

    client = SocketClient(path, "test", prefault=False, revive=revive)
    services[0].stop()
    eventually(lambda: len(services) == 2 and client.connected)
    assert client.call(GetHealth()).result(10)
    client.close()
    services[1].stop()


def test_what_a_client_said_before_it_closed_is_done(served: Served) -> None:
    """One-way messages have no answer that a client could wait for: closing must not lose them."""
    for number in range(20):
        client = SocketClient(served.path, "short", prefault=False)
        count = peer.BURST * 2 + number
        for hold in range(count):
            assert client.send(Done(hold))
        client.close()
        session = served.storage.sessions[-1]
        eventually(session.closed.is_set)
        assert [m.hold for m in session.seen if isinstance(m, Done)] == list(range(count))
