"""The other node of `tests.bench.peer`: `python -m tests.bench.peer_child TRANSPORT PORT`.

A node with frames to pull and room for those that are pushed; and beside it, with memory of their own, what it is
measured against: sockets that it connects to PORT, or an agent of NIXL. Does what it is told line by line.
"""

from __future__ import annotations

import json
import os
import socket
import sys
from typing import Any

from tests.bench.peer import SOCKETS, BareAgent, BareSockets, Node, bare_pool


def say(what: Any) -> None:
    """One line."""
    sys.stdout.write(json.dumps(what) + "\n")
    sys.stdout.flush()


def main() -> None:
    """Until its input ends."""
    transport, port = sys.argv[1:]
    connected = [socket.create_connection(("127.0.0.1", int(port))) for _ in range(SOCKETS)]
    node = Node(transport)
    sockets = BareSockets(bare_pool(), connected)
    agent = BareAgent("there") if transport == "nixl" else None
    orders = {"store": node.store, "clear": node.clear, "send": sockets.send, "receive": sockets.receive}
    say({"address": node.address, "place": agent and agent.place})
    for line in sys.stdin:
        what, *more = json.loads(line)
        orders[what](*more)
        say(None)
    os._exit(0)


if __name__ == "__main__":
    main()
