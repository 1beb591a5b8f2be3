"""The bodies of requests and answers; the OpenAPI schema is made of them. Unknown keys are refused."""

# No `from __future__ import annotations`: pydantic and FastAPI read these annotations.

from typing import Annotated, Any, Final, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, Strict, model_validator

from lmkv.controller.records import State

MAX_TOKENS: Final = 4 << 20
MAX_CHUNKS: Final = 1 << 16
MAX_MEDIA: Final = 4096
MAX_TEXT: Final = 1024
EVERY: Final = "*"
"""In place of a node's name: all of them."""


def _numbers(value: Any) -> Any:
    """JSON may write 1 as 1.0. Pydantic takes that for an integer only where it takes "1" and true for one, too."""
    if isinstance(value, list) and not set(map(type, value)) <= {int, float}:
        raise ValueError("should be whole numbers")
    return value


def _number(value: Any) -> Any:
    return _numbers([value])[0]


_Token = Annotated[int, Strict(strict=False), Field(ge=0, le=0xFFFFFFFF)]
Tokens = Annotated[list[_Token], Field(min_length=1, max_length=MAX_TOKENS), BeforeValidator(_numbers)]
Digest = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
NamespaceId = Annotated[str, Field(pattern=r"^[0-9a-f]{32}$")]
Text = Annotated[str, Field(max_length=MAX_TEXT)]
Name = Annotated[str, Field(min_length=1, max_length=MAX_TEXT)]
NodeName = Annotated[str, Field(min_length=1, max_length=MAX_TEXT, description="Name of a node, see `nodes`.")]
TierName = Annotated[str, Field(min_length=1, max_length=MAX_TEXT, description="Name of a tier of the node.")]
Seconds = Annotated[float, Field(gt=0, le=365 * 86400, allow_inf_nan=False)]


class Model(BaseModel):
    """Base of all bodies. Messages about a wrong one never quote it: it may hold a prompt."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, hide_input_in_errors=True)


# --- requests --------------------------------------------------------------------------------------------------------


class Media(Model):
    """Tokens that stand for an image, a sound and so on; see the key format."""

    identity: Annotated[str, Field(min_length=1, max_length=4096, description="Names the content in full.")]
    start: Annotated[
        int,
        Field(ge=0, lt=1 << 32, description="Position of its first token in the prompt."),
        Strict(strict=False),
        BeforeValidator(_number),
    ]
    length: Annotated[
        int, Field(ge=1, lt=1 << 32, description="In tokens."), Strict(strict=False), BeforeValidator(_number)
    ]


def _chosen(schema: dict[str, Any]) -> None:
    """What `Chunks.check` asks, in words of JSON Schema."""
    given = {"type": "array", "minItems": 1}
    schema["allOf"] = [
        {
            "oneOf": [
                {"required": ["tokens"], "properties": {"tokens": given, "digests": False}},
                {"required": ["digests"], "properties": {"digests": given, "tokens": False}},
            ]
        },
        {"anyOf": [{"required": ["model"]}, {"required": ["namespace"]}]},
    ]


class Chunks(Model):
    """Which chunks: those of a prompt, by its tokens or its digests, in the namespaces of a model."""

    model_config = ConfigDict(json_schema_extra=_chosen)

    model: Name = Field(default="", description="Model as the engine names it. All its namespaces are meant.")
    revision: Name = Field(default="", description="Only namespaces of this revision.")
    namespace: NamespaceId = Field(default="", description="This one namespace, see `nodes`. Also instead of `model`.")
    tokens: Tokens = Field(default=[], description="Token ids of the prompt. Hashed at once; kept nowhere.")
    digests: Annotated[list[Digest], Field(min_length=1, max_length=MAX_CHUNKS)] = Field(
        default=[], description="The chain's digests, in order, instead of `tokens`."
    )
    adapter: Text = Field(default="", description="With `tokens`: adapter (LoRA) that the prompt was computed with.")
    adapter_version: Text = ""
    salt: Text = Field(default="", description="With `tokens`: separates tenants.")
    media: Annotated[list[Media], Field(max_length=MAX_MEDIA)] = []

    @model_validator(mode="after")
    def _check(self) -> "Chunks":
        if bool(self.tokens) == bool(self.digests):
            raise ValueError("give either tokens or digests")
        if not self.model and not self.namespace:
            raise ValueError("give a model or a namespace")
        return self


class LookupRequest(Chunks):
    """What is looked up."""

    chunks: bool = Field(default=False, description="Also say of each chunk whether it is there (`held`).")


class PinRequest(Chunks):
    """What to pin."""

    node: NodeName = Field(default="", description="Only there. Default: on every node that has them.")
    seconds: Seconds | None = Field(default=None, description="Until `unpin` where it is null or left out.")


class UnpinRequest(Chunks):
    """What to unpin."""

    node: NodeName = Field(default="", description="Only there. Default: on every node that has them.")


class Source(Model):
    """Where from."""

    node: NodeName
    tier: TierName = Field(default="", description="Only what lies in this tier. Default: wherever it lies there.")


class Target(Model):
    """Where to."""

    node: NodeName
    tier: TierName


class MoveRequest(Chunks):
    """What to move or copy."""

    source: Source
    target: Target


class ClearRequest(Model):
    """What to clear."""

    node: NodeName = Field(description="Name of a node, or `*` for all of them.")
    tier: TierName | None = Field(default=None, description="Default: all tiers that are the node's own.")
    model: Name | None = Field(default=None, description="Only the namespaces of this model.")
    namespace: NamespaceId | None = Field(default=None, description="Only this namespace.")


class CompressRequest(Chunks):
    """What to store anew."""

    node: NodeName
    tier: TierName
    codec: Name = Field(description="A codec of the node, or several joined by `+` in order, such as `zstd+aes-gcm`.")


class DecompressRequest(Chunks):
    """What to store anew as it is in memory."""

    node: NodeName
    tier: TierName
    codec: Name = Field(default="identity", description="What is left on it: `aes-gcm` in a tier that encrypts.")


# --- answers ---------------------------------------------------------------------------------------------------------


class Error(Model):
    """What is wrong, and what to do."""

    kind: str = Field(description="Stable word for programs.")
    message: str
    known: list[str] | None = Field(default=None, description="What exists of what was asked for.")


class ErrorBody(Model):
    """Body of every error."""

    error: Error


class TierHit(Model):
    """What one tier of a node has."""

    tier: str
    backend: str = Field(description="What the tier is: `cpu`, `disk` and so on.")
    hit_tokens: int = Field(description="Leading tokens that lie in this tier alone.")
    held: str | None = Field(default=None, description="Bitmap of the prompt's chunks, hexadecimal, lowest bit first.")


class NodeHit(Model):
    """What one node has of a prompt, in one namespace."""

    node: str
    namespace: str
    hit_tokens: int = Field(description="Leading tokens that it has, in whichever tier.")
    tiers: list[TierHit] = Field(description="Fastest first; tiers without any of them are left out.")
    load: float = Field(description="How busy its peer port is: 0 idle, 1 at its limit.")
    endpoints: dict[str, str]


class LookupAnswer(Model):
    """Who has how much of a prompt, best node first."""

    tokens: int | None = Field(description="Tokens of the prompt; null where digests were given.")
    nodes: list[NodeHit]


class TierState(Model):
    """One tier of a node."""

    name: str
    backend: str
    capacity_bytes: int = Field(description="0: the store limits itself.")
    used_bytes: int
    shared: bool
    writable: bool


class NamespaceState(Model):
    """One namespace that a node serves."""

    namespace: str
    model: str
    revision: str
    kv_dtype: str
    chunk_tokens: int
    page_tokens: int
    shards: int


class NodeState(Model):
    """One node."""

    node: str
    state: Literal["connected", "away"] = Field(description="`away`: dropped unless it comes back in time.")
    synced: bool = Field(description="The directory knows all that it has.")
    incarnation: str = Field(description="Another one for each start of the node's service.")
    load: float = Field(description="How busy its peer port is: 0 idle, 1 at its limit.")
    endpoints: dict[str, str]
    tiers: list[TierState]
    codecs: list[str]
    namespaces: list[NamespaceState]


class NodesAnswer(Model):
    """Every node that is registered."""

    nodes: list[NodeState]


class ChunkResult(Model):
    """How one chunk of a job fared."""

    namespace: str
    digest: str
    node: str
    state: Literal["waiting", "done", "failed"]
    reason: str | None = None


class JobAnswer(Model):
    """One job."""

    id: str
    verb: str
    state: State
    created: float = Field(description="Seconds since 1970, as the rest.")
    started: float | None
    ended: float | None
    by: str = Field(description="Name of the token that asked for it.")
    total: int = Field(description="Chunks, each once for every node where it is worked on.")
    done: int
    failed: int
    counts: dict[str, dict[str, int]] = Field(description="Node → what → number; of `clear`: chunk shards by tier.")
    error: str | None = Field(description="Why it failed as a whole, or the first reason of a chunk that failed.")
    chunks: list[ChunkResult] | None = Field(default=None, description="With `?chunks=true`, or those that failed.")


class JobsAnswer(Model):
    """Jobs, newest first."""

    jobs: list[JobAnswer]


class Health(Model):
    """Whether the controller works."""

    state: Literal["ok", "degraded"]
    detail: str
    nodes: int
    version: str
