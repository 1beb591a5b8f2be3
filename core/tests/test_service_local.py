"""The storage in a thread of this process."""

from __future__ import annotations

import urllib.request

import pytest
from engine_rig import config_text, namespace, thread_host

from lmkv.config import load_config
from lmkv.plugins import PluginHost
from lmkv.service import LocalClient, ThreadHost
from lmkv.service.protocol import Commit, Found, Lookup, NewFrame, Register, Reserve, Reserved


def test_what_a_client_said_before_it_closed_is_done(host: ThreadHost) -> None:
    space = namespace()
    watcher = LocalClient(host)
    watcher.call(Register(space.json())).result(5)
    for number in range(20):
        client = LocalClient(host, "short")
        digest = bytes([number]) * 32
        frame = NewFrame(digest, b"", space.chunk_pages, bytes([100 + number]) * 32 * (space.chunk_pages - 1))
        reserved = client.call(Reserve(space.id, 0, (frame,))).result(5)
        assert isinstance(reserved, Reserved)
        assert client.send(Commit(reserved.reservation))
        client.close()
        found = watcher.call(Lookup(space.id, digest, hold=False)).result(5)
        assert isinstance(found, Found)
        assert found.chunks == 1
    watcher.close()


def test_closing_the_host_closes_its_clients() -> None:
    host = thread_host()
    client = LocalClient(host)
    host.close()
    assert not client.connected
    host.close()


def test_the_metrics_page_is_served_wherever_the_storage_runs() -> None:
    text = config_text() + "metrics: {port: 0}\n"
    host = ThreadHost(load_config(text, host=PluginHost.discover(), environ={}))
    try:
        page = host.storage.page
        assert page is not None
        with urllib.request.urlopen(page.url, timeout=5) as answer:
            assert b"lmkv_pool_bytes" in answer.read()
    finally:
        host.close()
    with pytest.raises(OSError, match=r"refused"):
        urllib.request.urlopen(page.url, timeout=5)
