"""The connections to a store, whatever it is: one server, what sentinels point to, or the nodes of a cluster.

redis-py finds the server, connects, speaks TLS and logs in. A connection is then kept here as a `RawChannel` on its
socket, for one call at a time; after any error it is dropped together with all idle ones, for what answered wrongly on
one of them is likely to be gone for all.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import redis
from redis.backoff import NoBackoff
from redis.cluster import ClusterNode, RedisCluster
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import ResponseError
from redis.exceptions import TimeoutError as RedisTimeoutError
from redis.retry import Retry
from redis.sentinel import MasterNotFoundError, Sentinel

from lmkv.errors import BackendError, ClosedError
from lmkv_backend_redis.channel import PlainChannel, RawChannel, ReplyError
from lmkv_backend_redis.failures import ERRORS, Failures

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from lmkv_backend_redis.options import RedisOptions, Target, TLSOptions

Client: TypeAlias = Any
"""A `redis.Redis` or a `RedisCluster`."""
AnyChannel: TypeAlias = "RawChannel | PlainChannel"
KEEPALIVE: Final = True
SOCKET: Final = "_sock"
"""Of redis-py's connections; not public: where there is none, the bytes go through redis-py."""


class Node:
    """One server that takes commands, and the connections to it. Thread-safe."""

    def __init__(self, client: Client) -> None:
        self.client = client
        self._idle: list[RawChannel] = []
        self._busy: set[RawChannel] = set()
        self._lock = threading.Lock()
        self._closed = self._retired = False

    def take(self, until: float) -> AnyChannel:
        """A channel for one exchange that ends by `until`; `give` it back after it."""
        with self._lock:
            while self._idle:
                channel = self._idle.pop()
                if channel.clean:
                    self._busy.add(channel)
                    channel.until = until
                    return channel
                channel.close()
        made = self._connect()
        if isinstance(made, RawChannel):
            made.until = until
            with self._lock:
                if self._closed:
                    made.close()
                    raise ClosedError("the store was closed")
                self._busy.add(made)
        return made

    def give(self, channel: AnyChannel, *, ok: bool) -> None:
        """The exchange has ended; `ok`: as it should."""
        if isinstance(channel, PlainChannel):
            return
        with self._lock:
            self._busy.discard(channel)
            if ok and channel.clean and not self._retired:
                self._idle.append(channel)
                return
        channel.close()

    def drop(self) -> None:
        """Close what is idle."""
        with self._lock:
            idle, self._idle = self._idle, []
        for channel in idle:
            channel.close()

    def retire(self) -> None:
        """Close what is idle now, and the rest when it is given back."""
        self._retired = True
        self.drop()

    def close(self) -> None:
        """Close what is idle, and end the exchanges under way with an error. Idempotent."""
        with self._lock:
            self._closed = self._retired = True
            for channel in self._busy:
                channel.interrupt()
        self.drop()

    def _connect(self) -> AnyChannel:
        pool = self.client.connection_pool
        connection = pool.connection_class(**pool.connection_kwargs)
        try:
            connection.connect()
            sock = getattr(connection, SOCKET, None)
        except BaseException:
            connection.disconnect()
            raise
        if isinstance(sock, socket.socket):
            return RawChannel(sock, connection.disconnect)
        connection.disconnect()
        return PlainChannel(_in_a_pipeline(self.client))


class Store:
    """All nodes of a store. Thread-safe; connects when it is first used.

    Args:
        options: where it is.
        deadline: seconds that any call may take.
    """

    def __init__(self, options: RedisOptions, deadline: float) -> None:
        self.target: Target = options.target
        self.failures = Failures(self.target, options)
        self._options = options
        self._deadline = deadline
        self._timeout = min(options.connect_timeout, deadline)
        if self.target.kind == "cluster":  # the first nodes may be dead, and all but the last
            self._timeout /= len(self.target.addresses)
        self._lock = threading.Lock()
        self._making = threading.Lock()
        self._client: Client = None
        self._nodes: dict[object, Node] = {}
        self._closed = False

    def client(self) -> Client:
        """redis-py's client, for small commands. Connecting and each command are bounded by `connect_timeout`."""
        with self._lock:
            known = self._known()
        if known is not None:
            return known
        with self._making:
            with self._lock:
                known = self._known()
            if known is not None:
                return known
            made = self._make()  # a cluster is asked for its nodes: nobody who closes may have to wait for that
            with self._lock:
                self._client = made
            self.sweep()
            with self._lock:
                return self._known()

    def split(self, names: Sequence[bytes]) -> list[tuple[Node, list[int]]]:
        """The nodes that keep these keys, each with the indices of its keys."""
        client = self.client()
        if self.target.kind != "cluster":
            return [(self._node(None, client), list(range(len(names))))]
        parts: dict[object, list[int]] = {}
        found: dict[object, Client] = {}
        for index, name in enumerate(names):
            node = client.get_node_from_key(name)
            parts.setdefault(node.name, []).append(index)
            found[node.name] = node
        return [(self._node(name, client, found[name]), indices) for name, indices in parts.items()]

    def primaries(self) -> list[Client]:
        """A client of each node that keeps keys."""
        client = self.client()
        if self.target.kind != "cluster":
            return [client]
        return [client.get_redis_connection(node) for node in client.get_primaries()]

    def following(self) -> PlainChannel:
        """For keys of a cluster that are elsewhere: redis-py follows them, and learns where they are."""
        client = self.client()

        def execute(commands: Sequence[Sequence[bytes]]) -> list[Any]:
            return [_execute(client, command) for command in commands]

        return PlainChannel(execute)

    @contextlib.contextmanager
    def exchange(self, operation: str, names: Sequence[bytes]) -> Iterator[list[tuple[AnyChannel, list[int]]]]:
        """Channels to the nodes of these keys, each with the indices of its keys, for as long as the block lasts.

        Raises:
            BackendError: whatever went wrong, in words.
        """
        until = time.monotonic() + self._deadline
        held: list[tuple[Node, AnyChannel]] = []
        ok = False
        try:
            lent: list[tuple[AnyChannel, list[int]]] = []
            for node, indices in self.split(names):
                held.append((node, node.take(until)))
                lent.append((held[-1][1], indices))
            yield lent
            ok = True
        except (*ERRORS, BackendError) as error:
            self.forget()
            if self._closed:
                raise ClosedError(f"{self.target}: {operation} when it was closed") from None
            raise self.failures.explain(operation, error) from None  # the cause may show what is not for showing
        finally:
            for node, channel in held:
                node.give(channel, ok=ok)

    def close(self) -> None:
        """Give up every connection; exchanges under way end with an error. Idempotent, does not wait."""
        with self._lock:
            self._closed = True
            nodes, self._nodes = list(self._nodes.values()), {}
        for node in nodes:
            node.close()
        self.sweep()

    def sweep(self) -> None:
        """After `close`: end what redis-py's client has connected meanwhile for a command that was under way."""
        if self._closed and self._client is not None:
            with contextlib.suppress(*ERRORS):
                self._client.close()

    def _known(self) -> Client:
        if self._closed:
            raise ClosedError(f"{self.target}: closed")
        return self._client

    def forget(self) -> None:
        """After an error: idle connections, and where a cluster keeps what, may be of the past."""
        with self._lock:
            nodes = list(self._nodes.values())
            client = None
            if self.target.kind == "cluster" and not self._closed:
                client, self._client, self._nodes = self._client, None, {}
        for node in nodes:
            if client is None:
                node.drop()
            else:
                node.retire()
        if client is not None:
            with contextlib.suppress(*ERRORS):
                client.close()

    def _node(self, name: object, client: Client, node: Client = None) -> Node:
        with self._lock:
            found = self._nodes.get(name)
        if found is None:
            made = Node(client if node is None else client.get_redis_connection(node))
            with self._lock:
                found = self._nodes.setdefault(name, made)
        return found

    def _make(self) -> Client:
        target = self.target
        password = None if target.password is None else target.password.get_secret_value()
        login: dict[str, Any] = {"username": target.username, "password": password}
        common = {
            "socket_timeout": self._timeout,
            "socket_connect_timeout": self._timeout,
            "protocol": 2,  # nothing comes unasked on such a connection
            **_tls(target.tls),
        }
        no_retries = Retry(NoBackoff(), 0)
        if target.kind == "cluster":
            nodes = [
                ClusterNode(host, port)  # type: ignore[no-untyped-call]
                for host, port in target.addresses
            ]
            return RedisCluster(startup_nodes=nodes, retry=no_retries, socket_keepalive=KEEPALIVE, **login, **common)
        login["db"] = target.db
        if target.kind == "socket":
            common.pop("socket_connect_timeout")
            return redis.Redis(unix_socket_path=target.socket, retry=no_retries, **login, **common)
        common["socket_keepalive"] = KEEPALIVE
        if target.kind == "server":
            ((host, port),) = target.addresses
            return redis.Redis(host=host, port=port, retry=no_retries, **login, **common)
        secret = self._options.sentinel_password
        each = self._timeout / len(target.addresses)  # the first may be dead, and all but the last
        watchers = {
            **common,
            "socket_timeout": each,
            "socket_connect_timeout": each,
            "retry": no_retries,
            "username": self._options.sentinel_username,
            "password": None if secret is None else secret.get_secret_value(),
        }
        found: Any = _Sentinels(  # type: ignore[no-untyped-call]
            target.addresses, sentinel_kwargs=watchers, retry=no_retries, **login, **common
        )
        return found.master_for(target.service)


class _Sentinels(Sentinel):
    """redis-py's, which does not say why it got no answer: where that is for a certificate, it is said."""

    def discover_master(self, service_name: str) -> Any:
        """See redis-py."""
        try:
            return super().discover_master(service_name)  # type: ignore[no-untyped-call]
        except MasterNotFoundError:
            for sentinel in self.sentinels:
                try:
                    sentinel.ping()
                except RedisTimeoutError:
                    break  # of a second round of waiting nobody has any good
                except RedisConnectionError as error:
                    if "ssl" in str(error).lower():
                        raise
            raise


def _tls(tls: TLSOptions | None) -> dict[str, Any]:
    if tls is None:
        return {}
    secret = tls.key_password
    return {
        "ssl": True,
        "ssl_ca_certs": None if tls.ca is None else str(tls.ca),
        "ssl_certfile": None if tls.cert is None else str(tls.cert),
        "ssl_keyfile": None if tls.key is None else str(tls.key),
        "ssl_password": None if secret is None else secret.get_secret_value(),
        "ssl_cert_reqs": "none" if tls.verify == "none" else "required",
        "ssl_check_hostname": tls.verify == "full",
    }


def _execute(client: Client, command: Sequence[bytes]) -> Any:
    try:
        return client.execute_command(command[0].decode(), *command[1:])
    except ResponseError as error:
        return ReplyError(str(error))


def _in_a_pipeline(client: Client) -> Callable[[Sequence[Sequence[bytes]]], Sequence[Any]]:
    def execute(commands: Sequence[Sequence[bytes]]) -> Sequence[Any]:
        with client.pipeline(transaction=False) as pipeline:
            for command in commands:
                pipeline.execute_command(command[0].decode(), *command[1:])
            replies = pipeline.execute(raise_on_error=False)
        return [ReplyError(str(each)) if isinstance(each, ResponseError) else each for each in replies]

    return execute
