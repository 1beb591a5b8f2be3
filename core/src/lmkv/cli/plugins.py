"""`lmkv plugins`: what is installed, from which distribution, and what is wrong."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from lmkv.cli.table import table
from lmkv.plugins import PluginHost

if TYPE_CHECKING:
    from lmkv.installed import Problem


def run(*, as_json: bool) -> int:
    """Print the list; 0 also when plugins have problems, for the list itself is right."""
    host = PluginHost.discover()
    rows = _rows(host)
    if as_json:
        problems = [
            {
                "kind": problem.kind,
                "message": problem.message,
                "distributions": [{"name": o.distribution, "version": o.version} for o in problem.origins],
                "traceback": problem.traceback,
            }
            for problem in host.problems
        ]
        print(json.dumps({"plugins": rows, "problems": problems}, indent=2))
        return 0
    columns = ("name", "kind", "distribution", "version", "status", "summary")
    print(table([columns, *(tuple(row[column] for column in columns) for row in rows)]))
    for problem in host.problems:
        print(f"\n{problem.kind}: {problem.message}")
        print("".join(f"    {line}\n" for line in problem.traceback.splitlines()), end="")
    return 0


def _rows(host: PluginHost) -> list[dict[str, str]]:
    rows = [
        {
            "name": name,
            "kind": kind,
            "distribution": found.distribution,
            "version": found.version,
            "status": "ok",
            "summary": found.spec.summary,
        }
        for kind, registered in host.tables.items()
        for name, found in sorted(registered.items())
    ]
    return rows + [row for problem in host.problems for row in _bad(problem)]


def _bad(problem: Problem) -> list[dict[str, str]]:
    """A row for each distribution that takes part in the problem."""
    offers: tuple[tuple[str, str | None], ...] = problem.offers or (("plugin", None),)
    return [
        {
            "name": name or origin.entry_point,
            "kind": kind,
            "distribution": origin.distribution,
            "version": origin.version,
            "status": {"import": "broken"}.get(problem.kind, problem.kind),
            "summary": "see below",
        }
        for kind, name in offers
        for origin in problem.origins
    ]
