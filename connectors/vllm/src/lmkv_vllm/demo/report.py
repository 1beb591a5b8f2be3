"""What the demo shows: a table that fills while it runs, and bars and a verdict at its end."""

from __future__ import annotations

import statistics
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from rich import box
from rich.console import Group
from rich.live import Live
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from collections.abc import Mapping

    from rich.console import Console, RenderableType
    from typing_extensions import Self

    from lmkv_vllm.demo.server import Answer

PASSES = ("cold", "ram", "disk")
_SOURCE = {"ram": "ram", "disk": "disk"}  # the tier that each warm pass must be answered from
_LABELS = {"cold": "cold: computed", "ram": "warm: from RAM", "disk": "after restart: from disk"}
_COLOURS = {"cold": "red", "ram": "green", "disk": "blue"}
_BAR_WIDTH = 24


@dataclass(slots=True)
class Row:
    """One question in all passes.

    Attributes:
        title: The document.
        question: What was asked.
        answers: By pass.
        hits: By pass: tokens that came out of each tier.
    """

    title: str
    question: str
    answers: dict[str, Answer] = field(default_factory=dict)
    hits: dict[str, Mapping[str, int]] = field(default_factory=dict)

    def identical(self) -> bool | None:
        """Whether all answers so far are equal; None before there are two."""
        texts = [answer.text for answer in self.answers.values()]
        return None if len(texts) < len(PASSES[:2]) else len(set(texts)) == 1

    def hit(self, name: str) -> int:
        """Tokens that the tier which a warm pass is about gave to this question."""
        return self.hits.get(name, {}).get(_SOURCE[name], 0)


class Report:
    """Collects answers and shows them. A context manager around the live display; used by one thread."""

    def __init__(self, console: Console, rows: list[Row]) -> None:
        self._console = console
        self._rows = rows
        self._spinner = Spinner("dots", "starting")
        self._live = Live(self._view(), console=console, refresh_per_second=8, transient=True)

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._live.stop()

    def stage(self, text: str) -> None:
        """Say what goes on now; in a log, which shows no live display, as a line of its own."""
        self._spinner.update(text=text)
        self._live.update(self._view())
        if not self._console.is_terminal:
            self._console.print(f"· {text}")

    def answered(self, row: Row, name: str, answer: Answer, hits: Mapping[str, int]) -> None:
        """Take in the answer of one pass and the tokens that each tier gave for it."""
        row.answers[name] = answer
        row.hits[name] = hits
        self._live.update(self._view())

    def faults(self) -> list[str]:
        """Why the run does not show what it should; empty if it does."""
        faults = []
        for row in self._rows:
            if not row.identical() or len(row.answers) < len(PASSES):
                texts = {name: answer.text for name, answer in row.answers.items()}
                faults.append(f"{row.question} was not answered alike: {texts}")
            faults += [
                f"{row.question} got no tokens from {_SOURCE[name]}: {dict(row.hits.get(name, {}))}"
                for name in PASSES[1:]
                if row.hit(name) == 0
            ]
        return faults

    def summary(self) -> RenderableType:
        """The table, the bars and the verdict."""
        faults = self.faults()
        verdict = Text("All answers identical; every warm question was answered from its tier.", style="bold green")
        if faults:
            verdict = Text("\n".join(["This run does not show what it should:", *faults]), style="bold red")
        return Group(self._table(), self._said(), Text(), self._bars(), Text(), verdict)

    def _view(self) -> RenderableType:
        return Group(self._table(), self._spinner)

    def _table(self) -> Table:
        table = Table(
            title="Time to first token, and tokens that were not computed", box=box.SIMPLE, padding=(0, 1, 0, 0)
        )
        table.add_column("question", overflow="fold")
        for heading in ("prompt", "cold", "RAM", "disk", "hits\nRAM", "hits\ndisk"):
            table.add_column(heading, justify="right", no_wrap=True)
        table.add_column("same\nanswer", justify="center", no_wrap=True)
        title = None
        for row in self._rows:
            if row.title != title:
                table.add_section()
                table.add_row(Text(row.title, style="bold"))
                title = row.title
            first = next(iter(row.answers.values()), None)
            cells = ["" if first is None else f"{first.prompt_tokens:,}"]
            cells += [_seconds(row.answers[name].first_token_seconds) if name in row.answers else "" for name in PASSES]
            cells += [f"{row.hit(name):,}" if name in row.hits else "" for name in PASSES[1:]]
            same = {None: "", True: "[green]yes[/]", False: "[red]no[/]"}[row.identical()]
            table.add_row(row.question, *cells, same)
        return table

    def _said(self) -> RenderableType:
        """What the model answered, the cold answer standing for all where they are identical."""
        grid = Table.grid(padding=(0, 1))
        for row in self._rows:
            if PASSES[0] in row.answers:
                grid.add_row(Text(row.question, style="dim"), _printable(row.answers[PASSES[0]].text))
        return grid

    def _bars(self) -> RenderableType:
        medians = {
            name: statistics.median(row.answers[name].first_token_seconds for row in self._rows if name in row.answers)
            for name in PASSES
            if any(name in row.answers for row in self._rows)
        }
        longest = max(medians.values(), default=0.0)
        grid = Table.grid(padding=(0, 1))
        for name, median in medians.items():
            bar = Text("█" * max(1, round(_BAR_WIDTH * median / longest)), style=_COLOURS[name])
            faster = "" if name == PASSES[0] else f"{medians[PASSES[0]] / median:.1f} times sooner"
            grid.add_row(_LABELS[name], bar, _seconds(median), faster)
        return Group(Text("Median time to first token", style="italic"), grid)


def _seconds(value: float) -> str:
    return f"{value:.2f} s" if value >= 1 else f"{value * 1000:.0f} ms"


def _printable(text: str) -> str:
    """On one line; a random model says things that no terminal should be told."""
    return "".join(letter if letter.isprintable() else " " for letter in text).strip()
