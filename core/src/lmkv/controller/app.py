"""The application: routes, errors, guard."""

from __future__ import annotations

from http import HTTPStatus
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from lmkv.controller.guard import Guard
from lmkv.controller.parts import Parts
from lmkv.controller.problems import Problem
from lmkv.controller.routes import public, router
from lmkv.errors import BackendError, ClosedError, LmkvError

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.types import ASGIApp

    from lmkv.controller.settings import Settings

_SUMMARY = "Knows which node of the fleet holds what, and carries out look-ups, pins, moves and clears across nodes."


def build(settings: Settings) -> tuple[ASGIApp, Parts]:
    """The application of a controller, and its parts, which the caller starts and closes.

    Raises:
        ConfigError: a file of tokens that cannot be used.
    """
    parts = Parts(settings)
    api = FastAPI(
        title="lmkv controller",
        summary=_SUMMARY,
        version=version("lmkv"),
        openapi_url=None,  # served as one of our own routes, without pages that load scripts from elsewhere
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
    )
    api.state.parts = parts
    api.include_router(public)
    api.include_router(router)
    api.add_exception_handler(Problem, _problem)
    api.add_exception_handler(RequestValidationError, _invalid)
    api.add_exception_handler(HTTPException, _http)
    api.add_exception_handler(LmkvError, _lmkv)
    guard = Guard(
        api,
        tokens=parts.tokens,
        max_body=settings.max_body,
        seconds=settings.request_timeout,
        metrics=parts.metrics,
    )
    return guard, parts


def _respond(problem: Problem) -> JSONResponse:
    return JSONResponse(problem.body(), problem.status, problem.headers)


def _problem(_: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, Problem)
    return _respond(error)


def _invalid(_: Request, error: Exception) -> JSONResponse:
    """Where something is wrong and what should be there; never what was."""
    assert isinstance(error, RequestValidationError)
    found: list[dict[str, Any]] = list(error.errors())
    lines = [f"{_place(each['loc'])}: {each['msg']}" for each in found[:10]]
    more = f" (and {len(found) - 10} more)" if len(found) > 10 else ""  # noqa: PLR2004
    return _respond(Problem(HTTPStatus.UNPROCESSABLE_ENTITY, "body", "; ".join(lines) + more))


def _place(loc: tuple[int | str, ...]) -> str:
    return ".".join(str(part) for part in loc)


def _http(_: Request, error: Exception) -> JSONResponse:
    """What the framework itself refuses: no such path, no such method."""
    assert isinstance(error, HTTPException)
    if error.status_code == HTTPStatus.BAD_REQUEST:
        return _respond(Problem(HTTPStatus.UNPROCESSABLE_ENTITY, "body", "the body is no JSON in UTF-8"))
    kinds = {HTTPStatus.NOT_FOUND: "unknown-path", HTTPStatus.METHOD_NOT_ALLOWED: "method"}
    kind = kinds.get(HTTPStatus(error.status_code), "request")
    return _respond(Problem(error.status_code, kind, str(error.detail), headers=dict(error.headers or {})))


def _lmkv(_: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, LmkvError)
    away = isinstance(error, (BackendError, ClosedError))
    status = HTTPStatus.SERVICE_UNAVAILABLE if away else HTTPStatus.INTERNAL_SERVER_ERROR
    return _respond(Problem(status, error.kind, str(error)))
