"""Options of the core's codecs. Imports no codec library."""

from __future__ import annotations

import base64
import binascii
import re
from typing import Annotated, Final

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, SecretStr, field_validator, model_validator

from lmkv.secrets import Secret  # noqa: TC001  pydantic reads the annotations

KEY_BYTES: Final = (16, 24, 32)
_HEX: Final = frozenset("0123456789abcdefABCDEF")


class CodecOptions(BaseModel):
    """Base of all options: unknown keys are faults."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class ZstdOptions(CodecOptions):
    """Options of `zstd`."""

    level: int = Field(
        default=1, ge=-7, le=19, strict=True, description="Higher is smaller and slower; below 1 is faster still."
    )


def key_bytes(text: str) -> bytes:
    """The key that `text` is in hexadecimal digits or base64 (either alphabet, padding optional).

    Raises:
        ValueError: it is neither, or not of 16, 24 or 32 bytes; the message does not contain it.
    """
    text = text.strip()
    try:
        if len(text) // 2 in KEY_BYTES and _HEX.issuperset(text):
            key = bytes.fromhex(text)
        else:
            plain = text.replace("-", "+").replace("_", "/").rstrip("=")
            key = base64.b64decode(plain + "=" * (-len(plain) % 4), validate=True)
    except (ValueError, binascii.Error):
        raise ValueError(
            "a key is written in base64 or hexadecimal digits: `openssl rand -base64 32` makes one"
        ) from None
    if len(key) not in KEY_BYTES:
        raise ValueError(f"a key of {len(key)} bytes: AES takes 16, 24 or 32 (`openssl rand -base64 32` makes one)")
    if len(set(key)) == 1:
        raise ValueError("a key of one repeated byte is none: `openssl rand -base64 32` makes one")
    return key


def _is_key(value: SecretStr) -> SecretStr:
    key_bytes(value.get_secret_value())
    return value


_DIGITS: Final = 2 * min(KEY_BYTES)
_ID: Final = r"^[A-Za-z0-9._-]{1,32}$"
KeyId = Annotated[str, Field(pattern=_ID)]
"""Stands in every frame that was written with the key, in the clear."""


def _is_name(text: object) -> bool:
    """A name of a key, and not the hexadecimal digits of one."""
    return (
        isinstance(text, str) and re.match(_ID, text) is not None and not (len(text) == _DIGITS and set(text) <= _HEX)
    )


class AesGcmOptions(CodecOptions):
    """Options of `aes-gcm`."""

    keys: dict[KeyId, Annotated[Secret, AfterValidator(_is_key)]] = Field(
        min_length=1, description="Keys by a name of their own; frames of all of them can be read."
    )
    use: KeyId | None = Field(
        default=None, description="Name of the key to write with; may be left out where there is one key only."
    )

    @field_validator("keys", mode="before")
    @classmethod
    def _named(cls, value: object) -> object:
        """Here and not by the type of the names: what stands in the place of a name may be a key, and is not told."""
        if isinstance(value, dict) and not all(map(_is_name, value)):
            raise ValueError("are written {name: key}; a name is 1 to 32 letters, digits, '.', '_', '-', and no key")
        return value

    @model_validator(mode="after")
    def _use_one_of_them(self) -> AesGcmOptions:
        names = ", ".join(self.keys)
        if self.use is None and len(self.keys) > 1:
            raise ValueError(f"use: which of the keys {names} is to be written with?")
        if self.use is not None and self.use not in self.keys:
            shown = repr(self.use) if _is_name(self.use) else "of that name"
            raise ValueError(f"use: there is no key {shown}; keys: {names}")
        return self

    @property
    def current(self) -> str:
        """Name of the key to write with."""
        return self.use or next(iter(self.keys))
