"""Two nodes of their own, one that computes prompts and one that goes on with them, and `lmkv proxy` before them."""

from __future__ import annotations

import http.client
import json
import sys
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from lmkv_vllm.demo.server import Child, Server, ServerError, free_port, samples

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path
    from types import TracebackType

    from typing_extensions import Self

_HOST: Final = "127.0.0.1"
_PROXY_SECONDS: Final = 60.0


@dataclass(frozen=True)
class Shape:
    """What both nodes have in common.

    Attributes:
        model: folder or id.
        arguments: of vLLM.
        environment: of vLLM, for the prefill and the decode node.
        stack: of lmkv, without the sections `peer` and `metrics`.
        transports: that may be used; empty: all that are installed.
        settings: of the connector.
    """

    model: str
    arguments: Sequence[str]
    environment: tuple[Mapping[str, str], Mapping[str, str]]
    stack: Mapping[str, Any]
    transports: Sequence[str] = ()
    settings: Mapping[str, Any] | None = None


class Node:
    """One vLLM server whose service has a peer port."""

    def __init__(self, name: str, shape: Shape, scratch: Path, environment: Mapping[str, str]) -> None:
        self.name = name
        self.peer = f"{_HOST}:{free_port()}"
        self.metrics_port = free_port()
        peer = {"listen": self.peer, "node": name, "transports": list(shape.transports)}
        self.stack = {**shape.stack, "peer": peer, "metrics": {"port": self.metrics_port}}
        config = scratch / f"{name}.yaml"
        config.write_text(json.dumps(self.stack, indent=2))  # which is YAML, too
        connector = {
            "kv_connector": "LMKVConnector",
            "kv_connector_module_path": "lmkv_vllm.connector",
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": {"lmkv.config": str(config), **(shape.settings or {})},
        }
        arguments = [*shape.arguments, "--kv-transfer-config", json.dumps(connector)]
        self.server = Server(shape.model, arguments, log=scratch / f"{name}.log", environment=environment)

    def metric(self, family: str, *, by: str) -> dict[str, float]:
        """A family of the service's metrics page, summed for each value of label `by`."""
        connection = http.client.HTTPConnection(_HOST, self.metrics_port, timeout=10.0)
        try:
            connection.request("GET", "/metrics")
            return samples(connection.getresponse().read().decode(), family, by)
        except OSError as error:
            raise ServerError(f"the metrics page of node {self.name} does not answer: {error}") from error
        finally:
            connection.close()


class Pair:
    """A prefill node, a decode node and the proxy. A context manager: all is started, and up, inside.

    Args:
        shape: of both nodes.
        scratch: folder for configurations and logs.
        start_seconds: that vLLM may take to start.
        least: tokens of the shortest prompt that is computed at the prefill node.
    """

    def __init__(self, shape: Shape, scratch: Path, *, start_seconds: float, least: int = 256) -> None:
        self.prefill = Node("prefill", shape, scratch, shape.environment[0])
        self.decode = Node("decode", shape, scratch, shape.environment[1])
        self._start_seconds = start_seconds
        arguments = ["--prefill", self.prefill.server.url, "--decode", f"{self.decode.server.url}={self.decode.peer}"]
        arguments += ["--min-prefill-tokens", str(least), "--health-interval", "1s"]

        def command(port: int) -> list[str]:
            return [sys.executable, "-m", "lmkv", "proxy", "--listen", f"{_HOST}:{port}", *arguments]

        self.proxy = Child("the proxy", shape.model, command, log=scratch / "proxy.log")
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            for node in (self.prefill, self.decode):
                stack.enter_context(node.server)
            for node in (self.prefill, self.decode):
                node.server.wait_until_ready(self._start_seconds)
            stack.enter_context(self.proxy)
            self.proxy.wait_until_ready(_PROXY_SECONDS)
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def outcomes(self) -> dict[str, float]:
        """How requests went, as the proxy counts them."""
        return self.proxy.metric("lmkv_proxy_transfers_total", by="outcome")
