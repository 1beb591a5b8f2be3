"""The kit is worth something only if a wrong backend fails it, in the test that names what is wrong."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

GOOD = """
import threading
import pytest
from lmkv.backend import StorageBackendInterface
from lmkv.errors import ClosedError
from lmkv.testing import BackendSuite
from lmkv.types import *

class Good(StorageBackendInterface):
    capabilities = Capabilities(scan=True)
    def __init__(self):
        self.frames, self.lock, self.closed = {}, threading.Lock(), False
    def contains(self, keys):
        return [self.name(k) in self.frames for k in keys]
    def get(self, keys, into):
        if self.closed: raise ClosedError("closed")
        return [self.get_one(k, m.view) for k, m in zip(keys, into)]
    def get_one(self, key, view):
        frame = self.frames.get(self.name(key))
        if frame is None: return MISS
        if len(frame) > len(view): return FAILED(ValueError("too long"))
        view[: len(frame)] = frame
        return OK(len(frame))
    def put(self, keys, objects):
        if self.closed: raise ClosedError("closed")
        for k, m in zip(keys, objects): self.frames[self.name(k)] = self.keep(m)
        return [OK(m.nbytes) for m in objects]
    def keep(self, memory): return bytes(memory.view)
    def name(self, key): return key
    def delete(self, keys):
        for k in keys: self.frames.pop(self.name(k), None)
    def scan(self):
        for k, f in list(self.frames.items()): yield StoredFrame(k, len(f), bytes(f[-4096:]), __import__("time").time())
    def close(self): self.closed = True
"""

WRONG = {
    "keeps_a_view": ("def keep(self, memory): return memory.view", "test_put_keeps_no_reference"),
    "keeps_an_owner": ("def keep(self, m): m.retain('x'); return bytes(m.view)", "test_put_keeps_no_reference"),
    "forgets_the_shard": ("def name(self, key): return key._replace(shard=0)", "test_every_part_of_a_key_counts"),
    "cuts_the_digest": (
        "def name(self, key): return key._replace(digest=key.digest[:31])",
        "test_every_part_of_a_key_counts",
    ),
    "rounds_up": (
        "def keep(self, memory): return bytes(memory.view).ljust(-(-memory.nbytes // 4096) * 4096, b'0')",
        "test_round_trip",
    ),
    "raises_on_absent": ("def delete(self, keys): [self.frames.pop(k) for k in keys]", "test_delete"),
    "claims_persistence": ("capabilities = Capabilities(scan=True, persistent=True)", "test_reopen"),
    "lists_nothing": ("def scan(self): return iter(())", "test_scan"),
    "serves_when_closed": ("def close(self): pass", "test_close"),
    "overflows": (
        (
            "def get_one(self, key, view):\n"
            "        frame = self.frames.get(key)\n"
            "        if frame is None: return MISS\n"
            "        n = min(len(frame), len(view)); view[:n] = frame[:n]; return OK(n)"
        ),
        "test_no_room",
    ),
    "replaces_in_two_steps": (
        (
            "def put(self, keys, objects):\n"
            "        if self.closed: raise ClosedError('closed')\n"
            "        for k, m in zip(keys, objects):\n"
            "            self.frames.pop(k, None); __import__('time').sleep(0.001); self.frames[k] = bytes(m.view)\n"
            "        return [OK(m.nbytes) for m in objects]"
        ),
        "test_replace_is_atomic",
    ),
    "one_error_for_all": (
        (
            "def get(self, keys, into):\n"
            "        found = [self.get_one(k, m.view) for k, m in zip(keys, into)]\n"
            "        return found if all(o.ok for o in found) else [MISS] * len(keys)"
        ),
        "test_one_outcome_per_key_in_order",
    ),
}


@pytest.fixture(scope="module")
def failed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, set[str]]:
    """Class of the wrong backend → names of the tests that it failed."""
    lines = [GOOD]
    bodies = {"good": ""} | {name: body for name, (body, _) in WRONG.items()}
    for name, body in bodies.items():
        lines.append(f"class {name}(Good):\n    {body or 'pass'}\n")
        lines.append(f"class Test_{name}(BackendSuite):\n    scale = 10\n    @pytest.fixture\n")
        lines.append(f"    def make_backend(self): return {name}\n")
    lines.append("class Test_weakened(Test_good):\n    def test_delete(self): pass\n")
    lines.append(
        "class Test_excused(Test_good):\n"
        "    @pytest.mark.xfail(reason='known', run=False)\n    def test_delete(self): pass\n"
    )
    folder = tmp_path_factory.mktemp("kit")
    file = Path(folder / "test_kit.py")
    file.write_text("\n".join(lines))
    command = [sys.executable, "-m", "pytest", "-q", "-rf", "--tb=no", "-p", "no:cacheprovider", "-k", "bare or suite"]
    result = subprocess.run([*command, file.name], cwd=folder, capture_output=True, text=True, check=False)
    assert "error" not in result.stdout.splitlines()[-1], result.stdout
    found: dict[str, set[str]] = {name: set() for name in (*bodies, "weakened", "excused")}
    for line in result.stdout.splitlines():
        if line.startswith("FAILED"):
            _, name, test = line.split()[1].split("::")
            found[name.removeprefix("Test_")].add(test.partition("[")[0])
    return found


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_backend_fails(failed: dict[str, set[str]], name: str) -> None:
    assert WRONG[name][1] in failed[name]


def test_a_right_backend_passes(failed: dict[str, set[str]]) -> None:
    assert failed["good"] == set()


def test_overriding_a_test_needs_a_reason(failed: dict[str, set[str]]) -> None:
    assert failed["weakened"] == {"test_suite_is_not_weakened"}
    assert failed["excused"] == set()
