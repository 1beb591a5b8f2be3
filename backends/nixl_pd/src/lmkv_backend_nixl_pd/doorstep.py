"""Whether NIXL can reach a peer's memory: what a node says of its place, and a page that peers read to try it."""

from __future__ import annotations

import ctypes
import hashlib
import mmap
import os
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
_SUM_BYTES: Final = 16
_BODY: Final = struct.Struct(f"<16s16s?3xI{SIGN_BYTES}sQQQ40s")


class Blob(NamedTuple):
    """What a transport advertises.

    The library ends the process when metadata is damaged, or of another version of it, in the wrong place. So both are
    ruled out before it sees them.
    """

    version: str
    """Of the library: up to 16 ASCII characters."""
    machine: bytes
    """16 bytes, the same for all processes of one running kernel."""
    devices: bool
    """The machine has a network card that reads and writes memory by itself."""
    process: int
    """Its number."""
    sign: bytes
    """What stands at `door`."""
    door: int
    """Address of the doorstep in that process."""
    pool: int
    """Address of the pool in that process."""
    nbytes: int
    """Of the pool."""
    agent: str
    """Its name: up to 40 ASCII characters."""
    metadata: bytes
    """Of the agent."""

    def pack(self) -> bytes:
        """As it travels."""
        version, *numbers, name, metadata = self
        body = _BODY.pack(version.encode(), *numbers, name.encode()) + metadata
        return _MARK + _sum(body) + body

    @classmethod
    def unpack(cls, blob: bytes) -> Blob:
        """Read it; `TransportError` when it is none."""
        body = blob[len(_MARK) + _SUM_BYTES :]
        if len(blob) > MAX_BLOB or len(body) <= _BODY.size or blob[: -len(body)] != _MARK + _sum(body):
            raise TransportError(f"{len(blob)} bytes that are not what a nixl transport of this version advertises")
        version, machine, devices, process, sign, door, pool, nbytes, name = _BODY.unpack_from(body)
        metadata = body[_BODY.size :]
        return cls(_text(version), machine, devices, process, sign, door, pool, nbytes, _text(name), metadata)


def _sum(body: bytes) -> bytes:
    return hashlib.sha256(body).digest()[:_SUM_BYTES]


def _text(field: bytes) -> str:
    return field.rstrip(b"\0").decode("ascii", "replace")


class Doorstep:
    """A page that peers may read at any time, and where this node is."""

    def __init__(self, version: str) -> None:
        """`version`: of the library."""
        self.version = version
        self._page = mmap.mmap(-1, DOOR_BYTES)
        self.sign = secrets.token_bytes(SIGN_BYTES)
        self._page[:SIGN_BYTES] = self.sign
        self.address = address_of(self._page)
        self.machine = hashlib.sha256(BOOT.read_bytes()).digest()[:16]
        self.devices = DEVICES.is_dir() and any(DEVICES.iterdir())

    def check(self, there: Blob) -> None:
        """Refuse a peer with another version, and one to which NIXL could only copy through ordinary sockets."""
        if there.version != self.version:
            raise TransportError(f"NIXL {self.version} here and {there.version} there: install the same on both")
        if self.devices and there.devices:
            return
        why = "it is another machine, and not both have an RDMA device"
        if there.machine == self.machine:
            why = _why_not_cma()
            if not why and _copied(there.process, there.door, SIGN_BYTES) == there.sign:
                return
            why = why or "the kernel does not let this process read that one's memory"
        raise TransportError(f"nixl would copy to and from the peer through sockets: {why}")


def _why_not_cma() -> str:
    """Why UCX would not let the kernel copy: a clause; empty: it would, where the kernel allows that."""
    chosen = os.environ.get("UCX_TLS", "all")
    named = set(chosen.lstrip("^").split(","))
    if chosen.startswith("^"):
        return f"UCX_TLS is {chosen}" if named & {"cma", "sm", "shm", "all"} else ""
    return "" if named & {"cma", "sm", "shm", "all"} else f"UCX_TLS is {chosen}"


class _Range(ctypes.Structure):
    _fields_ = (("address", ctypes.c_void_p), ("nbytes", ctypes.c_size_t))


def _copied(process: int, address: int, nbytes: int) -> bytes:
    """Bytes of another process, copied by the kernel; none where it does not do that."""
    room = ctypes.create_string_buffer(nbytes)
    here, there = _Range(ctypes.addressof(room), nbytes), _Range(address, nbytes)
    libc = ctypes.CDLL(None)
    done: int = libc.process_vm_readv(
        process, ctypes.byref(here), ctypes.c_ulong(1), ctypes.byref(there), ctypes.c_ulong(1), ctypes.c_ulong(0)
    )
    return room.raw if done == nbytes else b""


def address_of(page: mmap.mmap) -> int:
    """Where the process has it."""
    return ctypes.addressof(ctypes.c_char.from_buffer(page))
