"""All that a node has to do with other nodes: its port, its links, its transfers. Started and closed by the service."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Final, Protocol, runtime_checkable

from lmkv.config.peer import parse_address, show_address
from lmkv.errors import ConfigError, LmkvError
from lmkv.peer.hall import Hall
from lmkv.peer.handshake import Identity, tls_contexts
from lmkv.peer.incoming import Incoming
from lmkv.peer.listener import Listener, bind
from lmkv.peer.outgoing import Outgoing
from lmkv.peer.pace import Pace
from lmkv.peer.peers import Peers
from lmkv.peer.transport import Transport, TransportContext
from lmkv.units import Share

if TYPE_CHECKING:
    import socket
    from collections.abc import Mapping

    from lmkv.config.peer import PeerConfig
    from lmkv.observe.metrics import Metrics
    from lmkv.peer.handshake import Contexts
    from lmkv.plugins import PluginHost
    from lmkv.storage.manager import StorageManager

log = logging.getLogger("lmkv.peer")

TIDY_SECONDS: Final = 0.25
CLOSE_SECONDS: Final = 5.0


@runtime_checkable
class PeerUser(Protocol):
    """A backend that reads from or writes to other nodes: told of the links once the node has them."""

    def meet(self, peers: Peers) -> None:
        """Use `peers`, which are closed before the backend is. Called on the storage loop; must not block.

        Raises:
            ConfigError: a peer that the backend's options name cannot be connected to: the node does not start.
        """


def wanted(config: PeerConfig, manager: StorageManager) -> bool:
    """Whether the configuration has anything to do with other nodes."""
    return config.listen is not None or any(isinstance(t.backend, PeerUser) for t in manager.stack.tiers)


class PeerNode:
    """Made by `start` on the storage loop.

    Attributes:
        address: `host:port` that others are told; empty without a port.
        identity: this node, as others see it.
        peers: links to other nodes.
        incoming: transfers to this node.
        outgoing: transfers from this node.
    """

    def __init__(
        self, manager: StorageManager, identity: Identity, hall: Hall, transports: Mapping[str, Transport], peers: Peers
    ) -> None:
        """For `start`."""
        self.address = ""
        self.identity = identity
        self.peers = peers
        self.incoming = hall.incoming
        self.outgoing = Outgoing(manager, peers, hall.incoming.seconds)
        self._hall = hall
        self._transports = transports
        self._listener: Listener | None = None
        self._manager = manager
        self._closing: asyncio.Task[None] | None = None
        self._view: memoryview | None = None
        """While it closes: keeps the pool mapped, whoever closes that."""
        self._keeper = asyncio.get_running_loop().create_task(self._keep_house())

    @classmethod
    async def start(
        cls, config: PeerConfig, manager: StorageManager, host: PluginHost, *, name: str, incarnation: int
    ) -> PeerNode:
        """Open the port, if there is to be one, and get ready to connect to others.

        Args:
            config: the section `peer`.
            manager: the storage; stays the caller's.
            host: where transports come from.
            name: of this node.
            incarnation: of the service.

        Raises:
            ConfigError: the address cannot be had, or is off loopback without a key; certificates cannot be used.
            PluginError: a transport that the configuration names cannot be loaded.
        """
        contexts = tls_contexts(config.tls)
        key = config.key.get_secret_value().encode()
        sock: socket.socket | None = None
        if config.listen is not None:
            where = parse_address(config.listen, least=0)
            sock = bind(*where, keyed=bool(key))
        try:
            identity = Identity(name, incarnation, key)
            node = await cls._assemble(config, manager, host, identity, contexts)
            if sock is not None:
                node._listen(config, sock, contexts)  # noqa: SLF001  of its own class
        except BaseException:
            if sock is not None:
                sock.close()
            raise
        try:
            for tier in manager.stack.tiers:
                if isinstance(tier.backend, PeerUser):
                    tier.backend.meet(node.peers)
        except BaseException:
            await node.close()
            raise
        return node

    @classmethod
    async def _assemble(
        cls, config: PeerConfig, manager: StorageManager, host: PluginHost, identity: Identity, contexts: Contexts
    ) -> PeerNode:
        ram = manager.stack.ram
        capacity = 0 if ram is None else ram.capacity or manager.pool.nbytes
        most = config.admission.of(capacity) if isinstance(config.admission, Share) else config.admission
        pace = Pace(config.share.percent / 100, config.bandwidth)
        incoming = Incoming(manager, most=most, seconds=config.transfer_seconds, waiting=config.waiting)
        hall = Hall(manager, incoming, pace, seconds=config.seconds)
        context = TransportContext(
            node=identity.node, incarnation=identity.incarnation, sockets=config.sockets, throttle=pace
        )
        made = await asyncio.to_thread(_transports, config, manager, host, hall, context)
        hall.transports = made
        ranked = sorted(made, key=lambda name: -host.transport(name).rank)
        peers = Peers(identity, made, ranked, tls=contexts.connecting, metrics=manager.metrics)
        return cls(manager, identity, hall, made, peers)

    def _listen(self, config: PeerConfig, sock: socket.socket, contexts: Contexts) -> None:
        self._listener = Listener(self._hall, self.identity, sock, contexts.listening)
        host, port = parse_address(config.listen or "", least=0)[0], self._listener.port
        self.address = config.advertise or show_address(host, port)
        tls = "TLS" if contexts.listening is not None else "no TLS"
        log.info("node %s listens for peers on %s:%d (%s)", self.identity.node, host, port, tls)

    @property
    def load(self) -> float:
        """See `Pace.load`."""
        return self._hall.pace.load

    async def _keep_house(self) -> None:
        while True:
            await asyncio.sleep(TIDY_SECONDS)
            try:
                self._hall.tidy()
            except Exception:  # one fault must not let everything later last for ever
                log.exception("housekeeping of peers failed", extra={"key": "peer-housekeeping"})

    async def close(self, deadline: float = CLOSE_SECONDS) -> None:
        """The port, then the links, then transfers and transports. Before the storage closes. Idempotent.

        Returns within `deadline` seconds. What has not ended by then goes on, and the pool stays mapped for it.
        """
        if self._closing is None:
            self._view = self._manager.pool.view
            self._closing = asyncio.get_running_loop().create_task(self._close())
        done, _ = await asyncio.wait([self._closing], timeout=deadline)
        if not done:
            log.warning("closed while something is still under way with other nodes; the pool stays mapped")

    async def _close(self) -> None:
        self._keeper.cancel()
        await asyncio.gather(self._keeper, return_exceptions=True)
        if self._listener is not None:
            await self._listener.close()
        self.outgoing.stop()
        await asyncio.to_thread(self.peers.close)
        await self.outgoing.close()
        await self._hall.close()
        for name, transport in self._transports.items():
            try:
                await asyncio.to_thread(transport.close)
            except Exception:  # a plugin's fault; the others still have to be closed
                log.exception("transport %s did not close", name)
        self._hall.end()
        self._view = None


def _moved(metrics: Metrics, transport: str, session: int, nbytes: int) -> None:
    """For the figures: what a transport says that peers have read and written here."""
    del session
    metrics.inc("lmkv_peer_moved_bytes_total", nbytes, transport=transport)


def _transports(
    config: PeerConfig, manager: StorageManager, host: PluginHost, hall: Hall, context: TransportContext
) -> dict[str, Transport]:
    """Those that are installed and work here, or those that the configuration names; always `tcp`. Blocks."""
    names = dict.fromkeys([*(config.transports or host.transports), "tcp"])
    made: dict[str, Transport] = {}
    try:
        for name in names:
            try:
                own = replace(context, served=partial(_moved, manager.metrics, name))
                made[name] = host.load_transport(name)(manager.pool, hall.grants, own)
            except LmkvError as e:
                if name in config.transports or name == "tcp":
                    raise ConfigError(f"peer.transports: {name!r} cannot be used here: {e}") from e
                log.info("transport %s cannot be used here: %s", name, e)
    except BaseException:
        for transport in made.values():
            with contextlib.suppress(Exception):
                transport.close()
        raise
    return made
