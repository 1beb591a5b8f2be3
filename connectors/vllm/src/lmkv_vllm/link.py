"""The way to the service: started by whoever of an engine's processes comes first, or run by the operator.

Processes with the same configuration share one service. Connecting happens in a thread; what is asked before there is a
connection is a miss. A service that dies is started anew by `SocketClient`, which comes back by itself.
"""

from __future__ import annotations

import threading
import time
from concurrent.futures import TimeoutError as FutureTimeoutError  # another class before Python 3.11
from functools import partial
from typing import TYPE_CHECKING, Final

from lmkv.errors import ClosedError, ConfigError, LmkvError
from lmkv.observe.clients import NOBODY
from lmkv.service.protocol import Clear, Cleared
from lmkv_vllm.guard import INCIDENTS, logger
from lmkv_vllm.start import start_apart
from lmkv_vllm.threads import spread

if TYPE_CHECKING:
    from collections.abc import Callable

    from lmkv.config import Config
    from lmkv.engine import CacheEngine
    from lmkv.observe.clients import Who
    from lmkv.service import StorageClient
    from lmkv_vllm.settings import Settings

ATTEMPT_SECONDS: Final = 10.0
"""One attempt to reach a service."""
PAUSE_SECONDS: Final = 1.0
LINGER_SECONDS: Final = 3.0
"""A service that the engine starts stays at least so long without a client. Whoever looks at it just after it has been
started anew would otherwise be its last client, and end it before the engine's processes have come back."""


def stack_config(settings: Settings, ranks: int) -> Config | None:
    """The stack of the service that this engine starts; None: the operator's is used. Raises `ConfigError`."""
    if settings.socket is not None:
        return None
    from lmkv.config import load_config  # noqa: PLC0415  pydantic, and only where a service may be started
    from lmkv.plugins import PluginHost  # noqa: PLC0415

    return load_config(settings.config, host=PluginHost.discover(), overrides={"ranks": ranks})


def clear(engine: CacheEngine, seconds: float) -> bool:
    """Remove the frames of the engine's namespace; False when the service did not say within `seconds` that it has."""
    try:
        return isinstance(engine.client.call(Clear(engine.namespace.id)).result(seconds), Cleared)
    except (LmkvError, TimeoutError, FutureTimeoutError) as error:
        if isinstance(error, LmkvError) and error.kind == "namespace":
            return True  # another service by now, which has none of them
        INCIDENTS.note("reset", f"not cleared yet: {type(error).__name__} {error}")
        return False


class Link:
    """One process's connection. Thread-safe.

    Args:
        settings: where to.
        config: of the service to be started, from `stack_config`.
        name: for people: `vllm-scheduler`, `vllm-worker-0`.
        who: labels of what is counted for this process.
        copies: this process copies pages, so the mapped pool is touched in the background.
    """

    def __init__(
        self, settings: Settings, config: Config | None, name: str, who: Who = NOBODY, *, copies: bool
    ) -> None:
        self._settings = settings
        self._config = config
        self._name = name
        self._who = who
        self._copies = copies
        self._lock = threading.Lock()
        self._calling = threading.Lock()
        self._callbacks: list[Callable[[], None]] = []
        self._settled = threading.Event()
        self._closing = threading.Event()
        self.client: StorageClient | None = None
        """None until the service has been reached once."""
        self.fault: LmkvError | None = None
        """Why it never will be."""
        self._thread = threading.Thread(target=self._run, name="lmkv-connect", daemon=True)
        self._thread.start()

    def when_ready(self, callback: Callable[[], None]) -> None:
        """Run `callback` in the link's thread once the service has been reached; what it raises becomes `fault`."""
        with self._lock:
            self._callbacks.append(callback)
            if self.fault is None:
                self._settled.clear()
        if self.client is not None and self.fault is None:
            threading.Thread(target=self._call_back, name="lmkv-ready", daemon=True).start()

    def wait(self, seconds: float) -> bool:
        """Wait until the service has been reached and the callbacks have run; False if that takes longer.

        Raises:
            LmkvError: it cannot be: the configuration is wrong.
        """
        until = time.monotonic() + seconds
        while not self._settled.wait(min(0.2, max(0.0, until - time.monotonic()))):
            if time.monotonic() >= until:
                return False
        if self.fault is not None:
            raise self.fault
        return True

    def close(self) -> None:
        """End the session. Idempotent; waits a few seconds at most."""
        self._closing.set()
        client = self.client
        if client is not None:
            client.close()

    # --- the link's thread ---

    def _run(self) -> None:
        spread()
        while not self._closing.is_set() and not self._attempt():
            self._closing.wait(PAUSE_SECONDS)
        if self.client is None:
            return
        if self._closing.is_set():
            self.client.close()
            return
        self._call_back()

    def _attempt(self) -> bool:
        """Try to connect; False if it may do better later."""
        try:
            self.client = self._connect()
        except ClosedError as error:
            INCIDENTS.note("service", f"cannot be reached, the engine runs without cache: {error}")
            return False
        except LmkvError as error:
            self._fail(error)
        except Exception as error:  # noqa: BLE001  whatever it is, the engine runs without cache
            self._fail(LmkvError(f"cannot connect to the service: {type(error).__name__}: {error}"))
        return True

    def _connect(self) -> StorageClient:
        from lmkv.service import SocketClient  # noqa: PLC0415  msgspec and sockets, in this thread
        from lmkv.service.files import answers, default_socket  # noqa: PLC0415

        config = self._config
        if config is None:
            path, revive = self._settings.socket, None
            assert path is not None
        else:
            path = str(config.service.socket or default_socket(config.text))
            revive = partial(start_apart, config.text, path, max(config.service.linger, LINGER_SECONDS))
            if not answers(path):
                revive()
        return SocketClient(
            path, self._name, timeout=ATTEMPT_SECONDS, prefault=self._copies, who=self._who, revive=revive
        )

    def _call_back(self) -> None:
        with self._calling:  # whoever finds nothing left to call must not say so while another thread still calls
            while True:
                with self._lock:
                    callbacks, self._callbacks = self._callbacks, []
                    if not callbacks:
                        self._settled.set()
                        return
                for callback in callbacks:
                    if not self._calls(callback):
                        return

    def _calls(self, callback: Callable[[], None]) -> bool:
        try:
            callback()
        except LmkvError as error:
            self._fail(error)
            return False
        except Exception as error:  # noqa: BLE001  as in _attempt
            self._fail(LmkvError(f"{type(error).__name__}: {error}"))
            return False
        return True

    def _fail(self, error: LmkvError) -> None:
        """It will never do. At the start `wait` says so and stops the engine; later there is only the log."""
        if self.fault is None:
            self.fault = error
            if not isinstance(error, ConfigError):
                logger.debug("the connection failed", exc_info=error)
            INCIDENTS.note("service", f"no cache: {error}")
        self._settled.set()
