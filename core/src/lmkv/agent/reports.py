"""Everything that a node tells of its tiers, and to whom. Started and closed by the service."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from lmkv.agent.tap import Tap
from lmkv.errors import ConfigError

if TYPE_CHECKING:
    from lmkv.agent.client import Agent, Node
    from lmkv.agent.kv_events import Publisher
    from lmkv.config import Config
    from lmkv.peer.peers import Peers
    from lmkv.storage.manager import StorageManager


class Reports:
    """Made by `start` on the storage loop.

    Attributes:
        agent: the connection to the controller, if there is one.
        publisher: of KV events, if there is one.
    """

    def __init__(self) -> None:
        """For `start`."""
        self.agent: Agent | None = None
        self.publisher: Publisher | None = None

    @classmethod
    async def start(cls, config: Config, manager: StorageManager, node: Node, peers: Peers | None = None) -> Reports:
        """Tell whom the configuration names; with nobody named nothing is started and nothing is noted.

        Args:
            config: the sections `controller` and `events`.
            manager: of the storage that is told of.
            node: what the controller is told of the node.
            peers: links that chunks are fetched over, if the node has any.

        Raises:
            ConfigError: an address cannot be had, or a library is missing.
        """
        reports = cls()
        if not config.controller.url and not config.events.on:
            return reports
        tap = Tap(manager)
        try:
            if config.events.on:
                reports._publish(config, manager, tap)
            if config.controller.url:
                reports._register(config, manager, tap, node, peers)
        except BaseException:
            await reports.close()
            raise
        return reports

    async def close(self, deadline: float = 1.0) -> None:
        """Take leave of all, in about `deadline` seconds at most. Before the storage closes. Idempotent."""
        closing = [each.close(deadline) for each in (self.agent, self.publisher) if each is not None]
        self.agent = self.publisher = None
        await asyncio.gather(*closing)

    def _publish(self, config: Config, manager: StorageManager, tap: Tap) -> None:
        from lmkv.agent.kv_events import Publisher  # noqa: PLC0415  only where events are published

        self.publisher = Publisher(manager, tap, config.events)
        self.publisher.start()

    def _register(self, config: Config, manager: StorageManager, tap: Tap, node: Node, peers: Peers | None) -> None:
        try:
            import websockets.asyncio.client  # noqa: F401, PLC0415  now: it would keep the loop for some time
        except ImportError as e:
            raise ConfigError("controller: talking to it needs websockets: pip install 'lmkv[agent]'") from e
        from lmkv.agent.client import Agent  # noqa: PLC0415
        from lmkv.agent.commands import Commands  # noqa: PLC0415
        from lmkv.agent.jobs import Jobs  # noqa: PLC0415

        jobs = Jobs(Commands(manager, peers), manager.metrics)
        self.agent = Agent(manager, tap, config.controller, node, jobs)
        self.agent.start()
