"""Who may do what at the controller, how much at once, and how long; and how it starts and ends."""

from __future__ import annotations

import hashlib
import logging
import os
import re
import signal
import socket
import ssl
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Any

import httpx
import pytest
from controller_process import ControllerProcess
from controller_rig import SECONDS, Controller, Nodes, namespace, until
from server_rig import free_port, make_certificates
from websockets.exceptions import InvalidStatus
from websockets.sync.client import connect

from lmkv.agent import messages as m
from lmkv.cli import run
from lmkv.controller.auth import Tokens
from lmkv.controller.settings import Settings, listen_address
from lmkv.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

SPACE = namespace()
READ, NODE, OPERATE = (f"{role}-token-0123456789" for role in ("read", "node", "operate"))
LOOKUP = {"model": "m", "tokens": [1, 2, 3, 4]}
BODIES = {
    "pin": LOOKUP,
    "unpin": LOOKUP,
    "clear": {"node": "*"},
    "move": {**LOOKUP, "source": {"node": "a"}, "target": {"node": "b", "tier": "ram"}},
    "copy": {**LOOKUP, "source": {"node": "a"}, "target": {"node": "b", "tier": "ram"}},
    "compress": {**LOOKUP, "node": "a", "tier": "disk", "codec": "zstd"},
    "decompress": {**LOOKUP, "node": "a", "tier": "disk"},
}


@pytest.fixture(autouse=True)
def _logs() -> Iterator[None]:
    """The command sets the log up for a process of its own."""
    loggers = [logging.getLogger(name) for name in ("lmkv", "uvicorn", "uvicorn.error")]
    before = [(each.handlers[:], each.filters[:], each.level, each.propagate) for each in loggers]
    yield
    for each, (handlers, filters, level, propagate) in zip(loggers, before, strict=True):
        each.handlers[:], each.filters[:], each.level, each.propagate = handlers, filters, level, propagate


def token_file(folder: Path, *more: str) -> Path:
    hashed = hashlib.sha256(OPERATE.encode()).hexdigest()
    path = folder / "tokens"
    lines = ["# name role token", "", f"watch read {READ}", f"fleet node {NODE}", f"ops operate sha256:{hashed}", *more]
    path.write_text("\n".join(lines) + "\n")
    return path


def bearer(token: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {token}"}


def test_roles(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with Controller(tokens=token_file(tmp_path)) as controller:
        ask = controller.client.request
        for headers in ({}, bearer("wrong-token-0123456789"), {"Authorization": f"Basic {READ}"}):
            for method, path in (("GET", "/metrics"), ("POST", "/v1/pin"), ("GET", "/v1/none")):
                answer = ask(method, path, headers=headers, json=LOOKUP)
                assert answer.status_code == 401, (path, headers)
                assert answer.headers["www-authenticate"] == "Bearer"
                assert answer.json()["error"]["kind"] == "token"
        assert ask("GET", "/v1/health").status_code == 200
        assert ask("GET", "/v1/openapi.json").status_code == 200
        for token in (READ, NODE, OPERATE):
            for path in ("/v1/nodes", "/v1/jobs", "/metrics"):
                assert ask("GET", path, headers=bearer(token)).status_code == 200
            assert ask("POST", "/v1/lookup", headers=bearer(token), json=LOOKUP).status_code == 404, "no such model"
            verbs = [ask("POST", f"/v1/{verb}", headers=bearer(token), json=body) for verb, body in BODIES.items()]
            verbs.append(ask("DELETE", "/v1/jobs/0123456789abcdef", headers=bearer(token)))
            wanted = {403} if token != OPERATE else {200, 202, 404}
            assert {answer.status_code for answer in verbs} <= wanted, token
        said = ask("POST", "/v1/clear", headers=bearer(READ), json={"node": "*"}).json()["error"]
        assert said["kind"] == "role"
        assert "'watch'" in said["message"]
        assert ask("POST", "/v1/clear", headers=bearer(OPERATE), json={"node": "*"}).json()["by"] == "ops"
    for secret in (READ, NODE, OPERATE):
        assert secret not in caplog.text


def test_agents_need_a_token_of_theirs(tmp_path: Path) -> None:
    with Controller(tokens=token_file(tmp_path)) as controller, Nodes() as nodes:
        url = controller.url.replace("http", "ws") + m.PATH
        for token, status in (("", 401), ("wrong-token-0123456789", 401), (READ, 403)):
            with pytest.raises(InvalidStatus) as refused, connect(url, additional_headers=bearer(token)):
                pass
            assert refused.value.response.status_code == status
        controller.client.headers.update(bearer(READ))
        nodes.start("a", controller, SPACE, token=NODE)
        nodes.start("b", controller, SPACE, token=OPERATE)


def test_tokens_are_compared_as_hashes_and_read_again(tmp_path: Path) -> None:
    path = token_file(tmp_path)
    tokens = Tokens(path)
    assert READ not in repr(vars(tokens))
    found = tokens.find(OPERATE)
    assert found is not None
    assert (found.name, found.role) == ("ops", "operate")
    assert tokens.find(f"sha256:{hashlib.sha256(OPERATE.encode()).hexdigest()}") is None, "a hash opens nothing"
    token_file(tmp_path, "new read another-token-0123456789")
    tokens.load()
    assert tokens.find("another-token-0123456789") is not None
    path.write_text("broken\n")
    with pytest.raises(ConfigError):
        tokens.load()
    assert tokens.find(READ) is not None, "what was there stays"


@pytest.mark.parametrize(
    ("lines", "says"),
    [
        (["a read"], "line 1: 2 words"),
        (["a read long-token-0123456789 x"], "line 1: 4 words"),
        (["a write long-token-0123456789"], "line 1: the second word is a role: read, node, operate"),
        (["# x", "a read tooshort"], "line 2: a token has 16 to 512"),
        (["a read sha256:abc"], "64 hexadecimal digits"),
        (["a read long-token-0123456789", "a node long-token-9876543210"], "line 2: the name 'a' is there twice"),
        (["a read long-token-0123456789", "b node long-token-0123456789"], "line 2: the same token"),
        (["a/b read long-token-0123456789"], "line 1: a name is"),
        (["", "# nothing"], "there is no token in it"),
    ],
)
def test_a_bad_file_of_tokens_is_told_by_line_and_without_tokens(lines: list[str], says: str, tmp_path: Path) -> None:
    path = tmp_path / "tokens"
    path.write_text("\n".join(lines))
    with pytest.raises(ConfigError, match=re.escape(says)) as told:
        Tokens(path)
    assert "long-token" not in str(told.value)
    assert "tooshort" not in str(told.value)


def raw(controller: Controller, request: bytes, *, seconds: float = SECONDS) -> bytes:
    """What the server says to these bytes until it hangs up."""
    with socket.create_connection(("127.0.0.1", controller.server.port), seconds) as link:
        link.sendall(request)
        said = b""
        while part := link.recv(65536):
            said += part
        return said


def test_bodies_are_limited_before_they_are_read() -> None:
    with Controller(max_body=1000) as controller:
        announced = raw(controller, b"POST /v1/pin HTTP/1.1\r\nHost: x\r\nContent-Length: 1001\r\n\r\n")
        assert announced.startswith(b"HTTP/1.1 413"), "nothing of it was sent"
        assert b'"too-large"' in announced
        huge = raw(controller, b"POST /v1/pin HTTP/1.1\r\nHost: x\r\nContent-Length: 9" + b"9" * 30 + b"\r\n\r\n")
        assert huge.startswith((b"HTTP/1.1 413", b"HTTP/1.1 400"))
        chunked = b"POST /v1/pin HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
        assert raw(controller, chunked + b"200\r\n" + b"x" * 512 + b"\r\n200\r\n" + b"x" * 512 + b"\r\n").startswith(
            b"HTTP/1.1 413"
        ), "without an end, and without a length"
        assert controller.post("lookup", LOOKUP, status=404)["error"]["kind"] == "unknown-model"


def test_whoever_sends_slowly_is_hung_up_on() -> None:
    with Controller(request_timeout=0.3) as controller:
        assert raw(controller, b"") == b""
        assert raw(controller, b"POST /v1/pin HTTP/1.1\r\nHost: x\r\n") == b"", "half a head"
        late = raw(controller, b"POST /v1/pin HTTP/1.1\r\nHost: x\r\nContent-Length: 10\r\n\r\n{")
        assert late.startswith(b"HTTP/1.1 408"), "half a body"
        with socket.create_connection(("127.0.0.1", controller.server.port), SECONDS) as link:
            link.sendall(b"GET /v1/health HTTP/1.1\r\nHost: x\r\n\r\n")
            until(lambda: b'"version"' in link.recv(65536, socket.MSG_PEEK), "answered")
            link.sendall(b"GET /v1/h")
            while link.recv(65536):
                pass
        with connect(controller.url.replace("http", "ws") + m.PATH) as silent:
            assert until(lambda: silent.close_code is not None or _closed(silent), "the agent that says nothing")


def _closed(link: Any) -> bool:
    from websockets.exceptions import ConnectionClosed

    try:
        link.recv(0.1)
    except TimeoutError:
        return False
    except ConnectionClosed:
        return True
    return False


def test_a_wrong_body_is_told_without_quoting_it() -> None:
    with Controller() as controller:
        for body in (
            {"model": "m", "tokens": [1, "my secret prompt"]},
            {"model": "m", "tokens": [1, -5318008]},
            {"model": "m", "tokens": [1 << 32]},
            {"model": "m", "tokens": [1.5]},
            {"model": "m", "tokens": []},
            {"model": "m", "tokens": [1], "digests": ["00" * 32]},
            {"model": "m", "digests": ["my secret prompt"]},
            {"tokens": [1]},
            {"model": "m"},
            {"model": "m", "tokens": [1], "my secret prompt": 1, "salt": 5318008},
            ["my secret prompt"],
        ):
            answer = controller.client.post("/v1/lookup", json=body)
            assert answer.status_code == 422, body
            assert "5318008" not in answer.text
            assert answer.json()["error"]["kind"] == "body"
        hostile = (
            b'{"my secret prompt',
            b"[" * 100_000,
            b'{"model":"m","tokens":[' + b"9" * 100_000 + b"]}",
            b"\x80\x04secret.",
        )
        for content in hostile:
            answer = controller.client.post("/v1/lookup", content=content, headers={"content-type": "application/json"})
            assert answer.status_code == 422
            assert "secret" not in answer.text
        as_text = controller.client.post("/v1/clear", content=b'{"node": "*"}', headers={"content-type": "text/plain"})
        assert as_text.status_code == 422, "as a page of a browser may send it without asking"
        page = controller.client.post("/v1/clear", json={"node": "*"}, headers={"origin": "https://example.org"})
        assert (page.status_code, page.json()["error"]["kind"]) == (403, "origin")
        assert controller.get("/v1/nothing", status=404)["error"]["kind"] == "unknown-path"
        assert controller.client.get("/v1/pin").status_code == 405
        misspelt = controller.get("/v1/jobs", params={"limits": 3}, status=422)["error"]
        assert misspelt["message"].endswith("parameters: limit")


def test_no_prompt_is_logged_or_kept(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("DEBUG")
    tokens = [70_001 + i for i in range(8)]
    journal = tmp_path / "jobs"
    with Controller(journal=journal) as controller, Nodes() as nodes:
        nodes.start("a", controller, SPACE)
        body = {"model": "m", "tokens": tokens, "salt": "tenant-of-mine"}
        controller.post("lookup", body)
        assert controller.post("pin", {**body, "node": "a"})["state"] == "failed"
        kept = journal.read_text() + caplog.text + repr(controller.server.parts.jobs._jobs)
    assert '"pin"' in kept
    assert "70001" not in kept
    assert "tenant-of-mine" not in kept


def test_tls_and_certificates_of_clients(tmp_path: Path) -> None:
    made = make_certificates(tmp_path / "tls")
    trusting = ssl.create_default_context(cafile=str(made.ca))
    with Controller(certificate=made.cert, private_key=made.key, verify=trusting) as controller:
        assert controller.url.startswith("https://")
        assert controller.get("/v1/health")["state"] == "ok"
        with pytest.raises(httpx.TransportError):
            httpx.get(controller.url.replace("https", "http") + "/v1/health")
    with Controller(certificate=made.cert, private_key=made.key, client_ca=made.ca, verify=trusting) as controller:
        with pytest.raises(httpx.TransportError):
            controller.client.get("/v1/health")
        trusting.load_cert_chain(made.client_cert, made.client_key)
        with httpx.Client(base_url=controller.url, verify=trusting) as client:
            assert client.get("/v1/health").status_code == 200


def test_settings_that_do_not_fit(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    for settings, says in (
        ({"host": "0.0.0.0"}, "not a loopback address, and there are no tokens: give --tokens"),
        ({"host": "10.1.2.3"}, "--listen 10.1.2.3"),
        ({"certificate": file}, "go together"),
        ({"client_ca": file}, "needs --tls-certificate"),
        ({"certificate": file, "private_key": tmp_path / "none"}, "--tls-key"),
        ({"directory": "http://x"}, "--directory"),
        ({"directory": "redis://x", "journal": file}, "--journal"),
    ):
        with pytest.raises(ConfigError, match=re.escape(says)):
            Settings(**settings)  # type: ignore[arg-type]
    assert listen_address("[::1]:80") == ("::1", 80)
    assert listen_address(":80") == ("127.0.0.1", 80)
    assert listen_address("0.0.0.0:1") == ("0.0.0.0", 1)
    assert listen_address("localhost")[0] == "127.0.0.1"
    for text in ("x:y", "x:70000", "[::1]x", "::1:x"):
        with pytest.raises(ConfigError):
            listen_address(text)


def test_a35_a_taken_port_is_told_with_its_role(capsys: pytest.CaptureFixture[str]) -> None:
    with Controller() as controller:
        assert run(["controller", "--listen", f"127.0.0.1:{controller.server.port}"]) == 2
    said = capsys.readouterr().err
    assert f"port {controller.server.port}" in said
    assert "controller" in said
    assert "taken" in said


def test_mistakes_on_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, says in (
        (["--listen", "0.0.0.0:1"], "--tokens"),
        (["--tokens", str(tmp_path / "none")], "cannot be read"),
        (["--node-timeout", "5"], "--node-timeout: '5' needs a unit"),
        (["--max-body", "x"], "--max-body"),
        (["--journal", "/proc/x/y", "--listen", "127.0.0.1:0"], "--journal /proc/x/y: cannot be opened"),
        (["--directory", f"redis://u:secret@127.0.0.1:{free_port()}", "--listen", "127.0.0.1:0"], "Redis"),
    ):
        assert run(["controller", *arguments]) == 2
        said = capsys.readouterr().err
        assert says in said
        assert "Traceback" not in said
        assert "secret" not in said


def test_without_the_extra_it_says_what_to_install(tmp_path: Path) -> None:
    (tmp_path / "fastapi").mkdir()
    (tmp_path / "fastapi" / "__init__.py").write_text("raise ModuleNotFoundError('gone', name='fastapi')")
    done = subprocess.run(
        [sys.executable, "-m", "lmkv", "controller"],
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 2
    assert done.stderr.strip().endswith('pip install "lmkv[controller]"')
    assert "Traceback" not in done.stderr


def test_a_process_reads_tokens_again_and_ends_cleanly(tmp_path: Path) -> None:
    tokens = token_file(tmp_path)
    with ControllerProcess(tmp_path / "run", "--tokens", tokens, "--journal", tmp_path / "jobs") as controller:
        new = "another-token-0123456789"
        assert controller.client.get("/v1/nodes", headers=bearer(new)).status_code == 401
        token_file(tmp_path, f"new read {new}")
        os.kill(controller.pid, signal.SIGHUP)
        until(lambda: controller.client.get("/v1/nodes", headers=bearer(new)).status_code == 200, "read again")
        tokens.write_text("broken\n")
        os.kill(controller.pid, signal.SIGHUP)
        until(lambda: "the tokens stay as they were" in controller.log, "and what is wrong with it is logged")
        assert controller.client.get("/v1/nodes", headers=bearer(new)).status_code == 200
        second = run(["controller", "--listen", "127.0.0.1:0", "--journal", str(tmp_path / "jobs")])
        assert second == 2, "the journal is the other one's"
        process = controller._process
        assert process is not None
        begun = time.monotonic()
        process.send_signal(signal.SIGTERM)
        assert process.wait(SECONDS) == 0
        assert time.monotonic() - begun < 10
        assert "closed" in controller.log
        assert new not in controller.log
        assert "Traceback" not in controller.log
