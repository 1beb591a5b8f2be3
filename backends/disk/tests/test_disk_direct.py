"""Direct I/O, and the file systems and buffers that refuse it."""

from __future__ import annotations

import errno
import fcntl
import os
from typing import TYPE_CHECKING

import pytest
from disk_rig import FRAME, get, put

from lmkv.testing import make_key, make_memory, make_payload
from lmkv_backend_disk import direct as direct_module

if TYPE_CHECKING:
    from conftest import Open


# --- A26 -------------------------------------------------------------------------------------------------------------


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.name.startswith("lmkv_backend_disk")]


def test_a26_open_refuses_direct_io(
    open_disk: Open, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    real = os.open

    def refusing(path: str, flags: int, *args: int, **kwargs: int) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL), path)
        return real(path, flags, *args, **kwargs)

    monkeypatch.setattr(os, "open", refusing)
    backend = open_disk()
    for number in range(3):
        put(backend, number)
        assert get(backend, number)
    (warning,) = warnings(caplog)
    assert f"[Errno {errno.EINVAL}]" in warning
    assert not backend.direct.on


def is_direct(fd: int) -> bool:
    return bool(fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT)


def test_a26_write_refuses_direct_io(
    open_disk: Open, io: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    if io == "threads":
        write, read = os.pwrite, os.preadv

        def refuse(fd: int) -> None:
            if is_direct(fd):
                raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))

        monkeypatch.setattr(os, "pwrite", lambda fd, data, at: refuse(fd) or write(fd, data, at))
        monkeypatch.setattr(os, "preadv", lambda fd, data, at: refuse(fd) or read(fd, data, at))
    monkeypatch.setattr(direct_module, "aligned", lambda view: True)  # else no refusal by a real file system
    backend = open_disk()
    payload = make_payload(1, FRAME)
    for number in range(3):
        source, target = make_memory(payload, misaligned_by=1), make_memory(FRAME, misaligned_by=3)
        assert backend.put([make_key(number)], [source])[0].ok
        assert backend.get([make_key(number)], [target])[0].ok
        assert bytes(target.view) == payload
    assert len(warnings(caplog)) == (not backend.direct.on)
    if io == "threads":
        assert f"[Errno {errno.EINVAL}]" in warnings(caplog)[0]


def test_a26_read_refuses_direct_io(
    open_disk: Open, io: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    backend = open_disk()
    put(backend, 1)
    monkeypatch.setattr(direct_module, "aligned", lambda view: True)
    target = make_memory(FRAME, misaligned_by=1)
    assert backend.get([make_key(1)], [target])[0].ok
    assert bytes(target.view) == make_payload(1, FRAME)
    assert len(warnings(caplog)) == (not backend.direct.on)


def test_a26_unaligned_buffer_is_buffered_for_that_call(open_disk: Open, caplog: pytest.LogCaptureFixture) -> None:
    backend = open_disk()
    payload = make_payload(1, FRAME)
    assert backend.put([make_key(1)], [make_memory(payload, misaligned_by=8)])[0].ok
    target = make_memory(FRAME, misaligned_by=8)
    assert backend.get([make_key(1)], [target])[0].ok
    assert bytes(target.view) == payload
    assert backend.direct.on
    assert warnings(caplog) == []


@pytest.mark.parametrize("io", ["threads"])  # the system calls of aiofiles cannot be cut short from here
@pytest.mark.parametrize("piece", [1, 4096, 4097, 12288])
def test_short_transfers_are_continued(open_disk: Open, io: str, monkeypatch: pytest.MonkeyPatch, piece: int) -> None:
    write, read = os.pwrite, os.preadv
    monkeypatch.setattr(os, "pwrite", lambda fd, data, at: write(fd, data[:piece], at))
    monkeypatch.setattr(os, "preadv", lambda fd, data, at: read(fd, [data[0][:piece]], at))
    backend = open_disk()
    put(backend, 1)
    assert get(backend, 1)
