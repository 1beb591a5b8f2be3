"""Build the wheel of every distribution: `python .ci/wheels.py FOLDER`. Empties the folder of old wheels first."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from setup import distributions, give_up


def build(target: Path, folders: list[Path]) -> list[Path]:
    """Build a wheel of each folder into `target` and return the files, sorted by name."""
    target.mkdir(parents=True, exist_ok=True)
    for old in target.glob("*.whl"):
        old.unlink()
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--disable-pip-version-check"]
    # The build back end is in the environment already: isolation would download it once per distribution.
    command += ["--no-deps", "--no-build-isolation", "--wheel-dir", str(target)]
    done = subprocess.run([*command, *map(str, folders)], check=False)
    if done.returncode != 0:
        give_up("a wheel did not build; see above")
    return sorted(target.glob("*.whl"))


if __name__ == "__main__":
    for wheel in build(Path(sys.argv[1]), distributions()):
        print(f"{wheel.stat().st_size / 1024:8.1f} KiB  {wheel}")
