"""What every measurement shares: rows, and how to time two things fairly on a machine that does other things too."""

from __future__ import annotations

import gc
import statistics
import time
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


@dataclass(frozen=True)
class Row:
    """One line of the table."""

    work: str
    unit: str
    ours: float
    reference: float | None
    """What it is measured against in the same run; None where the target is absolute."""
    ratio: float | None
    """Median of the ratios of each pair of runs, ours to the reference."""
    target: str
    """Such as ``>= 0.8 x`` (of the reference) or ``<= 3 ms``."""
    holds: bool

    def json(self) -> dict[str, Any]:
        """As it is written to `build/bench.json`."""
        return asdict(self)


def against(
    work: str,
    unit: str,
    pairs: Sequence[tuple[float, float]],
    *,
    at_least: float | None = None,
    at_most: float | None = None,
) -> Row:
    """A row from (ours, reference) of each round."""
    ratio = statistics.median(ours / reference for ours, reference in pairs)
    target = f">= {at_least:g} x" if at_least is not None else f"<= {at_most:g} x"
    holds = (at_least is None or ratio >= at_least) and (at_most is None or ratio <= at_most)
    ours, reference = (statistics.median(side) for side in zip(*pairs, strict=True))
    return Row(work, unit, ours, reference, ratio, target, holds)


def absolute(work: str, unit: str, values: Sequence[float], *, at_most: float) -> Row:
    """A row with an absolute target."""
    ours = statistics.median(values)
    return Row(work, unit, ours, None, None, f"<= {at_most:g} {unit}", ours <= at_most)


def seconds(work: Callable[[], object]) -> float:
    """Of one run, without the collector's."""
    gc.disable()
    try:
        begin = time.perf_counter()
        work()
        return time.perf_counter() - begin
    finally:
        gc.enable()


def interleaved(
    ours: Callable[[int], float], reference: Callable[[int], float], rounds: int
) -> list[tuple[float, float]]:
    """(ours, reference) of each round, each after the other in turn. Both get the number of the round; -1: warm up."""
    ours(-1)
    reference(-1)
    pairs = []
    for number in range(rounds):
        if number % 2:
            second = reference(number)
            first = ours(number)
        else:
            first = ours(number)
            second = reference(number)
        pairs.append((first, second))
    return pairs
