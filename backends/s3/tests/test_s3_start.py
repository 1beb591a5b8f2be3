"""How a tier starts: what is refused, what is waited for, what is sent on whose behalf."""

from __future__ import annotations

import base64
import select
import socket
import socketserver
import ssl
import subprocess
import sys
import threading
import time
from typing import TYPE_CHECKING, Any, ClassVar
from urllib.parse import urlsplit

import pytest
from fake_s3 import FakeS3
from pydantic import ValidationError
from s3_rig import client
from server_rig import make_certificates

from lmkv.errors import BackendError, ConfigError
from lmkv.testing import make_key, make_memory, make_payload
from lmkv.types import OK, HealthState
from lmkv_backend_s3.line import Line
from lmkv_backend_s3.options import S3Options

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from s3_place import Open, Place
    from server_rig import Certificates

FRAME = 100_000
SSE_KEY = base64.b64encode(bytes(range(32))).decode()


def round_trip(backend: Any, nbytes: int = FRAME) -> None:
    payload = make_payload(1, nbytes)
    memory = make_memory(nbytes)
    assert list(backend.put([make_key(1)], [make_memory(payload)])) == [OK(nbytes)]
    assert list(backend.get([make_key(1)], [memory])) == [OK(nbytes)]
    assert bytes(memory.view) == payload


# --- what a real store refuses ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"secret_key": "wrong-wrong-wrong"}, "SignatureDoesNotMatch.*secret_key is not that of access_key"),
        ({"access_key": "nobody-at-all"}, "InvalidAccessKeyId.*correct access_key"),
        ({"bucket": "no-such-bucket-here"}, "no bucket 'no-such-bucket-here' at http.*set create: true"),
        ({"storage_class": "NO_SUCH_CLASS"}, "cannot be written.*InvalidStorageClass"),
    ],
)
def test_definite_refusals_stop_the_start(juice: Place, open_s3: Open, change: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says) as refused:
        open_s3(juice, **change)
    assert "wrong-wrong-wrong" not in str(refused.value)
    assert juice.server.secret_key not in str(refused.value)


def test_a_bucket_is_created_only_when_asked(place: Place, open_s3: Open) -> None:
    name = f"made-{time.monotonic_ns()}"
    s3 = open_s3(place, bucket=name, create=True)
    assert s3.health().state is HealthState.OK
    round_trip(s3)
    open_s3(place, bucket=name, create=True)


def test_nothing_is_left_of_the_look(place: Place, open_s3: Open) -> None:
    s3 = open_s3(place)
    assert [page for page in s3._listing.objects(s3._options.prefix) if page] == []


def test_bucket_that_has_gone(place: Place, open_s3: Open) -> None:
    name = f"gone-{time.monotonic_ns()}"
    s3 = open_s3(place, bucket=name, create=True)
    back = client(place.server)
    back.delete_bucket(Bucket=name)
    back.close()
    assert "does not exist" in s3.health().detail
    with pytest.raises(BackendError, match="NoSuchBucket"):
        s3.get([make_key(1)], [make_memory(FRAME)])


def test_no_keys_at_all(fake: FakeS3, open_s3: Open, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
    with pytest.raises(ConfigError, match="boto3 found no keys: set access_key and secret_key"):
        open_s3(fake, access_key=None, secret_key=None)


# --- whose keys ------------------------------------------------------------------------------------------------------


def test_keys_of_the_environment_and_of_a_profile(
    juice: Place, open_s3: Open, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    server = juice.server
    keys = f"aws_access_key_id = {server.access_key}\naws_secret_access_key = {server.secret_key}\n"
    (tmp_path / "credentials").write_text(f"[cache]\n{keys}")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
    round_trip(open_s3(juice, access_key=None, secret_key=None, profile="cache"))
    with pytest.raises(ConfigError, match=r"profile.*absent"):
        open_s3(juice, access_key=None, secret_key=None, profile="absent")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", server.access_key)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", server.secret_key)
    round_trip(open_s3(juice, access_key=None, secret_key=None))


def test_secret_of_a_file(juice: Place, open_s3: Open, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text(juice.server.secret_key + "\n")
    round_trip(open_s3(juice, secret_key={"file": str(tmp_path / "secret")}))


def test_assumed_role(moto: Place, open_s3: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys of the role, not those of the options, sign what is sent."""
    monkeypatch.setenv("AWS_ENDPOINT_URL_STS", moto.server.endpoint)
    s3 = open_s3(moto, role_arn="arn:aws:iam::123456789012:role/kv-cache", external_id="x-1")
    round_trip(s3)
    used = s3._bucket._client._get_credentials()
    assert used.access_key != moto.server.access_key
    assert used.token


def test_a_role_that_may_not_be_assumed(fake: FakeS3, open_s3: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL_STS", fake.endpoint)
    fake.script = lambda seen: (403, "AccessDenied") if seen.method == "POST" else None
    with pytest.raises(ConfigError, match="assuming role_arn: AccessDenied"):
        open_s3(fake, role_arn="arn:aws:iam::123456789012:role/kv-cache")


# --- TLS -------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return make_certificates(tmp_path_factory.mktemp("certificates"))


@pytest.fixture
def secure(certificates: Certificates) -> Iterator[FakeS3]:
    with FakeS3(certificates) as server:
        yield server


def test_tls(secure: FakeS3, open_s3: Open, certificates: Certificates, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a CA of one's own, in the options or the environment; unsigned payloads; no certificate, no connection."""
    round_trip(open_s3(secure, ca_bundle=str(certificates.ca), range_size="32KiB"))
    assert {seen.headers["x-amz-content-sha256"] for seen in secure.seen if seen.method == "PUT"} == {
        "UNSIGNED-PAYLOAD"
    }
    round_trip(open_s3(secure, ca_bundle=str(certificates.ca)), 3_000_001)
    round_trip(open_s3(secure, verify=False))
    with pytest.raises(ConfigError, match=r"certificate is not trusted.*set ca_bundle"):
        open_s3(secure)
    monkeypatch.setenv("AWS_CA_BUNDLE", str(certificates.ca))
    round_trip(open_s3(secure))


def test_an_aborted_line_sends_nothing_in_the_clear(secure: FakeS3, certificates: Certificates) -> None:
    """`SSLSocket.shutdown` ends TLS: who sends in another thread just then would go on without."""
    url = urlsplit(secure.endpoint)
    one = Line(url, ssl.create_default_context(cafile=certificates.ca), time.monotonic() + 10.0)
    sock = one._http.sock
    one.abort()
    try:
        assert sock.version(), "TLS has ended before the connection"
        with pytest.raises(OSError, match=r".+"):
            sock.sendall(b"secret" * 1000)
    finally:
        one.close()


def test_ca_file_that_is_none(secure: FakeS3, open_s3: Open, tmp_path: Path) -> None:
    (tmp_path / "ca").write_text("no certificate")
    with pytest.raises(ConfigError, match="ca_bundle: cannot read"):
        open_s3(secure, ca_bundle=str(tmp_path / "ca"))
    options = S3Options.model_validate(secure.options(ca_bundle=str(tmp_path / "none")))
    assert "is no file" in options.check(None)[0]  # type: ignore[arg-type]


def test_tls_port_without_tls(fake: FakeS3, open_s3: Open) -> None:
    """Nothing definite: it may be a proxy that is not ready."""
    s3 = open_s3(fake, endpoint=fake.endpoint.replace("http:", "https:"), deadline=2.0)
    assert s3.health().state is HealthState.DOWN


# --- what is sent ----------------------------------------------------------------------------------------------------


def sent(fake: FakeS3, method: str) -> dict[str, str]:
    return next(seen.headers for seen in reversed(fake.seen) if seen.method == method)


def test_signed_and_unsigned_payloads(fake: FakeS3, open_s3: Open) -> None:
    """Without TLS the payload is signed unless the options say no."""
    digests = {}
    for choice in ("auto", "always", "never"):
        round_trip(open_s3(fake, sign_payload=choice))
        digests[choice] = next(
            seen.headers["x-amz-content-sha256"]
            for seen in fake.seen
            if seen.method == "PUT" and str(make_key(1)) in seen.target
        )
        headers = sent(fake, "PUT")
        assert "expect" not in headers
        assert not any(name.startswith("x-amz-checksum") for name in headers)
        fake.seen.clear()
    assert digests["auto"] == digests["always"] != digests["never"] == "UNSIGNED-PAYLOAD"


def test_checksums_of_s3(juice: Place, fake: FakeS3, open_s3: Open) -> None:
    round_trip(open_s3(fake, checksums=True))
    assert any(name.startswith("x-amz-checksum") for name in sent(fake, "PUT"))
    round_trip(open_s3(juice, checksums=True))


def test_checksums_of_s3_with_tls(secure: FakeS3, open_s3: Open, certificates: Certificates) -> None:
    """Then boto3 sends the body in chunks with the checksum behind it."""
    s3 = open_s3(secure, checksums=True, ca_bundle=str(certificates.ca), read_only=True)
    s3._options.__dict__["read_only"] = False
    chunks = []
    secure.script = lambda seen: chunks.append(seen.headers) or (400, "Enough")  # type: ignore[func-returns-value]
    with pytest.raises(BackendError, match="Enough"):
        s3.put([make_key(1)], [make_memory(make_payload(1, FRAME))])
    assert chunks[0]["x-amz-trailer"].startswith("x-amz-checksum")
    assert chunks[0]["transfer-encoding"] == "chunked"


def test_encryption_and_storage_class(fake: FakeS3, secure: FakeS3, open_s3: Open, certificates: Certificates) -> None:
    round_trip(open_s3(fake, sse="aws:kms", kms_key_id="alias/kv", storage_class="ONEZONE_IA"))
    headers = sent(fake, "PUT")
    assert headers["x-amz-server-side-encryption"] == "aws:kms"
    assert headers["x-amz-server-side-encryption-aws-kms-key-id"] == "alias/kv"
    assert headers["x-amz-storage-class"] == "ONEZONE_IA"

    s3 = open_s3(secure, sse_customer_key=SSE_KEY, ca_bundle=str(certificates.ca))
    round_trip(s3)
    s3.contains([make_key(1)])
    for method in ("PUT", "GET", "HEAD"):
        headers = sent(secure, method)
        assert headers["x-amz-server-side-encryption-customer-algorithm"] == "AES256"
        assert headers["x-amz-server-side-encryption-customer-key"] == SSE_KEY


def test_virtual_addressing(fake: FakeS3, open_s3: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    """The bucket stands in the host name."""
    plain = socket.getaddrinfo
    monkeypatch.setattr(socket, "getaddrinfo", lambda host, *more, **most: plain("127.0.0.1", *more, **most))
    s3 = open_s3(fake, endpoint=f"http://store.example:{fake.port}", addressing="virtual")
    round_trip(s3)
    assert {seen.headers["host"] for seen in fake.seen} == {f"kv-frames.store.example:{fake.port}"}
    assert fake.seen[-1].target == f"/frames/{make_key(1)}"


def test_by_the_proxy_of_the_environment(fake: FakeS3, open_s3: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", f"http://user:pass%40word@127.0.0.1:{fake.port}")
    s3 = open_s3(fake, endpoint="http://store.invalid", deadline=5.0, addressing="path")
    s3.contains([make_key(1)])
    assert fake.seen[-1].target.startswith("http://store.invalid/kv-frames/frames/")
    word = base64.b64encode(b"user:pass@word").decode()
    assert fake.seen[-1].headers["proxy-authorization"] == f"Basic {word}"


class _Proxy(socketserver.StreamRequestHandler):
    """Opens tunnels, whatever they are asked to lead to."""

    port = 0
    asked: ClassVar[list[tuple[str, dict[str, str]]]] = []

    def handle(self) -> None:
        first = self.rfile.readline().decode()
        headers = {}
        while line := self.rfile.readline().decode().strip():
            name, _, value = line.partition(": ")
            headers[name.lower()] = value
        self.asked.append((first, headers))
        with socket.create_connection(("127.0.0.1", self.port)) as server:
            self.connection.sendall(b"HTTP/1.1 200 as you like\r\n\r\n")
            while ready := select.select([self.connection, server], [], [], 30.0)[0]:
                for one in ready:
                    data = one.recv(65536)
                    if not data:
                        return
                    (server if one is self.connection else self.connection).sendall(data)


def test_https_by_a_tunnel_through_the_proxy(
    secure: FakeS3, open_s3: Open, certificates: Certificates, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The proxy sees where to, and its own password; TLS is with the store."""
    monkeypatch.setattr(_Proxy, "port", secure.port)
    monkeypatch.setattr(_Proxy, "asked", [])
    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), _Proxy) as server:
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        monkeypatch.setenv("https_proxy", f"http://user:word@127.0.0.1:{server.server_address[1]}")
        s3 = open_s3(secure, endpoint="https://localhost:7", ca_bundle=str(certificates.ca), addressing="path")
        round_trip(s3)
        s3.close()
        server.shutdown()
    word = base64.b64encode(b"user:word").decode()
    assert {first.split()[:2] == ["CONNECT", "localhost:7"] for first, _ in _Proxy.asked} == {True}
    assert {headers["proxy-authorization"] for _, headers in _Proxy.asked} == {f"Basic {word}"}
    assert not any("proxy-authorization" in seen.headers for seen in secure.seen)


@pytest.mark.parametrize(
    ("endpoint", "variable", "port"),
    [("https://s", "", 443), ("http://s", "", 80), ("https://s", "http://proxy", 80), ("http://s", "proxy", 80)],
)
def test_ports_that_nobody_names(monkeypatch: pytest.MonkeyPatch, endpoint: str, variable: str, port: int) -> None:
    asked = []

    def connect(address: tuple[str, int], *_: object) -> None:
        asked.append(address)
        raise ConnectionRefusedError

    monkeypatch.setattr(socket, "create_connection", connect)
    for name in ("http_proxy", "https_proxy"):
        monkeypatch.setenv(name, variable)
    with pytest.raises(ConnectionRefusedError):
        Line(urlsplit(endpoint), ssl.create_default_context(), time.monotonic() + 5.0)
    assert asked == [("proxy" if variable else "s", port)]


# --- options ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"bucket": "Upper"}, "bucket"),
        ({"prefix": "/leading/"}, "prefix"),
        ({"prefix": "no-slash"}, "prefix"),
        ({"endpoint": "minio:9000"}, "write https://host:port"),
        ({"endpoint": "http://host:99999"}, "is no URL"),
        ({"endpoint": "https://me:hush@host"}, "carries a user or password"),
        ({"endpoint": "https://host/bucket"}, "has a path"),
        ({"access_key": "a"}, "belong together"),
        ({"session_token": "t"}, "session_token needs access_key"),
        ({"access_key": "a", "secret_key": "s", "profile": "p"}, "two sources of keys"),
        ({"role_arn": "kv"}, "role_arn"),
        ({"external_id": "x"}, "external_id needs role_arn"),
        ({"sse": "rot13"}, "sse"),
        ({"kms_key_id": "k"}, "kms_key_id needs sse"),
        ({"sse": "AES256", "kms_key_id": "k"}, "kms_key_id needs sse"),
        ({"sse_customer_key": "c2hvcnQ="}, "32 bytes as base64"),
        ({"sse_customer_key": SSE_KEY, "endpoint": "http://host"}, "in the clear"),
        ({"storage_class": "GLACIER"}, "thawed"),
        ({"part_size": "1MiB"}, "no parts below 5MiB"),
        ({"connections": 0}, "connections"),
        ({"ca_bundle": "/x", "verify": False}, "ca_bundle needs verify"),
        ({"create": True, "read_only": True}, "contradict"),
        ({"buckett": "x"}, "buckett"),
    ],
)
def test_options_that_make_no_sense(options: dict[str, Any], says: str) -> None:
    with pytest.raises(ValidationError, match=says) as refused:
        S3Options.model_validate({"bucket": "kv-frames", **options})
    for secret in ("hush", "c2hvcnQ="):
        assert secret not in str(refused.value)


def test_the_plugin_is_light() -> None:
    """`lmkv plugins` imports no boto3, and neither does a look at the options."""
    code = (
        "import sys, lmkv_backend_s3.plugin as p; [s] = p.lmkv_backends(); s.options();"
        "print(*{m.partition('.')[0] for m in sys.modules})"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not {"boto3", "botocore", "torch"} & set(done.stdout.split())
