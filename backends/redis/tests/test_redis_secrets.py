"""Passwords appear nowhere, whatever goes wrong."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import pytest
from fake_engine import CHUNK, Node, stack, tokens
from redis_rig import RedisServer, has_tls

from lmkv.cli.__main__ import main
from lmkv.config import load_config
from lmkv.errors import BackendError, ConfigError
from lmkv.plugins import PluginHost
from lmkv.specs import BackendContext
from lmkv.testing import make_key, make_memory
from lmkv_backend_redis.backend import RedisBackend
from lmkv_backend_redis.options import RedisOptions

if TYPE_CHECKING:
    from pathlib import Path

    from conftest import Open

PASSWORD = "pass:w@rd/%#?&hunter22"
URL = f"rediss+sentinel://kv:{quote(PASSWORD, safe='')}@one.example:26379,two.example,[2001:db8::3]:7/service/5"


def clean(text: object) -> None:
    """No spelling of the password, and no piece of it."""
    for piece in (PASSWORD, quote(PASSWORD, safe=""), quote(PASSWORD), "hunter22", "w@rd", "w%40rd"):
        assert piece not in str(text)
        assert piece not in repr(text)


def test_a31_secrets_and_urls(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    """Three sentinels, TLS, a database, a password with @ and : in it; after every kind of failure."""
    caplog.set_level(logging.DEBUG)
    options = RedisOptions.model_validate({"url": URL})
    target = options.target
    assert target.addresses == (("one.example", 26379), ("two.example", 26379), ("2001:db8::3", 7))
    assert (target.kind, target.service, target.db, target.username) == ("sentinel", "service", 5, "kv")
    assert target.tls is not None
    assert target.password is not None
    assert target.password.get_secret_value() == PASSWORD
    assert "kv:**********@one.example" in repr(options)
    for shown in (options, target, options.model_dump(), options.model_dump_json(), options.url):
        clean(shown)

    with RedisServer(tmp_path / "redis", password="another one") as server:
        wrong = f"redis://:{quote(PASSWORD, safe='')}@127.0.0.1:{server.port}"
        with pytest.raises(ConfigError) as refused:
            RedisBackend(RedisOptions.model_validate({"url": wrong}), BackendContext(tier="far"))
        clean(refused.value)
        assert refused.value.__cause__ is None
        _check(tmp_path, {"url": wrong}, capsys)
        server.cli("CONFIG", "SET", "requirepass", PASSWORD)
        server.password = PASSWORD
        _serve(wrong)
        server.kill()
        _serve(wrong)
    clean(caplog.text)
    clean(capsys.readouterr())


def _check(folder: Path, options: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    """`lmkv check` names the tier, and what to do."""
    file = folder / "stack.yaml"
    file.write_text(f"pool: {{size: 64MiB}}\ntiers:\n  - {{name: far, backend: redis, options: {options}}}\n")
    with pytest.raises(SystemExit, match="1"):
        main(["check", str(file)])
    said = capsys.readouterr().out
    assert "far" in said
    assert "check username and password" in said
    clean(said)
    with pytest.raises(SystemExit, match="0"):
        main(["check", "--show", str(file)])
    said = capsys.readouterr().out
    assert "redis://:**********@127.0.0.1" in said
    clean(said)


def _serve(url: str) -> None:
    """A whole node: configuration, health, metrics; with the store up, or down."""
    config = load_config(
        {
            "chunk_tokens": CHUNK,
            "pool": {"size": 1 << 20, "prefault": False},
            "tiers": [{"name": "far", "backend": "redis", "options": {"url": url}}],
        },
        host=PluginHost.discover(),
        environ={},
    )
    clean([(setting.path, setting.value) for setting in config.settings()])
    node = Node(config)
    try:
        engine = node.engine()
        engine.store(tokens(3 * CHUNK))
        node.settle()
        engine.find(tokens(3 * CHUNK))
        node.settle()
        clean(node.on_loop(node.manager.health))
        clean(node.on_loop(node.manager.metrics.render))
    finally:
        node.close()


def test_no_secret_in_errors_of_any_call(tmp_path: Path, open_redis: Open) -> None:
    backend = open_redis(url=f"redis://:{quote(PASSWORD, safe='')}@127.0.0.1:1", deadline=1.0)
    clean(backend.health())
    for call in (
        lambda: backend.contains([make_key(1)]),
        lambda: backend.get([make_key(1)], [make_memory(100)]),
        lambda: backend.put([make_key(1)], [make_memory(100)]),
        lambda: backend.delete([make_key(1)]),
        backend.clear,
    ):
        with pytest.raises(BackendError) as caught:
            call()
        clean(caught.value)
        error: BaseException | None = caught.value
        while error is not None:
            clean(error)
            error = error.__cause__


def test_the_key_of_a_certificate(tmp_path: Path, open_redis: Open) -> None:
    if not has_tls():
        pytest.skip("this redis-server is built without TLS")
    with RedisServer(tmp_path / "redis", tls=True) as server:
        made = server.certificates
        assert made is not None
        tls = {"ca": made.ca, "cert": made.client_cert, "key": made.client_key, "key_password": PASSWORD}
        backend = open_redis(host="localhost", port=server.port, tls=tls)
        assert backend.put([make_key(1)], [make_memory(100)])[0].ok
        clean(repr(backend._options))


def test_a_fault_in_the_file_shows_no_password() -> None:
    for url in (f"redis://kv:{PASSWORD}@h", f"redis://kv:{quote(PASSWORD, safe='')}@h:port"):
        with pytest.raises(ConfigError) as caught:
            stack(tiers=[{"backend": "redis", "options": {"url": url}}])
        clean(caught.value)
        clean(caught.value.faults)
