"""Whether NIXL can reach a peer's memory: what a node says of its place, and a page that peers read to try it."""

from __future__ import annotations

import ctypes
import hashlib
import mmap
import secrets
import struct
from pathlib import Path
from typing import Final, NamedTuple

from lmkv.peer.transport import MAX_BLOB, TransportError

DOOR_BYTES: Final = 4096
SIGN_BYTES: Final = 64
"""What peers read, somewhere in a page."""
DEVICES: Final = Path("/sys/class/infiniband")
BOOT: Final = Path("/proc/sys/kernel/random/boot_id")
_MARK: Final = b"lmkvnx1\n"
_HEAD: Final = struct.Struct(f"<8s16s?7x{SIGN_BYTES}sQQQ")


class Blob(NamedTuple):
    """What a transport advertises."""

    machine: bytes
    """16 bytes, the same for all processes of one running kernel."""
    devices: bool
    """The machine has a network card that reads and writes memory by itself."""
    sign: bytes
    """What stands at `door`."""
    door: int
    """Address of the doorstep in that process."""
    pool: int
    """Address of the pool in that process."""
    nbytes: int
    """Of the pool."""
    metadata: bytes
    """Of the agent."""

    def pack(self) -> bytes:
        """As it travels."""
        head = _HEAD.pack(_MARK, self.machine, self.devices, self.sign, self.door, self.pool, self.nbytes)
        return head + self.metadata

    @classmethod
    def unpack(cls, blob: bytes) -> Blob:
        """Read it; `TransportError` when it is none."""
        if not _HEAD.size < len(blob) <= MAX_BLOB or not blob.startswith(_MARK):
            raise TransportError(f"{len(blob)} bytes that are not what a nixl transport of this version advertises")
        _, machine, devices, sign, door, pool, nbytes = _HEAD.unpack_from(blob)
        return cls(machine, devices, sign, door, pool, nbytes, blob[_HEAD.size :])


class Doorstep:
    """A page that peers may read at any time, and where this node is."""

    def __init__(self) -> None:
        self._page = mmap.mmap(-1, DOOR_BYTES)
        self.sign = secrets.token_bytes(SIGN_BYTES)
        self._page[:SIGN_BYTES] = self.sign
        self.address = address_of(self._page)
        self.machine = hashlib.sha256(BOOT.read_bytes()).digest()[:16]
        self.devices = DEVICES.is_dir() and any(DEVICES.iterdir())

    def beside(self, there: Blob) -> bool:
        """Whether that peer runs on this machine, so that the kernel can copy from one process to the other."""
        return there.machine == self.machine

    def check(self, there: Blob) -> None:
        """Refuse a peer that could only be reached through ordinary sockets."""
        if not self.beside(there) and not (self.devices and there.devices):
            raise TransportError(
                "nixl would copy through sockets: the peer is another machine, and not both have an RDMA device"
            )


def address_of(page: mmap.mmap) -> int:
    """Where the process has it."""
    return ctypes.addressof(ctypes.c_char.from_buffer(page))
