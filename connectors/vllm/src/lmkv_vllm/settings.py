"""The connector's settings: `kv_connector_extra_config` of vLLM and `LMKV_CONFIG`.

    {"lmkv.config": "stack.yaml"}                 a file (or the same as a mapping, inline)
    {"lmkv.socket": "/run/lmkv.sock"}             a service that the operator runs; its file then has the stack

Without either, the file that `LMKV_CONFIG` names is used, and without that the built-in stack.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from lmkv.errors import ConfigError
from lmkv.units import parse_interval, parse_seconds

if TYPE_CHECKING:
    from collections.abc import Callable

PREFIX: Final = "lmkv."


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What the operator told the connector. Every field but `config` and `socket` has a default that suits most."""

    config: str | Mapping[str, Any] | None = None
    """Path of a stack file, or the stack itself; None: `LMKV_CONFIG`, else the built-in stack."""
    socket: str | None = None
    """Socket of a service that somebody else runs; None: the connector starts one of its own."""
    save_decode: bool = True
    """Store what the model generated too, not only prompts."""
    lookup_deadline: float | None = None
    """Seconds that a request waits for the answer of its look-up at most; then it is a miss. None: see `patience`."""
    load_deadline: float = 10.0
    """Seconds after which a load that has not arrived counts as failed and is computed instead."""
    transfer_deadline: float = 10.0
    """Seconds that a request waits for what another node sends of it; then it computes what has not come."""
    start_deadline: float = 60.0
    """Seconds that the start of the engine waits for the service at most; without it the engine starts all the same."""
    fence_deadline: float = 0.25
    """Seconds that a step waits at most for a save whose pages the engine wants back; then the save is dropped."""
    load_threads: int = 2
    """Threads of one worker that load."""
    save_backlog: int = 64
    """Saves of one worker that may wait; more are dropped and counted."""


def _flag(value: object) -> bool:
    if not isinstance(value, bool):
        raise ValueError(f"{value!r} is not true or false")  # noqa: TRY004  all faults are collected as ValueError
    return value


def _count(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{value!r} is not a whole number above 0")
    return value


def _path(value: object) -> str:
    if not isinstance(value, (str, os.PathLike)) or not str(value):
        raise ValueError(f"{value!r} is not a path")
    return os.fspath(value)


def _stack(value: object) -> str | Mapping[str, Any]:
    return value if isinstance(value, Mapping) else _path(value)


_READ: Final[dict[str, Callable[[object], Any]]] = {
    "config": _stack,
    "socket": _path,
    "save_decode": _flag,
    "lookup_deadline": parse_seconds,
    "load_deadline": parse_interval,
    "transfer_deadline": parse_seconds,
    "start_deadline": parse_seconds,
    "fence_deadline": parse_seconds,
    "load_threads": _count,
    "save_backlog": _count,
}


def _flatten(extra: Mapping[str, Any]) -> dict[str, Any]:
    """`{"lmkv": {"config": …}}`, which vLLM's dotted command line makes, is the same as `{"lmkv.config": …}`."""
    flat: dict[str, Any] = {}
    for key, value in extra.items():
        if key == PREFIX[:-1] and isinstance(value, Mapping):
            flat.update({PREFIX + inner: content for inner, content in value.items()})
        else:
            flat[key] = value
    return flat


def read_settings(extra: Mapping[str, Any] | None) -> Settings:
    """The settings in `kv_connector_extra_config`. Raises `ConfigError` with all faults at once."""
    faults: list[str] = []
    values: dict[str, Any] = {}
    known = [PREFIX + name for name in _READ]
    for key, value in _flatten(extra or {}).items():
        name = key.removeprefix(PREFIX)
        if not key.startswith(PREFIX) or name not in _READ:
            near = difflib.get_close_matches(key if key.startswith(PREFIX) else PREFIX + key, known, n=1, cutoff=0.5)
            faults.append(f"unknown setting '{key}'" + (f" (did you mean '{near[0]}'?)" if near else ""))
            continue
        try:
            values[name] = _READ[name](value)
        except ValueError as error:
            faults.append(f"{key}: {error}")
    if values.get("socket") and values.get("config"):
        faults.append(
            "lmkv.config and lmkv.socket exclude each other: the service behind the socket has a stack of its own"
        )
    if faults:
        listed = "\n  ".join(faults)
        raise ConfigError(f"kv_connector_extra_config of LMKVConnector:\n  {listed}", faults=tuple(faults))
    return Settings(**values)
