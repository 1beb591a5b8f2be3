"""HEADs that boto3 has not made: signed as its own, renewed as its own, and left to it where something is odd."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from fake_s3 import ACCESS_KEY, BUCKET, SECRET_KEY, FakeS3
from server_rig import make_certificates

from lmkv.errors import BackendError
from lmkv.testing import make_key, make_memory

if TYPE_CHECKING:
    from pathlib import Path

    from fake_s3 import Seen
    from s3_place import Open, Place

    from lmkv_backend_s3.backend import S3Backend

KEYS = [make_key(number) for number in range(6)]
THERE = [True, False] * 3
SDK = {"amz-sdk-invocation-id", "amz-sdk-request"}
"""What boto3 says of its tries."""
WORKERS = 2
"""With one connection: the caller and one thread, which may both come before there is a pattern."""


def fill(fake: FakeS3, prefix: str = "") -> None:
    for key in KEYS[::2]:
        fake.objects[f"{prefix}frames/{key}"] = b"x"


class Counted:
    """boto3's client, and how often it was asked for a HEAD."""

    def __init__(self, s3: S3Backend) -> None:
        self.heads = 0
        self._inner = s3._bucket._heads._client
        s3._bucket._heads._client = self

    def head_object(self, **params: Any) -> Any:
        self.heads += 1
        return self._inner.head_object(**params)


def heads(fake: FakeS3) -> list[Seen]:
    return [seen for seen in fake.seen if seen.method == "HEAD"]


def steady(seen: Seen) -> dict[str, str]:
    """Headers that do not change from one to the next; of the signature what it is for."""
    kept = {name: value for name, value in seen.headers.items() if name not in SDK | {"x-amz-date"}}
    about = seen.headers["authorization"].split("Signature=")[0]
    for name in SDK:
        about = about.replace(f"{name};", "")
    return {**kept, "authorization": about}


@pytest.mark.parametrize("server", ["juice", "moto"])
def test_real_servers_take_them(request: pytest.FixtureRequest, open_s3: Open, server: str) -> None:
    """The gateway checks signatures, and keys with characters that URLs quote."""
    place: Place = request.getfixturevalue(server)
    s3 = open_s3(place, prefix="a.b/c=d/", connections=1)
    s3.put(KEYS[::2], [make_memory(b"x")] * 3)
    counted = Counted(s3)
    for _ in range(3):
        assert list(s3.contains(KEYS)) == THERE
    assert 1 <= counted.heads <= WORKERS, "the others are ours"
    assert s3._bucket._heads._pattern is not None


@pytest.mark.parametrize("addressing", ["path", "virtual"])
def test_they_look_as_those_of_boto3(
    fake: FakeS3, open_s3: Open, monkeypatch: pytest.MonkeyPatch, addressing: str
) -> None:
    """The same line and the same headers, but for the time, what hangs on it, and the number of the try."""
    if addressing == "virtual":
        monkeypatch.setattr("socket.getaddrinfo", _here(fake))
    host = "localhost" if addressing == "virtual" else "127.0.0.1"
    s3 = open_s3(
        fake,
        addressing=addressing,
        endpoint=f"http://{host}:{fake.port}",
        session_token="token",
        prefix="a=b/",
        connections=1,
    )
    fill(fake, "a=b/")
    fake.seen.clear()
    for _ in range(2):
        assert list(s3.contains(KEYS[:1])) == [True]
    first, second = heads(fake)
    assert first.target == second.target
    assert set(first.headers) >= SDK
    assert not SDK & set(second.headers), "ours"
    assert steady(first) == steady(second)
    assert first.headers["host"].startswith(BUCKET) is (addressing == "virtual")


def _here(fake: FakeS3) -> Any:
    """Every name is the loopback."""
    import socket

    plain = socket.getaddrinfo
    return lambda host, *more, **kinds: plain("127.0.0.1", *more, **kinds)


def test_the_customers_key_goes_with_them(tmp_path: Path, open_s3: Open) -> None:
    """And TLS by the operator's own authority."""
    made = make_certificates(tmp_path)
    with FakeS3(made) as fake:
        s3 = open_s3(fake, ca_bundle=str(made.ca), sse_customer_key="MDEyMzQ1Njc4OTAxMjM0NTY3ODkwMTIzNDU2Nzg5MDE=")
        fill(fake)
        fake.seen.clear()
        assert list(s3.contains(KEYS)) == THERE
        assert len(heads(fake)) == len(KEYS)
        for seen in heads(fake):
            assert seen.headers["x-amz-server-side-encryption-customer-algorithm"] == "AES256"
            assert "x-amz-server-side-encryption-customer-key-md5" in seen.headers["authorization"]


def test_keys_are_renewed(fake: FakeS3, open_s3: Open) -> None:
    """Each is signed with the keys of its time."""
    s3 = open_s3(fake, connections=1)
    fill(fake)
    s3.contains(KEYS)
    signer = s3._bucket._heads._pattern.signer  # type: ignore[union-attr]
    from botocore.credentials import Credentials

    signer._credentials = Credentials("another-access-key", SECRET_KEY, "another-token")
    fake.seen.clear()
    assert list(s3.contains(KEYS)) == THERE
    for seen in heads(fake):
        assert "Credential=another-access-key/" in seen.headers["authorization"]
        assert seen.headers["x-amz-security-token"] == "another-token"
        assert ACCESS_KEY not in seen.headers["authorization"]


@pytest.mark.parametrize("status", [301, 307, 400, 403])
def test_what_is_odd_is_left_to_boto3(fake: FakeS3, open_s3: Open, status: int) -> None:
    """And what boto3 then does well is the new pattern."""
    s3 = open_s3(fake, connections=1)
    fill(fake)
    s3.contains(KEYS)
    counted = Counted(s3)
    left = [1]

    def script(seen: Seen) -> tuple[int, str] | None:
        left[0] -= 1
        return (status, "Odd") if left[0] >= 0 else None

    fake.script = script
    fake.seen.clear()
    assert list(s3.contains(KEYS)) == THERE
    assert 1 <= counted.heads <= WORKERS
    assert len(heads(fake)) == len(KEYS) + 1


def test_a_busy_store_is_not_asked_twice_at_once(fake: FakeS3, open_s3: Open) -> None:
    """As any other request: again after a pause, until the deadline."""
    s3 = open_s3(fake, connections=1, deadline=5.0)
    fill(fake)
    s3.contains(KEYS)
    counted = Counted(s3)
    left = [3]

    def script(seen: Seen) -> tuple[int, str] | None:
        left[0] -= 1
        return (503, "SlowDown") if left[0] >= 0 else None

    fake.script = script
    fake.seen.clear()
    assert list(s3.contains(KEYS)) == THERE
    assert not counted.heads
    assert len(heads(fake)) == len(KEYS) + 3
    fake.script = lambda _: (403, "AccessDenied")
    with pytest.raises(BackendError, match="may not do this"):
        s3.contains(KEYS)
