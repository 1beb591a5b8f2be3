"""Who has what: asked of the peers themselves, or of the controller's directory."""

from __future__ import annotations

import ssl
import threading
import time
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Final, NamedTuple

import httpx
import msgspec

from lmkv.errors import BackendError, ConfigError, LmkvError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from concurrent.futures import Future

    from lmkv.peer.peers import Peers
    from lmkv_backend_p2p.options import P2POptions

ANSWER_BYTES: Final = 32 << 20
"""A longer answer of a controller is none."""
_MIN_SECONDS: Final = 0.05


class Holder(NamedTuple):
    """One peer that has some of what was asked for."""

    address: str
    held: list[bool]
    """One for each digest: all shards of it."""
    wait: float
    """How busy it is: the less the better. Comparable within one answer only."""


class Resting:
    """Peers that failed, and are not asked for a while. Thread-safe."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._until: dict[str, float] = {}
        self._lock = threading.Lock()

    def failed(self, address: str) -> None:
        """Leave it alone from now on."""
        with self._lock:
            self._until[address] = time.monotonic() + self._seconds

    def well(self, address: str) -> bool:
        """It may be asked."""
        with self._lock:
            until = self._until.get(address)
            if until is not None and until <= time.monotonic():
                del self._until[address]
                until = None
            return until is None


class Source(ABC):
    """Finds holders. Thread-safe; blocking."""

    @abstractmethod
    def holders(self, namespace: bytes, digests: Sequence[bytes], until: float) -> list[Holder]:
        """Every peer that can be reached and has some of `digests`, by `until` (time of `time.monotonic`).

        Raises:
            BackendError: there is nobody who can say.
        """

    @abstractmethod
    def look(self, until: float) -> str:
        """Why it cannot be used now; empty: it can."""

    def close(self) -> None:  # noqa: B027  a default, not a duty
        """Let go of connections."""


class Listed(Source):
    """The peers of a list, each asked what it has."""

    def __init__(self, options: P2POptions, resting: Resting, peers: Callable[[], Peers]) -> None:
        self._addresses = list(dict.fromkeys(options.peers))
        self._below = options.below
        self._resting = resting
        self._peers = peers

    def holders(self, namespace: bytes, digests: Sequence[bytes], until: float) -> list[Holder]:
        """See `Source`. Peers that do not answer are left alone for a while."""
        answers, error = self._ask(namespace, digests, until)
        if not answers:
            raise BackendError(f"no peer answers: {error or 'all are left alone after failures'}")
        return [Holder(address, held, wait) for address, (held, wait) in answers.items() if any(held)]

    def look(self, until: float) -> str:
        """See `Source`."""
        answers, error = self._ask(bytes(16), [], until)
        return "" if answers else f"no peer answers: {error or 'all are left alone after failures'}"

    def _ask(
        self, namespace: bytes, digests: Sequence[bytes], until: float
    ) -> tuple[dict[str, tuple[list[bool], float]], LmkvError | None]:
        """What each peer that answers says, and the last error."""
        peers = self._peers()
        asked: dict[str, Future[tuple[list[bool], float]]] = {}
        last: LmkvError | None = None
        for address in self._addresses:
            if self._resting.well(address):
                asked[address] = peers.submit(peers.link(address).has(namespace, digests, until, below=self._below))
        answers: dict[str, tuple[list[bool], float]] = {}
        for address, future in asked.items():
            try:
                answers[address] = future.result()
            except LmkvError as error:
                if error.kind == "self":  # a list that is the same on all nodes
                    self._addresses = [each for each in self._addresses if each != address]
                    continue
                last = error
                self._resting.failed(address)
        return answers, last


class _TierHit(msgspec.Struct):
    held: str


class _NodeHit(msgspec.Struct):
    node: str
    namespace: str
    tiers: list[_TierHit]
    load: float
    endpoints: dict[str, str]


class _Lookup(msgspec.Struct):
    nodes: list[_NodeHit]


class Directory(Source):
    """The controller's directory, asked over HTTP."""

    def __init__(self, options: P2POptions, resting: Resting, peers: Callable[[], Peers]) -> None:
        """Raises `ConfigError` when the CA file cannot be used."""
        assert options.controller is not None
        self._url = options.controller
        self._resting = resting
        self._peers = peers
        token = options.token.get_secret_value()
        headers = {"authorization": f"Bearer {token}"} if token else {}
        self._client = httpx.Client(base_url=self._url, headers=headers, verify=_verify(options.ca), trust_env=False)

    def holders(self, namespace: bytes, digests: Sequence[bytes], until: float) -> list[Holder]:
        """See `Source`."""
        body = {"namespace": namespace.hex(), "digests": [digest.hex() for digest in digests], "chunks": True}
        content = self._asked("POST", "/v1/lookup", until, body, unknown=b'{"nodes":[]}')
        try:
            nodes = msgspec.json.decode(content, type=_Lookup).nodes
            found = [(hit, _bits([tier.held for tier in hit.tiers], len(digests))) for hit in nodes]
        except (msgspec.DecodeError, msgspec.ValidationError, ValueError) as e:
            raise BackendError(f"controller {self._url}: an answer that is none: {e}") from None
        me = self._peers().name
        return [
            Holder(address, held, hit.load)
            for hit, held in found
            if (address := hit.endpoints.get("peer")) and hit.node != me and any(held) and self._resting.well(address)
        ]

    def look(self, until: float) -> str:
        """See `Source`."""
        try:
            self._asked("GET", "/v1/health", until)
        except BackendError as e:
            return str(e)
        return ""

    def _asked(self, method: str, path: str, until: float, body: object = None, *, unknown: bytes = b"") -> bytes:
        """The content of a good answer; `unknown` where the controller has never heard of the namespace."""
        left = max(_MIN_SECONDS, until - time.monotonic())
        try:
            with self._client.stream(method, path, json=body, timeout=left) as answer:
                content = b""
                for part in answer.iter_raw():
                    content += part
                    if len(content) > ANSWER_BYTES or time.monotonic() > until:
                        raise BackendError(f"controller {self._url}: its answer is too long or too slow")
        except httpx.HTTPError as e:
            raise BackendError(f"controller {self._url}: {type(e).__name__}: {e}") from None
        if answer.status_code == httpx.codes.NOT_FOUND and unknown:
            return unknown
        if answer.status_code in {httpx.codes.UNAUTHORIZED, httpx.codes.FORBIDDEN}:
            raise BackendError(f"controller {self._url}: it refuses the token: set options.token to one that may read")
        if answer.status_code != httpx.codes.OK:
            raise BackendError(f"controller {self._url}: status {answer.status_code}")
        return content

    def close(self) -> None:
        """See `Source`."""
        self._client.close()


def _verify(ca: str | None) -> ssl.SSLContext | bool:
    if ca is None:
        return True
    try:
        return ssl.create_default_context(cafile=ca)
    except (OSError, ssl.SSLError) as e:
        raise ConfigError(f"ca: {ca}: {e}") from e


def _bits(held: list[str], count: int) -> list[bool]:
    """Which of `count` chunks lie in some tier; ValueError for what is no bitmap."""
    bits = 0
    for text in held:
        bits |= int.from_bytes(bytes.fromhex(text), "little")
    return [bool(bits >> i & 1) for i in range(count)]
