"""The options of a tier of other nodes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from fake_peers import make

from lmkv.config import load_config
from lmkv.errors import ConfigError
from lmkv.plugins import PluginHost

if TYPE_CHECKING:
    from pathlib import Path


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
