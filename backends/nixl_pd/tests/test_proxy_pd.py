"""Mode `pd`: room first, then the prefill, then the decode; and whatever fails on the way."""

from __future__ import annotations

import json
import re
import socket
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pytest
from front_rig import GONE, LONG, events, tokens, until
from hypothesis import given, settings
from hypothesis import strategies as st

from lmkv.errors import ConfigError
from lmkv_backend_nixl_pd.proxy.pd import read_params, with_params

if TYPE_CHECKING:
    from front_rig import FakeEngine, RunningProxy, Site


def outcomes(proxy: RunningProxy) -> dict[str, float]:
    text = proxy.client.get("/metrics").text
    found = re.findall(r'^lmkv_proxy_transfers_total\{outcome="(.*)"\} (.*)$', text, re.MULTILINE)
    return {name: float(value) for name, value in found}


def without_params(seen: Any) -> dict[str, Any]:
    return {name: value for name, value in seen.fields.items() if name != "kv_transfer_params"}


@pytest.mark.parametrize("chat", [False, True])
def test_prompt_is_computed_there_and_decoded_here(site: Site, chat: bool) -> None:
    proxy, [prefill], [decode] = site.pd()
    path = "/v1/chat/completions" if chat else "/v1/completions"
    fields: dict[str, Any] = {"messages": [{"role": "user", "content": LONG}]} if chat else {"prompt": LONG}
    fields |= {"max_tokens": 99, "stream": True, "stream_options": {"include_usage": True}, "min_tokens": 5, "n": 2}
    fields |= {"logprobs": True, "temperature": 0.70, "stop": ["x"], "seed": 1 << 40}
    body = json.dumps({"model": "tiny", **fields}, ensure_ascii=False).encode()
    headers = {"authorization": "Bearer sk-one", "x-request-id": "r-1", "content-type": "application/json"}
    answer = proxy.client.post(path, content=body, headers=headers)
    assert answer.content == b"".join(events(fields, "decode-0"))
    [(address, admit)] = site.node.admitted
    assert address == "node-0:1"
    assert (admit.tokens, admit.model) == (len(tokens(fields)), "/models/tiny")
    assert re.fullmatch(r"[0-9a-f]{32}", admit.transfer)
    asked = prefill.seen[0]
    assert asked.path == path
    assert asked.fields["kv_transfer_params"] == {"lmkv": {"transfer": admit.transfer, "to": "node-0:1"}}
    assert (asked.fields["max_tokens"], asked.fields["n"], asked.fields["stream"]) == (1, 1, False)
    assert not {"min_tokens", "logprobs", "stop", "stream_options"} & set(asked.fields)
    assert asked.fields.get("max_completion_tokens", 1) == 1
    assert asked.fields["seed"] == 1 << 40
    for seen in (asked, decode.seen[0]):
        assert (seen.headers["authorization"], seen.headers["x-request-id"]) == ("Bearer sk-one", "r-1")
    handed = {"lmkv": {"transfer": admit.transfer, "node": "prefill-0", "tokens": admit.tokens}}
    assert decode.seen[0].fields["kv_transfer_params"] == handed
    assert decode.seen[0].body.endswith(body[1:]), "the client's own bytes"
    assert without_params(decode.seen[0]) == json.loads(body)
    assert outcomes(proxy) == {"carried": 1}
    assert not site.node.finished, "what has been transferred is the decode engine's to take"


ALONE: tuple[tuple[dict[str, Any], str], ...] = (
    ({"prompt": "short"}, "short"),
    ({"prompt": list(range(63))}, "short"),
    ({"prompt": "s" * 200}, "short"),
    ({"prompt": [LONG, LONG]}, "not-divisible"),
    ({"prompt": [[1] * 99, [2] * 99]}, "not-divisible"),
    ({"prompt": LONG, "echo": True}, "not-divisible"),
    ({"prompt": LONG, "prompt_logprobs": 0}, "not-divisible"),
    ({"prompt": LONG, "suffix": ""}, "not-divisible"),
    ({"prompt": LONG, "use_beam_search": True}, "not-divisible"),
    ({"prompt": None, "padding": LONG}, "not-divisible"),
    ({"prompt": LONG, "model": "unknown"}, "not-tokenised"),
)


def test_what_is_decoded_alone(site: Site) -> None:
    proxy, [prefill], [decode] = site.pd()
    decode.blob = b"whatever the engine says"
    expected = Counter[str]()
    for fields, outcome in ALONE:
        assert proxy.post(**fields).content == decode.blob
        expected[outcome] += 1
        assert outcomes(proxy) == expected, fields
    assert not prefill.seen
    assert not site.node.asked
    assert not any("kv_transfer_params" in seen.fields for seen in decode.seen)


def test_nested_deeply(site: Site) -> None:
    proxy, _, _ = site.pd()
    for depth in range(100, 1500, 50):
        body = b'{"model": "tiny", "messages": %s"%s"%s}' % (b"[" * depth, LONG.encode(), b"]" * depth)
        answer = proxy.client.post("/v1/chat/completions", content=body)
        assert answer.status_code in {200, 400}, answer.text


def test_token_ids_need_no_tokeniser(site: Site) -> None:
    proxy, [prefill], _ = site.pd()
    assert proxy.post(prompt=list(range(64)), echo=False, prompt_logprobs=None).status_code == 200
    assert outcomes(proxy) == {"carried": 1}
    assert site.node.admitted[0][1].tokens == 64
    assert prefill.asked["/tokenize"] == 0


def test_dead_prefill_is_replaced_under_another_transfer(site: Site) -> None:
    proxy, [one, two], [decode] = site.pd(prefill=2, health_interval="60s")
    one.status = 500
    for _ in range(2):
        assert proxy.post(prompt=LONG).status_code == 200
    assert len(two.seen) == 2
    [failed] = {seen.fields["kv_transfer_params"]["lmkv"]["transfer"] for seen in one.seen}
    until(lambda: site.node.finished == {failed: "aborted"})
    carried = [seen.fields["kv_transfer_params"]["lmkv"] for seen in decode.seen]
    assert failed not in {each["transfer"] for each in carried}
    assert {each["node"] for each in carried} == {"prefill-1"}
    one.stop()
    for _ in range(3):
        assert proxy.post(prompt=LONG).status_code == 200
    assert outcomes(proxy) == {"carried": 5}
    assert not proxy.client.get("/health").json()["engines"][0]["up"]


def test_without_a_prefill_all_is_computed_where_it_is_decoded(site: Site) -> None:
    proxy, [one, two], [decode] = site.pd(prefill=2, health_interval="60s")
    one.status = two.status = 503
    assert proxy.post(prompt=LONG).status_code == 200
    until(lambda: len(site.node.finished) == 2)
    assert {admit.transfer for _, admit in site.node.admitted} == set(site.node.finished)
    one.stop()
    two.stop()
    for _ in range(3):
        assert proxy.post(prompt=LONG).status_code == 200
    found = outcomes(proxy)
    assert found.pop("failed") == 1
    assert set(found) <= {"no-prefill", "not-tokenised"}
    assert all("kv_transfer_params" not in seen.fields for seen in decode.seen)


def test_prefill_that_takes_too_long(site: Site) -> None:
    proxy, [prefill], [decode] = site.pd(prefill_timeout="200ms")
    prefill.wait.clear()
    assert proxy.post(prompt=LONG).status_code == 200
    assert outcomes(proxy) == {"failed": 1}
    until(lambda: prefill.seen[0].gone)
    until(lambda: list(site.node.finished.values()) == ["aborted"])
    assert "kv_transfer_params" not in decode.seen[0].fields


def test_prefill_that_has_nothing_to_hand_over(site: Site) -> None:
    proxy, prefills, [decode] = site.pd(prefill=2)
    for params in (None, {}, [1], "x"):
        for prefill in prefills:
            prefill.params = params
        assert proxy.post(prompt=LONG).status_code == 200
    assert outcomes(proxy) == {"refused": 4}
    assert sum(len(prefill.seen) for prefill in prefills) == 4, "another would have no more"
    until(lambda: len(site.node.finished) == 4)
    assert not any("kv_transfer_params" in seen.fields for seen in decode.seen)


def test_a_request_that_is_wrong_gets_the_decode_engines_word_for_it(site: Site) -> None:
    proxy, [prefill, other], [decode] = site.pd(prefill=2)
    prefill.status = other.status = decode.status = 400
    answer = proxy.post(prompt=LONG)
    assert (answer.status_code, answer.json()["error"]["message"]) == (400, "decode-0 says no")
    assert len(prefill.seen) + len(other.seen) == 1, "no other prefill would do better"
    until(lambda: len(site.node.finished) == 1)


def test_waits_for_room(site: Site) -> None:
    proxy, [prefill], _ = site.pd()
    site.node.room["node-0:1"] = [0.02, 0.02, None]
    assert proxy.post(prompt=LONG).status_code == 200
    assert outcomes(proxy) == {"carried": 1}
    assert len({admit.transfer for _, admit in site.node.asked}) == 1, "the place in the queue is the transfer's"
    assert (len(site.node.asked), len(prefill.seen)) == (3, 1)
    assert not site.node.finished


def test_no_room_here_is_room_there(site: Site) -> None:
    proxy, _, [_, two] = site.pd(decode=2)
    site.node.room["node-0:1"] = [60.0]
    for _ in range(4):
        assert proxy.post(prompt=LONG).status_code == 200
    assert outcomes(proxy) == {"carried": 4}
    assert len(two.seen) == 4
    refused = [admit.transfer for address, admit in site.node.asked if address == "node-0:1"]
    until(lambda: site.node.finished == dict.fromkeys(refused, "aborted"))


def test_no_room_within_the_time_is_no_error(site: Site) -> None:
    proxy, [prefill], _ = site.pd(admission_wait="100ms")
    site.node.room["node-0:1"] = [0.03]
    assert proxy.post(prompt=LONG).status_code == 200
    assert outcomes(proxy) == {"no-room": 1}
    assert not prefill.seen
    assert len(site.node.asked) > 1
    until(lambda: list(site.node.finished.values()) == ["aborted"])


def test_requests_that_wait_are_bounded(site: Site) -> None:
    proxy, _, _ = site.pd(max_waiting=2)
    site.node.room["node-0:1"] = [0.01]
    with ThreadPoolExecutor(6) as threads:
        answers = [threads.submit(proxy.post, prompt=LONG) for _ in range(6)]
        until(lambda: outcomes(proxy) == {"queue-full": 4})
        site.node.room["node-0:1"] = [None]
        assert [answer.result().status_code for answer in answers] == [200] * 6
    assert outcomes(proxy) == {"queue-full": 4, "carried": 2}


@pytest.mark.parametrize(
    ("error", "outcome"), [(GONE, "unreachable"), (ConfigError("never", kind="too-large"), "too-large")]
)
def test_nodes_that_admit_nothing(site: Site, error: Any, outcome: str) -> None:
    proxy, [prefill], _ = site.pd()
    site.node.room["node-0:1"] = [error]
    assert proxy.post(prompt=LONG).status_code == 200
    assert outcomes(proxy) == {outcome: 1}
    assert not prefill.seen


def test_decode_engine_that_dies_before_its_answer(site: Site) -> None:
    proxy, [prefill], [one, two] = site.pd(decode=2, health_interval="60s")
    site.node.room["node-1:1"] = [60.0]
    prefill.wait.clear()
    with ThreadPoolExecutor(1) as threads:
        answer = threads.submit(proxy.post, prompt=LONG)
        until(lambda: prefill.seen)
        one.stop()
        prefill.wait.set()
        assert answer.result().json()["system_fingerprint"] == "decode-1"
    assert "kv_transfer_params" not in two.seen[0].fields, "what was transferred lies at the other node"
    transfer = site.node.admitted[0][1].transfer
    until(lambda: site.node.finished.get(transfer) == "aborted")


@pytest.mark.parametrize("stage", ["room", "prefill", "decode"])
def test_a_client_that_goes_away_leaves_nothing_behind(site: Site, stage: str) -> None:
    proxy, [prefill], [decode] = site.pd()
    body = json.dumps({"model": "tiny", "prompt": LONG}).encode()
    reached: Any = {
        "room": lambda: len(site.node.asked) > 1,
        "prefill": lambda: prefill.seen,
        "decode": lambda: decode.seen,
    }[stage]
    if stage == "room":
        site.node.room["node-0:1"] = [0.01]
    prefill.wait.clear()
    decode.wait.clear()
    if stage == "decode":
        prefill.wait.set()
    client = socket.create_connection(("127.0.0.1", int(proxy.url.rpartition(":")[2])))
    client.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(body) + body)
    until(reached)
    client.close()
    until(lambda: list(site.node.finished.values()) == ["aborted"])
    busy: FakeEngine | None = {"prefill": prefill, "decode": decode}.get(stage)
    if busy is not None:
        until(lambda: busy.seen[0].gone)
    until(lambda: all(engine["in_flight"] == 0 for engine in proxy.client.get("/health").json()["engines"]))
    asked = len(site.node.asked)
    prefill.wait.set()
    decode.wait.set()
    site.node.room.clear()
    assert proxy.post(prompt=LONG).status_code == 200
    assert len(site.node.asked) == asked + 1


def test_sixteen_at_once_over_two_and_two(site: Site) -> None:
    proxy, prefills, decodes = site.pd(prefill=2, decode=2)
    for engine in prefills:
        engine.wait.clear()
    prompts = [f"{number} {LONG}" for number in range(16)]
    with ThreadPoolExecutor(16) as threads:
        answers = [threads.submit(proxy.post, prompt=prompt, stream=True) for prompt in prompts]
        until(lambda: sum(len(engine.seen) for engine in prefills) == 16)
        assert [len(engine.seen) for engine in prefills] == [8, 8]
        for engine in prefills:
            engine.wait.set()
        assert {answer.result().status_code for answer in answers} == {200}
    assert outcomes(proxy) == {"carried": 16}
    transfers = [admit.transfer for _, admit in site.node.admitted]
    assert len(set(transfers)) == 16
    for number, engine in enumerate(decodes):
        assert len(engine.seen) == 8
        for seen in engine.seen:
            transfer = seen.fields["kv_transfer_params"]["lmkv"]["transfer"]
            assert (f"node-{number}:1", transfer) in {
                (address, admit.transfer) for address, admit in site.node.admitted
            }


plain = st.dictionaries(st.text(max_size=5), st.integers() | st.text(max_size=5) | st.lists(st.none()), min_size=1)


@settings(max_examples=30, deadline=None)
@given(fields=plain, indent=st.sampled_from([None, 1]))
def test_params_are_one_field_more(fields: dict[str, Any], indent: int | None) -> None:
    body = json.dumps(fields, indent=indent).encode()
    params = {"lmkv": {"transfer": "t", "tokens": 3}}
    assert json.loads(with_params(b" \n" + body, params)) == {"kv_transfer_params": params, **fields}


@pytest.mark.parametrize(
    "content", [b"", b"\x80\x04", b"[" * 9999, b"[]", b"{}", b'{"kv_transfer_params": 1}', b"null"]
)
def test_any_answer_of_a_prefill_is_read(content: bytes) -> None:
    assert read_params(content) == {}
