"""A node's storage together with the sessions of its clients."""

from __future__ import annotations

import asyncio
import os
import secrets
import socket
import time
from typing import TYPE_CHECKING

from lmkv.agent.client import Node
from lmkv.agent.reports import Reports
from lmkv.observe.clients import NOBODY, Clients
from lmkv.peer.node import PeerNode, wanted
from lmkv.service.session import Session
from lmkv.storage.manager import StorageManager

if TYPE_CHECKING:
    from lmkv.config import Config
    from lmkv.observe.clients import Who
    from lmkv.observe.http import MetricsServer
    from lmkv.observe.metrics import Metrics
    from lmkv.plugins import PluginHost


class NodeStorage:
    """A node's storage with the sessions of its clients: what a host (thread, child process, `lmkv serve`) serves.

    Attributes:
        config: what it was built from.
        manager: the storage itself.
        page: the Prometheus page, if the configuration wants one.
        asks: a look-up may have to ask stores that others share.
        peer: what it has to do with other nodes, if the configuration wants that.
        name: of this node among others.
        incarnation: a number that no other start of a service has, told to clients, peers and the controller.
    """

    def __init__(self, config: Config, manager: StorageManager, page: MetricsServer | None = None) -> None:
        self.page = page
        self.incarnation = secrets.randbits(62) + 1
        self.config = config
        self.manager = manager
        self.pool = manager.pool
        self.tiers = manager.tiers
        self.asks = any(tier.shared for tier in manager.stack.tiers)
        self.metrics = manager.metrics
        self._clients = Clients(manager.metrics)
        self.name = config.peer.node or f"{socket.gethostname()}:{os.getpid()}"
        self.peer: PeerNode | None = None
        self._reports: Reports | None = None

    @classmethod
    async def start(cls, config: Config, host: PluginHost, metrics: Metrics) -> NodeStorage:
        """Start the storage of `config`, and its metrics page where it wants one.

        Raises:
            ConfigError: the page's address cannot be had.
            LmkvError: what `StorageManager.start` raises.
        """
        page: MetricsServer | None = None
        if config.metrics.port is not None:
            from lmkv.observe.http import serve_metrics  # noqa: PLC0415  only where a page is wanted

            page = serve_metrics(metrics, config.metrics.host, config.metrics.port)
        try:
            storage = cls(config, await StorageManager.start(config, host, metrics), page)
        except BaseException:
            if page is not None:
                page.close()
            raise
        try:
            if wanted(config.peer, storage.manager) or config.controller.url:
                storage.peer = await PeerNode.start(
                    config.peer, storage.manager, host, name=storage.name, incarnation=storage.incarnation
                )
            peers = None if storage.peer is None else storage.peer.peers
            storage._reports = await Reports.start(config, storage.manager, storage._facts(host), peers)
        except BaseException:
            await storage.close(1.0)
            raise
        return storage

    def _facts(self, host: PluginHost) -> Node:
        """What the controller is told of this node."""
        backends = tuple(tier.backend for tier in self.config.tiers)
        return Node(
            name=self.name,
            incarnation=self.incarnation,
            backends=backends,
            codecs=tuple(sorted(host.codecs)),
            endpoints=self._endpoints,
            load=lambda: 0.0 if self.peer is None else self.peer.load,
        )

    def _endpoints(self) -> dict[str, str]:
        found = {} if self.page is None else {"metrics": self.page.url}
        if self.peer is not None and self.peer.address:
            found["peer"] = self.peer.address
        publisher = None if self._reports is None else self._reports.publisher
        if publisher is not None and publisher.endpoints:
            found["kv-events"] = publisher.endpoints[0]
        return found

    def open_session(self, name: str, who: Who = NOBODY) -> Session:
        """A client has come, who counts as `who`; the host closes its session when it has gone."""
        return Session(self.manager, name, self._clients.open(who), self.peer)

    async def close(self, deadline: float = 5.0) -> None:
        """Stop within `deadline` seconds. Idempotent."""
        until = time.monotonic() + deadline
        page, self.page = self.page, None
        if page is not None:
            await asyncio.to_thread(page.close)
        if self._reports is not None:
            await self._reports.close(deadline / 4)
        if self.peer is not None:
            await self.peer.close(deadline / 2)
        await self.manager.close(max(0.1, until - time.monotonic()))
