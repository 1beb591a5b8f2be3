"""A real vLLM with and without lmkv: what misses cost, what hits gain. All engines live at once and take turns."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.bench.harness import Row, against, interleaved

from lmkv_vllm.demo.models import model_folder

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import TracebackType

    from typing_extensions import Self

ROOT = Path(__file__).resolve().parents[2]
VOCABULARY = 40_000
"""Tokens from which prompts are drawn: below that of every model here."""


@dataclass(frozen=True)
class Answer:
    """What a batch of prompts took, and how many tokens of each were not computed."""

    seconds: float
    cached: list[int]
    answers: list[list[int]]


class Engine:
    """A vLLM in a process of its own, its compute threads on processor 0. A context manager."""

    def __init__(self, model: Path | str, log: Path, *, stack: dict[str, Any] | None = None, **arguments: Any) -> None:
        """`stack`: lmkv's configuration; None: no connector."""
        self._log = log
        given = {
            "model": str(model),
            "dtype": "float32",
            "enforce_eager": True,
            "max_model_len": 4096,
            "block_size": 32,
            "seed": 0,
            "disable_log_stats": True,
            **arguments,
        }
        if stack is not None:
            given["kv_transfer_config"] = {
                "kv_connector": "LMKVConnector",
                "kv_connector_module_path": "lmkv_vllm.connector",
                "kv_role": "kv_both",
                "kv_load_failure_policy": "recompute",
                "kv_connector_extra_config": {"lmkv.config": stack, "lmkv.lookup_deadline": "2s"},
            }
        environ = {
            **os.environ,
            "VLLM_CPU_OMP_THREADS_BIND": "0",
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_LOGGING_LEVEL": "WARNING",
        }
        read, write = os.pipe()
        command = [sys.executable, "-m", "tests.bench.vllm_child", str(write), json.dumps(given)]
        with log.open("wb") as sink:
            self._process = subprocess.Popen(
                command, cwd=ROOT, env=environ, stdin=subprocess.PIPE, stdout=sink, stderr=sink, pass_fds=(write,)
            )
        os.close(write)
        self._answers = os.fdopen(read)

    def wait_until_ready(self) -> None:
        """Raises with the end of its log if it does not come up."""
        self._line()

    def ask(self, prompts: Sequence[Sequence[int]], max_tokens: int) -> Answer:
        """All prompts at once."""
        assert self._process.stdin is not None
        request = {"prompts": [list(prompt) for prompt in prompts], "max_tokens": max_tokens}
        self._process.stdin.write(json.dumps(request).encode() + b"\n")
        self._process.stdin.flush()
        return Answer(**json.loads(self._line()))

    def _line(self) -> str:
        line = self._answers.readline()
        if not line:
            raise RuntimeError(
                "vLLM has ended:\n" + "\n".join(self._log.read_text(errors="replace").splitlines()[-40:])
            )
        return line

    def stop(self) -> None:
        """End it, gently first. Idempotent."""
        if self._process.stdin is not None:
            self._process.stdin.close()
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._answers.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()


def prompt(dice: random.Random, tokens: int) -> list[int]:
    """Of tokens that no other prompt begins with."""
    return [dice.randrange(100, VOCABULARY) for _ in range(tokens)]


def misses() -> list[Row]:
    """Prompts that never repeat: throughput with the connector against that without."""
    model = model_folder()
    dice = random.Random(1)
    count, tokens, generated = 6, 256, 8
    with ExitStack() as cleanup:
        folder = Path(cleanup.enter_context(tempfile.TemporaryDirectory()))
        ram = {"pool": {"size": "512MiB"}, "tiers": [{"name": "ram", "backend": "cpu", "capacity": "100%"}]}
        with_it = cleanup.enter_context(Engine(model, folder / "with.log", stack=ram, enable_prefix_caching=True))
        without = cleanup.enter_context(Engine(model, folder / "without.log", enable_prefix_caching=True))
        with_it.wait_until_ready()
        without.wait_until_ready()

        def throughput(engine: Engine) -> float:
            answer = engine.ask([prompt(dice, tokens) for _ in range(count)], generated)
            assert not any(answer.cached), answer.cached
            return count * (tokens + generated) / answer.seconds

        pairs = interleaved(lambda _: throughput(with_it), lambda _: throughput(without), 11)
    return [against("vLLM, prompts that never repeat", "tokens/s", pairs, at_least=0.97)]


DOCUMENTS = 2
DOCUMENT = 2000
QUESTION = 24
QUESTIONS = 6


def first_token() -> list[Row]:
    """A new question about a known document: from RAM, from disk after a restart, and from the engine's own cache."""
    model = model_folder()
    dice = random.Random(2)
    documents = [prompt(dice, DOCUMENT) for _ in range(DOCUMENTS)]

    def asked(document: list[int]) -> list[list[int]]:
        return [document + prompt(dice, QUESTION)]

    (ROOT / "build").mkdir(exist_ok=True)
    with ExitStack() as cleanup:
        folder = Path(cleanup.enter_context(tempfile.TemporaryDirectory(dir=ROOT / "build")))
        disk: dict[str, Any] = {
            "pool": {"size": "1GiB"},
            "tiers": [
                {"name": "ram", "backend": "cpu", "capacity": "100%"},
                # `direct`: what was read from disk does not stay in RAM, so that every question comes from disk.
                {
                    "name": "disk",
                    "backend": "disk",
                    "capacity": "4GiB",
                    "read": "direct",
                    "options": {"path": str(folder / "frames")},
                },
            ],
        }
        ram = {"pool": {"size": "1GiB"}, "tiers": disk["tiers"][:1]}
        with Engine(model, folder / "first.log", stack=disk, enable_prefix_caching=False) as first:
            first.wait_until_ready()
            for document in documents:
                first.ask(asked(document), 1)
            _until_still(folder / "frames")
        own = cleanup.enter_context(Engine(model, folder / "own.log", enable_prefix_caching=True))
        from_ram = cleanup.enter_context(Engine(model, folder / "ram.log", stack=ram, enable_prefix_caching=False))
        from_disk = cleanup.enter_context(Engine(model, folder / "disk.log", stack=disk, enable_prefix_caching=False))
        for engine in (own, from_ram, from_disk):
            engine.wait_until_ready()
            engine.ask([prompt(dice, 300)], 1)  # what it does once
        for document in documents:
            own.ask(asked(document), 1)
            from_ram.ask(asked(document), 1)
        time.sleep(1.0)
        taken: list[list[float]] = [[], [], []]
        for _ in range(QUESTIONS):
            for document in documents:
                turns = list(enumerate((own, from_ram, from_disk)))
                dice.shuffle(turns)
                for number, engine in turns:
                    answer = engine.ask(asked(document), 1)
                    assert answer.cached[0] > DOCUMENT - 64, (number, answer.cached)
                    taken[number].append(answer.seconds * 1e3)
    return [
        against("vLLM, time to first token, from RAM", "ms", list(zip(taken[1], taken[0], strict=True)), at_most=1.25),
        against("vLLM, time to first token, from disk", "ms", list(zip(taken[2], taken[0], strict=True)), at_most=2),
    ]


def _until_still(folder: Path) -> None:
    """Stores are written behind the engine's back: return when a second has gone by without a new byte."""
    seen = -1
    while (size := sum(path.stat().st_size for path in folder.rglob("*.0"))) != seen or not size:
        seen = size
        time.sleep(1.0)
