"""The node service and its clients: messages over a unix socket, or straight into a loop thread of this process.

`StorageClient` is what everything above talks to. It has two implementations: `SocketClient` (the service is another
process) and `LocalClient` (a `ThreadHost` runs the storage in a thread of this one). They differ in the way only.
"""

from __future__ import annotations

from lmkv.service.client import SocketClient
from lmkv.service.host import LocalClient, ThreadHost
from lmkv.service.link import Connection, StorageClient
from lmkv.service.spawn import connect_or_start, ensure_service

__all__ = [
    "Connection",
    "LocalClient",
    "SocketClient",
    "StorageClient",
    "ThreadHost",
    "connect_or_start",
    "ensure_service",
]
