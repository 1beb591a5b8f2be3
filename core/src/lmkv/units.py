"""Sizes and times as people write them: ``64GiB``, ``1.5GB``, ``25%``, ``250ms``; annotated types for pydantic models.

Backends use the same types in their options, so that a unit means the same everywhere.
"""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass
from datetime import timedelta
from decimal import Decimal
from typing import Annotated, Final, TypeAlias, get_args

from pydantic import PlainSerializer, PlainValidator, WithJsonSchema

SIZES: Final[dict[str, int]] = {
    "B": 1,
    **{f"{prefix}B": 1000 ** (power + 1) for power, prefix in enumerate("kMGTP")},
    "KB": 1000,
    **{f"{prefix}iB": 1024 ** (power + 1) for power, prefix in enumerate("KMGTP")},
}
TIMES: Final[dict[str, Decimal]] = {
    "us": Decimal("0.000001"),
    "ms": Decimal("0.001"),
    "s": Decimal(1),
    "m": Decimal(60),
    "h": Decimal(3600),
    "d": Decimal(86400),
}
_NUMBER: Final = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z%µ]*)\s*")
_PERCENT_MAX: Final = 100


@dataclass(frozen=True, slots=True)
class Share:
    """A part of something that is known only when the stack starts."""

    percent: float

    def of(self, total: int) -> int:
        """That part of `total`, rounded down."""
        return int(total * Decimal(str(self.percent)) / 100)

    def __str__(self) -> str:
        """As written in a file."""
        return f"{self.percent:g}%"


def parse_size(value: object) -> int:
    """Bytes of ``64GiB``, ``1.5GB`` or a plain whole number of bytes; more than 0. Raises ValueError."""
    amount = parse_amount(value)
    if isinstance(amount, Share):
        raise ValueError(f"{value!r}: a percentage has no meaning here, write a size such as 64GiB")  # noqa: TRY004
    return amount


def parse_amount(value: object) -> int | Share:
    """Bytes, or a `Share` for ``25%``. Raises ValueError."""
    if isinstance(value, Share):
        return value
    text = _text(value, "a size")
    number, unit = _split(text, "a size: a number and a unit, such as 64GiB, 1.5GB or 4096", SIZES)
    if unit == "%":
        if not 0 < number <= _PERCENT_MAX:
            raise ValueError(f"{text!r}: a percentage is more than 0% and at most 100%")
        return Share(float(number))
    nbytes = number * SIZES[unit or "B"]
    if nbytes != int(nbytes):
        raise ValueError(f"{text!r} is not a whole number of bytes")
    if nbytes <= 0:
        raise ValueError(f"{text!r}: must be more than 0")
    return int(nbytes)


def parse_share(value: object) -> Share:
    """The `Share` of ``25%``. Raises ValueError."""
    share = parse_amount(value)
    if not isinstance(share, Share):
        raise ValueError(f"{value!r} is not a percentage, such as 25%")  # noqa: TRY004  pydantic collects ValueError
    return share


def parse_seconds(value: object) -> float:
    """Seconds of ``250ms``, ``2s``, ``1h`` or a timedelta; 0 needs no unit. Raises ValueError."""
    if isinstance(value, timedelta):
        return value.total_seconds()
    text = _text(value, "a time")
    number, unit = _split(text, "a time: a number and a unit, such as 250ms, 2s or 1h", TIMES)
    if not unit and number:
        raise ValueError(f"{text!r} needs a unit: {text}ms or {text}s?")
    return float(number * TIMES[unit or "s"])


def parse_interval(value: object) -> float:
    """As `parse_seconds`, and more than 0."""
    seconds = parse_seconds(value)
    if seconds <= 0:
        raise ValueError(f"{value!r}: must be more than 0")
    return seconds


def format_size(nbytes: int) -> str:
    """``8GiB``, ``1.5GiB``, ``300B``: for people and, where it is exact, for files."""
    for unit in ("PiB", "TiB", "GiB", "MiB", "KiB"):
        if abs(nbytes) >= SIZES[unit]:
            return f"{round(nbytes / SIZES[unit], 2):g}{unit}"
    return f"{nbytes}B"


def format_seconds(seconds: float) -> str:
    """``250ms``, ``2s``, ``1h``: the largest unit in which the number is whole."""
    exact = Decimal(str(seconds))
    for unit in ("d", "h", "m", "s", "ms", "us"):
        if exact and exact % TIMES[unit] == 0:
            return f"{int(exact / TIMES[unit])}{unit}"
    return f"{exact:f}s" if exact else "0s"


def shown(value: object, annotation: object = None) -> str:
    """`value` as a file would say it, with the unit that the `annotation` of its field asks for. Secrets are masked."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    parsers = _parsers(annotation)
    if isinstance(value, int) and parsers & {parse_size, parse_amount}:
        return format_size(value)
    if isinstance(value, (int, float)) and parsers & {parse_seconds, parse_interval}:
        return format_seconds(value)
    return str(value)


def kind_of(annotation: object) -> str:
    """What a field takes, in a word for people; empty when it is none of the types of this module."""
    words = {
        parse_size: "size",
        parse_amount: "size or percentage",
        parse_share: "percentage",
        parse_seconds: "time",
        parse_interval: "time",
    }
    return next((word for parser, word in words.items() if parser in _parsers(annotation)), "")


def _parsers(annotation: object) -> set[object]:
    """The parsers of this module among an annotation's validators, also inside ``X | None``."""
    if isinstance(annotation, PlainValidator):
        return {annotation.func}
    inner = (*getattr(annotation, "__metadata__", ()), *get_args(annotation))
    parts = annotation if isinstance(annotation, tuple) else inner
    return set().union(*(_parsers(part) for part in parts))


def _text(value: object, what: str) -> str:
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        raise ValueError(f"a {type(value).__name__} is not {what}")  # noqa: TRY004  pydantic collects ValueError
    return str(value).strip()


def _split(text: str, what: str, units: dict[str, int] | dict[str, Decimal]) -> tuple[Decimal, str]:
    match = _NUMBER.fullmatch(text)
    known = set(units) | ({"%"} if "B" in units else set())
    if match and (not match[2] or match[2] in known):
        return Decimal(match[1]), match[2]
    hint = ""
    if match:
        lower = {unit.lower(): unit for unit in units}
        near = difflib.get_close_matches(match[2].lower(), list(lower), n=1, cutoff=0.5)
        hint = f" (did you mean '{match[1]}{lower[near[0]]}'?)" if near else ""
    raise ValueError(f"{text!r} is not {what}{hint}")


def _size_schema(pattern: str, *examples: str) -> WithJsonSchema:
    return WithJsonSchema({"type": ["integer", "string"], "minimum": 1, "pattern": pattern, "examples": [*examples]})


def _time_schema(*numbers: int) -> WithJsonSchema:
    text = {"type": "string", "pattern": _TIME_PATTERN, "examples": ["250ms", "2s", "1h"]}
    return WithJsonSchema({"anyOf": [text, *({"const": number} for number in numbers)]})


def _amount_text(amount: int | Share) -> str:
    return str(amount) if isinstance(amount, Share) else f"{amount}B"


_SIZE_PATTERN: Final = r"^\d+(\.\d+)?\s*(B|[kKMGTP]B|[KMGTP]iB)?$"
_AMOUNT_PATTERN: Final = r"^\d+(\.\d+)?\s*(%|B|[kKMGTP]B|[KMGTP]iB)?$"
_SHARE_PATTERN: Final = r"^\d+(\.\d+)?\s*%$"
_TIME_PATTERN: Final = r"^\d+(\.\d+)?\s*(us|ms|s|m|h|d)$"

Size: TypeAlias = Annotated[
    int,
    PlainValidator(parse_size),
    PlainSerializer(_amount_text, return_type=str, when_used="json"),
    _size_schema(_SIZE_PATTERN, "64GiB", "1.5GB"),
]
"""Bytes, more than 0."""
Amount: TypeAlias = Annotated[
    int | Share,
    PlainValidator(parse_amount),
    PlainSerializer(_amount_text, return_type=str, when_used="json"),
    _size_schema(_AMOUNT_PATTERN, "64GiB", "25%"),
]
"""Bytes, or a share of something."""
Percentage: TypeAlias = Annotated[
    Share,
    PlainValidator(parse_share),
    PlainSerializer(str, return_type=str, when_used="json"),
    WithJsonSchema({"type": "string", "pattern": _SHARE_PATTERN, "examples": ["25%"]}),
]
"""A share of something."""
Seconds: TypeAlias = Annotated[
    float,
    PlainValidator(parse_seconds),
    PlainSerializer(lambda seconds: f"{seconds:g}s", return_type=str, when_used="json"),
    _time_schema(0),
]
"""Seconds, 0 or more."""
Interval: TypeAlias = Annotated[
    float,
    PlainValidator(parse_interval),
    PlainSerializer(lambda seconds: f"{seconds:g}s", return_type=str, when_used="json"),
    _time_schema(),
]
"""Seconds, more than 0."""
