"""Names of models: clients use those that an engine serves under, lmkv those that the engine has loaded."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Final, NamedTuple

import msgspec

if TYPE_CHECKING:
    from lmkv_backend_nixl_pd.proxy.client import Client, Headers

FRESH_SECONDS: Final = 60.0
MAX_ANSWER: Final = 4 << 20
_OK: Final = 200


class Card(msgspec.Struct):
    """A line of /v1/models."""

    id: str
    root: str | None = None
    parent: str | None = None


class Cards(msgspec.Struct):
    """Answer of /v1/models."""

    data: list[Card] = []


class Model(NamedTuple):
    """A model as lmkv's namespaces have it."""

    root: str
    adapter: str = ""
    """Name of the LoRA adapter; empty: none."""


class Models:
    """What engines said of the models that they serve; asked again after a minute, or for a name that is not known."""

    def __init__(self, silence: float) -> None:
        self._silence = silence
        self._known: dict[str, Model] = {}
        self._until = 0.0

    async def find(self, name: str, client: Client, headers: Headers) -> Model | None:
        """The model of that name (empty: the engine's own); None when the engine does not say.

        Args:
            name: as the client has it.
            client: of an engine, to ask.
            headers: of the client, for its API key.
        """
        if time.monotonic() > self._until or name not in self._known:
            with await client.send("GET", b"/v1/models", headers, b"", silence=self._silence) as answer:
                content = await answer.read(MAX_ANSWER)
                if answer.status != _OK:
                    return None
            self._known = _read(content)
            self._until = time.monotonic() + FRESH_SECONDS
        return self._known.get(name)


def _read(content: bytes) -> dict[str, Model]:
    try:
        cards = msgspec.json.decode(content, type=Cards).data
    except msgspec.DecodeError:
        return {}
    roots = {card.id: card.root or card.id for card in cards if card.parent is None}
    known = {name: Model(root) for name, root in roots.items()}
    for card in cards:
        if card.parent is not None:
            known[card.id] = Model(roots.get(card.parent, card.parent), card.id)
    if roots:
        known.setdefault("", Model(next(iter(roots.values()))))
    return known
