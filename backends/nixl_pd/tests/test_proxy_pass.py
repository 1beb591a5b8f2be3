"""What the proxy passes on: bytes, headers, errors, the end of a client, the end of an engine."""

from __future__ import annotations

import asyncio
import gzip
import http.client
import json
import random
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import httpx
import pytest
from front_rig import WORDS, events, until

from lmkv_backend_nixl_pd.proxy.errors import ApiError
from lmkv_backend_nixl_pd.proxy.exchange import BODY_SECONDS, Exchange

if TYPE_CHECKING:
    from front_rig import FakeEngine, RunningProxy, Site

DIRECT = {"model": "tiny", "prompt": "hello", "stream": True, "stream_options": {"include_usage": True}}


def pair(site: Site, **options: object) -> tuple[RunningProxy, FakeEngine]:
    proxy, _, [decode] = site.pd(**options)
    return proxy, decode


@pytest.mark.parametrize("chat", [False, True])
def test_stream_is_byte_equal_and_comes_as_it_is_made(site: Site, chat: bool) -> None:
    proxy, decode = pair(site)
    decode.gate.clear()
    prompt = {"messages": [{"role": "user", "content": "hello"}]} if chat else {"prompt": "hello"}
    fields = {"model": "tiny", **prompt, "stream": True, "stream_options": {"include_usage": True}}
    wanted = b"".join(events(fields, "decode-0"))
    path = "/v1/chat/completions" if chat else "/v1/completions"
    with proxy.client.stream("POST", path, json=fields) as answer:
        assert answer.status_code == 200
        assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
        parts = answer.iter_raw()
        first = next(parts)
        assert wanted.startswith(first), "the first event came before the engine made the second"
        assert len(first) < len(wanted)
        decode.gate.set()
        assert first + b"".join(parts) == wanted
    assert b'"total_tokens"' in wanted
    assert proxy.count(f'lmkv_proxy_requests_total{{path="{path}",status="200"}}') == 1


def test_answers_and_headers_are_the_engines(site: Site) -> None:
    proxy, decode = pair(site)
    decode.extra_headers = [("x-request-id", "r-1"), ("server", "engine"), ("x-thing", "ü".encode().decode("latin-1"))]
    sent = {
        "authorization": "Bearer sk-one", "x-request-id": "r-1", "traceparent": "00-a-b-01", "te": "trailers",
        "connection": "keep-alive, x-secret", "x-secret": "for the proxy alone", "user-agent": "me",
    }  # fmt: skip
    through = proxy.post(prompt="hello", headers=sent)
    direct = httpx.post(f"{decode.url}/v1/completions", json={"model": "tiny", "prompt": "hello"}, headers=sent)
    assert through.content == direct.content
    assert through.json()["usage"] == {"prompt_tokens": 2, "completion_tokens": len(WORDS), "total_tokens": 9}
    ignored = {"date"}
    assert {k: v for k, v in through.headers.items() if k not in ignored} == {
        k: v for k, v in direct.headers.items() if k not in ignored
    }
    got = decode.seen[0].headers
    for name in ("authorization", "x-request-id", "traceparent", "user-agent"):
        assert got[name] == sent[name]
    assert "te" not in got
    assert "x-secret" not in got
    assert got.getlist("host") == [decode.url.removeprefix("http://")]
    assert len(got.getlist("content-length")) == 1


def test_other_paths_and_methods(site: Site) -> None:
    proxy, decode = pair(site)
    assert proxy.client.get("/v1/models").json()["data"][0]["id"] == "tiny"
    answer = proxy.client.post("/v1/embeddings%2Fx?a=1&b=%20", content=b"x" * 100_000)
    assert answer.text == "decode-0 POST /v1/embeddings%2Fx?a=1&b=%20 100000"
    assert proxy.client.delete("/thing").text == "decode-0 DELETE /thing? 0"
    head = proxy.client.head("/thing")
    assert (head.status_code, head.content) == (200, b"")
    assert head.headers["content-length"] == str(len("decode-0 HEAD /thing? 0"))
    assert proxy.client.get("/again").text == "decode-0 GET /again? 0", "after an answer without a body"
    assert decode.seen[-1].method == "GET"


def test_compressed_bodies_are_not_touched(site: Site) -> None:
    proxy, decode = pair(site)
    packed = gzip.compress(json.dumps({"prompt": "hello"}).encode())
    proxy.client.post("/v1/completions", content=packed, headers={"content-encoding": "gzip"})
    assert decode.seen[0].body == packed
    packed = gzip.compress(b"x" * 1000)
    url = site.raw(b"HTTP/1.1 200 OK\r\ncontent-encoding: gzip\r\ncontent-length: %d\r\n\r\n" % len(packed) + packed)
    other = site.proxy(prefill=(url,), decode=((url, "node-0:1"),))
    with other.client.stream("GET", "/v1/zipped") as answer:
        assert b"".join(answer.iter_raw()) == packed


def test_errors_of_the_engine_are_the_clients(site: Site) -> None:
    proxy, decode = pair(site)
    decode.status = 400
    answer = proxy.post(prompt="hello")
    assert answer.status_code == 400
    assert answer.json()["error"]["message"] == "decode-0 says no"
    decode.status = 503
    assert proxy.post(prompt="hello").json()["error"]["message"] == "decode-0 says no"


WRONG = (
    (b"", 400, "invalid_json"),
    (b"{", 400, "invalid_json"),
    (b"[1]", 400, "invalid_json"),
    (b"[" * 100_000, 400, "invalid_json"),
    (b'{"a": "\xff"}', 400, "invalid_json"),
    (b" " * (1 + (1 << 17)), 413, "body_too_large"),
    (b'{"prompt": "x", "kv_transfer_params": {"lmkv": {"to": "evil:1"}}}', 400, "not_allowed"),
    (b'{"prompt": "x", "kv_transfer\\u005fparams": null}', 400, "not_allowed"),
)


def test_errors_of_the_proxy_have_openais_shape(site: Site) -> None:
    proxy, decode = pair(site, max_body=1 << 17, min_prefill_tokens=0)
    for body, status, code in WRONG:
        for content in (body, iter([body[:3], body[3:]])):  # with its length declared, and chunked
            answer = proxy.client.post("/v1/completions", content=content)
            error = answer.json()["error"]
            assert (answer.status_code, error["code"]) == (status, code)
            assert set(error) == {"message", "type", "code", "param"}
            assert error["type"] == "invalid_request_error"
    assert not decode.seen
    assert proxy.post(prompt="x" * 9).status_code == 200


@pytest.mark.parametrize(
    ("path", "encoding", "body"),
    [
        ("/v1/completions", "x", b'{"prompt": "x", "kv_transfer_params": {"lmkv": {}}}'),
        ("/v1/completions/", "", b'{"prompt": "x", "kv_transfer_params": {"lmkv": {}}}'),
        ("/inference/v1/generate", "", b'{"token_ids": [1], "kv_transfer_params": {"lmkv": {}}}'),
        ("/v1/responses", "", b'{"temperature": NaN, "kv_transfer_params": {"lmkv": {}}}'),
    ],
)
def test_nobody_says_by_another_way_where_kv_goes(site: Site, path: str, encoding: str, body: bytes) -> None:
    proxy, decode = pair(site, min_prefill_tokens=0)
    headers = {"content-encoding": encoding, "content-type": "application/json"}
    answer = proxy.client.post(path, content=body, headers={name: value for name, value in headers.items() if value})
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "not_allowed")
    assert not decode.seen


@pytest.mark.slow  # its import takes seconds
def test_openais_client_understands_both_sides_errors(site: Site) -> None:
    openai = pytest.importorskip("openai")
    proxy, decode = pair(site)
    client = openai.OpenAI(base_url=f"{proxy.url}/v1", api_key="sk-one", max_retries=0)
    with client:
        done = client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "hello"}])
        assert done.choices[0].message.content == "".join(WORDS)
        assert done.usage.total_tokens == done.usage.prompt_tokens + len(WORDS)
        stream = client.completions.create(model="tiny", prompt="hello", stream=True)
        assert "".join(chunk.choices[0].text for chunk in stream) == "".join(WORDS)
        with pytest.raises(openai.BadRequestError) as caught:
            client.completions.create(model="tiny", prompt="x", extra_body={"kv_transfer_params": {}})
        assert (caught.value.code, caught.value.param) == ("not_allowed", "kv_transfer_params")
        decode.stop()
        with pytest.raises(openai.APIStatusError) as failed:
            client.completions.create(model="tiny", prompt="x")
        assert failed.value.code == "engine_unreachable"


def test_sixteen_at_once(site: Site) -> None:
    proxy, decode = pair(site)
    decode.gate.clear()
    prompts = [f"prompt {number}" for number in range(16)]
    with ThreadPoolExecutor(16) as threads:
        answers = [threads.submit(proxy.post, prompt=prompt, stream=True, user=prompt) for prompt in prompts]
        until(lambda: len(decode.seen) == 16)
        assert proxy.client.get("/health").json()["engines"][1]["in_flight"] == 16
        decode.gate.set()
        assert {answer.result().content for answer in answers} == {b"".join(events({"model": "tiny"}, "decode-0"))}
    assert sorted(seen.fields["prompt"] for seen in decode.seen) == sorted(prompts)
    assert proxy.client.get("/health").json()["engines"][1]["in_flight"] == 0


def test_too_many_at_once(site: Site) -> None:
    proxy, decode = pair(site, max_requests=2)
    decode.wait.clear()
    with ThreadPoolExecutor(2) as threads:
        held = [threads.submit(proxy.post, prompt="hello") for _ in range(2)]
        until(lambda: len(decode.seen) == 2)
        refused = proxy.post(prompt="hello")
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "overloaded")
        assert refused.headers["retry-after"] == "1"
        assert proxy.client.get("/health").status_code == 200, "whoever watches still gets an answer"
        decode.wait.set()
        assert [answer.result().status_code for answer in held] == [200, 200]
    assert proxy.post(prompt="hello").status_code == 200


def test_api_keys(site: Site) -> None:
    proxy, decode = pair(site, keys="sk-one\nsk-two\n")
    for shown in (
        {},
        {"authorization": "Bearer sk-thr"},
        {"authorization": "Basic sk-one"},
        {"authorization": "sk-one"},
    ):
        refused = proxy.post(prompt="hello", headers=shown)
        assert (refused.status_code, refused.json()["error"]["type"]) == (401, "authentication_error")
        assert refused.headers["www-authenticate"] == "Bearer"
        assert "sk-" not in refused.text
    assert proxy.client.get("/metrics").status_code == 401
    assert proxy.client.get("/health").status_code == 200
    assert not decode.seen
    assert proxy.post(prompt="hello", headers={"authorization": "Bearer sk-two"}).status_code == 200
    assert decode.seen[0].headers["authorization"] == "Bearer sk-two"


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_goes_away_ends_the_engines_work(site: Site, stream: bool) -> None:
    proxy, decode = pair(site)
    (decode.gate if stream else decode.wait).clear()
    body = json.dumps({"prompt": "hello", "stream": stream}).encode()
    client = socket.create_connection(("127.0.0.1", int(proxy.url.rpartition(":")[2])))
    client.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(body) + body)
    if stream:
        assert client.recv(1 << 16)
    until(lambda: decode.seen)
    assert not decode.seen[0].gone
    client.close()
    until(lambda: decode.seen[0].gone)
    until(lambda: proxy.client.get("/health").json()["engines"][1]["in_flight"] == 0)
    assert proxy.count('lmkv_proxy_requests_total{path="/v1/completions",status="499"}') == 1
    decode.wait.set()
    decode.gate.set()
    assert proxy.post(prompt="hello").status_code == 200


def test_a_slow_client_holds_the_engine_back(site: Site) -> None:
    proxy, decode = pair(site)
    decode.blob = bytes(range(256)) * (1 << 18)
    with proxy.client.stream("POST", "/v1/completions", json={"prompt": "x"}) as answer:
        parts = answer.iter_raw()
        got = next(parts)
        until(lambda: decode.sent > 0)
        settled = 0
        while settled != decode.sent:
            settled = decode.sent
            time.sleep(0.2)
        assert settled < len(decode.blob) // 2, "what nobody reads is not kept in the proxy"
        assert got + b"".join(parts) == decode.blob


def test_engine_that_dies_is_replaced_and_found_again(site: Site) -> None:
    proxy, _, [one, two] = site.pd(decode=2)
    assert {proxy.post(prompt="hello").json()["system_fingerprint"] for _ in range(4)} == {"decode-0", "decode-1"}
    one.stop()
    assert {proxy.post(prompt="hello").json()["system_fingerprint"] for _ in range(6)} == {"decode-1"}
    until(lambda: not proxy.client.get("/health").json()["engines"][1]["up"])
    assert proxy.count(f'lmkv_proxy_engine_up{{engine="{one.url}",role="decode"}}') == 0
    two.stop()
    answer = proxy.post(prompt="hello")
    assert (answer.status_code, answer.json()["error"]["code"]) == (502, "engine_unreachable")
    assert "127.0.0.1" not in answer.text
    until(lambda: proxy.client.get("/health").status_code == 503)
    one.start(one.port)
    assert proxy.post(prompt="hello").status_code == 200, "rather one that is taken for down than none"
    until(lambda: proxy.client.get("/health").status_code == 200)


def test_engine_that_says_it_is_not_well_gets_nothing(site: Site) -> None:
    proxy, _, [one, _] = site.pd(decode=2)
    one.health = 503
    until(lambda: not proxy.client.get("/health").json()["engines"][1]["up"])
    assert {proxy.post(prompt="hello").json()["system_fingerprint"] for _ in range(4)} == {"decode-1"}
    one.health = 200
    until(lambda: proxy.client.get("/health").json()["engines"][1]["up"])


def test_least_loaded_and_round_robin(site: Site) -> None:
    proxy, _, [one, two] = site.pd(decode=2)
    one.wait.clear()
    two.wait.clear()
    with ThreadPoolExecutor(8) as threads:
        held = []
        for number in range(8):
            held.append(threads.submit(proxy.post, prompt="hello"))
            until(lambda: len(one.seen) + len(two.seen) == number + 1)  # noqa: B023  used at once
        assert (len(one.seen), len(two.seen)) == (4, 4)
        two.wait.set()
        until(lambda: sum(answer.done() for answer in held) == 4)
        held += [threads.submit(proxy.post, prompt="hello") for _ in range(3)]
        until(lambda: len(two.seen) == 7)
        assert len(one.seen) == 4
        one.wait.set()
        assert all(answer.result().status_code == 200 for answer in held)


SSE = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"


def test_engine_that_breaks_off_in_mid_answer(site: Site) -> None:
    event = b'data: {"half": 1}\n\n'
    url = site.raw(SSE + b"%x\r\n%s\r\n" % (len(event), event))
    proxy = site.proxy(prefill=(url,), decode=((url, "node-0:1"),))
    got = b""
    with pytest.raises(httpx.RemoteProtocolError), proxy.client.stream("POST", "/v1/completions", json={}) as answer:  # noqa: PT012
        for part in answer.iter_raw():
            got += part
    assert got.startswith(event)
    error = json.loads(got.removeprefix(event).strip().removeprefix(b"data: "))["error"]
    assert (error["code"], error["type"]) == ("engine_broke_off", "server_error")
    assert proxy.count(f'lmkv_proxy_engine_failures_total{{engine="{url}",kind="closed",role="decode"}}') == 1


SAID = (
    (b"HTTP/1.1 200 OK\r\n\r\nuntil the end", 200, b"until the end"),
    (b"HTTP/1.1 103 Early Hints\r\nlink: x\r\n\r\nHTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok", 200, b"ok"),
    (b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok", 200, b"ok"),
    (SSE + b"2\r\nok\r\n0\r\nx-trailer: 1\r\n\r\n", 200, b"ok"),
    (b"HTTP/1.1 204 No Content\r\n\r\n", 204, b""),
    (b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nokHTTP/1.1 200 OK\r\n\r\n", 502, None),
    (b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\n", 502, None),
    (b"HTTP/1.1 101 Switching\r\nupgrade: x\r\nconnection: upgrade\r\n\r\n", 502, None),
    (b"HTTP/1.1 200 OK\r\n" + b"x: y\r\n" * 100_000, 502, None),
    (b"HTTP/1.1 200 OK\r\ncontent-length: x\r\n\r\n", 502, None),
    (b"\x80\x04cos\nsystem\n(S'true'\ntR.", 502, None),
    (b"", 502, None),
)


def test_answers_of_all_kinds(site: Site) -> None:
    url = site.raw(*(said for said, _, _ in SAID for _ in range(2)))
    proxy = site.proxy(prefill=(url,), decode=((url, "node-0:1"),), health_interval="60s")
    for said, status, content in SAID:
        for _ in range(2):
            answer = proxy.post(prompt="hello")
            assert answer.status_code == status, said[:99]
            if content is not None:
                assert answer.content == content
            else:
                assert answer.json()["error"]["code"] == "engine_unreachable"


def test_kept_connection_that_was_closed_meanwhile(site: Site) -> None:
    answer = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok"
    closed = threading.Event()

    def once_and_hang_up(sock: socket.socket) -> None:
        sock.sendall(answer)  # as if it were kept
        closed.wait(20)  # …and it ends only when the proxy has begun the next request, or earlier

    url = site.raw(once_and_hang_up, answer)
    proxy = site.proxy(prefill=(url,), decode=((url, "node-0:1"),), health_interval="60s")
    assert proxy.post(prompt="hello").text == "ok"
    threading.Timer(0.05, closed.set).start()
    assert proxy.post(prompt="hello").text == "ok"
    assert proxy.count(f'lmkv_proxy_engine_requests_total{{engine="{url}",role="decode"}}') == 2


def test_engine_that_says_nothing(site: Site) -> None:
    proxy, decode = pair(site, silence="200ms")
    decode.wait.clear()
    answer = proxy.post(prompt="hello")
    assert (answer.status_code, answer.json()["error"]["code"]) == (504, "engine_timeout")
    until(lambda: decode.seen[0].gone)


def test_a43_bytes_that_are_no_request(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    proxy, decode = pair(site)
    port = int(proxy.url.rpartition(":")[2])
    endless = socket.create_connection(("127.0.0.1", port))
    endless.sendall(b"GET / HTTP/1.1\r\n")
    with pytest.raises(OSError):  # noqa: PT011, PT012  reset or broken pipe, sooner or later
        for _ in range(100):
            endless.sendall(b"x: y\r\n" * 10_000)
    monkeypatch.setattr("lmkv_backend_nixl_pd.proxy.connections.HEAD_SECONDS", 0.2)
    rng = random.Random(43)
    whole = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 20\r\n\r\n" + b'{"prompt": "hello" }'
    hostile = [
        b"\x80\x04cos\nsystem\n(S'true'\ntR.",
        b"POST / HTTP/1.1\r\ncontent-length: 1152921504606846976\r\n\r\n",
        b"POST / HTTP/1.1\r\ncontent-length: 99999999999999999999999\r\n\r\n",
        b"POST / HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\nffffffffffffffff\r\n",
        b"POST / HTTP/1.1\r\ncontent-length: 1\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
        b"GET /\xff HTTP/1.1\r\n\r\n",
        b"GET / HTTP/1.1\r\nupgrade: websocket\r\nconnection: upgrade\r\n\r\n",
        b"GET / HTTP/1.1\r\nx: " + b"y" * (1 << 20),
        *(bytes(rng.randbytes(rng.randrange(1, 200))) for _ in range(50)),
        *(bytearray(whole) for _ in range(150)),
    ]
    for said in hostile:
        if isinstance(said, bytearray):
            said[rng.randrange(len(whole))] = rng.randrange(256)
        with socket.create_connection(("127.0.0.1", port)) as client:
            client.sendall(said)
    silent = socket.create_connection(("127.0.0.1", port))
    half = socket.create_connection(("127.0.0.1", port))
    half.sendall(whole[:30])
    assert silent.recv(1) == half.recv(1) == b"", "who says nothing is cut off"
    for client in (silent, half, endless):
        client.close()
    assert proxy.post(prompt="hello").status_code == 200
    assert proxy.client.get("/health").json()["engines"][1]["in_flight"] == 0
    assert decode.seen


def test_body_that_does_not_come(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lmkv_backend_nixl_pd.proxy.exchange.BODY_SECONDS", 0.1)
    proxy, _ = pair(site)
    port = int(proxy.url.rpartition(":")[2])
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
    connection.putrequest("POST", "/v1/completions")
    connection.putheader("content-length", "100")
    connection.endheaders(b"{")
    answer = connection.getresponse()
    assert (answer.status, json.loads(answer.read())["error"]["code"]) == (408, "body_too_slow")
    connection.close()


def test_body_that_does_not_come_by_a_timer_that_is_early() -> None:
    """A loop calls what is due within the resolution of its clock."""
    scope = {"method": "POST", "path": "/", "query_string": b"", "raw_path": b"/", "headers": []}

    async def receive() -> dict[str, Any]:
        return await asyncio.get_running_loop().create_future()  # never

    async def send(_: Any) -> None:
        """Nothing is sent."""

    async def take() -> None:
        loop = asyncio.get_running_loop()
        loop._clock_resolution = 2 * BODY_SECONDS  # type: ignore[attr-defined]
        loop.call_later(0.05, lambda: None)  # wakes it
        await Exchange(scope, receive, send).take_body(10)

    with pytest.raises(ApiError) as caught:
        asyncio.run(take())
    assert (caught.value.status, caught.value.code) == (408, "body_too_slow")
