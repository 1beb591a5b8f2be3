"""Addresses of peers as text, for those who may not import the configuration."""

from __future__ import annotations

from lmkv.config.peer import parse_address, show_address

__all__ = ["parse_address", "show_address"]
