"""What an object store does to its clients, and what they make of it."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from typing import TYPE_CHECKING

import pytest
from fake_s3 import SECRET_KEY, TOKEN, FakeS3
from proxy_rig import FaultProxy
from s3_rig import client

from lmkv.errors import BackendError, ClosedError, ConfigError, FrameError
from lmkv.testing import make_key, make_memory, make_payload
from lmkv.types import MISS, OK, HealthState, OutcomeKind
from lmkv_backend_s3 import bucket, line, transport

if TYPE_CHECKING:
    from collections.abc import Callable

    from fake_s3 import Seen
    from s3_place import Open, Place

FRAME = 100_000


def refuse(times: int, status: int, code: str = "SlowDown") -> Callable[[Seen], tuple[int, str] | None]:
    left = [times]

    def script(_: Seen) -> tuple[int, str] | None:
        left[0] -= 1
        return (status, code) if left[0] >= 0 else None

    return script


def test_a32_object_store_manners(fake: FakeS3, open_s3: Open) -> None:
    """Busy three times, then well; forbidden; absent; a path-style address with a port."""
    s3 = open_s3(fake, addressing="path", deadline=10.0)
    payload = make_payload(1, FRAME)
    for status, code in ((503, "SlowDown"), (500, "InternalError"), (429, "TooManyRequests"), (400, "RequestTimeout")):
        fake.seen.clear()
        fake.script = refuse(3, status, code)
        assert list(s3.put([make_key(1)], [make_memory(payload)])) == [OK(FRAME)]
        assert [each.method for each in fake.seen] == ["PUT"] * 4
        pauses = [b.at - a.at for a, b in zip(fake.seen, fake.seen[1:], strict=False)]
        for number, pause in enumerate(pauses):
            assert pause >= bucket.FIRST_PAUSE / 2 * 2**number, pauses
        assert fake.seen[0].target == f"/kv-frames/frames/{make_key(1)}"
        assert fake.seen[0].headers["host"] == f"127.0.0.1:{fake.port}"

    memory = make_memory(FRAME)
    fake.script = refuse(3, 503)
    assert list(s3.get([make_key(1)], [memory])) == [OK(FRAME)]
    assert bytes(memory.view) == payload
    assert list(s3.get([make_key(2)], [memory])) == [MISS]
    assert list(s3.contains([make_key(1), make_key(2)])) == [True, False]

    fake.seen.clear()
    fake.script = refuse(99, 403, "AccessDenied")
    for call in (s3.get, s3.put):
        with pytest.raises(BackendError, match=r"AccessDenied.*may not do this") as refused:
            call([make_key(1)], [memory])
        assert not refused.value.retryable
    assert len(fake.seen) == 2, "a refusal is not tried again"
    health = s3.health()
    assert health.state is HealthState.DOWN
    assert "AccessDenied" in health.detail


def test_retries_end_with_the_deadline(fake: FakeS3, open_s3: Open) -> None:
    s3 = open_s3(fake, deadline=1.5)
    fake.seen.clear()
    fake.script = refuse(10**6, 503)
    begin = time.monotonic()
    with pytest.raises(BackendError, match=r"busy: SlowDown \(503\) \(tried \d+ times\)") as busy:
        s3.get([make_key(1)], [make_memory(FRAME)])
    assert busy.value.retryable
    assert 0.5 < time.monotonic() - begin < 4.0
    assert 3 <= len(fake.seen) <= 20


def test_one_key_may_fail_alone(fake: FakeS3, open_s3: Open) -> None:
    """What is about one key is that key's outcome; the others are served."""
    s3 = open_s3(fake, deadline=1.5)
    keys = [make_key(n) for n in range(3)]
    s3.put(keys, [make_memory(make_payload(n, FRAME)) for n in range(3)])
    fake.script = lambda seen: (503, "SlowDown") if seen.target.endswith(keys[1].digest.hex()) else None
    outcomes = s3.get(keys, [make_memory(FRAME) for _ in keys])
    assert [o.kind for o in outcomes] == [OutcomeKind.OK, OutcomeKind.FAILED, OutcomeKind.OK]


@pytest.mark.parametrize("parts", [False, True])
def test_a_silent_store_holds_nobody_longer_than_the_deadline(fake: FakeS3, open_s3: Open, parts: bool) -> None:
    s3 = open_s3(fake, deadline=1.0, range_size="32KiB" if parts else "8MiB")
    s3.put([make_key(1)], [make_memory(make_payload(1, FRAME))])
    fake.hang.set()
    try:
        for call in (
            lambda: s3.get([make_key(1)], [make_memory(FRAME)]),
            lambda: s3.put([make_key(8)], [make_memory(FRAME)]),
            lambda: s3.contains([make_key(n) for n in range(5)]),
            lambda: s3.delete([make_key(9)]),
        ):
            begin = time.monotonic()
            with pytest.raises(BackendError, match="no answer in time"):
                call()
            assert time.monotonic() - begin < 4.0
        assert s3.health().state is HealthState.DOWN
    finally:
        fake.hang.clear()
    assert s3.health().state is HealthState.OK
    assert list(s3.get([make_key(1)], [make_memory(FRAME)])) == [OK(FRAME)]


def test_close_wakes_who_waits(fake: FakeS3, open_s3: Open) -> None:
    """A silent server: `close` waits for nothing, and calls under way end at once."""
    s3 = open_s3(fake, deadline=60.0)
    fake.hang.set()
    ended: list[BaseException] = []

    def call() -> None:
        try:
            s3.get([make_key(1)], [make_memory(FRAME)])
        except BaseException as e:  # noqa: BLE001
            ended.append(e)

    waiting = [threading.Thread(target=call) for _ in range(3)]
    for thread in waiting:
        thread.start()
    while fake.counts["GET"] < 4:
        time.sleep(0.01)
    begin = time.monotonic()
    s3.close()
    s3.close()
    for thread in waiting:
        thread.join(10.0)
    fake.hang.clear()
    assert time.monotonic() - begin < 5.0
    assert [type(e) for e in ended] == [ClosedError] * 3
    with pytest.raises(ClosedError, match="tier 'far' is closed"):
        s3.contains([make_key(1)])


def test_kept_connections_that_ended_are_no_failure(
    fake: FakeS3, open_s3: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Servers end idle connections; the next request goes out anew, at once."""
    monkeypatch.setattr(bucket, "FIRST_PAUSE", 8.0)
    s3 = open_s3(fake)
    s3.put([make_key(1)], [make_memory(make_payload(1, FRAME))])
    before = fake.connections
    s3.put([make_key(1)], [make_memory(make_payload(1, FRAME))])
    assert fake.connections == before, "connections are kept"
    fake.hang_up()
    time.sleep(0.1)
    fake.seen.clear()
    begin = time.monotonic()
    assert list(s3.put([make_key(1)], [make_memory(make_payload(1, FRAME))])) == [OK(FRAME)]
    assert len(fake.seen) == 1
    assert time.monotonic() - begin < 2.0


def test_long_idle_connections_are_not_used(fake: FakeS3, open_s3: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transport, "IDLE_SECONDS", 0.0)
    s3 = open_s3(fake)
    before = fake.connections
    s3.contains([make_key(1)])
    s3.contains([make_key(1)])
    assert fake.connections == before + 2


def test_trickle_is_cut_at_the_deadline(place: Place, open_s3: Open) -> None:
    """Each read of the socket gets something, so that no time-out of a single read would ever fire."""
    with FaultProxy(place.server.port) as proxy:
        s3 = open_s3(place, endpoint=f"http://{proxy.address}", deadline=2.0)
        assert s3.put([make_key(1)], [make_memory(make_payload(1, 10 * FRAME))])[0].ok
        proxy.throttle(40_000)
        begin = time.monotonic()
        with pytest.raises(BackendError):
            s3.get([make_key(1)], [make_memory(10 * FRAME)])
        assert time.monotonic() - begin < 8.0
        proxy.heal()


@pytest.mark.parametrize(
    "drop",
    [
        pytest.param((b"HTTP/1.1 200 OK\r\nX-Much: ", b"y"), id="head"),
        pytest.param((b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n", b"1\r\ny\r\n"), id="chunks"),
        pytest.param((b"HTTP/1.1 200 OK\r\nContent-Length: 4096\r\n\r\n", b"y"), id="body"),
        pytest.param((b"HTTP/1.1 503 OK\r\nContent-Length: 4096\r\n\r\n", b"y"), id="refusal"),
    ],
)
def test_an_answer_that_drips_is_cut_at_the_deadline(fake: FakeS3, open_s3: Open, drop: tuple[bytes, bytes]) -> None:
    """A byte now and then, wherever in the answer, for far longer than the deadline."""
    s3 = open_s3(fake, deadline=1.0)

    def script(seen: Seen) -> None:
        with contextlib.suppress(OSError):
            seen.connection.sendall(drop[0])
            for _ in range(300):
                seen.connection.sendall(drop[1])
                time.sleep(0.05)

    fake.script = script
    begin = time.monotonic()
    with pytest.raises(BackendError, match="no answer in time"):
        s3.get([make_key(1)], [make_memory(FRAME)])
    assert time.monotonic() - begin < 8.0


def test_a_cut_connection_is_tried_again(place: Place, open_s3: Open) -> None:
    """Half of a frame is no frame: what is missing is asked for anew, or the call fails."""
    payload = make_payload(1, 10 * FRAME)
    with FaultProxy(place.server.port) as proxy:
        s3 = open_s3(place, endpoint=f"http://{proxy.address}", deadline=3.0)
        assert s3.put([make_key(1)], [make_memory(payload)])[0].ok
        proxy.cut_after(5 * FRAME)
        with pytest.raises(BackendError, match=r"cannot reach|no answer in time"):
            s3.get([make_key(1)], [make_memory(10 * FRAME)])
        proxy.heal()
        memory = make_memory(10 * FRAME)
        assert list(s3.get([make_key(1)], [memory])) == [OK(10 * FRAME)]
        assert bytes(memory.view) == payload


@pytest.mark.parametrize("fault", ["refuse", "reset", "garbage", "silence"])
def test_unreachable_is_no_mistake_of_the_operator(place: Place, open_s3: Open, fault: str) -> None:
    """The tier starts, is ill, and is used as soon as the store is there."""
    with FaultProxy(place.server.port) as proxy:
        getattr(proxy, fault)()
        begin = time.monotonic()
        s3 = open_s3(place, endpoint=f"http://{proxy.address}", deadline=2.0)
        assert time.monotonic() - begin < 6.0
        assert s3.health().state is HealthState.DOWN
        with pytest.raises(BackendError):
            s3.get([make_key(1)], [make_memory(FRAME)])
        proxy.heal()
        assert s3.health().state is HealthState.OK
        assert s3.put([make_key(1)], [make_memory(make_payload(1, FRAME))])[0].ok


def test_a30_object_deleted_by_another_tool(place: Place, open_s3: Open) -> None:
    """Found, then deleted behind our back: loads miss, look-ups say no, it can be stored again."""
    s3 = open_s3(place)
    key, payload = make_key(1), make_payload(1, FRAME)
    assert s3.put([key], [make_memory(payload)])[0].ok
    assert list(s3.contains([key])) == [True]
    other = client(place.server)
    name = next(e["Key"] for page in s3._listing.objects(s3._names.frames) for e in page)
    other.delete_object(Bucket=place.bucket, Key=name)
    other.close()
    for _ in range(2):
        assert list(s3.get([key], [make_memory(FRAME)])) == [MISS]
    assert list(s3.contains([key])) == [False]
    assert s3.put([key], [make_memory(payload)])[0].ok
    memory = make_memory(FRAME)
    assert list(s3.get([key], [memory])) == [OK(FRAME)]
    assert bytes(memory.view) == payload


# --- frames ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("chunked", [False, True])
@pytest.mark.parametrize("ranges", [False, True])
@pytest.mark.parametrize("etags", [False, True])
def test_servers_differ(fake: FakeS3, open_s3: Open, chunked: bool, ranges: bool, etags: bool) -> None:
    """Without ranges, without versions, without lengths: the frame comes back whole all the same."""
    fake.chunked, fake.ranges, fake.etags = chunked, ranges, etags
    s3 = open_s3(fake, range_size="32KiB")
    payload = make_payload(1, FRAME)
    s3.put([make_key(1)], [make_memory(payload)])
    for room in (FRAME, FRAME + 1, 2 * FRAME):
        memory = make_memory(room)
        assert list(s3.get([make_key(1)], [memory])) == [OK(FRAME)]
        assert bytes(memory.view[:FRAME]) == payload
    for room in (FRAME - 1, FRAME // 2, 10):
        (outcome,) = s3.get([make_key(1)], [make_memory(room)])
        assert isinstance(outcome.error, FrameError), outcome


def test_reads_without_the_inside_of_python(fake: FakeS3, open_s3: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where `http.client` keeps its file otherwise, the public way is taken."""

    class Closed:
        """A file without `readinto1`."""

        def __init__(self, inner: object) -> None:
            self._inner = inner

        def __getattr__(self, name: str) -> object:
            if name == "readinto1":
                raise AttributeError(name)
            return getattr(self._inner, name)

    plain = line.Reply.begin

    def begin(self: line.Reply) -> None:
        self.fp = Closed(self.fp)
        plain(self)

    s3 = open_s3(fake, range_size="32KiB")
    payload = make_payload(1, FRAME)
    s3.put([make_key(1)], [make_memory(payload)])
    monkeypatch.setattr(line.Reply, "begin", begin)
    memory = make_memory(FRAME)
    assert list(s3.get([make_key(1)], [memory])) == [OK(FRAME)]
    assert bytes(memory.view) == payload


def test_a_frame_replaced_while_it_is_read(fake: FakeS3, open_s3: Open) -> None:
    """Ranges of two frames are never put together."""
    s3 = open_s3(fake, range_size="32KiB", connections=1)
    payloads = [make_payload(n, FRAME) for n in range(2)]
    s3.put([make_key(1)], [make_memory(payloads[0])])
    name = f"frames/{make_key(1)}"
    turn = [0]

    def script(_: Seen) -> None:
        turn[0] += 1
        fake.objects[name] = payloads[turn[0] // 2 % 2]

    fake.script = script
    memory = make_memory(FRAME)
    (outcome,) = s3.get([make_key(1)], [memory])
    assert outcome == OK(FRAME)
    assert bytes(memory.view) in payloads


def test_a_failed_upload_leaves_no_parts(place: Place, open_s3: Open) -> None:
    s3 = open_s3(place, multipart_size="6MiB", part_size="5MiB", deadline=5.0)
    plain = s3._bucket.write_part

    def write_part(key: str, until: float, **params: object) -> object:
        if params["PartNumber"] == 2:
            raise BackendError("scripted")
        return plain(key, until, **params)

    s3._bucket.write_part = write_part  # type: ignore[assignment,method-assign]
    with pytest.raises(BackendError, match="scripted"):
        s3.put([make_key(1)], [make_memory(11 << 20)])
    s3._bucket.write_part = plain  # type: ignore[method-assign]
    assert list(s3.contains([make_key(1)])) == [False]
    back = client(place.server)
    try:
        name = s3._names.frame(make_key(1))
        until = time.monotonic() + 10.0
        while back.list_multipart_uploads(Bucket=place.bucket, Prefix=name).get("Uploads"):
            assert time.monotonic() < until, "the upload was not aborted"
            time.sleep(0.05)
    finally:
        back.close()


def test_read_only_takes_nothing(fake: FakeS3, open_s3: Open) -> None:
    fake.script = lambda seen: (403, "AccessDenied") if seen.method not in {"GET", "HEAD"} else None
    s3 = open_s3(fake, read_only=True)
    assert [o.kind for o in s3.put([make_key(1)], [make_memory(FRAME)])] == [OutcomeKind.REJECTED]
    s3.describe(bytes(16), "{}")
    s3.set_aside([make_key(1)])
    with pytest.raises(BackendError, match="read_only"):
        s3.clear()
    assert set(fake.counts) == {"GET"}
    with pytest.raises(ConfigError, match="cannot be written"):
        open_s3(fake)


# --- secrets ---------------------------------------------------------------------------------------------------------


def test_a31_secrets_are_nowhere(fake: FakeS3, open_s3: Open, caplog: pytest.LogCaptureFixture) -> None:
    """Not in logs at their most talkative, not in errors, not in what is printed."""
    caplog.set_level(logging.DEBUG)
    for name in ("boto3", "botocore"):
        logging.getLogger(name).setLevel(logging.NOTSET)
    s3 = open_s3(fake, session_token=TOKEN)
    s3.put([make_key(1)], [make_memory(FRAME)])
    said = [caplog.text, repr(s3._options), str(s3._options.model_dump()), s3._options.model_dump_json()]
    for code in ("SignatureDoesNotMatch", "InvalidToken", "ExpiredToken", "InvalidAccessKeyId"):
        fake.script = refuse(99, 403, code)
        with pytest.raises(ConfigError) as refused:
            open_s3(fake, session_token=TOKEN)
        said += [str(refused.value), repr(refused.value), s3.health().detail]
    said.append(caplog.text)
    assert fake.seen[0].headers["x-amz-security-token"] == TOKEN
    for text in said:
        assert SECRET_KEY not in text
        assert TOKEN not in text
