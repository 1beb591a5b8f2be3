"""What a completion request asks for, as far as the proxy has to know; how many tokens its prompt has."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import msgspec

from lmkv_backend_nixl_pd.proxy.errors import ApiError, EngineError

if TYPE_CHECKING:
    from lmkv_backend_nixl_pd.proxy.client import Client, Headers
    from lmkv_backend_nixl_pd.proxy.exchange import Exchange

CHAT: Final = "/v1/chat/completions"
TEXT: Final = "/v1/completions"
MAX_TOKENS_ANSWER: Final = 64 << 20
"""Bytes of an answer of /tokenize."""
_CHAT_FIELDS: Final = (
    "model", "messages", "tools", "add_generation_prompt", "continue_final_message", "add_special_tokens",
    "chat_template", "chat_template_kwargs", "mm_processor_kwargs",
)  # fmt: skip
"""What a chat request and one to /tokenize have in common, and the tokens depend on."""
_TEXT_FIELDS: Final = ("model", "prompt", "add_special_tokens")
_OK: Final = 200


class Tokens(msgspec.Struct):
    """Answer of /tokenize."""

    count: int
    tokens: msgspec.Raw = msgspec.Raw(b"[]")


class Prompt:
    """A completion request.

    Attributes:
        fields: the body as a mapping.
        body: as the client sent it.
        model: as the client names it; may be empty.
        ids: token ids, where the client has sent those.

    Raises:
        ApiError: the body is no JSON object.
    """

    def __init__(self, exchange: Exchange) -> None:
        self.chat = exchange.path == CHAT
        self.body = exchange.body
        try:
            fields = msgspec.json.decode(self.body)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise ApiError(400, f"the body is no JSON: {error}", code="invalid_json") from None
        if not isinstance(fields, dict):
            raise ApiError(400, "the body is no JSON object", code="invalid_json")
        self.fields: dict[str, Any] = fields
        model = fields.get("model")
        self.model = model if isinstance(model, str) else ""
        self.headers: Headers = [
            (name, value)
            for name, value in exchange.headers
            if name not in {b"content-type", b"accept-encoding", b"content-encoding"}
        ] + [(b"content-type", b"application/json"), (b"accept-encoding", b"identity")]
        """The client's, for questions of the proxy's own."""
        prompt = fields.get("prompt")
        self.ids: list[int] | None = prompt if isinstance(prompt, list) and _ints(prompt) else None

    def shorter_than(self, tokens: int) -> bool:
        """Whether the prompt has certainly, or as good as, fewer tokens: a token is at least a byte of the text.

        What a chat template adds of its own does not count, nor do a tool's descriptions.
        """
        if self.ids is not None:
            return len(self.ids) < tokens
        return len(self.body) < tokens or _size(self.fields.get("messages" if self.chat else "prompt")) < tokens

    def several(self) -> bool:
        """Whether it has more than one prompt."""
        prompt = self.fields.get("prompt")
        return not self.chat and isinstance(prompt, list) and self.ids is None

    def media(self) -> bool:
        """Whether a message has more than text (images, sound): tokens alone do not say what that is."""
        messages = self.fields.get("messages")
        if not self.chat or not isinstance(messages, list):
            return False
        contents = [message.get("content") for message in messages if isinstance(message, dict)]
        return any(
            not isinstance(part, dict) or part.get("type") != "text"
            for content in contents
            if isinstance(content, list)
            for part in content
        )

    async def tokens(self, client: Client, silence: float) -> Tokens | None:
        """Its tokens by the engine's own /tokenize; None where the engine refuses. Token ids need no engine.

        Raises:
            EngineError: no answer, or none that is understood.
        """
        if self.ids is not None:
            return Tokens(len(self.ids), msgspec.Raw(msgspec.json.encode(self.ids)))
        names = _CHAT_FIELDS if self.chat else _TEXT_FIELDS
        asked = {name: self.fields[name] for name in names if name in self.fields}
        body = msgspec.json.encode(asked)
        with await client.send("POST", b"/tokenize", self.headers, body, silence=silence) as answer:
            content = await answer.read(MAX_TOKENS_ANSWER)
            if answer.status != _OK:
                return None
        try:
            return msgspec.json.decode(content, type=Tokens)
        except msgspec.DecodeError as error:
            raise EngineError("protocol", f"/tokenize: {error}") from None


def _ints(values: list[Any]) -> bool:
    return bool(values) and all(type(value) is int for value in values)


def _size(value: object) -> int:
    """Bytes of the text in a prompt, or in messages, however nested."""
    size, left = 0, [value]
    while left:
        part = left.pop()
        if isinstance(part, str):
            size += len(part) if part.isascii() else len(part.encode("utf-8", "replace"))
        elif isinstance(part, list):
            left += part
        elif isinstance(part, dict):
            left += part.values()
    return size
