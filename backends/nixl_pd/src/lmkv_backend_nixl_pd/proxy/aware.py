"""Mode `cache-aware`: a request goes to the engine that has least to do for it.

    cost(engine) = prompt tokens - cached tokens at the engine's node + queue_tokens * requests that it works on

The tokens come from the engines' own /tokenize, what is cached where from the controller. When either does not answer
in time, nothing is taken for cached, and the least busy engine is left.
"""

from __future__ import annotations

import asyncio
import logging
import time
from typing import TYPE_CHECKING, Final

import msgspec

from lmkv_backend_nixl_pd.proxy.client import bounded
from lmkv_backend_nixl_pd.proxy.errors import EngineError
from lmkv_backend_nixl_pd.proxy.forward import forward
from lmkv_backend_nixl_pd.proxy.prompts import Prompt

if TYPE_CHECKING:
    from collections.abc import Mapping

    from lmkv_backend_nixl_pd.proxy.client import Client, Headers
    from lmkv_backend_nixl_pd.proxy.exchange import Exchange
    from lmkv_backend_nixl_pd.proxy.metrics import Metrics
    from lmkv_backend_nixl_pd.proxy.models import Models
    from lmkv_backend_nixl_pd.proxy.pool import Engine, Pool
    from lmkv_backend_nixl_pd.proxy.prompts import Tokens
    from lmkv_backend_nixl_pd.proxy.settings import Settings

logger = logging.getLogger(__name__)

REST_SECONDS: Final = 2.0
"""After a look-up without an answer the controller is left alone for so long: not every request waits for it."""
MAX_ANSWER: Final = 16 << 20
_OK: Final = 200
_NOTHING: Final = frozenset({404, 413, 422})
"""No node has such a model, or the controller does not take such a prompt: it is well."""


class NodeHit(msgspec.Struct):
    """What one node has of a prompt."""

    node: str
    hit_tokens: int


class Lookup(msgspec.Struct):
    """Answer of the controller's /v1/lookup."""

    nodes: list[NodeHit]


class Controller:
    """Asks the controller what is where."""

    def __init__(self, client: Client, token: str, seconds: float) -> None:
        self._client = client
        self._headers: Headers = [(b"content-type", b"application/json")]
        if token:
            self._headers.append((b"authorization", b"Bearer " + token.encode()))
        self._seconds = seconds
        self._rests_until = 0.0

    @property
    def rests(self) -> bool:
        """Whether it is not to be asked now."""
        return time.monotonic() < self._rests_until

    async def lookup(self, model: str, tokens: msgspec.Raw, salt: str, end: float) -> dict[str, int]:
        """Node → leading tokens that it has.

        Raises:
            EngineError: there is no answer by `end`. It is left alone for a while then.
        """
        try:
            nodes = await bounded(self._ask(model, tokens, salt), max(0.0, end - time.monotonic()))
        except asyncio.TimeoutError:
            self._rests_until = time.monotonic() + REST_SECONDS
            raise EngineError("silent", "no answer in time") from None
        except EngineError:
            self._rests_until = time.monotonic() + REST_SECONDS
            raise
        best: dict[str, int] = {}
        for found in nodes:  # one for each of a node's namespaces
            best[found.node] = max(found.hit_tokens, best.get(found.node, 0))
        return best

    async def _ask(self, model: str, tokens: msgspec.Raw, salt: str) -> list[NodeHit]:
        body = msgspec.json.encode({"model": model, "tokens": tokens, **({"salt": salt} if salt else {})})
        with await self._client.send("POST", b"/v1/lookup", self._headers, body, silence=self._seconds) as answer:
            content = await answer.read(MAX_ANSWER)
            if answer.status in _NOTHING:
                return []
            if answer.status != _OK:
                raise EngineError("refused", f"/v1/lookup: status {answer.status}")
        try:
            return msgspec.json.decode(content, type=Lookup).nodes
        except msgspec.DecodeError as error:
            raise EngineError("protocol", f"/v1/lookup: {error}") from None


class CacheAware:
    """Serves completions over one pool."""

    def __init__(
        self, settings: Settings, engines: Pool, controller: Controller, models: Models, metrics: Metrics
    ) -> None:
        self.main = engines
        self._settings = settings
        self._controller = controller
        self._models = models
        self._metrics = metrics

    async def complete(self, exchange: Exchange) -> None:
        """Answer one completion request."""
        prompt = Prompt(exchange)
        outcome, engine = await self._choose(prompt)
        self._metrics.choices.add(outcome)
        await forward(exchange, self.main, self._settings.silence, engine)

    def look(self, exchange: Exchange) -> None:
        """See `Mode`: anything may pass."""

    async def _choose(self, prompt: Prompt) -> tuple[str, Engine | None]:
        """How the engine was chosen, in a word, and the engine; None: the pool's next."""
        end = time.monotonic() + self._settings.lookup_timeout
        found = self._unfit(prompt) or await self._sized(prompt)
        if isinstance(found, str):
            return found, None
        tokens, model = found
        salt = prompt.fields.get("cache_salt")
        try:
            hits = await self._controller.lookup(model, tokens.tokens, salt if isinstance(salt, str) else "", end)
        except EngineError as error:
            logger.warning("controller: %s", error)
            return "no-controller", None
        engine = cheapest(self.main.ranked(), hits, tokens.count, self._settings.queue_tokens)
        hit = min(hits.get(engine.name, 0), tokens.count) if engine is not None else 0
        self._metrics.prompt_tokens.inc(tokens.count)
        self._metrics.hit_tokens.inc(hit)
        return ("cached" if hit else "not-cached"), engine

    def _unfit(self, prompt: Prompt) -> str:
        """Why nothing is asked about a prompt, in a word; empty: it is."""
        if prompt.shorter_than(self._settings.min_prefill_tokens):
            return "short"
        if prompt.several() or prompt.media():
            return "not-divisible"
        return "no-controller" if self._controller.rests else ""

    async def _sized(self, prompt: Prompt) -> tuple[Tokens, str] | str:
        """Tokens and lmkv's name of the model, or a word for why they are not to be had."""
        engine = next(iter(self.main.ranked(peek=True)), None)
        if engine is None:
            return "no-engine"
        try:
            return await bounded(self._tokens(prompt, engine.client), self._settings.lookup_timeout)
        except asyncio.TimeoutError:
            engine.failed(EngineError("silent", "/tokenize: no answer in time"))
        except EngineError as error:
            engine.failed(error)
        return "not-tokenised"

    async def _tokens(self, prompt: Prompt, client: Client) -> tuple[Tokens, str] | str:
        model = await self._models.find(prompt.model, client, prompt.headers)
        if model is not None and model.adapter:  # its version is in the digests, and only the engine's node knows it
            return "adapter"
        tokens = await prompt.tokens(client, self._settings.lookup_timeout)
        return (tokens, model.root) if model is not None and tokens is not None and tokens.count else "not-tokenised"


def cheapest(ranked: list[Engine], hits: Mapping[str, int], tokens: int, queue_tokens: int) -> Engine | None:
    """The engine with the least cost; among equals the first, so `ranked` is best first."""
    return min(
        ranked,
        key=lambda engine: tokens - min(hits.get(engine.name, 0), tokens) + queue_tokens * engine.busy,
        default=None,
    )
