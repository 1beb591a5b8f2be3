"""What a controller is started with, checked before anything is."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final
from urllib.parse import urlsplit

from lmkv.errors import ConfigError
from lmkv.observe.address import loopback
from lmkv.peer.ports import Ports
from lmkv.units import parse_interval, parse_size

if TYPE_CHECKING:
    from pathlib import Path

DEFAULT_PORT: Final = Ports().port("controller")
DEFAULT_LISTEN: Final = f"127.0.0.1:{DEFAULT_PORT}"
_PORTS: Final = 1 << 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The settings of one controller; times in seconds, sizes in bytes.

    Raises:
        ConfigError: settings that do not fit each other; names the option.
    """

    host: str = "127.0.0.1"
    port: int = DEFAULT_PORT
    """0: any free one, logged at the start."""
    tokens: Path | None = None
    """File of bearer tokens. None: whoever reaches the port may do everything; on a loopback address only."""
    directory: str | None = None
    """``redis://…``: kept there, shared with other controllers. None: in this process's memory."""
    journal: Path | None = None
    """File in which jobs outlive the process. None: they do not, unless the directory is a Redis."""
    certificate: Path | None = None
    private_key: Path | None = None
    client_ca: Path | None = None
    """Only clients with a certificate of this authority are answered."""
    node_timeout: float = 30.0
    """A node of which nothing was heard for so long is taken for gone."""
    request_timeout: float = 30.0
    """For a request's head and body to arrive, and for its answer to be made."""
    max_body: int = 16 << 20
    step_timeout: float = 120.0
    """A step of a job at a node that reports nothing for so long has failed."""

    def __post_init__(self) -> None:
        if loopback(self.host) is None and self.tokens is None:
            raise ConfigError(
                f"--listen {self.host}: not a loopback address, and there are no tokens: give --tokens FILE, "
                "or listen on 127.0.0.1"
            )
        if (self.certificate is None) != (self.private_key is None):
            raise ConfigError("--tls-certificate and --tls-key go together: give both or neither")
        if self.client_ca is not None and self.certificate is None:
            raise ConfigError("--tls-client-ca needs --tls-certificate and --tls-key")
        for option, path in (
            ("--tls-certificate", self.certificate),
            ("--tls-key", self.private_key),
            ("--tls-client-ca", self.client_ca),
        ):
            if path is not None and not path.is_file():
                raise ConfigError(f"{option} {path}: there is no such file")
        if self.directory is not None and self.journal is not None:
            raise ConfigError("--journal: with a directory in Redis the jobs are kept there, too: leave it out")
        if self.directory is not None and urlsplit(self.directory).scheme not in {"redis", "rediss", "unix"}:
            raise ConfigError("--directory: is a URL such as redis://host:6379/0, or rediss:// for TLS")


def listen_address(text: str) -> tuple[str, int]:
    """Host and port of ``host:port``, ``[address]:port``, ``host`` or ``:port``.

    Raises:
        ConfigError: it is none of them.
    """
    host, port = text, str(DEFAULT_PORT)
    if text.startswith("["):
        host, _, rest = text[1:].partition("]")
        port = rest[1:] if rest.startswith(":") else port if not rest else "?"
    elif text.count(":") == 1:
        host, _, port = text.partition(":")
    if not port.isdecimal() or int(port) >= _PORTS:
        raise ConfigError(f"--listen {text!r}: is host:port, such as {DEFAULT_LISTEN}, with a port up to {_PORTS - 1}")
    return _address(host or "127.0.0.1", text), int(port)


def _address(host: str, text: str) -> str:
    found = loopback(host)
    if found is not None:
        return found
    if ":" in host:
        try:
            ipaddress.ip_address(host)
        except ValueError:
            raise ConfigError(f"--listen {text!r}: {host!r} is no address") from None
    return host


def interval(option: str, text: str) -> float:
    """Seconds of an option such as ``30s``, more than 0. Raises `ConfigError`."""
    try:
        return parse_interval(text)
    except ValueError as error:
        raise ConfigError(f"{option}: {error}") from None


def size(option: str, text: str) -> int:
    """Bytes of an option such as ``16MiB``. Raises `ConfigError`."""
    try:
        return parse_size(text)
    except ValueError as error:
        raise ConfigError(f"{option}: {error}") from None
