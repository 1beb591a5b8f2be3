"""What was asked for has been done, and nobody hears of it: the answer is lost on its way."""

from __future__ import annotations

import contextlib
import socket
import time
from typing import TYPE_CHECKING, Any

import pytest
from proxy_rig import FaultProxy
from s3_rig import client

from lmkv.errors import BackendError
from lmkv.testing import make_key, make_memory, make_payload
from lmkv.types import OK
from lmkv_backend_s3 import bucket, transport

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from fake_s3 import FakeS3, Seen
    from s3_place import Open, Place

    from lmkv.memory import MemoryObject
    from lmkv_backend_s3.backend import S3Backend

FRAME = 100_000
LARGE = 11 << 20
PARTS = {"multipart_size": "6MiB", "part_size": "5MiB"}
ANSWER = 20
"""Bytes of an answer that come through before it is cut: its first line, and some of the second."""


@pytest.fixture
def proxy(place: Place) -> Iterator[FaultProxy]:
    with FaultProxy(place.server.port) as made:
        yield made


@contextlib.contextmanager
def losing(
    s3: S3Backend, operation: str, begin: Callable[[], object], heal: Callable[[], object]
) -> Iterator[list[str]]:
    """Answers to `operation` are lost; all is well again when a look is taken. Gives the requests in order."""
    asked: list[str] = []
    inner, looking = s3._bucket._client, s3._bucket.has

    class Client:
        """boto3's, and what is asked of it."""

        def __getattr__(self, name: str) -> Any:
            def call(**params: Any) -> Any:
                asked.append(name)
                if name == operation:
                    begin()
                return plain(**params)

            plain = getattr(inner, name)
            return call

    def look(*args: Any) -> bool:
        heal()
        return looking(*args)

    s3._bucket._client = Client()
    s3._bucket.has = look  # type: ignore[method-assign]
    try:
        yield asked
    finally:
        s3._bucket._client = inner
        del s3._bucket.has  # type: ignore[method-assign]


def uploads(place: Place, s3: S3Backend) -> list[Any]:
    """Multipart uploads that were begun and neither completed nor aborted."""
    back = client(place.server)
    try:
        found: list[Any] = back.list_multipart_uploads(Bucket=place.bucket, Prefix=s3._names.frames).get("Uploads", [])
    finally:
        back.close()
    return found


def await_frames(place: Place, s3: S3Backend, frames: int) -> None:
    """Wait until the store has so many frames: an answer may begin before what it tells of is done."""
    back, until = client(place.server), time.monotonic() + 10.0
    try:
        while back.list_objects_v2(Bucket=place.bucket, Prefix=s3._names.frames)["KeyCount"] < frames:
            assert time.monotonic() < until, "the request is lost, not its answer"
            time.sleep(0.01)
    finally:
        back.close()


def cut_the_answer(proxy: FaultProxy, s3: S3Backend, number: int, memory: MemoryObject) -> Callable[[], None]:
    """Learn how long the last request of a write is by one that goes well, then cut behind that."""
    before = []

    def note() -> None:
        before.append(proxy.bytes_up)

    operation = "put_object" if len(memory.view) == FRAME else "complete_multipart_upload"
    with losing(s3, operation, note, lambda: None):
        assert s3.put([make_key(number)], [memory])[0].ok
    nbytes = proxy.bytes_up - before[0]
    return lambda: proxy.cut_after(nbytes + ANSWER)


@pytest.mark.parametrize("fault", ["cut", pytest.param("silence", marks=pytest.mark.slow)])
@pytest.mark.parametrize("nbytes", [FRAME, LARGE])
def test_a_lost_answer_is_no_refusal(place: Place, proxy: FaultProxy, open_s3: Open, nbytes: int, fault: str) -> None:
    """Of a PUT, and of the request that makes an object of parts: a look says that the frame is there."""
    s3 = open_s3(place, endpoint=f"http://{proxy.address}", deadline=5.0 if fault == "silence" else 20.0, **PARTS)
    payload = make_payload(1, nbytes)
    begin = proxy.mute if fault == "silence" else cut_the_answer(proxy, s3, 2, make_memory(payload))
    operation = "put_object" if nbytes == FRAME else "complete_multipart_upload"
    frames = 1 if fault == "silence" else 2
    start = time.monotonic()

    def look() -> None:
        await_frames(place, s3, frames)
        proxy.heal()

    with losing(s3, operation, begin, look) as asked:
        assert list(s3.put([make_key(1)], [make_memory(payload)])) == [OK(nbytes)]
        assert asked.count(operation) == 1, "it is not sent anew"
        assert asked[-1] == "head_object"
        assert "abort_multipart_upload" not in asked
    assert time.monotonic() - start < 15.0
    memory = make_memory(nbytes)
    assert list(s3.get([make_key(1)], [memory])) == [OK(nbytes)]
    assert bytes(memory.view) == payload
    assert not uploads(place, s3)


def test_a_second_try_that_finds_no_upload(place: Place, open_s3: Open) -> None:
    """The first was done; the store has forgotten the upload by the time that it is asked again."""
    s3 = open_s3(place, **PARTS)
    payload = make_payload(1, LARGE)
    inner = s3._bucket._client
    plain = inner.complete_multipart_upload

    def complete(**params: Any) -> Any:
        """The connection ends behind the request: the transport sends it again at once, and hears of that only."""
        plain(**params)
        return plain(**params)

    inner.complete_multipart_upload = complete
    with losing(s3, "complete_multipart_upload", lambda: None, lambda: None) as asked:
        assert list(s3.put([make_key(1)], [make_memory(payload)])) == [OK(LARGE)]
        assert "abort_multipart_upload" not in asked
    memory = make_memory(LARGE)
    assert list(s3.get([make_key(1)], [memory])) == [OK(LARGE)]
    assert bytes(memory.view) == payload


@pytest.mark.slow
def test_an_upload_that_was_not_completed_is_aborted(place: Place, proxy: FaultProxy, open_s3: Open) -> None:
    """The request itself is lost: the look finds nothing, the write fails, the parts go."""
    s3 = open_s3(place, endpoint=f"http://{proxy.address}", deadline=3.0, **PARTS)
    with losing(s3, "complete_multipart_upload", proxy.silence, lambda: None) as asked:
        with pytest.raises(BackendError, match="no answer in time"):
            s3.put([make_key(1)], [make_memory(LARGE)])
        proxy.heal()
        until = time.monotonic() + 10.0
        while uploads(place, s3):
            assert time.monotonic() < until, "the upload was not aborted"
            time.sleep(0.05)
        assert "abort_multipart_upload" in asked
    assert list(s3.contains([make_key(1)])) == [False]


def test_an_older_frame_is_not_taken_for_the_one_that_was_sent(
    fake: FakeS3, open_s3: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has the same key and length. Its age, by the store's clock, tells."""
    s3 = open_s3(fake, deadline=2.0)
    s3.put([make_key(1)], [make_memory(make_payload(1, FRAME))])
    fake.written = time.time() - 60.0

    def script(seen: Seen) -> None:
        if seen.method == "PUT":
            seen.connection.close()
            raise ConnectionResetError

    fake.script = script
    with pytest.raises(BackendError, match=r"cannot reach|no answer in time"):
        s3.put([make_key(1)], [make_memory(make_payload(2, FRAME))])
    assert "HEAD" in fake.counts
    fake.written = time.time()
    assert list(s3.put([make_key(1)], [make_memory(make_payload(2, FRAME))])) == [OK(FRAME)]


def test_nobody_looks_where_nothing_was_sent(fake: FakeS3, open_s3: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    """A store that is not reached has done nothing."""
    monkeypatch.setattr(transport, "IDLE_SECONDS", 0.0)
    s3 = open_s3(fake, deadline=1.0)
    fake.hang_up()
    fake._server.shutdown()
    fake._server.server_close()
    looks: list[object] = []
    s3._bucket.has = lambda *args: bool(looks.append(args))  # type: ignore[method-assign,func-returns-value]
    with pytest.raises(BackendError, match=r"cannot reach|no answer in time"):
        s3.put([make_key(1)], [make_memory(FRAME)])
    assert not looks


def test_a_lost_answer_ends_with_the_deadline(fake: FakeS3, open_s3: Open) -> None:
    """The look is inside of it."""
    s3 = open_s3(fake, deadline=1.0)
    fake.hang.set()
    try:
        begin = time.monotonic()
        with pytest.raises(BackendError, match="no answer in time"):
            s3.put([make_key(1)], [make_memory(FRAME)])
        assert bucket.LOOK_SECONDS < time.monotonic() - begin < 4.0
    finally:
        fake.hang.clear()


def test_half_a_head_is_no_answer(fake: FakeS3, open_s3: Open) -> None:
    """It says 200, and nothing of a length: no empty object is made of it, no listing without entries."""
    s3 = open_s3(fake, deadline=10.0)
    payload = make_payload(1, FRAME)
    s3.put([make_key(1)], [make_memory(payload)])
    left = [0]

    def script(seen: Seen) -> None:
        if left[0]:
            left[0] -= 1
            seen.connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Le")
            seen.connection.shutdown(socket.SHUT_RDWR)
            raise ConnectionResetError

    fake.script = script
    memory = make_memory(FRAME)
    for calls in (lambda: s3.get([make_key(1)], [memory]), lambda: s3.put([make_key(1)], [memory])):
        left[0] = 2
        assert list(calls()) == [OK(FRAME)]
        assert not left[0]
    assert bytes(memory.view) == payload
    left[0] = 2
    assert [frame.key for frame in s3.scan()] == [make_key(1)]
    assert not left[0]


def test_a_store_that_fails_is_asked_once_per_try(fake: FakeS3, open_s3: Open) -> None:
    """A look that is not answered either is no reason for more looks: the write is tried again as it is."""
    s3 = open_s3(fake, deadline=2.0)

    def script(seen: Seen) -> None:
        seen.connection.close()
        raise ConnectionResetError

    fake.seen.clear()
    fake.script = script
    with pytest.raises(BackendError, match=r"cannot reach|no answer in time"):
        s3.put([make_key(1)], [make_memory(make_payload(1, FRAME))])
    assert fake.counts["PUT"] > 1
    assert fake.counts["HEAD"] <= fake.counts["PUT"]
