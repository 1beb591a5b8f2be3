"""Questions about long documents, by two vLLM servers with a node each: what the first has computed, the second reads.

The controller's directory tells the second node where the pages are; it pulls them out of the first one's pool. Then
the same again, from its own RAM. vLLM's own prefix cache is off.
"""

from __future__ import annotations

import sys
import time
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from lmkv_vllm.demo import engine
from lmkv_vllm.demo.documents import SUBJECTS, document, prompt
from lmkv_vllm.demo.pair import Node, Shape
from lmkv_vllm.demo.passes import WARMING, Row, launch, parser, table, unlike, verdict
from lmkv_vllm.demo.server import Child, ServerError

if TYPE_CHECKING:
    import argparse

    from rich.console import Console

PASSES: Final = {"cold": "computed\non A", "peer": "on B, from\nA's pool", "ram": "on B, from\nits RAM"}
_HOST: Final = "127.0.0.1"
_FAR: Final = "peers"
"""Name of the tier of other nodes."""
_WHOLE: Final = (
    "Of other nodes whole frames are found: chunks, and a prompt's tail where the answer has not lengthened it over a "
    "page's end. The rest, less than a chunk, is computed on B (lmkv.save_decode: false stores prompts by themselves)."
)
_CONTROLLER_SECONDS: Final = 60.0
_TOLD_SECONDS: Final = 60.0


class Run:
    """One demo.

    Attributes:
        rows: what came of it.
        given: question → tokens that came out of A's pool on B.
        transports: bytes that went from A to B, by transport.
    """

    def __init__(self, options: argparse.Namespace, model: str, scratch: Path, console: Console) -> None:
        self._options = options
        self._model = model
        self._scratch = scratch
        self._console = console
        self.rows = [Row(subject.title, subject.questions[0], len(PASSES)) for subject in SUBJECTS]
        self.given: dict[str, int] = {}
        self.transports: dict[str, float] = {}

    def go(self) -> None:
        """All passes. Raises `ServerError` when a server fails."""
        self._say(f"starting the controller and two vLLM servers with {Path(self._model).name}")

        def command(port: int) -> list[str]:
            return [sys.executable, "-m", "lmkv", "controller", "--listen", f"{_HOST}:{port}"]

        controller = Child(
            "the controller", self._model, command, log=self._scratch / "controller.log", health="/v1/health"
        )
        first, second = self._nodes(controller)
        with ExitStack() as stack:
            for each in (controller, first.server, second.server):
                stack.enter_context(each)
            controller.wait_until_ready(_CONTROLLER_SECONDS)
            for node in (first, second):
                node.server.wait_until_ready(engine.START_SECONDS)
            count = first.server.count_tokens
            texts = [document(subject, self._options.tokens, count) for subject in SUBJECTS]
            prompts = [prompt(text, row.question) for text, row in zip(texts, self.rows, strict=True)]
            self._ask(first, "cold", prompts)
            self._say("waiting until the controller has been told")
            _wait_until_told(controller)
            self._ask(second, "peer", prompts)
            self._ask(second, "ram", prompts)
            self.transports = second.metric("lmkv_peer_bytes_total", by="transport")
            self._say("stopping")

    def _nodes(self, controller: Child) -> tuple[Node, Node]:
        """A, and B with a tier more."""
        ram = {"name": "ram", "backend": "cpu", "capacity": "100%"}
        far = {"name": _FAR, "backend": "p2p", "write": "never", "deadline": "10s",
               "options": {"controller": controller.url}}  # fmt: skip
        agent = {"url": controller.url.replace("http", "ws", 1), "heartbeat": "1s"}
        stack: dict[str, Any] = {"pool": {"size": "2GiB"}, "controller": agent, "tiers": [ram]}
        given = engine.arguments(self._options.tokens, self._options.dtype, gpu_share=0.4)
        transports = (self._options.transport,) if self._options.transport else ()
        settings = {"lmkv.lookup_deadline": "2s"}  # the default rather computes than waits for a busy machine
        shape = Shape(self._model, given, engine.halves(), stack, transports, settings)
        with_far = replace(shape, stack={**stack, "tiers": [ram, far]})
        a, b = shape.environment
        return Node("A", shape, self._scratch, a), Node("B", with_far, self._scratch, b)

    def _ask(self, node: Node, name: str, prompts: list[str]) -> None:
        if name != "ram":
            node.server.ask(WARMING + name, max_tokens=2)
        for number, (row, text) in enumerate(zip(self.rows, prompts, strict=True), start=1):
            self._say(f"{name}: question {number} of {len(self.rows)}: {row.question}")
            before = node.metric("lmkv_hit_tokens_total", by="tier").get(_FAR, 0.0)
            row.answers[name] = node.server.ask(text, max_tokens=self._options.max_tokens)
            if name == "peer":
                self.given[row.question] = int(node.metric("lmkv_hit_tokens_total", by="tier").get(_FAR, 0.0) - before)

    def faults(self) -> list[str]:
        """Why the run does not show what it should; empty if it does."""
        faults = unlike(self.rows)
        for row in self.rows:
            if "peer" in row.answers and not self.given.get(row.question):
                faults.append(f"{row.question} was computed on B, too")
            if "ram" in row.answers and not row.answers["ram"].cached_tokens:
                faults.append(f"{row.question} was not in the RAM of B afterwards")
        return faults

    def report(self, console: Console) -> int:
        """Show what came of it; the exit status."""
        given = self.given.get
        console.print(table(self.rows, PASSES, "tokens from\nA's pool", lambda row: given(row.question)))
        console.print(_WHOLE, style="dim")
        for name, nbytes in self.transports.items():
            console.print(f"transport: {name}, {nbytes / 2**20:.0f} MiB", highlight=False)
        return verdict(
            self.faults(), "All answers identical; what lies in whole frames of A, B did not compute.", console
        )

    def _say(self, text: str) -> None:
        self._console.print(f"· {text}", highlight=False)


def _wait_until_told(controller: Child) -> None:
    """Return when what the controller knows of node A has stood still for two of its heartbeats.

    Raises:
        ServerError: it is told nothing.
    """
    until = time.monotonic() + _TOLD_SECONDS
    seen = 0
    while time.monotonic() < until:
        nodes = controller.get("/v1/nodes")["nodes"]
        used = sum(tier["used_bytes"] for node in nodes for tier in node["tiers"] if node["node"] == "A")
        if used and used == seen:
            return
        seen = used
        time.sleep(2.0)
    raise ServerError("node A has told the controller nothing")


def main() -> int:
    """Parse the command line, run, report. Returns the exit status: 0 only if all answers are identical."""
    options = parser("lmkv_vllm.demo.sharing", __doc__).parse_args()
    return launch(options, lambda model, scratch, console: Run(options, model, scratch, console))


if __name__ == "__main__":
    sys.exit(main())
