"""Fixtures of the rigs, for the test modules beside them."""

from __future__ import annotations

from engine_rig import engine, host, meddler, pages
from service_rig import client, path, served

__all__ = ["client", "engine", "host", "meddler", "pages", "path", "served"]
