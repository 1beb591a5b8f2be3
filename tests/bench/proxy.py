"""`lmkv proxy` over a direct request: what it adds to a short prompt, 16 at once, each in a process of its own.

The engine answers after a time that is fixed, so what is measured is what the proxy adds and not who has the processor.
Sixteen workers ask one request after the other, through the proxy and direct, in turn.
"""

from __future__ import annotations

import asyncio
import socket
import statistics
import subprocess
import sys
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING

from tests.bench.harness import Row, absolute

from lmkv_backend_nixl_pd.proxy.client import Client

if TYPE_CHECKING:
    from collections.abc import Iterator

WORKERS = 16
REQUESTS = 6
ROUNDS = 15
MOST = 3.0
"""Milliseconds."""
HEADERS = [(b"content-type", b"application/json"), (b"authorization", b"Bearer sk-bench"), (b"accept", b"*/*")]
WHOLE = b'{"model":"tiny","prompt":"What is the capital of France?","max_tokens":8}'
STREAM = b'{"model":"tiny","prompt":"What is the capital of France?","max_tokens":8,"stream":true}'


def proxy() -> list[Row]:
    """A row for answers in one piece, and two for streams."""
    with _engine() as engine, _proxy(engine) as front:
        return asyncio.run(_measure(engine, front))


async def _measure(engine: str, front: str) -> list[Row]:
    clients = [Client(url, context=None, connect_seconds=5) for url in (front, engine)]
    await _settled(clients[0])
    added: dict[str, list[float]] = {"whole answer": [], "first token of a stream": [], "whole stream": []}
    for number in range(-1, ROUNDS):
        for body in (WHOLE, STREAM):
            sides = [0, 1] if number % 2 else [1, 0]
            times = {side: await _burst(clients[side], body) for side in sides}
            if number < 0:
                continue
            first, last = (1e3 * (through - direct) for through, direct in zip(times[0], times[1], strict=True))
            if body is WHOLE:
                added["whole answer"].append(last)
            else:
                added["first token of a stream"].append(first)
                added["whole stream"].append(last)
    for client in clients:
        client.close()
    return [
        absolute(f"lmkv proxy adds, short prompt, 16 at once: {what}", "ms", values, at_most=MOST)
        for what, values in added.items()
    ]


async def _burst(client: Client, body: bytes) -> tuple[float, float]:
    """Seconds until the first and the last byte of an answer's body: medians over all workers' requests."""
    firsts, lasts = [], []

    async def work() -> None:
        for _ in range(REQUESTS):
            begin = time.perf_counter()
            with await client.send("POST", b"/v1/completions", HEADERS, body, silence=30) as answer:
                await answer.some()
                firsts.append(time.perf_counter() - begin)
                while not answer.ended:
                    await answer.some()
            lasts.append(time.perf_counter() - begin)

    await asyncio.gather(*(work() for _ in range(WORKERS)))
    return statistics.median(firsts), statistics.median(lasts)


async def _settled(client: Client) -> None:
    """Until the proxy finds its engine well."""
    while True:
        with await client.send("GET", b"/health", (), b"", silence=30) as answer:
            await answer.read(1 << 16)
            if answer.status == 200:
                return
        await asyncio.sleep(0.1)


@contextmanager
def _engine() -> Iterator[str]:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        number = sock.fileno()
        with _running([sys.executable, "-m", "tests.bench.proxy_child", str(number)], pass_fds=(number,)):
            yield f"http://127.0.0.1:{sock.getsockname()[1]}"


@contextmanager
def _proxy(engine: str) -> Iterator[str]:
    command = [sys.executable, "-m", "lmkv", "proxy", "--listen", "127.0.0.1:0", "--log-level", "error"]
    command += ["--prefill", engine, "--decode", f"{engine}=127.0.0.1:9"]
    with _running(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        yield process.stderr.readline().removeprefix("proxy: ").strip()


@contextmanager
def _running(command: list[str], **options: object) -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen(command, **options) as process:  # type: ignore[call-overload]  # keywords of one call
        try:
            yield process
        finally:
            process.terminate()
