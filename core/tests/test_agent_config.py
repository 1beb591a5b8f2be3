"""The sections `controller` and `events`: what is refused at the start, and with which words."""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

import pytest

from lmkv.agent.client import Node
from lmkv.agent.reports import Reports
from lmkv.config import load_config
from lmkv.config.schema import json_schema
from lmkv.errors import ConfigError
from lmkv.plugins import PluginHost
from lmkv.service.host import ThreadHost


@pytest.fixture(scope="module")
def host() -> PluginHost:
    return PluginHost.discover()


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("controller: {url: 'ws://10.0.0.1:7700'}", "controller.token: is required: ws://10.0.0.1:7700 is not on a"),
        ("controller: {url: ['ws://127.0.0.1:1', 'wss://ctl']}", "controller.token: is required: wss://ctl is not on"),
        ("controller: {url: 'http://127.0.0.1:1'}", "controller.url: is a URL such as ws://127.0.0.1:7700"),
        ("controller: {url: 'ws://127.0.0.1:99999'}", "controller.url: is a URL such as ws://127.0.0.1:7700"),
        ("controller: {url: [7]}", "controller.url: is a URL such as ws://127.0.0.1:7700"),
        ("controller: {url: 'ws://me:geheim@127.0.0.1:1'}", "has no user or password in it"),
        ("controller: {token: 'two words'}", "controller.token: is made of printable ASCII"),
        ("controller: {url: 'ws://127.0.0.1:1', ca: x.pem}", "controller.ca: has no use without a wss:// URL"),
        ("controller: {heartbeat: 5}", "controller.heartbeat: '5' needs a unit"),
        ("events: {publish: 'tcp://0.0.0.0:5557'}", "events.publish: 'tcp://0.0.0.0:5557' is not a loopback address"),
        ("events: {publish: 'tcp://*:5557'}", "name them in events.connect"),
        ("events: {publish: '127.0.0.1:5557'}", "events.publish: is tcp://address:port"),
        ("events: {publish: 'tcp://127.0.0.1:0'}", "events.publish: is tcp://address:port"),
        ("events: {connect: ['tcp://router:*']}", "events.connect: is tcp://address:port"),
        ("events: {replay: 'tcp://127.0.0.1:1'}", "events.replay: has no use without"),
        ("events: {publish: 'ipc://x', replay: 'tcp://10.0.0.1:1'}", "events.replay: 'tcp://10.0.0.1:1' is not a loop"),
    ],
)
def test_what_is_refused(host: PluginHost, text: str, fault: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(text + "\n", host=host, environ={})
    assert fault in str(caught.value)
    assert "geheim" not in str(caught.value)


def test_what_is_taken(host: PluginHost) -> None:
    config = load_config(
        """
        controller: {url: "ws://[::1]:7700/below", token: geheim-4711}
        events: {publish: "tcp://[::1]:*", connect: "tcp://router:5557", replay: "ipc:///tmp/x"}
        """,
        host=host,
        environ={"LMKV_CONTROLLER__HEARTBEAT": "1s"},
    )
    assert config.controller.url == ("ws://[::1]:7700/below",)
    assert (config.controller.heartbeat, config.events.connect) == (1.0, ("tcp://router:5557",))
    assert "4711" not in repr(config) + str(config.settings())
    schema = json.dumps(json_schema(host))
    assert "wss://host:port" in schema


@pytest.mark.parametrize(
    ("settings", "module", "extra"),
    [
        ("controller: {url: 'ws://127.0.0.1:1'}", "websockets.asyncio.client", "lmkv[agent]"),
        ("events: {publish: 'tcp://127.0.0.1:*'}", "zmq", "lmkv[events]"),
    ],
)
def test_a_missing_library_is_named(
    monkeypatch: pytest.MonkeyPatch, host: PluginHost, settings: str, module: str, extra: str
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    config = load_config(settings + "\n", host=host, environ={})

    async def start() -> None:
        from storage_rig import storage

        async with storage() as manager:
            await Reports.start(config, manager, Node(name="n", incarnation=1, backends=("cpu",)))

    with pytest.raises(ConfigError, match=f"pip install '{extra}'".replace("[", r"\[").replace("]", r"\]")):
        asyncio.run(start())


def test_a_service_publishes_and_says_where(host: PluginHost) -> None:
    def service(**events: Any) -> ThreadHost:
        source = {
            "pool": {"size": "8MiB", "prefault": False},
            "tiers": [{"name": "ram", "backend": "cpu", "capacity": "4MiB"}],
            "controller": {"url": "ws://127.0.0.1:1"},
            "events": events,
        }
        return ThreadHost(load_config(source, host=host, environ={}))

    one = service(publish="tcp://127.0.0.1:*")
    try:
        endpoint = one.storage._endpoints()["kv-events"]
        assert endpoint.startswith("tcp://127.0.0.1:")
        with pytest.raises(ConfigError, match=r"events\.publish: .* cannot be had"):
            service(publish=endpoint)
    finally:
        one.close()
    service(publish=endpoint).close()  # the port is free again
