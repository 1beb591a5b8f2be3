"""What the entry-point group ``lmkv`` has in this environment, and how faults of a plugin are put down."""

from __future__ import annotations

import re
import traceback
from dataclasses import dataclass
from importlib import metadata
from typing import TYPE_CHECKING, Final, Literal, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable

GROUP: Final = "lmkv"
Kind = Literal["backend", "codec", "command", "policy", "transport"]


class Origin(NamedTuple):
    """Where a plugin comes from."""

    distribution: str
    version: str
    entry_point: str
    """Name of the entry point; by custom that of the backend."""
    module: str
    """What the entry point refers to."""

    def __str__(self) -> str:
        """Distribution and version, as messages name it."""
        return f"{self.distribution} {self.version}".strip()


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing that is wrong with a plugin."""

    kind: Literal["conflict", "import", "api", "hook", "spec"]
    message: str
    """One line for people; names every distribution and version that takes part."""
    origins: tuple[Origin, ...]
    offers: tuple[tuple[Kind, str], ...] = ()
    """What cannot be used because of it, where that is known."""
    traceback: str = ""
    """Text of the exception's traceback, where there was one."""

    def __str__(self) -> str:
        """The message, then the traceback if there is one."""
        return f"{self.message}\n{self.traceback.rstrip()}" if self.traceback else self.message


def version(distribution: str) -> str:
    """Of an installed distribution."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return "(not installed)"


def entry_points(problems: list[Problem]) -> list[tuple[Origin, Callable[[], object]]]:
    """All entry points of the group, by distribution name; a distribution that cannot be read is a problem."""
    found: list[tuple[Origin, Callable[[], object]]] = []
    seen: set[str] = set()
    for distribution in metadata.distributions():
        name, version = "?", "?"
        try:
            if "lmkv" not in (distribution.read_text("entry_points.txt") or ""):
                continue
            name, version = distribution.metadata["Name"], distribution.version
            normal = re.sub(r"[-_.]+", "-", name).lower()
            if normal in seen:  # shadowed by an earlier entry of sys.path, as for imports
                continue
            seen.add(normal)
            points = [point for point in distribution.entry_points if point.group == GROUP]
            found += [(Origin(name, version, point.name, point.value), point.load) for point in points]
        except Exception as error:  # noqa: BLE001  broken metadata of a stranger must not hide the others
            origin = Origin(str(name), str(version), "?", "?")
            text = f"metadata of {origin} cannot be read: {type(error).__name__}: {error}"
            problems.append(Problem("import", text, (origin,), (), "".join(traceback.format_exception(error))))
    return sorted(found, key=lambda entry: entry[0])
