"""JSON Schema of the configuration file, built from the installed plugins, for editors."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any, Final

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema
from pydantic_core import PydanticUndefined

from lmkv.config.codecs import options_schema
from lmkv.config.faults import fields, submodel
from lmkv.config.model import Config, NoOptions, TierConfig
from lmkv.errors import LmkvError
from lmkv.units import kind_of, shown

if TYPE_CHECKING:
    from collections.abc import Iterator

    from lmkv.plugins import PluginHost

_DRAFT: Final = "http://json-schema.org/draft-07/schema#"
"""The newest that all editors' YAML servers know; nothing here needs more."""


def json_schema(host: PluginHost) -> dict[str, Any]:
    """Schema of a file as `load_config` takes it with the plugins of `host`.

    A tier's `options` are those of its backend: one ``if``/``then`` for each. A backend whose options cannot be had
    (see ``host.problems`` and `lmkv plugins`) has any.
    """
    models: dict[str, type[BaseModel]] = {}
    for name in sorted(host.backends):
        with contextlib.suppress(LmkvError):
            models[name] = host.options_model(name)
    codecs = {name: model for name in sorted(host.codecs) if (model := _codec_options(host, name)) is not None}
    own = list(_own(Config))
    wanted: list[type[BaseModel]] = list(dict.fromkeys([*own, *models.values(), *codecs.values(), NoOptions]))
    refs, schema = models_json_schema([(model, "validation") for model in wanted], ref_template="#/$defs/{model}")
    definitions = schema["$defs"]
    for model in own:
        _defaults(model, definitions[_name(refs[model, "validation"])])
    tier = definitions[_name(refs[TierConfig, "validation"])]
    _complete_tier(tier, host)
    tier["properties"]["codec"] |= _codec(
        host, {name: options_schema(m, refs[m, "validation"]) for name, m in codecs.items()}
    )
    tier["allOf"] = [
        {
            "if": {"properties": {"backend": {"const": name}}, "required": ["backend"]},
            "then": _options(refs[model, "validation"], definitions),
        }
        for name, model in models.items()
    ]
    root = definitions.pop(_name(refs[Config, "validation"]))
    root["properties"]["tiers"].pop("default", None)
    root["properties"]["tiers"]["minItems"] = 1
    return {"$schema": _DRAFT, **root, "title": "lmkv", "$defs": definitions}


def _own(model: type[BaseModel]) -> Iterator[type[BaseModel]]:
    """`model` and the models in it, except for the options of tiers."""
    yield model
    for info in fields(model).values():
        inner = submodel(info.annotation)
        if inner is not None and inner is not BaseModel:
            yield from _own(inner)


def _defaults(model: type[BaseModel], definition: dict[str, Any]) -> None:
    """Write defaults with units as a file would: pydantic knows only bytes and seconds."""
    for name, info in fields(model).items():
        marks = (*info.metadata, info.annotation)
        if kind_of(marks) and info.default not in {None, PydanticUndefined}:
            definition["properties"][name]["default"] = shown(info.default, marks)


def _complete_tier(tier: dict[str, Any], host: PluginHost) -> None:
    properties = tier["properties"]
    properties["name"].pop("default", None)
    properties["options"] = {"type": ["object", "null"], "description": properties["options"]["description"]}
    choices = {
        "backend": sorted(host.backends),
        "evict": [*sorted(host.policies), "none"],
    }
    for key, names in choices.items():
        if names:
            properties[key]["enum"] = names


def _codec_options(host: PluginHost, name: str) -> type[BaseModel] | None:
    try:
        return host.codec_options(name)
    except LmkvError:
        return None


def _codec(host: PluginHost, options: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """A name, a name with its options, or a list of both."""
    one = [
        {"enum": sorted(host.codecs)},
        *(
            {"type": "object", "properties": {name: schema}, "required": [name], "additionalProperties": False}
            for name, schema in options.items()
        ),
    ]
    return {"anyOf": [*one, {"type": "array", "items": {"anyOf": one}, "minItems": 1}], "default": "identity"}


def _options(ref: dict[str, Any], definitions: dict[str, Any]) -> dict[str, Any]:
    then: dict[str, Any] = {"properties": {"options": ref}}
    if definitions[_name(ref)].get("required"):
        then["required"] = ["options"]
    return then


def _name(ref: dict[str, Any]) -> str:
    return str(ref["$ref"]).rsplit("/", 1)[-1]
