"""`python -m lmkv_vllm.start SOCKET LINGER`: make sure that a service listens at SOCKET; its configuration is on stdin.

A short-lived process between the engine and the service. Without it the service would be the engine's descendant, and
vLLM kills all of those with SIGKILL when it stops: what is on its way to a disk would be lost.
"""

from __future__ import annotations

import os
import subprocess
import sys

from lmkv.errors import ClosedError, ConfigError, LmkvError

FAULT = 2
"""Exit status: the configuration is wrong."""
LATE = 3
"""Exit status: the service did not come up in time."""


def start_apart(config_text: str, socket_path: str, linger: float) -> None:
    """Start the service unless it is there, as a process that is no descendant of this one. Blocks until it listens.

    Raises:
        ConfigError: it cannot start; says why.
        ClosedError: it did not come up in time.
    """
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(os.path.abspath(p) for p in sys.path if p)}  # noqa: PTH100
    done = subprocess.run(  # noqa: S603  our own module
        [sys.executable, "-m", __name__, socket_path, str(linger)],
        input=config_text.encode(),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        env=environment,
        start_new_session=True,
        check=False,
    )
    if done.returncode == 0:
        return
    words = done.stderr.decode(errors="replace").strip()
    if done.returncode == LATE:
        raise ClosedError(words)
    raise ConfigError(words or f"the service's starter ended with status {done.returncode}", kind="start")


def main(arguments: list[str]) -> int:
    """The process in between."""
    from lmkv.service.spawn import ensure_service  # noqa: PLC0415  in that process only

    path, linger = arguments
    try:
        ensure_service(sys.stdin.read(), path, linger=float(linger))
    except LmkvError as error:
        sys.stderr.write(f"{error}\n")
        return LATE if isinstance(error, ClosedError) else FAULT
    return 0


if __name__ == "__main__":
    status = main(sys.argv[1:])
    sys.stderr.flush()
    os._exit(status)  # a thread still waits for the service, which is not ours to wait for
