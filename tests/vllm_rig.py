"""A real vLLM with the tiny model, in a process of its own, driven step by step.

with Vllm(place, stack) as engine:
    engine.ask(questions())
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import threading
import time
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from typing import Self

HERE = Path(__file__).resolve().parent
BLOCK, CHUNK = 32, 64
SECONDS = 240.0
"""For any one command; the start of vLLM takes longest."""


def document(number: int, length: int = 300) -> list[int]:
    """Some text, as tokens."""
    dice = random.Random(number)
    return [dice.randrange(10, 250) for _ in range(length)]


def questions(documents: int = 4, first: int = 0) -> dict[str, list[int]]:
    """Two questions on each document; 317 tokens each."""
    numbers = range(first, first + documents)
    return {f"doc{d} q{q}": document(d) + document(100 + q, 17) for d in numbers for q in range(2)}


def stack(*tiers: dict[str, Any], **more: Any) -> dict[str, Any]:
    """A RAM tier above `tiers`. All that is there is offered: the tiny model computes faster than any store answers."""
    ram = {"name": "ram", "backend": "cpu", "capacity": "64MiB"}
    return {
        "chunk_tokens": CHUNK,
        "pool": {"size": "96MiB", "prefault": False, "hugepages": "off"},
        "offer": {"mode": "always"},
        "tiers": [ram, *tiers],
        **more,
    }


class Vllm:
    """One engine. A context manager; its processes end with it, whatever happens.

    Args:
        place: a folder with a short path, where the sockets of its services are: engines with the same place and stack
            share a service.
        stack: lmkv's configuration; None: without lmkv.
        engine: arguments of vLLM, and `patience`: how long a look-up may take (a test is in no hurry).
    """

    def __init__(self, place: Path, stack: dict[str, Any] | None, **engine: Any) -> None:
        pytest.importorskip("vllm")
        self.place = place
        place.mkdir(parents=True, exist_ok=True)
        self._log = place / f"vllm-{os.urandom(4).hex()}.log"
        self._start = {"do": "start", "stack": stack, "patience": "30s", **engine}

    def __enter__(self) -> Self:
        theirs, mine = os.pipe(), os.pipe()
        environ = {
            **{key: value for key, value in os.environ.items() if not key.startswith("LMKV_")},
            "PYTHONPATH": os.pathsep.join([str(HERE), str(HERE.parent / "connectors" / "vllm" / "tests")]),
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "0",
            "VLLM_LOGGING_LEVEL": "WARNING",
            "VLLM_NO_USAGE_STATS": "1",
            "HF_HUB_OFFLINE": "1",
            "XDG_RUNTIME_DIR": str(self.place),
        }
        if inherited := os.environ.get("PYTHONPATH"):
            environ["PYTHONPATH"] += os.pathsep + inherited
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, str(HERE / "vllm_child.py"), str(theirs[0]), str(mine[1])],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=environ,
                pass_fds=[theirs[0], mine[1]],
            )
        os.close(theirs[0])
        os.close(mine[1])
        self._commands = os.fdopen(theirs[1], "w")
        self._replies = os.fdopen(mine[0], "r")
        try:
            self._tell(**self._start)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        """Let the engine end by itself, with its service; kill it where it does not."""
        self._commands.close()
        try:
            self._process.wait(60)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._replies.close()

    @property
    def log(self) -> str:
        """What the engine's processes have written."""
        return self._log.read_text(errors="replace")

    def ask(self, prompts: dict[str, list[int]], max_tokens: int = 24, **more: Any) -> Asked:
        """All prompts at once, and wait. `transfers`: `kv_transfer_params` of those that have some."""
        return Asked(self._tell(do="ask", prompts=prompts, max_tokens=max_tokens, **more))

    def begin(self, prompts: dict[str, list[int]], max_tokens: int = 24) -> Future[Asked]:
        """All prompts at once; nothing else may be told before they are done."""
        future: Future[Asked] = Future()

        def work() -> None:
            try:
                future.set_result(self.ask(prompts, max_tokens))
            except BaseException as error:  # noqa: BLE001  told to whoever waits
                future.set_exception(error)

        threading.Thread(target=work, daemon=True).start()
        return future

    def quiet(self) -> dict[str, Any]:
        """Wait until what was saved is in the tiers; tiers, holds and counters of the service."""
        return self._tell(do="quiet")

    def health(self) -> dict[str, Any]:
        """Tiers, holds and counters of the service."""
        return self._tell(do="health")

    def _tell(self, **command: Any) -> dict[str, Any]:
        watch = threading.Timer(SECONDS, self._process.kill)
        watch.start()
        try:
            self._commands.write(json.dumps(command) + "\n")
            self._commands.flush()
            line = self._replies.readline()
        except OSError:
            line = ""
        finally:
            watch.cancel()
        assert line, f"vLLM ended while it was told to {command['do']}:\n{self.log[-6000:]}"
        reply: dict[str, Any] = json.loads(line)
        return reply


class Asked:
    """What came back."""

    def __init__(self, reply: dict[str, Any]) -> None:
        self.answers: dict[str, list[int]] = {name: one["answer"] for name, one in reply["answers"].items()}
        self.cached: dict[str, int] = {name: one["cached"] for name, one in reply["answers"].items()}
        self.transfers: dict[str, Any] = {name: one["transfer"] for name, one in reply["answers"].items()}
        self.longest_step: float = reply["longest_step"]
        self.seconds: float = reply["seconds"]


def counted(health: dict[str, Any], name: str, **labels: str) -> float:
    """A counter of the service, summed over the labels that are not given."""
    wanted = [f'{label}="{value}"' for label, value in labels.items()]
    return sum(
        value
        for series, value in health["counters"].items()
        if series.split("{")[0] == name and all(part in series for part in wanted)
    )


def services_gone(place: Path, seconds: float = 30.0) -> None:
    """Wait until the services of `place` have ended: all that is to be in a tier is there."""
    until = time.monotonic() + seconds
    while any(place.glob("lmkv/*.sock")):
        assert time.monotonic() < until, "a service does not end"
        time.sleep(0.05)
