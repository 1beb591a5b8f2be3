"""What a user gets from the index: wheels, installed into a clean virtual environment, without a checkout in sight."""

from __future__ import annotations

import subprocess
import sys
import venv
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from s3_rig import JuiceGateway, make_bucket

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

    def run(self, command: str, *arguments: str, code: int = 0) -> str:
        done = subprocess.run(
            [str(self.bin / command), *arguments], cwd=self._cwd, capture_output=True, text=True, check=False
        )
        assert done.returncode == code, f"{command} {arguments} failed:\n{done.stdout}\n{done.stderr}"
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
    frames = tmp_path / "frames"
    frames.mkdir()
    stack = tmp_path / "stack.yaml"
    stack.write_text(
        "chunk_tokens: 64\n"
        "pool: {size: 64MiB}\n"
        "tiers:\n"
        "  - {backend: cpu, capacity: 100%}\n"
        f"  - {{backend: example, capacity: 64MiB, options: {{path: {frames}}}}}\n"
    )
    checked = {line.split()[0]: line for line in clean.run("lmkv", "check", str(stack)).splitlines() if line.strip()}
    assert "ok" in checked["example"].split()

    # RAM goes with the first process: what the second one gets can only be from the stranger's tier.
    assert clean.run("python", "-c", _USE, "store", str(stack)).split() == ["128"]
    assert any(frames.iterdir())
    assert clean.run("python", "-c", _USE, "retrieve", str(stack)).split() == ["128", "True"]


def test_s3_alone(wheels: Path, tmp_path: Path) -> None:
    """The core and one backend, no torch: what is installed is listed, and a wrong secret is told by `lmkv check`."""
    clean = Clean(tmp_path / "s3", wheels, ["lmkv-backend-s3"])
    listed = {line.split()[0]: line for line in clean.run("lmkv", "plugins").splitlines() if line.strip()}
    assert "ok" in listed["s3"].split()
    assert "cpu" not in listed
    assert clean.run("python", "-c", "import importlib.util as u; print(u.find_spec('torch'))").strip() == "None"
    with JuiceGateway(tmp_path / "gateway") as server:
        where = f"endpoint: {server.endpoint}, bucket: {make_bucket(server)}, access_key: {server.access_key}"
        stack = tmp_path / "stack.yaml"
        for secret, code in ((server.secret_key, 0), ("not-the-right-one", 1)):
            tier = f"{{name: far, backend: s3, deadline: 20s, options: {{{where}, secret_key: {secret}}}}}"
            stack.write_text(f"pool: {{size: 64MiB}}\ntiers:\n  - {tier}\n")
            checked = clean.run("lmkv", "check", str(stack), code=code)
            row = next(line for line in checked.splitlines() if line.split()[:1] == ["far"] and "s3" in line.split())
            if code == 0:
                assert "ok" in row.split()
            else:
                assert "FAILED" in row.split()
                assert "SignatureDoesNotMatch" in checked
                assert "secret_key is not that of access_key" in checked
            assert secret not in checked


_USE = """
import sys
import numpy as np
from lmkv.config import load_config
from lmkv.engine import CacheEngine
from lmkv.gpu import connector_for
from lmkv.keys import Namespace
from lmkv.layout import PageLayout, PageRun
from lmkv.plugins import PluginHost
from lmkv.service import LocalClient, ThreadHost

kv = np.zeros((16, 4096), np.uint8)
layout = PageLayout("bytes", "uint8", 16, (PageRun(buffer=0, offset=0, stride=4096, length=4096),))
namespace = Namespace(
    model="m", revision="r", kv_dtype="uint8", layouts=(layout.describe(),), page_bytes=(4096,), chunk_tokens=64,
    page_tokens=16,
)
wanted = np.random.default_rng(0).integers(0, 255, (8, 4096), dtype=np.uint8)
host = ThreadHost(load_config(sys.argv[2], host=PluginHost.discover()))
engine = CacheEngine(LocalClient(host), namespace, gpu=connector_for("cpu", layout, [kv]))
tokens = np.arange(128)
if sys.argv[1] == "store":
    kv[:8] = wanted
    print(engine.store(tokens, np.arange(8)).sum())
else:
    print(engine.retrieve(tokens, np.arange(8, 16)).sum(), (kv[8:] == wanted).all())
engine.close()
host.close()
"""


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
