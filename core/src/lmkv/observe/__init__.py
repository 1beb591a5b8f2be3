"""Counters, their Prometheus page, and logs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lmkv.observe.log import RateLimited, set_up
from lmkv.observe.metrics import Metrics

if TYPE_CHECKING:
    from lmkv.observe.http import MetricsServer, serve_metrics

__all__ = ["Metrics", "MetricsServer", "RateLimited", "serve_metrics", "set_up"]


def __getattr__(name: str) -> object:
    """The page's server is imported by who serves one: http.server takes longer than all the rest."""
    if name in {"MetricsServer", "serve_metrics"}:
        from lmkv.observe import http  # noqa: PLC0415

        return getattr(http, name)
    raise AttributeError(f"module 'lmkv.observe' has no attribute {name!r}")
