"""The section `peer`: other nodes that read from this one's pool and write into it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Final

from pydantic import BeforeValidator, Field, SecretStr

from lmkv.config.base import Count, Model, no_bool
from lmkv.observe.address import loopback
from lmkv.secrets import Secret, resolve_secret
from lmkv.units import Amount, Interval, Percentage, Share, Size

if TYPE_CHECKING:
    from collections.abc import Iterator

    from lmkv.config.faults import Path

KEY_MIN: Final = 16
"""Characters of a key at least: whoever connects may try keys against the proof that he is given, at home."""
_PORT_MAX: Final = 65535


def parse_address(text: str, *, least: int = 1) -> tuple[str, int]:
    """Host and port of ``host:port`` or ``[v6]:port``; ValueError for anything else."""
    host, colon, port = text.rpartition(":")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host:
        raise ValueError(f"{text!r}: an IPv6 address is written in brackets, such as [::1]:7000")
    if not colon or not host or not port.isdecimal() or not least <= int(port) <= _PORT_MAX:
        raise ValueError(f"{text!r} is not host:port, such as 10.0.0.5:7000")
    return host, int(port)


def show_address(host: str, port: int) -> str:
    """The reverse of `parse_address`."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _listen(value: object) -> object:
    if isinstance(value, str):
        parse_address(value, least=0)
    return value


def _advertise(value: object) -> object:
    if isinstance(value, str):
        parse_address(value)
    return value


def _key(value: object) -> object:
    """As a secret; no message shows it."""
    value = resolve_secret(value)
    if isinstance(value, SecretStr):
        value = value.get_secret_value()
    if not isinstance(value, str):
        raise ValueError("is a text, {env: NAME} or {file: PATH}")  # noqa: TRY004  pydantic collects ValueError
    if value and len(value) < KEY_MIN:
        raise ValueError(f"has {len(value)} characters; a key has at least {KEY_MIN}, better 32 random ones")
    return value


class PeerTls(Model):
    """TLS between nodes: each shows a certificate that the others' `ca` has signed."""

    certificate: str | None = Field(default=None, description="File of this node's certificate chain, PEM.")
    private_key: str | None = Field(default=None, description="File of its key, PEM.")
    ca: str | None = Field(default=None, description="File of the CA certificates that peers' are checked with, PEM.")

    @property
    def on(self) -> bool:
        """TLS is spoken on every connection between nodes."""
        return self.certificate is not None


class PeerConfig(Model):
    """Other nodes: see `docs/reference/peer-protocol.md`."""

    listen: Annotated[str | None, BeforeValidator(_listen)] = Field(
        default=None,
        description="`host:port` that other nodes connect to; port 0: any free one. Default: no port.",
    )
    advertise: Annotated[str | None, BeforeValidator(_advertise)] = Field(
        default=None, description="`host:port` that others are told. Default: that of `listen`."
    )
    node: str | None = Field(
        default=None,
        pattern=r"^[A-Za-z0-9]([A-Za-z0-9._:-]*[A-Za-z0-9])?$",
        max_length=128,
        description="Name of this node among the others. Default: host name and port.",
    )
    key: Annotated[Secret, BeforeValidator(_key)] = Field(
        default=SecretStr(""),
        description="Secret that all nodes share, at least 16 characters; required off loopback.",
    )
    tls: PeerTls = Field(default_factory=PeerTls, description="TLS between nodes.")
    transports: tuple[str, ...] = Field(
        default=(),
        description="Transports to use, see `lmkv plugins`; the best that both sides have is taken."
        " Default: all that are installed.",
    )
    sockets: Annotated[Count, Field(le=64)] = Field(
        default=4, description="Connections that the `tcp` transport opens to each peer."
    )
    share: Percentage = Field(
        default=Share(50), description="Part of its time that this node serves reads of others at most."
    )
    bandwidth: Size | None = Field(
        default=None, description="Bytes per second that this node serves to others at most. Default: no limit."
    )
    seconds: Interval = Field(
        default=30.0, description="Time after which what a peer holds here (leases, reservations) ends by itself."
    )
    transfer_seconds: Interval = Field(
        default=60.0, description="The same of whole requests that are being transferred, to this node or from it."
    )
    admission: Amount = Field(
        default=Share(80),
        description="Bytes that transfers to this node may set aside together, or a percentage of the RAM tier.",
    )
    waiting: Annotated[int, Field(ge=0), BeforeValidator(no_bool)] = Field(
        default=256, description="Transfers that found no room and keep their place in the queue, at most."
    )


def peer_faults(peer: PeerConfig) -> Iterator[tuple[Path, str]]:
    """What no single setting of the section can tell."""
    tls = {"certificate": peer.tls.certificate, "private_key": peer.tls.private_key, "ca": peer.tls.ca}
    missing = [name for name, value in tls.items() if value is None]
    if len(missing) not in {0, len(tls)}:
        yield ("peer", "tls", missing[0]), "is required where TLS is on: certificate, private_key and ca go together"
    if peer.listen is None:
        return
    host, _ = parse_address(peer.listen, least=0)
    if loopback(host) is None and not peer.key.get_secret_value():
        text = f"is required: peer.listen {peer.listen!r} is not a loopback address. Give all nodes the same key"
        yield ("peer", "key"), text
    if host in {"0.0.0.0", "::"} and peer.advertise is None:  # noqa: S104  where others may not be sent to
        yield ("peer", "advertise"), f"is required: nobody can connect to {peer.listen!r}; write this node's address"
