"""A node's storage together with the sessions of its clients."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lmkv.service.session import Session
from lmkv.storage.manager import StorageManager

if TYPE_CHECKING:
    from lmkv.config import Config
    from lmkv.observe.metrics import Metrics
    from lmkv.plugins import PluginHost


class NodeStorage:
    """A node's storage with the sessions of its clients: what a host (thread, child process, `lmkv serve`) serves.

    Attributes:
        config: what it was built from.
        manager: the storage itself.
    """

    def __init__(self, config: Config, manager: StorageManager) -> None:
        self.config = config
        self.manager = manager
        self.pool = manager.pool
        self.tiers = manager.tiers
        self.metrics = manager.metrics

    @classmethod
    async def start(cls, config: Config, host: PluginHost, metrics: Metrics) -> NodeStorage:
        """Start the storage of `config`; raises what `StorageManager.start` raises."""
        return cls(config, await StorageManager.start(config, host, metrics))

    def open_session(self, name: str) -> Session:
        """A client has come; the host closes its session when it has gone."""
        return Session(self.manager, name)

    async def close(self, deadline: float = 5.0) -> None:
        """Stop within `deadline` seconds. Idempotent."""
        await self.manager.close(deadline)
