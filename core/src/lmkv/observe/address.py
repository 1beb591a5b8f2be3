"""Which addresses never leave the machine."""

from __future__ import annotations

import ipaddress


def loopback(host: str) -> str | None:
    """`host` as a loopback address; None if it is not one. Names other than ``localhost`` are not looked up."""
    if host == "localhost":
        return "127.0.0.1"
    try:
        return host if ipaddress.ip_address(host).is_loopback else None
    except ValueError:
        return None
