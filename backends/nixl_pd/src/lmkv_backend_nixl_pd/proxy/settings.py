"""What a proxy is started with: options of the command line, which win, and a YAML file of the same names."""

# No `from __future__ import annotations`: pydantic reads these annotations.

import difflib
import ipaddress
from collections.abc import Mapping
from typing import Annotated, Any, Final, Literal
from urllib.parse import urlsplit

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError
from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError

from lmkv.errors import ConfigError
from lmkv.peer.ports import BASE, Ports, Rank
from lmkv.secrets import Secret
from lmkv.units import Interval, Seconds, Size

Mode = Literal["pd", "cache-aware"]
PORT_MAX: Final = 65535


def _url(value: object) -> object:
    """An http(s) URL without a login, query or fragment."""
    if not isinstance(value, str):
        return value
    example = "such as http://10.0.0.5:8000"
    try:
        parts = urlsplit(value)
        port = parts.port
    except ValueError:
        raise ValueError(f"is no URL {example}") from None
    if parts.scheme not in {"http", "https"} or not parts.hostname or port == 0:
        raise ValueError(f"{value!r} is no URL {example}")
    if parts.query or parts.fragment or parts.username is not None:
        raise ValueError("has a login, a query or a fragment: only scheme, host, port and path can be given")
    if not value.isascii() or not value.isprintable() or " " in value:
        raise ValueError(f"{value!r} has characters that no URL has")
    return value


def _listen(value: object) -> object:
    """``HOST:PORT`` as a pair."""
    if not isinstance(value, str):
        return value
    host, colon, port = value.rpartition(":")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host:
        raise ValueError(f"{value!r}: an IPv6 address is written in brackets, such as [::1]:8000")
    if not colon or not host or not port.isdecimal() or int(port) > PORT_MAX:
        raise ValueError(f"{value!r} is not HOST:PORT, such as 127.0.0.1:8000")
    return host, int(port)


def _pair(value: object) -> object:
    """``URL=NAME`` as a pair; a YAML file may also have a mapping of one."""
    if isinstance(value, dict) and len(value) == 1:
        return next(iter(value.items()))
    if isinstance(value, str):
        url, equals, name = value.rpartition("=")
        if not equals or not url or not name:
            raise ValueError(f"{value!r} is not URL=NAME")
        return url, name
    return value


Url = Annotated[str, BeforeValidator(_url)]
Pair = Annotated[tuple[Url, str], BeforeValidator(_pair)]
Listen = Annotated[tuple[str, int], BeforeValidator(_listen)]
Count = Annotated[int, Field(ge=1)]


class Settings(BaseModel):
    """The options. Each is `--name-with-dashes` on the command line and `name_with_underscores` in the file."""

    model_config = ConfigDict(extra="forbid", frozen=True, hide_input_in_errors=True)

    listen: Listen | None = Field(
        default=None,
        description="HOST:PORT; port 0: any free one. Default: 127.0.0.1 and a port worked out from base and instance.",
    )
    port_base: int = Field(default=BASE, description="First port of this host's lmkv processes.")
    instance: Annotated[int, Field(ge=0)] = Field(default=0, description="Number of this proxy on this host.")
    prefill: tuple[Url, ...] = Field(default=(), description="Engines that compute prompts, for mode pd.")
    decode: tuple[Pair, ...] = Field(
        default=(), description="URL=HOST:PORT: engines that go on with them, and their nodes' peer ports. Mode pd."
    )
    engine: tuple[Pair, ...] = Field(
        default=(), description="URL=NODE: engines, and their nodes' names at the controller. Mode cache-aware."
    )
    controller: Url | None = Field(default=None, description="URL of the controller. Mode cache-aware.")
    controller_token: Secret | None = Field(default=None, description="Its bearer token, role `read`.")
    peer_key: Secret | None = Field(default=None, description="The key that all nodes share (`peer.key` there).")
    peer_tls_ca: str | None = Field(
        default=None, description="File of the CA certificates that peer ports with TLS are checked with, PEM."
    )
    peer_tls_certificate: str | None = Field(
        default=None, description="File of the certificate chain that is shown to them, PEM."
    )
    peer_tls_key: str | None = Field(default=None, description="File of its key, PEM.")
    choose: Literal["least-loaded", "round-robin"] = Field(
        default="least-loaded", description="Which engine of a pool is next."
    )
    min_prefill_tokens: Annotated[int, Field(ge=0)] = Field(
        default=256, description="A shorter prompt is computed where it is decoded, and not looked up."
    )
    prefill_timeout: Interval = Field(default=300.0, description="Time for a prompt to be computed and transferred.")
    prefill_tries: Count = Field(default=2, description="Prefill engines that are tried for one request.")
    admission_wait: Seconds = Field(
        default=10.0, description="Time that a request waits for room at the decode nodes at most."
    )
    max_waiting: Count = Field(default=256, description="Requests that wait for room at most.")
    peer_timeout: Interval = Field(default=2.0, description="Time for a node's peer port to answer.")
    lookup_timeout: Interval = Field(
        default=1.0, description="Time to tokenise a prompt and to ask the controller, together."
    )
    queue_tokens: Annotated[int, Field(ge=0)] = Field(
        default=512, description="Cached tokens that weigh as much as one request in an engine's queue."
    )
    connect_timeout: Interval = Field(default=3.0, description="Time to connect to an engine.")
    silence: Interval = Field(default=600.0, description="An engine that sends nothing for so long is given up.")
    health_interval: Interval = Field(default=5.0, description="Time between two looks at an engine's /health.")
    max_requests: Count = Field(default=1024, description="Requests at one time; more are refused (503).")
    max_body: Size = Field(default=32 << 20, description="Bytes of a request's body at most (413).")
    keys: Secret | None = Field(
        default=None, description="API keys, one a line: who shows none of them is refused (401)."
    )
    keys_elsewhere: bool = Field(
        default=False, description="Off loopback without keys: the engines check them, or somebody in front does."
    )
    tls_certificate: str | None = Field(default=None, description="File of the certificate chain to listen with, PEM.")
    tls_key: str | None = Field(default=None, description="File of its key, PEM.")
    engine_ca: str | None = Field(
        default=None,
        description="File of the CA certificates that https engines are checked with. Default: the system's.",
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field(default="info", description="What is logged.")

    @property
    def mode(self) -> Mode:
        """By what is given."""
        return "cache-aware" if self.engine else "pd"

    @property
    def address(self) -> tuple[str, int]:
        """Host and port to listen on."""
        return self.listen or ("127.0.0.1", Ports(base=self.port_base).port("proxy", Rank(self.instance)))

    def faults(self) -> list[str]:
        """What does not fit together."""
        found = []
        if self.engine and (self.prefill or self.decode):
            found.append(
                "--engine is of mode cache-aware, --prefill and --decode are of mode pd: give one or the other"
            )
        elif self.engine and self.controller is None:
            found.append("--engine needs --controller URL")
        elif not self.engine and not (self.prefill and self.decode):
            found.append("give --prefill URL… and --decode URL=HOST:PORT…, or --engine URL=NODE… and --controller URL")
        if self.controller is not None and not self.engine:
            found.append("--controller needs --engine URL=NODE…")
        for option, urls in (
            ("--prefill", self.prefill),
            ("--decode", tuple(url for url, _ in self.decode)),
            ("--engine", tuple(url for url, _ in self.engine)),
        ):
            found += [f"{option} {url}: given twice" for url in sorted({u for u in urls if urls.count(u) > 1})]
        if (self.tls_certificate is None) != (self.tls_key is None):
            found.append("--tls-certificate and --tls-key go together: give both or neither")
        peer_tls = (self.peer_tls_ca, self.peer_tls_certificate, self.peer_tls_key)
        if any(peer_tls) and not all(peer_tls):
            found.append("--peer-tls-ca, --peer-tls-certificate and --peer-tls-key go together: give all or none")
        host, _ = self.address
        if not _loopback(host) and self.keys is None and not self.keys_elsewhere:
            found.append(
                f"--listen {host}: not a loopback address, and there are no API keys: give --keys-file FILE, or "
                "--keys-elsewhere if the engines (or somebody in front) check them"
            )
        return found


def _loopback(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def read_settings(given: Mapping[str, object], file: str | None) -> Settings:
    """The settings of `file` (none: the defaults) under those `given` on the command line, which win.

    Raises:
        ConfigError: names every fault, and where it is.
    """
    found = _from_file(file) if file is not None else {}
    try:
        settings = Settings(**{**found, **given})
    except ValidationError as error:
        lines = [f"{_where(detail['loc'], found, file, given)}: {_what(detail)}" for detail in error.errors()]
        raise ConfigError(_listed(lines), faults=tuple(lines)) from None
    if faults := settings.faults():
        raise ConfigError(_listed(faults), faults=tuple(faults))
    return settings


def _listed(lines: list[str]) -> str:
    return lines[0] if len(lines) == 1 else "\n  ".join([f"{len(lines)} faults:", *lines])


def _where(place: tuple[int | str, ...], found: Mapping[str, object], file: str | None, given: object) -> str:
    name = str(place[0]) if place else ""
    if name in found and isinstance(given, dict) and name not in given:
        return f"{file}: {name}"
    return f"--{name.replace('_', '-')}"


def _what(detail: Any) -> str:
    if detail["type"] == "extra_forbidden":
        near = difflib.get_close_matches(str(detail["loc"][0]), Settings.model_fields, n=1)
        return f"there is no such option (did you mean {near[0]!r}?)" if near else "there is no such option"
    return str(detail["msg"]).removeprefix("Value error, ")


def _from_file(file: str) -> dict[str, Any]:
    try:
        with open(file, encoding="utf-8") as stream:  # noqa: PTH123  the path as the user wrote it
            content = YAML(typ="safe", pure=True).load(stream)
    except OSError as error:
        raise ConfigError(f"--config {file}: {error.strerror}") from None
    except (YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file}: not valid YAML: {str(error).splitlines()[0]}") from None
    if not isinstance(content, dict) or not all(isinstance(name, str) for name in content):
        raise ConfigError(f"{file}: must be a mapping of options, such as `port: 8000`")
    return content
