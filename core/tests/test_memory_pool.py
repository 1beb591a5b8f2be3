from __future__ import annotations

import errno
import fcntl
import gc
import mmap
import os
import random
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest

from lmkv.errors import ClosedError, ConfigError, ProtocolError
from lmkv.memory import MemoryObject, Pool
from lmkv.memory import pool as pool_module
from lmkv.memory import prefault as prefault_module

if TYPE_CHECKING:
    from collections.abc import Callable


MiB = 1 << 20


def until(condition: Callable[[], bool], seconds: float = 20.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.005)


def test_a18_allocator_under_threads() -> None:
    pool = Pool.create(8 * MiB, prefault=False, trace=True)
    sizes = (4096, 3 * 4096 + 1, 16 * 4096)
    failures: list[BaseException] = []

    def work(number: int) -> None:
        draw = random.Random(number)
        live: list[MemoryObject] = []
        try:
            for _ in range(10_000):
                if live and draw.random() < 0.5:
                    obj = live.pop(draw.randrange(len(live)))
                    assert obj.view[0] == obj.view[-1] == number  # nobody else wrote into it
                    obj.release(f"t{number}")
                elif (new := pool.allocate(draw.choice(sizes), f"t{number}")) is not None:
                    new.view[0] = new.view[-1] = number
                    live.append(new)
            for obj in live:
                obj.release(f"t{number}")
        except BaseException as e:  # noqa: BLE001  handed to the test's thread
            failures.append(e)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert (pool.free_bytes, pool.largest_free, pool.holders()) == (8 * MiB, 8 * MiB, [])
    pool.close()


def test_a_release_may_come_from_any_thread() -> None:
    pool = Pool.create(MiB, prefault=False)
    objects = [pool.allocate(4096, "put") for _ in range(256)]
    assert pool.allocate(1, "put") is None  # full: None at once, never a wait

    def give_back(some: list[MemoryObject | None]) -> None:
        for obj in some:
            assert obj is not None
            obj.release("put")

    threads = [threading.Thread(target=give_back, args=(objects[n::4],)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert pool.largest_free == MiB
    pool.close()


def test_sizes_are_rounded_up_to_whole_pages_and_nonsense_is_refused() -> None:
    pool = Pool.create(5000, hugepages="off", prefault=False)
    assert pool.nbytes == len(pool.view) == pool.free_bytes == 8192
    with pytest.raises(ValueError, match="of 0 bytes"):
        pool.allocate(0, "put")
    pool.close()
    for nbytes in (0, -1):
        with pytest.raises(ConfigError, match="at least one byte"):
            Pool.create(nbytes)
    with pytest.raises(ConfigError, match=r"Make pool\.size smaller"):
        Pool.create(1 << 62, hugepages="off", prefault=False)


def test_many_at_once_are_what_one_after_the_other_is() -> None:
    with_room = Pool.create(10 * 4096, prefault=False, trace=True)
    objects = with_room.allocate_all(5000, 7, "many")
    assert [obj.offset for obj in objects] == [i * 8192 for i in range(5)]
    assert {(obj.nbytes, obj.count, obj.passing) for obj in objects} == {(5000, 1, False)}
    assert [dict(holding.owners) for holding in with_room.holders()] == [{"many": 1}] * 5
    assert with_room.allocate_all(1, 1, "many") == []
    for obj in objects:
        obj.release("many")
    assert with_room.free_bytes == with_room.nbytes
    with pytest.raises(ValueError, match="0 bytes"):
        with_room.allocate_all(0, 2, "many")
    with_room.close()
    with pytest.raises(ClosedError):
        with_room.allocate_all(1, 2, "many")


def test_clients_attach_by_descriptor_and_see_the_same_bytes() -> None:
    service = Pool.create(MiB, prefault=False)
    received = os.dup(service.fd)
    client = Pool.attach(received, service.nbytes)
    os.close(received)
    obj = service.allocate(10_000, "put")
    assert obj is not None
    client.cut(obj.offset, obj.nbytes)[:5] = b"hello"
    assert bytes(obj.view[:5]) == b"hello"
    assert (client.free_bytes, client.allocate(1, "put")) == (0, None)
    assert client.address not in (0, service.address)
    for offset, nbytes in ((-1, 1), (0, -1), (MiB, 1), (MiB - 1, 2)):
        with pytest.raises(ValueError, match="not inside a pool"):
            client.cut(offset, nbytes)
    service.close()
    assert bytes(client.view[obj.offset : obj.offset + 5]) == b"hello"
    client.close()


def test_the_length_is_sealed() -> None:
    pool = Pool.create(MiB, prefault=False)
    for nbytes in (0, 2 * MiB):
        with pytest.raises(PermissionError):
            os.ftruncate(pool.fd, nbytes)
    with pytest.raises(PermissionError):
        fcntl.fcntl(pool.fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)
    assert not os.get_inheritable(pool.fd)
    pool.close()


def test_what_is_no_sealed_memfd_of_that_size_is_refused(tmp_path: Path) -> None:
    pool = Pool.create(MiB, prefault=False)
    unsealed = os.memfd_create("other", os.MFD_CLOEXEC)
    os.ftruncate(unsealed, MiB)
    file = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
    for fd, nbytes in ((pool.fd, 2 * MiB), (pool.fd, 0), (unsealed, MiB), (file, MiB), (999_999, MiB)):
        with pytest.raises(ProtocolError, match="descriptor"):
            Pool.attach(fd, nbytes)
    for fd in (unsealed, file):
        os.close(fd)
    pool.close()


def test_close_is_safe_while_views_are_alive() -> None:
    pool = Pool.create(MiB, prefault=False)
    obj = pool.allocate(4096, "put")
    assert obj is not None
    array = np.frombuffer(obj.view, np.uint8)
    array[:] = 7
    pool.close()
    pool.close()
    with pytest.raises(ClosedError):
        pool.allocate(4096, "put")
    with pytest.raises(ClosedError):
        _ = pool.view
    assert array.sum() == 7 * 4096  # still mapped for who holds it
    obj.release("put")
    del pool, obj
    gc.collect()
    assert array[-1] == 7


def test_a_large_arena_is_unmapped_in_the_background(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool_module, "_SOON_UNMAPPED", MiB - 1)

    def mapped() -> int:
        return Path("/proc/self/maps").read_text().count("memfd:lmkv-pool")

    gc.collect()
    before = mapped()
    pool = Pool.create(MiB, prefault=False)
    kept = pool.cut(0, 10)
    assert mapped() == before + 1
    pool.close()
    kept[0] = 1
    until(lambda: not [t for t in threading.enumerate() if t.name == "lmkv-unmap"])
    assert mapped() == before + 1
    del kept
    assert mapped() == before
    pool = Pool.create(MiB, prefault=False)
    pool.close()
    until(lambda: mapped() == before)


def test_prefault_makes_every_page_present_and_leaves_the_content() -> None:
    pool = Pool.create(16 * MiB, hugepages="off", prefault=False)
    pool.view[5 * MiB] = 9
    client = Pool.attach(pool.fd, pool.nbytes)  # prefaults its own mapping
    until(lambda: client.prefaulted)
    assert os.fstat(pool.fd).st_blocks * 512 == 16 * MiB
    assert client.view[5 * MiB] == 9
    client.close()
    pool.close()


def test_close_stops_a_running_prefault_and_leaves_no_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    began = threading.Event()

    def slow(address: int, nbytes: int, stop: threading.Event) -> None:
        assert address > 0
        assert nbytes == MiB
        began.set()
        assert stop.wait(20)

    monkeypatch.setattr(prefault_module, "populate", slow)
    pool = Pool.create(MiB, hugepages="off")
    assert began.wait(20)
    assert pool.prefaulted is False
    pool.close()
    assert [pool.prefaulted] == [True]
    assert not [t for t in threading.enumerate() if t.name == "lmkv-prefault"]


@pytest.mark.parametrize(("code", "level"), [(errno.ENOMEM, "WARNING"), (errno.EINVAL, "INFO")])
def test_a_prefault_that_the_kernel_refuses_is_told_and_survived(
    code: int, level: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(address: int, nbytes: int, stop: threading.Event) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(prefault_module, "populate", refuse)
    with caplog.at_level("INFO"):
        pool = Pool.create(MiB, hugepages="off")
        until(lambda: pool.prefaulted)
    assert [r.levelname for r in caplog.records] == [level]
    obj = pool.allocate(MiB, "put")
    assert obj is not None
    obj.view[-1] = 1
    pool.close()


def test_hugepages_on_without_enough_of_them_gives_the_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool_module, "_free_hugepages", lambda: (3, 2 * MiB))
    with pytest.raises(ConfigError, match=r"9000000 bytes need 5 reserved hugepages of 2097152 bytes, but 3 are free"):
        Pool.create(9_000_000, hugepages="on", prefault=False)
    monkeypatch.setattr(pool_module, "_free_hugepages", lambda: (0, 0))
    with pytest.raises(ConfigError, match="no hugepages"):
        Pool.create(9_000_000, hugepages="on", prefault=False)


def test_hugepages_auto_asks_for_them_when_they_are_there_and_does_without_otherwise(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[int] = []
    original = os.memfd_create

    def memfd(name: str, flags: int) -> int:
        asked.append(flags & os.MFD_HUGETLB)
        if flags & os.MFD_HUGETLB:
            raise OSError(errno.ENOMEM, "somebody was quicker")
        return original(name, flags)

    monkeypatch.setattr(os, "memfd_create", memfd)
    monkeypatch.setattr(pool_module, "_free_hugepages", lambda: (100, 2 * MiB))
    pool = Pool.create(MiB, hugepages="auto", prefault=False)
    assert (asked, pool.hugepages, pool.nbytes) == ([os.MFD_HUGETLB, 0], False, MiB)
    pool.close()
    with pytest.raises(ConfigError, match="somebody was quicker"):
        Pool.create(MiB, hugepages="on", prefault=False)


@pytest.mark.skipif(pool_module._free_hugepages()[0] < 2, reason="needs two free reserved hugepages")
def test_hugepages_are_used_when_they_are_there() -> None:
    page = pool_module._free_hugepages()[1]
    pool = Pool.create(page + 1, hugepages="on")
    assert (pool.hugepages, pool.nbytes) == (True, 2 * page)
    client = Pool.attach(pool.fd, pool.nbytes)
    until(lambda: pool.prefaulted and client.prefaulted)
    client.view[-1] = 5
    assert pool.view[2 * page - 1] == 5
    client.close()
    pool.close()


def test_a_kernel_without_the_hugepage_hint_is_fine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mmap, "MADV_HUGEPAGE", 9999)
    pool = Pool.create(MiB, hugepages="off", prefault=False)
    pool.view[0] = 1
    pool.close()
