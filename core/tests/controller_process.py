"""`lmkv controller` as a process that can be killed."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import httpx
from controller_rig import SECONDS
from server_rig import HOST, Server, free_port

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path


class ControllerProcess(Server):
    """On a free port of the loopback; `options` are of its command line."""

    def __init__(self, folder: Path, *options: str | Path) -> None:
        super().__init__(folder, free_port())
        self.options = options
        self.url = f"http://{HOST}:{self.port}"
        self.client = httpx.Client(base_url=self.url, timeout=SECONDS, verify=False)

    def command(self) -> Sequence[str | Path]:
        listen = ("--listen", f"{HOST}:{self.port}", "--node-timeout", "15s")
        return [sys.executable, "-m", "lmkv", "controller", *listen, *self.options]

    def answers(self) -> bool:
        try:
            return self.client.get("/v1/health").status_code == 200
        except httpx.TransportError:
            return False

    def post(self, verb: str, body: Any, *, wait: float = SECONDS, **arguments: Any) -> Any:
        params = {} if verb == "lookup" else {"wait": wait}
        answer = self.client.post(f"/v1/{verb}", json=body, params=params, **arguments)
        assert answer.status_code in {200, 202}, answer.text
        return answer.json()

    def get(self, path: str, **arguments: Any) -> Any:
        answer = self.client.get(path, **arguments)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def __exit__(self, *_: object) -> None:
        self.client.close()
        super().__exit__()
