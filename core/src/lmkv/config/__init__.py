"""The configuration of a stack: a YAML file, the environment over it, the machine under it.

    config = load_config("stack.yaml", host=PluginHost.discover())
    limits = config.limits()

Everything that is wrong is reported at once, in one `ConfigError`.
"""

from __future__ import annotations

from lmkv.config.limits import Limits, Machine
from lmkv.config.load import load_config
from lmkv.config.model import (
    BreakerConfig,
    Config,
    LeaseConfig,
    LoggingConfig,
    MetricsConfig,
    PoolConfig,
    QueueConfig,
    ServiceConfig,
    Setting,
    TierConfig,
)
from lmkv.config.schema import json_schema

__all__ = [
    "BreakerConfig",
    "Config",
    "LeaseConfig",
    "Limits",
    "LoggingConfig",
    "Machine",
    "MetricsConfig",
    "PoolConfig",
    "QueueConfig",
    "ServiceConfig",
    "Setting",
    "TierConfig",
    "json_schema",
    "load_config",
]
