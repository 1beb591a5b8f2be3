"""The controller's directory, asked over HTTP."""

from __future__ import annotations

import ssl
import time
from typing import TYPE_CHECKING, Final

import httpx
import msgspec

from lmkv.errors import BackendError, ConfigError, LmkvError
from lmkv_backend_p2p.sources import MOST, NOWHERE, Holder, Source, nothing

if TYPE_CHECKING:
    from collections.abc import Sequence

    from lmkv_backend_p2p.options import P2POptions
    from lmkv_backend_p2p.resting import Resting

ANSWER_BYTES: Final = 32 << 20
"""A longer answer of a controller is none."""
_MIN_SECONDS: Final = 0.05
_POOL: Final = "cpu"
"""Backend of the tier that a peer needs nothing brought up from."""


class _TierHit(msgspec.Struct):
    backend: str
    held: str


class _NodeHit(msgspec.Struct):
    node: str
    tiers: list[_TierHit]
    load: float
    endpoints: dict[str, str]


class _Lookup(msgspec.Struct):
    nodes: list[_NodeHit]


class Directory(Source):
    """The controller's directory.

    Raises:
        ConfigError: the CA file cannot be used.
    """

    def __init__(self, options: P2POptions, resting: Resting) -> None:
        assert options.controller is not None
        self._url = options.controller
        self._below = options.below
        self._resting = resting
        token = options.token.get_secret_value()
        headers = {"accept-encoding": "identity", **({"authorization": f"Bearer {token}"} if token else {})}
        verify = _verify(options.ca) if self._url.startswith("https:") else False
        self._client = httpx.Client(base_url=self._url, headers=headers, verify=verify, trust_env=False)

    def holders(self, namespace: bytes, digests: Sequence[bytes], until: float) -> list[Holder]:
        """See `Source`. Peers that failed are left out for a while, and so is this node."""
        me = self.peers.name
        found: dict[str, tuple[list[bool], float]] = {}
        for first in range(0, len(digests), MOST):
            part = digests[first : first + MOST]
            for hit in self._asked(namespace, part, until):
                address = hit.endpoints.get("peer")
                if address and hit.node != me:
                    held = found.setdefault(address, ([False] * len(digests), hit.load))[0]
                    for i, there in enumerate(self._held(hit, len(part)), start=first):
                        held[i] |= there
        return [Holder(a, held, load) for a, (held, load) in found.items() if any(held) and self._usable(a)]

    def look(self, until: float) -> None:
        """See `Source`. Asks what needs the token."""
        self._asked(NOWHERE, [nothing()], until)

    def _usable(self, address: str) -> bool:
        try:
            self.peers.link(address)
        except LmkvError as e:
            self._resting.failed(address, e)
        return self._resting.well(address)

    def _held(self, hit: _NodeHit, count: int) -> list[bool]:
        """Which of `count` chunks lie in some tier of the node that may be read."""
        bits = 0
        try:
            for tier in hit.tiers:
                if self._below or tier.backend == _POOL:
                    bits |= int.from_bytes(bytes.fromhex(tier.held), "little")
        except ValueError:
            raise BackendError(f"controller {self._url}: a bitmap that is none") from None
        return [bool(bits >> i & 1) for i in range(count)]

    def _asked(self, namespace: bytes, digests: Sequence[bytes], until: float) -> list[_NodeHit]:
        """The controller's answer; nothing where it has never heard of the namespace."""
        body = {"namespace": namespace.hex(), "digests": [digest.hex() for digest in digests], "chunks": True}
        status, content = self._post("/v1/lookup", body, until)
        if status == httpx.codes.NOT_FOUND:
            return []
        if status in {httpx.codes.UNAUTHORIZED, httpx.codes.FORBIDDEN}:
            raise BackendError(f"controller {self._url} refuses the token: set options.token to one that may read")
        if status != httpx.codes.OK:
            raise BackendError(f"controller {self._url}: status {status}")
        try:
            return msgspec.json.decode(content, type=_Lookup).nodes
        except (msgspec.DecodeError, msgspec.ValidationError) as e:
            raise BackendError(f"controller {self._url}: an answer that is none: {e}") from None

    def _post(self, path: str, body: object, until: float) -> tuple[int, bytes]:
        left = max(_MIN_SECONDS, until - time.monotonic())
        content = bytearray()
        try:
            with self._client.stream("POST", path, json=body, timeout=left) as answer:
                for part in answer.iter_raw():
                    content += part
                    if len(content) > ANSWER_BYTES or time.monotonic() > until:
                        raise BackendError(f"controller {self._url}: its answer is too long or too slow")
        except httpx.HTTPError as e:
            raise BackendError(f"controller {self._url}: {type(e).__name__}: {e}") from None
        return answer.status_code, bytes(content)

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
