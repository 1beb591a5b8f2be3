"""Requests that move between nodes, as one client sees them: it has them pushed, or waits for them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lmkv.errors import ConfigError
from lmkv.peer.messages import check_transfer
from lmkv.service import protocol as p
from lmkv.service.digests import split_digests

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from lmkv.peer.node import PeerNode


class Transfers:
    """Verbs of one session, on the storage loop. What the client has begun and not ended goes with it.

    Args:
        node: None where the configuration has nothing to do with other nodes.
    """

    def __init__(self, node: PeerNode | None) -> None:
        self._node = node
        self._sending: set[str] = set()
        """Of which more is to come from the client."""
        self._awaited: set[str] = set()
        self.verbs: dict[type[p.Message], Callable[..., p.Message | Awaitable[p.Message] | None]] = {
            p.Transfer: self._transfer,
            p.AwaitTransfer: self._await,
            p.EndTransfer: self._end,
            p.Unstored: self._unstored,
        }

    def close(self) -> None:
        """The client has gone: end what it will not end any more. Idempotent."""
        for name in [*self._sending, *self._awaited]:
            self._end(p.EndTransfer(name))
        if self._node is not None:
            self._node.outgoing.left(self)

    def _required(self) -> PeerNode:
        if self._node is None:
            raise ConfigError("this node has no peer port: set peer.listen in its stack file", kind="no-peer")
        return self._node

    def _transfer(self, message: p.Transfer) -> p.Ok:
        outgoing = self._required().outgoing
        digests = split_digests(message.digests)
        outgoing.send(
            message.transfer,
            message.peer,
            message.namespace,
            digests,
            max(0, message.tokens),
            final=message.final,
            owner=self,
        )
        (self._sending.discard if message.final else self._sending.add)(message.transfer)
        return p.Ok(len(digests))

    def _await(self, message: p.AwaitTransfer) -> Awaitable[p.TransferState]:
        node, name = self._required(), check_transfer(message.transfer)
        self._awaited.add(name)  # now: its end may be the next message
        return self._reached(node, name, message.seconds)

    @staticmethod
    async def _reached(node: PeerNode, name: str, seconds: float) -> p.TransferState:
        reached = await node.incoming.wait(name, seconds)
        return p.TransferState(reached.state, reached.tokens)

    def _unstored(self, message: p.Unstored) -> None:
        if self._node is not None:
            for digest in split_digests(message.digests):
                self._node.outgoing.unstored(message.namespace, message.shard, digest)

    def _end(self, message: p.EndTransfer) -> None:
        name, node = message.transfer, self._node
        if node is None:
            return
        if name in self._sending:
            self._sending.discard(name)
            node.outgoing.abort(name)
        if name in self._awaited:
            self._awaited.discard(name)
            node.incoming.finish(name, "aborted")
            node.incoming.let_go(name)
