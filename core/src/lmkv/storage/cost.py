"""What a call of one direction of a tier costs, as measured: a latency, and a time per byte that grows with company.

    seconds(bytes, company) = latency + bytes x (alone + (company - 1) x crowd)

`company` is how many calls move bytes at once. A store behind one link has `crowd` = `alone`: two calls take twice as
long each. One whose calls do not hinder each other has `crowd` = 0. The three numbers, none of them negative, are
fitted to the last calls by least squares of the relative error. A call counts the less the more calls came after it
and the older it is, and one that lies far off what the recent ones say does not count at all; but when the recent ones
say so together, it is the tier that has changed.
"""

from __future__ import annotations

import itertools
from collections import deque
from typing import Final, NamedTuple

KEPT: Final = 32
"""Calls that are looked at."""
LEAST: Final = 3
"""Calls from which on a cost is known by default: the first one may have had a connection to make."""
HALF_LIFE_CALLS: Final = 8
HALF_LIFE_SECONDS: Final = 15.0
FAR: Final = 3.0
"""A call that took so many times longer, or shorter, than the others did is an outlier."""
TERMS: Final = 3
_RIDGE: Final = (1e-3, 1e-6, 2e-3)
"""Where calls of one size or one company cannot tell the three apart, the time goes to the bytes."""


class Sample(NamedTuple):
    """One call that did all that it was asked to do."""

    nbytes: int
    seconds: float
    company: float
    at: float
    """Any clock, in seconds."""


class Cost:
    """The cost of one direction (loads or stores) of a tier. Lives on the storage loop.

    Args:
        least: calls from which on it is known.
    """

    __slots__ = ("_least", "_model", "_samples")

    def __init__(self, least: int = LEAST) -> None:
        self._least = least
        self._samples: deque[Sample] = deque(maxlen=KEPT)
        self._model: tuple[float, float, float] | None = None

    def note(self, nbytes: int, seconds: float, company: float, at: float) -> None:
        """A call moved so many bytes in so many seconds. Failures are not noted: they say nothing about the cost."""
        if nbytes > 0 and seconds > 0:
            self._samples.append(Sample(nbytes, seconds, max(1.0, company), at))
            self._model = None

    @property
    def known(self) -> bool:
        """Enough calls have been measured."""
        return len(self._samples) >= self._least

    @property
    def measured_at(self) -> float:
        """Time of the last measurement, in the clock of `note`; minus infinity: there is none."""
        return self._samples[-1].at if self._samples else float("-inf")

    def seconds(self, nbytes: float, company: float = 1.0) -> float | None:
        """What a call of so many bytes takes among `company` calls, itself included; None while it is not known."""
        if not self.known:
            return None
        latency, alone, crowd = self._fitted()
        return latency + nbytes * (alone + (max(1.0, company) - 1) * crowd)

    def drain(self, calls: int, nbytes: int, threads: int) -> float | None:
        """How long `threads` threads take for so many calls with so many bytes in all; None while it is not known."""
        if not calls:
            return 0.0
        together = min(calls, threads)
        each = self.seconds(nbytes / calls, together)
        return None if each is None else each * calls / together

    def latency(self) -> float:
        """Seconds of a call without bytes; 0 while it is not known."""
        return self._fitted()[0] if self.known else 0.0

    def bandwidth(self, threads: int) -> float:
        """Bytes per second of `threads` calls at once, latency aside; 0 while it is not known."""
        if not self.known:
            return 0.0
        _, alone, crowd = self._fitted()
        each = alone + (threads - 1) * crowd
        return threads / each if each > 0 else 0.0

    def _fitted(self) -> tuple[float, float, float]:
        if self._model is None:
            self._model = fit(list(self._samples))
        return self._model


def fit(samples: list[Sample]) -> tuple[float, float, float]:
    """Latency, `alone` and `crowd` of samples in the order of time."""
    newest = samples[-1].at
    weights = [
        0.5 ** ((len(samples) - 1 - i) / HALF_LIFE_CALLS + (newest - sample.at) / HALF_LIFE_SECONDS)
        for i, sample in enumerate(samples)
    ]
    model = _solve(samples, weights)
    ratios = [sample.seconds / max(1e-12, _seconds(model, sample)) for sample in samples]
    middle = _median(ratios, weights)
    kept = [i for i, ratio in enumerate(ratios) if middle / FAR <= ratio <= middle * FAR]
    if len(kept) < len(samples):
        model = _solve([samples[i] for i in kept], [weights[i] for i in kept])
    return model


def _seconds(model: tuple[float, float, float], sample: Sample) -> float:
    return model[0] + sample.nbytes * (model[1] + (sample.company - 1) * model[2])


def _median(values: list[float], weights: list[float]) -> float:
    half = sum(weights) / 2
    for value, weight in sorted(zip(values, weights, strict=True)):
        half -= weight
        if half <= 0:
            return value
    return max(values)


def _solve(samples: list[Sample], weights: list[float]) -> tuple[float, float, float]:
    """Non-negative least squares of the relative errors."""
    scale = sum(s.nbytes for s in samples) / len(samples)
    total = sum(weights)
    square = [[0.0] * TERMS for _ in range(TERMS)]
    right = [0.0] * TERMS
    for sample, weight in zip(samples, weights, strict=True):
        first = 1 / sample.seconds
        second = first * sample.nbytes / scale
        row = (first, second, second * (sample.company - 1))
        for i in range(TERMS):
            part = weight / total * row[i]
            right[i] += part
            for j in range(TERMS):
                square[i][j] += part * row[j]
    for i in range(TERMS):
        square[i][i] += _RIDGE[i] * (square[i][i] + square[0][0] * 1e-6)
    latency, alone, crowd = _smallest(square, right)
    return latency, alone / scale, crowd / scale


def _smallest(square: list[list[float]], right: list[float]) -> list[float]:
    """The x without negative terms for which x·square·x - 2·right·x is least."""
    best, least = [0.0] * TERMS, float("inf")
    for size in range(TERMS, 0, -1):
        for terms in itertools.combinations(range(TERMS), size):
            found = _eliminate([[square[i][j] for j in terms] for i in terms], [right[i] for i in terms])
            error = -sum(value * right[i] for value, i in zip(found, terms, strict=True))
            if min(found) >= 0 and error < least:
                least = error
                best = [found[terms.index(i)] if i in terms else 0.0 for i in range(TERMS)]
        if size == TERMS and least < float("inf"):  # no term had to be cut off: no other choice is better
            break
    return best


def _eliminate(square: list[list[float]], right: list[float]) -> list[float]:
    """Solve a small symmetric positive definite system."""
    n = len(right)
    rows = [[*row, value] for row, value in zip(square, right, strict=True)]
    for i in range(n):
        for k in range(i + 1, n):
            factor = rows[k][i] / rows[i][i]
            for j in range(i, n + 1):
                rows[k][j] -= factor * rows[i][j]
    found = [0.0] * n
    for i in reversed(range(n)):
        found[i] = (rows[i][n] - sum(rows[i][j] * found[j] for j in range(i + 1, n))) / rows[i][i]
    return found
