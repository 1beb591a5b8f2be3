"""Mode `pd`: a prompt is computed at a prefill engine, its KV goes to the decode engine's node, the rest is done there.

    client ──► proxy ──1 admit──► decode node      room for the whole request, under a transfer's name
                 ├────2 prefill─► prefill engine   max_tokens=1; its node pushes chunks to the decode node meanwhile
                 └────3 decode──► decode engine    the client's request and what the prefill said; the answer streams

Whatever fails on the way, the decode engine can compute all by itself, so it gets the request as the client sent it.
"""

from __future__ import annotations

import asyncio
import json
import logging
import secrets
import time
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import msgspec

from lmkv_backend_nixl_pd.proxy.client import bounded
from lmkv_backend_nixl_pd.proxy.errors import ApiError, EngineError
from lmkv_backend_nixl_pd.proxy.forward import forward
from lmkv_backend_nixl_pd.proxy.prompts import CHAT, TEXT, Prompt

if TYPE_CHECKING:
    from collections.abc import Mapping

    from lmkv_backend_nixl_pd.proxy.admission import Admission
    from lmkv_backend_nixl_pd.proxy.exchange import Exchange
    from lmkv_backend_nixl_pd.proxy.metrics import Metrics
    from lmkv_backend_nixl_pd.proxy.models import Models
    from lmkv_backend_nixl_pd.proxy.pool import Engine, Pool
    from lmkv_backend_nixl_pd.proxy.settings import Settings

logger = logging.getLogger(__name__)

PARAMS: Final = "kv_transfer_params"
MAX_PREFILL_ANSWER: Final = 16 << 20
"""Bytes; it has one token, but may echo what it was asked."""
_OK: Final = 200
_BUSY: Final = frozenset((408, 429, 500, 502, 503, 504))
"""Answers of a prefill engine after which another may do better."""
_DECODE_ONLY: Final = (
    "stream_options", "best_of", "logprobs", "top_logprobs", "logprob_token_ids", "min_tokens", "stop",
    "max_completion_tokens", "stream_interval", "return_token_ids", "return_token_offsets", "return_prompt_text",
)  # fmt: skip
"""What asks for something about the answer, of which a prefill makes none."""
_ALONE: Final = ("prompt_logprobs", "use_beam_search", "prompt_embeds", "suffix")
"""What needs the prompt computed where it is decoded, or is no plain continuation of it."""


class Route(NamedTuple):
    """How a request goes on.

    Attributes:
        outcome: `carried`, or a word for why its prompt is computed where it is decoded; label of a metric.
        engine: where it is decoded, if that matters: what has been transferred lies there.
        params: for the decode engine; empty: none.
        transfer: name.
    """

    outcome: str
    engine: Engine | None = None
    params: Mapping[str, Any] = {}
    transfer: str = ""


class PrefillDecode:
    """Serves completions over two pools."""

    def __init__(  # noqa: PLR0917  its parts
        self, settings: Settings, prefill: Pool, decode: Pool, admission: Admission, models: Models, metrics: Metrics
    ) -> None:
        self.main = decode
        self._settings = settings
        self._prefill = prefill
        self._admission = admission
        self._models = models
        self._metrics = metrics

    async def complete(self, exchange: Exchange) -> None:
        """Answer one completion request."""
        prompt = Prompt(exchange)
        check(prompt.fields)
        word = alone(prompt, self._settings.min_prefill_tokens)
        route = Route(word) if word else await self._route(prompt)
        self._metrics.transfers.add(route.outcome)
        body = with_params(prompt.body, route.params) if route.params else None
        taken = False
        try:
            engine = await forward(exchange, self.main, self._settings.silence, route.engine, body)
            taken = engine is route.engine and exchange.status == _OK
        finally:
            if route.engine is not None and route.params and not taken:
                self._admission.finish(route.engine, route.transfer, "aborted")

    def look(self, exchange: Exchange) -> None:
        """See `Mode`. Other requests take the field as well, and engines may read what is said to be compressed."""
        try:
            check(json.loads(exchange.body))  # as engines do: it takes more for JSON than others
        except (ValueError, RecursionError):
            return

    async def _route(self, prompt: Prompt) -> Route:
        """Have the prompt computed and transferred, by another prefill engine where one fails."""
        sized = await self._size(prompt)
        if isinstance(sized, str):
            return Route(sized)
        tokens, model = sized
        tried: list[Engine] = []
        route = Route("no-prefill")
        end = time.monotonic() + self._settings.prefill_timeout
        while len(tried) < self._settings.prefill_tries and self._prefill.ranked(tried, peek=True):
            transfer = secrets.token_hex(16)  # another try is another transfer: nobody confuses the two
            placed = await self._place(transfer, tokens, model)
            if isinstance(placed, str):
                return Route(placed, route.engine)
            outcome, params = "no-prefill", dict[str, Any]()
            try:
                engine = self._prefill.next(tried)
                if engine is not None:
                    tried.append(engine)
                    with placed.use(), engine.use():  # requests that come meanwhile go elsewhere
                        outcome, params = await self._compute(engine, prompt, transfer, placed, end)
            finally:
                if not params:
                    self._admission.finish(placed, transfer, "aborted")
            route = Route(outcome, placed, params, transfer)
            if outcome != "failed":
                break
        return route

    async def _size(self, prompt: Prompt) -> tuple[int, str] | str:
        """Tokens and lmkv's name of the model; a word for why there is nothing to transfer."""
        why = "no-prefill"
        for engine in self._prefill.ranked(peek=True)[: self._settings.prefill_tries]:
            try:
                tokens = await prompt.tokens(engine.client, self._settings.lookup_timeout)
                model = await self._models.find(prompt.model, engine.client, prompt.headers)
            except EngineError as error:
                engine.failed(error)
                why = "not-tokenised"
                continue
            if tokens is None or model is None:
                return "not-tokenised"
            return "short" if tokens.count < self._settings.min_prefill_tokens else (tokens.count, model.root)
        return why

    async def _place(self, transfer: str, tokens: int, model: str) -> Engine | str:
        began = time.monotonic()
        placed = await self._admission.place(transfer, tokens, model)
        self._metrics.admission_seconds.observe(time.monotonic() - began)
        return placed

    async def _compute(
        self, engine: Engine, prompt: Prompt, transfer: str, placed: Engine, end: float
    ) -> tuple[str, dict[str, Any]]:
        """One prefill: `carried` and what the engine says of it; or `failed`, or `refused` if no other does better."""
        body = prefill_body(prompt, {"lmkv": {"transfer": transfer, "to": placed.name}})
        target = CHAT if prompt.chat else TEXT
        began = time.monotonic()
        try:
            status, content = await bounded(self._ask(engine, target, prompt, body), end - began)
        except asyncio.TimeoutError:
            engine.failed(EngineError("silent", "the prefill took too long"))
            return "failed", {}
        except EngineError as error:
            engine.failed(error)
            return "failed", {}
        if status != _OK:
            logger.warning("prefill %s answered %d", engine.url, status)
            return ("failed" if status in _BUSY else "refused"), {}
        self._metrics.prefill_seconds.observe(time.monotonic() - began)
        params = read_params(content)
        return ("carried" if params else "refused"), params

    async def _ask(self, engine: Engine, target: str, prompt: Prompt, body: bytes) -> tuple[int, bytes]:
        """Status and content of a prefill engine's answer."""
        silence = self._settings.prefill_timeout
        engine.served.inc()
        with await engine.client.send("POST", target.encode(), prompt.headers, body, silence=silence) as answer:
            return answer.status, await answer.read(MAX_PREFILL_ANSWER)


def check(fields: object) -> None:
    """Refuse what is for the proxy alone to say."""
    if isinstance(fields, dict) and PARAMS in fields:
        raise ApiError(400, f"{PARAMS} is between the proxy and the engines", code="not_allowed", param=PARAMS)


def alone(prompt: Prompt, least: int) -> str:
    """Why a request is best computed where it is decoded, in a word; empty: it is not."""
    fields = prompt.fields
    if prompt.several() or fields.get("echo"):
        return "not-divisible"
    if any(fields.get(name) is not None and fields[name] is not False for name in _ALONE):
        return "not-divisible"
    if not fields.get("messages" if prompt.chat else "prompt"):
        return "not-divisible"
    return "short" if prompt.shorter_than(least) else ""


def prefill_body(prompt: Prompt, params: dict[str, Any]) -> bytes:
    """The request as a prefill engine gets it: the same prompt, one token, no stream."""
    fields = {name: value for name, value in prompt.fields.items() if name not in _DECODE_ONLY}
    fields |= {"max_tokens": 1, "n": 1, "stream": False, PARAMS: params}
    if prompt.chat:
        fields["max_completion_tokens"] = 1
    return msgspec.json.encode(fields)


def with_params(body: bytes, params: Mapping[str, Any]) -> bytes:
    """The client's own bytes with one field more."""
    at = body.index(b"{") + 1
    return b"".join((body[:at], b'"', PARAMS.encode(), b'":', msgspec.json.encode(params), b",", body[at:]))


def read_params(content: bytes) -> dict[str, Any]:
    """What a prefill's answer hands to the decode engine; empty where it has nothing."""
    try:
        params = msgspec.json.decode(content, type=_Prefilled).kv_transfer_params
    except msgspec.DecodeError:
        return {}
    return params or {}


class _Prefilled(msgspec.Struct):
    kv_transfer_params: dict[str, Any] | None = None
