"""URLs of a store: what they say, as the options that they stand for; and how they are shown, without the password.

    redis://user:password@host:6379/0            one server; `rediss://`: with TLS
    unix://user:password@/run/redis.sock?db=0    one server, by its socket
    redis+sentinel://…@host:26379,host,host/service/0
    redis+cluster://…@host:6379,host,host        some nodes, the others are found

User and password are percent-encoded. No message of this module contains any part of what could be a password.
"""

from __future__ import annotations

import re
from typing import Final
from urllib.parse import unquote

PORT: Final = 6379
SENTINEL_PORT: Final = 26379
_SCHEMES: Final = {
    "redis": ("server", False),
    "rediss": ("server", True),
    "unix": ("socket", False),
    "redis+sentinel": ("sentinel", False),
    "rediss+sentinel": ("sentinel", True),
    "redis+cluster": ("cluster", False),
    "rediss+cluster": ("cluster", True),
}
_MASKED: Final = re.compile(r"^([^:/@]*://[^:/@]*):.*@", re.DOTALL)
_PORT_MAX: Final = 65535
_FORMS: Final = "redis://[user:password@]host[:port][/db]"


def mask_url(text: str) -> str:
    """``redis://user:**********@host``. Of a malformed URL rather more is hidden than less."""
    masked = _MASKED.sub(r"\1:**********@", text)
    return masked if "://" in text else "**********"


def parse_address(text: str, default_port: int) -> tuple[str, int]:
    """Host and port of ``host``, ``host:port``, ``[2001:db8::1]:port``. Raises ValueError."""
    if "@" in text or "://" in text:  # not repeated: there may be a password in it
        raise ValueError("is no address but a URL: write host or host:port, or give it as url")
    host, rest = text, ""
    if text.startswith("["):
        host, bracket, rest = text[1:].partition("]")
        if not bracket or (rest and not rest.startswith(":")):
            raise ValueError(f"{text!r} is no address: write [2001:db8::1]:6379")
        rest = rest[1:] if rest else str(default_port)
    elif text.count(":") > 1:
        raise ValueError(f"{text!r}: an IPv6 address stands in brackets, such as [2001:db8::1]:6379")
    else:
        host, colon, rest = text.partition(":")
        rest = rest if colon else str(default_port)
    if not host or re.search(r"[\s/@?#%]", host):
        raise ValueError(f"{text!r} is no address: write host or host:port")
    if not rest.isascii() or not rest.isdecimal() or not 0 < int(rest) <= _PORT_MAX:
        raise ValueError(f"{text!r}: the port is a number from 1 to {_PORT_MAX}")
    return host, int(rest)


def show_address(host: str, port: int) -> str:
    """``host:port``, with brackets where needed."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def parse_url(text: str) -> dict[str, object]:
    """The options that a URL stands for, only those that it has.

    Raises:
        ValueError: it is none of the forms above.
    """
    scheme, separator, rest = text.partition("://")
    if not separator or scheme not in _SCHEMES:
        raise ValueError(f"is no URL of a Redis: write {_FORMS}, or one of {', '.join(f'{s}://' for s in _SCHEMES)}")
    if "#" in rest:
        raise ValueError("has a '#': in a user or password it is written %23")
    kind, tls = _SCHEMES[scheme]
    rest, _, query = rest.partition("?")
    authority, slash, path = rest.partition("/")
    userinfo, at, hosts = authority.rpartition("@")
    if not at and ("@" in path or "@" in query):
        raise ValueError("has an '@' behind a '/' or '?': in a user or password those are written %2F and %3F")
    if query and kind != "socket":
        raise ValueError("has a '?', which only unix:// takes; the other settings are options of the tier")
    place = _socket(hosts, slash + path, query) if kind == "socket" else _hosts(kind, hosts, path)
    return ({"tls": True} if tls else {}) | (_login(userinfo) if at else {}) | place


def _hosts(kind: str, hosts: str, path: str) -> dict[str, object]:
    parts = [unquote(part) for part in path.split("/") if part]
    if kind == "server":
        if "," in hosts:
            raise ValueError("names several hosts: write redis+sentinel:// or redis+cluster://")
        host, port = _address(hosts, PORT)
        return {"host": host, "port": port, **_database(parts)}
    if kind == "cluster":
        return {"cluster": _addresses(hosts, PORT), **_database(parts)}
    service: dict[str, object] = {"service": parts[0]} if parts else {}
    return {"sentinels": _addresses(hosts, SENTINEL_PORT), **service, **_database(parts[1:])}


def _login(userinfo: str) -> dict[str, object]:
    if "@" in userinfo:
        raise ValueError("has several '@': in a user or password it is written %40")
    user, colon, password = userinfo.partition(":")
    if ":" in password:
        raise ValueError("has a ':' in the password: there it is written %3A")
    if re.search(r"%(?![0-9A-Fa-f]{2})", userinfo):
        raise ValueError("has a '%' in user or password that begins no percent-encoding: it is written %25")
    found: dict[str, object] = {}
    try:
        if user:
            found["username"] = unquote(user, errors="strict")
        if colon:
            found["password"] = unquote(password, errors="strict")
    except UnicodeDecodeError:
        raise ValueError("user and password are percent-encoded UTF-8, these are not") from None
    return found


def _addresses(hosts: str, port: int) -> tuple[str, ...]:
    return tuple(show_address(*_address(each, port)) for each in hosts.split(","))


def _address(text: str, port: int) -> tuple[str, int]:
    """As `parse_address`; what is at fault may be a piece of a password, so it is not repeated."""
    try:
        return parse_address(text, port)
    except ValueError:
        hint = "is a ':', '@' or '/' in the password percent-encoded?"
        raise ValueError(f"has no proper host:port (IPv6 in brackets; {hint})") from None


def _socket(hosts: str, path: str, query: str) -> dict[str, object]:
    if hosts or len(path) <= 1:
        raise ValueError("names no socket: write unix:///run/redis.sock, three slashes")
    found: dict[str, object] = {"socket": unquote(path)}
    if query:
        name, _, value = query.partition("=")
        if name != "db":
            raise ValueError("takes only ?db=number")
        found |= _database([value])
    return found


def _database(parts: list[str]) -> dict[str, object]:
    if not parts:
        return {}
    if len(parts) > 1 or not parts[0].isascii() or not parts[0].isdecimal():
        raise ValueError("has more behind the host than a database number")
    return {"db": int(parts[0])}
