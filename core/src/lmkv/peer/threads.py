"""Waiting for what must not be left behind: others get its memory as soon as nobody waits any more."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable
    from concurrent.futures import Executor

Result = TypeVar("Result")


async def to_the_end(
    crew: Executor, work: Callable[[], Result], unwanted: Callable[[Result], object] = lambda _: None
) -> Result:
    """Run `work` in a thread of `crew` and wait for it, also when the waiting is cancelled: see `outlast`."""
    return await outlast(asyncio.get_running_loop().run_in_executor(crew, work), unwanted=unwanted)


async def outlast(
    future: asyncio.Future[Result],
    hurry: Callable[[], object] = lambda: None,
    unwanted: Callable[[Result], object] = lambda _: None,
) -> Result:
    """The result of `future`; when this is cancelled: `hurry` is called, and it is waited for all the same.

    `unwanted` gets a result that comes then: whatever has to be closed in it nobody else knows of.
    """
    try:
        return await asyncio.shield(future)
    except asyncio.CancelledError:
        hurry()
        while not future.done():
            try:
                await asyncio.wait([future])
            except asyncio.CancelledError:  # once more: it still has to end first
                continue
        if not future.cancelled() and future.exception() is None:
            unwanted(future.result())
        raise
