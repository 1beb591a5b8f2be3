"""What the calls of one direction of a tier cost, as measured: a latency, a time per byte, another on a shared link.

    seconds of one call alone = latency + bytes x (own + shared)

Calls at the same time do their `own` part side by side and take turns for the `shared` one: a store behind one link has
`own` = 0, and two calls take twice as long as one; one whose calls do not hinder each other has `shared` = 0. What is
looked at are *windows*: calls that overlapped in time, taken together, for what one call of several gets of the link is
chance. A window of n calls with so many bytes and `company` of them at once on average takes

    n / company x latency + bytes / company x own + bytes x shared

The three numbers, none of them negative, are fitted to the last windows by least squares of the relative error. A
window counts the less the more came after it and the older it is, and one that lies far off what the recent ones say
does not count at all; but when the recent ones say so together, it is the tier that has changed.
"""

from __future__ import annotations

import itertools
from collections import deque
from typing import Final, NamedTuple

KEPT: Final = 32
"""Windows that are looked at."""
LEAST: Final = 3
"""Windows from which on a cost is known by default: the first one may have had a connection to make."""
CALLS: Final = 8
"""Calls of a window at most: where there is always something under way, the next one begins then."""
HALF_LIFE_WINDOWS: Final = 8
HALF_LIFE_SECONDS: Final = 15.0
FAR: Final = 3.0
"""A window that took so many times longer, or shorter, than the others did is an outlier."""
TERMS: Final = 3
_RIDGE: Final = (1e-3, 1e-6, 2e-3)
"""Where windows of one size or one company cannot tell the three apart, the time is taken for the calls' own bytes."""


class Window:
    """Calls that overlapped. What was done before `floor` belongs to the window before."""

    __slots__ = ("_floor", "begin", "busy", "calls", "end", "nbytes")

    def __init__(self, floor: float) -> None:
        self._floor = floor
        self.begin = float("inf")
        self.end = floor
        self.calls = 0
        self.nbytes = 0
        self.busy = 0.0
        """Seconds of all calls together."""

    def add(self, nbytes: int, began: float, ended: float) -> None:
        """One more call, which has just ended."""
        began = max(began, self._floor)
        self.begin = min(self.begin, began)
        self.end = max(self.end, ended)
        self.calls += 1
        self.nbytes += nbytes
        self.busy += ended - began

    @property
    def seconds(self) -> float:
        """From the first byte to the last."""
        return max(1e-9, self.end - self.begin)

    @property
    def company(self) -> float:
        """Calls at once, on average."""
        return min(float(self.calls), max(1.0, self.busy / self.seconds))


class Model(NamedTuple):
    """What was found; in seconds, and seconds per byte."""

    latency: float
    own: float
    shared: float

    def seconds(self, window: Window) -> float:
        """What a window should have taken."""
        company = window.company
        return window.calls / company * self.latency + window.nbytes * (self.own / company + self.shared)


class Cost:
    """The cost of one direction (loads or stores) of a tier. Lives on the storage loop.

    Args:
        least: windows from which on it is known.
    """

    __slots__ = ("_least", "_model", "_windows")

    def __init__(self, least: int = LEAST) -> None:
        self._least = least
        self._windows: deque[Window] = deque(maxlen=KEPT)
        self._model: Model | None = None

    def note(self, nbytes: int, began: float, ended: float) -> None:
        """A call that moved so many bytes has returned; times of any one clock, in seconds.

        Failures are not noted: they say nothing about the cost.
        """
        if nbytes <= 0 or ended <= began:
            return
        last = self._windows[-1] if self._windows else None
        if last is None or began >= last.end or last.calls >= CALLS:
            last = Window(began if last is None else last.end)
            self._windows.append(last)
        last.add(nbytes, began, ended)
        self._model = None

    @property
    def known(self) -> bool:
        """Enough has been measured."""
        return len(self._windows) >= self._least

    @property
    def measured_at(self) -> float:
        """Time of the last measurement; minus infinity: there is none."""
        return self._windows[-1].end if self._windows else float("-inf")

    @property
    def model(self) -> Model | None:
        """None while it is not known."""
        if not self.known:
            return None
        if self._model is None:
            self._model = fit(list(self._windows))
        return self._model

    def refit(self) -> None:
        """Find the model now, so that whoever asks for it next has it at once."""
        _ = self.model

    def seconds(self, nbytes: float) -> float | None:
        """What a call of so many bytes takes alone; None while it is not known."""
        model = self.model
        return None if model is None else model.latency + nbytes * (model.own + model.shared)

    def drain(self, calls: int, nbytes: int, threads: int) -> float | None:
        """How long `threads` threads take for so many calls with so many bytes in all; None while it is not known."""
        model = self.model
        if not calls or model is None:
            return None if calls else 0.0
        each = model.latency + nbytes / calls * model.own
        return max(
            each * calls / min(calls, threads) + nbytes / calls * model.shared,  # the threads set the pace
            each + nbytes * model.shared,  # the link does
        )

    def latency(self) -> float:
        """Seconds of a call without bytes; 0 while it is not known."""
        return 0.0 if self.model is None else self.model.latency

    def bandwidth(self, threads: int) -> float:
        """Bytes per second of `threads` calls at once, latency aside; 0 while it is not known."""
        each = 0.0 if self.model is None else self.model.own / threads + self.model.shared
        return 1 / each if each > 0 else 0.0


def fit(windows: list[Window]) -> Model:
    """The model of windows in the order of time."""
    newest = windows[-1].end
    weights = [
        0.5 ** ((len(windows) - 1 - i) / HALF_LIFE_WINDOWS + (newest - window.end) / HALF_LIFE_SECONDS)
        for i, window in enumerate(windows)
    ]
    model = _solve(windows, weights)
    ratios = [window.seconds / max(1e-12, model.seconds(window)) for window in windows]
    middle = _median(ratios, weights)
    kept = [i for i, ratio in enumerate(ratios) if middle / FAR <= ratio <= middle * FAR]
    if len(kept) < len(windows):
        model = _solve([windows[i] for i in kept], [weights[i] for i in kept])
    return model


def _median(values: list[float], weights: list[float]) -> float:
    half = sum(weights) / 2
    for value, weight in sorted(zip(values, weights, strict=True)):
        half -= weight
        if half <= 0:
            return value
    return max(values)


def _solve(windows: list[Window], weights: list[float]) -> Model:
    """Non-negative least squares of the relative errors."""
    scale = sum(w.nbytes for w in windows) / len(windows)
    total = sum(weights)
    square = [[0.0] * TERMS for _ in range(TERMS)]
    right = [0.0] * TERMS
    for window, weight in zip(windows, weights, strict=True):
        seconds, company = window.seconds, window.company
        nbytes = window.nbytes / scale / seconds
        row = (window.calls / company / seconds, nbytes / company, nbytes)
        for i in range(TERMS):
            part = weight / total * row[i]
            right[i] += part
            for j in range(TERMS):
                square[i][j] += part * row[j]
    for i in range(TERMS):
        square[i][i] += _RIDGE[i] * (square[i][i] + square[0][0] * 1e-6)
    latency, own, shared = _smallest(square, right)
    return Model(latency, own / scale, shared / scale)


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
