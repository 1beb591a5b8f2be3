"""The verb: options, file, mistakes, start and end."""

from __future__ import annotations

import re
import signal
import ssl
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import pytest
from server_rig import make_certificates

from lmkv.cli import run
from lmkv.errors import ConfigError
from lmkv.peer.ports import listen
from lmkv_backend_nixl_pd.proxy.metrics import Metrics
from lmkv_backend_nixl_pd.proxy.settings import Settings, read_settings

if TYPE_CHECKING:
    from front_rig import Site

PAGE = Path(__file__).parents[3] / "docs/reference/proxy.md"
PD = {"prefill": ["http://p:1"], "decode": ["http://d:1=node:2"]}


def test_options_and_file_have_one_meaning(tmp_path: Path) -> None:
    file = tmp_path / "proxy.yaml"
    (tmp_path / "key").write_text("0123456789abcdef\n")
    file.write_text(
        "prefill: [http://p:1, http://q:1/base]\n"
        "decode:\n  - http://d:1: node:2\n  - http://e:1=node:3\n"
        f"peer_key: {{file: {tmp_path / 'key'}}}\n"
        "listen: '[::1]:8000'\nsilence: 2m\nmax_body: 1MiB\n"
    )
    settings = read_settings({"silence": "3s", "prefill_tries": "4"}, str(file))
    assert settings.mode == "pd"
    assert settings.prefill == ("http://p:1", "http://q:1/base")
    assert settings.decode == (("http://d:1", "node:2"), ("http://e:1", "node:3"))
    assert settings.address == ("::1", 8000)
    assert (settings.silence, settings.max_body, settings.prefill_tries) == (3.0, 1 << 20, 4)
    assert settings.peer_key is not None
    assert settings.peer_key.get_secret_value() == "0123456789abcdef"
    assert "0123456789abcdef" not in repr(settings)
    aware = read_settings({"engine": ["http://a:1=n1"], "controller": "http://c:1"}, None)
    assert aware.mode == "cache-aware"
    assert aware.address == ("127.0.0.1", 17005)
    assert read_settings({**PD, "instance": "1", "port_base": "20000"}, None).address == ("127.0.0.1", 20261)


@pytest.mark.parametrize(
    ("given", "part"),
    [
        ({}, "give --prefill URL… and --decode"),
        ({"prefill": ["http://p:1"]}, "give --prefill URL… and --decode"),
        ({**PD, "engine": ["http://a:1=n"]}, "give one or the other"),
        ({"engine": ["http://a:1=n"]}, "--engine needs --controller"),
        ({**PD, "controller": "http://c:1"}, "--controller needs --engine"),
        ({**PD, "prefill": ["http://p:1", "http://p:1"]}, "--prefill http://p:1: given twice"),
        ({**PD, "prefill": ["p:1"]}, "--prefill: 'p:1' is no URL such as http"),
        ({**PD, "prefill": ["http://p:99999"]}, "--prefill: is no URL"),
        ({**PD, "prefill": ["http://user:geheim@p:1"]}, "--prefill: has a login"),
        ({**PD, "decode": ["http://d:1"]}, "--decode: 'http://d:1' is not URL=NAME"),
        ({**PD, "listen": "8000"}, "--listen: '8000' is not HOST:PORT"),
        ({**PD, "listen": "::1:8000"}, "in brackets"),
        ({**PD, "listen": "0.0.0.0:8000"}, "--keys-file FILE, or --keys-elsewhere"),
        ({**PD, "silence": "5"}, "--silence: '5' needs a unit"),
        ({**PD, "max_requests": "0"}, "--max-requests: Input should be greater"),
        ({**PD, "peer_tls_key": "k.pem"}, "--peer-tls-key go together"),
        ({**PD, "tls_key": "k.pem"}, "--tls-certificate and --tls-key go together"),
        ({**PD, "peer_key": {"file": "/no/such/file"}}, "--peer-key: cannot read /no/such/file"),
        ({**PD, "port_base": "70000"}, "port base 70000"),
    ],
)
def test_mistakes_name_the_option(given: dict[str, Any], part: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read_settings(given, None)
    assert part in str(caught.value)
    assert "geheim" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "part"),
    [
        (None, "proxy.yaml: No such file"),
        ("a: [1", "proxy.yaml: not valid YAML"),
        ("- a", "proxy.yaml: must be a mapping"),
        ("prefil: [x]\nsilence: 5\n", "2 faults:"),
        ("prefil: [x]\n", "proxy.yaml: prefil: there is no such option (did you mean 'prefill'?)"),
        ("!!python/object/apply:os.system ['true']", "proxy.yaml"),
    ],
)
def test_mistakes_in_the_file(tmp_path: Path, text: str | None, part: str) -> None:
    if text is not None:
        (tmp_path / "proxy.yaml").write_text(text)
    with pytest.raises(ConfigError) as caught:
        read_settings(PD, str(tmp_path / "proxy.yaml"))
    assert part in str(caught.value).replace(f"{tmp_path}/", "")


def test_a35_taken_port_of_the_proxy(capsys: pytest.CaptureFixture[str]) -> None:
    with listen("127.0.0.1", 0, "proxy") as sock:
        port = sock.getsockname()[1]
        options = ["--prefill", "http://p:1", "--decode", "http://d:1=127.0.0.1:2", "--listen", f"127.0.0.1:{port}"]
        assert run(["proxy", *options]) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"lmkv proxy: port {port} on 127.0.0.1 for role proxy (instance 0, DP rank 0, TP rank 0) is")


def test_peer_address_that_is_none(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--prefill", "http://p:1", "--decode", "http://d:1=node-one", "--listen", "127.0.0.1:0"]
    assert run(["proxy", *options]) == 2
    assert "'node-one' is not host:port" in capsys.readouterr().err


@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.slow)])
def test_serves_until_it_is_told_to_end(site: Site, number: signal.Signals) -> None:
    engine = site.engine("decode")
    command = [sys.executable, "-m", "lmkv", "proxy", "--listen", "127.0.0.1:0", "--prefill", engine.url]
    command += ["--decode", f"{engine.url}=127.0.0.1:9"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        url = process.stderr.readline().removeprefix("proxy: ").strip()
        answer = httpx.post(f"{url}/v1/completions", json={"model": "tiny", "prompt": "hello"}, timeout=30)
        assert answer.json()["system_fingerprint"] == "decode"
        process.send_signal(number)
        rest = process.stderr.read()
    assert process.returncode == 0
    assert "Traceback" not in rest


def test_tls_on_both_sides(site: Site, tmp_path: Path) -> None:
    made = make_certificates(tmp_path)
    certificate, key, ca = str(made.cert), str(made.key), str(made.ca)
    inner = site.engine("decode")
    front = site.proxy(prefill=(inner.url,), decode=((inner.url, "node:1"),), tls_certificate=certificate, tls_key=key)
    assert front.post(prompt="hello").json()["system_fingerprint"] == "decode"
    context = ssl.create_default_context(cafile=ca)
    assert httpx.get(f"{front.url}/health", verify=context).status_code == 200
    outer = site.proxy(prefill=(front.url,), decode=((front.url, "node:1"),), engine_ca=ca)
    assert outer.post(prompt="hello").json()["system_fingerprint"] == "decode"
    doubtful = site.proxy(prefill=(front.url,), decode=((front.url, "node:1"),))
    assert doubtful.post(prompt="hello").json()["error"]["code"] == "engine_unreachable"


def test_reference_page_names_every_option_and_metric() -> None:
    page = PAGE.read_text(encoding="utf-8")
    for name, field in Settings.model_fields.items():
        assert re.search(rf"^\| `{name}` \| .* \| {re.escape(field.description or '')} \|$", page, re.MULTILINE), name
    for family in Metrics().registry.collect():
        name = family.name + ("_total" if family.type == "counter" else "")
        assert f"| `{name}` |" in page, name
