"""GPU connectors: copies between the engine's pages and memory objects, per device."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lmkv.errors import ConfigError
from lmkv.gpu.base import CopyJob, GPUConnector
from lmkv.gpu.cpu import CPUConnector

if TYPE_CHECKING:
    from collections.abc import Sequence

    from lmkv.gpu.base import EngineBuffer
    from lmkv.layout import PageLayout

__all__ = ["CPUConnector", "CopyJob", "GPUConnector", "connector_for"]


def connector_for(device: str, layout: PageLayout, buffers: Sequence[EngineBuffer]) -> GPUConnector:
    """The connector for engine memory on `device`: its kind, and after a colon its number, as in `cuda:1`.

    Raises:
        ConfigError: no connector for that kind of device, or the buffers don't fit the layout.
    """
    kind = device.partition(":")[0]
    if kind == "cpu":
        return CPUConnector(layout, buffers)
    raise ConfigError(f"KV memory on device {device!r} is not supported: the only connector is for cpu")
