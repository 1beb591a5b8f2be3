"""The `options:` of a tier with `backend: cpu`."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class CpuOptions(BaseModel):
    """There is nothing to set: the pool is configured under `pool:`, the tier's share of it by its `capacity:`."""

    model_config = ConfigDict(extra="forbid", frozen=True)
