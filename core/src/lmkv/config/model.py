"""The model of the YAML file: every key, its default, its unit, its meaning. Unknown keys are faults everywhere."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple

from pydantic import (
    BaseModel,
    BeforeValidator,
    Field,
    PlainSerializer,
    PlainValidator,
    PrivateAttr,
    SerializeAsAny,
    model_validator,
)

from lmkv.config.base import Count, Model, no_bool
from lmkv.config.codecs import CodecChain, as_chain
from lmkv.config.fleet import ControllerConfig, EventsConfig
from lmkv.config.peer import PeerConfig
from lmkv.units import Amount, Interval, Seconds, Share, Size, shown

if TYPE_CHECKING:
    from collections.abc import Iterator

    from lmkv.config.limits import Limits, Machine
    from lmkv.plugins import PluginHost

NAME_PATTERN = r"^[a-z0-9]+(-[a-z0-9]+)*$"


def _on_off(value: object) -> object:
    """YAML 1.1 readers, which some engines hand our settings through, make booleans of ``on`` and ``off``."""
    return ("off", "on")[value] if isinstance(value, bool) else value


def _checked(value: object) -> object:
    """A plain mapping would pass as a model without fields, and every setting in it be ignored."""
    if not isinstance(value, BaseModel):
        raise ValueError("are checked with the backend's own model: use load_config")  # noqa: TRY004
    return value


class NoOptions(Model):
    """Stands for the options of a tier that has none."""


class PoolConfig(Model):
    """The one arena of host memory that all memory objects of the node live in."""

    size: Amount = Field(default=Share(25), description="Bytes, or a percentage of the memory available at start.")
    per: Literal["node", "rank"] = Field(default="node", description="`rank`: `size` is multiplied by `ranks`.")
    hugepages: Annotated[Literal["auto", "on", "off"], BeforeValidator(_on_off)] = Field(
        default="auto", description="Use huge pages: when there are some, always, never."
    )
    prefault: bool = Field(
        default=True, description="Touch the memory in the background, so that first use is not slow."
    )
    trace: bool = Field(
        default=False,
        description="For debugging: remember who holds each memory object; name at the end what is still held.",
    )
    staging: Amount = Field(
        default=Share(10), description="Part of the pool kept free for loads: bytes, or a percentage of the pool."
    )


class LeaseConfig(Model):
    """Promises that a look-up makes to an engine."""

    seconds: Interval = Field(default=60.0, description="Time after which a lease that nobody released ends by itself.")


class QueueConfig(Model):
    """Bounds of the stores that wait for a tier; what is above them is dropped, newest first, and counted."""

    calls: Count = Field(default=64, description="Stores that may wait for the tier; loads have as many of their own.")
    bytes: Size = Field(default=1 << 30, description="Bytes of the frames in them.")
    seconds: Interval = Field(
        default=10.0,
        description="Work in them and in those that run, by the tier's measured speed; and a store's wait.",
    )


class BreakerConfig(Model):
    """When a tier that fails is left alone."""

    failures: Count = Field(default=5, description="Consecutive failures that open the breaker.")
    probe: Interval = Field(default=5.0, description="Time between two questions to the backend while it is open.")


class OfferConfig(Model):
    """How much of what lies below RAM an engine is offered."""

    mode: Literal["measured", "always"] = Field(
        default="measured",
        description="`measured`: what is loaded sooner than the engine computes it, as far as both speeds are known;"
        " `always`: all that is there.",
    )
    min_tokens: Annotated[int, Field(ge=0), BeforeValidator(no_bool)] = Field(
        default=0, description="Offer fewer tokens than these not at all if they have to be loaded."
    )
    max_wait: Seconds = Field(
        default=0.0, description="Offer only what is loaded within this time, as measured; 0: however long it takes."
    )


class TierConfig(Model):
    """One tier of the stack: a backend, and what the core adds to it."""

    name: str = Field(
        default="", pattern=NAME_PATTERN, description="Name in messages and metrics. Default: that of the backend."
    )
    backend: str = Field(description="Name of an installed backend, see `lmkv plugins`.")
    capacity: Amount | None = Field(
        default=None,
        description="Bytes of frames kept at most; for a resident backend also a percentage of the pool less staging."
        " Required where this node owns the store alone, not allowed for shared stores, which limit themselves.",
    )
    evict: str = Field(default="leaf-first-lru", description="Eviction policy; `none` only where there is no capacity.")
    write: Literal["through", "demote", "never"] = Field(
        default="through",
        description=(
            "Frames come in when they are stored, when the tier above evicts them, or never (read-only: nothing is "
            "stored, moved, described or, at a start, evicted; what is cleared or damaged goes)."
        ),
    )
    read: Literal["promote", "direct"] = Field(
        default="promote", description="What is read stays in the fastest tier as well, or only passes through."
    )
    codec: Annotated[CodecChain, PlainValidator(as_chain), PlainSerializer(str, when_used="json")] = Field(
        default=CodecChain(),
        description="What is done to frames on their way down: a codec, or a list of them in order, each as its name or"
        " as `{name: options}`.",
    )
    deadline: Interval = Field(
        default=2.0,
        description="Time for a whole batch, that of a load with its time in the queue; then it counts as a miss.",
    )
    queue: QueueConfig = Field(default_factory=QueueConfig, description="Bounds of waiting calls.")
    threads: Count | None = Field(default=None, description="Calls at the same time. Default: what the backend says.")
    breaker: BreakerConfig = Field(default_factory=BreakerConfig, description="When the tier is left alone.")
    options: Annotated[SerializeAsAny[BaseModel], BeforeValidator(_checked)] = Field(
        default_factory=NoOptions, description="The backend's own settings, see its page."
    )

    @model_validator(mode="before")
    @classmethod
    def _name_of_backend(cls, data: Any) -> Any:
        if isinstance(data, dict) and "name" not in data and isinstance(data.get("backend"), str):
            return {**data, "name": data["backend"]}
        return data


class ServiceConfig(Model):
    """The node service."""

    socket: str | None = Field(
        default=None, description="Path of the unix socket. Default: chosen by whoever starts the service."
    )
    linger: Seconds = Field(
        default=0.0, description="Time that an embedded service stays after its last client has gone."
    )


class MetricsConfig(Model):
    """The Prometheus page."""

    port: Annotated[int, Field(ge=0, le=65535), BeforeValidator(no_bool)] | None = Field(
        default=None, description="TCP port; 0: any free one, logged at start. Default: no page."
    )
    host: str = Field(default="127.0.0.1", description="A loopback address; others are refused.")
    instance: str | None = Field(
        default=None,
        min_length=1,
        max_length=128,
        description="Label `instance` of what is counted of the service itself. Default: host name and process id.",
    )


class LoggingConfig(Model):
    """The service's log, on its standard error."""

    level: Literal["debug", "info", "warning", "error"] = Field(
        default="info", description="Least severe level that is written."
    )
    format: Literal["text", "json"] = Field(
        default="text", description="Lines for people, or one JSON object per line."
    )


def _default_tiers() -> tuple[TierConfig, ...]:
    return (TierConfig(name="ram", backend="cpu", capacity=Share(100)),)


class Setting(NamedTuple):
    """One effective value and where it came from."""

    path: str
    value: str
    """As a file would say it; secrets masked."""
    source: str
    """``default``, ``stack.yaml:3``, ``environment LMKV_POOL__SIZE`` or ``set by the caller``."""


class Config(Model):
    """The whole configuration. Built by `load_config`; immutable."""

    ranks: Count = Field(default=1, description="Engine ranks on this node. Connectors set it.")
    chunk_tokens: Count = Field(default=256, description="Tokens of a chunk: a multiple of the engine's page.")
    tail: Literal["pages", "none"] = Field(
        default="pages", description="Store the last, partial chunk of a prompt in whole pages, or not at all."
    )
    pool: PoolConfig = Field(default_factory=PoolConfig, description="Host memory.")
    leases: LeaseConfig = Field(default_factory=LeaseConfig, description="Promises to engines.")
    offer: OfferConfig = Field(default_factory=OfferConfig, description="What engines are offered of it.")
    tiers: tuple[TierConfig, ...] = Field(default_factory=_default_tiers, description="The stack, fastest tier first.")
    service: ServiceConfig = Field(default_factory=ServiceConfig, description="The node service.")
    peer: PeerConfig = Field(default_factory=PeerConfig, description="Other nodes.")
    controller: ControllerConfig = Field(
        default_factory=ControllerConfig, description="The controller that this node belongs to."
    )
    events: EventsConfig = Field(default_factory=EventsConfig, description="What is published of the tiers.")
    metrics: MetricsConfig = Field(default_factory=MetricsConfig, description="The Prometheus page.")
    logging: LoggingConfig = Field(default_factory=LoggingConfig, description="The service's log.")

    _host: PluginHost | None = PrivateAttr(default=None)
    _places: dict[tuple[str | int, ...], str] = PrivateAttr(default_factory=dict)
    _text: str = PrivateAttr(default="")
    _origin: str = PrivateAttr(default="")

    @property
    def origin(self) -> str:
        """Name of the file or of what else the settings came from; empty: there was none, all is default."""
        return self._origin

    @property
    def text(self) -> str:
        """Everything that was set (file, environment, caller) as one YAML text, to hand to a child process.

        Contains secrets: pass it through a pipe, not a command line or a log. Read it with ``environ={}``.
        """
        return self._text

    def limits(self, machine: Machine | None = None) -> Limits:
        """Shares and limits in bytes, for `machine` (default: this one). Raises `ConfigError` when they do not fit."""
        from lmkv.config.limits import limits_of  # noqa: PLC0415  limits needs this module

        return limits_of(self, machine)

    def settings(self) -> list[Setting]:
        """Every effective value and its source, in the order of the file."""
        return [Setting(_printed(path), text, self._places.get(path, "default")) for path, text in _leaves(self, ())]


def _printed(path: tuple[str | int, ...]) -> str:
    from lmkv.config.faults import printed  # noqa: PLC0415  faults need no model, but stay importable alone

    return printed(path)


def _leaves(value: Any, path: tuple[str | int, ...], marks: Any = None) -> Iterator[tuple[tuple[str | int, ...], str]]:
    """Every setting below `value` that is no group itself, with its text; `marks` is its annotation."""
    if isinstance(value, BaseModel):
        for name, field in type(value).model_fields.items():
            marks = (*field.metadata, field.annotation)
            yield from _leaves(getattr(value, name), (*path, field.alias or name), marks)
    elif isinstance(value, CodecChain):
        yield path, str(value)
        for step in value.steps:
            if step.options is not None:
                yield from _leaves(step.options, (*path, *step.path))
    elif isinstance(value, dict) and value:
        for name, item in value.items():
            yield from _leaves(item, (*path, str(name)))
    elif isinstance(value, (tuple, list)) and any(isinstance(item, BaseModel) for item in value):
        for number, item in enumerate(value):
            yield from _leaves(item, (*path, number))
    else:
        yield path, shown(value, marks)
