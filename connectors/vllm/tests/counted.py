"""Series of a service, to be asked for by their labels."""

from __future__ import annotations

import re

from lmkv.observe.families import FAMILIES


class Counted:
    """Series of a service at one moment, or what has been added to them since another."""

    def __init__(self, values: dict[str, float]) -> None:
        self._values = values

    def __sub__(self, other: Counted) -> Counted:
        return Counted({name: value - other._values.get(name, 0.0) for name, value in self._values.items()})

    def names(self) -> list[str]:
        return list(self._values)

    def total(self, family: str, **labels: str) -> float:
        wanted = {f'{name}="{value}"' for name, value in labels.items()}
        return sum(value for name, value in self._values.items()
                   if name.split("{")[0] == family and wanted <= set(_labels(name)))  # fmt: skip

    def values(self, label: str, *, of: str) -> set[str]:
        """What `label` says in the series of a family."""
        found = (pair.split("=", 1) for name in self._values if name.split("{")[0] == of for pair in _labels(name))
        return {value.strip('"') for name, value in found if name == label}

    def wrong_labels(self) -> list[str]:
        """Series whose labels are not those that the documentation says."""
        known = {}
        for family in FAMILIES:
            ends = ("_count", "_sum") if family.kind == "histogram" else ("",)
            known.update({family.name + end: {"instance", *family.every_label} for end in ends})
        return [name for name in self._values
                if {label.split("=")[0] for label in _labels(name)} != known.get(name.split("{")[0])]  # fmt: skip


def _labels(name: str) -> list[str]:
    return re.findall(r'\w+="[^"]*"', name)
