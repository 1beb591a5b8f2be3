"""Who may do what: bearer tokens with roles, from a file."""

from __future__ import annotations

import hashlib
import hmac
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from lmkv.errors import ConfigError

if TYPE_CHECKING:
    from pathlib import Path

READ: Final = "read"
NODE: Final = "node"
OPERATE: Final = "operate"

RIGHTS: Final[dict[str, frozenset[str]]] = {
    READ: frozenset({READ}),
    NODE: frozenset({READ, NODE}),
    OPERATE: frozenset({READ, NODE, OPERATE}),
}
"""Role → what it may do: look up and watch; be a node; change what lies where."""

MAX_FILE: Final = 1 << 20
MIN_TOKEN: Final = 16
MAX_TOKEN: Final = 512
_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_TOKEN: Final = re.compile(r"[\x21-\x7e]+")
_HASHED: Final = "sha256:"
_DIGEST: Final = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, slots=True)
class Principal:
    """Whoever sent a request."""

    name: str
    role: str

    def may(self, right: str) -> bool:
        """Whether the role has a right: `READ`, `NODE` or `OPERATE`."""
        return right in RIGHTS[self.role]


ANYBODY: Final = Principal("anybody", OPERATE)
"""Of a controller without tokens, which listens on the loopback only."""


@dataclass(frozen=True, slots=True)
class _Entry:
    principal: Principal
    digest: bytes = field(repr=False)
    """SHA-256 of the token."""


class Tokens:
    """The tokens of a file. Only their hashes stay in memory.

    Thread-safe: `load` replaces all at once.
    """

    def __init__(self, path: Path) -> None:
        """Reads the file; raises `ConfigError` as `load` does."""
        self._path = path
        self._entries: tuple[_Entry, ...] = ()
        self.load()

    def __len__(self) -> int:
        """Number of tokens."""
        return len(self._entries)

    def load(self) -> None:
        """Read the file again; on an error what was there stays.

        Raises:
            ConfigError: the file cannot be read, a line is not ``name role token``, a name or token is there twice.
        """
        self._entries = _parse(_read(self._path), self._path)

    def find(self, token: str) -> Principal | None:
        """Whose token it is. Takes as long for a wrong one as for any other."""
        digest = hashlib.sha256(token.encode("utf-8", "surrogateescape")).digest()
        found: Principal | None = None
        for entry in self._entries:
            if hmac.compare_digest(entry.digest, digest):
                found = entry.principal
        return found


def _read(path: Path) -> str:
    try:
        with path.open("rb") as file:
            content = file.read(MAX_FILE + 1)
        if len(content) > MAX_FILE:
            raise ConfigError(f"--tokens {path}: more than {MAX_FILE} bytes: this is no file of tokens")
        return content.decode()
    except OSError as error:
        raise ConfigError(f"--tokens {path}: cannot be read: {error.strerror}") from error
    except UnicodeDecodeError:
        raise ConfigError(f"--tokens {path}: is no UTF-8 text") from None


def _parse(text: str, path: Path) -> tuple[_Entry, ...]:
    entries: list[_Entry] = []
    names: set[str] = set()
    digests: set[bytes] = set()
    for number, line in enumerate(text.splitlines(), 1):
        words = line.split()
        if not words or words[0].startswith("#"):
            continue
        place = f"--tokens {path}, line {number}"  # and never the line itself
        entry = _entry(words, place)
        if entry.principal.name in names:
            raise ConfigError(f"{place}: the name {entry.principal.name!r} is there twice")
        if entry.digest in digests:
            raise ConfigError(f"{place}: the same token as in a line above")
        names.add(entry.principal.name)
        digests.add(entry.digest)
        entries.append(entry)
    if not entries:
        raise ConfigError(f"--tokens {path}: there is no token in it; a line is: name role token")
    return tuple(entries)


def _entry(words: list[str], place: str) -> _Entry:
    if len(words) != 3:  # noqa: PLR2004  as the message says
        raise ConfigError(f"{place}: {len(words)} words; a line is: name role token")
    name, role, token = words
    if not _NAME.fullmatch(name):
        raise ConfigError(f"{place}: a name is 1 to 64 letters, digits, dots, dashes and underscores")
    if role not in RIGHTS:
        raise ConfigError(f"{place}: the second word is a role: {', '.join(RIGHTS)}")
    if token.startswith(_HASHED):
        digits = token.removeprefix(_HASHED).lower()
        if not _DIGEST.fullmatch(digits):
            raise ConfigError(f"{place}: after {_HASHED} come the 64 hexadecimal digits of the token's SHA-256")
        return _Entry(Principal(name, role), bytes.fromhex(digits))
    if not MIN_TOKEN <= len(token) <= MAX_TOKEN or not _TOKEN.fullmatch(token):
        raise ConfigError(
            f"{place}: a token has {MIN_TOKEN} to {MAX_TOKEN} printable ASCII characters: `openssl rand -hex 32`"
        )
    return _Entry(Principal(name, role), hashlib.sha256(token.encode()).digest())
