"""Logs of a service: lines for people or JSON, repeats rate-limited, passwords in URLs masked.

A library leaves logging to its application: only `lmkv serve` and its like call `set_up`.
"""

from __future__ import annotations

import json
import logging
import re
import sys
import threading
import time
from collections import OrderedDict
from typing import IO, TYPE_CHECKING, Final, Literal

if TYPE_CHECKING:
    from collections.abc import Callable

LOGGER: Final = "lmkv"
_KEYS_MAX: Final = 1024
_STANDARD: Final = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "key", "taskName"}
_USERINFO: Final = re.compile(r"(?<=://)[^/\s@'\"]*(?:@[^/\s@'\"]*)*(?=@)")


def mask(text: str) -> str:
    """`text` with user and password of every URL in it replaced by ``***``."""
    return _USERINFO.sub("***", text) if "://" in text else text


class RateLimited(logging.Filter):
    """Lets one line per key through in each interval, and says with the next one how many it held back.

    The key is the record's ``key`` (``log.warning(…, extra={"key": ("open", tier)})``); without one, the whole line, so
    that only exact repeats are held back. Records below WARNING without a key always pass. Thread-safe.
    """

    def __init__(self, interval: float = 10.0, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._interval = interval
        self._clock = clock
        self._lock = threading.Lock()
        self._seen: OrderedDict[object, tuple[float, int]] = OrderedDict()

    def filter(self, record: logging.LogRecord) -> bool:
        """False: drop the record."""
        key = getattr(record, "key", None)
        if key is None:
            if record.levelno < logging.WARNING:
                return True
            key = (record.name, record.levelno, record.getMessage())
        now = self._clock()
        with self._lock:
            last, held = self._seen.pop(key, (None, 0))
            if last is not None and now - last < self._interval:
                self._seen[key] = (last, held + 1)
                return False
            self._seen[key] = (now, 0)
            while len(self._seen) > _KEYS_MAX:
                self._seen.popitem(last=False)
        if held:
            record.msg = f"{record.getMessage()} ({held} more like this in the last {now - (last or 0.0):.0f} s)"
            record.args = ()
        return True


class TextFormatter(logging.Formatter):
    """``2026-01-31T12:00:00.123Z WARNING lmkv.storage.tier: message tier=disk``."""

    converter = time.gmtime  # type: ignore[assignment]  # UTC; typeshed thinks the argument differs
    default_time_format = "%Y-%m-%dT%H:%M:%S"
    default_msec_format = "%s.%03dZ"

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s: %(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802  the base class's name
        """Append the record's own fields."""
        extra = "".join(f" {name}={value}" for name, value in _extras(record).items())
        return super().formatMessage(record) + extra

    def format(self, record: logging.LogRecord) -> str:
        """The whole line, masked."""
        return mask(super().format(record))


class JsonFormatter(logging.Formatter):
    """One JSON object per line: time, level, logger, message, the record's own fields, exception."""

    converter = time.gmtime  # type: ignore[assignment]  # UTC; typeshed thinks the argument differs
    default_time_format = "%Y-%m-%dT%H:%M:%S"
    default_msec_format = "%s.%03dZ"

    def format(self, record: logging.LogRecord) -> str:
        """The line."""
        line: dict[str, object] = {
            "time": self.formatTime(record),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": mask(record.getMessage()),
        }
        line |= {name: value for name, value in _extras(record).items() if name not in line}
        if record.exc_info:
            line["exception"] = mask(self.formatException(record.exc_info))
        return json.dumps(line, default=lambda value: mask(str(value)))


def set_up(
    level: str = "info",
    format: Literal["text", "json"] = "text",  # noqa: A002  as in the configuration
    *,
    stream: IO[str] | None = None,
    interval: float = 10.0,
) -> logging.Handler:
    """Write everything below the logger ``lmkv`` to `stream` (standard error); replaces an earlier set-up."""
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(JsonFormatter() if format == "json" else TextFormatter())
    handler.addFilter(RateLimited(interval))
    logger = logging.getLogger(LOGGER)
    logger.handlers[:] = [handler]
    logger.setLevel(level.upper())
    logger.propagate = False
    return handler


def _extras(record: logging.LogRecord) -> dict[str, object]:
    found = {name: value for name, value in vars(record).items() if name not in _STANDARD}
    return {name: mask(value) if isinstance(value, str) else value for name, value in found.items()}
