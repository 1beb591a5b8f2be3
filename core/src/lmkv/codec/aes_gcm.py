"""Encryption with AES-GCM, through the `cryptography` package.

The encoded payload: the byte 1, the length of the key's name and the name, 8 bytes that tell the key from others (of
SHA-256, from which nothing of it can be computed), a nonce of 12 bytes, ciphertext, tag of 16 bytes. Authenticated are
besides: everything in front of the nonce, the chunk's key, its place in the prompt and its page prefixes, the payload's
length. So a frame that somebody without the key has changed, exchanged for another chunk's, or relabelled is refused.
"""

from __future__ import annotations

import hashlib
import os
import struct
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from lmkv.codec.options import key_bytes
from lmkv.errors import WRONG_KEY, FrameError, UnreadableError
from lmkv.specs import Codec

if TYPE_CHECKING:
    from collections.abc import Sequence

    from lmkv.codec.options import AesGcmOptions
    from lmkv.specs import Buffer, Payload

NONCE: Final = 12
TAG: Final = 16
_VERSION: Final = 1
_CHECK: Final = 8


class _Key(NamedTuple):
    cipher: AESGCM
    header: bytes
    """What stands in front of the nonce."""


class AesGcmCodec(Codec):
    """See the module. Its work releases the GIL. The nonce is random: a key is good for some billions of frames."""

    name = "aes-gcm"
    seals = True

    def __init__(self, options: AesGcmOptions) -> None:
        self._keys = {name: _key(name, key_bytes(secret.get_secret_value())) for name, secret in options.keys.items()}
        self._current = self._keys[options.current]

    def encode(self, raw: memoryview, about: Payload) -> Sequence[Buffer]:
        """As the module says, with a fresh nonce."""
        key, nonce = self._current, os.urandom(NONCE)
        sealed = np.empty(len(raw) + TAG, np.uint8).data
        key.cipher.encrypt_into(nonce, raw, _associated(key.header, about), sealed)
        return key.header, nonce, sealed

    def decode(self, encoded: memoryview, into: memoryview, about: Payload) -> None:
        """Decrypt into `into`.

        Raises:
            FrameError: cut short, of another length, or not authentic.
            UnreadableError: there is no such key here, or another one under its name.
        """
        header = bytes(encoded[: 2 + (encoded[1] if len(encoded) > 1 else 0) + _CHECK])
        body = encoded[len(header) :]
        if len(header) < 2 + _CHECK or header[0] != _VERSION or len(body) != NONCE + len(into) + TAG:
            raise FrameError(f"codec aes-gcm: {len(encoded)} bytes are none of {len(into)}")
        key = self._key(header)
        try:
            key.cipher.decrypt_into(body[:NONCE], body[NONCE:], _associated(header, about), into)
        except InvalidTag:
            raise FrameError("codec aes-gcm: not authentic: damaged, or changed by somebody without the key") from None

    def _key(self, header: bytes) -> _Key:
        name = header[2:-_CHECK].decode("ascii", "replace")
        found = self._keys.get(name)
        if found is None:
            known = ", ".join(map(repr, self._keys))
            raise UnreadableError(f"encrypted with key {name!r}, which is not among the keys given here ({known})")
        if found.header != header:
            text = f"encrypted with another key than the one given here as {name!r}: give the right one"
            raise UnreadableError(text, kind=WRONG_KEY)
        return found


def _key(name: str, key: bytes) -> _Key:
    check = hashlib.sha256(b"lmkv aes-gcm key check\0" + key).digest()[:_CHECK]
    return _Key(AESGCM(key), bytes((_VERSION, len(name))) + name.encode("ascii") + check)


def _associated(header: bytes, about: Payload) -> bytes:
    key = about.key
    fixed = struct.pack("<16sI32sQ", key.namespace, key.shard, key.digest, about.raw_bytes)
    return fixed + about.context + header
