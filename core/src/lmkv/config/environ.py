"""Settings from the environment: ``LMKV_POOL__SIZE=8GiB`` is ``pool.size``. They win over the file.

Two underscores go one level down. A tier is named by its name or its number: ``LMKV_TIERS__DISK__CAPACITY``,
``LMKV_TIERS__1__CAPACITY``; dashes become underscores. A name under our prefix that is no setting is a fault.
"""

from __future__ import annotations

import io
import re
from typing import TYPE_CHECKING, Any, Final

from pydantic import BaseModel
from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError

from lmkv.config.faults import Fault, fields, submodel
from lmkv.errors import LmkvError
from lmkv.plugins import did_you_mean

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from lmkv.config.faults import Path
    from lmkv.config.source import Document
    from lmkv.plugins import PluginHost

PREFIX: Final = "LMKV_"
RESERVED: Final = {
    "LMKV_CONFIG": "path of the configuration file",
    "LMKV_DEMO_CACHE": "where `make demo` keeps its models",
}
"""Names under our prefix that are no settings; `docs/reference/configuration.md` lists them."""


def apply_environ(document: Document, model: type[BaseModel], host: PluginHost, environ: Mapping[str, str]) -> None:
    """Put the settings of `environ` over those of `document`, with their places; faults go to the document."""
    ours = {name: value for name, value in environ.items() if name.startswith(PREFIX) and name not in RESERVED}
    if not ours:
        return
    known, open_ended = _names(document, model, host)
    for name, text in sorted(ours.items()):
        path = known.get(name)
        if path is not None:
            put(document, path, _value(text), f"environment {name}")
        elif not name.startswith(tuple(open_ended)):
            hint = did_you_mean(name, [*known, *RESERVED])
            document.faults.append(Fault(f"environment {name}", "", f"there is no such setting{hint}"))


def _names(document: Document, model: type[BaseModel], host: PluginHost) -> tuple[dict[str, Path], list[str]]:
    """Every valid name with its path; and prefixes below which nothing is known, because a backend is not."""
    known = {_upper(path): path for path in _leaves(model, ()) if path[0] != "tiers"}
    unknown = []
    tiers = document.data.get("tiers")
    element = submodel(model.model_fields["tiers"].annotation)
    assert element is not None
    for number, tier in enumerate(tiers if isinstance(tiers, list) else ()):
        if not isinstance(tier, dict):
            continue
        labels = {str(number), str(tier.get("name") or tier.get("backend") or number)}
        paths = list(_leaves(element, ()))
        try:
            options = host.options_model(str(tier.get("backend")))
            paths += [("options", *path) for path in _leaves(options, ())]
        except LmkvError:  # reported where the tier is checked
            unknown += [_upper(("tiers", label, "options", "")) for label in labels]
        for label in labels:
            known |= {_upper(("tiers", label, *path)): ("tiers", number, *path) for path in paths}
    return known, unknown


def _leaves(model: type[BaseModel], above: Path) -> Iterator[Path]:
    for name, info in fields(model).items():
        inner = submodel(info.annotation)
        if inner is BaseModel:  # a tier's options: the backend's model says what is in there
            continue
        if inner is None:
            yield (*above, name)
        elif len(above) < 6:  # noqa: PLR2004  the end of models that contain themselves
            yield from _leaves(inner, (*above, name))


def _upper(path: Path) -> str:
    return PREFIX + "__".join(re.sub(r"[^A-Z0-9]", "_", str(part).upper()) for part in path)


def _value(text: str) -> Any:
    """Text as it is; ``null`` and what looks like a YAML list or mapping are read as YAML."""
    if text.strip() == "null":
        return None
    if text.lstrip()[:1] in {"[", "{"}:
        try:
            return YAML(typ="safe", pure=True).load(io.StringIO(text))
        except (YAMLError, ValueError):
            return text
    return text


def put(document: Document, path: Path, value: Any, place: str) -> None:
    """Set one value in the tree. Where the source has a value on the way, the model's check reports that."""
    here: Any = document.data
    for depth, part in enumerate(path[:-1]):
        if isinstance(here, dict) and here.get(str(part)) is None:
            here[str(part)] = {}
            document.places.setdefault(path[: depth + 1], place)
        here = here[part]
        if not isinstance(here, (dict, list)):
            return
    here[path[-1]] = value
    document.mark(path, value, place)
