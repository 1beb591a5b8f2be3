"""What all parts of the model are made of."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field


class Model(BaseModel):
    """Base of all parts of the file."""

    model_config = ConfigDict(extra="forbid", frozen=True)


def no_bool(value: object) -> object:
    """For numbers: YAML's true and false are none."""
    if isinstance(value, bool):
        raise ValueError("should be a whole number, not true or false")  # noqa: TRY004  pydantic collects ValueError
    return value


Count = Annotated[int, Field(ge=1), BeforeValidator(no_bool)]
