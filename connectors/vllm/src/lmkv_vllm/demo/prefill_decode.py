"""Questions about long documents, by one plain vLLM and by two: one computes the prompts, one goes on with them.

Then the same again. `lmkv proxy` sends each prompt to the first server, whose node pushes the pages to the second one's
while the rest is still computed. vLLM's own prefix cache is off.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Final

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from lmkv_vllm.demo import engine
from lmkv_vllm.demo.documents import SUBJECTS, document, prompt
from lmkv_vllm.demo.models import DEFAULT_MODEL, ModelError, model_folder
from lmkv_vllm.demo.pair import Pair, Shape
from lmkv_vllm.demo.server import Server, ServerError

if TYPE_CHECKING:
    from lmkv_vllm.demo.server import Answer, Child

PASSES: Final = ("plain", "pd", "again")
_HEADINGS: Final = {"plain": "one vLLM", "pd": "prefill/\ndecode", "again": "the same\nagain"}
_STACK: Final = {
    "pool": {"size": "2GiB"},
    "tiers": [{"name": "ram", "backend": "cpu", "capacity": "100%"}],
}
_WARMING: Final = "The quick brown fox jumps over the lazy dog. " * 80


@dataclass(slots=True)
class Row:
    """One question in all passes."""

    title: str
    question: str
    answers: dict[str, Answer] = field(default_factory=dict)

    @property
    def identical(self) -> bool:
        """Every pass said the same."""
        return len(self.answers) == len(PASSES) and len({answer.text for answer in self.answers.values()}) == 1


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
        self.rows = [Row(subject.title, subject.questions[0]) for subject in SUBJECTS]
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
        faults = [
            f"{row.question} was not answered alike: { {name: one.text for name, one in row.answers.items()} }"
            for row in self.rows
            if not row.identical
        ]
        faults += [
            f"{row.question} was computed where it was decoded"
            for row in self.rows
            if (answer := row.answers.get("pd")) is not None and not answer.cached_tokens
        ]
        return faults

    def table(self) -> Table:
        """What was measured."""
        table = Table(title="Time to first token", box=box.SIMPLE, padding=(0, 1, 0, 0))
        table.add_column("question", overflow="fold")
        for heading in ("prompt", *_HEADINGS.values(), "tokens from the\nprefill node"):
            table.add_column(heading, justify="right", no_wrap=True)
        table.add_column("same\nanswer", justify="center")
        for row in self.rows:
            answers = [row.answers.get(name) for name in PASSES]
            first, pd = answers[0], answers[1]
            table.add_row(
                row.question,
                "" if first is None else f"{first.prompt_tokens:,}",
                *("" if one is None else _seconds(one.first_token_seconds) for one in answers),
                "" if pd is None else f"{pd.cached_tokens:,}",
                "[green]yes[/]" if row.identical else "[red]no[/]",
            )
        table.add_section()
        medians = [
            [row.answers[name].first_token_seconds for row in self.rows if name in row.answers] for name in PASSES
        ]
        table.add_row("median", "", *(_seconds(statistics.median(each)) if each else "" for each in medians), "", "")
        return table

    def _ask(self, server: Child, name: str) -> None:
        if name != "again":
            server.ask(_WARMING, max_tokens=2)  # what is done once, at the first request, is in no figure
        for number, (row, text) in enumerate(zip(self.rows, self._prompts, strict=True), start=1):
            self._say(f"{name}: question {number} of {len(self.rows)}: {row.question}")
            row.answers[name] = server.ask(text, max_tokens=self._options.max_tokens)

    def _say(self, text: str) -> None:
        self._console.print(f"· {text}", highlight=False)


def main() -> int:
    """Parse the command line, run, report. Returns the exit status: 0 only if all answers are identical."""
    parser = argparse.ArgumentParser(prog="python -m lmkv_vllm.demo.prefill_decode", description=__doc__)
    parser.add_argument(
        "--model", default=DEFAULT_MODEL, help="smollm2, tiny, a model folder or a hub id (%(default)s)"
    )
    parser.add_argument("--tokens", type=int, default=2000, help="length of a document (%(default)s)")
    parser.add_argument("--max-tokens", type=int, default=24, help="length of an answer (%(default)s)")
    parser.add_argument("--dtype", default=None, help="of the model (auto on a GPU, float32 on a CPU)")
    parser.add_argument("--transport", default=None, help="tcp or nixl (the best that is installed)")
    options = parser.parse_args()
    console = Console()
    try:
        with console.status(f"preparing {options.model} (the first time it is downloaded and unpacked)"):
            model = str(model_folder(options.model))
    except ModelError as error:
        console.print(f"[bold red]There is no model {options.model}:[/]")
        console.print(Text(str(error)), soft_wrap=True)
        return 1
    with ExitStack() as stack:
        scratch = Path(
            stack.enter_context(tempfile.TemporaryDirectory(prefix="lmkv-demo-", ignore_cleanup_errors=True))
        )
        run = Run(options, model, scratch, console)
        try:
            run.go()
        except ServerError as error:
            console.print("[bold red]The demo stopped:[/]")
            console.print(Text(str(error)), soft_wrap=True)  # as it is: a log's brackets are no markup
            return 1
        except KeyboardInterrupt:
            console.print("stopped; everything that was started has been ended")
            return 130
    return report(run, console)


def report(run: Run, console: Console) -> int:
    """Show what came of it; the exit status."""
    console.print(run.table())
    for name, nbytes in run.transports.items():
        console.print(f"transport: {name}, {nbytes / 2**20:.0f} MiB", highlight=False)
    console.print("requests: " + ", ".join(f"{count:.0f} {name}" for name, count in run.outcomes.items()))
    faults = run.faults()
    if faults:
        console.print(Text("\n".join(["This run does not show what it should:", *faults]), style="bold red"))
        return 1
    console.print(
        "[bold green]All answers identical; every prompt was computed by the one server, decoded by the other.[/]"
    )
    return 0


def _seconds(value: float) -> str:
    return f"{value:.2f} s" if value >= 1 else f"{value * 1000:.0f} ms"


if __name__ == "__main__":
    sys.exit(main())
