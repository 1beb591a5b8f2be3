"""The command `lmkv` as a process, with throw-away plugins."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

from lmkv.cli import _parser, run
from lmkv.config.environ import RESERVED
from lmkv.plugins import CORE_COMMANDS

PLUGIN = """
import time
from pydantic import BaseModel, ConfigDict, SecretStr
from lmkv.backend import StorageBackendInterface
from lmkv.hookspecs import hookimpl
from lmkv.specs import BackendSpec
from lmkv.types import FAILED, MISS, OK, Capabilities, Health, HealthState

class Options(BaseModel):
    model_config = ConfigDict(extra="forbid")
    fault: str = ""
    password: SecretStr | None = None

class Toy(StorageBackendInterface):
    capabilities = Capabilities(shared=True)
    def __init__(self, options, context):
        self.fault, self.frames = options.fault, {}
        if self.fault == "start":
            raise OSError(13, "Permission denied", "frames")
        if self.fault == "bug":
            {}["no such key"]
        if self.fault == "late":
            time.sleep(60)
        if self.fault == "threads":
            import threading
            threading.Thread(target=self.hang).start()
    def hang(self):
        import threading
        threading.Event().wait()
    def contains(self, keys):
        return [key in self.frames for key in keys]
    def put(self, keys, objects):
        if self.fault == "full":
            return [FAILED(OSError(28, "No space left on device"))]
        for key, obj in zip(keys, objects):
            self.frames[key] = bytes(obj.view)
        return [OK(obj.nbytes) for obj in objects]
    def get(self, keys, into):
        if self.fault == "hang":
            self.hang()
        outcomes = []
        for key, obj in zip(keys, into):
            frame = self.frames.get(key)
            if frame is None:
                outcomes.append(MISS)
                continue
            obj.view[: len(frame)] = bytes(len(frame)) if self.fault == "zeros" else frame
            outcomes.append(OK(len(frame)))
        return outcomes
    def delete(self, keys):
        for key in keys if self.fault != "keeps" else ():
            self.frames.pop(key, None)
    def health(self):
        if self.fault == "silent":
            time.sleep(60)
        if self.fault == "down":
            return Health(HealthState.DOWN, "127.0.0.1:1: connection refused")
        return Health(HealthState.DEGRADED, "evicts nothing") if self.fault == "odd" else Health(HealthState.OK)

@hookimpl
def lmkv_backends():
    return [BackendSpec(name="toy", summary="a dict", options=lambda: Options, load=lambda: Toy)]
"""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    for name, version, source in (("lmkv-backend-toy", "3.1", PLUGIN), ("lmkv-backend-bad", "0.1", "import nowhere")):
        module = f"{name.rsplit('-', 1)[-1]}_plugin"
        (folder / f"{module}.py").write_text(source)
        info = folder / f"{name.replace('-', '_')}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        (info / "entry_points.txt").write_text(f"[lmkv]\n{name.rsplit('-', 1)[-1]} = {module}\n")
    return folder


class Output(NamedTuple):
    stdout: str
    stderr: str


class Lmkv:
    """Runs the command in a folder, in this process or as one of its own."""

    def __init__(self, site: Path, folder: Path, patch: pytest.MonkeyPatch, output: pytest.CaptureFixture[str]) -> None:
        source = str(Path(__file__).parents[1] / "src")
        kept = {name: value for name, value in os.environ.items() if not name.startswith("LMKV_")}
        self.environ = {**kept, "PYTHONPATH": os.pathsep.join([str(site), source])}
        self.folder = folder
        self.patch = patch
        self.output = output
        patch.chdir(folder)
        patch.syspath_prepend(str(site))
        for name in os.environ.keys() - kept.keys():
            patch.delenv(name)

    def __call__(self, *arguments: str, code: int = 0, **environ: str) -> Output:
        with self.patch.context() as patch:
            for name, value in environ.items():
                patch.setenv(name, value)
            try:
                got = run(arguments)
            except SystemExit as end:
                got = int(end.code or 0)
        seen = self.output.readouterr()
        assert got == code, seen
        return Output(seen.out, seen.err)

    def process(self, *arguments: str, code: int = 0) -> Output:
        command = [sys.executable, "-m", "lmkv", *arguments]
        done = subprocess.run(
            command, cwd=self.folder, env=self.environ, capture_output=True, text=True, timeout=60, check=False
        )
        assert done.returncode == code, (done.stdout, done.stderr)
        return Output(done.stdout, done.stderr)

    def stack(self, text: str) -> str:
        (self.folder / "stack.yaml").write_text(text)
        return "stack.yaml"


@pytest.fixture
def lmkv(site: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Lmkv:
    return Lmkv(site, tmp_path, monkeypatch, capsys)


def test_plugins(lmkv: Lmkv) -> None:
    lines = lmkv("plugins").stdout.splitlines()
    assert lines[0].split() == ["name", "kind", "distribution", "version", "status", "summary"]
    assert any(line.split()[:5] == ["toy", "backend", "lmkv-backend-toy", "3.1", "ok"] for line in lines)
    assert any(line.split()[:5] == ["bad", "plugin", "lmkv-backend-bad", "0.1", "broken"] for line in lines)
    assert "    ModuleNotFoundError: No module named 'nowhere'" in lines


def test_plugins_as_json(lmkv: Lmkv) -> None:
    found = json.loads(lmkv("plugins", "--json").stdout)
    [toy] = [row for row in found["plugins"] if row["name"] == "toy"]
    assert toy == {
        "name": "toy", "kind": "backend", "distribution": "lmkv-backend-toy", "version": "3.1", "status": "ok",
        "summary": "a dict",
    }  # fmt: skip
    [bad] = [problem for problem in found["problems"] if "bad" in problem["message"]]
    assert bad["distributions"] == [{"name": "lmkv-backend-bad", "version": "0.1"}]
    assert "nowhere" in bad["traceback"]


def test_broken_plugin_stops_only_who_names_it(lmkv: Lmkv) -> None:
    file = lmkv.stack("pool: {size: 8MiB}\ntiers:\n  - backend: toy\n")
    lmkv("check", "--offline", file)
    done = lmkv("check", lmkv.stack("tiers:\n  - backend: bad\n"), code=2)
    assert "stack.yaml:2: tiers[0].backend: plugin 'bad' of lmkv-backend-bad 0.1 cannot be imported" in done.stderr
    assert "Traceback (most recent call last)" in done.stderr


def test_check_moves_a_frame(lmkv: Lmkv) -> None:
    file = lmkv.stack("ranks: 4\npool: {size: 2MiB, per: rank}\ntiers:\n  - {name: far, backend: toy}\n")
    output = lmkv("check", file).stdout
    assert "stack.yaml: the configuration is right" in output
    assert "4 ranks x 2MiB = 8MiB of " in output
    [row] = [line for line in output.splitlines() if line.startswith("  far ")]
    assert row.split()[:4] == ["far", "toy", "ok", "1MiB:"]
    assert all(f"{step} " in row for step in ("start", "put", "get", "delete"))


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("start", "start: [Errno 13] Permission denied: 'frames'"),
        ("bug", "start: KeyError: 'no such key'"),
        ("full", "put: failed: [Errno 28] No space left on device"),
        ("zeros", "compare: "),
        ("keeps", "delete: the frame is still there after delete"),
        ("hang", "get: no answer within the deadline of 0.3 s"),
        ("silent", "health: no answer within the deadline of 0.3 s"),
        ("down", "health: 127.0.0.1:1: connection refused"),
        ("late", "start: no answer within the deadline of 0.3 s"),
        ("odd", ""),
        ("threads", ""),
    ],
)
def test_check_of_an_ill_tier(lmkv: Lmkv, fault: str, message: str) -> None:
    file = lmkv.stack(
        "pool: {size: 8MiB}\ntiers:\n"
        f"  - {{name: ill, backend: toy, deadline: 300ms, options: {{fault: {fault}}}}}\n"
        "  - {name: well, backend: toy}\n"
    )
    call = lmkv.process if fault in {"hang", "silent", "late", "threads"} else lmkv
    output = call("check", file, code=1 if message else 0).stdout
    ill, well = output.splitlines()[-2:]
    assert f"FAILED  {message}" in ill or not message
    assert ("(evicts nothing)" in ill) == (fault == "odd")
    assert well.split()[:3] == ["well", "toy", "ok"]


def test_check_shows_values_and_sources(lmkv: Lmkv) -> None:
    file = lmkv.stack("pool: {size: 8MiB}\ntiers:\n  - {backend: toy, options: {password: geheim}}\n")
    output = lmkv("check", "--show", file, LMKV_POOL__SIZE="16MiB").stdout
    rows = {line.split()[0]: line.split(maxsplit=2)[1:] for line in output.splitlines()}
    assert rows["pool.size"] == ["16MiB", "environment LMKV_POOL__SIZE"]
    assert rows["tiers[0].backend"] == ["toy", "stack.yaml:3"]
    assert rows["tiers[0].options.password"] == ["**********", "stack.yaml:3"]
    assert rows["chunk_tokens"] == ["256", "default"]
    assert "geheim" not in output


def test_a33_all_faults_in_one_run(lmkv: Lmkv) -> None:
    file = lmkv.stack("chunk_sizee: 1\npool: {size: 5GBs}\ntiers:\n  - {backend: toy, options: {falt: x}}\n")
    lines = lmkv("check", file, code=2, LMKV_CHUNK_TOKNS="1").stderr.splitlines()
    assert lines[0] == "lmkv check: 4 faults in stack.yaml:"
    assert [line.split(": ")[0].strip() for line in lines[1:]] == [
        "stack.yaml:1", "stack.yaml:2", "stack.yaml:4", "environment LMKV_CHUNK_TOKNS",
    ]  # fmt: skip
    assert "did you mean 'fault'?" in lines[3]
    assert lmkv("serve", "--config", file, code=2, LMKV_CHUNK_TOKNS="1").stderr.splitlines()[1:] == lines[1:]


@pytest.mark.parametrize(
    ("content", "part"),
    [
        (None, "No such file or directory"),
        ("", "holds no settings"),
        ("a: [1, 2\n", "stack.yaml:2: not valid YAML"),
        ("- one\n", "stack.yaml:1: the whole file must be a mapping"),
        ("tiers: toy\n", "tiers: needs a list, got text"),
        ("tiers:\n- backend: tpy\n", "no backend 'tpy' (did you mean 'toy'?)"),
        ("pool: {size: 900TiB}\ntiers:\n- backend: toy\n", "900TiB, but"),
    ],
)
def test_mistakes_are_one_message(lmkv: Lmkv, content: str | None, part: str) -> None:
    if content is not None:
        lmkv.stack(content)
    for arguments in (("check", "stack.yaml"), ("check", "--show", "stack.yaml"), ("serve", "--config", "stack.yaml")):
        done = lmkv(*arguments, code=2)
        assert part in done.stderr
        assert "Traceback" not in done.stderr
        assert done.stderr.startswith(f"lmkv {arguments[0]}: ")
        assert not done.stdout


def test_other_mistakes(lmkv: Lmkv) -> None:
    assert "Is a directory" in lmkv("check", ".", code=2).stderr
    assert "COMMAND" in lmkv(code=2).stderr
    assert "invalid choice" in lmkv("chekc", code=2).stderr
    assert "missing.yaml" in lmkv("check", code=2, LMKV_CONFIG="missing.yaml").stderr
    assert lmkv.process("check", ".", code=2) == lmkv("check", ".", code=2)
    assert "COMMAND" in lmkv("--help").stdout
    assert lmkv("--version").stdout.startswith("lmkv ")


def offer(folder: Path, name: str, source: str) -> None:
    """Make a distribution `lmkv-NAME 1.5` whose plugin module has `source`."""
    (folder / f"{name}_verbs.py").write_text(source)
    info = folder / f"lmkv_{name}-1.5.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: lmkv-{name}\nVersion: 1.5\n")
    (info / "entry_points.txt").write_text(f"[lmkv]\n{name} = {name}_verbs\n")


VERB = """
from lmkv.errors import ConfigError
from lmkv.hookspecs import hookimpl
from lmkv.specs import CommandSpec

class Verb:
    def configure(self, parser):
        parser.add_argument("word", type=int)
    def run(self, options):
        if options.word > 9:
            raise ConfigError("at most 9")
        print("heard", options.word)
        return options.word

def load():
    print("loaded")
    return Verb()

@hookimpl
def lmkv_commands():
    return [CommandSpec(name={verb!r}, summary="says it", load={load})]
"""


def test_verbs_of_plugins(lmkv: Lmkv) -> None:
    offer(lmkv.folder, "speech", VERB.format(verb="say", load="load"))
    offer(lmkv.folder, "again", VERB.format(verb="twice", load="load"))
    offer(lmkv.folder, "fork", VERB.format(verb="twice", load="load"))
    offer(lmkv.folder, "ill", VERB.format(verb="groan", load="lambda: 1 / 0"))
    offer(lmkv.folder, "grab", VERB.format(verb="serve", load="load"))
    lmkv.patch.syspath_prepend(str(lmkv.folder))
    listed = lmkv("--help").stdout
    assert re.search(r"^ +say +says it$", listed, re.MULTILINE)
    assert "twice" not in listed
    assert "loaded" not in listed
    assert "word" in lmkv("say", "--help").stdout
    assert lmkv("say", "3", code=3).stdout == "loaded\nheard 3\n"
    assert lmkv("say", "12", code=2).stderr == "lmkv say: at most 9\n"
    assert "invalid int value" in lmkv("say", "x", code=2).stderr
    clash = lmkv("twice", "1", code=2).stderr
    assert clash.startswith("lmkv twice: command 'twice' is claimed by lmkv-again 1.5 (again_verbs) and lmkv-fork 1.5")
    broken = lmkv("groan", "1", code=2).stderr
    assert broken.startswith("lmkv groan: command 'groan' of lmkv-ill 1.5 cannot be loaded: ZeroDivisionError")
    assert "--socket" in lmkv("serve", "--help").stdout, "no plugin gets lmkv's own"
    rows = json.loads(lmkv("plugins", "--json").stdout)["plugins"]
    assert {(row["name"], row["status"]) for row in rows if row["kind"] == "command"} >= {
        ("say", "ok"), ("groan", "ok"), ("twice", "conflict"), ("serve", "conflict"),
    }  # fmt: skip


def test_verbs_that_are_not_installed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("lmkv.plugins.entry_points", lambda _: [])
    assert run(["proxy", "--port", "1"]) == 2
    assert capsys.readouterr().err == (
        "lmkv proxy: this command is in a distribution of its own: pip install lmkv-backend-nixl-pd\n"
    )


def test_the_core_keeps_its_own_verbs() -> None:
    _, verbs = _parser()
    assert tuple(verbs.choices) == CORE_COMMANDS


def test_schema(lmkv: Lmkv) -> None:
    schema = json.loads(lmkv("schema").stdout)
    assert schema["$schema"] == "http://json-schema.org/draft-07/schema#"
    assert "toy" in schema["$defs"]["TierConfig"]["properties"]["backend"]["enum"]


def test_reader_that_goes_away(lmkv: Lmkv) -> None:
    command = f"{sys.executable} -m lmkv schema | head -1; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(
        ["bash", "-c", command], env=lmkv.environ, cwd=lmkv.folder, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "{\n", "")


def test_import_is_light(lmkv: Lmkv) -> None:
    code = (
        "import sys, lmkv\n"
        "heavy = {'torch', 'numpy', 'pydantic', 'ruamel', 'pluggy', 'asyncio', 'msgspec'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
        "assert 'load_config' in dir(lmkv) and lmkv.__version__\n"
        "missing = [name for name in lmkv.__all__ if getattr(lmkv, name, None) is None]\n"
        "assert not missing, missing\n"
        "assert 'torch' not in sys.modules\n"
    )
    done = subprocess.run([sys.executable, "-c", code], env=lmkv.environ, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_serve_until_told_to_end(lmkv: Lmkv, number: signal.Signals) -> None:
    lmkv.stack("pool: {size: 8MiB}\ntiers:\n  - {backend: toy}\n")
    command = [sys.executable, "-m", "lmkv", "serve", "--config", "stack.yaml", "--socket", "s.sock"]
    process = subprocess.Popen(command, cwd=lmkv.folder, env=lmkv.environ, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    seen = []
    for line in process.stderr:
        seen.append(line)
        if "ready" in line:
            break
    else:
        pytest.fail("".join(seen))
    assert seen[0].startswith("pool: 8MiB of ")
    assert "socket: s.sock\n" in seen
    assert (lmkv.folder / "s.sock").is_socket()
    process.send_signal(number)
    rest = process.stderr.read()
    assert process.wait(30) == 0
    assert "Traceback" not in rest
    assert not (lmkv.folder / "s.sock").exists()
    process.stderr.close()


def test_reference_pages() -> None:
    docs = Path(__file__).parents[2] / "docs/reference"
    cli = (docs / "cli.md").read_text(encoding="utf-8")
    for verb in ("plugins", "check", "schema", "serve"):
        assert f"## `lmkv {verb}" in cli
    for option in ("--json", "--show", "--offline", "--config", "--socket"):
        assert option in cli
    configuration = (docs / "configuration.md").read_text(encoding="utf-8")
    for name, meaning in RESERVED.items():
        assert f"| `{name}` | {meaning} |" in configuration
