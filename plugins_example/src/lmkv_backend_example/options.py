"""The `options:` of a tier with `backend: example`."""

from __future__ import annotations

from pathlib import Path  # noqa: TC003  pydantic needs it when the module is imported

from pydantic import BaseModel, ConfigDict


class ExampleOptions(BaseModel):
    """A folder that exists; nobody else may use it."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    path: Path
