"""What is asked of a controller, and what is made of its answers."""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING, Any

import httpx
import pytest
from fake_peers import FakePeers, make

from lmkv.errors import BackendError
from lmkv.testing.material import NAMESPACE, make_key
from lmkv.types import HealthState
from lmkv_backend_p2p.directory import Directory

if TYPE_CHECKING:
    from lmkv_backend_p2p.backend import P2PBackend

DIGESTS = [make_key(n).digest for n in range(5)]
A, B = "127.0.0.1:7001", "127.0.0.1:7002"


def hit(node: str, peer: str, *tiers: tuple[str, str], load: float = 0.0) -> dict[str, Any]:
    return {
        "node": node,
        "namespace": NAMESPACE.hex(),
        "hit_tokens": 0,
        "tiers": [{"tier": "t", "backend": backend, "hit_tokens": 0, "held": held} for backend, held in tiers],
        "load": load,
        "endpoints": {"peer": peer} if peer else {},
    }


class Told:
    """A controller that says what it is told to."""

    def __init__(self, *hits: dict[str, Any], status: int = 200, content: bytes | None = None) -> None:
        self.hits, self.status, self.content = hits, status, content
        self.requests: list[httpx.Request] = []

    def __call__(self, request: httpx.Request) -> httpx.Response:
        self.requests.append(request)
        content = self.content or json.dumps({"tokens": None, "nodes": self.hits}).encode()
        return httpx.Response(self.status, stream=httpx.ByteStream(content))


def backend_of(peers: FakePeers, told: Told, **options: Any) -> tuple[P2PBackend, Directory]:
    made = make(peers, controller="http://c.example:7800/", token="a-secret", **options)
    source = made._source
    assert isinstance(source, Directory)
    kept = source._client
    source._client = httpx.Client(base_url=kept.base_url, headers=kept.headers, transport=httpx.MockTransport(told))
    kept.close()
    return made, source


def holders(source: Directory, count: int = 5) -> dict[str, tuple[str, float]]:
    found = source.holders(NAMESPACE, DIGESTS[:count], time.monotonic() + 5)
    return {one.address: ("".join("01"[bit] for bit in one.held), one.wait) for one in found}


def test_the_question(peers: FakePeers) -> None:
    told = Told()
    _, source = backend_of(peers, told)
    assert holders(source) == {}
    (request,) = told.requests
    assert str(request.url) == "http://c.example:7800/v1/lookup"
    assert request.headers["authorization"] == "Bearer a-secret"
    assert request.headers["accept-encoding"] == "identity"
    asked = json.loads(request.content)
    assert asked == {"namespace": NAMESPACE.hex(), "digests": [each.hex() for each in DIGESTS], "chunks": True}


def test_tiers_of_a_node_count_together_and_the_own_node_not_at_all(peers: FakePeers) -> None:
    told = Told(
        hit("x", A, ("cpu", "03"), ("disk", "0a"), load=0.5),
        hit(peers.name, B, ("cpu", "1f")),
        hit("no port", "", ("cpu", "1f")),
        hit("nonsense", "nowhere", ("cpu", "1f")),
        hit("nothing", B, ("cpu", "00")),
    )
    _, source = backend_of(peers, told)
    assert holders(source) == {A: ("11010", 0.5)}


def test_only_the_pool_where_nothing_is_to_be_brought_up(peers: FakePeers) -> None:
    told = Told(hit("x", A, ("cpu", "03"), ("disk", "0a")), hit("y", B, ("disk", "1f")))
    _, source = backend_of(peers, told, below=False)
    assert holders(source) == {A: ("11000", 0.0)}


def test_many_chunks_are_asked_for_in_parts(peers: FakePeers, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lmkv_backend_p2p.directory.MOST", 2)
    told = Told(hit("x", A, ("cpu", "01")))
    _, source = backend_of(peers, told)
    assert holders(source) == {A: ("10101", 0.0)}
    assert len(told.requests) == 3


def test_peers_that_failed_are_left_out(peers: FakePeers) -> None:
    told = Told(hit("x", A, ("cpu", "01")), hit("y", B, ("cpu", "01")))
    made, source = backend_of(peers, told)
    made._resting.failed(A, "a reason")
    assert holders(source) == {B: ("10000", 0.0)}


def test_a_namespace_that_nobody_has_told_of(peers: FakePeers) -> None:
    made, source = backend_of(peers, Told(status=404, content=b"{}"))
    assert holders(source) == {}
    assert made.health().state is HealthState.OK


@pytest.mark.parametrize(
    ("told", "message"),
    [
        (Told(status=401, content=b"{}"), "options.token"),
        (Told(status=403, content=b"{}"), "options.token"),
        (Told(status=503, content=b"{}"), "status 503"),
        (Told(content=b"{"), "an answer that is none"),
        (Told(content=b" " * 1000), "too long"),
        (Told(hit("x", A, ("cpu", "zz"))), "a bitmap that is none"),
    ],
)
def test_other_answers_are_faults(peers: FakePeers, told: Told, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lmkv_backend_p2p.directory.ANSWER_BYTES", 999)
    made, source = backend_of(peers, told)
    with pytest.raises(BackendError, match=message) as e:
        holders(source)
    assert "a-secret" not in str(e.value)
    assert made.health().state is (HealthState.OK if "bitmap" in message else HealthState.DOWN)
