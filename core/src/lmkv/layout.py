"""What one page of one shard is: byte runs in the engine's buffers, opaque and in a fixed order.

The payload of a frame of n pages is, for each run r in order, for each page j in order, the bytes of that run. So run
r starts at ``n * layout.run_starts[r]`` and holds ``n * runs[r].length`` bytes, page j of it at ``j * runs[r].length``;
the first j pages of a frame are, for each run, its first ``j * runs[r].length`` bytes. Layers are contiguous.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field
from itertools import accumulate
from typing import TypedDict

from lmkv.errors import ConfigError


class LayoutDescription(TypedDict):
    """Everything that the bytes of a page depend on; where the engine keeps them is left out."""

    name: str
    dtype: str
    page_tokens: int
    runs: list[int]
    """Length of each run in bytes, in order."""
    tags: list[tuple[str, str]]
    """Sorted by name."""


@dataclass(frozen=True, slots=True)
class PageRun:
    """One run of bytes: page p of it is ``buffer[offset + p * stride :][:length]``. All in bytes."""

    buffer: int
    """Index of the engine's buffer."""
    offset: int
    stride: int
    length: int


@dataclass(frozen=True, slots=True)
class PageLayout:
    """One page of one shard, declared by the connector and never guessed from a shape.

    Raises:
        ConfigError: no runs, a run that overlaps its next page, a negative number, a tag twice.
    """

    name: str
    """What kind of layout it is; two that order bytes differently differ in it or in `tags`."""
    dtype: str
    """Element type of the stored values, such as `bfloat16`."""
    page_tokens: int
    runs: tuple[PageRun, ...]
    """Layer-major: all runs of layer 0, then those of layer 1, …"""
    tags: tuple[tuple[str, str], ...] = ()
    """Whatever else the bytes depend on, by name: axis order, packing of K and V, instruction set, world size …"""
    page_bytes: int = field(init=False, compare=False, repr=False)
    """Bytes of one page, all runs."""
    run_starts: tuple[int, ...] = field(init=False, compare=False, repr=False)
    """Start of each run in a frame of one page; times n in a frame of n pages."""

    def __post_init__(self) -> None:
        if self.page_tokens < 1:
            raise ConfigError(f"layout {self.name}: a page of {self.page_tokens} tokens")
        if not self.runs:
            raise ConfigError(f"layout {self.name}: a page without runs; the engine must declare its layout")
        for number, run in enumerate(self.runs):
            if run.buffer < 0 or run.offset < 0 or run.length < 1 or run.stride < run.length:
                raise ConfigError(
                    f"layout {self.name}: run {number} is impossible: buffer {run.buffer}, offset {run.offset}, "
                    f"length {run.length}, stride {run.stride} (needs length >= 1, stride >= length)"
                )
        if len(dict(self.tags)) != len(self.tags):
            raise ConfigError(f"layout {self.name}: a tag is given twice: {', '.join(name for name, _ in self.tags)}")
        ends = tuple(accumulate(run.length for run in self.runs))
        object.__setattr__(self, "page_bytes", ends[-1])
        object.__setattr__(self, "run_starts", (0, *ends[:-1]))

    def describe(self) -> LayoutDescription:
        """Everything that the bytes depend on, as JSON types; part of the namespace."""
        return {
            "name": self.name,
            "dtype": self.dtype,
            "page_tokens": self.page_tokens,
            "runs": [run.length for run in self.runs],
            "tags": sorted(self.tags),
        }

    def fingerprint(self) -> str:
        """SHA-256 of the canonical JSON of `describe`, 64 hexadecimal digits."""
        return hashlib.sha256(canonical_json(self.describe()).encode()).hexdigest()


def canonical_json(value: object) -> str:
    """JSON without spaces, keys sorted by code point, everything beyond ASCII escaped: equal values, equal text."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)
