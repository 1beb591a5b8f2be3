"""The sections `controller` and `events`: whom the node tells what lies in its tiers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Final
from urllib.parse import urlsplit

from pydantic import BeforeValidator, Field, SecretStr, WithJsonSchema

from lmkv.config.base import Count, Model
from lmkv.observe.address import loopback
from lmkv.secrets import Secret  # noqa: TC001  pydantic evaluates it
from lmkv.units import Interval  # noqa: TC001  pydantic evaluates it

if TYPE_CHECKING:
    from collections.abc import Iterator

    from lmkv.config.faults import Path

_TCP: Final = "tcp://"
_IPC: Final = "ipc://"
_ONE_OR_SEVERAL: Final = WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}]})


def _urls(value: object) -> object:
    """One or several; each is checked."""
    if isinstance(value, str):
        value = (value,)
    if isinstance(value, (list, tuple)):
        for url in value:
            _check_url(url)
        return tuple(value)
    return value


def _check_url(url: object) -> None:
    text = "is a URL such as ws://127.0.0.1:7700 (or wss:// for TLS), or a list of them"
    if not isinstance(url, str):
        raise ValueError(text)  # noqa: TRY004  pydantic collects ValueError
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        raise ValueError(f"{text}: {error}") from None
    if parts.username is not None or parts.password is not None:
        raise ValueError("has no user or password in it: the token is a setting of its own, controller.token")
    if parts.scheme not in {"ws", "wss"} or not parts.hostname or port == 0 or parts.query or parts.fragment:
        raise ValueError(f"{text}, not {url!r}")


def _bound(value: object) -> object:
    if isinstance(value, str):
        if value.startswith(_IPC) and len(value) > len(_IPC):
            return value
        _split(value, any_port=True)
    return value


def _targets(value: object) -> object:
    if isinstance(value, str):
        value = (value,)
    if isinstance(value, (list, tuple)):
        for each in value:
            if not (isinstance(each, str) and each.startswith(_IPC) and len(each) > len(_IPC)):
                _split(each, any_port=False)
        return tuple(value)
    return value


def _split(value: object, *, any_port: bool) -> tuple[str, str]:
    """Host and port of a ZMQ address."""
    text = value if isinstance(value, str) else ""
    host, _, port = text.removeprefix(_TCP).rpartition(":")
    numbered = port.isdecimal() and 0 < int(port) < 1 << 16
    if not text.startswith(_TCP) or not host or not (numbered or (any_port and port == "*")):
        star = " (port *: any free one)" if any_port else ""
        raise ValueError(f"is tcp://address:port, such as tcp://127.0.0.1:5557{star}, or ipc://path, not {value!r}")
    return host.strip("[]"), port


class ControllerConfig(Model):
    """The controller that this node belongs to: see `docs/how-to/controller.md`."""

    url: Annotated[tuple[str, ...], BeforeValidator(_urls), _ONE_OR_SEVERAL] = Field(
        default=(),
        description="`ws://host:port` or, for TLS, `wss://host:port`; of several the next is tried when one does not"
        " answer. Default: no controller.",
    )
    token: Secret = Field(default=SecretStr(""), description="Bearer token of the role `node`; required off loopback.")
    ca: str | None = Field(
        default=None, description="File of the CA certificates that `wss` is checked with, PEM. Default: the system's."
    )
    heartbeat: Interval = Field(
        default=5.0, description="Time between two signs of life; must be less than the controller's time-out."
    )


class EventsConfig(Model):
    """What comes into the tiers and goes, in vLLM's KV-event format over ZMQ: see `docs/reference/kv-events.md`."""

    publish: Annotated[str | None, BeforeValidator(_bound)] = Field(
        default=None,
        description="Address that subscribers connect to: `tcp://` with a loopback address, or `ipc://`."
        " Default: none.",
    )
    connect: Annotated[tuple[str, ...], BeforeValidator(_targets), _ONE_OR_SEVERAL] = Field(
        default=(), description="Addresses of subscribers that wait for publishers, one or several. Default: none."
    )
    replay: Annotated[str | None, BeforeValidator(_bound)] = Field(
        default=None, description="Address, as `publish`, where subscribers ask for batches that they have missed."
    )
    topic: str = Field(
        default="", max_length=256, description="Topic of the messages; `{model}` in it stands for the model's name."
    )
    steps: Count = Field(default=1000, description="Batches that are kept for those who missed them.")

    @property
    def on(self) -> bool:
        """Anything is published."""
        return self.publish is not None or bool(self.connect)


def controller_faults(controller: ControllerConfig) -> Iterator[tuple[Path, str]]:
    """What no single setting of the section can tell."""
    token = controller.token.get_secret_value()
    if not token.isascii() or not token.isprintable() or " " in token:
        yield ("controller", "token"), "is made of printable ASCII characters without spaces"
    for url in controller.url:
        parts = urlsplit(url)
        if loopback(parts.hostname or "") is None and not token:
            yield ("controller", "token"), f"is required: {url} is not on a loopback address"
            break
    if controller.ca is not None and not any(url.startswith("wss:") for url in controller.url):
        yield ("controller", "ca"), "has no use without a wss:// URL in controller.url"


def events_faults(events: EventsConfig) -> Iterator[tuple[Path, str]]:
    """What no single setting of the section can tell."""
    for name in ("publish", "replay"):
        address = getattr(events, name)
        if address is not None and address.startswith(_TCP):
            host, _ = _split(address, any_port=True)
            if loopback(host) is None:
                text = f"{address!r} is not a loopback address, and such events have no key: let subscribers listen"
                yield ("events", name), f"{text}, and name them in events.connect"
    if events.replay is not None and not events.on:
        yield ("events", "replay"), "has no use without events.publish or events.connect"
