"""Scheduler side: requests that another node goes on with, and requests that another node has begun.

What vLLM passes on as `kv_transfer_params` of a request says which, under the name `lmkv`; a proxy puts it there:

    {"transfer": id, "to": "host:port"}             prefill: push its chunks there as they are saved (`Push`)
    {"transfer": id, "node": name, "tokens": n}     decode: wait for what comes, then look up as always (`Arrival`)

The second is what a prefill answers. Whatever is wrong with either, the request is computed as any other.
"""

from __future__ import annotations

import reprlib
import time
from concurrent.futures import FIRST_COMPLETED, wait
from typing import TYPE_CHECKING, Any, Final

from lmkv.errors import LmkvError, ProtocolError
from lmkv.peer.messages import MAX_NAME, check_transfer
from lmkv.service.protocol import TransferState
from lmkv_vllm.guard import INCIDENTS

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from concurrent.futures import Future

    from lmkv.engine import CacheEngine, Hit
    from lmkv.keys import KeyChain
    from lmkv.service.protocol import NewFrame, Reply
    from lmkv_vllm.requests import Tracked

PARAMS: Final = "lmkv"
_PUSH: Final = frozenset({"transfer", "to"})
_ARRIVAL: Final = frozenset({"transfer", "node", "tokens"})
_TOKENS_MAX: Final = 1 << 32
PAUSE: Final = 0.02
"""Seconds that an engine rests which only waits for transfers, unless one of them ends before."""


def transfer_of(request: Any, engine: CacheEngine, seconds: float) -> Push | Arrival | None:
    """What `kv_transfer_params` of a request ask for, begun; None where that is nothing, or nonsense.

    Args:
        request: of vLLM; its params come from whoever may send requests.
        engine: to begin it with.
        seconds: that an arrival is waited for at most.
    """
    params = getattr(request, "kv_transfer_params", None)
    if not isinstance(params, dict) or PARAMS not in params:
        return None
    try:
        asked = read_params(params[PARAMS])
    except ValueError as error:
        INCIDENTS.note("kv_transfer_params", f"ignored: {error}")
        return None
    name = asked["transfer"]
    if "to" in asked:
        return Push(engine, name, asked["to"], request.num_prompt_tokens)
    return Arrival(engine, name, asked["node"], seconds if asked["tokens"] else 0.0)


def rest(scheduler_output: Any, requests: Iterable[Tracked]) -> None:
    """Where all that the engine could do is to ask again whether a transfer has ended: wait a little for that.

    vLLM asks a thousand times a second, and its processes spin in between: on a small machine the core that they keep
    is the one on which the other engine still has to save what is waited for.
    """
    if scheduler_output.total_num_scheduled_tokens:
        return
    now = time.monotonic()
    waiting = []
    for tracked in requests:
        if tracked.request.num_computed_tokens:  # it loads, or a step of it is still to be processed
            return
        if isinstance(tracked.transfer, Arrival) and tracked.transfer.waits(now):
            waiting.append(tracked.transfer.state)
    if waiting:
        wait(waiting, PAUSE, FIRST_COMPLETED)


def read_params(asked: Any) -> dict[str, Any]:
    """`asked` if it is one of the two forms of the module; `ValueError` says what is wrong with it."""
    if not isinstance(asked, dict):
        raise ValueError(f"{PARAMS} is {reprlib.repr(asked)}, not an object")  # noqa: TRY004  one class for all faults
    fields = _PUSH if "to" in asked else _ARRIVAL
    if asked.keys() != fields:
        had, wanted = reprlib.repr(sorted(map(str, asked))), ", ".join(sorted(fields))
        raise ValueError(f"{PARAMS} has the fields {had}; it takes {wanted}")
    for field in ("transfer", "to", "node"):
        value = asked.get(field, "-")
        if not isinstance(value, str) or not value or len(value) > MAX_NAME or not value.isprintable():
            raise ValueError(f"{PARAMS}.{field} is {reprlib.repr(value)}, not a text of 1 to {MAX_NAME} characters")
    try:
        check_transfer(asked["transfer"])
    except ProtocolError as error:
        raise ValueError(f"{PARAMS}.transfer is {reprlib.repr(asked['transfer'])}: {error}") from None
    tokens = asked.get("tokens", 0)
    if isinstance(tokens, bool) or not isinstance(tokens, int) or not 0 <= tokens < _TOKENS_MAX:
        raise ValueError(f"{PARAMS}.tokens is {reprlib.repr(tokens)}, not a number of tokens")
    return asked


class Push:
    """A request whose chunks go to another node. Its node pushes them; here it is only told which.

    Args:
        engine: which they are stored with; a reset ends the push.
        name: of the transfer.
        to: `host:port` of the other node.
        tokens: of the prompt.
    """

    def __init__(self, engine: CacheEngine, name: str, to: str, tokens: int) -> None:
        self._engine = engine
        self._name = name
        self._to = to
        self._tokens = tokens
        self._over = False
        self._refused = False
        self._announce(())  # the nodes meet while the request waits for its turn

    def waits(self, now: float) -> bool:  # noqa: ARG002  as of an arrival
        """Whether its look-up has to wait: no."""
        return False

    def admitted(self, chain: KeyChain, hit: Hit) -> None:
        """It will be computed but for `hit`, whose lease is held still: that goes first."""
        if hit.chunks:
            self._announce(chain.digests[: hit.chunks])

    def saved(self, frames: Sequence[NewFrame]) -> None:
        """These are to be saved. Of what is not, its node hears from whoever does not."""
        self._announce([frame.digest for frame in frames])

    def answer(self, tokens: int) -> dict[str, Any] | None:
        """What is said of it when it has ended well: `tokens` are there, or will be."""
        if self._over or self._refused:
            return None
        return {PARAMS: {"transfer": self._name, "node": self._engine.client.welcome.node, "tokens": tokens}}

    def complete(self) -> None:
        """All of it has been told."""
        self._announce((), final=True)
        self._over = True

    def end(self) -> None:
        """Nothing more comes of it, and nobody shall wait. Idempotent; nothing after `complete`."""
        if not self._over:
            self._over = True
            self._engine.end_transfer(self._name)

    def _announce(self, digests: Sequence[bytes], *, final: bool = False) -> None:
        if self._over or self._refused:
            return
        asked = self._engine.transfer(self._name, self._to, digests, tokens=self._tokens, final=final)
        asked.add_done_callback(self._answered)

    def _answered(self, future: Future[Reply]) -> None:
        if future.cancelled() or (error := future.exception()) is None:
            return
        self._refused = True
        INCIDENTS.note("transfer", f"{self._name} to {self._to}: {error}")


class Arrival:
    """A request that another node has computed, and whose chunks are on their way here.

    Args:
        engine: which asks for it.
        name: of the transfer.
        node: who sends it, for people.
        seconds: that it is waited for at most.

    Attributes:
        state: done when the transfer has ended, or is not known.
    """

    def __init__(self, engine: CacheEngine, name: str, node: str, seconds: float) -> None:
        self._engine = engine
        self._name = name
        self._node = node
        self._until = time.monotonic() + seconds
        self._waiting = True
        self._over = False
        self.state = engine.await_transfer(name, seconds)

    def waits(self, now: float) -> bool:
        """Whether its look-up has to wait. Not for longer than was said."""
        if not self._waiting:
            return False
        if not self.state.done() and now < self._until:
            return True
        self._waiting = False
        why = self._why()
        if why:
            INCIDENTS.note("transfer", f"{self._name} from node {self._node}: {why}; what has not come is computed")
        return False

    def _why(self) -> str:
        """What did not go well; empty: all has come."""
        if not self.state.done():
            return "not complete in time"
        try:
            state = self.state.result()
        except LmkvError as error:
            return str(error)
        if not isinstance(state, TransferState):
            return "no answer"
        if state.state == "open":
            return "not complete in time"
        return "" if state.state == "complete" else state.state

    def admitted(self, chain: KeyChain, hit: Hit) -> None:  # noqa: ARG002  as of a push
        """What has come has been leased, or is not wanted."""
        self.end()

    def saved(self, frames: Sequence[NewFrame]) -> None:
        """Nothing: nobody waits for it."""

    def answer(self, tokens: int) -> None:  # noqa: ARG002  as of a push
        """Nothing is said of it."""
        return

    def complete(self) -> None:
        """See `end`."""
        self.end()

    def end(self) -> None:
        """Nothing of it is kept for this request any more. Idempotent."""
        if not self._over:
            self._over = True
            self._engine.end_transfer(self._name)
