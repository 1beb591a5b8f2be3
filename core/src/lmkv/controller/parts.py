"""What a running controller is made of."""

from __future__ import annotations

import os
import socket
from typing import TYPE_CHECKING

from lmkv.controller.auth import Tokens
from lmkv.controller.courier import Courier
from lmkv.controller.execution import Execution
from lmkv.controller.file_journal import FileJournal
from lmkv.controller.fleet import Fleet
from lmkv.controller.jobs import Jobs
from lmkv.controller.journal import Journal
from lmkv.controller.verbs import Planner
from lmkv.observe.clients import label_value
from lmkv.observe.metrics import Metrics

if TYPE_CHECKING:
    from lmkv.controller.directory import Directory
    from lmkv.controller.roster import Roster
    from lmkv.controller.settings import Settings


class Parts:
    """Everything of one controller; nothing runs before `start`.

    Attributes:
        settings: what it was built from.
        tokens: None: everybody may do everything.
        fleet: nodes and directory.
        jobs: what takes long.
        planner: makes jobs of requests.
        metrics: what is counted.

    Raises:
        ConfigError: a file of tokens that cannot be used.
    """

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.tokens = None if settings.tokens is None else Tokens(settings.tokens)
        self.metrics = Metrics({"instance": label_value(f"{socket.gethostname()}:{os.getpid()}")})
        directory, roster, journal = _kept(settings)
        self.fleet = Fleet(directory, roster)
        execution = Execution(self.fleet, Courier(self.fleet, settings.step_timeout))
        self.jobs = Jobs(journal, execution, self.metrics)
        self.planner = Planner(self.fleet)

    async def start(self) -> None:
        """Connect to what is shared, and go on with the jobs of an earlier life.

        Raises:
            ConfigError: the journal cannot be used.
            BackendError: the Redis of the directory does not answer.
        """
        await self.fleet.start()
        try:
            await self.jobs.start()
        except BaseException:
            await self.fleet.close()
            raise

    async def close(self) -> None:
        """Stop. Jobs stay as the journal has them. Idempotent."""
        await self.jobs.close()
        await self.fleet.close()


def _kept(settings: Settings) -> tuple[Directory, Roster, Journal]:
    """Where the directory, the nodes and the jobs are kept."""
    if settings.directory is not None:
        from lmkv.controller.redis_directory import RedisDirectory  # noqa: PLC0415  redis-py takes long
        from lmkv.controller.redis_journal import RedisJournal  # noqa: PLC0415
        from lmkv.controller.redis_roster import RedisRoster  # noqa: PLC0415

        url = settings.directory
        return RedisDirectory(url), RedisRoster(url, settings.node_timeout), RedisJournal(url)
    from lmkv.controller.memory_directory import MemoryDirectory  # noqa: PLC0415  numpy is for those who need it
    from lmkv.controller.roster import MemoryRoster  # noqa: PLC0415

    journal = Journal() if settings.journal is None else FileJournal(settings.journal)
    return MemoryDirectory(), MemoryRoster(settings.node_timeout), journal
