"""`make bench`: run the measurements, print the table, write `build/bench.json`."""

from __future__ import annotations

import argparse
import json
import sys
import time
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from rich import box
from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tests.bench.harness import Row

RESULT = Path(__file__).resolve().parents[2] / "build" / "bench.json"
BENCHES = {
    "digests": "memory:digests",
    "lookup": "memory:lookup",
    "copies": "memory:copies",
    "own-time": "memory:own_time",
    "disk": "disk:disk",
    "restart": "restart:restart",
    "tier-down": "prefetch:tier_down",
    "prefetch": "prefetch:hidden",
    "load-or-compute": "prefetch:crossing",
    "codecs": "codecs:codecs",
    "redis": "redis:redis",
    "redis-lookup": "redis:lookup",
    "s3": "s3:s3",
    "controller": "controller:directory",
    "proxy": "proxy:proxy",
    "peer": "peer:peer",
    "pd": "pd:hidden",
    "vllm-misses": "vllm:misses",
    "vllm-first-token": "vllm:first_token",
}


def main() -> int:
    """0 even where a target is missed: figures are for people to judge; 1 when a measurement broke."""
    parser = argparse.ArgumentParser(prog="make bench", description=__doc__)
    parser.add_argument("--only", help=f"some of {', '.join(BENCHES)}; separated by commas")
    options = parser.parse_args()
    chosen = options.only.split(",") if options.only else list(BENCHES)
    unknown = [name for name in chosen if name not in BENCHES]
    if unknown:
        parser.error(f"there is no measurement {', '.join(unknown)}; there are {', '.join(BENCHES)}")
    torch.set_num_threads(1)
    console = Console()
    rows: list[Row] = []
    broken = []
    for name in chosen:
        begin = time.monotonic()
        with console.status(f"measuring {name}"):
            try:
                rows += bench(name)()
            except Exception:  # noqa: BLE001  the other measurements are still worth having
                console.print_exception()
                broken.append(name)
        console.print(f"[dim]{name}: {time.monotonic() - begin:.0f} s[/]", highlight=False)
    console.print(table(rows))
    write(rows)
    return 1 if broken else 0


def bench(name: str) -> Callable[[], list[Row]]:
    """The measurement of that name."""
    module, _, function = BENCHES[name].partition(":")
    found: Callable[[], list[Row]] = getattr(import_module(f"tests.bench.{module}"), function)
    return found


def table(rows: Sequence[Row]) -> Table:
    """For people."""
    made = Table(box=box.SIMPLE_HEAD)
    made.add_column("work")
    for title in ("ours", "reference", "ratio", "target"):
        made.add_column(title, justify="right")
    made.add_column("holds")
    for row in rows:
        made.add_row(
            row.work,
            f"{row.ours:.3g} {row.unit}",
            "" if row.reference is None else f"{row.reference:.3g} {row.unit}",
            "" if row.ratio is None else f"{row.ratio:.2f}",
            row.target,
            "[green]yes[/]" if row.holds else "[red]no[/]",
        )
    return made


def write(rows: Sequence[Row]) -> None:
    """Rows that were measured now replace those of the same work; the others stay as they were."""
    RESULT.parent.mkdir(exist_ok=True)
    kept: list[dict[str, object]] = []
    if RESULT.exists():
        kept = json.loads(RESULT.read_text())
    fresh = [row.json() for row in rows]
    works = {row["work"] for row in fresh}
    RESULT.write_text(json.dumps([row for row in kept if row["work"] not in works] + fresh, indent=2) + "\n")


if __name__ == "__main__":
    sys.exit(main())
