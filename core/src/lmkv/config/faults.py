"""Faults in a configuration: where, which setting, what, and what was probably meant."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, Final, NamedTuple, get_args

from pydantic import BaseModel

from lmkv.plugins import did_you_mean, nearest

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from pydantic_core import ErrorDetails

Path = tuple[str | int, ...]
"""Place of a setting: ``("tiers", 1, "options", "path")``."""


_MAPPING: Final = "needs a mapping of keys and values, got {}"
_LIST: Final = "needs a list, got {}"
_PLAIN: Final = {
    "missing": "is required",
    "model_type": _MAPPING,
    "dict_type": _MAPPING,
    "model_attributes_type": _MAPPING,
    "list_type": _LIST,
    "tuple_type": _LIST,
}


class Fault(NamedTuple):
    """One thing that is wrong."""

    where: str
    """``stack.yaml:3`` or ``environment LMKV_POOL__SIZE``."""
    path: str
    """``tiers[1].options.path``, or empty when the fault is in no setting."""
    message: str

    def __str__(self) -> str:
        """``where: path: message``, without the parts that are empty."""
        return ": ".join(part for part in self if part)


def in_order(faults: Iterable[Fault]) -> list[Fault]:
    """Without repeats: by line of the file, then what comes from elsewhere."""

    def key(fault: Fault) -> tuple[bool, str, int]:
        name, _, line = fault.where.rpartition(":")
        return (False, name, int(line)) if line.isdecimal() else (True, fault.where, 0)

    return sorted(dict.fromkeys(faults), key=key)


def printed(path: Path) -> str:
    """``tiers[1].options.path``."""
    text = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path)
    return text.removeprefix(".")


def model_at(model: type[BaseModel], path: Path) -> type[BaseModel] | None:
    """The model whose fields lie at `path`, through lists and optional models; None when there is none."""
    here: Any = model
    for part in path:
        if isinstance(part, int):
            continue
        if not (isinstance(here, type) and issubclass(here, BaseModel)):
            return None
        field = fields(here).get(part)
        here = submodel(field.annotation) if field else None
    return here if isinstance(here, type) and issubclass(here, BaseModel) else None


def fields(model: type[BaseModel]) -> dict[str, Any]:
    """The model's fields by the names that a file uses: the alias where there is one."""
    return {info.alias or name: info for name, info in model.model_fields.items()}


def submodel(annotation: Any) -> type[BaseModel] | None:
    """The pydantic model in ``Model``, ``Model | None``, ``tuple[Model, ...]``; None when there is none."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    for argument in get_args(annotation):
        found = submodel(argument)
        if found is not None:
            return found
    return None


def explain(error: ErrorDetails, model: type[BaseModel], *, show_input: bool) -> str:
    """A pydantic error in plain words, with the nearest valid name. `show_input` False: values may be secret."""
    kind, got = error["type"], error.get("input")
    if kind == "extra_forbidden":
        return _unknown_key(error, model)
    if kind == "literal_error":
        return _not_a_choice(str(got), str(error.get("ctx", {}).get("expected", "")), show=show_input)
    if kind in _PLAIN:
        return _PLAIN[kind].format(_kind(got))
    if kind == "string_pattern_mismatch" and show_input:
        return f"{got!r} is not made of lower-case letters, digits and single dashes"
    cause = error.get("ctx", {}).get("error")
    text = str(cause) if cause is not None else error["msg"].replace("Input should", "should")
    shown = show_input and cause is None and isinstance(got, (str, int, float))
    return f"{text}, got {got!r}" if shown else text


def _unknown_key(error: ErrorDetails, model: type[BaseModel]) -> str:
    *parents, key = error["loc"]
    owner = model_at(model, tuple(parents))
    names = sorted(fields(owner)) if owner is not None else []
    near = nearest(str(key), names)
    if near:
        return f"unknown key (did you mean {near!r}?)"
    elsewhere = [path for path in _paths(model) if path[-1] == key]
    if elsewhere:
        return f"unknown key here: it belongs at '{printed(elsewhere[0])}'"
    return f"unknown key; valid here: {', '.join(names) or 'none'}"


def _paths(model: type[BaseModel], above: Path = ()) -> Iterable[Path]:
    for name, info in fields(model).items():
        inner = submodel(info.annotation)
        yield (*above, name)
        if inner is not None and len(above) < 4 and inner is not BaseModel:  # noqa: PLR2004  deeper is no help
            yield from _paths(inner, (*above, name))


def _not_a_choice(got: str, expected: str, *, show: bool) -> str:
    choices = re.findall(r"'([^']*)'", expected)
    what = f"{got!r} is" if show else "is"
    return f"{what} not one of: {', '.join(choices)}{did_you_mean(got.lower(), choices)}"


def _kind(value: object) -> str:
    if isinstance(value, dict):
        return "a mapping"
    if isinstance(value, (list, tuple)):
        return "a list"
    return {str: "text", type(None): "nothing", bool: "true or false", int: "a number", float: "a number"}.get(
        type(value), type(value).__name__
    )


def at(places: Mapping[Path, str], path: Path, default: str) -> str:
    """The recorded place of `path` or of the nearest setting above it."""
    for length in range(len(path), -1, -1):
        if path[:length] in places:
            return places[path[:length]]
    return default
