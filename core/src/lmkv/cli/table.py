"""Columns of text."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence


def table(rows: Sequence[Sequence[str]], indent: str = "") -> str:
    """Left-aligned columns, two blanks apart, nothing behind the last."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)
    return "\n".join((indent + line).rstrip() for line in lines)
