"""The first comer starts the service as a child process; it goes after its last client."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Final

from lmkv.errors import ClosedError, ConfigError
from lmkv.service import files
from lmkv.service.client import SocketClient

if TYPE_CHECKING:
    from collections.abc import Mapping

log = logging.getLogger("lmkv.client")

START_SECONDS: Final = 120.0
"""A disk tier may have to scan a very large folder."""
TAIL_BYTES: Final = 4000
LOG_BYTES: Final = 4 << 20
"""A longer log of earlier services is thrown away when the next one starts."""
PAUSE: Final = 0.01
_OF_THE_ENGINE: Final = ("OMP_", "KMP_", "GOMP_", "LMKV_")
"""Thread settings for the engine's own work; and ours, which are part of the configuration by now."""


def ensure_service(
    config_text: str, socket_path: str | os.PathLike[str], *, linger: float = 0.0, timeout: float = START_SECONDS
) -> bool:
    """Make sure that a service listens at `socket_path`; whether this call started it.

    Of any number of processes that call this at once, one starts the service; the others wait for it. It does not need
    its parent, and ends `linger` seconds after its last client has gone.

    Args:
        config_text: `Config.text`.
        socket_path: in a folder that belongs to this user; `files.default_socket` gives one.
        linger: seconds.
        timeout: seconds until it must listen.

    Raises:
        ConfigError: it ended at once: its last words are in the message (kind `start`).
        ClosedError: it did not listen in time.
    """
    path = os.path.abspath(os.fspath(socket_path))  # noqa: PTH100  resolve() would follow links, and look twice
    files.check_path(path)
    until = time.monotonic() + timeout
    with files.Lock(f"{path}.start") as lock:
        while not files.answers(path):
            if lock.acquire():
                if files.answers(path):
                    return False
                _start(config_text, path, linger, until)
                return True
            if time.monotonic() > until:
                raise ClosedError(f"no service came up at {path} within {timeout:g} s")
            time.sleep(PAUSE)
    return False


def connect_or_start(
    config_text: str,
    socket_path: str | os.PathLike[str],
    name: str,
    *,
    linger: float = 0.0,
    timeout: float = START_SECONDS,
    prefault: bool = True,
) -> SocketClient:
    """A client of the service at `socket_path`, which is started if there is none, also later when it has died.

    Raises:
        ConfigError: the service cannot start.
        ClosedError: it did not come up within `timeout` seconds.
        ProtocolError: another user's, or another version.
    """
    until = time.monotonic() + timeout

    def revive() -> None:
        ensure_service(config_text, socket_path, linger=linger)

    while True:
        left = max(0.1, until - time.monotonic())
        ensure_service(config_text, socket_path, linger=linger, timeout=left)
        try:
            return SocketClient(socket_path, name, timeout=left, prefault=prefault, revive=revive)
        except ClosedError:  # it was just going, as its last client had
            if time.monotonic() > until:
                raise
            time.sleep(PAUSE)


def log_path(socket_path: str | os.PathLike[str]) -> Path:
    """Where a service started here writes its log."""
    return Path(f"{os.fspath(socket_path)}.log")


def _start(config_text: str, path: str, linger: float, until: float) -> None:
    written = log_path(path)
    try:
        fd = os.open(written, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except OSError as e:
        raise ConfigError(f"cannot write the service's log {written}: {e.strerror} (errno {e.errno})") from e
    try:
        if os.fstat(fd).st_size > LOG_BYTES:
            os.ftruncate(fd, 0)
        before = os.fstat(fd).st_size
        child = subprocess.Popen(  # noqa: S603  this interpreter, our own module
            [sys.executable, "-m", "lmkv.service", "--config-file", "-", "--socket", path, "--linger", str(linger)],
            stdin=subprocess.PIPE,
            stdout=fd,
            stderr=fd,
            env=_environment(os.environ),
            start_new_session=True,
        )
    except OSError as e:
        raise ConfigError(f"cannot start the service: {e}", kind="start") from e
    finally:
        os.close(fd)
    # Whoever starts a process must take note of its end; nobody waits for that.
    threading.Thread(target=child.wait, name="lmkv-service-child", daemon=True).start()
    try:
        assert child.stdin is not None
        with child.stdin:
            child.stdin.write(config_text.encode())
    except BrokenPipeError:
        pass  # it has ended: its log says why
    while not files.answers(path):
        if child.poll() is not None:
            raise ConfigError(
                f"the service ended at start with status {child.returncode}:\n{_tail(written, before)}", kind="start"
            )
        if time.monotonic() > until:
            child.terminate()
            raise ClosedError(f"the service is not ready in time:\n{_tail(written, before)}")
        time.sleep(PAUSE)
    log.info("started the service as process %d", child.pid)


def _environment(own: Mapping[str, str]) -> dict[str, str]:
    """The child's: modules from where we have them (plugins may lie anywhere), no settings for the engine's threads."""
    environment = {name: value for name, value in own.items() if not name.startswith(_OF_THE_ENGINE)}
    environment["PYTHONPATH"] = os.pathsep.join([os.path.abspath(entry) for entry in sys.path if entry])  # noqa: PTH100
    environment["PYTHONSAFEPATH"] = "1"
    return environment


def _tail(path: Path, since: int) -> str:
    """The last of what was written after `since`."""
    try:
        with path.open("rb") as file:
            end = file.seek(0, os.SEEK_END)
            file.seek(max(since, end - TAIL_BYTES))
            return file.read().decode(errors="replace").strip() or "(its log is empty)"
    except OSError as e:
        return f"(its log cannot be read: {e})"
