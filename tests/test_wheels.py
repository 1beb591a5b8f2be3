"""What a user gets from the index: wheels, installed into a clean virtual environment, without a checkout in sight."""

from __future__ import annotations

import subprocess
import sys
import venv
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Sequence

ROOT = Path(__file__).resolve().parent.parent

pytestmark = pytest.mark.wheels


class Clean:
    """A virtual environment of its own, and commands in it that see no folder of ours."""

    def __init__(self, folder: Path, wheels: Path, distributions: Sequence[str]) -> None:
        venv.create(folder, with_pip=True)
        self.bin = folder / "bin"
        self._cwd = folder
        # Pinned, so that somebody else's release cannot turn this red; ours are in the wheels' folder alone.
        pins = ["--constraint", str(ROOT / ".ci" / "requirements" / "dev.txt"), "--find-links", str(wheels)]
        self.run("python", "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *pins, *distributions)

    def run(self, command: str, *arguments: str) -> str:
        done = subprocess.run(
            [str(self.bin / command), *arguments], cwd=self._cwd, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, f"{command} {arguments} failed:\n{done.stdout}\n{done.stderr}"
        return done.stdout


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheels")
    subprocess.run([sys.executable, str(ROOT / ".ci" / "wheels.py"), str(folder)], check=True)
    return folder


@pytest.fixture(scope="module")
def clean(wheels: Path, tmp_path_factory: pytest.TempPathFactory) -> Clean:
    return Clean(tmp_path_factory.mktemp("clean"), wheels, ["lmkv", "lmkv-backend-cpu", "lmkv-backend-example"])


def test_every_wheel_carries_licence_and_types(wheels: Path) -> None:
    built = sorted(wheels.glob("*.whl"))
    assert len(built) == len(list(ROOT.glob("*/pyproject.toml"))) + len(list(ROOT.glob("*/*/pyproject.toml")))
    for wheel in built:
        names = zipfile.ZipFile(wheel).namelist()
        assert any(name.endswith("licenses/LICENSE") for name in names), wheel.name
        assert any(name.endswith("/py.typed") for name in names), wheel.name
        assert not any("/tests/" in name for name in names), wheel.name


def test_core_wheel_is_small(wheels: Path) -> None:
    (core,) = wheels.glob("lmkv-0*.whl")
    assert core.stat().st_size < 1_000_000


def test_core_and_one_backend_list_their_plugins(clean: Clean) -> None:
    listed = clean.run("lmkv", "plugins")
    rows = {line.split()[0]: line for line in listed.splitlines() if line.strip()}
    assert "lmkv-backend-cpu" in rows["cpu"]
    assert "ok" in rows["cpu"].split()
    assert "disk" not in rows


def test_a_strangers_backend_is_listed_checked_and_used(clean: Clean, tmp_path: Path) -> None:
    assert "lmkv-backend-example" in clean.run("lmkv", "plugins")
    stack = tmp_path / "stack.yaml"
    stack.write_text(
        "pool:\n  size: 64MiB\n"
        "tiers:\n"
        "  - backend: cpu\n    capacity: 100%\n"
        "  - backend: example\n    capacity: 64MiB\n"
        f"    options:\n      path: {tmp_path / 'frames'}\n"
    )
    checked = clean.run("lmkv", "check", str(stack))
    assert "example" in checked


def test_import_reaches_no_torch(clean: Clean) -> None:
    reached = clean.run("python", "-c", "import lmkv, sys; print(*sys.modules)").split()
    assert "lmkv" in reached
    assert not {"torch", "vllm", "lmkv_backend_cpu"} & set(reached)


def test_import_is_quick(clean: Clean) -> None:
    """The only figure here: the best of several, so that a busy machine does not decide."""
    clock = (
        "import subprocess, sys, time\n"
        "def best(code):\n"
        "    times = []\n"
        "    for _ in range(10):\n"
        "        start = time.perf_counter()\n"
        "        subprocess.run([sys.executable, '-c', code], check=True)\n"
        "        times.append(time.perf_counter() - start)\n"
        "    return min(times)\n"
        "print(best('import lmkv') - best('pass'))\n"
    )
    assert float(clean.run("python", "-c", clock)) < 0.150
