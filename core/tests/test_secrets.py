"""Secrets: where they come from, and that nothing prints them."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
from pydantic import BaseModel, ValidationError

from lmkv.secrets import Secret  # noqa: TC001  pydantic needs it

if TYPE_CHECKING:
    from pathlib import Path


class Options(BaseModel):
    password: Secret


@pytest.fixture(params=["text", "env", "file"])
def given(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> object:
    monkeypatch.setenv("LMKV_TEST_SECRET", "p@ss:w/rd")
    (tmp_path / "secret").write_text("p@ss:w/rd\n")
    return {
        "text": "p@ss:w/rd",
        "env": {"env": "LMKV_TEST_SECRET"},
        "file": {"file": str(tmp_path / "secret")},
    }[request.param]


def test_a_secret_is_read_from_each_place_and_printed_nowhere(given: object) -> None:
    options = Options.model_validate({"password": given})
    assert options.password.get_secret_value() == "p@ss:w/rd"
    printed = f"{options} {options!r} {options.model_dump()} {options.model_dump_json()}"
    assert "w/rd" not in printed


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"env": "LMKV_TEST_NOT_SET"}, "LMKV_TEST_NOT_SET is not set"),
        ({"file": "/nonexistent/secret"}, "cannot read /nonexistent/secret: No such file"),
        ({"file": "/dev/null"}, "/dev/null is empty"),
        ({"environment": "X"}, r"\{env: NAME\} or \{file: PATH\}"),
        ({"env": "A", "file": "B"}, r"\{env: NAME\} or \{file: PATH\}"),
    ],
)
def test_what_is_wrong_is_named(given: object, told: str) -> None:
    with pytest.raises(ValidationError, match=told):
        Options.model_validate({"password": given})


def test_the_schema_allows_all_three_forms() -> None:
    assert len(json.loads(json.dumps(Options.model_json_schema()))["properties"]["password"]["anyOf"]) == 3
