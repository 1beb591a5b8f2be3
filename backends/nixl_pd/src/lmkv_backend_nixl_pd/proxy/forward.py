"""Passing a request to one engine of a pool, and its answer back."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lmkv_backend_nixl_pd.proxy.errors import ApiError, EngineError

if TYPE_CHECKING:
    from lmkv_backend_nixl_pd.proxy.exchange import Exchange
    from lmkv_backend_nixl_pd.proxy.pool import Engine, Pool


class Cut(Exception):  # noqa: N818  no error of ours: the client has been told
    """An answer ended before it was whole: nothing more can be said, and the connection is to be closed."""


async def forward(
    exchange: Exchange, pool: Pool, silence: float, first: Engine | None = None, body: bytes | None = None
) -> Engine:
    """Pass the request on and the answer back, byte for byte; returns the engine that answered.

    An engine that fails before any of its answer has gone to the client is replaced by another; a completion has no
    effect that doing it twice would double.

    Args:
        exchange: the client's.
        pool: whose engines can answer.
        silence: seconds without a byte after which an engine is given up.
        first: the engine to begin with. None: the pool's next.
        body: for `first` only, instead of the client's.

    Raises:
        ApiError: no engine answered (502, 503, 504).
        Cut: the engine broke off in the middle of its answer.
    """
    tried: list[Engine] = []
    last = EngineError("connect", "no engine")
    engine = first or pool.next(desperate=True)
    while engine is not None:
        content = body if engine is first and body is not None else exchange.body
        try:
            engine.served.inc()
            with engine.use() as client, await client.send(
                exchange.method, exchange.target, exchange.headers, content, silence=silence
            ) as answer:  # fmt: skip
                await exchange.relay(answer)
        except EngineError as error:
            engine.failed(error)
            if exchange.status:
                await exchange.break_off(ApiError(502, f"the engine broke off: {error}", code="engine_broke_off"))
                raise Cut from error
            last = error
            tried.append(engine)
            engine = None if error.kind == "silent" else pool.next(tried, desperate=True)
        else:
            return engine
    raise refusal(last)


def refusal(error: EngineError) -> ApiError:
    """What the client is told when no engine answered; addresses of engines are not its business."""
    if error.kind == "silent":
        return ApiError(504, "the engine did not answer in time", code="engine_timeout")
    return ApiError(502, f"no engine answered ({error.kind})", code="engine_unreachable", retry_after=1)
