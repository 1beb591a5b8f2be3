"""Ports of every process of a host, worked out instead of agreed on: the same at every start, no two alike.

Each engine instance has a block of `BLOCK` ports from the base on, and in it each rank a row of `ROW`, one for each
role. So an instance of another size, or one more role, moves nobody else's port:

    port = base + instance * BLOCK + (dp * tensor_parallel + tp) * ROW + role

The blocks from the default base on lie below 32768, where Linux begins to give ports to outgoing connections: a derived
port is never taken by chance.
"""

from __future__ import annotations

import errno
import socket
from dataclasses import dataclass
from typing import Final, Literal, NamedTuple, TypeAlias, get_args

from lmkv.errors import ConfigError

Role: TypeAlias = Literal["peer", "metrics", "events", "replay", "controller", "proxy", "engine"]
ROLES: Final[tuple[Role, ...]] = get_args(Role)
"""Append-only: a role's place is part of its port."""
BASE: Final = 17000
ROW: Final = 16
RANKS: Final = 16
"""Ranks of one instance on one host at most."""
BLOCK: Final = ROW * RANKS
_END: Final = 65536
_BACKLOG: Final = 1024


class Rank(NamedTuple):
    """One process of the engines of a host; what there is one of for an instance, or for the host, is the first."""

    instance: int = 0
    dp: int = 0
    """Data-parallel rank among those of this host."""
    tp: int = 0

    def __str__(self) -> str:
        """For messages."""
        return f"instance {self.instance}, DP rank {self.dp}, TP rank {self.tp}"


@dataclass(frozen=True, slots=True)
class Ports:
    """The ports of one host.

    Raises:
        ConfigError: `base` or `tensor_parallel` is out of its range.
    """

    base: int = BASE
    tensor_parallel: int = 1
    """TP ranks of an instance."""

    def __post_init__(self) -> None:
        if not 1 <= self.base <= _END - BLOCK:
            raise ConfigError(f"port base {self.base}: must be from 1 to {_END - BLOCK}", kind="port")
        if not 1 <= self.tensor_parallel <= RANKS:
            raise ConfigError(f"TP size {self.tensor_parallel}: must be from 1 to {RANKS}", kind="port")

    def port(self, role: Role, rank: Rank = Rank()) -> int:  # noqa: B008  immutable
        """The port of that role and rank; no other pair of the host has it.

        Raises:
            ConfigError: there is no such role, or the rank has no place in the range.
        """
        if role not in ROLES:
            raise ConfigError(f"no role {role!r}: roles with a port are {', '.join(ROLES)}", kind="port")
        if min(rank) < 0 or rank.tp >= self.tensor_parallel:
            raise ConfigError(f"{rank}: no such rank with TP size {self.tensor_parallel}", kind="port")
        row = rank.dp * self.tensor_parallel + rank.tp
        if row >= RANKS:
            raise ConfigError(f"{rank}: an instance has ports for {RANKS} ranks on one host", kind="port")
        block = self.base + rank.instance * BLOCK
        if block + BLOCK > _END:
            room = (_END - self.base) // BLOCK
            raise ConfigError(f"{rank}: from base {self.base} there are ports for {room} instances", kind="port")
        return block + row * ROW + ROLES.index(role)


def listen(host: str, port: int, role: Role, rank: Rank = Rank()) -> socket.socket:  # noqa: B008  immutable
    """A listening socket, of which the caller is the owner. A port in TIME_WAIT is no obstacle; 0 takes a free one.

    Raises:
        ConfigError: the port is taken or not allowed, or the address is not of this host; names port, role and rank.
    """
    where = f"port {port} on {host} for role {role} ({rank})"
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        # With its protocol named: asyncio turns Nagle's delay off only on sockets that say they are TCP.
        sock = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        try:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            sock.bind(address)
            sock.listen(_BACKLOG)
        except BaseException:
            sock.close()
            raise
    except (OSError, UnicodeError, OverflowError) as error:
        if isinstance(error, OSError) and error.errno == errno.EADDRINUSE:
            advice = "end the process that has it, or choose another port or base"
            raise ConfigError(f"{where} is taken: {advice}", kind="port") from None
        raise ConfigError(f"{where} cannot be used: {error}", kind="port") from error
    return sock
