"""What is waited for to its end, also by those who are told to stop waiting."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from lmkv.peer.threads import to_the_end

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.mark.parametrize("good", [True, False])
async def test_a_result_that_nobody_waits_for_any_more(good: bool) -> None:
    """As of a connection that has been made: it has to be closed."""
    begun, go, left = threading.Event(), threading.Event(), list[str]()

    def work() -> str:
        begun.set()
        assert go.wait(10)
        if not good:
            raise ConnectionRefusedError
        return "open"

    with ThreadPoolExecutor(1) as crew:
        waiting = asyncio.ensure_future(to_the_end(crew, work, unwanted=left.append))
        await asyncio.to_thread(begun.wait)
        waiting.cancel()
        await asyncio.sleep(0)
        waiting.cancel()
        assert not (await asyncio.wait([waiting], timeout=0.05))[0]
        go.set()
        with pytest.raises(asyncio.CancelledError):
            await waiting
    assert left == ["open"] * good


async def test_a_result_that_is_waited_for_is_the_waiters() -> None:
    left: list[str] = []
    with ThreadPoolExecutor(1) as crew:
        assert await to_the_end(crew, lambda: "open", unwanted=left.append) == "open"
    assert left == []
