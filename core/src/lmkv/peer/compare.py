"""Whether two nodes mean the same by a namespace, and what differs if not."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Final

from lmkv.errors import ConfigError
from lmkv.keys import Namespace

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from lmkv.storage.index import NamespaceIndex
    from lmkv.storage.manager import StorageManager

_SHOWN: Final = 200
"""Characters of a value in a message at most."""


def compare(text: str, manager: StorageManager) -> NamespaceIndex:
    """The namespace of this node that `text` (canonical JSON, a peer's) is.

    Raises:
        ProtocolError: `text` is no namespace.
        ConfigError: of kind ``namespace`` naming each field that differs from the nearest one here, with both values;
            of kind ``no-namespace`` (retryable) when no engine has registered any of that model here.
    """
    theirs = Namespace.from_json(text)
    known = manager.index.namespaces.get(theirs.id)
    if known is not None and known.shards:
        return known
    ours = [json.loads(ours) for ours in manager.declared.values()]
    same = [fields for fields in ours if fields["model"] == theirs.model]
    if not same:
        raise no_model(theirs.model, manager)
    faults = min((tuple(differences(json.loads(text), fields)) for fields in same), key=len)
    raise ConfigError(f"the engines do not fit together: {'; '.join(faults)}", faults=faults, kind="namespace")


def no_model(model: str, manager: StorageManager) -> ConfigError:
    """What to raise when no engine of that model has registered here. It may still come."""
    models = ", ".join(sorted({repr(json.loads(text)["model"]) for text in manager.declared.values()})) or "none"
    error = ConfigError(f"no engine with model {model!r} has registered here (models: {models})", kind="no-namespace")
    error.retryable = True
    return error


def of_model(model: str, manager: StorageManager) -> list[NamespaceIndex]:
    """The namespaces that engines of that model have registered here."""
    named = [identity for identity, text in manager.declared.items() if json.loads(text)["model"] == model]
    return [found for identity in named if (found := manager.index.namespaces.get(identity)) is not None]


def differences(theirs: dict[str, Any], ours: dict[str, Any]) -> Iterator[str]:
    """One clause for each field in which two namespaces (as their JSON has them) differ, with both values."""
    ranks = len(theirs["layouts"]), len(ours["layouts"])
    if ranks[0] != ranks[1]:
        yield f"world size (shards): {ranks[0]} there, {ranks[1]} here"
    for name in sorted(theirs.keys() | ours.keys()):
        there, here = theirs.get(name), ours.get(name)
        if there == here:
            continue
        if name == "extra":
            yield from _each("extra", there or {}, here or {})
        elif name in {"layouts", "page_bytes"}:
            if ranks[0] == ranks[1]:
                yield from _shards(name, there or [], here or [])
        else:
            yield f"{name}: {_value(there)} there, {_value(here)} here"


def _shards(name: str, there: list[Any], here: list[Any]) -> Iterator[str]:
    """Shards mostly differ in the same way: the first that does is enough."""
    for number, (one, other) in enumerate(zip(there, here, strict=True)):
        if one != other:
            if isinstance(one, dict) and isinstance(other, dict):
                yield from _each(f"layout of shard {number}", one, other)
            else:
                yield f"{name} of shard {number}: {_value(one)} there, {_value(other)} here"
            return


def _each(where: str, there: dict[str, Any], here: dict[str, Any]) -> Iterable[str]:
    for name in sorted(there.keys() | here.keys()):
        if there.get(name) != here.get(name):
            yield f"{where}: {name}: {_value(there.get(name))} there, {_value(here.get(name))} here"


def _value(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"
