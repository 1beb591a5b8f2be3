"""Questions about long documents, by one plain vLLM and by two: one computes the prompts, one goes on with them.

Then the same again. `lmkv proxy` sends each prompt to the first server, whose node pushes the pages to the second one's
while the rest is still computed. vLLM's own prefix cache is off.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Final

from lmkv_vllm.demo import engine
from lmkv_vllm.demo.documents import SUBJECTS, document, prompt
from lmkv_vllm.demo.pair import Pair, Shape
from lmkv_vllm.demo.passes import WARMING, Row, launch, parser, table, unlike, verdict
from lmkv_vllm.demo.server import Server

if TYPE_CHECKING:
    import argparse

    from rich.console import Console
    from rich.table import Table

    from lmkv_vllm.demo.server import Child

PASSES: Final = ("plain", "pd", "again")
_HEADINGS: Final = {"plain": "one vLLM", "pd": "prefill/\ndecode", "again": "the same\nagain"}
_STACK: Final = {
    "pool": {"size": "1GiB"},
    "tiers": [{"name": "ram", "backend": "cpu", "capacity": "100%"}],
}


class Run:
    """One demo.

    Attributes:
        rows: what came of it.
        transports: bytes that went from node to node, by transport.
        outcomes: of requests, as the proxy counts them.
    """

    def __init__(self, options: argparse.Namespace, model: str, scratch: Path, console: Console) -> None:
        self._options = options
        self._model = model
        self._scratch = scratch
        self._console = console
        self._prompts: list[str] = []
        self.rows = [Row(subject.title, subject.questions[0], len(PASSES)) for subject in SUBJECTS]
        self.transports: dict[str, float] = {}
        self.outcomes: dict[str, float] = {}

    def go(self) -> None:
        """All passes. Raises `ServerError` when a server fails."""
        given = engine.arguments(self._options.tokens, self._options.dtype, gpu_share=0.4)
        halves = engine.halves()
        self._say(f"starting one plain vLLM with {Path(self._model).name}")
        with Server(self._model, given, log=self._scratch / "plain.log", environment=halves[0]) as server:
            server.wait_until_ready(engine.START_SECONDS)
            texts = [document(subject, self._options.tokens, server.count_tokens) for subject in SUBJECTS]
            self._prompts = [prompt(text, row.question) for text, row in zip(texts, self.rows, strict=True)]
            self._ask(server, "plain")
        self._say("starting two with lmkv, and the proxy")
        transports = (self._options.transport,) if self._options.transport else ()
        settings = {"lmkv.lookup_deadline": "2s"}  # the default rather computes than waits for a busy machine
        shape = Shape(self._model, given, halves, _STACK, transports, settings)
        with Pair(shape, self._scratch, start_seconds=engine.START_SECONDS) as nodes:
            self._ask(nodes.proxy, "pd")
            self._ask(nodes.proxy, "again")
            self.transports = nodes.prefill.metric("lmkv_peer_bytes_total", by="transport")
            self.outcomes = nodes.outcomes()
            self._say("stopping")

    def faults(self) -> list[str]:
        """Why the run does not show what it should; empty if it does."""
        faults = unlike(self.rows)
        faults += [
            f"{row.question} was computed where it was decoded"
            for row in self.rows
            if (answer := row.answers.get("pd")) is not None and not answer.cached_tokens
        ]
        return faults

    def table(self) -> Table:
        """What was measured."""
        return table(self.rows, _HEADINGS, "tokens from the\nprefill node", _given)

    def report(self, console: Console) -> int:
        """Show what came of it; the exit status."""
        console.print(self.table())
        for name, nbytes in self.transports.items():
            console.print(f"transport: {name}, {nbytes / 2**20:.0f} MiB", highlight=False)
        console.print("requests: " + ", ".join(f"{count:.0f} {name}" for name, count in self.outcomes.items()))
        good = "All answers identical; every prompt was computed by the one server, decoded by the other."
        return verdict(self.faults(), good, console)

    def _ask(self, server: Child, name: str) -> None:
        if name != "again":
            server.ask(WARMING, max_tokens=2)
        for number, (row, text) in enumerate(zip(self.rows, self._prompts, strict=True), start=1):
            self._say(f"{name}: question {number} of {len(self.rows)}: {row.question}")
            row.answers[name] = server.ask(text, max_tokens=self._options.max_tokens)

    def _say(self, text: str) -> None:
        self._console.print(f"· {text}", highlight=False)


def _given(row: Row) -> int | None:
    return row.answers["pd"].cached_tokens if "pd" in row.answers else None


def main() -> int:
    """Parse the command line, run, report. Returns the exit status: 0 only if all answers are identical."""
    options = parser("lmkv_vllm.demo.prefill_decode", __doc__).parse_args()
    return launch(options, lambda model, scratch, console: Run(options, model, scratch, console))


if __name__ == "__main__":
    sys.exit(main())
