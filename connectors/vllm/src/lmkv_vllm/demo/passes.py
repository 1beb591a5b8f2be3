"""What the demos of two servers have in common: questions asked several times, a table, and how they are run."""

from __future__ import annotations

import argparse
import statistics
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from lmkv_vllm.demo.models import DEFAULT_MODEL, ModelError, model_folder
from lmkv_vllm.demo.server import ServerError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from lmkv_vllm.demo.server import Answer

WARMING = "The quick brown fox jumps over the lazy dog. " * 40
"""What an engine does once, at its first request, is in no figure."""


@dataclass(slots=True)
class Row:
    """One question in all passes, of which there are `passes`."""

    title: str
    question: str
    passes: int
    answers: dict[str, Answer] = field(default_factory=dict)

    @property
    def identical(self) -> bool:
        """Every pass said the same."""
        return len(self.answers) == self.passes and len({answer.text for answer in self.answers.values()}) == 1


class Demo(Protocol):
    """One run of a demo."""

    def go(self) -> None:
        """All passes. Raises `ServerError` when a server fails."""

    def report(self, console: Console) -> int:
        """Show what came of it; the exit status."""


def unlike(rows: Sequence[Row]) -> list[str]:
    """Which questions were not answered alike in all passes."""
    return [
        f"{row.question} was not answered alike: { {name: one.text for name, one in row.answers.items()} }"
        for row in rows
        if not row.identical
    ]


def table(rows: Sequence[Row], headings: Mapping[str, str], source: str, given: Callable[[Row], int | None]) -> Table:
    """What was measured: time to first token of each pass (`headings`), and tokens that somebody else had computed."""
    made = Table(title="Time to first token", box=box.SIMPLE, padding=(0, 1, 0, 0))
    made.add_column("question", overflow="fold")
    for heading in ("prompt", *headings.values(), source):
        made.add_column(heading, justify="right", no_wrap=True)
    made.add_column("same\nanswer", justify="center")
    for row in rows:
        answers = [row.answers.get(name) for name in headings]
        tokens = given(row)
        made.add_row(
            row.question,
            "" if answers[0] is None else f"{answers[0].prompt_tokens:,}",
            *("" if one is None else _seconds(one.first_token_seconds) for one in answers),
            "" if tokens is None else f"{tokens:,}",
            "[green]yes[/]" if row.identical else "[red]no[/]",
        )
    made.add_section()
    times = [[row.answers[name].first_token_seconds for row in rows if name in row.answers] for name in headings]
    made.add_row("median", "", *(_seconds(statistics.median(each)) if each else "" for each in times), "", "")
    return made


def verdict(faults: Sequence[str], good: str, console: Console) -> int:
    """Say whether the run shows what it should; the exit status."""
    if faults:
        console.print(Text("\n".join(["This run does not show what it should:", *faults]), style="bold red"))
        return 1
    console.print(f"[bold green]{good}[/]")
    return 0


def parser(program: str, text: str | None) -> argparse.ArgumentParser:
    """The command line that all have."""
    made = argparse.ArgumentParser(prog=f"python -m {program}", description=text)
    made.add_argument("--model", default=DEFAULT_MODEL, help="smollm2, tiny, a model folder or a hub id (%(default)s)")
    made.add_argument("--tokens", type=int, default=2000, help="length of a document (%(default)s)")
    made.add_argument("--max-tokens", type=int, default=24, help="length of an answer (%(default)s)")
    made.add_argument("--dtype", default=None, help="of the model (auto on a GPU, float32 on a CPU)")
    made.add_argument("--transport", default=None, help="tcp or nixl (the best that is installed)")
    return made


def launch(options: argparse.Namespace, demo: Callable[[str, Path, Console], Demo]) -> int:
    """Make the model, run the demo in a folder of its own, report. Returns the exit status."""
    console = Console()
    try:
        with console.status(f"preparing {options.model} (the first time it is downloaded and unpacked)"):
            model = str(model_folder(options.model))
    except ModelError as error:
        console.print(f"[bold red]There is no model {options.model}:[/]")
        console.print(Text(str(error)), soft_wrap=True)
        return 1
    with tempfile.TemporaryDirectory(prefix="lmkv-demo-", ignore_cleanup_errors=True) as scratch:
        run = demo(model, Path(scratch), console)
        try:
            run.go()
        except ServerError as error:
            console.print("[bold red]The demo stopped:[/]")
            console.print(Text(str(error)), soft_wrap=True)  # as it is: a log's brackets are no markup
            return 1
        except KeyboardInterrupt:
            console.print("stopped; everything that was started has been ended")
            return 130
    return run.report(console)


def _seconds(value: float) -> str:
    return f"{value:.2f} s" if value >= 1 else f"{value * 1000:.0f} ms"
