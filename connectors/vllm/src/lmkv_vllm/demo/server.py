"""An OpenAI server as a child process: started, asked, stopped; a failure shows the end of its log."""

from __future__ import annotations

import http.client
import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path
    from types import TracebackType

    from typing_extensions import Self

_HOST = "127.0.0.1"
_POLL_SECONDS = 0.2
_ANSWER_SECONDS = 600.0  # a cold prompt on a slow, busy machine; the demo's own patience, not a target
_TAIL_LINES = 120
_PORTS = (18_000, 32_000)
_DICE = random.SystemRandom()
_BY_SOURCE = "vllm:prompt_tokens_cached_by_source_total"


class ServerError(RuntimeError):
    """The server did not start, or did not answer; the message ends with the tail of its log."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What a question brought back.

    Attributes:
        text: The whole answer.
        first_token_seconds: From sending the request to the first piece of text.
        prompt_tokens: Length of the prompt as the engine counts it.
        cached_tokens: How many of them it did not have to compute.
    """

    text: str
    first_token_seconds: float
    prompt_tokens: int
    cached_tokens: int


class Child:
    """One run of an OpenAI server on a free loopback port. A context manager, which may be entered again after `stop`.

    Args:
        what: it is, for people.
        model: that is asked for.
        command: that starts it, given its port.
        log: file that everything it says is appended to.
        environment: besides our own.
        health: path that answers once it is up.
    """

    def __init__(
        self,
        what: str,
        model: str,
        command: Callable[[int], Sequence[str]],
        *,
        log: Path,
        environment: Mapping[str, str] | None = None,
        health: str = "/health",
    ) -> None:
        self._health = health
        self._what = what
        self._model = model
        self._log = log
        self._port = free_port()
        self._command = command(self._port)
        self._environment = {**os.environ, **(environment or {})}
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        with self._log.open("ab") as log:
            # A session of its own, so that stopping reaches the engine's and lmkv's processes, and nobody else's.
            self._process = subprocess.Popen(
                self._command,
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    @property
    def url(self) -> str:
        """Where it listens."""
        return f"http://{_HOST}:{self._port}"

    def wait_until_ready(self, seconds: float) -> None:
        """Return once the server answers its health check.

        Raises:
            ServerError: It ended, or is not up in time.
        """
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            if self._process is not None and self._process.poll() is not None:
                raise self._failure(
                    f"{self._what} ended with exit code {self._process.returncode} while it was starting"
                )
            with suppress(OSError, http.client.HTTPException):
                if self._request("GET", self._health, timeout=5.0)[0] == http.client.OK:
                    return
            time.sleep(_POLL_SECONDS)
        raise self._failure(f"{self._what} was not up after {seconds:.0f} s")

    def get(self, path: str) -> Any:
        """The JSON of an answer. Raises `ServerError` for any other."""
        try:
            status, content = self._request("GET", path, timeout=_ANSWER_SECONDS)
        except (OSError, http.client.HTTPException) as error:
            raise self._failure(f"{self._what} did not answer: {error!r}") from error
        if status != http.client.OK:
            raise self._failure(f"{self._what} answered {status} to {path}: {content[:500].decode(errors='replace')}")
        return json.loads(content)

    def count_tokens(self, text: str) -> int:
        """How many tokens the served model's tokenizer makes of a text."""
        return int(self._json("/tokenize", {"model": self._model, "prompt": text})["count"])

    def ask(self, prompt: str, *, max_tokens: int, salt: str | None = None) -> Answer:
        """Ask greedily and take the time to the first token.

        Args:
            prompt: The user's message.
            max_tokens: The answer has at most so many tokens.
            salt: Requests with different salts share no cache.
        """
        body: dict[str, Any] = {
            "model": self._model,
            "messages": [{"role": "user", "content": prompt}],
            "max_tokens": max_tokens,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if salt is not None:
            body["cache_salt"] = salt
        try:
            return self._stream("/v1/chat/completions", body)
        except (OSError, http.client.HTTPException, ValueError, KeyError) as error:
            raise self._failure(f"{self._what} did not answer a question: {error!r}") from error

    def cached_tokens_by_source(self) -> dict[str, int]:
        """Tokens that were not computed since the start, by where vLLM was told they came from (host, disk, …)."""
        return {source: int(tokens) for source, tokens in self.metric(_BY_SOURCE, by="source").items()}

    def metric(self, family: str, *, by: str) -> dict[str, float]:
        """A family of its metrics page, summed for each value of label `by`."""
        return samples(self._request("GET", "/metrics", timeout=30.0)[1].decode(), family, by)

    def stop(self, seconds: float = 30.0) -> None:
        """Ask the server to end, wait until every process of its session has gone, end what is left by force."""
        process, self._process = self._process, None
        if process is None:
            return
        with suppress(ProcessLookupError):
            process.send_signal(signal.SIGTERM)
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and (process.poll() is None or _group_lives(process.pid)):
            time.sleep(_POLL_SECONDS)
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()

    def kill(self) -> None:
        """End all its processes at once, as a machine does that fails."""
        process, self._process = self._process, None
        if process is not None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()

    def log_tail(self) -> str:
        """The last lines that the server and its children printed."""
        lines = self._log.read_text(errors="replace").splitlines() if self._log.exists() else []
        return "\n".join(lines[-_TAIL_LINES:])

    def _failure(self, message: str) -> ServerError:
        return ServerError(f"{message}. The end of its log:\n\n{self.log_tail()}\n")

    def _request(
        self, method: str, path: str, *, timeout: float, body: Mapping[str, Any] | None = None
    ) -> tuple[int, bytes]:
        connection = http.client.HTTPConnection(_HOST, self._port, timeout=timeout)
        try:
            payload = None if body is None else json.dumps(body)
            connection.request(method, path, payload, {"Content-Type": "application/json"})
            response = connection.getresponse()
            return response.status, response.read()
        finally:
            connection.close()

    def _json(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        status, content = self._request("POST", path, timeout=_ANSWER_SECONDS, body=body)
        if status != http.client.OK:
            raise self._failure(f"{self._what} answered {status} to {path}: {content[:500].decode(errors='replace')}")
        answer: dict[str, Any] = json.loads(content)
        return answer

    def _stream(self, path: str, body: Mapping[str, Any]) -> Answer:
        connection = http.client.HTTPConnection(_HOST, self._port, timeout=_ANSWER_SECONDS)
        try:
            start = time.perf_counter()
            connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
            response = connection.getresponse()
            if response.status != http.client.OK:
                message = f"status {response.status}: {response.read()[:500].decode(errors='replace')}"
                raise ValueError(message)
            first = None
            pieces: list[str] = []
            usage: dict[str, Any] = {}
            for line in response:
                if not line.startswith(b"data: ") or line.strip() == b"data: [DONE]":
                    continue
                event = json.loads(line[len(b"data: ") :])
                if "error" in event:
                    raise ValueError(str(event["error"]))
                usage = event.get("usage") or usage
                for choice in event.get("choices", ()):
                    # The first event carries the role only; a token may also be a special one without text.
                    if first is None and (choice["delta"].get("content") or choice.get("finish_reason")):
                        first = time.perf_counter() - start
                    pieces.append(choice["delta"].get("content") or "")
        finally:
            connection.close()
        if first is None:
            message = "the stream ended before a token"
            raise ValueError(message)
        cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
        return Answer("".join(pieces), first, int(usage["prompt_tokens"]), int(cached))


class Server(Child):
    """vLLM's own server."""

    def __init__(
        self, model: str, arguments: Sequence[str], *, log: Path, environment: Mapping[str, str] | None = None
    ) -> None:
        # The module, not the `vllm` command: that one asks for a distribution named vllm, which the CPU build is not.
        command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", model, "--host", _HOST]
        command += ["--enable-prompt-tokens-details", *arguments]
        super().__init__("vLLM", model, lambda port: [*command, "--port", str(port)], log=log, environment=environment)


def samples(page: str, family: str, label: str) -> dict[str, float]:
    """A family of a Prometheus page, summed for each value of a label."""
    found: dict[str, float] = {}
    for line in page.splitlines():
        if line.startswith(family + "{"):
            value = line.partition(f'{label}="')[2].partition('"')[0]
            found[value] = found.get(value, 0.0) + float(line.rpartition(" ")[2])
    return found


def free_port() -> int:
    """A port that nobody listens on now; who gets it binds it within a minute or so.

    Below those that the kernel gives to outgoing connections: on a busy machine one of these would soon be taken again.
    """
    while True:
        port = _DICE.randrange(*_PORTS)
        with socket.socket() as probe, suppress(OSError):
            probe.bind((_HOST, port))
            return port


def _group_lives(group: int) -> bool:
    """Whether a process of this group, which we started, is still there."""
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True
