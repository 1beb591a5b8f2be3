"""Questions about long documents, three times: cold, from RAM, and from disk after a restart of engine and service.

vLLM's own prefix cache is off in this run (`--no-enable-prefix-caching`), so what is not computed comes from lmkv.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import socket
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.syntax import Syntax
from rich.text import Text

from lmkv_vllm.demo import engine
from lmkv_vllm.demo.documents import SUBJECTS, document, prompt
from lmkv_vllm.demo.models import DEFAULT_MODEL, ModelError, model_folder
from lmkv_vllm.demo.report import Report, Row
from lmkv_vllm.demo.server import Server, ServerError, free_port

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

_STACK = """\
pool:
  size: {pool}
tiers:
  - name: ram
    backend: cpu
    capacity: 100%
  - name: disk
    backend: disk
    capacity: {disk}
    # `promote`, the default, would keep the first answer's pages in RAM; here every question shall be served from disk.
    read: direct
    options:
      path: {folder}
metrics:
  port: {port}
"""
_HITS = "lmkv_hit_tokens_total{"


class Run:
    """One demo: its scratch folder, its stack, and the passes over the questions."""

    def __init__(self, options: argparse.Namespace, model: str, scratch: Path, console: Console) -> None:
        self._options = options
        self._model = model
        self._scratch = scratch
        self._frames = scratch / "frames"
        self._metrics_port = free_port()
        self.stack = _STACK.format(pool="2GiB", disk="4GiB", folder=self._frames, port=self._metrics_port)
        (scratch / "stack.yaml").write_text(self.stack)
        self.rows = [Row(subject.title, question) for subject in SUBJECTS for question in subject.questions]
        self.report = Report(console, self.rows)

    def go(self) -> None:
        """All three passes. Raises `ServerError` when vLLM fails."""
        with self.report:
            self.report.stage(f"starting vLLM with {Path(self._model).name}")
            with self._server("first") as server:
                server.wait_until_ready(engine.START_SECONDS)
                prompts = self._prompts(server)
                self._ask(server, "cold", prompts)
                self.report.stage("waiting until all is on disk")
                self._wait_for_disk()
                self._ask(server, "ram", prompts)
                self.report.stage("stopping vLLM and the service")
            self._wait_for_service()
            self.report.stage("starting vLLM and the service again")
            with self._server("second") as server:
                server.wait_until_ready(engine.START_SECONDS)
                self._ask(server, "disk", prompts)
                self.report.stage("stopping")

    def _server(self, name: str) -> Server:
        connector = {
            "kv_connector": "LMKVConnector",
            "kv_connector_module_path": "lmkv_vllm.connector",
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
            # The default of 50 ms rather computes than waits for a busy machine; the demo is about what loading gains.
            "kv_connector_extra_config": {
                "lmkv.config": str(self._scratch / "stack.yaml"),
                "lmkv.lookup_deadline": "2s",
            },
        }
        given = engine.arguments(self._options.tokens, self._options.dtype, gpu_share=0.5)
        given += ["--kv-transfer-config", json.dumps(connector)]
        return Server(self._model, given, log=self._scratch / f"{name}.log", environment=engine.environment())

    def _prompts(self, server: Server) -> list[str]:
        texts = [document(subject, self._options.tokens, server.count_tokens) for subject in SUBJECTS]
        pairs = zip(SUBJECTS, texts, strict=True)
        return [prompt(text, question) for subject, text in pairs for question in subject.questions]

    def _ask(self, server: Server, name: str, prompts: Sequence[str]) -> None:
        server.ask("Hello!", max_tokens=2)  # what the engine does once, at its first request, is in no figure
        asked: set[str] = set()
        for number, (row, text) in enumerate(zip(self.rows, prompts, strict=True), start=1):
            self.report.stage(f"{name}: question {number} of {len(prompts)}: {row.question}")
            # A document's first question is cold by nature. The others are made so by a salt, which shares no cache.
            salt = "cold" if name == "cold" and row.title in asked else None
            asked.add(row.title)
            before = self._hits()
            answer = server.ask(text, max_tokens=self._options.max_tokens, salt=salt)
            hits = {tier: count - before.get(tier, 0) for tier, count in self._hits().items()}
            self.report.answered(row, name, answer, hits)

    def _hits(self) -> dict[str, int]:
        """Tokens that each tier has given to the engine, from lmkv's metrics page."""
        connection = http.client.HTTPConnection("127.0.0.1", self._metrics_port, timeout=10.0)
        try:
            connection.request("GET", "/metrics")
            lines = connection.getresponse().read().decode().splitlines()
        except OSError as error:
            raise ServerError(f"lmkv's metrics page does not answer ({error}), so its service is not up") from error
        finally:
            connection.close()
        counts: dict[str, int] = {}
        for line in lines:
            if line.startswith(_HITS):
                tier = line.partition('tier="')[2].partition('"')[0]
                counts[tier] = counts.get(tier, 0) + int(float(line.split()[-1]))
        return counts

    def _wait_for_service(self) -> None:
        """Return when lmkv's service has gone, as it does after its last client: the restart must be one of both."""
        deadline = time.monotonic() + engine.STOP_SECONDS
        while time.monotonic() < deadline:
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", self._metrics_port)) != 0:
                    return
            time.sleep(0.2)
        raise ServerError(f"lmkv's service was still there {engine.STOP_SECONDS} s after vLLM had gone")

    def _wait_for_disk(self) -> None:
        """Stores are written behind the engine's back: return when a second has gone by without a new byte."""
        seen = -1
        while (size := sum(_sizes(self._frames))) != seen:
            seen = size
            time.sleep(1.0)


def main() -> int:
    """Parse the command line, run, report. Returns the exit status: 0 only if the run shows what it should."""
    parser = argparse.ArgumentParser(prog="python -m lmkv_vllm.demo", description=__doc__)
    parser.add_argument(
        "--model", default=DEFAULT_MODEL, help="smollm2, tiny, a model folder or a hub id (%(default)s)"
    )
    parser.add_argument("--tokens", type=int, default=2000, help="length of a document (%(default)s)")
    parser.add_argument("--max-tokens", type=int, default=24, help="length of an answer (%(default)s)")
    parser.add_argument("--dtype", default=None, help="of the model (auto on a GPU, float32 on a CPU)")
    parser.add_argument(
        "--keep", action="store_true", help="keep the scratch folder with the logs, and say where it is"
    )
    options = parser.parse_args()
    console = Console()
    try:
        with console.status(f"preparing {options.model} (the first time it is downloaded and unpacked)"):
            model = str(model_folder(options.model))
    except ModelError as error:
        console.print(f"[bold red]There is no model {options.model}:[/]")
        console.print(Text(str(error)), soft_wrap=True)
        return 1
    with ExitStack() as stack:
        scratch = Path(tempfile.mkdtemp(prefix="lmkv-demo-"))
        if options.keep:
            console.print(f"logs and frames: {scratch}", highlight=False, soft_wrap=True)
        else:
            stack.callback(_remove, scratch)
        run = Run(options, model, scratch, console)
        console.print("The stack, fastest tier first (vLLM's own prefix cache is off):")
        console.print(Syntax(run.stack, "yaml", background_color="default"))
        try:
            run.go()
        except ServerError as error:
            console.print("[bold red]The demo stopped:[/]")
            console.print(Text(str(error)), soft_wrap=True)  # as it is: a log's brackets are no markup
            return 1
        except KeyboardInterrupt:
            console.print("stopped; everything that was started has been ended")
            return 130
        console.print(run.report.summary())
        return 1 if run.report.faults() else 0


def _sizes(folder: Path) -> Iterator[int]:
    for parent, _, names in os.walk(folder):
        for name in names:
            try:
                yield (Path(parent) / name).stat().st_size
            except FileNotFoundError:  # published under another name since
                continue


def _remove(folder: Path) -> None:
    import shutil  # noqa: PLC0415 - needed at the very end only

    shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main())
