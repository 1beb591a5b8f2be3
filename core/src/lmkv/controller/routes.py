"""The HTTP API, version 1."""

# No `from __future__ import annotations`: FastAPI reads these annotations.

import hashlib
from collections.abc import Awaitable, Callable
from importlib.metadata import version
from typing import Annotated, Any, Final

import msgspec
from fastapi import APIRouter, Depends, FastAPI, Header, Path, Query, Request, Response, Security, WebSocket
from fastapi.dependencies.utils import get_flat_dependant
from fastapi.responses import JSONResponse
from fastapi.security import HTTPBearer

from lmkv.controller import models as b
from lmkv.controller.agents import AgentConnection
from lmkv.controller.answers import job_answer, node_state
from lmkv.controller.auth import Principal
from lmkv.controller.guard import WAIT_MAX
from lmkv.controller.jobs import Job
from lmkv.controller.metrics import gauge
from lmkv.controller.parts import Parts
from lmkv.controller.problems import Problem, unknown
from lmkv.controller.prompts import look_up, named
from lmkv.controller.records import ENDED, Plan
from lmkv.controller.verbs import Planner
from lmkv.errors import LmkvError
from lmkv.observe.http import CONTENT_TYPE

_ERRORS: Final[dict[int | str, dict[str, Any]]] = {
    code: {"model": b.ErrorBody, "description": text}
    for code, text in {
        401: "No token, or a wrong one.",
        403: "The token's role may not do that.",
        404: "Something that the request names does not exist; `known` says what does.",
        408: "The request did not arrive in time.",
        413: "The body is too long.",
        422: "The request is not as this page says.",
        503: "What the controller keeps its state in does not answer.",
        504: "Not answered in time.",
    }.items()
}
_VERB_ERRORS: Final[dict[int | str, dict[str, Any]]] = {
    409: {"model": b.ErrorBody, "description": "The request contradicts what is there."},
    429: {"model": b.ErrorBody, "description": "Too many jobs are not over yet."},
    202: {"model": b.JobAnswer, "description": "The job goes on; ask for it by its id."},
}


def _known_parameters(request: Request) -> None:
    """A parameter that is misspelt must not be taken for one that was left out."""
    known = {field.alias for field in get_flat_dependant(request.scope["route"].dependant).query_params}
    if set(request.query_params) - known:
        there = ", ".join(sorted(known)) or "none"
        raise Problem(422, "body", f"a parameter of the URL that this path does not have; parameters: {there}")


_EACH: Final = [Security(HTTPBearer(auto_error=False)), Depends(_known_parameters)]

router = APIRouter(prefix="/v1", responses=_ERRORS, dependencies=_EACH)
"""What takes a token."""
public = APIRouter()


def _parts(request: Request) -> Parts:
    parts: Parts = request.app.state.parts
    return parts


def _principal(request: Request) -> Principal:
    principal: Principal = request.scope["principal"]
    return principal


PartsOf = Annotated[Parts, Depends(_parts)]
Who = Annotated[Principal, Depends(_principal)]
Wait = Annotated[
    float, Query(ge=0, le=WAIT_MAX, allow_inf_nan=False, description="Seconds to wait for the job to be over.")
]
Key = Annotated[
    str | None,
    Header(
        alias="Idempotency-Key",
        min_length=1,
        max_length=255,
        pattern=r"^[\x21-\x7e]+$",
        description="With the same key, the same request does nothing a second time: it answers with its job.",
    ),
]
Every = Annotated[bool, Query(description="Say of every chunk how it fared, not only of those that failed.")]
JobId = Annotated[str, Path(pattern=r"^[0-9a-f]{16}$", description="Id of a job.")]


class Ask:
    """A request for a job: who asks, how long he waits, and the key under which he may ask again."""

    def __init__(self, parts: PartsOf, who: Who, response: Response, wait: Wait = 0, key: Key = None) -> None:
        self._parts = parts
        self._who = who
        self._response = response
        self._wait = wait
        self._key = "" if key is None else hashlib.sha256(f"{who.name}\n{key}".encode()).hexdigest()

    async def begin(self, verb: str, body: b.Model, plan: Callable[[Planner], Awaitable[Plan]]) -> b.JobAnswer:
        """Begin a job, or find the one that has the key; wait for it as asked, and answer."""
        fingerprint = hashlib.sha256(f"{verb}\n{body.model_dump_json()}".encode()).hexdigest()
        job = await self._parts.jobs.known(self._key, fingerprint)
        if job is None:
            made = await plan(self._parts.planner)
            named = msgspec.structs.replace(made, by=self._who.name, key=self._key, fingerprint=fingerprint)
            job = await self._parts.jobs.submit(named)
        job = await self._parts.jobs.wait(job, self._wait)
        self._response.headers["Location"] = f"/v1/jobs/{job.id}"
        if job.state not in ENDED:
            self._response.status_code = 202
        return job_answer(job)


Asked = Annotated[Ask, Depends()]


@router.post("/lookup", name="lookup", tags=["look"])
async def lookup(parts: PartsOf, request: b.LookupRequest) -> b.LookupAnswer:
    """Who has how much of a prompt, best node first."""
    what = await named(request, await parts.fleet.namespaces())
    answer = await look_up(request, what, parts.fleet.directory, await parts.fleet.nodes())
    parts.metrics.inc("lmkv_controller_lookup_tokens_total", len(request.tokens))
    parts.metrics.inc("lmkv_controller_hit_tokens_total", answer.nodes[0].hit_tokens if answer.nodes else 0)
    return answer


@router.get("/nodes", name="nodes", tags=["look"])
async def nodes(parts: PartsOf) -> b.NodesAnswer:
    """Every node that is registered, with its tiers, codecs and namespaces."""
    spaces = await parts.fleet.namespaces()
    return b.NodesAnswer(nodes=[node_state(record, spaces) for record in (await parts.fleet.nodes()).values()])


@router.post("/pin", name="pin", tags=["verbs"], responses=_VERB_ERRORS)
async def pin(asked: Asked, body: b.PinRequest) -> b.JobAnswer:
    """Keep chunks from eviction, for a time or until they are unpinned."""
    return await asked.begin("pin", body, lambda planner: planner.pin(body))


@router.post("/unpin", name="unpin", tags=["verbs"], responses=_VERB_ERRORS)
async def unpin(asked: Asked, body: b.UnpinRequest) -> b.JobAnswer:
    """Take pins away."""
    return await asked.begin("unpin", body, lambda planner: planner.unpin(body))


@router.post("/move", name="move", tags=["verbs"], responses=_VERB_ERRORS)
async def move(asked: Asked, body: b.MoveRequest) -> b.JobAnswer:
    """Move chunks to another tier or node. They go at the source once they are safe at the target."""
    return await asked.begin("move", body, lambda planner: planner.move(body, keep=False))


@router.post("/copy", name="copy", tags=["verbs"], responses=_VERB_ERRORS)
async def copy(asked: Asked, body: b.MoveRequest) -> b.JobAnswer:
    """Copy chunks to another tier or node."""
    return await asked.begin("copy", body, lambda planner: planner.move(body, keep=True))


@router.post("/clear", name="clear", tags=["verbs"], responses=_VERB_ERRORS)
async def clear(asked: Asked, body: b.ClearRequest) -> b.JobAnswer:
    """Remove everything of a node, tier, model or namespace. Chunks that are held go when they are let go of."""
    return await asked.begin("clear", body, lambda planner: planner.clear(body))


@router.post("/compress", name="compress", tags=["verbs"], responses=_VERB_ERRORS)
async def compress(asked: Asked, body: b.CompressRequest) -> b.JobAnswer:
    """Store chunks of a tier anew with a codec."""
    return await asked.begin("compress", body, lambda planner: planner.recode("compress", body))


@router.post("/decompress", name="decompress", tags=["verbs"], responses=_VERB_ERRORS)
async def decompress(asked: Asked, body: b.DecompressRequest) -> b.JobAnswer:
    """Store chunks of a tier anew as they are in memory."""
    return await asked.begin("decompress", body, lambda planner: planner.recode("decompress", body))


@router.get("/jobs", name="jobs", tags=["jobs"])
async def jobs(parts: PartsOf, limit: Annotated[int, Query(ge=1, le=1000)] = 100) -> b.JobsAnswer:
    """The newest jobs, newest first."""
    return b.JobsAnswer(jobs=[job_answer(job) for job in await parts.jobs.recent(limit)])


@router.get("/jobs/{job}", name="job", tags=["jobs"])
async def job(
    parts: PartsOf,
    job: JobId,
    wait: Wait = 0,
    chunks: Every = False,  # noqa: FBT002  a parameter of a URL
) -> b.JobAnswer:
    """How far a job is, and how each of its chunks fared."""
    found = await parts.jobs.wait(await _job(parts, job), wait)
    return job_answer(found, every=chunks)


@router.delete("/jobs/{job}", name="cancel", tags=["jobs"])
async def cancel(parts: PartsOf, job: JobId, wait: Wait = 0) -> b.JobAnswer:
    """Cancel a job: it ends after what is under way. One that is over stays as it is."""
    found = await _job(parts, job)
    await parts.jobs.cancel(found)
    return job_answer(await parts.jobs.wait(found, wait))


@router.get("/openapi.json", include_in_schema=False)
async def openapi(request: Request) -> JSONResponse:
    """The schema."""
    app: FastAPI = request.app
    return JSONResponse(app.openapi())


@public.get("/v1/health", name="health", tags=["look"], responses={503: {"model": b.Health}})
async def health(parts: PartsOf, response: Response) -> b.Health:
    """Whether the controller works. Needs no token."""
    try:
        count = len(await parts.fleet.nodes())
    except LmkvError as error:
        response.status_code = 503
        return b.Health(state="degraded", detail=str(error), nodes=0, version=version("lmkv"))
    return b.Health(state="ok", detail="", nodes=count, version=version("lmkv"))


@public.get(
    "/metrics",
    name="metrics",
    tags=["look"],
    dependencies=[Security(HTTPBearer(auto_error=False))],
    response_class=Response,
    responses={**_ERRORS, 200: {"content": {"text/plain": {"schema": {"type": "string"}}}}},
)
async def metrics(parts: PartsOf) -> Response:
    """The Prometheus page."""
    await gauge(parts.metrics, parts.fleet, parts.jobs)
    return Response(parts.metrics.render(), headers={"Content-Type": CONTENT_TYPE})


@public.websocket("/v1/agent")
async def agent(socket: WebSocket) -> None:
    """Where nodes register; not for people."""
    parts: Parts = socket.app.state.parts
    await AgentConnection(socket, parts.fleet, parts.settings.request_timeout).run()


# --- parts of them ---------------------------------------------------------------------------------------------------


async def _job(parts: Parts, identity: str) -> Job:
    found = await parts.jobs.get(identity)
    if found is None:
        recent = await parts.jobs.recent(10)
        raise unknown("job", identity, (each.id for each in recent))
    return found
