"""Every exception that lmkv raises on purpose.

    LmkvError
    ├── ConfigError      the operator must change something: YAML, environment, geometry, limits
    ├── PluginError      a distribution that the configuration names cannot be used
    ├── BackendError     a tier is ill: becomes a miss, a counter and a state, never an engine error
    ├── FrameError       stored bytes are not what their key says: a counted miss, the frame is set aside
    │   └── UnreadableError  they may be right, but the codec or key to read them is not here: a miss, the frame stays
    ├── ProtocolError    the other end of a socket said something that the protocol does not allow
    └── ClosedError      the object, or the service behind it, has gone

The classes are grouped by what a caller does next, not by where the error arose. `kind` is a stable, machine-readable
word (append-only); `retryable` says whether the same call may succeed later without anybody changing anything.
No message contains a secret or a payload.
"""

from __future__ import annotations

from typing import Final


class LmkvError(Exception):
    """Base of all errors of this package.

    Attributes:
        kind: stable word for programs, such as ``config`` or ``no-space``.
        retryable: the same call may succeed later without a change by anybody.
    """

    default_kind = "lmkv"
    default_retryable = False

    def __init__(self, message: str, *, kind: str | None = None, retryable: bool | None = None) -> None:
        super().__init__(message)
        self.kind = self.default_kind if kind is None else kind
        self.retryable = self.default_retryable if retryable is None else retryable


class ConfigError(LmkvError, ValueError):
    """A setting, a geometry or a limit is wrong; `faults` lists everything found, one line each."""

    default_kind = "config"

    def __init__(self, message: str, *, faults: tuple[str, ...] = (), kind: str | None = None) -> None:
        super().__init__(message, kind=kind)
        self.faults = faults


class PluginError(LmkvError):
    """A plugin that the configuration names is missing, broken, ambiguous or of another API."""

    default_kind = "plugin"


class BackendError(LmkvError):
    """A tier is ill. Raised by backends; the driver turns it into `FAILED` outcomes and tells the breaker."""

    default_kind = "backend"
    default_retryable = True


class FrameError(LmkvError):
    """Stored bytes do not verify: magic, version, lengths, key or checksum."""

    default_kind = "corrupt"


WRONG_KEY: Final = "wrong-key"
"""Kind of an `UnreadableError` that is somebody's mistake: the key that is given is not the one of that name."""


class UnreadableError(FrameError):
    """Nothing is wrong with the stored bytes as far as can be told; the codec or the key to read them is not here.

    Or they are not encrypted in a tier that encrypts, where anybody could have written them.
    """

    default_kind = "unreadable"


class ProtocolError(LmkvError):
    """A message is malformed, too long, of another version, or out of order."""

    default_kind = "protocol"


class ClosedError(LmkvError):
    """The object was closed, or the service behind it is not reachable now."""

    default_kind = "closed"
    default_retryable = True
