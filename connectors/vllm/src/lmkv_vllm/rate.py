"""Scheduler side: how fast this engine computes prompts, measured on the steps that it does anyway.

A step lasts from the moment it was scheduled, or from the end of the step before it if that was later (asynchronous
scheduling plans ahead), to the moment its output arrives. So neither idle time nor time in the queue counts, and all
that a prompt really waits for does: model, sampling, scheduler.

Only steps made of little but prompt tokens say something, and of those the largest: in small ones the fixed cost of a
step prevails, which is paid whether a few tokens more are computed or not. Of these the median is taken, so that a
first step that compiles, or one that another process slowed down, does not matter.
"""

from __future__ import annotations

import time
from collections import OrderedDict, deque
from statistics import median
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Callable

LEAST_TOKENS: Final = 64
"""Prompt tokens of a step below which it says nothing."""
LEAST_SHARE: Final = 0.8
"""Share of prompt tokens in a step below which it says nothing."""
LEAST_STEPS: Final = 3
"""Steps below which the rate is not known."""
LARGEST: Final = 4
"""One of so many steps counts, the largest ones; more if they are as large."""
STEPS: Final = 64
"""Steps that are remembered."""
FRESH_SECONDS: Final = 600.0
"""What is older is forgotten as soon as there is something younger: the machine may have other work now."""
UNDER_WAY: Final = 64
"""Steps whose end has not come, at most."""


class PrefillRate:
    """Measures one engine. On the scheduler's thread only; costs microseconds a step.

    Args:
        clock: monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._number = 0
        self._free_at = 0.0
        self._under_way: OrderedDict[int, tuple[float, int]] = OrderedDict()
        self._steps: deque[tuple[float, int, float]] = deque(maxlen=STEPS)
        self._rate = 0.0

    @property
    def tokens_per_second(self) -> float:
        """The rate; 0 while it is not known."""
        return self._rate

    def scheduled(self, scheduler_output: Any) -> int:
        """A step was scheduled: the number under which `ended` is to be told of its end; 0: it says nothing."""
        prompt = prompt_tokens(scheduler_output)
        if prompt < LEAST_TOKENS or prompt < LEAST_SHARE * scheduler_output.total_num_scheduled_tokens:
            return 0
        self._number += 1
        self._under_way[self._number] = (self._clock(), prompt)
        if len(self._under_way) > UNDER_WAY:
            self._under_way.popitem(last=False)
        return self._number

    def ended(self, number: int) -> None:
        """The output of that step is here. To be called before `processed` for the same output."""
        begun = self._under_way.pop(number, None)
        if begun is None:
            return
        scheduled, tokens = begun
        now = self._clock()
        seconds = now - max(scheduled, self._free_at)
        if seconds > 0:
            self._steps.append((now, tokens, seconds))
            self._rate = self._measure(now)

    def processed(self) -> None:
        """The output of some step is here: the engine is free for the next from now on."""
        self._free_at = self._clock()

    def _measure(self, now: float) -> float:
        while now - self._steps[0][0] > FRESH_SECONDS:
            self._steps.popleft()
        if len(self._steps) < LEAST_STEPS:
            return self._rate
        sizes = sorted(tokens for _, tokens, _ in self._steps)
        least = sizes[-max(LEAST_STEPS, len(sizes) // LARGEST)]
        return median(tokens / seconds for _, tokens, seconds in self._steps if tokens >= least)


def prompt_tokens(scheduler_output: Any) -> int:
    """Tokens of a step that belong to prompts (or to what a preempted request computes anew); 0 if there are few.

    A request that decodes gets one token, or with a draft model some more.
    """
    scheduled, total = scheduler_output.num_scheduled_tokens, scheduler_output.total_num_scheduled_tokens
    # Two prompt tokens make a request at least: with so many requests, too many of them decode.
    crowded = len(scheduled) > (1 - LEAST_SHARE / 2) * total
    if total < LEAST_TOKENS or crowded or scheduler_output.scheduled_encoder_inputs:
        return 0
    drafts = scheduler_output.scheduled_spec_decode_tokens
    return sum(count for request, count in scheduled.items() if count > 1 and request not in drafts)
