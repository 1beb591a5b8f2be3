"""The `options:` of a tier with `backend: redis`."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path  # noqa: TC003  pydantic needs it when the module is imported
from typing import TYPE_CHECKING, Annotated, Final, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, SecretStr, field_validator, model_validator

from lmkv.secrets import Secret, resolve_secret
from lmkv.units import Interval, Size  # noqa: TC001  as above
from lmkv_backend_redis.url import PORT, SENTINEL_PORT, mask_url, parse_address, parse_url, show_address

if TYPE_CHECKING:
    from typing_extensions import Self

    from lmkv.specs import BackendContext

SOCKET_PATH_MAX: Final = 107
"""Bytes that the kernel takes for the path of a unix socket."""
PART_MIN: Final = 1024
PART_MAX: Final = 512 << 20
"""What a server takes for one value unless it is told otherwise (`proto-max-bulk-len`)."""
_WAYS: Final = ("host", "socket", "sentinels", "cluster")
_IN_URL: Final = (*_WAYS, "port", "service", "username", "password", "db", "tls")


class URL(SecretStr):
    """A URL that may hold a password: shown without it."""

    def _display(self) -> str:
        return mask_url(self.get_secret_value())


@dataclass(frozen=True, slots=True)
class Target:
    """Where the store is, whichever way it was said."""

    kind: Literal["server", "socket", "sentinel", "cluster"]
    addresses: tuple[tuple[str, int], ...]
    """Host and port: of the server, of the sentinels, of some nodes; none for a socket."""
    socket: str
    service: str
    username: str | None
    password: SecretStr | None
    db: int
    tls: TLSOptions | None

    def __str__(self) -> str:
        """For messages; no secret."""
        where = ",".join(show_address(*address) for address in self.addresses)
        return {
            "server": f"redis {where}",
            "socket": f"redis {self.socket}",
            "sentinel": f"redis {self.service!r} of sentinels {where}",
            "cluster": f"redis cluster {where}",
        }[self.kind]


class TLSOptions(BaseModel):
    """How to speak TLS."""

    model_config = ConfigDict(extra="forbid", frozen=True, hide_input_in_errors=True)

    ca: Path | None = Field(
        default=None, description="File of the CA certificates to trust, PEM. Default: those of the system."
    )
    cert: Path | None = Field(default=None, description="File of the client's certificate, PEM.")
    key: Path | None = Field(default=None, description="File of its key, PEM.")
    key_password: Secret | None = Field(default=None, description="Password of the key.")
    verify: Literal["full", "chain", "none"] = Field(
        default="full",
        description="What is checked of the server's certificate: chain and host name, the chain only, nothing.",
    )

    @field_validator("ca", "cert", "key")
    @classmethod
    def _home(cls, value: Path | None) -> Path | None:
        return None if value is None else value.expanduser()

    @model_validator(mode="after")
    def _pairs(self) -> Self:
        if (self.cert is None) != (self.key is None):
            raise ValueError("cert and key go together")
        if self.key_password is not None and self.key is None:
            raise ValueError("key_password without a key")
        return self

    def faults(self) -> list[str]:
        """Files that cannot be read."""
        found = []
        for name in ("ca", "cert", "key"):
            path: Path | None = getattr(self, name)
            if path is not None:
                try:
                    path.open("rb").close()
                except OSError as error:
                    found.append(f"tls.{name}: cannot read {path}: {error.strerror} ([Errno {error.errno}])")
        return found


class RedisOptions(BaseModel):
    """Where the store is, by `url` or by fields; and how frames are kept in it."""

    model_config = ConfigDict(extra="forbid", frozen=True, hide_input_in_errors=True)

    url: Annotated[URL, BeforeValidator(resolve_secret)] | None = Field(
        default=None,
        description="redis://, rediss:// (TLS), unix://, redis+sentinel://, redis+cluster:// (rediss+…: TLS).",
    )
    host: str | None = Field(default=None, description="Name or address of one server.")
    port: int = Field(default=PORT, ge=1, le=65535, description="Its port.")
    socket: str | None = Field(default=None, description="Path of a server's unix socket, absolute.")
    sentinels: tuple[str, ...] = Field(default=(), description="`host:port` of the sentinels.")
    service: str | None = Field(default=None, description="Name by which the sentinels know the server.")
    sentinel_username: str | None = Field(default=None, description="User of the sentinels, if they ask for one.")
    sentinel_password: Secret | None = Field(default=None, description="Its password.")
    cluster: tuple[str, ...] = Field(default=(), description="`host:port` of some nodes; they name the others.")
    username: str | None = Field(default=None, description="ACL user.")
    password: Secret | None = Field(default=None, description="Its password, or that of `requirepass`.")
    db: int = Field(default=0, ge=0, description="Database number; a cluster has 0 only.")
    tls: TLSOptions | None = Field(default=None, description="TLS; `{}` for the defaults.")
    connect_timeout: Interval = Field(
        default=1.0,
        description="Time to connect and log in, at most the tier's `deadline`; sentinels and given nodes share it.",
    )
    connections: int = Field(default=4, ge=1, le=64, description="Calls, each on a connection of its own, at one time.")
    prefix: str = Field(
        default="lmkv",
        pattern=r"^[A-Za-z0-9_.-]{1,64}$",
        description="Begins the name of every key, so that a store can be shared.",
    )
    part_bytes: Size = Field(
        default=1 << 20, description="Largest value in the store: frames are kept in parts of at most that size."
    )
    ttl: Interval | None = Field(default=None, description="Time after which the server expires a frame.")
    sliding: bool = Field(default=False, description="Every load begins the `ttl` anew.")

    @field_validator("url", mode="after")
    @classmethod
    def _readable(cls, value: URL | None) -> URL | None:
        if value is not None:
            parse_url(value.get_secret_value())
        return value

    @field_validator("sentinels", "cluster")
    @classmethod
    def _addresses(cls, value: tuple[str, ...], info: object) -> tuple[str, ...]:
        port = SENTINEL_PORT if getattr(info, "field_name", "") == "sentinels" else PORT
        return tuple(show_address(*parse_address(each, port)) for each in value)

    @field_validator("host")
    @classmethod
    def _host(cls, value: str | None) -> str | None:
        if value is None:
            return None
        shown = f"[{value}]" if ":" in value and not value.startswith("[") else value
        host, port = parse_address(shown, 1)
        if port != 1:
            raise ValueError(f"{value!r}: the port is an option of its own")
        return host

    @field_validator("socket")
    @classmethod
    def _socket(cls, value: str | None) -> str | None:
        if value is not None and not value.startswith("/"):
            raise ValueError("is relative, or a URL: write /run/redis.sock, or give it as url")
        if value is not None and len(value.encode()) > SOCKET_PATH_MAX:
            raise ValueError(f"{len(value.encode())} bytes are too long for a unix socket's path")
        return value

    @field_validator("part_bytes")
    @classmethod
    def _part(cls, value: int) -> int:
        if not PART_MIN <= value <= PART_MAX:
            raise ValueError(f"{value} bytes: is from 1KiB to 512MiB")
        return value

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.url is not None:
            self._check_url(parse_url(self.url.get_secret_value()))
        target = self.target
        if target.kind == "cluster" and target.db:
            raise ValueError(f"db: {target.db}, but a cluster has database 0 only")
        if target.kind == "sentinel" and not target.service:
            raise ValueError("service: sentinels need the name of the service that they watch")
        if target.kind == "socket" and target.tls is not None:
            raise ValueError("tls: not spoken on a unix socket")
        if target.kind != "sentinel" and {"service", "sentinel_username", "sentinel_password"} & self.model_fields_set:
            raise ValueError("service, sentinel_username, sentinel_password: for sentinels only")
        if target.kind != "server" and "port" in self.model_fields_set:
            raise ValueError("port: goes with host only; sentinels and nodes have theirs in host:port")
        if target.username and target.password is None:
            raise ValueError("password: the user has none")
        if self.sliding and self.ttl is None:
            raise ValueError("sliding: there is no ttl that could slide")
        return self

    def _check_url(self, said: dict[str, object]) -> None:
        """Raise ValueError where a field says something else than the URL."""
        for name in _IN_URL:
            if name not in self.model_fields_set or (field := getattr(self, name)) in {None, ()}:
                continue
            if name == "tls":
                if "tls" not in said:
                    raise ValueError("tls: contradicts the url, whose scheme is not rediss://")
            elif name in _WAYS and name not in said:
                raise ValueError(f"{name}: contradicts the url, which says where the store is in another way")
            elif name in said:
                plain = field.get_secret_value() if isinstance(field, SecretStr) else field
                if plain != said[name]:
                    raise ValueError(f"{name}: contradicts the url; say it in one place")

    @cached_property
    def target(self) -> Target:
        """Where the store is. Raises ValueError when that was said in no way or in several."""
        said = {} if self.url is None else parse_url(self.url.get_secret_value())

        def value(name: str) -> object:
            return said.get(name) if name not in self.model_fields_set and name in said else getattr(self, name)

        ways = [name for name in _WAYS if value(name)]
        if len(ways) != 1:
            raise ValueError(f"where the store is: give one of url, {', '.join(_WAYS)}" + _got(ways))
        password = value("password")
        addresses = {"host": (f"{_bracketed(value('host'))}:{value('port')}",), "socket": ()}.get(
            ways[0], value(ways[0])
        )
        assert isinstance(addresses, tuple)
        db, service, socket, user = value("db"), value("service"), value("socket"), value("username")
        return Target(
            kind={"host": "server", "sentinels": "sentinel"}.get(ways[0], ways[0]),  # type: ignore[arg-type]
            addresses=tuple(parse_address(each, PORT) for each in addresses),
            socket=str(socket or ""),
            service=str(service or ""),
            username=str(user) if user else None,
            password=SecretStr(password) if isinstance(password, str) else self.password,
            db=db if isinstance(db, int) else 0,
            tls=TLSOptions() if said.get("tls") and self.tls is None else self.tls,
        )

    def check(self, context: BackendContext) -> list[str]:  # noqa: ARG002  the contract's shape
        """Files of `tls` that cannot be read."""
        return [] if self.target.tls is None else self.target.tls.faults()


def _got(ways: list[str]) -> str:
    return f"; there are {' and '.join(ways)}" if ways else ""


def _bracketed(host: object) -> str:
    return f"[{host}]" if ":" in str(host) else str(host)
