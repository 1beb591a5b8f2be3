"""Room for a whole request at a decode node, before its prompt is computed anywhere."""

from __future__ import annotations

import asyncio
import logging
import time
from typing import TYPE_CHECKING, Final, Protocol

from lmkv.errors import LmkvError
from lmkv.peer.messages import Admit, Admitted, Finish, NoRoom

if TYPE_CHECKING:
    from lmkv.peer.messages import Reply, Request
    from lmkv.peer.peers import Peers
    from lmkv_backend_nixl_pd.proxy.pool import Engine, Pool

logger = logging.getLogger(__name__)

TELLING: Final = frozenset(("too-large", "no-namespace"))
"""Kinds of refusals that are worth a word of their own."""


class Ask(Protocol):
    """Asks a node's peer port; raises `LmkvError` where there is no answer, or a refusal."""

    async def __call__(self, address: str, request: Request, /) -> Reply:
        """The answer."""


class PeerPorts:
    """`Ask` over the links of `Peers`, which have a loop of their own."""

    def __init__(self, peers: Peers, seconds: float) -> None:
        self._peers = peers
        self._seconds = seconds

    async def __call__(self, address: str, request: Request, /) -> Reply:
        """Ask over the link to `address`."""
        until = time.monotonic() + self._seconds
        return await asyncio.wrap_future(self._peers.submit(self._peers.link(address).ask(request, until)))


class Admission:
    """Finds room.

    Args:
        ask: asks a node.
        decode: the engines; `name` is their node's peer port.
        wait: seconds that a request waits for room at most.
        most: requests that wait at most.
    """

    def __init__(self, ask: Ask, decode: Pool, *, wait: float, most: int) -> None:
        self._ask = ask
        self._decode = decode
        self._wait = wait
        self._places = most
        self._tasks: set[asyncio.Task[None]] = set()

    async def place(self, transfer: str, tokens: int, model: str) -> Engine | str:
        """The decode engine whose node has set room aside, the least busy ones asked first.

        When none has room it waits as long as they say and asks again; it keeps its place in their queues meanwhile.

        Returns:
            The engine, or one word for why there is none: `no-room` (not within the time), `too-large` (never),
            `queue-full`, `no-namespace` (no engine of that model is there), `unreachable`.
        """
        end = time.monotonic() + self._wait
        waits: set[Engine] = set()
        try:
            while True:
                engine, retry, why = await self._once(transfer, tokens, model, waits)
                if engine is not None:
                    waits.discard(engine)
                    return engine
                if retry is None:
                    return why
                if time.monotonic() + retry > end:
                    return "no-room"
                if self._places <= 0:
                    return "queue-full"
                self._places -= 1
                try:
                    await asyncio.sleep(retry)
                finally:
                    self._places += 1
        finally:
            for other in waits:  # their queues need not keep a place for it
                self.finish(other, transfer, "aborted")

    async def _once(
        self, transfer: str, tokens: int, model: str, waits: set[Engine]
    ) -> tuple[Engine | None, float | None, str]:
        """Ask all: who has room; else after how many seconds to ask again, None if that is of no use, and why."""
        retry: float | None = None
        why = "unreachable"
        for engine in self._decode.ranked():
            waits.add(engine)
            try:
                with engine.use():  # requests that come meanwhile ask another one first
                    reply = await self._ask(engine.name, Admit(transfer=transfer, tokens=tokens, model=model))
            except LmkvError as error:
                logger.warning("admission at %s: %s", engine.name, error)
                why = error.kind if error.kind in TELLING else why
                continue
            if isinstance(reply, Admitted):
                return engine, None, ""
            if isinstance(reply, NoRoom):
                retry = reply.retry_after if retry is None else min(retry, reply.retry_after)
        return None, retry, why

    def finish(self, engine: Engine, transfer: str, state: str) -> None:
        """Tell its node, in the background, that the transfer has ended: what was set aside is free again."""
        task = asyncio.get_running_loop().create_task(self._tell(engine, transfer, state))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def settle(self, seconds: float) -> None:
        """Wait, at most so long, until what `finish` began is done."""
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=seconds)

    async def _tell(self, engine: Engine, transfer: str, state: str) -> None:
        try:
            await self._ask(engine.name, Finish(transfer=transfer, state=state))
        except LmkvError as error:  # it ends by its expiry there
            logger.debug("finish at %s: %s", engine.name, error)
