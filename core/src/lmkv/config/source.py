"""YAML text → plain data, with the line of every setting. Nothing but plain data: no tags, no objects."""

from __future__ import annotations

import io
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from ruamel.yaml import YAML
from ruamel.yaml.error import MarkedYAMLError, YAMLError
from ruamel.yaml.nodes import MappingNode, ScalarNode, SequenceNode

from lmkv.config.faults import Fault, printed

if TYPE_CHECKING:
    from ruamel.yaml.nodes import Node

    from lmkv.config.faults import Path

_DEPTH: Final = 20
_TAGS: Final = {f"tag:yaml.org,2002:{kind}" for kind in ("null", "bool", "int", "float", "str", "map", "seq")}
_TEXT_TAGS: Final = {"tag:yaml.org,2002:timestamp", "tag:yaml.org,2002:value"}
"""Plain scalars that YAML would turn into something that no setting is: kept as text."""


@dataclass
class Document:
    """What a source says, before anything is checked against the model."""

    name: str
    """For messages: the path as the user gave it."""
    data: dict[str, Any] = field(default_factory=dict)
    places: dict[Path, str] = field(default_factory=dict)
    """``stack.yaml:3`` or ``environment LMKV_POOL__SIZE`` of every setting that somebody wrote."""
    faults: list[Fault] = field(default_factory=list)

    def mark(self, path: Path, value: object, place: str) -> None:
        """Record `place` for `path` and everything in it."""
        self.places[path] = place
        items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
        for key, inner in items:
            self.mark((*path, key), inner, place)


def parse_yaml(text: str, name: str) -> Document:
    """Read one YAML document that must be a mapping; faults are in the result."""
    document = Document(name)
    yaml = YAML(typ="safe", pure=True)
    try:
        node = yaml.compose(io.StringIO(text))
    except MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f"{name}:{mark.line + 1}" if mark is not None else name
        document.faults.append(Fault(where, "", f"not valid YAML: {error.problem or error.context}"))
        return document
    except (YAMLError, ValueError) as error:
        document.faults.append(Fault(name, "", f"not valid YAML: {str(error).splitlines()[0]}"))
        return document
    if node is None:
        document.faults.append(Fault(name, "", "holds no settings; it needs at least 'tiers:'"))
    elif not isinstance(node, MappingNode):
        where = f"{name}:{node.start_mark.line + 1}"
        document.faults.append(Fault(where, "", "the whole file must be a mapping, such as 'tiers:' with a list below"))
    else:
        data = _Reader(document, yaml).value(node, ())
        document.data = data if isinstance(data, dict) else {}
    return document


class _Reader:
    """Walks composed nodes; duplicate keys, tags, merge keys and non-text keys become faults."""

    def __init__(self, document: Document, yaml: YAML) -> None:
        self._document = document
        self._yaml = yaml

    def value(self, node: Node, path: Path) -> Any:
        if len(path) > _DEPTH:  # also the end of an alias that contains itself
            self._fault(node, path[:1], "is nested too deeply")
            return None
        if isinstance(node, MappingNode):
            return self._mapping(node, path)
        if isinstance(node, SequenceNode):
            return self._sequence(node, path)
        return self._scalar(node, path)

    def _mapping(self, node: MappingNode, path: Path) -> dict[str, Any]:
        self._check_tag(node, path)
        found: dict[str, Any] = {}
        for key_node, value_node in node.value:
            if not isinstance(key_node, ScalarNode):
                self._fault(key_node, path, "a key must be a word")
                continue
            key = str(key_node.value)
            if key_node.tag == "tag:yaml.org,2002:merge":
                self._fault(key_node, path, "merge keys (<<) are not supported: write the settings out")
                continue
            here = (*path, key)
            if key in found:
                first = self._document.places[here]
                self._fault(key_node, here, f"is set twice (first at {first})")
                continue
            self._document.places[here] = self._place(key_node)
            found[key] = self.value(value_node, here)
        return found

    def _sequence(self, node: SequenceNode, path: Path) -> list[Any]:
        self._check_tag(node, path)
        found = []
        for number, item in enumerate(node.value):
            self._document.places[(*path, number)] = self._place(item)
            found.append(self.value(item, (*path, number)))
        return found

    def _scalar(self, node: Node, path: Path) -> Any:
        if node.tag in _TEXT_TAGS:
            return node.value
        if not self._check_tag(node, path):
            return None
        try:
            return self._yaml.constructor.construct_object(node)
        except (YAMLError, ValueError):
            return node.value

    def _check_tag(self, node: Node, path: Path) -> bool:
        if str(node.tag) in _TAGS:
            return True
        self._fault(node, path, f"YAML tag {str(node.tag)!r} is not allowed")
        return False

    def _place(self, node: Node) -> str:
        return f"{self._document.name}:{node.start_mark.line + 1}"

    def _fault(self, node: Node, path: Path, message: str) -> None:
        self._document.faults.append(Fault(self._place(node), printed(path), message))
