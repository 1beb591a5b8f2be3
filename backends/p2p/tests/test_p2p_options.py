"""The options of a tier of other nodes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from fake_peers import make
from pydantic import SecretStr

from lmkv.config import load_config
from lmkv.errors import ConfigError
from lmkv.plugins import PluginHost
from lmkv.units import shown
from lmkv_backend_p2p.options import P2POptions

PAGE = Path(__file__).parents[3] / "docs" / "reference" / "backend-p2p.md"


def load(**options: Any) -> None:
    tier = {"name": "far", "backend": "p2p", "write": "never", "options": options}
    load_config({"tiers": [{"backend": "cpu", "capacity": "100%"}, tier]}, host=PluginHost.discover(), environ={})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "give either `peers` or `controller`"),
        ({"peers": []}, "give either `peers` or `controller`"),
        ({"peers": ["127.0.0.1:1"], "controller": "http://c:1"}, "give either `peers` or `controller`"),
        ({"peers": ["127.0.0.1"]}, "is not host:port"),
        ({"peers": ["127.0.0.1:70000"]}, "is not host:port"),
        ({"peers": ["::1:7000"]}, "in brackets"),
        ({"peers": ["127.0.0.1:1"], "token": "a-secret-of-mine"}, "none is given"),
        ({"controller": "ws://c:1"}, "no address of a controller"),
        ({"controller": "http://user:a-secret-of-mine@c:1"}, "no address of a controller"),
        ({"controller": "c:1"}, "no address of a controller"),
        ({"controller": "http://c:1", "split": "1MiB"}, "split"),
        ({"controller": "http://c:1", "rest": "0s"}, "rest"),
    ],
)
def test_mistakes_are_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as e:
        load(**options)
    assert "options" in str(e.value)
    assert "a-secret" not in str(e.value)


def test_right_ones() -> None:
    load(peers=["127.0.0.1:7000", "[::1]:7000", "gpu-1.example:7000"])
    load(controller="https://controller.example", token="t", below=False, remember="5m", rest="1s")


def test_a_ca_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"ca: .*nowhere\.pem"):
        make(None, controller="https://c:1", ca=str(tmp_path / "nowhere.pem"))


def test_the_page_has_every_option() -> None:
    text = PAGE.read_text(encoding="utf-8")
    table = text.partition("| option | default | meaning |\n| --- | --- | --- |\n")[2].partition("\n\n")[0]
    expected = []
    for name, field in P2POptions.model_fields.items():
        empty = field.default in (None, (), SecretStr(""))
        default = "none" if empty else f"`{shown(field.default, (*field.metadata, field.annotation))}`"
        expected.append(f"| `{name}` | {default} | {field.description} |")
    assert table.splitlines() == expected
