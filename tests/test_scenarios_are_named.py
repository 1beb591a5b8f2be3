"""Every case from the field has a test that bears its number."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parent.parent
REQUIRED = {*range(1, 39), *range(40, 44)}
NAMED = re.compile(r"^ *(?:async )?def test_((?:a\d+_(?:and_)?)+)", re.MULTILINE)


def scenarios() -> dict[int, list[str]]:
    """Number → files with a test of it."""
    found: dict[int, list[str]] = {}
    for folder in ("core/tests", "backends/*/tests", "connectors/*/tests", "plugins_example/tests", "tests"):
        for path in sorted(ROOT.glob(f"{folder}/**/test_*.py")):
            for name in NAMED.findall(path.read_text(encoding="utf-8")):
                for number in re.findall(r"a(\d+)_", name):
                    found.setdefault(int(number), []).append(str(path.relative_to(ROOT)))
    return found


def test_every_scenario_has_a_test() -> None:
    missing = sorted(REQUIRED - set(scenarios()))
    assert not missing, f"no test is named after {', '.join(f'A{number}' for number in missing)}"
