"""The socket's path and its lock: one service for each, nothing left behind, stale ones replaced."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import os
import stat
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Final

from lmkv.errors import ConfigError
from lmkv.service.wire import new_socket

if TYPE_CHECKING:
    import socket
    from types import TracebackType

    from typing_extensions import Self

PATH_BYTES: Final = 107
"""What a unix socket's address takes."""
BACKLOG: Final = 128
PROBE_SECONDS: Final = 2.0


def default_socket(config_text: str) -> Path:
    """The socket of the service that engines with this configuration share, in a folder that only its user can enter.

    Raises:
        ConfigError: somebody else owns the folder.
    """
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    folder = Path(runtime) / "lmkv" if runtime and Path(runtime).is_dir() else None
    if folder is None or not os.access(folder.parent, os.W_OK):
        folder = Path(tempfile.gettempdir()) / f"lmkv-{os.geteuid()}"
    private_folder(folder)
    return folder / f"{hashlib.sha256(config_text.encode()).hexdigest()[:16]}.sock"


def private_folder(folder: Path) -> None:
    """Make `folder` with mode 0700, or check that it is ours and nobody else can write to it.

    Raises:
        ConfigError: it is not.
    """
    with contextlib.suppress(FileExistsError):
        folder.mkdir(mode=0o700, parents=True)
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o022:
        raise ConfigError(f"{folder} must be a folder that belongs to this user and that nobody else can write to")


def check_path(path: str) -> None:
    """Refuse a path that no socket can have.

    Raises:
        ConfigError: it is too long.
    """
    if len(os.fsencode(path)) > PATH_BYTES:
        raise ConfigError(
            f"the socket path {path} is longer than {PATH_BYTES} bytes: set service.socket to a shorter one"
        )


def answers(path: str) -> bool:
    """Whether somebody listens there. Does not count as a client."""
    with new_socket() as sock:
        sock.settimeout(PROBE_SECONDS)
        try:
            sock.connect(path)
        except TimeoutError:
            return True  # its queue is full: it lives, but is busy
        except OSError as e:
            return e.errno == errno.EAGAIN
        return True


def listen(path: str) -> socket.socket:
    """A listening socket with mode 0600 at `path`; a stale one is replaced. Whoever calls holds the path's `Lock`.

    Raises:
        ConfigError: the path is too long, cannot be made, is something else than a socket, or somebody listens there.
    """
    check_path(path)
    try:
        Path(path).parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with contextlib.suppress(FileNotFoundError):
            if not stat.S_ISSOCK(Path(path).lstat().st_mode):
                raise ConfigError(f"{path} is there and is no socket: remove it, or set service.socket to another path")
            if answers(path):
                raise in_use(path)
            Path(path).unlink()
        sock = new_socket()
        before = os.umask(0o177)
        try:
            sock.bind(path)
        except BaseException:
            sock.close()
            raise
        finally:
            os.umask(before)
        sock.listen(BACKLOG)
    except OSError as e:
        raise ConfigError(f"cannot listen at {path}: {e.strerror or e} (errno {e.errno})") from e
    sock.setblocking(False)
    return sock


def remove(path: str) -> None:
    """Take the socket's name away."""
    with contextlib.suppress(OSError):
        Path(path).unlink()


def in_use(path: str) -> ConfigError:
    """What to say when a service lives there."""
    return ConfigError(
        f"a service listens at {path} already: stop it, or give this one another service.socket", kind="in-use"
    )


class Lock:
    """An exclusive lock on a file beside the socket, which goes with its holder; released, it leaves no file.

    A file that was replaced while we waited for it is not the lock any more, hence the look at its inode.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        self._fd = -1

    def acquire(self) -> bool:
        """Try once; never waits.

        Raises:
            ConfigError: the file cannot be made.
        """
        try:
            Path(self._path).parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        except OSError as e:
            raise ConfigError(f"cannot make the lock file {self._path}: {e.strerror} (errno {e.errno})") from e
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            mine, there = os.fstat(fd), Path(self._path).stat()
        except OSError:
            os.close(fd)
            return False
        if mine.st_ino != there.st_ino:
            os.close(fd)
            return False
        self._fd = fd
        return True

    def wait(self, seconds: float) -> bool:
        """Try until `seconds` have passed."""
        until = time.monotonic() + seconds
        while not self.acquire():
            if time.monotonic() > until:
                return False
            time.sleep(0.01)
        return True

    def release(self) -> None:
        """Remove the file and let go. Idempotent."""
        if self._fd < 0:
            return
        fd, self._fd = self._fd, -1
        with contextlib.suppress(OSError):
            Path(self._path).unlink()
        with contextlib.suppress(OSError):
            fcntl.flock(fd, fcntl.LOCK_UN)  # also for copies of the descriptor that a fork has made
        os.close(fd)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()
