"""The plugin host, on real throw-away distributions in a process of their own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import types
from pathlib import Path

import pytest

from lmkv.errors import PluginError
from lmkv.hookspecs import hookimpl
from lmkv.plugins import PluginHost
from lmkv.specs import BackendSpec

OFFER = """
from lmkv.hookspecs import hookimpl
from lmkv.specs import BackendSpec
@hookimpl
def lmkv_backends():
    return [BackendSpec(name={name!r}, summary="for a test", options=None, load=None{more})]
"""
TRANSPORT = """
from lmkv.hookspecs import hookimpl
from lmkv.specs import TransportSpec
def load():
    {load}
@hookimpl
def lmkv_transports():
    return [TransportSpec(name={name!r}, summary="for a test", rank=5, load=load{more})]
"""
ASK = """
import json, sys
from lmkv.errors import PluginError
from lmkv.plugins import PluginHost
host = PluginHost.discover()
errors = {}
for name in sys.argv[1:]:
    try:
        host.backend(name)
    except PluginError as error:
        errors[name] = str(error)
    try:
        host.load_transport(name)
    except PluginError as error:
        errors[f"transport {name}"] = str(error)
print(json.dumps({
    "transports": {name: [r.distribution, r.spec.rank] for name, r in host.transports.items()},
    "backends": {name: [r.distribution, r.version] for name, r in host.backends.items()},
    "codecs": sorted(host.codecs),
    "problems": [[p.kind, p.message, p.traceback] for p in host.problems if "lmkv-backend-example" not in p.message],
    "errors": errors,
}))
"""


def install(  # noqa: PLR0917
    folder: Path, distribution: str, version: str, module: str, source: str, entry: str = "thing"
) -> None:
    """Make a distribution that `importlib.metadata` finds once `folder` is on the path."""
    (folder / f"{module}.py").write_text(source)
    info = folder / f"{distribution.replace('-', '_')}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\n")
    (info / "entry_points.txt").write_text(f"[lmkv]\n{entry} = {module}\n")


def ask(folder: Path, *names: str) -> dict:
    """What a fresh process finds, and what asking for backends of these `names` raises."""
    path = os.pathsep.join([str(folder), str(Path(__file__).parents[1] / "src")])
    done = subprocess.run(
        [sys.executable, "-c", ASK, *names],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_core_offers_by_the_same_hooks(tmp_path: Path) -> None:
    assert {"identity", "zlib"} <= set(ask(tmp_path)["codecs"])


def test_plugin_is_found(tmp_path: Path) -> None:
    install(tmp_path, "lmkv-backend-one", "1.2", "lmkv_one_plugin", OFFER.format(name="one", more=""))
    assert ask(tmp_path)["backends"]["one"] == ["lmkv-backend-one", "1.2"]


def test_conflict_names_both_distributions(tmp_path: Path) -> None:
    install(tmp_path, "first-dist", "1.0", "plugin_a", OFFER.format(name="same", more=""), "same")
    install(tmp_path, "second-dist", "2.0", "plugin_b", OFFER.format(name="same", more=""), "same")
    install(tmp_path, "third-dist", "3.0", "plugin_c", OFFER.format(name="other", more=""), "same")
    found = ask(tmp_path, "same")
    assert found["backends"]["other"] == ["third-dist", "3.0"]
    assert "same" not in found["backends"]
    [(kind, message, _)] = found["problems"]
    assert kind == "conflict"
    assert "first-dist 1.0" in message
    assert "second-dist 2.0" in message
    assert found["errors"]["same"] == message


def test_two_distributions_with_one_module(tmp_path: Path) -> None:
    install(tmp_path, "first-dist", "1.0", "plugin_a", OFFER.format(name="same", more=""))
    install(tmp_path, "fork-dist", "1.1", "plugin_a", OFFER.format(name="same", more=""))
    [(kind, message, _)] = ask(tmp_path)["problems"]
    assert kind == "conflict"
    assert "first-dist 1.0" in message
    assert "fork-dist 1.1" in message


@pytest.mark.parametrize(
    "source", ["import no_such_module_anywhere", "raise RuntimeError('broken')", "import sys; sys.exit(3)", "x ="]
)
def test_broken_import_stops_nothing_else(tmp_path: Path, source: str) -> None:
    install(tmp_path, "lmkv-backend-bad", "0.9", "plugin_bad", source, "bad")
    install(tmp_path, "good-dist", "1.0", "plugin_good", OFFER.format(name="good", more=""))
    found = ask(tmp_path, "bad", "bda")
    assert "good" in found["backends"]
    [(kind, message, trace)] = found["problems"]
    assert kind == "import"
    assert "lmkv-backend-bad 0.9" in message
    assert "Traceback" in trace
    assert "Traceback" in found["errors"]["bad"]
    assert "lmkv-backend-bad 0.9" in found["errors"]["bad"]
    assert "Traceback" not in found["errors"]["bda"]


def test_broken_plugin_is_found_by_the_name_of_its_distribution(tmp_path: Path) -> None:
    install(tmp_path, "lmkv_backend_thing", "0.9", "plugin_bad", "1/0", "main")
    assert "ZeroDivisionError" in ask(tmp_path, "thing")["errors"]["thing"]


def test_unknown_api(tmp_path: Path) -> None:
    install(tmp_path, "from-the-future", "7.0", "plugin_new", OFFER.format(name="new", more=", api=99"))
    found = ask(tmp_path, "new")
    [(kind, message, _)] = found["problems"]
    assert kind == "api"
    assert "from-the-future 7.0" in message
    assert "99" in message
    assert "upgrade lmkv" in message
    assert found["errors"]["new"] == message


def test_misspelt_hook(tmp_path: Path) -> None:
    source = OFFER.format(name="one", more="") + "@hookimpl\ndef lmkv_backend():\n    return []\n"
    install(tmp_path, "typo-dist", "1.0", "plugin_typo", source)
    found = ask(tmp_path)
    assert "one" in found["backends"], "the plugin's other hooks work"
    [(kind, message, _)] = found["problems"]
    assert kind == "hook"
    assert "typo-dist 1.0" in message
    assert "'lmkv_backend' (did you mean 'lmkv_backends'?)" in message


def test_hook_without_the_marker(tmp_path: Path) -> None:
    install(tmp_path, "bare-dist", "1.0", "plugin_bare", OFFER.format(name="one", more="").replace("@hookimpl", ""))
    [(kind, message, _)] = ask(tmp_path)["problems"]
    assert kind == "hook"
    assert "not marked" in message


def test_unreadable_metadata(tmp_path: Path) -> None:
    install(tmp_path, "odd-dist", "1.0", "plugin_odd", "")
    (tmp_path / "odd_dist-1.0.dist-info" / "entry_points.txt").write_bytes(b"[lmkv]\nx = \xff\xfe\n")
    install(tmp_path, "good-dist", "1.0", "plugin_good", OFFER.format(name="good", more=""))
    found = ask(tmp_path)
    assert "good" in found["backends"]
    assert [problem[0] for problem in found["problems"]] == ["import"]


def plugin(**functions: object) -> types.SimpleNamespace:
    return types.SimpleNamespace(__name__="stranger", **{name: hookimpl(f) for name, f in functions.items()})


def problems(host: PluginHost) -> list[tuple[str, str]]:
    return [(problem.kind, problem.message) for problem in host.problems if "stranger" in problem.message]


@pytest.mark.parametrize(
    ("returned", "kind", "part"),
    [
        (None, "spec", "returned NoneType"),
        (["disk"], "spec", "offers a str"),
        (BackendSpec(name="x", summary="", options=None, load=None), "spec", "returned BackendSpec"),
        ([BackendSpec(name="Bad_Name", summary="", options=None, load=None)], "spec", "'Bad_Name'"),
        ([BackendSpec(name=None, summary="", options=None, load=None)], "spec", "None"),
        ([BackendSpec(name="old", summary="", options=None, load=None, api=0)], "api", "upgrade the plugin"),
        ([BackendSpec(name="odd", summary="", options=None, load=None, api="2")], "api", "upgrade the plugin"),
    ],
)
def test_what_hooks_return_is_checked(returned: object, kind: str, part: str) -> None:
    host = PluginHost.discover(extra=[plugin(lmkv_backends=lambda: returned)])
    [(found, message)] = problems(host)
    assert found == kind
    assert part in message


def test_hook_that_raises_or_asks_too_much() -> None:
    def broken() -> object:
        raise OSError("no")

    assert problems(PluginHost.discover(extra=[plugin(lmkv_backends=broken)]))[0][0] == "import"
    assert problems(PluginHost.discover(extra=[plugin(lmkv_backends=lambda config: [])]))[0][0] == "hook"


def test_failure_of_load_carries_the_traceback() -> None:
    def load() -> object:
        raise ImportError("libfoo.so is missing")

    spec = BackendSpec(name="lazy", summary="", options=load, load=load)
    host = PluginHost.discover(extra=[plugin(lmkv_backends=lambda: [spec])])
    assert problems(host) == []
    for ask_for in (host.load_backend, host.options_model):
        with pytest.raises(PluginError, match=r"libfoo\.so is missing") as caught:
            ask_for("lazy")
        assert "Traceback" in str(caught.value)


def test_unknown_names_get_the_nearest() -> None:
    host = PluginHost.discover()
    with pytest.raises(PluginError, match="did you mean 'leaf-first-lru'"):
        host.policy("leaf-frist-lru")
    with pytest.raises(PluginError, match=r"installed: .*identity"):
        host.codec("x")
    assert host.load_codec("identity").name == "identity"
    assert host.load_policy("lru") is not host.load_policy("lru")


def test_transports_enter_by_a_hook_as_everything_else(tmp_path: Path) -> None:
    install(tmp_path, "fast-dist", "1.0", "plugin_fast", TRANSPORT.format(name="fast", load="return int", more=""))
    found = ask(tmp_path, "fast", "tcp", "fats")
    assert found["transports"]["tcp"] == ["lmkv", 0]
    assert found["transports"]["fast"] == ["fast-dist", 5]
    assert "transport fast" not in found["errors"]
    assert "transport tcp" not in found["errors"]
    assert found["errors"]["transport fats"] == "no transport 'fats' (did you mean 'fast'?)"


def test_transports_that_are_claimed_twice_go_to_nobody(tmp_path: Path) -> None:
    install(tmp_path, "my-dist", "1.0", "plugin_mine", TRANSPORT.format(name="tcp", load="return int", more=""))
    found = ask(tmp_path, "tcp")
    assert "tcp" not in found["transports"]
    [(kind, message, _)] = found["problems"]
    assert kind == "conflict"
    assert "my-dist 1.0" in message
    assert "lmkv.peer.plugin" in message
    assert found["errors"]["transport tcp"] == message


@pytest.mark.parametrize(("load", "text"), [("1/0", "ZeroDivisionError"), ("import no_such_library", "Traceback")])
def test_a_transport_that_cannot_be_loaded_says_whose_it_is(tmp_path: Path, load: str, text: str) -> None:
    install(tmp_path, "bad-dist", "0.3", "plugin_bad", TRANSPORT.format(name="bad", load=load, more=""))
    found = ask(tmp_path, "bad")
    assert found["transports"]["bad"] == ["bad-dist", 5]
    assert "transport 'bad' of bad-dist 0.3 cannot be loaded" in found["errors"]["transport bad"]
    assert text in found["errors"]["transport bad"]


def test_a_transport_of_another_api(tmp_path: Path) -> None:
    install(tmp_path, "new-dist", "9", "plugin_new", TRANSPORT.format(name="new", load="return int", more=", api=99"))
    found = ask(tmp_path, "new")
    [(kind, message, _)] = found["problems"]
    assert kind == "api"
    assert "transport 'new' is written for plugin API 99" in message
    assert found["errors"]["transport new"] == message
