"""The `options:` of a tier with `backend: p2p`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated
from urllib.parse import urlsplit

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, SecretStr, model_validator

from lmkv.peer.address import parse_address
from lmkv.secrets import Secret  # noqa: TC001  pydantic needs it when the module is imported
from lmkv.units import Interval  # noqa: TC001  as above

if TYPE_CHECKING:
    from typing_extensions import Self


def _address(text: str) -> str:
    parse_address(text)
    return text


def _url(text: str) -> str:
    parts = urlsplit(text)
    if parts.scheme not in {"http", "https"} or not parts.hostname or parts.username or parts.query or parts.fragment:
        raise ValueError("is no address of a controller, such as http://controller.example:7800, and nothing else")
    return text.rstrip("/")


class P2POptions(BaseModel):
    """How other nodes are found, and how much of them is read."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    peers: tuple[Annotated[str, AfterValidator(_address)], ...] = Field(
        default=(), max_length=256, description="Peer addresses (`host:port`) of the other nodes, without a controller."
    )
    controller: Annotated[str, AfterValidator(_url)] | None = Field(
        default=None, description="URL of the controller, whose directory knows who has what; instead of `peers`."
    )
    token: Secret = Field(default=SecretStr(""), description="Token of the controller with the role `read`.")
    ca: str | None = Field(
        default=None, description="File of the CA certificates that the controller's certificate is checked with."
    )
    below: bool = Field(
        default=True, description="Read also what peers have in slower tiers of their own; they load it first."
    )
    remember: Interval = Field(default=60.0, description="Time for which it is remembered who has a chunk.")
    rest: Interval = Field(default=2.0, description="Time for which a peer that failed is left alone.")

    @model_validator(mode="after")
    def _one_way(self) -> Self:
        if bool(self.peers) == (self.controller is not None):
            raise ValueError("give either `peers` or `controller`: the other nodes have to be found one way")
        if self.controller is None and (self.token.get_secret_value() or self.ca is not None):
            raise ValueError("`token` and `ca` are for a controller, and none is given")
        return self
