"""The rows of `docs/reference/configuration.md`, from the model: every key, its values, its default, its meaning."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, get_args, get_origin

from pydantic import BaseModel, SecretStr
from pydantic_core import PydanticUndefined

from lmkv.config.codecs import CodecChain
from lmkv.config.faults import fields, submodel
from lmkv.units import kind_of, shown

if TYPE_CHECKING:
    from collections.abc import Iterator


def rows(model: type[BaseModel], above: str = "") -> Iterator[str]:
    """Markdown table rows ``| key | values | default | meaning |``, in the order of the file."""
    for name, info in fields(model).items():
        path = f"{above}{name}"
        inner = submodel(info.annotation)
        if inner is not None and inner is not BaseModel:
            is_list = get_origin(info.annotation) is tuple
            yield from rows(inner, f"{path}[]." if is_list else f"{path}.")
            continue
        yield f"| `{path}` | {_values(info)} | {_default(info)} | {info.description} |"


def _default(info: Any) -> str:
    if info.default is PydanticUndefined:
        return "required" if info.default_factory is None else "none"
    if info.default in {None, "", ()} or info.default == SecretStr(""):
        return "none"
    return f"`{shown(info.default, (*info.metadata, info.annotation))}`"


def _values(info: Any) -> str:
    choices = _choices(info.annotation)
    if choices:
        return ", ".join(f"`{choice}`" for choice in choices)
    kind = kind_of((*info.metadata, info.annotation))
    if kind:
        return kind
    words = {
        int: "whole number",
        bool: "`true`, `false`",
        str: "text",
        BaseModel: "mapping",
        CodecChain: "name or list",
        SecretStr: "text, `{env: NAME}`, `{file: PATH}`",
    }
    if get_origin(info.annotation) is tuple:
        return "list"
    plain = [part for part in (info.annotation, *_parts(info.annotation)) if part in words]
    return words[plain[0]]


def _parts(annotation: Any) -> tuple[Any, ...]:
    return tuple(part for argument in get_args(annotation) for part in (argument, *_parts(argument)))


def _choices(annotation: Any) -> tuple[str, ...]:
    for part in (annotation, *_parts(annotation)):
        if get_origin(part) is Literal:
            return tuple(map(str, get_args(part)))
    return ()
