"""Counters, their Prometheus page, and logs."""

from __future__ import annotations

from lmkv.observe.http import MetricsServer, serve_metrics
from lmkv.observe.log import RateLimited, set_up
from lmkv.observe.metrics import Metrics

__all__ = ["Metrics", "MetricsServer", "RateLimited", "serve_metrics", "set_up"]
