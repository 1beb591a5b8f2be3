"""Secrets in options: given as they are, or better as the name of an environment variable or a file that holds them.

Backends and codecs annotate a field with `Secret`; the value is a `pydantic.SecretStr`, masked wherever it is printed.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Final, TypeAlias

from pydantic import BeforeValidator, SecretStr, WithJsonSchema

MAX_BYTES: Final = 1 << 16
"""A file above this is no secret but a mistake."""


def resolve_secret(value: object) -> object:
    """The text behind ``{env: NAME}`` or ``{file: PATH}``, without the line end of the file; else `value` itself.

    Raises:
        ValueError: there is no such variable or file, it is empty, or the mapping is another one.
    """
    if not isinstance(value, dict):
        return value
    if set(value) == {"env"} and isinstance(value["env"], str):
        text = os.environ.get(value["env"], "")
        if not text:
            raise ValueError(f"environment variable {value['env']} is not set, or empty")
        return text
    if set(value) == {"file"} and isinstance(value["file"], str):
        return _read(Path(value["file"]).expanduser())
    raise ValueError("is a text, {env: NAME} or {file: PATH}")


def _read(path: Path) -> str:
    try:
        with path.open("rb") as file:
            content = file.read(MAX_BYTES + 1)
        text = content.decode().rstrip("\r\n")
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror}") from error
    except UnicodeDecodeError:
        raise ValueError(f"{path} is no UTF-8 text") from None
    if not text or len(content) > MAX_BYTES:
        raise ValueError(f"{path} is {'too large for a secret' if text else 'empty'}")
    return text


def _mapping(name: str) -> dict[str, object]:
    properties = {name: {"type": "string"}}
    return {"type": "object", "properties": properties, "required": [name], "additionalProperties": False}


Secret: TypeAlias = Annotated[
    SecretStr,
    BeforeValidator(resolve_secret),
    WithJsonSchema({"anyOf": [{"type": "string"}, _mapping("env"), _mapping("file")]}),
]
"""``text``, ``{env: NAME}`` or ``{file: PATH}``."""
